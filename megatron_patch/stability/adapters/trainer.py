"""Our own trainer: the monitor as one of its watchers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_patch.runtime.watcher import Action, ResumePoint, StepResult, Watcher
from megatron_patch.stability.groups import Groups
from megatron_patch.stability.guard import Switch
from megatron_patch.stability.monitor import AttentionMonitor
from megatron_patch.stability.names import coherence, level_name
from megatron_patch.stability.observe import attention_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from megatron_patch.monitor.hub import Monitor
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.schema.run import RunConfig
    from megatron_patch.stability.monitor import Record


class Stability(Watcher):
    """Telemetry, early warning, guard and captures of a run; begins anew at `load_state`."""

    def __init__(
        self,
        run: RunConfig,
        layout: Layout,
        chunks: Sequence[Any],
        *,
        monitor: Monitor,
        run_dir: Path,
    ) -> None:
        self._run, self._monitor = run, monitor
        self.attention = AttentionMonitor(
            chunks,
            directory=run_dir,
            options=run.stability,
            groups=Groups.find(layout.device),
            log=monitor.say,
            warmup_steps=run.optimizer.warmup_steps,
            name=run.name,
            attention=attention_name(
                run.attention.backend, run.attention.stabilizer, run.attention.backward
            ),
        )
        self._latest: dict[str, float] = {}

    @property
    def switched_at(self) -> int:
        """Step after which the guard switched; 0: it did not."""
        return self.attention.switched_at

    def load_state(self, at: ResumePoint) -> None:
        """Go on after a step; from another run's checkpoint, with what that run recorded."""
        options, self._latest = self._run.checkpoint, {}
        self.attention.resume(
            at.step,
            at.extra.get("stability"),
            switched_at=at.switched_at,
            parent=options.load_from if "step" in options.carried else None,
            has_saved=at.has_saved,
        )

    def before_step(self, step: int) -> None:
        """See `Watcher`."""
        self.attention.before_step(step)

    def grads_reduced(self) -> None:
        """See `Watcher`."""
        self.attention.grads_reduced()

    def after_step(self, step: int, result: StepResult) -> list[Action]:
        """See `Watcher`."""
        loss, norm = result.report, result.grad_norm
        return self._take(self.attention.after_step(step, loss=loss, grad_norm=norm, lr=result.lr))

    def _take(self, found: Record | None) -> list[Action]:
        """Show a record; switch here, and leave the other actions to the trainer."""
        if found is None:
            return []
        actions: list[Action] = []
        for action in found.actions:
            if isinstance(action, Switch):
                self.attention.switch(action)
            else:
                actions.append(action)
        if found.heads:
            self._monitor.scalars(found.step, found.scalars)
            self._latest = _summary(found)
        return actions

    def finish(self, step: int) -> list[Action]:
        """See `Watcher`."""
        return self._take(self.attention.finish(step))

    def before_rewind(self, back_to: int) -> list[Action]:
        """See `Watcher`."""
        return self._take(self.attention.before_rewind(back_to))

    def before_save(self) -> None:
        """See `Watcher`."""
        self.attention.before_save()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, beside the switch: plain data."""
        return {"stability": self.attention.state()}

    def scalars(self) -> dict[str, float]:
        """What the last record says, for the next log line; first rank only."""
        return self._latest

    def status(self) -> list[str]:
        """Verdict of the last record."""
        level = self._latest.get("stability/level")
        return [] if level is None else [f"attention {level_name(level)}"]

    def last_maxima(self) -> dict[str, Any] | None:
        """Largest logits of the newest record as ``spikes.jsonl`` has them; first rank only."""
        if self.attention.max_logits is None:
            return None
        step, table = self.attention.max_logits
        return {
            "step": step,
            "from": "stability telemetry, the last record before the spike",
            "max_logit": {str(n): [round(float(x), 4) for x in row] for n, row in enumerate(table)},
        }

    def close(self) -> None:
        """See `Watcher`."""
        self.attention.close()


def _summary(found: Record) -> dict[str, float]:
    """Of a record, what metrics.csv shows: the worst head of the model."""
    heads = found.heads
    tables = {name: heads[name] for name in ("max_logit", "delta_error_rms", "kappa")}
    tables["coherence"] = coherence(heads["delta_error_mean"], heads["delta_error_rms"])
    latest = {"stability/step": float(found.step)}
    for name in ("level", "spike_score"):
        value = found.scalars.get(f"stability/{name}", math.nan)
        if math.isfinite(value):
            latest[f"stability/{name}"] = value
    for name in ("max_logit", "delta_error_rms", "coherence", "kappa"):
        if np.isfinite(tables[name]).any():
            latest[f"stability/{name}"] = float(np.nanmax(tables[name]))
    return latest
