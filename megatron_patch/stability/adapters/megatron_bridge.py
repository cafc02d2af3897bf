"""Megatron-Bridge 0.6: the monitor as a callback of its `pretrain` and `finetune`.

pretrain(config, forward_step, callbacks=[AttentionCallback(directory="runs/mine")])
"""

from __future__ import annotations

import math
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_patch.core_patches.qk_clip import clip_qk
from megatron_patch.runtime.watcher import Stop
from megatron_patch.stability.adapters import Saves, check_keywords
from megatron_patch.stability.monitor import AttentionMonitor


class AttentionCallback:
    """Events as Bridge names them; ``options`` as `AttentionMonitor` takes them.

    A danger makes this step one of ``checkpoint.save_interval`` as it begins. A ``Stop`` saves and
    exits with the guard's code before the next update. A restart goes on with the records of the
    directory, and with a switch that they tell of.
    """

    def __init__(self, **options: Any) -> None:
        check_keywords(options)
        self._options, self._stop, self._saves = options, False, Saves()

    def on_train_start(self, context: Any) -> None:
        """The model is built and loaded."""
        from megatron.bridge.training import train as loop

        self._loop, self._core_clip = loop, loop.clip_qk
        loop.clip_qk = clip_qk  # hybrids, the distributed optimizer
        train, cfg = context.state.train_state, context.state.cfg
        warmup = getattr(cfg.scheduler, "lr_warmup_iters", 0) or 0
        options: dict[str, Any] = {"warmup_steps": warmup} | self._options
        self.monitor = AttentionMonitor(context.model, context.optimizer, **options)
        self.monitor.resume(train.step)
        self._save_interval = cfg.checkpoint.save_interval

    def on_train_step_start(self, context: Any) -> None:
        """`train_state.step` counts the steps done."""
        context.state.cfg.checkpoint.save_interval = self._save_interval
        self.monitor.before_step(context.state.train_state.step + 1)
        self._reduced = self.monitor.reduced_before(context.optimizer)
        self._reduced.__enter__()

    def on_train_step_end(self, context: Any) -> None:
        """The update is launched; the step is not counted yet."""
        self._reduced.__exit__(None, None, None)
        if self._stop:
            return self.on_train_end(context)  # it made no update; Bridge saves and exits
        cfg, step = context.state.cfg, context.state.train_state.step + 1
        loss = next(iter((context.loss_dict or {}).values()), math.nan)
        found = self.monitor.after_step(step, loss=loss, grad_norm=context.grad_norm)
        actions = self.monitor.switched(found)
        for action in actions:
            if isinstance(action, Stop):
                answer = bool(cfg.checkpoint.save), True, getattr(action.error, "exit_code", 1)
                # Asked before every update; a Bridge that ends at exit_interval exits with 0.
                get_rerun_state_machine().should_checkpoint_and_exit = lambda answer=answer: answer
                self._stop = True
        due = self._saves.due(actions, interval=self.monitor.options.interval)
        if due and not self._stop:
            cfg.checkpoint.save_interval = step

    def on_train_end(self, context: Any) -> None:
        """All steps are done."""
        self.monitor.finish(context.state.train_state.step)
        self.monitor.close()
        self._loop.clip_qk = self._core_clip
