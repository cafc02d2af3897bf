"""Emulated ranks on one GPU, many cases at once in processes of their own.

Two purposes: the whole grid without a second GPU, and a full cache of compiled kernels before real
ranks play the same cases (Triton compiles for seconds a kernel, and one rank's compiler would have
all others wait).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from cp_cases import Case

PROCESSES = 12
_judged: dict[str, list[str]] = {}


def _start(path: list[str]) -> None:
    sys.path[:] = path
    warnings.simplefilter("ignore")


def _judge(case: Case) -> list[str]:
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


def judge(cases: Iterable[Case]) -> list[str]:
    """What is wrong with any of them; each is run once a session."""
    cases = list(cases)
    new = [case for case in cases if str(case) not in _judged]
    if new:
        workers = max(1, min(PROCESSES, (os.cpu_count() or 2) - 2, len(new)))
        # Before they start: finding `_start` imports torch, which counts its threads then. One for
        # every core in every process, all waiting actively, leaves no core for anything else.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start, initargs=(list(sys.path),)
        ) as pool:
            for case, wrong in zip(new, pool.map(_judge, new), strict=True):
                _judged[str(case)] = wrong
    return [f"{case}: {text}" for case in cases for text in _judged[str(case)]]
