"""``megatron.training`` (pretrain_gpt.py and its kin): the monitor around its `train_step`.

with watched(directory="runs/mine", options=MonitorOptions(guard="switch")):
    pretrain(...)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from megatron_patch.core_patches.qk_clip import clip_qk
from megatron_patch.runtime.watcher import Stop
from megatron_patch.stability.adapters import Saves, check_keywords
from megatron_patch.stability.monitor import AttentionMonitor


@contextlib.contextmanager
def watched(**options: Any) -> Iterator[list[AttentionMonitor]]:
    """Watch every `train_step` inside; ``options`` as `AttentionMonitor` takes them.

    A danger saves a checkpoint (``--save``) as it begins, a ``Stop`` saves and ends the program.
    Yields a list that holds the monitor after the first step. A restart goes on with the records of
    the directory, and with a switch that they tell of.
    """
    check_keywords(options)
    from megatron.training import get_args, training

    original, found, saves = training.train_step, [], Saves()  # type: ignore[var-annotated]
    usual: dict[str, Any] = {}

    def train_step(
        forward: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **named: Any
    ) -> Any:
        args, step = get_args(), get_args().curr_iteration + 1
        args.save_interval = usual.setdefault("save_interval", args.save_interval)
        if not found:
            options.setdefault("warmup_steps", getattr(args, "lr_warmup_iters", 0) or 0)
            found.append(AttentionMonitor(model, optimizer, **options))
            found[0].resume(step - 1)
        monitor = found[0]
        monitor.before_step(step)
        with monitor.reduced_before(optimizer):
            result = list(original(forward, data, model, optimizer, *rest, **named))
        loss, norm = next(iter(result[0].values()), math.nan), result[5]
        actions = monitor.switched(monitor.after_step(step, loss=loss, grad_norm=norm))
        # The loop saves and exits by these once the step is counted. By what train_step returns it
        # would at once, and call this step's weights a checkpoint of the step before.
        if saves.due(actions, interval=monitor.options.interval):
            args.save_interval = step
        for action in actions:
            if isinstance(action, Stop):
                args.exit_interval = step
                result[4] = getattr(action.error, "exit_code", result[4])
        return tuple(result)

    training.train_step, core_clip = train_step, training.clip_qk
    training.clip_qk = clip_qk  # hybrids, the distributed optimizer
    try:
        yield found
        for monitor in found:
            monitor.finish(get_args().curr_iteration + 1)
    finally:
        training.train_step, training.clip_qk = original, core_clip
        for monitor in found:
            monitor.close()
