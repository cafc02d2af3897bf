"""Which ranks are slow: every ``faults.straggler_interval`` steps their own times are compared.

A step takes as long on every rank, since the fast ones wait. What differs is the time a rank needs
for its own part: reading data (host time) and the forward and backward passes until the gradient
reduction (host time on CPUs; on GPUs the time between two events on the stream, so nothing waits
for the device). Under tensor or pipeline parallelism those passes contain waiting for the group, so
a slow GPU shows as a slow group.

The exchange is one asynchronous gather of two numbers over the CPU backend; its result is looked
at between later steps, when it has arrived.

Rule: with median m and median absolute deviation d of all ranks' times (low medians, so that with
few ranks the faster half decides), a rank is slow above max(m + k 1.4826 d, ratio m, m + 1 ms).

Megatron-Core's StragglerDetector has no such rule (it prints the extremes, whatever they are),
needs CUDA, waits for the device and listens on a TCP port.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patch.faults.spike import TO_SIGMA
from megatron_patch.parallel.setup import Layout
from megatron_patch.runtime.heartbeat import PULSE
from megatron_patch.runtime.watcher import Action, ResumePoint, StepResult, Watcher
from megatron_patch.schema.faults import FaultsConfig

WHAT = ("data", "compute")
LEAST_SECONDS = 0.001
"""A rank is never slow for less than this a step."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison of all ranks."""

    what: str
    median: float
    threshold: float
    seconds: list[float]
    """Seconds a step, by rank."""

    @property
    def slow(self) -> list[int]:
        """The stragglers, slowest first."""
        found = [r for r, s in enumerate(self.seconds) if s > self.threshold]
        return sorted(found, key=lambda r: -self.seconds[r])

    def line(self, step: int, hosts: list[str]) -> str:
        """For people; names at most eight ranks."""
        names = ", ".join(
            f"rank {r} ({hosts[r]}) {1e3 * self.seconds[r]:.1f} ms" for r in self.slow[:8]
        )
        more = f" and {len(self.slow) - 8} more" if len(self.slow) > 8 else ""
        return (
            f"stragglers up to step {step:,}, {self.what} a step: {names}{more}; the median is "
            f"{1e3 * self.median:.1f} ms, slow is above {1e3 * self.threshold:.1f} ms"
        )


def judge(what: str, seconds: list[float], *, mads: float, ratio: float) -> Verdict:
    """Apply the rule to all ranks' seconds a step."""
    median = statistics.median_low(seconds)
    mad = statistics.median_low([abs(s - median) for s in seconds])
    threshold = max(median + mads * TO_SIGMA * mad, ratio * median, median + LEAST_SECONDS)
    return Verdict(what, median, threshold, list(seconds))


class Stragglers(Watcher):
    """Collects this rank's times and compares them with the others'.

    Args:
        options: ``faults``.
        layout: coordinates of this rank.
        log: takes a line for people, on the first rank.
        hosts: node of every rank.
    """

    def __init__(
        self, options: FaultsConfig, layout: Layout, *, log: Callable[[str], None], hosts: list[str]
    ) -> None:
        self._options, self._layout, self._log, self._hosts = options, layout, log, hosts
        self._active = options.straggler_interval is not None and layout.world_size > 1
        on_gpu = self._active and layout.device.type == "cuda"
        self._clock = _DeviceClock() if on_gpu else None
        self._steps, self._first = 0, True
        self._before = self._taken()
        self._pending: tuple[int, Any, list[torch.Tensor]] | None = None

    def load_state(self, at: ResumePoint) -> None:
        self._collect(wait=True)  # of a later step, after a rewind

    def before_forward(self) -> None:
        if self._clock is not None:
            self._clock.begin()

    def before_reduction(self) -> None:
        if self._clock is not None:
            self._clock.end()

    def after_step(self, step: int, result: StepResult | None = None) -> list[Action]:
        """Start a comparison when due, log one that has arrived. Collective."""
        if not self._active:
            return []
        self._steps += 1
        self._collect(wait=False)
        if self._first:  # compiles and connects: says nothing about the rank
            self._first, self._steps, self._before = False, 0, self._taken()
        elif step % (self._options.straggler_interval or 1) == 0:
            self._collect(wait=True)  # an interval ago: it has long arrived
            self._send(step)
        return []

    def finish(self, step: int) -> list[Action]:
        self._collect(wait=True)
        return []

    def _taken(self) -> tuple[float, float]:
        """Seconds so far: reading data, computing."""
        s = PULSE.seconds
        if self._clock is not None:
            return s["data"], self._clock.seconds()
        return s["data"], s["forward"] + s["backward"]

    def _send(self, step: int) -> None:
        now = self._taken()
        mine = torch.tensor(
            [(b - a) / self._steps for a, b in zip(self._before, now, strict=True)],
            dtype=torch.float64,
        )
        self._steps, self._before = 0, now
        every = [torch.zeros_like(mine) for _ in range(self._layout.world_size)]
        # Collective: every rank sends at the same step.
        work = torch.distributed.all_gather(every, mine, async_op=True)
        self._pending = step, work, every

    def _collect(self, *, wait: bool) -> None:
        if self._pending is None:
            return
        step, work, every = self._pending
        if not wait and not work.is_completed():
            return
        work.wait()
        self._pending = None
        if not self._layout.print_rank:
            return
        table, o = torch.stack(every), self._options
        for i, what in enumerate(WHAT):
            seconds = table[:, i].tolist()
            verdict = judge(what, seconds, mads=o.straggler_mads, ratio=o.straggler_ratio)
            if verdict.slow:
                self._log(verdict.line(step, self._hosts))


class _DeviceClock:
    """Seconds between pairs of events on the current stream, read only once they have passed."""

    def __init__(self) -> None:
        self._open: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._total = 0.0

    def begin(self) -> None:
        self._open = torch.cuda.Event(enable_timing=True)
        self._open.record()

    def end(self) -> None:
        if self._open is None:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._pairs.append((self._open, event))
        self._open = None

    def seconds(self) -> float:
        """Of all pairs that the device has passed; never waits."""
        left = []
        for begin, end in self._pairs:
            if end.query():
                self._total += 1e-3 * begin.elapsed_time(end)
            else:
                left.append((begin, end))
        self._pairs = left
        return self._total
