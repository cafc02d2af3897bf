"""Launches with all but the addresses worked out once.

Triton looks at every argument in every call: it binds them by name, reads types, alignment and
special values, and looks up the kernel compiled for them. With 29 to 84 arguments that takes the
host longer than a short kernel takes the GPU (docs/kernels.md, "Host time"). All of it follows from
what the caller names (`facts`) and from type, shape, strides and alignment of the tensors. Where
these come again, the compiled kernel is launched with the arguments of last time, in which only
addresses are new.

Triton's launch of a compiled kernel encodes every TMA descriptor anew and calls hooks in Python; a
kept launch calls the C function below that (`_below`), with descriptors encoded once an address.

Lengths of packed sequences change from step to step, so a launch is kept when it is seen for the
second time. Triton's interpreter compiles nothing, and nothing of it is kept.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from stable_attention.triton.descriptors import at

Tensors = tuple[torch.Tensor | None, ...]
Arguments = tuple[tuple[int, ...], tuple[object, ...], dict[str, object]]
"""Grid, positional arguments and named ones of a kernel."""

KEPT = 1024
"""Launches remembered: four a kind of layer, four a pair of chunks under context parallelism."""

_launches: dict[tuple[object, ...], Any] = {}
_noting = threading.local()
KNOWN = triton.__version__.startswith(("3.6.", "3.7."))
"""Whether `_below` was written for this Triton: another's C function may take other arguments under
the same names."""
DESCRIBED = 1024
"""Addresses of a described tensor whose descriptors are kept: activations of every layer come back
to those of the last step."""


def _below(compiled: Any, grid: tuple[int, int, int]) -> tuple[Callable[..., None], list[Any]]:
    """What Triton 3.6 and 3.7 launch a kernel with under their Python: (a function of the stream
    and the arguments, of which descriptors are encoded; what `_encoded` needs of each descriptor).

    AttributeError, KeyError or TypeError where this kernel's launch is of another form.
    """
    run, metas = compiled.run, []
    call = run.launch
    if isinstance(call, FunctionType):  # it encodes descriptors and calls the C function
        cells = zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)
        found = {name: cell.cell_contents for name, cell in cells}
        call, metas = found["launcher"], found["tensordesc_meta"]
    if run.global_scratch_size or run.profile_scratch_size or None in metas:
        raise TypeError("it needs more than its arguments")
    function, packed = compiled.function, compiled.packed_metadata
    flags, hooks, scratch = (run.launch_cooperative_grid, run.launch_pdl), (None,) * 3, (None,) * 2
    if hasattr(run, "kernel_signature"):  # 3.7
        last = (*flags, packed, *hooks, *scratch, run.arg_annotations, run.kernel_signature)
        return lambda stream, given: call(*grid, stream, function, *last, given), metas
    first = (*flags, *scratch, packed, *hooks)
    return lambda stream, given: call(*grid, stream, function, *first, *given), metas


class _Address:
    """In the place of a tensor of which a descriptor asks where it lies, and no more."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _Described:
    """A descriptor as C functions take it, encoded once an address."""

    def __init__(self, template: TensorDescriptor, meta: Any) -> None:
        self._template, self._meta = template, meta
        self.known: dict[int, Any] = {}

    def arguments(self, address: int) -> list[Any]:
        """The descriptor, its extents and its strides."""
        return driver.make_tensordesc_arg(at(_Address(address), self._template), self._meta)

    def encode(self, address: int) -> Any:
        if len(self.known) >= DESCRIBED:
            self.known.clear()
        found = self.known[address] = self.arguments(address)[0]
        return found


Repeated = Callable[[list[int], int], None]
"""A kept launch as a function of addresses and of the stream."""


class _Launch:
    """A compiled kernel, its grid and its arguments."""

    def __init__(
        self, kernel: Any, compiled: CompiledKernel, arguments: Arguments, tensors: Tensors
    ) -> None:
        grid, positional, named = arguments
        names = kernel.arg_names
        self.kernel = kernel  # alive, so that its id is not another's
        x, y, z = (*grid, 1, 1)[:3]
        whole_grid = x, y, z
        self._run = compiled[whole_grid]
        self._arguments = [*positional, *(named[name] for name in names[len(positional) :])]
        slots = {id(x): slot for slot, x in enumerate(tensors) if x is not None}
        # (place among the arguments, slot among the tensors[, descriptor without its address])
        self._addresses: list[tuple[int, int]] = []
        self._templates: list[tuple[int, int, Any]] = []
        self._device = next((x.get_device() for x in tensors if x is not None), -1)
        self._call: Callable[..., None] | None = None
        metas: list[Any] = []
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            if KNOWN:
                self._call, metas = _below(compiled, whole_grid)
        # The same for `_call`: descriptors take several places each.
        self._given: list[Any] = []
        self._given_addresses: list[tuple[int, int]] = []
        self._described: list[tuple[int, int, _Described]] = []
        for place, argument in enumerate(self._arguments):
            if isinstance(argument, torch.Tensor):
                self._addresses.append((place, slots[id(argument)]))
                self._given_addresses.append((len(self._given), slots[id(argument)]))
            elif isinstance(argument, (TensorDescriptor, GluonDescriptor)):
                slot, template = slots[id(argument.base)], at(None, argument)
                self._templates.append((place, slot, template))
                if self._call is not None:
                    described = _Described(template, metas[len(self._described)])
                    self._described.append((len(self._given), slot, described))
                    self._given += described.arguments(argument.base.data_ptr())
                self._arguments[place] = None
                continue
            else:
                self._given.append(argument)
                continue
            self._given.append(None)
            self._arguments[place] = None  # keeps no tensor alive
        self._bare = self.repeated([(slot, 0) for slot in range(len(tensors))])

    def repeated(self, places: Sequence[tuple[int, int]]) -> Repeated | None:
        """The launch with its tensors at places (number among addresses, bytes behind that).

        None where it cannot be made without Triton's Python.
        """
        call, given = self._call, self._given
        if call is None:
            return None
        addresses = [(n, *places[slot]) for n, slot in self._given_addresses]
        described = [(n, *places[slot], x.known, x.encode) for n, slot, x in self._described]

        def run(starts: list[int], stream: int) -> None:
            arguments = given.copy()
            for n, start, behind in addresses:
                arguments[n] = starts[start] + behind
            for n, start, behind, known, encode in described:
                address = starts[start] + behind
                found = known.get(address)
                arguments[n] = encode(address) if found is None else found
            call(stream, arguments)

        return run

    def __call__(self, tensors: Tensors, addresses: list[int]) -> None:
        if self._bare is None or hooked():
            self._run_with_hooks(tensors, addresses)
        else:
            self._bare(addresses, _current_stream(self._device))

    def _run_with_hooks(self, tensors: Tensors, addresses: list[int]) -> None:
        """Through Triton's own launch, which profilers see."""
        arguments = self._arguments.copy()
        for place, slot in self._addresses:
            arguments[place] = addresses[slot]
        for place, slot, template in self._templates:
            arguments[place] = at(tensors[slot], template)
        self._run(*arguments)


def _current_stream(device: int) -> int:
    return triton.runtime.driver.active.get_current_stream(device)


def hooked() -> bool:
    """Whether somebody wants to see launches as Triton makes them."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


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
        *[
            None if x is None else (x.get_device(), x.dtype, x.shape, x.stride(), address % 16 == 0)
            for x, address in zip(tensors[: len(tensors) - own], addresses, strict=False)
        ],
    )
    known = _launches.get(key)
    notes = getattr(_noting, "notes", None)
    if known is not None and not kernel.pre_run_hooks:
        known(tensors, addresses)
        if notes is not None:
            notes.append((known, tensors))
        return
    if notes is not None:
        notes.append(None)
    seen = key in _launches
    if seen:
        # Each an object of its own, so that one tensor in two places is told apart.
        tensors = tuple(None if x is None else x.detach() for x in tensors)
    grid, positional, named = found = arguments(*tensors)
    compiled = kernel[grid](*positional, **named)
    if not seen:
        make_room()
    keeps = seen and isinstance(compiled, CompiledKernel)
    _launches[key] = _Launch(kernel, compiled, found, tensors) if keeps else None


def make_room() -> None:
    """Where the table is full, forget what is not kept, or all of it where that is not enough."""
    if len(_launches) < KEPT:
        return
    for key in [key for key, kept in _launches.copy().items() if not callable(kept)]:
        _launches.pop(key, None)
    if len(_launches) >= KEPT:
        _launches.clear()


def table() -> dict[tuple[object, ...], Any]:
    """What is kept: by a key, None or a launch; of a pass see `passes`."""
    return _launches


@contextlib.contextmanager
def noted() -> Iterator[list[tuple[_Launch, Tensors] | None]]:
    """The launches of this thread within, with their tensors; None is one that was not kept."""
    notes: list[tuple[_Launch, Tensors] | None] = []
    _noting.notes = notes
    try:
        yield notes
    finally:
        _noting.notes = None


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Nothing that was kept before is used within, and nothing of it is kept after."""
    global _launches
    before, _launches = _launches, {}
    try:
        yield
    finally:
        _launches = before


__all__ = ["anew", "hooked", "launch", "make_room", "noted", "table"]
