"""Learning-rate schedules, through Megatron-Core's OptimizerParamScheduler.

The scheduler is stepped before the update, so update n (1-based) uses lr(n): warm-up reaches the
peak at update ``warmup_steps`` (no update is spent at learning rate 0), and the update numbered
``decay_steps`` uses exactly ``min_lr``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patch.schema.run import RunConfig

_STYLES = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "constant": "constant"}


def decay_steps(run: RunConfig) -> int:
    """Update at which ``min_lr`` is reached."""
    return run.optimizer.decay_steps or run.training.train_steps


def build_schedule(run: RunConfig, optimizer: Any) -> Any:
    """The OptimizerParamScheduler of a run; the configuration wins over a checkpoint's values.

    Args:
        run: configuration.
        optimizer: a Megatron optimizer, or anything with ``param_groups``.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    o = run.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=o.lr,
        min_lr=o.min_lr,
        lr_warmup_steps=o.warmup_steps,
        lr_decay_steps=decay_steps(run),
        lr_decay_style=_STYLES[o.schedule],
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=run.training.train_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=o.wsd_decay_steps,
        lr_wsd_decay_style=o.wsd_decay_style,
    )
