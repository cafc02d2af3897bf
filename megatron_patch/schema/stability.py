"""The ``stability:`` section: telemetry, early warning, guard and captures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

from megatron_patch.schema.problem import ConfigError, Problem

Guard = Literal["off", "warn", "switch", "stop"]
Level = Literal["watch", "danger"]


@dataclass(kw_only=True, frozen=True, slots=True)
class RuleConfig:
    """Thresholds of the early warning, for people who study it; docs/stability.md."""

    watch_head_growth: float = 1.5
    """Growth of a head's W_Q or W_K in head_steps, over the median head's, for watch."""
    danger_head_growth: float = 2.0
    """The same for danger."""
    head_steps: int = 500
    """Steps over which the growth of W_Q and W_K is taken, at least."""
    head_logit: float = 100.0
    """Largest attention logit of a head from which its growth counts."""
    danger_error: float | None = 0.1
    """Error of a head's delta over the signal it disturbs, from which the verdict is danger, or
    watch under compensated. null: never."""
    watch_logit: float | None = 1000.0
    """Largest attention logit from which the verdict is watch; null: never."""
    confirm_steps: int = 50
    """Steps that the records which must agree on danger span, at least; 2 records or more."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong with these values by themselves."""
        start = "stability.rule"
        if self.head_steps < 1:
            yield Problem(f"{start}.head_steps", f"{self.head_steps}: must be at least 1")
        watch, danger = self.watch_head_growth, self.danger_head_growth
        if not 1 < watch <= danger:
            yield Problem(
                f"{start}.danger_head_growth",
                f"watch_head_growth {watch} and danger_head_growth {danger}: need "
                "1 < watch_head_growth <= danger_head_growth",
            )
        for name in ("head_logit", "confirm_steps"):
            if not getattr(self, name) >= 0:
                yield Problem(f"{start}.{name}", f"{getattr(self, name)}: must be at least 0")
        for name in ("danger_error", "watch_logit"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield Problem(f"{start}.{name}", f"{value}: must be more than 0, or null")


_NORM = (
    "the gradient norm is no sign of the verdict any more; faults.spike acts on jumps of the norm"
)
_WORST = "the 2 worst layers with 4 heads each are saved; name others with capture_steps"


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
    guard: Guard = "warn"
    """On danger: log nothing, warn, switch to stabilizer compensated, or save and exit 5."""
    capture_steps: list[int] = field(default_factory=list)
    """Steps at which q, k, v and dO are saved to ``<run_dir>/captures``."""
    capture_layers: list[int] = field(default_factory=list)
    """Layers saved there, counted from 0."""
    capture_heads: list[int] = field(default_factory=list)
    """Query heads saved there, counted over the whole layer; empty: all."""
    capture_at: list[Level] = field(default_factory=list)
    """Also save the worst heads of the worst layers, once, when the verdict first is this; two
    steps later."""
    rule: RuleConfig = field(default_factory=RuleConfig)
    """Thresholds of the early warning."""

    REMOVED: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("watch_growth", "danger_growth", "norm_needs_head", "reference_steps", "smooth_steps"),
            _NORM,
        ),
        **{item.name: f"it is stability.rule.{item.name} now" for item in fields(RuleConfig)},
        "capture_sequences": "one sequence is saved",
        "capture_micro_batch": "the first micro-batch is saved",
        "capture_at_grad_norm": "use capture_at: [watch, danger], or name capture_steps",
        "capture_worst_layers": _WORST,
        "capture_worst_heads": _WORST,
        "capture_max_mib": "the limit is 1,024 MiB a file; name fewer heads in capture_heads",
    }
    """Keys of the release before, and what stands for them; the next release forgets them."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong with these values by themselves."""
        for name in ("interval", "rows", "sequences"):
            if getattr(self, name) < 1:
                yield Problem(f"stability.{name}", f"{getattr(self, name)}: must be at least 1")
        # Programs give these without the loader, and a guard of another name would do nothing.
        levels = (("capture_at", level, Level) for level in self.capture_at)
        for name, given, kind in (("guard", self.guard, Guard), *levels):
            if given not in get_args(kind):
                allowed = ", ".join(get_args(kind))
                yield Problem(f"stability.{name}", f"{given!r}: must be one of {allowed}")
        yield from self.rule.problems()
        if self.guard in ("switch", "stop") and not self.enabled:
            yield Problem(
                "stability.guard",
                f"{self.guard} needs the telemetry: set stability.enabled: true, or guard: off",
            )
        if bool(self.capture_steps) != bool(self.capture_layers):
            yield Problem(
                "stability.capture_steps",
                f"capture_steps {self.capture_steps} and capture_layers {self.capture_layers}: "
                "name both, or neither",
            )
        if len(set(self.capture_at)) != len(self.capture_at):
            yield Problem("stability.capture_at", f"{self.capture_at}: name each level once")
        if self.capture_at and not self.enabled:
            yield Problem(
                "stability.capture_at",
                "needs the telemetry, which says when: set stability.enabled: true",
            )


def checked(options: StabilityConfig | None) -> StabilityConfig:
    """What a program gave, or the defaults; raises for what the loader would refuse."""
    options = StabilityConfig() if options is None else options
    if not isinstance(options, StabilityConfig):
        raise ValueError(
            f"options is a {type(options).__name__}; allowed: MonitorOptions. "
            "Give MonitorOptions(guard=...) of megatron_patch.stability"
        )
    if problems := list(options.problems()):
        raise ConfigError(problems)
    return options
