"""A plain PyTorch loop: attention modules that the user names, called as ``module(q, k, v)``.

watched = watch(model, r"blocks\\.\\d+\\.attend", heads=12, order="bshd")
monitor = AttentionMonitor(watched, optimizer, directory="runs/mine")
"""

from __future__ import annotations

import re
from typing import Any

import torch

from megatron_patch.stability.adapters.named import layer_in, watched_sites
from megatron_patch.stability.observe import Seen, Site, Watched, to_sbhd, unwrapped
from megatron_patch.stability.sampling import Geometry


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
        names: regular expression of the modules' whole names, each with a layer's number in it.
        heads, kv_heads: query and key/value heads.
        order: axes of q, k, v and O: ``bshd``, ``bhsd`` or ``sbhd``; O may have h and d flat.
        causal, scale, dropout_p: of the attention; scale default: 1 / sqrt(head dim).
        library: stabilizer, where the modules call ``stable_attention``; else O is a plain one.

    Raises:
        ValueError: no module has such a name, or one has no number in its name.
    """

    def read(site: Site, args: Any, kwargs: Any, output: torch.Tensor) -> Seen:
        sizes = [[x.shape[order.index(axis)] for axis in "sbhd"] for x in args[:3]]
        q, k, v = (to_sbhd(x.detach(), order, n) for x, n in zip(args[:3], sizes, strict=True))
        return Seen(
            site=site, q=q, k=k, v=v, inputs=args[1:3], low=None, max_logits=None, sinks=None,
            out=to_sbhd(output.detach(), order, [*sizes[0][:3], sizes[2][3]]),
            geometry=Geometry(scale=scale or q.shape[-1] ** -0.5, causal=causal),
            dropout_p=dropout_p if site.module.training else 0.0,
        )  # fmt: skip

    root = unwrapped(model)
    sites = [
        Site(
            module,
            layer_in(name)[0],
            name,
            module,
            read=read,
            order=order,
            inputs_order=order,
            library=library,
        )
        for name, module in root.named_modules()
        if re.fullmatch(names, name)
    ]
    if not sites:
        raise ValueError(f"no module of {type(root).__name__} is named {names!r}; named_modules()")
    return watched_sites(model, sites, heads=heads, kv_heads=kv_heads)
