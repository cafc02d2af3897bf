"""Our own trainer: the monitor as one of its watchers (`Watcher` says when each is called)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_patch.runtime.watcher import Action, ResumePoint, StepResult, Watcher
from megatron_patch.schema.effective import warmup_end
from megatron_patch.stability import names
from megatron_patch.stability.groups import Groups
from megatron_patch.stability.monitor import AttentionMonitor
from megatron_patch.stability.observe import attention_name

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_patch.monitor.hub import Monitor
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.schema.run import RunConfig
    from megatron_patch.stability.monitor import Record


class Stability(Watcher):
    """Telemetry, early warning, guard and captures of a run; begins anew at `load_state`."""

    def __init__(
        self, run: RunConfig, layout: Layout, chunks: Any, *, monitor: Monitor, run_dir: Path
    ) -> None:
        self._run, self._monitor, a = run, monitor, run.attention
        self.attention = AttentionMonitor(
            chunks, directory=run_dir, options=run.stability, groups=Groups.find(layout.device),
            log=monitor.say, warmup_steps=warmup_end(run), name=run.name,
            attention=attention_name(a.backend, a.stabilizer, a.backward),
        )  # fmt: skip
        self._latest: dict[str, float] = {}

    def before_step(self, step: int) -> None:
        self.attention.before_step(step)

    def grads_reduced(self) -> None:
        self.attention.grads_reduced()

    def before_save(self) -> None:
        self.attention.before_save()

    def close(self) -> None:
        self.attention.close()

    def load_state(self, at: ResumePoint) -> None:
        options, self._latest = self._run.checkpoint, {}
        parent = options.load_from if "step" in options.carried else None
        own = at.extra.get("stability")
        self.attention.resume(
            at.step, own, switched_at=at.switched_at, parent=parent, has_saved=at.has_saved
        )

    def after_step(self, step: int, result: StepResult) -> list[Action]:
        loss, norm = result.report, result.grad_norm
        return self._take(self.attention.after_step(step, loss=loss, grad_norm=norm, lr=result.lr))

    def finish(self, step: int) -> list[Action]:
        return self._take(self.attention.finish(step))

    def before_rewind(self, back_to: int) -> list[Action]:
        return self._take(self.attention.before_rewind(back_to))

    def _take(self, found: Record | None) -> list[Action]:
        left = self.attention.switched(found)
        if found is not None and found.heads:
            self._monitor.scalars(found.step, found.scalars)
            self._latest = {"stability/step": float(found.step)}
            self._latest |= names.summary(found.scalars, found.heads)
        return [*left]

    def state(self) -> dict[str, Any]:
        return {"stability": self.attention.state()}

    def scalars(self) -> dict[str, float]:
        return self._latest

    def status(self) -> list[str]:
        level = self._latest.get("stability/level")
        return [] if level is None else [f"attention {names.LEVELS[int(level)]}"]
