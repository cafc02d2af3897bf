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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_patch.faults import skips
from megatron_patch.faults.skips import Skips
from megatron_patch.parallel.first_rank import of_all, on_first_rank
from megatron_patch.parallel.setup import Layout
from megatron_patch.runtime.heartbeat import phase
from megatron_patch.runtime.records import AppendOnlyFile
from megatron_patch.runtime.watcher import ResumePoint, RewindWanted, UpdateDropped, Watcher
from megatron_patch.schema.faults import SpikeConfig
from megatron_patch.schema.problem import ConfigError, Problem

FILE = "spikes.jsonl"
FLOOR = 0.01
"""Smallest deviation, as a share of the median."""
TO_SIGMA = 1.4826
_DONE = {"record": "recorded, the update is taken", "skip": "the update is dropped",
         "rewind": "going back"}  # fmt: skip


class RewindsUsedUp(RuntimeError):
    """A spike, and no rewind left; raised on all ranks."""

    exit_code = 7


class Judged(Protocol):
    """What asks the policy about every update: `training.finite.StepGuard`."""

    judge: Callable[[float, float], None] | None
    may_drop: bool


@dataclass(frozen=True, slots=True)
class Spike:
    """One step that the rule calls a spike."""

    step: int
    batch: int
    """Global batch, see `skips`."""
    loss: float
    grad_norm: float
    loss_z: float
    grad_norm_z: float

    def line(self) -> str:
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
        limits = (loss_z, self.options.loss_z), (norm_z, self.options.grad_norm_z)
        found = any(limit is not None and z > limit for z, limit in limits)
        self.history.append((loss, grad_norm))
        return found, loss_z, norm_z


def robust_score(x: float, values: tuple[float, ...]) -> float:
    """(x - median) / max(1.4826 MAD, FLOOR |median|); 0 when all of it is 0."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(v - middle) for v in values)
    scale = max(TO_SIGMA * deviation, FLOOR * abs(middle))
    return (x - middle) / scale if scale > 0 else 0.0


class SpikePolicy(Watcher):
    """Judges every update, and keeps the list of batches that rewinds left out.

    Args:
        options: ``faults.spike``.
        guard: asks `decide` about every update, unless ``action`` is ``off``.
        layout: coordinates of this rank.
        roots: the GPTModels of this rank, whose attention may keep its largest logits.
        run_dir: ``spikes.jsonl`` and ``skipped_batches.json`` go here.
        log: takes a line for people.
        samples: names the samples of a global batch.
        last_maxima: step and largest logits [layers, heads] of the telemetry's last record, where
            the model keeps none.
    """

    def __init__(
        self,
        options: SpikeConfig,
        guard: Judged,
        layout: Layout,
        *,
        roots: Iterable[torch.nn.Module],
        run_dir: Path,
        log: Callable[[str], None],
        samples: Callable[[int], Any],
        last_maxima: Callable[[], tuple[int, Any] | None] = lambda: None,
    ) -> None:
        self.options, self.detector = options, Detector(options)
        self.skips = Skips()
        self.found = 0
        self._layout, self._run_dir, self._log = layout, run_dir, log
        self._samples, self._last_maxima = samples, last_maxima
        self._file = AppendOnlyFile(run_dir / FILE)
        self._step = 0
        self._spike: Spike | None = None  # the one that `plan_rewind` is about
        self._modules = _attention_modules(roots)
        self.can_rewind: Callable[[int], bool] = lambda step: True
        """Whether there is a good checkpoint of at most this step to go back to. Collective."""
        if options.action != "off":
            guard.judge = self.decide
            guard.may_drop = options.action != "record"

    # ------------------------------------------------------------------ a step

    def before_step(self, step: int) -> None:
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
        newest = spike.step - 1 - self.options.rewind_margin
        stuck = action == "rewind" and not used_up and not self._can_go_back(newest)
        if stuck:
            done = (
                f"there is no good checkpoint of step {max(0, newest):,} or before to go back to: "
                "the update is dropped instead"
            )
        self.found += 1
        attention = self._attention()
        if self._layout.print_rank:
            self._record(spike, done, attention)
        self._log(f"{spike.line()}: {done}; samples in {FILE}")
        if used_up:
            raise RewindsUsedUp(
                f"{spike.line()}; stopped before the update: faults.spike.max_rewinds "
                f"({self.options.max_rewinds}) are used up. Look at spikes.jsonl; a lower learning "
                "rate, another attention.stabilizer, or action: skip may get past it"
            )
        if action == "skip" or stuck:
            raise UpdateDropped(spike.grad_norm)
        if action == "rewind":
            self._spike = spike
            raise RewindWanted(spike.line(), newest=newest)

    def _can_go_back(self, newest: int) -> bool:
        # A pause for the hang watch: a checkpoint is verified, whatever its size.
        with phase("save"):
            return self.can_rewind(newest)

    # --------------------------------------------------------------- recording

    def _record(self, spike: Spike, done: str, attention: dict[str, Any]) -> None:
        entry = {
            **{key: value for key, value in asdict(spike).items() if key != "batch"},
            "action": done,
            "global_batch": spike.batch,
            "samples": self._samples(spike.batch),
            "attention": attention,
        }
        self._file.append((json.dumps(entry) + "\n").encode())

    def _attention(self) -> dict[str, Any]:
        """Largest logit per layer and head of this step, or why there is none. Collective."""
        mine = {}
        for layer, module in self._modules:
            maxima = module.current_max_attn_logits if module.want_max_logits else None
            if maxima is not None:
                mine[layer, self._layout.tp_rank] = [float(x) for x in maxima.flatten()]
        heads: dict[tuple[int, int], list[float]] = {}
        for part in of_all(mine):
            for key, values in part.items():
                old = heads.setdefault(key, values)
                heads[key] = [max(a, b) for a, b in zip(old, values, strict=True)]
        if heads:
            layers: dict[str, list[float]] = {}
            for layer, tp in sorted(heads):
                layers.setdefault(str(layer), []).extend(heads[layer, tp])
            return {"step": self._step, "max_logit": layers}
        last = self._last_maxima() if self._layout.print_rank else None
        if last is not None:
            step, table = last
            rows = ([round(float(x), 4) for x in row] for row in table)
            return {
                "step": step,
                "from": "stability telemetry, the last record before the spike",
                "max_logit": {str(n): row for n, row in enumerate(rows)},
            }
        return {
            "max_logit": "not available: the model keeps no maxima, and stability telemetry has "
            "no record yet"
        }

    # -------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """History and windows."""
        history = [list(h) for h in self.detector.history]
        return {"faults": {"history": history, "skips": self.skips.as_dict()}}

    def load_state(self, at: ResumePoint) -> None:
        """Take over history and windows. Collective.

        The file of the run directory wins over the checkpoint's copy: a rewind writes it before
        it goes on, so it knows of rewinds that no checkpoint has seen yet.

        Raises ConfigError: the file is damaged, or says something else about steps done.
        """
        saved = at.extra.get("faults")
        self.detector.history.clear()
        if saved is not None:
            self.detector.history.extend((float(a), float(b)) for a, b in saved["history"])
        if at.rewound:  # the windows are those that `plan_rewind` made
            return
        found, own = on_first_rank(
            lambda: (self._listed(at), at.has_saved), ValueError, rank=self._layout.rank
        )
        if found is not None:
            self.skips = found
        elif saved is not None:
            self.skips = Skips.from_dict(saved["skips"])
            if not own:  # those of the run that this one starts from are not counted here
                self.skips = replace(self.skips, rewinds=0)
            if self.skips.windows and self._layout.print_rank:
                skips.write(self._run_dir, self.skips)
        if self.skips.windows:
            left = ", ".join(f"{f}-{f + n - 1}" for f, n in self.skips.windows)
            self._log(f"global batches left out of this run: {left} ({skips.FILE})")

    def _listed(self, at: ResumePoint) -> Skips | None:
        """What the file says. First rank only."""
        found, saved = skips.read(self._run_dir), at.extra.get("faults")
        # Where another run's checkpoint is loaded, its data goes on all the same (`inheritance`).
        if found is None or saved is None or not at.has_saved:
            return found
        before = Skips.from_dict(saved["skips"])
        (end, past), (_, now) = before.trained(at.step), found.trained(at.step)
        if past != now:
            text = (
                f"{self._run_dir / skips.FILE}: leaves out {list(map(list, now))} of the batches "
                f"of steps 1-{at.step}, which were trained with {list(map(list, past))} left out; "
                "from here on other batches would be left out or repeated. Put those back, and "
                f"name batches from {end} on only; to leave out earlier ones, go back first: "
                f"megatron-patch checkpoint rollback {self._run_dir} --to STEP"
            )
            raise ConfigError([Problem("run_dir", text)])
        return found

    def plan_rewind(self, back_to: int) -> None:
        """Leave the batches from ``back_to`` to the spike out from now on."""
        assert self._spike is not None, "a rewind is wanted"
        first, batch = self.skips.batch(back_to + 1), self._spike.batch
        if self.options.rewind_skip is not None:
            first = max(first, batch - self.options.rewind_skip + 1)
        self.skips = self.skips.add(first, batch - first + 1)
        if self._layout.print_rank:
            skips.write(self._run_dir, self.skips)
        self._log(
            f"going back to step {back_to:,}; global batches {first:,}-{batch:,} are left "
            f"out (rewind {self.skips.rewinds} of {self.options.max_rewinds})"
        )

    def close(self) -> None:
        self._file.close()


def _attention_modules(roots: Iterable[torch.nn.Module]) -> list[tuple[int, Any]]:
    """(0-based layer, module) of the core attention that can keep its largest logits."""
    modules: list[Any] = [module for root in roots for module in root.modules()]
    return [
        (m.layer_number - 1, m)
        for m in modules
        if hasattr(m, "want_max_logits") and hasattr(m, "current_max_attn_logits")
    ]
