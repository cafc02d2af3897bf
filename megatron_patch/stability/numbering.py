"""Numbers of layers, from the names of modules and parameters. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Layer = tuple[int, str]
"""Number, counted from 0, and the prefix of the names of the layer's parameters."""


def layer_of(root: Any, name: str, *, decoder_layers: int) -> int | None:
    """Layer index of a module or parameter name inside a GPTModel; None outside the layers."""
    parts = name.split(".")
    if len(parts) < 3 or parts[1] != "layers" or not parts[2].isdigit():
        return None
    if parts[0] == "mtp":
        return decoder_layers + int(parts[2])
    if parts[0] != "decoder":
        return None
    # Numbers count over the whole model, positions in the list over this pipeline chunk.
    return int(root.get_submodule(".".join(parts[:3])).layer_number) - 1


def whole_name(name: str, layer: int) -> str:
    """The name in the whole model of a module in ``layer`` of Megatron-Core's decoder.

    Every pipeline stage and virtual chunk counts its own layers from 0. Other modules keep their
    names: multi-token prediction is on one stage.
    """
    return re.sub(r"^decoder\.layers\.\d+", f"decoder.layers.{layer}", name)


def layers_in(names: Iterable[str]) -> dict[str, Layer]:
    """The layers of modules of other libraries: the first number in each name.

    Where several have the same one (blocks of stages, an encoder's and a decoder's layers, cross
    attention beside self-attention), what is summed up by layers would be of none of them: every
    module is a layer then, in this order.

    Raises ValueError: a name without a number.
    """
    found = {name: _layer(name) for name in names}
    if len({number for number, _ in found.values()}) == len(found):
        return found
    return {name: (i, _block(name)) for i, name in enumerate(found)}


def _layer(name: str) -> Layer:
    found = re.search(r"(?:^|\.)(\d+)\.", name + ".")
    if found is None:
        raise ValueError(f"the name {name!r} has no number that says which layer it is")
    return int(found[1]), name[: found.end()]


def _block(name: str) -> str:
    """All up to the last number."""
    return re.sub(r"((?:^|.*\.)\d+\.).*", r"\1", name + ".")
