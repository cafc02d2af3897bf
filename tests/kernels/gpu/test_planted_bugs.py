"""Every bug planted in the kernels of sm_90 makes an output that the error rule calls wrong."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from planted_bugs_sm90 import BUGS, wrong_numbers
from planting import run_all

from stable_attention import configs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or configs.arch_of(torch.device("cuda", 0)) != "sm90",
        reason="needs an sm_90 GPU",
    ),
]
JOBS = min(16, len(os.sched_getaffinity(0)))
"""Children at a time, each of which compiles for most of its life."""


def test_every_bug_is_caught_and_the_unchanged_kernels_pass() -> None:
    controls = {f"control: {line}": [line] for line in sorted({bug.caught_by for bug in BUGS})}
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        verdicts = run_all(BUGS, jobs=JOBS, controls=controls, start="spawn")
    # Without a problem a child has nothing to say of how.
    alarms = {name: verdicts[name]["how"] for name in controls if verdicts[name]["how"]}
    assert not alarms, alarms
    missed = {bug.name: verdicts[bug.name]["how"] for bug in BUGS}
    missed = {name: how for name, how in missed.items() if not wrong_numbers(verdicts[name])}
    assert not missed, missed
