"""Hugging Face transformers: the monitor as a `TrainerCallback`.

    trainer.add_callback(attention_callback(model, directory="runs/mine"))

It stands around the function that the model's ``attn_implementation`` names (``stable_attention``,
``sdpa``, ``flash_attention_2``; ``eager`` has none) while the model trains. Calls with packed
documents or a padding mask are not observed. Layers' gradient norms are
those after clipping; the loss is that of the model's outputs, 0 where they have none.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patch.runtime.watcher import Stop
from megatron_patch.stability.adapters.named import layer_in, watched_sites
from megatron_patch.stability.monitor import AttentionMonitor, Record
from megatron_patch.stability.observe import Seen, Site, to_sbhd
from megatron_patch.stability.sampling import Geometry


def attention_callback(model: Any, **options: Any) -> Any:
    """A callback for `transformers.Trainer`; ``options`` as `AttentionMonitor` takes them.

    A ``Pin`` saves a checkpoint, a ``Stop`` saves and ends the training.

    Raises:
        ValueError: the model's attention is in no function that can be watched.
    """
    from transformers import TrainerCallback
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    name, text = model.config._attn_implementation, model.config.get_text_config()
    library = "compensated" if name == "stable_attention" else ""
    sites = {
        module: Site(module, layer_in(path)[0], path, module, read=_read, hooked=False,
                     order="bshd", inputs_order="bhsd", library=library)
        for path, module in model.named_modules() if hasattr(module, "layer_idx")
        and hasattr(module, "is_causal")
    }  # fmt: skip
    if name not in FUNCTIONS.valid_keys() or not sites:
        raise ValueError(
            f"attn_implementation {name!r} of {type(model).__name__} calls no attention function "
            "that can be watched; use stable_attention, sdpa or flash_attention_2"
        )
    heads, kv = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    watched = watched_sites(model, list(sites.values()), heads=heads, kv_heads=kv)
    monitor, original, losses = AttentionMonitor(watched, **options), FUNCTIONS[name], []  # type: ignore[var-annotated]

    def observed(module: Any, q: Any, k: Any, v: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        out = original(module, q, k, v, mask, *rest, **named)
        if module in sites:
            monitor.observer.called(sites[module], (q, k, v, mask), named, out[0])
        return out

    def keep_loss(module: Any, args: Any, named: Any, output: Any) -> None:
        if module.training and getattr(output, "loss", None) is not None:
            losses.append(output.loss.detach())

    class Callback(TrainerCallback):  # type: ignore[misc]
        """Calls the monitor where `Trainer` calls this."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            FUNCTIONS[name] = observed
            self.handle = model.register_forward_hook(keep_loss, with_kwargs=True)
            monitor.resume(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            losses.clear()
            monitor.before_step(state.global_step + 1)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            monitor.grads_reduced()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            rates = named["lr_scheduler"].get_last_lr()
            loss = torch.stack(losses).mean() if losses else 0.0
            _carry_out(monitor.after_step(state.global_step, loss=loss, lr=rates[0]), control)

        def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            monitor.finish(state.global_step)
            monitor.close()
            self.handle.remove()
            FUNCTIONS[name] = original

    return Callback()


def _carry_out(record: Record | None, control: Any) -> None:
    for action in record.actions if record else ():
        control.should_save = True
        control.should_training_stop |= isinstance(action, Stop)


def _read(site: Site, args: Any, named: Any, output: torch.Tensor) -> Seen | None:
    """A call of an attention function: q, k, v [b, h, s, d], output [b, s, h, d]."""
    q, k, v, mask = args
    window, causal = named.get("sliding_window"), named.get("is_causal")
    if isinstance(mask, torch.Tensor) or getattr(mask, "offsets", None) is not None:
        return None
    if q.shape[2] != k.shape[2] or named.get("cu_seq_lens_q") is not None:
        return None
    causal = getattr(mask, "causal", site.module.is_causal if causal is None else causal)
    reach = getattr(mask, "window", None if window is None else (window - 1, 0))
    sizes = [[x.shape[i] for i in (2, 0, 1, 3)] for x in (q, k, v)]
    parts = [to_sbhd(x.detach(), "bhsd", n) for x, n in zip((q, k, v), sizes, strict=True)]
    return Seen(
        site=site, q=parts[0], k=parts[1], v=parts[2], inputs=(k, v), low=None, max_logits=None,
        out=to_sbhd(output.detach(), "bshd", [*sizes[0][:3], sizes[2][3]]),
        sinks=named.get("s_aux"), softcap=bool(named.get("softcap")),
        geometry=Geometry(scale=named.get("scaling") or q.shape[-1] ** -0.5, causal=causal,
                          window=reach),
        dropout_p=named.get("dropout", 0.0),
    )  # fmt: skip
