"""Launches with all but the addresses worked out once.

Triton looks at every argument in every call: it binds them by name, reads types, alignment and
special values, and looks up the kernel compiled for them. With 29 to 84 arguments that takes the
host longer than a short kernel takes the GPU (docs/kernels.md, "Host time"). All of it follows from
what the caller names (`facts`) and from type, shape, strides and alignment of the tensors. Where
these come again, the compiled kernel is launched with the arguments of last time, in which only
addresses are new.

Lengths of packed sequences change from step to step, so a launch is kept when it is seen for the
second time. Triton's interpreter compiles nothing, and nothing of it is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from stable_attention.triton.descriptors import at

Tensors = tuple[torch.Tensor | None, ...]
Arguments = tuple[tuple[int, ...], tuple[object, ...], dict[str, object]]
"""Grid, positional arguments and named ones of a kernel."""

KEPT = 1024
"""Launches remembered: four a kind of layer, four a pair of chunks under context parallelism."""

_launches: dict[tuple[object, ...], _Launch | None] = {}


class _Launch:
    """A compiled kernel, its grid and its arguments."""

    def __init__(
        self, kernel: Any, compiled: CompiledKernel, arguments: Arguments, tensors: Tensors
    ) -> None:
        grid, positional, named = arguments
        names = kernel.arg_names
        self._kernel = kernel  # alive, so that its id is not another's
        self._run = compiled[(*grid, 1, 1)[:3]]
        self._arguments = [*positional, *(named[name] for name in names[len(positional) :])]
        slots = {id(x): slot for slot, x in enumerate(tensors) if x is not None}
        self._addresses: list[tuple[int, int]] = []
        self._described: list[tuple[int, int, Any]] = []
        for place, argument in enumerate(self._arguments):
            if isinstance(argument, torch.Tensor):
                self._addresses.append((place, slots[id(argument)]))
            elif isinstance(argument, (TensorDescriptor, GluonDescriptor)):
                self._described.append((place, slots[id(argument.base)], at(None, argument)))
            else:
                continue
            self._arguments[place] = None  # keeps no tensor alive

    def __call__(self, tensors: Tensors, addresses: list[int]) -> None:
        arguments = self._arguments.copy()
        for place, slot in self._addresses:
            arguments[place] = addresses[slot]
        for place, slot, template in self._described:
            arguments[place] = at(tensors[slot], template)
        self._run(*arguments)


def launch(
    kernel: Any,
    facts: tuple[object, ...],
    tensors: Tensors,
    arguments: Callable[..., Arguments],
    *,
    own: int = 0,
) -> None:
    """Run ``kernel`` on the current device with ``arguments(*tensors)``.

    Args:
        facts: hashable; with kinds and alignment of the tensors they decide all arguments that are
            neither of the tensors nor a descriptor of one.
        tensors: all tensors that the kernel is given, None where it is given none.
        arguments: called where the launch is not known yet, perhaps with aliases of the tensors.
        own: so many of the last tensors are new ones of the caller, whose kinds follow from
            ``facts`` and whose addresses are multiples of 16.
    """
    # On the CPU and of the meta device (-1 both) nothing is compiled, and so nothing kept.
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    key = (
        id(kernel),
        facts,
        # What else Triton compiles by.
        knobs.runtime.debug,
        knobs.compilation.instrumentation_mode,
        *(
            None if x is None else (x.get_device(), x.dtype, x.shape, x.stride(), address % 16 == 0)
            for x, address in zip(tensors[: len(tensors) - own], addresses, strict=False)
        ),
    )
    known = _launches.get(key)
    if known is not None and not kernel.pre_run_hooks:
        known(tensors, addresses)
        return
    seen = key in _launches
    if seen:
        # Each an object of its own, so that one tensor in two places is told apart.
        tensors = tuple(None if x is None else x.detach() for x in tensors)
    grid, positional, named = found = arguments(*tensors)
    compiled = kernel[grid](*positional, **named)
    if not seen and len(_launches) >= KEPT:
        _make_room()
    keeps = seen and isinstance(compiled, CompiledKernel)
    _launches[key] = _Launch(kernel, compiled, found, tensors) if keeps else None


def _make_room() -> None:
    """Forget what was seen only once, or all of it where that is not enough."""
    for key in [key for key, kept in _launches.copy().items() if kept is None]:
        _launches.pop(key, None)
    if len(_launches) >= KEPT:
        _launches.clear()


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Nothing that was kept before is used within, and nothing of it is kept after."""
    global _launches
    before, _launches = _launches, {}
    try:
        yield
    finally:
        _launches = before


__all__ = ["anew", "launch"]
