"""A plain PyTorch loop: attention modules that the user names, called as ``module(q, k, v)``.

watched = watch(model, r"blocks\\.\\d+\\.attend", heads=12, order="bshd")
monitor = AttentionMonitor(watched, optimizer, directory="runs/mine")
"""

from __future__ import annotations

import re
from typing import Any

import torch

from megatron_patch.attention.capabilities import BACKENDS
from megatron_patch.parallel.buffers import unwrap
from megatron_patch.stability.observe import Seen, Site, Watched, seen_call, watched_modules


def watch(
    model: torch.nn.Module,
    names: str,
    *,
    heads: int,
    kv_heads: int | None = None,
    order: str = "bshd",
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    library: str = "",
) -> Watched:
    """What `AttentionMonitor` watches.

    Args:
        model: wrapped or not; every rank has whole gradients (DistributedDataParallel, not FSDP).
        names: regular expression of the modules' whole names, each with a layer's number in it;
            where several have the same number, each is a layer, in the model's order.
        heads, kv_heads: query and key/value heads.
        order: axes of q, k, v and O: ``bshd``, ``bhsd`` or ``sbhd``; O may have h and d flat.
        causal, scale, dropout_p: of the attention; scale default: 1 / sqrt(head dim).
        library: stabilizer, where the modules call ``stable_attention``; else O is a plain one.

    Raises ValueError: an argument is none of these, no module has such a name, or one has no number
    in its name. The first observed call raises it where it is not made as said here.
    """
    groups = heads if kv_heads is None else kv_heads
    _check(names, heads, groups, order=order, library=library)

    def read(site: Site, args: Any, kwargs: Any, output: torch.Tensor) -> Seen:
        shapes = [tuple(getattr(x, "shape", ())) for x in args[:3]]
        found = [shape[order.index("h")] if len(shape) == 4 else 0 for shape in shapes]
        if found != [heads, groups, groups]:
            raise ValueError(
                f"{site.name} is called with positional arguments of shapes {shapes}; q, k and v "
                f"with axes {order}, {heads} heads of q and {groups} of k and v are watched: "
                "correct names, heads, kv_heads or order of watch()"
            )
        q, k, v, *_ = args
        sizes = [shape[order.index("s")] for shape in shapes]
        if len(set(sizes)) > 1 and (causal or sizes[1] != sizes[2]):
            raise ValueError(
                f"{site.name} is called with {sizes} tokens of q, k and v; causal attention has as "
                "many of each: watch cross attention with causal=False, by a watch() of its own"
            )
        dropped = dropout_p if site.module.training else 0.0
        return seen_call(site, q, k, v, output, causal=causal, scale=scale, dropout_p=dropped)

    root = unwrap(model)
    found = {name: m for name, m in root.named_modules() if re.fullmatch(names, name)}
    if not found:
        raise ValueError(f"no module of {type(root).__name__} is named {names!r}; "
                         "model.named_modules() has the whole names")  # fmt: skip
    return watched_modules(
        model, found, heads=heads, kv_heads=groups, read=read, library=library,
        order=order, inputs_order=order,
    )  # fmt: skip


def _check(names: str, heads: int, kv_heads: int, *, order: str, library: str) -> None:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"heads {heads}, kv_heads {kv_heads}: positive, and the second must divide the first"
        )
    stabilizers = BACKENDS["stable_flash"].stabilizers
    for name, value, allowed in (
        ("order", order, ("bshd", "bhsd", "sbhd")),
        ("library", library, ("", *stabilizers)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} {value!r}: use one of {', '.join(map(repr, allowed))}")
    try:
        re.compile(names)
    except re.error as error:
        raise ValueError(f"names {names!r}: is no regular expression ({error})") from error
