"""Hugging Face transformers: the monitor as a `TrainerCallback`; docs/integrations.md.

trainer.add_callback(attention_callback(model, directory="runs/mine"))
"""

from __future__ import annotations

import functools
import logging
from functools import partial
from typing import Any

import torch

from megatron_patch.stability.adapters import Saves
from megatron_patch.stability.monitor import AttentionMonitor
from megatron_patch.stability.observe import Seen, Watched, seen_call, watched_modules

log = logging.getLogger(__name__)


def attention_callback(model: Any, **options: Any) -> Any:
    """A callback for `transformers.Trainer`; ``options`` as `AttentionMonitor` takes them.

    It stands around the function that ``attn_implementation`` names. A danger saves a checkpoint as
    it begins, a ``Stop`` saves, ends the training and raises its error out of ``Trainer.train``.
    ValueError: no such function can be watched.
    """
    from transformers import TrainerCallback
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    name = model.config._attn_implementation
    watched = _watched(model, name, known=name in FUNCTIONS.valid_keys())
    monitor = AttentionMonitor(watched, **options)
    losses, saves = _Losses(), Saves()

    class Callback(TrainerCallback):  # type: ignore[misc]
        handle: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if self.handle is None:  # another model's training may be around this one
                self.plain = FUNCTIONS[name]
            else:  # after an error, as ``auto_find_batch_size`` does
                self.handle.remove()
            self.handle = model.register_forward_hook(losses.keep, with_kwargs=True)
            self.stop = None
            self.norm: Any = None
            monitor.resume(state.global_step)
            FUNCTIONS[name] = monitor.observer.around(self.plain, watched.sites)

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            losses.parts = []
            monitor.before_step(state.global_step + 1)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            monitor.grads_reduced()
            self.norm = None if losses.parts else _norm(model, args)

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            (rate, *_), step = named["lr_scheduler"].get_last_lr(), state.global_step
            found = monitor.after_step(step, loss=losses.whole(args), grad_norm=self.norm, lr=rate)
            actions = monitor.switched(found)
            control.should_save |= saves.due(actions, interval=monitor.options.interval)
            for action in actions:
                self.stop = getattr(action, "error", self.stop)
            control.should_training_stop |= self.stop is not None

        def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            monitor.finish(state.global_step)
            monitor.close()
            self.handle.remove()
            self.handle = None
            FUNCTIONS[name] = self.plain
            if self.stop is not None:  # saved; a scheduler must not take it for a success
                raise self.stop

    return Callback()


def _watched(model: Any, name: str, *, known: bool) -> Watched:
    """Its attention modules, which call the function that ``attn_implementation`` names."""
    text = model.config.get_text_config()
    found = {n: m for n, m in model.named_modules()
             if hasattr(m, "layer_idx") and hasattr(m, "is_causal")}  # fmt: skip
    if not known or not found:
        raise ValueError(
            f"attn_implementation {name!r}: use stable_attention, sdpa or flash_attention_2"
        )
    # An encoder may have others than a decoder: what a module lacks of the most is NaN.
    heads = max(text.num_attention_heads, *(getattr(m, "num_heads", 0) for m in found.values()))
    return watched_modules(
        model, found, heads=heads, read=partial(_read, heads), hooked=False, order="bshd",
        kv_heads=getattr(text, "num_key_value_heads", None), inputs_order="bhsd",
        library="compensated" if name == "stable_attention" else "",
    )  # fmt: skip


@functools.cache
def _warn_heads(name: str, given: int, heads: int) -> None:
    log.warning("%s is not observed: it has %d query heads, and the model's configuration %d",
                name, given, heads)  # fmt: skip


class _Losses:
    """Loss of a step, from those of its micro-batches."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        self._together = False

    def keep(self, module: Any, args: Any, named: Any, output: Any) -> None:
        """A forward hook of the model."""
        if module.training and getattr(output, "loss", None) is not None:
            self.parts.append(output.loss.detach())
            # A sum over the tokens of a micro-batch, divided by those of all of them.
            self._together = named.get("num_items_in_batch") is not None

    def whole(self, args: Any) -> torch.Tensor | float:
        """0 where the model returned none: label smoothing, or a loss function of the Trainer's."""
        if not self.parts:
            return 0.0
        every = torch.stack(self.parts)
        if not self._together:
            return every.mean()
        # By default the tokens are those of all ranks: `Trainer` multiplies, too.
        shared = getattr(args, "average_tokens_across_devices", False)
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return every.sum() * (ranks if shared else 1)


def _norm(model: Any, args: Any) -> torch.Tensor | None:
    """Of gradients, which alone show NaN where no loss is known; those of fp16 overflow, too."""
    if getattr(args, "fp16", False):
        return None
    return torch.nn.utils.get_total_norm([x.grad for x in model.parameters() if x.grad is not None])


def _read(heads: int, site: Any, args: Any, named: Any, output: torch.Tensor) -> Seen | None:
    """A call of an attention function: q, k, v [b, h, s, d], output [b, s, h, d]."""
    q, k, v, mask, *_ = args
    if q.shape[1] > heads:
        _warn_heads(site.name, int(q.shape[1]), heads)
        return None
    packed = getattr(mask, "offsets", None) is not None or named.get("cu_seq_lens_q") is not None
    if isinstance(mask, torch.Tensor) or packed or q.shape[2] != k.shape[2]:
        return None
    reach, causal = named.get("sliding_window"), named.get("is_causal")
    return seen_call(
        site, q, k, v, output, scale=named.get("scaling"), sinks=named.get("s_aux"),
        causal=getattr(mask, "causal", site.module.is_causal if causal is None else causal),
        window=getattr(mask, "window", None if reach is None else (reach - 1, 0)),
        softcap=bool(named.get("softcap")), dropout_p=named.get("dropout", 0.0),
    )  # fmt: skip
