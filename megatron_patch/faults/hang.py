"""Hang detection: a thread in every rank that knows how long the current phase may last.

    normal operation    the thread wakes up and compares two numbers; no file, no message
    a phase is too old  the first rank to notice creates ``hangs/alarm-<attempt>``; every rank that
                        waits half its limit looks for that file, so all of them join in
    every rank          writes its stacks and NCCL's last collectives to ``hangs/<utc>/``
    the first rank      waits for the others' files, says in summary.txt who is missing or behind
    every rank          leaves its exit code for the launcher and ends with EXIT_CODE

Nothing of it needs the main thread, a collective or the device. A rank that was stopped, or whose
main thread holds the interpreter lock, cannot take part: it is the one the others name. The first
of them on its node sends it a signal that makes it print its stacks, lock or not, and the launcher
kills it when they have ended. (faulthandler's own timer would need no others. But it walks the
stacks in a thread without the lock, and when a suspended job goes on it is due at once: the job,
running again, then dies of a segmentation fault now and then.)

A process that was suspended as a whole and goes on (SIGSTOP, SIGCONT) sees that its own thread did
not run either; that time does not count.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.faults import ledger, stacks
from megatron_patch.faults.stacks import Witness
from megatron_patch.runtime import lifeline
from megatron_patch.runtime.files import write_whole
from megatron_patch.runtime.heartbeat import PAUSES, PHASES, PULSE, Beat, Pulse
from megatron_patch.schema.faults import FaultsConfig

if TYPE_CHECKING:
    from megatron_patch.parallel.setup import Layout

EXIT_CODE = 6
FOLDER = "hangs"
LONG_STEPS = 4
"""A limit of a phase is never below this many times the longest step so far."""
GRACE_SECONDS = 10.0
"""How long the ranks that can write their stacks may take."""
NETWORK_SECONDS = 3.0
"""For ranks of other nodes to see the summary, before the end of the first one ends the job."""
STACKS_SECONDS = 0.5
"""For a rank that cannot write its file: to print its stacks before the launcher ends it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds a phase may last."""

    step: float
    startup: float
    pause: float

    def of(self, pulse: Pulse) -> float:
        """The limit of what the process does now."""
        if pulse.finished == 0:
            return self.startup
        longest = LONG_STEPS * pulse.longest
        if pulse.now.phase in PAUSES:
            return max(self.pause, longest)
        return max(self.step, longest)


class HangWatcher:
    """Watches the pulse of this process.

    Args:
        limits: seconds a phase may last.
        folder: ``<run_dir>/hangs``; created when something hangs.
        token: name of this attempt, the same on all ranks.
        rank, hosts, pids: this rank; node and process id of every rank.
        leave: ends the process; tests put something milder there.
    """

    def __init__(
        self,
        limits: Limits,
        folder: Path,
        *,
        token: str,
        rank: int,
        hosts: list[str],
        pids: list[int],
        pulse: Pulse = PULSE,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self.limits, self.folder, self.token = limits, folder, token
        self.rank, self.hosts, self.pids, self.pulse = rank, hosts, pids, pulse
        self._leave = leave
        self._poll = min(1.0, limits.step / 10)
        self._over = threading.Event()
        self._failed = threading.Event()
        self._seen: Beat = pulse.now
        self._excused = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="hang-watcher")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The process may take its time from now on."""
        self._over.set()
        self._thread.join(5)

    def await_report(self, error: BaseException) -> None:
        """The main thread has failed; does not return where a hang is the reason.

        The first ranks to leave after a hang break the connections of those still writing, whose
        main threads then fail with an error about the network. Their exit code must not depend on
        who is faster: the error goes to standard error, and the report ends the process.
        """
        self._failed.set()
        if _there(self.alarm) and self._thread.is_alive():
            _tell("".join(traceback.format_exception(error)).rstrip())
            self._thread.join(2 * GRACE_SECONDS + 10)  # a directory may stop answering

    @property
    def alarm(self) -> Path:
        """Exists once a rank of this attempt has found a hang; names the directory of stacks."""
        return self.folder / f"alarm-{self.token}"

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self._poll):
            now = time.monotonic()
            self._look(now, gap=now - last - self._poll)
            last = now

    def _look(self, now: float, *, gap: float = 0.0) -> None:
        beat = self.pulse.now
        if beat is not self._seen:
            self._seen, self._excused = beat, 0.0
        if gap > max(2.0, 3 * self._poll):  # this whole process did not run
            self._excused += min(gap, now - beat.since)
        age, limit = now - beat.since - self._excused, self.limits.of(self.pulse)
        joins = self._failed.is_set() or age > self.limits.step / 2
        if age > limit or (joins and _there(self.alarm)):
            self._report(beat, age, limit)

    # ------------------------------------------------------------------ a hang

    def _report(self, beat: Beat, age: float, limit: float) -> None:
        """Stacks, summary, end of the process."""
        at, collective = stacks.main_thread()
        me = Witness(
            self.rank, ledger.node(), os.getpid(), beat.step, beat.phase, round(age, 1), at,
            collective,
        )  # fmt: skip
        try:
            lead, folder = self._raise_alarm()
            stacks.write(folder, me)
            if lead:
                text = self._summary(folder, me, limit)
                write_whole(folder / "summary.txt", text, durable=False)
                _tell(f"{text}\nstacks of all ranks: {folder}")
                self._call_the_silent(folder)
                if len(set(self.hosts)) > 1:
                    time.sleep(NETWORK_SECONDS)
            else:
                text = f"hang at step {beat.step}, see {folder / 'summary.txt'}"
                self._wait_for(folder / "summary.txt", GRACE_SECONDS)
                self._call_the_silent(folder)
                self._wait_for(folder / "summary.txt", 5)
        except OSError as error:  # a directory that has gone, a full disk
            text = f"hang at step {beat.step} in phase {beat.phase}; no report: {error}"
            _tell(text)
            faulthandler.dump_traceback(file=2, all_threads=True)
        if self._over.is_set():  # it went on in the meantime and is ending in order
            return
        self._end(text.splitlines()[0])

    def _raise_alarm(self) -> tuple[bool, Path]:
        """Whether this rank was first, and the directory for the stacks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{stacks.utc()}.{self.token}"
        try:
            handle = os.open(self.alarm, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            end = time.monotonic() + GRACE_SECONDS
            while not (name := self.alarm.read_text().strip()) and time.monotonic() < end:
                time.sleep(0.05)
            return False, self.folder / name
        (self.folder / name).mkdir()
        with os.fdopen(handle, "w") as out:
            out.write(name + "\n")
        return True, self.folder / name

    def _summary(self, folder: Path, me: Witness, limit: float) -> str:
        """What the ranks wrote within the grace time, and which of them to look at."""
        end = time.monotonic() + GRACE_SECONDS
        while True:
            names = [n for n in os.listdir(folder) if n.startswith("rank_") and n.endswith(".txt")]
            if len(names) == len(self.hosts) or time.monotonic() > end:
                break
            time.sleep(0.1)
        witnesses = (stacks.read(folder / name) for name in names)
        found = {witness.rank: witness for witness in witnesses if witness is not None}
        return summarize(found, self.hosts, finder=me, limit=limit)

    def _call_the_silent(self, folder: Path) -> None:
        """Ranks of this node that wrote nothing print their stacks; its first other rank asks."""
        here = [r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        wrote = set(os.listdir(folder))
        silent = [r for r in here if stacks.file_of(folder, r).name not in wrote]
        if self.rank == min(set(here) - set(silent), default=-1):
            called = [r for r in silent if stacks.call(self.pids[r])]
            if called:
                time.sleep(STACKS_SECONDS)

    @staticmethod
    def _wait_for(path: Path, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not _there(path) and time.monotonic() < end:
            time.sleep(0.1)

    def _end(self, reason: str) -> None:
        ledger.record(
            self.folder.parent, rank=self.rank, exit_code=EXIT_CODE, error=f"Hang: {reason}"
        )
        with contextlib.suppress(Exception):
            lifeline.leave_exit_code(self.rank, EXIT_CODE, reason)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        self._leave(EXIT_CODE)
        self._over.set()


def _tell(text: str) -> None:
    """Print on standard error, which may be a log on the disk that is full: the end comes still."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def summarize(found: dict[int, Witness], hosts: list[str], *, finder: Witness, limit: float) -> str:
    """The text of ``summary.txt``; its first line names the rank to look at.

    A rank without a file comes first. Else it is the one that has come least far: by step; among
    equals those whose main thread waits for no other rank come first, then by phase, the longest
    first. (The phase is second: a pipeline stage that waits for its input is not far.)

    Args:
        found: what the ranks wrote, by rank.
        hosts: node of every rank of the job.
        finder: the rank that raised the alarm.
        limit: seconds its phase was allowed.
    """
    missing = [rank for rank in range(len(hosts)) if rank not in found]
    if missing:
        names = ", ".join(f"{r} ({hosts[r]})" for r in missing[:16])
        more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
        blamed = (
            f"rank {names}{more} missing: no stacks within {GRACE_SECONDS:g} s (stopped, dead, "
            "unreachable, or holding the interpreter lock)"
        )
    else:
        order = sorted(found.values(), key=_how_far)
        first = order[0]
        where = f"in {first.collective}" if first.collective else f"at {first.at}"
        blamed = (
            f"rank {first.rank} ({hosts[first.rank]}) is behind: step {first.step}, "
            f"phase {first.phase} for {first.seconds:g} s, {where}"
        )
        if len(order) > 1 and _how_far(order[-1])[:3] == _how_far(first)[:3]:
            blamed += "; all ranks are at the same place, compare their stacks"
    lines = [
        f"hang at step {max([w.step for w in found.values()], default=finder.step)}: {blamed}",
        f"found by rank {finder.rank} after {finder.seconds:g} s in phase {finder.phase}, which "
        f"may last {limit:g} s; {stacks.utc()}",
        "",
        f"{'rank':>5} {'host':<16} {'step':>8} {'phase':<11} {'seconds':>8} main thread",
    ]
    for rank, host in enumerate(hosts):
        w = found.get(rank)
        if w is None:
            lines.append(f"{rank:>5} {host:<16} {'':>8} {'missing':<11}")
            continue
        where = f"waits in {w.collective}" if w.collective else w.at
        lines.append(f"{rank:>5} {host:<16} {w.step:>8} {w.phase:<11} {w.seconds:>8.1f} {where}")
    return "\n".join(lines) + "\n"


def _how_far(w: Witness) -> tuple[int, bool, int, float]:
    place = PHASES.index(w.phase) if w.phase in PHASES else -1
    return w.step, bool(w.collective), place, -w.seconds


def start(options: FaultsConfig, layout: Layout, run_dir: Path) -> HangWatcher | None:
    """Watch this attempt; None where ``faults.hang_seconds`` is null. Collective."""
    PULSE.reset()
    if layout.device.type == "cuda":
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)  # torch's own dumps go there, too
    if options.hang_seconds is None:
        return None
    from megatron_patch.parallel.first_rank import of_all

    token = f"{stacks.utc()}-{os.urandom(3).hex()}"
    stacks.listen()
    facts = of_all((token, ledger.node(), os.getpid()))
    limits = Limits(options.hang_seconds, options.hang_startup_seconds, options.hang_pause_seconds)
    _, hosts, pids = map(list, zip(*facts, strict=True))
    watcher = HangWatcher(
        limits, run_dir / FOLDER, token=facts[0][0], rank=layout.rank, hosts=hosts, pids=pids
    )
    watcher.start()
    return watcher


def record_collectives(run_dir: Path) -> None:
    """Switch NCCL's flight recorder on; before the process group starts. What is set wins.

    torch 2.11 and 2.13 read these names (``TORCH_NCCL_TRACE_BUFFER_SIZE`` and
    ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` are the older ones of the first and the last).
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    prefix = str(run_dir / FOLDER / stacks.RECORDER_PREFIX)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", prefix)


def _there(path: Path) -> bool:
    """Whether a file exists, by a listing: NFS may remember for 30 s that a name did not."""
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False
