"""Processes forked from one that has imported torch and Megatron-Core, and ranks that answer calls.

Importing them takes a process 7 s of processor time, and the suite starts about a hundred ranks.
Ranks of one server share its hash seed; tests of the launcher start ranks that do not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Self
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


def answer_calls(connection: Connection, play: Callable[..., Any]) -> None:
    """In a rank: ``play`` of every call that comes, until one is None."""
    for call in iter(connection.recv, None):
        try:
            answer = (True, play(*call))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


class Served:
    """Ranks that import once and then answer one call after another, each over its pipe."""

    def __init__(
        self, serve: Callable[..., None], each: Iterable[tuple[Any, ...]], *, cpu: bool
    ) -> None:
        """Start ``serve(connection, path, *arguments)`` for the arguments of each rank."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        made: Any = context() if cpu else multiprocessing.get_context("spawn")
        self.processes, self.pipes = [], []
        for arguments in each:
            here, there = made.Pipe()
            process = made.Process(
                target=serve, args=(there, list(sys.path), *arguments), daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a rank that was killed
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def answers(self, what: str, ranks: Iterable[int], seconds: float) -> list[Any]:
        """What the ranks returned. All are waited for: an answer left would be the next call's.

        Raises:
            AssertionError: a rank raised.
            TimeoutError: a rank said nothing for so many seconds.
        """
        values, faults = [], []
        for rank in ranks:
            if not self.pipes[rank].poll(seconds):
                late = f"rank {rank} of {what} gave no answer in {seconds:g} s"
                raise TimeoutError("\n".join([late, *faults]))
            good, value = self.pipes[rank].recv()
            values.append(value)
            if not good:
                faults.append(f"rank {rank} of {what}:\n{value}")
        if faults:
            raise AssertionError("\n".join(faults))
        return values
