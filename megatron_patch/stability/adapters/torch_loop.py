"""A plain PyTorch loop: attention modules that the user names, called with q, k and v.

watched = watch(model, r"blocks\\.\\d+\\.attend", heads=12, order="bshd")
monitor = AttentionMonitor(watched, optimizer, directory="runs/mine")
"""

from __future__ import annotations

import re
from typing import Any

import torch

from megatron_patch.stability.observe import Seen, Site, Watched, to_sbhd, unwrapped
from megatron_patch.stability.sampling import Geometry

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


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
) -> Watched:
    """What `AttentionMonitor` watches.

    Args:
        model: wrapped or not; gradients are whole on every rank (DistributedDataParallel, not FSDP).
        names: regular expression that matches the whole names of the modules. Each is called
            as ``module(q, k, v)`` and returns O, or a tuple that begins with it; the first number
            in its name is its layer.
        heads, kv_heads: query and key/value heads.
        order: axes of q, k, v and O: ``bshd``, ``bhsd`` or ``sbhd``; O may have the last two flat.
        causal, scale, dropout_p: of the attention; scale default: 1 / sqrt(head dim).

    Raises:
        ValueError: no module has such a name, or one with no number in its name.
    """
    root, sites = unwrapped(model), []

    def read(site: Site, args: Any, kwargs: Any, output: torch.Tensor) -> Seen:
        q, k, v = args[:3]
        s, b = q.shape[order.index("s")], q.shape[order.index("b")]
        sizes = [(s, b, x.shape[order.index("h")], x.shape[order.index("d")]) for x in (q, k, v)]
        parts = [to_sbhd(x.detach(), order, n) for x, n in zip((q, k, v), sizes, strict=True)]
        return Seen(
            site=site, q=parts[0], k=parts[1], v=parts[2], inputs=(k, v),
            out=to_sbhd(output.detach(), order, (s, b, sizes[0][2], sizes[2][3])),
            low=None, max_logits=None, sinks=None,
            geometry=Geometry(scale=scale or q.shape[-1] ** -0.5, causal=causal),
            dropout_p=dropout_p if site.module.training else 0.0,
        )  # fmt: skip

    for name, module in root.named_modules():
        if re.fullmatch(names, name):
            around = root.get_submodule(name.rpartition(".")[0])
            orders = {"order": order, "inputs_order": order}
            sites.append(Site(module, layer_in(name), name, around, read=read, **orders))
    if not sites:
        raise ValueError(
            f"no module of {type(root).__name__} is named {names!r}; see named_modules()"
        )
    return of_sites(model, sites, heads=heads, kv_heads=kv_heads)


def layer_in(name: str) -> int:
    """The first number in a module's name."""
    found = _NUMBER.search(name)
    if found is None:
        raise ValueError(f"the name {name!r} has no number that says which layer it is")
    return int(found[1])


def of_sites(
    model: torch.nn.Module, sites: list[Site], *, heads: int, kv_heads: int | None
) -> Watched:
    """Sites of a model; a parameter is of the layer whose name, up to the number, it begins with."""
    starts = {s.name[: _NUMBER.search(s.name).end()] + ".": s.layer for s in sites}  # type: ignore[union-attr]

    def layer_of(_: torch.nn.Module, name: str) -> int | None:
        return next((layer for start, layer in starts.items() if name.startswith(start)), None)

    return Watched(
        sites=sites, layers=1 + max(site.layer for site in sites), heads=heads,
        kv_heads=kv_heads or heads, layer_of=layer_of, chunks=[model], roots=[unwrapped(model)],
    )  # fmt: skip
