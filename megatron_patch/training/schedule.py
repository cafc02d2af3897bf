"""Learning-rate schedules, through Megatron-Core's OptimizerParamScheduler.

Its ``num_steps`` counts from ``optimizer.begin_step``.

The scheduler is stepped before the update, so update n (1-based) uses lr(n): warm-up reaches the
peak at update ``warmup_steps`` (no update is spent at learning rate 0), and the update numbered
``decay_steps`` uses exactly ``min_lr``.

A run goes on with the schedule that it began with, which its checkpoints carry; `go_on` says what a
resume changes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import yaml

from megatron_patch.schema.effective import decay_steps
from megatron_patch.schema.problem import Problem
from megatron_patch.schema.run import RunConfig

_STYLES = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "constant": "constant"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What the learning rate of a step depends on; the names are those of ``optimizer:``."""

    lr: float
    min_lr: float
    schedule: str
    warmup_steps: int
    begin_step: int
    decay_steps: int
    wsd_decay_steps: int | None
    wsd_decay_style: str

    @classmethod
    def of(cls, run: RunConfig) -> Schedule:
        """The schedule of a run that begins with this configuration."""
        given = {item.name: getattr(run.optimizer, item.name) for item in fields(cls)}
        return cls(**given | {"decay_steps": decay_steps(run)})

    @classmethod
    def saved(cls, content: Mapping[str, Any], run: RunConfig) -> Schedule:
        """The schedule of a checkpoint, by its plain data.

        ``config``, its configuration as YAML, has three values that ``schedule``, the state of the
        scheduler, lacks; ``run`` has them where a checkpoint has no configuration.
        """
        state, written = content["schedule"], yaml.safe_load(content.get("config") or "{}")
        o = written.get("optimizer") or {}
        begin = o.get("begin_step", 0)
        return cls(
            lr=state["max_lr"],
            min_lr=state["min_lr"],
            schedule=next(k for k, v in _STYLES.items() if v == state["lr_decay_style"]),
            warmup_steps=state["lr_warmup_steps"],
            begin_step=begin,
            decay_steps=begin + state["lr_decay_steps"],
            wsd_decay_steps=o.get("wsd_decay_steps", run.optimizer.wsd_decay_steps),
            wsd_decay_style=o.get("wsd_decay_style", run.optimizer.wsd_decay_style),
        )

    def build(self, optimizer: Any, *, weight_decay: float = 0.0, steps: int = 1) -> Any:
        """Its OptimizerParamScheduler; the configuration wins over a checkpoint's values."""
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        return OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=self.lr,
            min_lr=self.min_lr,
            lr_warmup_steps=self.warmup_steps,
            lr_decay_steps=self.decay_steps - self.begin_step,
            lr_decay_style=_STYLES[self.schedule],
            start_wd=weight_decay,
            end_wd=weight_decay,
            wd_incr_steps=steps,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
            wsd_decay_steps=self.wsd_decay_steps,
            lr_wsd_decay_style=self.wsd_decay_style,
        )

    def rate(self, step: int) -> float:
        """Learning rate of the update numbered ``step``, from 1."""
        scheduler = self.build(SimpleNamespace(param_groups=[]))
        scheduler.num_steps = step - self.begin_step
        return float(scheduler.get_lr({}))

    def shape(self) -> dict[str, Any]:
        """What only ``schedule_from: now`` changes, as far as it has an effect."""
        names = ["schedule", "warmup_steps", "begin_step"]
        names += ["decay_steps"] * (self.schedule != "constant")
        names += ["wsd_decay_steps", "wsd_decay_style"] * (self.schedule == "wsd")
        return {name: getattr(self, name) for name in names}

    def end(self) -> str:
        """The last word of the schedule."""
        if self.schedule == "constant":
            return f"{self.lr:.4g}, constant"
        return f"{self.min_lr:.4g} from step {self.decay_steps:,}"


def build_schedule(run: RunConfig, optimizer: Any) -> Any:
    """The OptimizerParamScheduler of a run that begins; `go_on` adapts it to a checkpoint."""
    steps = run.training.train_steps
    return Schedule.of(run).build(optimizer, weight_decay=run.optimizer.weight_decay, steps=steps)


def go_on(
    run: RunConfig, scheduler: Any, content: Mapping[str, Any], *, step: int
) -> tuple[list[Problem], list[str]]:
    """Let a scheduler that took over the steps of this run's checkpoint go on with its schedule.

    Returns what stands against going on, and a line for every change of a learning rate.
    """
    o, before, now = run.optimizer, Schedule.saved(content, run), Schedule.of(run)
    same_begin = now.begin_step == before.begin_step
    if o.schedule_from == "start" and o.decay_steps is None and same_begin:
        now = replace(now, decay_steps=before.decay_steps)
    change = f"learning rate of step {step + 1:,}: {before.rate(step + 1):.4g} -> "
    change += f"{now.rate(step + 1):.4g}; at the end {before.end()} -> {now.end()}"
    old, new = before.shape(), now.shape()
    names = [name for name in new if name in old and old[name] != new[name]]
    if names and o.schedule_from == "start":
        text = "{}, but the schedule that this run goes on with has {}: set it back, or ask for "
        text += f"the change with optimizer.schedule_from: now ({change})"
        return [Problem(f"optimizer.{n}", text.format(new[n], old[n])) for n in names], []
    scheduler.lr_decay_steps = now.decay_steps - now.begin_step
    scheduler.step(increment=0)
    lines = [] if (now.lr, now.min_lr, new) == (before.lr, before.min_lr, old) else [change]
    return [], lines + _ends_elsewhere(run, now, step)


def _ends_elsewhere(run: RunConfig, now: Schedule, step: int) -> list[str]:
    """A warning where the decay of a resumed run does not end with it and nobody asked for that."""
    last = run.training.train_steps
    asked = Schedule.of(run)
    if now.decay_steps == asked.decay_steps or now.schedule == "constant":
        return []
    if now.decay_steps < last:
        what = f"the learning rate stays {now.min_lr:.4g} from step {now.decay_steps:,} on"
    else:
        what = f"the learning rate is {now.rate(last):.4g} when the run ends"
    return [
        f"warning: training.train_steps is {last:,}, and the schedule that the run began with ends "
        f"its decay at step {now.decay_steps:,}: {what}; to decay until step {last:,} set "
        f"optimizer.schedule_from: now (learning rate of step {step + 1:,}: "
        f"{now.rate(step + 1):.4g} -> {asked.rate(step + 1):.4g}), to keep it without this line "
        f"optimizer.decay_steps: {now.decay_steps}"
    ]
