"""Numbers of layers in models of other libraries, from their modules' names. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

Layer = tuple[int, str]
"""Number, counted from 0, and the prefix of the names of the layer's parameters."""


def layers_in(names: Iterable[str]) -> dict[str, Layer]:
    """The layers of modules: the first number in each name.

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
