"""Uninitialised memory that cannot go unnoticed.

``PoisonedMemory`` replaces ``torch.empty``, ``empty_like``, ``empty_strided``, ``new_empty`` and
``zeros`` for callers inside one package. Every tensor comes from the middle of a larger buffer: the
payload is NaN (integers: their minimum; ``zeros``: zero), and a guard band on each side holds a
pattern that ``check()`` compares afterwards. An element the kernel forgot is NaN in the result; an
element it should not have touched is a damaged guard.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

GUARD = 512  # elements on each side; keeps the payload 512-byte aligned for every dtype
CAP = (
    1 << 28
)  # larger payloads keep their own allocation (no guard), they are poisoned all the same


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min


@dataclass
class PoisonedMemory:
    """Context manager; ``package`` names the import package whose frames are served."""

    package: str = "stable_attention"
    guards: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    allocations: int = 0
    _saved: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> PoisonedMemory:
        for name in ("empty", "empty_like", "empty_strided", "zeros", "zeros_like"):
            self._saved[name] = getattr(torch, name)
            setattr(torch, name, self._wrap(name, self._saved[name]))
        for name in ("new_empty", "new_zeros", "new_empty_strided"):
            self._saved["Tensor." + name] = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, self._wrap(name, self._saved["Tensor." + name]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, original in self._saved.items():
            owner: Any = torch.Tensor if name.startswith("Tensor.") else torch
            setattr(owner, name.removeprefix("Tensor."), original)
        self._saved.clear()

    def _wrap(self, name: str, original: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            caller = sys._getframe(1)
            module = caller.f_globals.get("__name__", "")
            if module != self.package and not module.startswith(self.package + "."):
                return out
            # Fake, meta and subclass tensors belong to tracing: they have no memory to poison.
            if type(out) is not torch.Tensor or out.device.type == "meta" or out.numel() == 0:
                return out
            return self._guarded(out, f"{name} at {module}:{caller.f_lineno}", "zeros" in name)

        return allocate

    def _guarded(self, plain: torch.Tensor, where: str, zeros: bool) -> torch.Tensor:
        self.allocations += 1
        value = 0 if zeros else _poison(plain.dtype)
        span = sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True)) + 1
        if span > CAP:
            return plain.fill_(value)
        tail = GUARD + (-span) % GUARD
        buffer = plain.new_full((GUARD + span + tail,), _poison(plain.dtype))
        low, high = buffer[:GUARD], buffer[GUARD + span :]
        self.guards.append((where, low, high))
        payload = torch.as_strided(buffer, plain.shape, plain.stride(), GUARD)
        payload.fill_(value)
        return payload.requires_grad_(plain.requires_grad)

    def check(self) -> None:
        """AssertionError naming the allocation whose guard bands were written; forgets them."""
        guards, self.guards = self.guards, []
        for where, low, high in guards:
            for side, band in (("before", low), ("after", high)):
                same = band.isnan() if band.is_floating_point() else band == _poison(band.dtype)
                if not bool(same.all()):
                    first = int((~same).nonzero()[0])
                    raise AssertionError(
                        f"wrote {int((~same).sum())} elements {side} the tensor of {where} "
                        f"(first at guard element {first} of {band.numel()})"
                    )
