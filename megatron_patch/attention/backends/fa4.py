"""``fa4``: FlashAttention-4, as it is or with the compensated forward of `stable_attention`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_patch.attention.backends import stable
from megatron_patch.attention.backends.row import Backend
from stable_attention import fa4

if TYPE_CHECKING:
    from megatron_patch.attention.backends.call import AttentionCall, Result


def run(call: AttentionCall) -> Result:
    """Attention by FlashAttention-4; ``compensated`` is our forward with its backward.

    Raises ValueError: causal attention of lengths that differ, or another stabilizer.
    """
    options = call.options
    if options.stabilizer == "compensated":
        options = dataclasses.replace(options, backward="fa4")
        return stable.run(dataclasses.replace(call, options=options))
    if options.stabilizer != "none":
        raise ValueError(
            f"stabilizer {options.stabilizer!r} is not one of 'compensated', 'none' with backend "
            "'fa4'; use one of them, or 'stable_flash'"
        )
    assert options.scale is not None  # `CoreAttention` gives it
    # [s, b, heads, d] -> [b, s, heads, d] as a view, and back.
    out = fa4.attention(
        *(x.transpose(0, 1) for x in (call.q, call.k, call.v)),
        scale=options.scale,
        window=(options.window_left, options.window_right),
        deterministic=options.deterministic,
    )
    return out.transpose(0, 1), None


BACKEND = Backend(
    name="fa4",
    kernel="FlashAttention-4",
    reason="the fastest published kernels, with O_lo's part of delta as a gradient of LSE",
    head_dims=(64, 128, 32),
    v_head_dim=False,
    open_window=False,
    sinks=False,
    dropout=False,
    thd=False,
    max_logits=False,
    min_sm=(9, 0),
    package=f"{fa4.PACKAGE}=={fa4.VERSION}",
    stabilizers=("compensated", "none"),
    notes=("head dimension 96 on sm_90 only; compiles for seconds where a shape is new",),
    run=run,
    install=fa4.INSTALL,
    switchable=True,
    saved_bytes=stable.saved_bytes,
    summed_head_dims=(64, 96, 128),
)
