"""Who is gone, when NCCL does not say: a thread that looks for signs of life of the other ranks.

Over NCCL the host does not wait for a transfer, so nothing can be raised where one never ends: the
process sits in its next synchronization until NCCL's watchdog ends it, with the number of the
collective and no rank's name. Here every rank writes a sign of life into the store that the process
groups were made with, over a connection of its own, and reads those of the ranks it shares a
context-parallel group with. Standard error names, before that watchdog's time,

    a rank whose signs stop                      (killed, stopped, its host gone)
    a rank that has started fewer transfers      (raised an error, hangs elsewhere), once nobody
    than this one                                has started any for half of the group's timeout

It changes nothing else: what ends the process is NCCL's watchdog, the launcher, or `faults.hang`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PULSE_SECONDS = 2.0
SILENCE_SECONDS = 30.0
"""Without a sign for this long (or half the group's timeout, if less) a rank counts as lost."""
LEFT = "left"


@dataclass(slots=True)
class Traffic:
    """What a rank has started in one group; every rank counts the same calls in the same order."""

    started: int = 0
    what: str = ""

    def record(self, what: str) -> None:
        """Another transfer, even one in which this rank has nothing to send."""
        self.started += 1
        self.what = what


@dataclass(slots=True)
class _Peer:
    """The newest sign of life of another rank, and since when nothing newer came."""

    sign: str = ""
    since: float = 0.0
    started: int = 0
    named: bool = False


@dataclass(slots=True)
class _Watched:
    """One group: its name in the store, its global ranks, and what is known of the others."""

    name: str
    ranks: list[int]
    traffic: Traffic
    timeout: float
    moved: float
    """When a rank last started a transfer, as far as this one knows."""
    peers: dict[int, _Peer] = field(default_factory=dict)
    started: int = -1
    behind: bool = False

    def key(self, rank: int) -> str:
        return f"context_parallel_signs/{self.name}/{rank}"


class Watch:
    """Signs of life of this process and of those it works with.

    Args:
        store: of the process groups; cloned, because a blocked call holds a client's lock.
        rank: this process, globally.
        log: takes each message; default: standard error.
        clock: seconds, monotonic.
        going_on: False once the process groups are gone.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        *,
        log: Callable[[str], Any] = lambda text: print(text, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
        going_on: Callable[[], bool] = dist.is_initialized,
    ) -> None:
        self.rank, self._store = rank, store.clone()
        with contextlib.suppress(Exception):
            self._store.set_timeout(timedelta(seconds=10))
        self._log, self._clock, self._going_on = log, clock, going_on
        self._groups: list[_Watched] = []
        self._beats, self._last = 0, clock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="cp-watch")

    def start(self) -> None:
        """Begin; `stop` is called when the interpreter ends."""
        self._thread.start()
        # A thread in the store's code while the interpreter is taken down would abort the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Tell the others that this rank leaves in order, and end."""
        if not self._over.is_set():
            self._over.set()
            if self._thread.is_alive():
                self._thread.join(5)
            with contextlib.suppress(Exception):
                for group in list(self._groups):
                    self._write(group, LEFT)

    def add(self, name: str, ranks: list[int], traffic: Traffic, timeout: float) -> None:
        """Watch a group, all of whose ranks do the same before they go on.

        ``timeout``: seconds after which NCCL's watchdog ends the process.
        """
        group = _Watched(name, ranks, traffic, timeout, moved=self._clock())
        self._write(group, "0")
        self._groups.append(group)

    def _run(self) -> None:
        heard = self._clock()
        while not self._over.wait(PULSE_SECONDS):
            if not self._going_on():
                self._over.set()
                return
            try:
                self.look()
                heard = self._clock()
            except Exception as error:  # the store's host has gone, or is going
                if self._clock() - heard > SILENCE_SECONDS:
                    self._log(
                        f"context parallelism: rank {self.rank} cannot reach the store of the "
                        f"process groups any more: rank 0 or its launcher is gone ({error})"
                    )
                    self._over.set()

    def look(self) -> None:
        """One round: write the own sign, read the others'."""
        now, self._beats = self._clock(), self._beats + 1
        # Time in which this process did not run either says nothing about the others.
        excuse = max(0.0, now - self._last - 3 * PULSE_SECONDS)
        self._last = now
        for group in list(self._groups):
            self._write(group, str(self._beats))
            for rank in group.ranks:
                if rank != self.rank:
                    self._read(group, rank, now, excuse)
            group.moved += excuse
            self._compare(group, now)

    def _write(self, group: _Watched, sign: str) -> None:
        self._store.set(group.key(self.rank), f"{sign} {group.traffic.started}")

    def _read(self, group: _Watched, rank: int, now: float, excuse: float) -> None:
        """Take in the sign of another rank; name it once it has given none for long."""
        if rank not in group.peers and not self._store.check([group.key(rank)]):
            return  # it has written none yet
        peer = group.peers.setdefault(rank, _Peer(since=now))
        sign, started = self._store.get(group.key(rank)).decode().split()
        peer.started = int(started)
        peer.since += excuse
        if sign != peer.sign:
            peer.sign, peer.since, peer.named = sign, now, False
        silent = now - peer.since
        if sign != LEFT and not peer.named and silent > min(SILENCE_SECONDS, group.timeout / 2):
            peer.named = True
            self._name(group, rank, f"it gave no sign of life for {silent:.0f} s")

    def _compare(self, group: _Watched, now: float) -> None:
        """Name the rank all wait for, once nobody has moved for long."""
        others = {rank: peer.started for rank, peer in group.peers.items()}
        everywhere = group.traffic.started + sum(others.values())
        if everywhere != group.started:
            group.started, group.moved, group.behind = everywhere, now, False
            return
        if group.behind or not others or now - group.moved < group.timeout / 2:
            return
        last = min(others.values())
        if last < group.traffic.started and not any(p.named for p in group.peers.values()):
            group.behind = True
            for rank in (r for r, started in others.items() if started == last):
                verb = "left" if group.peers[rank].sign == LEFT else "stands"
                why = f"it {verb} after {last} transfers"
                self._name(group, rank, f"{why}, and nobody moved for {now - group.moved:.0f} s")

    def _name(self, group: _Watched, rank: int, why: str) -> None:
        host = os.environ.get("HOSTNAME", "")
        self._log(
            f"context parallelism: lost rank {rank} (context-parallel rank "
            f"{group.ranks.index(rank)} of {group.ranks}): {why}. Rank {self.rank}"
            f"{' on ' + host if host else ''} has started {group.traffic.started} transfers, the "
            f"last of them {group.traffic.what or 'none'}. Look at rank {rank}'s log first; NCCL's "
            f"watchdog ends this process {group.timeout:g} s after the transfer that does not end."
        )


_WATCHES: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()
"""One a default process group: a new one has a new store."""


def watch(group: Any, traffic: Traffic, *, timeout: float) -> Watch | None:
    """Look after ``group`` from now on; None where there is no store to write to."""
    with contextlib.suppress(Exception):
        world = dist.distributed_c10d._get_default_group()
        own = _WATCHES.get(world)
        if own is None:
            of = weakref.ref(world)

            def going_on() -> bool:
                return dist.is_initialized() and dist.distributed_c10d._get_default_group() is of()

            store = dist.distributed_c10d._get_default_store()
            own = _WATCHES[world] = Watch(store, dist.get_rank(), going_on=going_on)
            own.start()
        ranks = dist.get_process_group_ranks(group)
        own.add(getattr(group, "group_name", str(ranks)), ranks, traffic, timeout)
        return own
    return None
