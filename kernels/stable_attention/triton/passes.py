"""Passes with all but the addresses worked out once.

A forward or backward pass makes tensors and launches kernels. Which ones follows from what the
caller names (`facts`) and from the kinds of its tensors, as a single launch does (`launches`); the
Python that works it out takes the host longer than the launches themselves. So a pass that comes
for the third time, when its launches are kept, is watched: what it makes, what it launches, and
where every address comes from. From then on it is that alone. What it returns is made tensor by
tensor; all else that it makes lies in one buffer.

A pass that does anything else (an operator of torch on a tensor, a launch that is not kept) is run
as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from stable_attention.triton import launches
from stable_attention.triton.launches import Tensors

SIGHTS = 2
"""Passes before the one that is watched: in the second its launches get kept."""
MOST_WATCHED = 2**30
"""Elements of a tensor; watching keeps buffers alive, and of larger ones the host's share is none.
"""
ALIGNED = 512
"""Bytes, as of what the allocator hands out."""

_aten = torch.ops.aten
_MAKING = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
_ZEROS = {_aten.zeros, _aten.new_zeros}


class Unrepeatable(Exception):
    """A pass that is more than tensors made and kernels launched."""


class _Watch(TorchDispatchMode):
    """Notes the tensors that are made within, and what each is filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Tensor, float | None]] = []
        self.holds = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _MAKING:
            self.made.append((found, None))
        elif packet in _ZEROS:
            self.made.append((found, 0.0))
        elif packet is _aten.full:
            self.made.append((found, args[1]))
        elif not func.is_view:
            self.holds = False
        return found


class _Pass:
    """A pass that was watched: called with the addresses of its tensors."""

    def __init__(
        self,
        alive: object,
        tensors: Tensors,
        watch: _Watch,
        launched: list[tuple[Any, Tensors] | None],
        results: Tensors,
    ) -> None:
        self._alive = alive
        self._constants: list[torch.Tensor] = []
        # Places of addresses in `__call__`: (0, address) is a constant.
        self._places = {id(x): (1 + i, 0) for i, x in enumerate(tensors) if x is not None}
        self._foreign = {_memory(x) for x in tensors if x is not None}
        self._room = 1 + len(tensors)
        self._device = next(x.device for x in tensors if x is not None)
        self._made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        self._fills: list[tuple[int, float]] = []
        self._own: dict[int, tuple[int, int]] = {}
        self._results = self._lay_out(watch, results)
        self._jitted = []
        self._launches: list[launches.Repeated] = []
        for note in launched:
            launch = None if note is None else note[0].repeated([self._place(x) for x in note[1]])
            if note is None or launch is None:
                raise Unrepeatable
            self._launches.append(launch)
            self._jitted.append(note[0].kernel)

    def _lay_out(
        self, watch: _Watch, results: Tensors
    ) -> list[tuple[int, tuple[Any, ...] | None] | None]:
        """Where what is made lies; the results among it, with extents where they are views."""
        returned = {_memory(x) for x in results if x is not None}
        floats, index = 0, {}
        for x, fill in watch.made:
            memory = _memory(x)
            if x.numel() == 0 or x.device != self._device:
                continue
            if fill is None and memory not in returned:
                self._own[memory] = self._room, 4 * floats
                floats += -(-x.untyped_storage().nbytes() // ALIGNED) * (ALIGNED // 4)
                continue
            index[memory] = len(self._made)
            self._own[memory] = self._room + 1 + len(self._made), 0
            if fill is not None:
                self._fills.append((len(self._made), fill))
            self._made.append(_kind(x))
        self._floats = floats
        return [None if x is None else self._result(x, index) for x in results]

    def _result(self, x: torch.Tensor, index: dict[int, int]) -> tuple[int, tuple[Any, ...] | None]:
        if x.numel() == 0:  # it lies nowhere, as all of them do
            self._made.append(_kind(x))
            return len(self._made) - 1, None
        at = index.get(_memory(x))
        if at is None:
            raise Unrepeatable
        size, steps, _ = self._made[at]
        whole = x.storage_offset() == 0 and tuple(x.shape) == size and x.stride() == steps
        return at, None if whole else (tuple(x.shape), x.stride(), x.storage_offset())

    def _place(self, x: torch.Tensor | None) -> tuple[int, int]:
        """Where the address of x comes from, and how far behind."""
        if x is None:
            return 0, 0
        if id(x) in self._places:
            return self._places[id(x)]
        memory = _memory(x)
        if memory in self._own:
            place, start = self._own[memory]
            return place, start + x.data_ptr() - memory
        if memory in self._foreign:
            raise Unrepeatable  # of which of the caller's tensors it is a view, nobody knows
        self._constants.append(x)
        return 0, x.data_ptr()

    def hooked(self) -> bool:
        """Whether somebody wants to see launches, as Triton makes them."""
        for kernel in self._jitted:
            if kernel.pre_run_hooks:
                return True
        return launches.hooked()

    def __call__(self, addresses: list[int], stream: int) -> Tensors:
        starts = [0, *addresses]
        if self._floats:
            # Alive until the last launch is queued: the allocator knows the stream.
            room = torch.empty((self._floats,), dtype=torch.float32, device=self._device)
            starts.append(room.data_ptr())
        else:
            starts.append(0)
        made = [
            torch.empty_strided(size, steps, dtype=dtype, device=self._device)
            for size, steps, dtype in self._made
        ]
        for at, value in self._fills:
            made[at].fill_(value)
        starts += [x.data_ptr() for x in made]
        for launch in self._launches:
            launch(starts, stream)
        return tuple(
            None if found is None
            else made[found[0]] if found[1] is None
            else made[found[0]].as_strided(*found[1])
            for found in self._results
        )  # fmt: skip


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _kind(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.stride(), x.dtype


def _stream(device: int) -> int | None:
    """The stream to launch on; None where no pass is repeated.

    Not on the CPU, where nothing is kept, nor on a device that is not the current one; and a graph
    that is captured has memory of its own in place of what calls share.
    """
    if device < 0 or device != torch._C._cuda_getDevice():
        return None
    if torch._C._cuda_isCurrentStreamCapturing():
        return None
    return torch._C._cuda_getCurrentRawStream(device)


def repeated(
    facts: tuple[object, ...],
    alive: object,
    tensors: Tensors,
    run: Callable[..., Tensors],
) -> Tensors:
    """``run(*tensors)``.

    Args:
        facts: hashable; with types, strides and alignment of the tensors they decide all that
            ``run`` does.
        alive: what ``facts`` has the id of, if anything.
        tensors: all that ``run`` reads and does not make; the first is there.
    """
    first = tensors[0]
    assert first is not None
    device = first.get_device()
    stream = _stream(device)
    if stream is None:
        return run(*tensors)
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    key = (
        facts, device, stream, knobs.runtime.debug, knobs.compilation.instrumentation_mode,
        *[
            None if x is None else (x.dtype, x.stride(), address % 16 == 0)
            for x, address in zip(tensors, addresses, strict=True)
        ],
    )  # fmt: skip
    table = launches.table()
    known = table.get(key)
    if isinstance(known, _Pass):
        return run(*tensors) if known.hooked() else known(addresses, stream)
    seen = known[1] if known else 0
    if known is None:
        launches.make_room()
    table[key] = alive, seen + 1
    if seen != SIGHTS or any(x is not None and x.numel() > MOST_WATCHED for x in tensors):
        return run(*tensors)
    found, kept = _watched(alive, tensors, run)
    if kept is not None:
        table[key] = kept
    return found


def _watched(
    alive: object, tensors: Tensors, run: Callable[..., Tensors]
) -> tuple[Tensors, _Pass | None]:
    # Each an object of its own, so that one tensor in two places is told apart.
    tensors = tuple(None if x is None else x.detach() for x in tensors)
    with launches.noted() as launched, _Watch() as watch:
        results = run(*tensors)
    try:
        return results, _Pass(alive, tensors, watch, launched, results) if watch.holds else None
    except Unrepeatable:
        return results, None


__all__ = ["repeated"]
