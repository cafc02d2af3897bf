"""The ``stability:`` section: telemetry, early warning, guard and captures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megatron_patch.schema.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(kw_only=True, frozen=True, slots=True)
class StabilityConfig:
    """Attention telemetry and what it may do to the run; docs/stability.md."""

    enabled: bool = True
    """Measure attention per layer and head; false also turns early warning and guard off."""
    interval: int = 50
    """Steps between observations; the cost of one is divided by it."""
    rows: int = 32
    """Query rows sampled per observed sequence, layer and head; at least 1 on each CP rank."""
    sequences: int = 4
    """Sequences of the observed micro-batch that rows are sampled from, at most."""
    guard: Literal["off", "warn", "switch", "stop"] = "warn"
    """On danger: log nothing, warn, switch to stabilizer compensated, or save and exit 5."""
    watch_growth: float = 1.25
    """Smoothed gradient norm over its recent minimum from which the verdict is watch."""
    danger_growth: float = 1.3
    """The same for danger, which the guard acts on; only watch under compensated."""
    norm_needs_head: bool = True
    """If true, a rising gradient norm alone never reaches danger: some head must be at watch too.
    Ignored where head errors are not measured."""
    reference_steps: int = 4000
    """How far back the minimum of the smoothed gradient norm is looked for."""
    smooth_steps: int = 200
    """Steps that a smoothed norm spans, at least; it takes 5 records or more."""
    confirm_steps: int = 50
    """Steps that the records which must agree on danger span, at least; 2 records or more."""
    watch_head_growth: float = 1.5
    """Growth of a head's W_Q or W_K in head_steps, over the median head's, for watch."""
    danger_head_growth: float = 2.0
    """The same for danger."""
    head_steps: int = 500
    """Steps over which the growth of W_Q and W_K is taken."""
    head_logit: float = 100.0
    """Largest attention logit of a head from which its growth counts."""
    danger_error: float | None = 0.1
    """Error of a head's delta over the signal it disturbs, from which the verdict is danger, or
    watch under compensated. null: never."""
    watch_logit: float | None = 1000.0
    """Largest attention logit from which the verdict is watch; null: never."""
    capture_steps: list[int] = field(default_factory=list)
    """Steps at which q, k, v and dO are saved to ``<run_dir>/captures``."""
    capture_layers: list[int] = field(default_factory=list)
    """Layers saved there, counted from 0."""
    capture_heads: list[int] = field(default_factory=list)
    """Query heads saved there, counted over the whole layer; empty: all."""
    capture_sequences: int = 1
    """Sequences of the micro-batch saved there."""
    capture_micro_batch: int = 0
    """Micro-batch of the step they are taken from, counted from 0."""
    capture_at: list[Literal["watch", "danger"]] = field(default_factory=list)
    """Also save the worst layers, once, when the verdict first is this; two steps later."""
    capture_at_grad_norm: float | None = None
    """Also save, once, when after the warm-up a record's mean gradient norm first exceeds this."""
    capture_worst_layers: int = 2
    """Layers saved then: those with the largest error of delta over its signal."""
    capture_worst_heads: int = 4
    """Heads of each saved then, likewise; 0: all."""
    capture_max_mib: int = 256
    """Largest capture file; a configuration that needs more is refused."""

    @property
    def triggered(self) -> bool:
        """Whether something that is not known beforehand starts a capture."""
        return bool(self.capture_at) or self.capture_at_grad_norm is not None

    def problems(self) -> Iterator[Problem]:
        """What is wrong with these values by themselves."""
        for name in ("interval", "rows", "sequences", "reference_steps", "head_steps",
                     "capture_sequences", "capture_worst_layers", "capture_max_mib"):  # fmt: skip
            if getattr(self, name) < 1:
                yield Problem(f"stability.{name}", f"{getattr(self, name)}: must be at least 1")
        for kind in ("growth", "head_growth"):
            watch, danger = getattr(self, f"watch_{kind}"), getattr(self, f"danger_{kind}")
            if not 1 < watch <= danger:
                yield Problem(
                    f"stability.danger_{kind}",
                    f"watch_{kind} {watch} and danger_{kind} {danger}: need "
                    f"1 < watch_{kind} <= danger_{kind}",
                )
        for name in ("head_logit", "smooth_steps", "confirm_steps"):
            if not getattr(self, name) >= 0:
                yield Problem(f"stability.{name}", f"{getattr(self, name)}: must be at least 0")
        for name in ("danger_error", "watch_logit"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield Problem(f"stability.{name}", f"{value}: must be more than 0, or null")
        yield from self._guard()
        yield from self._captures()

    def _guard(self) -> Iterator[Problem]:
        if self.guard in ("switch", "stop") and not self.enabled:
            yield Problem(
                "stability.guard",
                f"{self.guard} needs the telemetry: set stability.enabled: true, or guard: off",
            )

    def _triggers(self) -> Iterator[Problem]:
        if len(set(self.capture_at)) != len(self.capture_at):
            yield Problem("stability.capture_at", f"{self.capture_at}: name each level once")
        norm = self.capture_at_grad_norm
        if norm is not None and not norm > 0:
            yield Problem("stability.capture_at_grad_norm", f"{norm}: must be more than 0, or null")
        if self.capture_worst_heads < 0:
            yield Problem(
                "stability.capture_worst_heads",
                f"{self.capture_worst_heads}: must be at least 1, or 0 for all",
            )
        if self.triggered and not self.enabled:
            yield Problem(
                "stability.capture_at",
                "needs the telemetry, which says when: set stability.enabled: true",
            )

    def _captures(self) -> Iterator[Problem]:
        if bool(self.capture_steps) != bool(self.capture_layers):
            yield Problem(
                "stability.capture_steps",
                f"capture_steps {self.capture_steps} and capture_layers {self.capture_layers}: "
                "name both, or neither",
            )
        yield from self._triggers()
