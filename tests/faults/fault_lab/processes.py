"""Killed, stopped, stuck and signaled processes."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fault_lab import hooks
from fault_lab.case import Case, Scene
from fault_lab.lab import Hook, Outcome, Running

Inject = Callable[[Scene], Outcome]
PEER = r"Connection (closed by peer|reset by peer)"
"""torchrun tells of whoever it saw failing first: the killed rank, or one that missed it."""
SIGKILLED = r"Signal 9 \(SIGKILL\) received|" + PEER


def in_rank(rank: int, place: str, do: Callable[[], None], *, step: int = 5) -> Hook:
    """Hook: ``do`` once at ``place`` on one rank."""
    return lambda mine: hooks.at(place, do, step=step) if mine == rank else None


def played(rank: int, place: str, do: Callable[[], None], step: int = 5) -> Inject:
    """``Case.inject``: one attempt with a fault inside one rank."""
    return lambda scene: scene.play(hook=in_rank(rank, place, do, step=step))


def beside(act: Callable[[Running], None], *, step: int = 4) -> Inject:
    """``Case.inject``: one attempt, ``act`` from outside after ``step``; steps are slowed down."""

    def outside(attempt: Running) -> None:
        attempt.wait_step(step)
        act(attempt)

    return lambda scene: scene.play(hook=slow_steps(), outside=outside)


def slow_steps(seconds: float = 0.1) -> Hook:
    """Hook: every forward pass takes longer."""
    return lambda rank: hooks.PLACES["forward"](lambda: time.sleep(seconds))


# ------------------------------------------------------------------------------------------- kills


def kill(name: str, place: str, rank: int, step: int, *sets: str, quick: bool = False) -> Case:
    return Case(name=f"kill -9 {name}", inject=played(rank, place, hooks.kill, step),
                says=SIGKILLED, sets=sets, quick=quick)  # fmt: skip


def kill_while_loading(scene: Scene) -> Outcome:
    scene.first_part()
    return scene.play(hook=in_rank(1, "load", hooks.kill, step=0))


def kill_everyone(attempt: Running) -> None:
    pids = [attempt.rank_pid(rank) for rank in range(attempt.ranks)]
    attempt.mark("SIGKILL to all ranks")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def crash() -> None:
    hooks.injected("an exception")
    raise RuntimeError("a fault of the program")


def leave() -> None:
    hooks.injected("sys.exit(0)")
    raise SystemExit(0)


def out_of_memory() -> None:
    """The address space ends here; the next allocation fails."""
    hooks.injected("RLIMIT_AS at the present size")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    ballast = [bytearray(1 << 26) for _ in range(100)]
    del ballast


KILLED = [
    kill("during start-up, before the rendezvous", "rendezvous", 1, 0),
    kill("during start-up, while the model is built", "model", 1, 0),
    kill("while a batch is read", "data", 1, 5),
    kill("in the forward pass", "forward", 1, 5),
    kill("in the backward pass", "backward", 1, 5),
    kill("before the gradients are reduced", "reduction", 1, 5),
    kill("in the optimizer", "update", 1, 5),
    kill("between two steps, first rank", "step end", 0, 5),
    kill("in an evaluation", "evaluation", 1, 4, "training.eval_interval=2"),
    kill("as a save begins", "save begin", 0, 6),
    kill("while shards are written", "save write", 1, 6, quick=True),
    kill("shards written, not hashed", "save hash", 1, 6),
    kill("before the index of the shards", "save index", 0, 6),
    kill("manifest written, directory not renamed", "save manifest", 0, 6, quick=True),
    kill("checkpoint complete, pointer not moved", "save pointer", 0, 6),
    kill("while an old checkpoint is deleted", "save retire", 0, 6, "checkpoint.keep_last=1"),
    kill("in a background save", "save write", 1, 6, "checkpoint.async_save=true"),
    kill("at the end, before FINISHED", "finish", 0, 8),
    kill("of a rank that reads ahead", "forward", 1, 5, "data.num_workers=1"),
    kill("under tensor parallelism", "forward", 1, 5, "parallel.tensor_model_parallel_size=2"),
    kill("of a pipeline stage", "backward", 1, 5, "parallel.pipeline_model_parallel_size=2"),
    Case(name="kill -9 of one of four ranks", says=SIGKILLED, ranks=4,
         inject=played(2, "backward", hooks.kill)),
    Case(name="kill -9 at the end, after FINISHED", says=SIGKILLED, resumes=False,
         inject=played(1, "shutdown", hooks.kill, 8)),
    Case(name="kill -9 while a checkpoint is loaded", says=SIGKILLED, inject=kill_while_loading),
    Case(name="kill -9 of all ranks at once", says=SIGKILLED, inject=beside(kill_everyone)),
    # The kernel kills its ranks with it.
    Case(name="kill -9 of torchrun", code=-9,
         inject=beside(lambda attempt: attempt.signal(signal.SIGKILL))),
    Case(name="segmentation fault", says=r"Signal 11 \(SIGSEGV\) received|" + PEER,
         inject=played(1, "backward", hooks.send(signal.SIGSEGV))),
    Case(name="exception in one rank", says="RuntimeError: a fault of the program",
         inject=played(1, "forward", crash)),
    Case(name="one rank leaves with exit code 0", says=PEER, inject=played(1, "forward", leave)),
    Case(name="out of memory (address space used up)", inject=played(1, "forward", out_of_memory),
         says=r"MemoryError|can't allocate memory"),
]  # fmt: skip


# ----------------------------------------------------------------------------------------- signals


def graceful(name: str, inject: Inject, word: str, *, code: int = 0, **more: bool) -> Case:
    """All ranks stop after the same step, with a checkpoint of it."""
    return Case(name=name, inject=inject, says=f"stopped gracefully after step.*{word}", code=code,
                most_lost=0, **more)  # fmt: skip


def to_rank(number: signal.Signals) -> Inject:
    return beside(lambda attempt: attempt.signal(number, rank=1))


def to_launcher(number: signal.Signals) -> Inject:
    return beside(lambda attempt: attempt.signal(number))


TERM = in_rank(1, "save write", hooks.send(signal.SIGTERM), step=3)
SIGNALS = [
    graceful("SIGTERM to one rank", to_rank(signal.SIGTERM), "SIGTERM", quick=True),
    graceful("SIGTERM to torchrun", to_launcher(signal.SIGTERM), "SIGTERM", code=1),
    graceful("SIGINT to torchrun (Ctrl-C)", to_launcher(signal.SIGINT), "SIGINT", code=1),
    graceful("SIGTERM inside a save", lambda scene: scene.play(hook=TERM), "SIGTERM"),
    graceful("SIGTERM inside a background save",
             lambda scene: scene.play("checkpoint.async_save=true", hook=TERM), "SIGTERM"),
    Case(name="SIGHUP to one rank (terminal gone)", inject=to_rank(signal.SIGHUP),
         says=r"Signal 1 \(SIGHUP\) received|" + PEER),
]  # fmt: skip


# ------------------------------------------------------------------------------------------- hangs


def stop_for_a_while(attempt: Running) -> None:
    attempt.signal(signal.SIGSTOP, rank=1)
    time.sleep(3)
    os.kill(attempt.rank_pid(1), signal.SIGCONT)


def sleep() -> None:
    hooks.injected("asleep")
    time.sleep(600)


def hold_the_gil() -> None:
    """Native code that never gives Python's lock back: no handler, no thread runs any more."""
    hooks.injected("native code holds the GIL")
    mutex = ctypes.create_string_buffer(64)  # of zeros: free
    for _ in range(2):  # a signal ends a sleep, and a fast run with it; a mutex waits on
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def busy() -> None:
    """Python code that does not come to an end."""
    hooks.injected("an endless loop")
    while True:
        pass


def hang(
    name: str,
    do: Callable[[], None],
    place: str = "forward",
    *,
    step: int = 5,
    more: str = "",
    quick: bool = False,
) -> Case:
    """The other rank reports it. The limit is short for the broken attempt alone: a slow machine
    must not be taken for a hang where the run is resumed.
    """
    hook = in_rank(1, place, do, step=step)
    sets = [f"faults.{item}" for item in ("hang_seconds=5", more) if item]
    return Case(name=name, inject=lambda scene: scene.play(*sets, hook=hook),
                says=r"^hang at step \d+: rank 1", rank_code=6, found_within=30,
                quick=quick)  # fmt: skip


HANGS = [
    hang("SIGSTOP of a rank", hooks.send(signal.SIGSTOP)),
    hang("a rank loops for ever", busy, quick=True),
    hang("native code holds the GIL", hold_the_gil),
    hang("a rank hangs in start-up", sleep, "model", step=0, more="hang_startup_seconds=10"),
    hang("a save does not return", sleep, "save write", step=6, more="hang_pause_seconds=5"),
    Case(name="SIGSTOP of a rank for 3 s", inject=beside(stop_for_a_while), code=0,
         resumes=False),
]  # fmt: skip

CASES = [*KILLED, *SIGNALS, *HANGS]
