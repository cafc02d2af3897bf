"""What is watched of a model that is not Megatron-Core's: modules known by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from megatron_patch.stability.observe import Site, Watched, unwrapped


def layer_in(name: str) -> tuple[int, str]:
    """(layer, prefix of the layer's parameters): the first number in a module's name.

    Raises:
        ValueError: it has none.
    """
    found = re.search(r"(?:^|\.)(\d+)\.", name + ".")
    if found is None:
        raise ValueError(f"the name {name!r} has no number that says which layer it is")
    return int(found[1]), name[: found.end()]


def watched_sites(
    model: torch.nn.Module, sites: Sequence[Site], *, heads: int, kv_heads: int | None
) -> Watched:
    """Attention at ``sites`` (not empty); gradients of ``model``, wrapped or not, are whole."""
    prefixes = {layer_in(site.name)[1]: site.layer for site in sites}

    def layer_of(_: torch.nn.Module, name: str) -> int | None:
        return next((n for prefix, n in prefixes.items() if name.startswith(prefix)), None)

    return Watched(
        sites=list(sites),
        layers=1 + max(site.layer for site in sites),
        heads=heads,
        kv_heads=kv_heads or heads,
        layer_of=layer_of,
        chunks=[model],
        roots=[unwrapped(model)],
    )
