"""Spikes of loss and gradient norm: found at the update, recorded, skipped or rewound.

Rule. With median m and median absolute deviation d of the last ``window`` steps, a value x has the
robust score z = (x - m) / s, s = max(1.4826 d, FLOOR |m|): 1.4826 d estimates the standard
deviation of normal data and half the window can be spikes without moving it; the floor keeps a
quiet window from making spikes of nothing. A step is a spike when the loss or the gradient norm
scores above its threshold; only upwards, and only once ``min_history`` steps are known. Every
finite step enters the window, spikes too, so that a new level is accepted after half a window.
Steps that are not finite are the business of `training.finite`.

The decision. When the gradient norm is known, and before the update where that may be dropped for
it, every rank is told the same loss and norm (`training.agreement`) and applies the same pure rule
to the same history, which is part of every checkpoint. So all ranks, and a resumed run, decide
alike.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_patch.faults.windows import Skips
from megatron_patch.runtime.heartbeat import PULSE
from megatron_patch.runtime.records import AppendOnlyFile
from megatron_patch.schema.faults import SpikeConfig
from megatron_patch.training.finite import unwrap

if TYPE_CHECKING:
    from megatron_patch.data.loader import Loaders
    from megatron_patch.monitor.hub import Monitor
    from megatron_patch.training.step import Session

FILE = "spikes.jsonl"
FLOOR = 0.01
"""Smallest deviation, as a share of the median."""
TO_SIGMA = 1.4826


class UpdateDropped(Exception):
    """The update of this step is not taken; raised on all ranks out of the optimizer's step."""

    def __init__(self, grad_norm: float) -> None:
        super().__init__("spike: the update is dropped")
        self.grad_norm = grad_norm


class RewindWanted(Exception):
    """The run is to go back; raised on all ranks, before the update."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(spike.line())
        self.spike = spike


class RewindsUsedUp(RuntimeError):
    """A spike, and no rewind left; raised on all ranks."""

    exit_code = 7


@dataclass(frozen=True, slots=True)
class Spike:
    """One step that the rule calls a spike."""

    step: int
    batch: int
    """Global batch, see `windows`."""
    loss: float
    grad_norm: float
    loss_z: float
    grad_norm_z: float

    def line(self) -> str:
        """For people."""
        return (
            f"spike at step {self.step:,}: loss {self.loss:.4f} ({self.loss_z:+.1f} robust "
            f"deviations), gradient norm {self.grad_norm:.3f} ({self.grad_norm_z:+.1f}), global "
            f"batch {self.batch:,}"
        )


class Detector:
    """The rule, over the history it has seen."""

    def __init__(self, options: SpikeConfig) -> None:
        self.options = options
        self.history: deque[tuple[float, float]] = deque(maxlen=options.window)

    def scores(self, loss: float, grad_norm: float) -> tuple[float, float]:
        """Robust scores of (loss, gradient norm) against the history; 0 while it is short."""
        if len(self.history) < self.options.min_history:
            return 0.0, 0.0
        losses, norms = zip(*self.history, strict=True)
        return robust_score(loss, losses), robust_score(grad_norm, norms)

    def judge(self, loss: float, grad_norm: float) -> tuple[bool, float, float]:
        """(spike, score of the loss, score of the norm); the step enters the history."""
        loss_z, norm_z = self.scores(loss, grad_norm)
        limits = self.options.loss_z, self.options.grad_norm_z
        found = any(
            limit is not None and z > limit
            for z, limit in zip((loss_z, norm_z), limits, strict=True)
        )
        self.history.append((loss, grad_norm))
        return found, loss_z, norm_z


def robust_score(x: float, values: tuple[float, ...]) -> float:
    """(x - median) / max(1.4826 MAD, FLOOR |median|); 0 when all of it is 0."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(v - middle) for v in values)
    scale = max(TO_SIGMA * deviation, FLOOR * abs(middle))
    return (x - middle) / scale if scale > 0 else 0.0


class SpikePolicy:
    """Watches the steps of one attempt.

    Args:
        session: what is trained; its guard calls `decide`.
        loaders: name the samples of a batch.
        monitor: where lines go.
        run_dir: ``spikes.jsonl`` goes here.
        telemetry: the last attention telemetry on disk, where the model keeps no maxima itself.
    """

    def __init__(
        self,
        session: Session,
        loaders: Loaders,
        monitor: Monitor,
        run_dir: Path,
        *,
        telemetry: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        self.options = session.run.faults.spike
        self.detector = Detector(self.options)
        self.skips = Skips()
        self.found = 0
        self._session, self._loaders, self._monitor = session, loaders, monitor
        self._file, self._telemetry = AppendOnlyFile(run_dir / FILE), telemetry
        self._step = 0
        self._modules = _attention_modules(session.chunks)
        self.can_rewind: Callable[[int], bool] = lambda step: True
        """Whether there is a good checkpoint of at most this step to go back to. Collective."""
        if self.options.action != "off":
            session.guard.judge = self.decide
            session.guard.may_drop = self.options.action != "record"

    # ------------------------------------------------------------------ a step

    def begin(self, step: int) -> None:
        """``step`` (1-based) begins."""
        self._step = step
        for _, module in self._modules:
            if module.want_max_logits:
                module.current_max_attn_logits = None

    def decide(self, loss: float, grad_norm: float) -> None:
        """Called on all ranks with what they agreed on; before the update, unless only recorded.

        Raises:
            UpdateDropped, RewindWanted, RewindsUsedUp: as ``action`` says; on all ranks.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return
        spiked, loss_z, norm_z = self.detector.judge(loss, grad_norm)
        if spiked:
            batch = self.skips.batch(self._step)
            self._act(Spike(self._step, batch, loss, grad_norm, loss_z, norm_z))

    def _act(self, spike: Spike) -> None:
        action = self.options.action
        used_up = action == "rewind" and self.skips.rewinds >= self.options.max_rewinds
        done = "stopped, no rewind left" if used_up else _DONE[action]
        oldest = spike.step - 1 - self.options.rewind_margin
        stuck = action == "rewind" and not used_up and not self._can_go_back(oldest)
        if stuck:
            done = (
                f"there is no good checkpoint of step {max(0, oldest):,} or before to go back to: "
                "the update is dropped instead"
            )
        self.found += 1
        attention = self._attention()
        if self._session.layout.print_rank:
            self._record(spike, done, attention)
        self._monitor.say(f"{spike.line()}: {done}; samples in {FILE}")
        if used_up:
            raise RewindsUsedUp(
                f"{spike.line()}; stopped before the update: faults.spike.max_rewinds "
                f"({self.options.max_rewinds}) are used up. Look at spikes.jsonl; a lower learning "
                "rate, another attention.stabilizer, or action: skip may get past it"
            )
        if action == "skip" or stuck:
            raise UpdateDropped(spike.grad_norm)
        if action == "rewind":
            raise RewindWanted(spike)

    def _can_go_back(self, oldest: int) -> bool:
        """A pause for the hang watch: a checkpoint is verified, whatever its size."""
        phase = PULSE.now.phase
        PULSE.enter("save")
        try:
            return self.can_rewind(oldest)
        finally:
            PULSE.enter(phase)

    # --------------------------------------------------------------- recording

    def _record(self, spike: Spike, done: str, attention: dict[str, Any]) -> None:
        samples = self._loaders.samples("train", spike.batch)
        entry = {
            "step": spike.step,
            "loss": spike.loss,
            "grad_norm": spike.grad_norm,
            "loss_z": spike.loss_z,
            "grad_norm_z": spike.grad_norm_z,
            "action": done,
            "global_batch": spike.batch,
            "samples": samples,
            "attention": attention,
        }
        self._file.append((json.dumps(entry) + "\n").encode())

    def _attention(self) -> dict[str, Any]:
        """Largest logit per layer and head of this step, or why there is none. Collective."""
        layout = self._session.layout
        mine = {}
        for layer, module in self._modules:
            maxima = module.current_max_attn_logits if module.want_max_logits else None
            if maxima is not None:
                mine[layer, layout.tp_rank] = [float(x) for x in maxima.flatten()]
        every: list[Any] = [None] * layout.world_size
        torch.distributed.all_gather_object(every, mine)
        heads: dict[tuple[int, int], list[float]] = {}
        for part in every:
            for key, values in part.items():
                old = heads.setdefault(key, values)
                heads[key] = [max(a, b) for a, b in zip(old, values, strict=True)]
        if heads:
            layers: dict[str, list[float]] = {}
            for layer, tp in sorted(heads):
                layers.setdefault(str(layer), []).extend(heads[layer, tp])
            return {"step": self._step, "max_logit": layers}
        last = self._telemetry() if layout.print_rank else None
        return last or {
            "max_logit": "not available: the model keeps no maxima, and stability telemetry has "
            "no record yet"
        }

    def close(self) -> None:
        """The attempt ends: release the file."""
        self._file.close()

    # -------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """For the checkpoint: history and windows, plain data."""
        return {"history": [list(h) for h in self.detector.history], "skips": self.skips.as_dict()}

    def restore(self, values: Any) -> None:
        """Take over the history of a checkpoint; None (an older version's): start without one."""
        self.detector.history.clear()
        if values is not None:
            self.detector.history.extend((float(a), float(b)) for a, b in values["history"])


_DONE = {
    "record": "recorded, the update is taken",
    "skip": "the update is dropped",
    "rewind": "going back",
}


def _attention_modules(chunks: list[Any]) -> list[tuple[int, Any]]:
    """(0-based layer, module) of this rank's core attention that can keep its largest logits."""
    found: list[tuple[int, Any]] = []
    module: Any
    for chunk in chunks:
        for module in unwrap(chunk).modules():
            if hasattr(module, "want_max_logits") and hasattr(module, "current_max_attn_logits"):
                found.append((module.layer_number - 1, module))
    return found
