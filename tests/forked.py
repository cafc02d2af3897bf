"""Processes forked from one that has imported torch and Megatron-Core.

Importing them takes a process 7 s of processor time, and the suite starts about a hundred ranks.
Ranks of one server share its hash seed; tests of the launcher start ranks that do not.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from unittest import mock

# What `cpu_mode.install` imports before it replaces anything of torch.
PRELOADED = ["torch._dynamo", "megatron.core.tensor_parallel.random"]


def context() -> BaseContext:
    """Context of processes on the CPU, whose kernels are interpreted."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        forkserver.ensure_running()  # with this environment, which these imports read
    return found
