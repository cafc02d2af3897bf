"""Emulated ranks on the GPUs, many cases at once in processes of their own.

Two purposes: the whole grid without a second GPU, and a full cache of compiled kernels before real
ranks play the same cases (Triton compiles for seconds a kernel, and one rank's compiler would have
all others wait).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from cp_cases import Case
from cuda_devices import cuda_devices

PROCESSES = 12
"""For each GPU."""
_judged: dict[str, list[str]] = {}


def _start(path: list[str], number: Any, devices: int) -> None:
    sys.path[:] = path
    warnings.simplefilter("ignore")
    from megatron_patch.runtime.environment import visible_devices

    with number.get_lock():
        # Not set_device, which the threads of an emulation would not see.
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices([number.value % devices])
        number.value += 1


def _judge(cases: list[Case]) -> list[list[str]]:
    return [_complaints(case) for case in cases]


def _complaints(case: Case) -> list[str]:
    from cp_cases import complaints, make_inputs, truth, uncut
    from emulated import found, run

    try:
        given = make_inputs(case, "cuda")
        mine = {name: x.cpu() for name, x in found(run(case, given)).items()}
        exact = {name: x.cpu() for name, x in truth(case, given).items()}
        whole = {name: x.cpu() for name, x in uncut(case, given).items()}
        return complaints(case, mine, exact, whole)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:500]]


def _jobs(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that run the same kernels stay together: only one process compiles these."""
    jobs: dict[Case, list[Case]] = {}
    for case in cases:
        alike = dataclasses.replace(
            case, size=0, mode="", s=0, tail=0, lengths=(), gradient_wire="fp32"
        )
        jobs.setdefault(alike, []).append(case)
    return list(jobs.values())


def judge(cases: Iterable[Case]) -> dict[str, list[str]]:
    """Case in words -> what is wrong with it; each is run once a session."""
    every = {str(case): case for case in cases}
    jobs = _jobs(case for name, case in every.items() if name not in _judged)
    if jobs:
        devices, cores = max(1, cuda_devices()), os.cpu_count() or 2
        workers = max(1, min(PROCESSES * devices, cores - 2, len(jobs)))
        # Before they start: finding `_start` imports torch, which counts its threads then. One for
        # every core in every process, all waiting actively, leaves no core for anything else.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            workers,
            mp_context=context,
            initializer=_start,
            initargs=(list(sys.path), context.Value("i", 0), devices),
        ) as pool:
            for job, answers in zip(jobs, pool.map(_judge, jobs), strict=True):
                _judged.update(zip(map(str, job), answers, strict=True))
    return {name: _judged[name] for name in every}
