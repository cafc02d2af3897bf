"""Killed, stopped, stuck and signaled processes."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from functools import partial

from fault_lab import hooks
from fault_lab.case import Case, Scene
from fault_lab.lab import Outcome, Running

PEER = r"Connection (closed by peer|reset by peer)"
"""torchrun tells of whoever it saw failing first: the killed rank, or one that missed it."""
SIGKILLED = r"Signal 9 \(SIGKILL\) received|" + PEER
STOPPED = "stopped gracefully after step"
SHORT = ("faults.hang_seconds=5", "faults.hang_startup_seconds=10", "faults.hang_pause_seconds=5")
"""Instead of 45 s, half an hour and a quarter of an hour."""
TORCHRUN = 30.0
"""Seconds torchrun waits for a rank that does not react to TERM."""


def in_rank(rank: int, place: str, do: hooks.Callable[[], None], *, step: int = 5) -> hooks.Any:
    """Hook: ``do`` once at ``place`` on one rank."""
    return lambda mine: hooks.at(place, do, step=step) if mine == rank else None


def played(rank: int, place: str, do: hooks.Callable[[], None], step: int = 5) -> hooks.Any:
    """``Case.inject``: one attempt with a fault inside one rank."""
    return lambda scene: scene.play(hook=in_rank(rank, place, do, step=step))


def beside(act: hooks.Callable[[Running], None], *, step: int = 4) -> hooks.Any:
    """``Case.inject``: one attempt, ``act`` from outside after ``step``; steps are slowed down."""

    def outside(attempt: Running) -> None:
        attempt.wait_step(step)
        act(attempt)

    return lambda scene: scene.play(hook=slow_steps(), outside=outside)


def slow_steps(seconds: float = 0.1, rank: int | None = None) -> hooks.Any:
    """Hook: every forward pass takes longer (on one rank)."""

    def hook(mine: int) -> None:
        if rank is None or mine == rank:
            hooks.wrap(
                *hooks._owner("megatron_patch.training.step", "place"),
                before=lambda *args: time.sleep(seconds),
            )

    return hook


# ------------------------------------------------------------------------------------------- kills

KILLS = [  # label, place, rank, step, more overrides
    ("during start-up, before the rendezvous", "rendezvous", 1, 0, ()),
    ("during start-up, while the model is built", "model", 1, 0, ()),
    ("while a batch is read", "data", 1, 5, ()),
    ("in the forward pass", "forward", 1, 5, ()),
    ("in the backward pass", "backward", 1, 5, ()),
    ("before the gradients are reduced", "reduction", 1, 5, ()),
    ("in the optimizer", "update", 1, 5, ()),
    ("between two steps, first rank", "step end", 0, 5, ()),
    ("in an evaluation", "evaluation", 1, 4, ("training.eval_interval=2",)),
    ("as a save begins", "save begin", 0, 6, ()),
    ("while shards are written", "save write", 1, 6, ()),
    ("shards written, not hashed", "save hash", 1, 6, ()),
    ("before the index of the shards", "save index", 0, 6, ()),
    ("manifest written, directory not renamed", "save manifest", 0, 6, ()),
    ("checkpoint complete, pointer not moved", "save pointer", 0, 6, ()),
    ("while an old checkpoint is deleted", "save retire", 0, 6, ("checkpoint.keep_last=1",)),
    ("in a background save", "save write", 1, 6, ("checkpoint.async_save=true",)),
    ("at the end, before FINISHED", "finish", 0, 8, ()),
]


def _killed(label: str, place: str, rank: int, step: int, sets: tuple[str, ...]) -> Case:
    return Case(
        name=f"kill -9 {label}",
        group="killed",
        inject=played(rank, place, hooks.kill, step),
        says=SIGKILLED,
        sets=sets,
    )


def kill_after_finish(scene: Scene) -> Outcome:
    """The other rank is gone already; the marker is written."""
    return scene.play(hook=in_rank(1, "shutdown", hooks.kill, step=8))


def kill_while_loading(scene: Scene) -> Outcome:
    scene.first_part()
    return scene.play(hook=in_rank(1, "load", hooks.kill, step=0))


def kill_everyone(attempt: Running) -> None:
    pids = [attempt.rank_pid(rank) for rank in range(attempt.ranks)]
    attempt.mark("SIGKILL to all ranks")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kill_launcher(attempt: Running) -> None:
    attempt.mark("SIGKILL to torchrun")
    os.kill(attempt.pid, signal.SIGKILL)


def crash(what: str) -> hooks.Callable[[], None]:
    def do() -> None:
        hooks.injected(what)
        if what == "abort":
            ctypes.CDLL(None).abort()
        elif what == "an exception":
            raise RuntimeError("a fault of the program")
        elif what == "sys.exit(0)":
            raise SystemExit(0)

    return do


def out_of_memory() -> None:
    """The address space ends here; the next allocation fails."""
    import resource
    from pathlib import Path

    hooks.injected("RLIMIT_AS at the present size")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    ballast = [bytearray(1 << 26) for _ in range(100)]
    del ballast


def no_more_files() -> None:
    """Every further open() fails."""
    import resource

    hooks.injected("RLIMIT_NOFILE is 3")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))


KILLED = [
    *(_killed(*k) for k in KILLS),
    Case(name="kill -9 at the end, after FINISHED", group="killed", inject=kill_after_finish,
         says=SIGKILLED, after="finished", note="nothing is left to do"),
    Case(name="kill -9 while a checkpoint is loaded", group="killed", inject=kill_while_loading,
         says=SIGKILLED),
    Case(name="kill -9 of all ranks at once", group="killed", inject=beside(kill_everyone),
         says=SIGKILLED),
    Case(name="kill -9 of torchrun", group="killed", inject=beside(kill_launcher), code=-9,
         note="the kernel kills its ranks with it"),
    Case(name="segmentation fault", group="killed", says=r"Signal 11 \(SIGSEGV\) received|" + PEER,
         inject=played(1, "backward", hooks.send(signal.SIGSEGV))),
    Case(name="abort in native code", group="killed", says=r"Signal 6 \(SIGABRT\) received|" + PEER,
         inject=played(1, "backward", crash("abort"))),
    Case(name="exception in one rank", group="killed", says="RuntimeError: a fault of the program",
         inject=played(1, "forward", crash("an exception"))),
    Case(name="one rank leaves with exit code 0", group="killed",
         says=r"Connection closed by peer|Connection reset by peer",
         inject=played(1, "forward", crash("sys.exit(0)"))),
    Case(name="out of memory (address space used up)", group="killed",
         says=r"MemoryError|can't allocate memory", inject=played(1, "forward", out_of_memory)),
    Case(name="kill -9 of a rank that reads ahead", group="killed", says=SIGKILLED,
         inject=played(1, "forward", hooks.kill), sets=("data.num_workers=1",)),
    Case(name="kill -9 of one of four ranks", group="killed", says=SIGKILLED, ranks=4,
         inject=played(2, "backward", hooks.kill)),
    Case(name="kill -9 under tensor parallelism", group="killed", says=SIGKILLED,
         inject=played(1, "forward", hooks.kill),
         sets=("parallel.tensor_model_parallel_size=2",)),
    Case(name="kill -9 of a pipeline stage", group="killed", says=SIGKILLED,
         inject=played(1, "backward", hooks.kill),
         sets=("parallel.pipeline_model_parallel_size=2",)),
]  # fmt: skip


# ----------------------------------------------------------------------------------------- signals


def to_rank(number: signal.Signals, *, twice: bool = False) -> hooks.Callable[[Running], None]:
    def act(attempt: Running) -> None:
        pid = attempt.rank_pid(1)
        attempt.mark(f"{number.name} to rank 1")
        os.kill(pid, number)
        if twice:
            time.sleep(0.02)
            os.kill(pid, number)

    return act


def to_launcher(number: signal.Signals) -> hooks.Callable[[Running], None]:
    def act(attempt: Running) -> None:
        attempt.mark(f"{number.name} to torchrun")
        os.kill(attempt.pid, number)

    return act


def graceful(name: str, inject: hooks.Any, word: str, *, code: int = 0) -> Case:
    return Case(name=name, group="signals", inject=inject, says=f"{STOPPED}.*{word}", code=code,
                most_lost=0)  # fmt: skip


SIGNALS = [
    graceful("SIGTERM to one rank", beside(to_rank(signal.SIGTERM)), "SIGTERM"),
    graceful("SIGUSR1 to one rank", beside(to_rank(signal.SIGUSR1)), "SIGUSR1"),
    graceful("SIGINT to one rank", beside(to_rank(signal.SIGINT)), "SIGINT"),
    graceful("SIGTERM to torchrun", beside(to_launcher(signal.SIGTERM)), "SIGTERM", code=1),
    graceful("SIGINT to torchrun (Ctrl-C)", beside(to_launcher(signal.SIGINT)), "SIGINT", code=1),
    graceful("SIGTERM inside a save",
             played(1, "save write", hooks.send(signal.SIGTERM), 3), "SIGTERM"),
    graceful("SIGTERM inside a background save",
             lambda scene: scene.play("checkpoint.async_save=true",
                                      hook=in_rank(1, "save write", hooks.send(signal.SIGTERM),
                                                   step=3)), "SIGTERM"),
    graceful("SIGUSR1 during start-up",
             played(1, "model", hooks.send(signal.SIGUSR1), 0), "SIGUSR1"),
    Case(name="SIGINT twice to one rank", group="signals", says="interrupted",
         inject=beside(to_rank(signal.SIGINT, twice=True)),
         note="the second one interrupts at once"),
    Case(name="SIGHUP to one rank (terminal gone)", group="signals",
         says=r"Signal 1 \(SIGHUP\) received|" + PEER, inject=beside(to_rank(signal.SIGHUP))),
    Case(name="SIGQUIT to torchrun", group="signals", says="SIGQUIT|SignalException|signal: 3",
         inject=beside(to_launcher(signal.SIGQUIT))),
]  # fmt: skip


# ------------------------------------------------------------------------------------------- hangs


def stop(seconds: float | None) -> hooks.Callable[[Running], None]:
    def act(attempt: Running) -> None:
        pid = attempt.rank_pid(1)
        attempt.mark("SIGSTOP to rank 1")
        os.kill(pid, signal.SIGSTOP)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    return act


def never_join() -> None:
    """This rank does not come to the collective the others wait in."""
    hooks.injected("asleep before a collective")
    time.sleep(600)


def hold_the_gil() -> None:
    """Native code that never gives Python's lock back: no handler, no thread runs any more."""
    hooks.injected("native code holds the GIL")
    ctypes.PyDLL(None).sleep(600)


def busy() -> None:
    """Python code that does not come to an end."""
    hooks.injected("an endless loop")
    while True:
        pass


def sleep_in_save() -> None:
    hooks.injected("a write that does not return")
    time.sleep(600)


HANG = r"^hang at step \d+: rank 1"
HANGS = [
    Case(name="SIGSTOP of a rank", group="hangs", inject=beside(stop(None)), says=HANG,
         sets=SHORT, rank_code=6, found_within=20, note="the others name it; it has no stacks"),
    Case(name="SIGSTOP of a rank for 3 s", group="hangs", inject=beside(stop(3.0)), code=0,
         after="finished", note="the run goes on"),
    Case(name="deadlock: a rank never joins a collective", group="hangs", says=HANG, rank_code=6,
         inject=played(1, "reduction", never_join), found_within=60, within=90,
         note="hang_seconds is 45, the default; stacks of all ranks"),
    Case(name="a rank loops for ever", group="hangs", says=HANG, rank_code=6, sets=SHORT,
         inject=played(1, "forward", busy), found_within=20, note="stacks of all ranks"),
    Case(name="native code holds the GIL", group="hangs", says=HANG, rank_code=6, sets=SHORT,
         inject=played(1, "forward", hold_the_gil), found_within=30,
         note="the others name it; its stacks are in its log"),
    Case(name="a rank hangs in start-up", group="hangs", says=HANG, rank_code=6, sets=SHORT,
         inject=played(1, "model", never_join, 0), found_within=30, note="stacks of all ranks"),
    Case(name="a save does not return", group="hangs", says=HANG, rank_code=6, sets=SHORT,
         inject=played(1, "save write", sleep_in_save, 6), found_within=30,
         note="stacks of all ranks"),
    Case(name="slow rank", group="hangs", after="finished", code=0, ranks=4, says="stragglers up",
         inject=lambda scene: scene.play("faults.straggler_interval=4",
                                         hook=slow_steps(0.3, rank=1))),
]  # fmt: skip

CASES = [*KILLED, *SIGNALS, *HANGS]
__all__ = ["CASES", "beside", "in_rank", "no_more_files", "partial", "played", "slow_steps"]
