"""Two sums that exact attention gradients obey, from dK, dV and dO alone, whatever kernel ran.

With P = softmax(S) and dS_ij = P_ij (dP_ij - delta_i), delta_i = sum_j P_ij dP_ij, the rows of dS
sum to zero, so for K as attention receives it (after norm and RoPE)

    sum_j dK_j = scale sum_i (sum_j dS_ij) q_i = 0          per sequence and key/value head,
    sum_j dV_j = sum_i (sum_j P_ij) dO_i = sum_i dO_i       over the query heads of its group.

An error e_i of delta leaves -scale sum_i e_i q_i of the first, an l that is not the sum of the P
in use leaves sum_i (sum_j P_ij - 1) dO_i of the second. Each is divided by the rounding that
storing dK (dV) leaves in the sum: about 1 for exact arithmetic whose results are stored in 16 bits.
Gradients in float32 show the rounding of their own arithmetic.

masks       hold as they are: hidden keys have P = dS = 0. A row without a key has P = 0; only a
            window that is not causal has such rows, and there the second is left out
dropout     the first holds (delta is the sum of the dropped P x dP, too), the second does not
sinks       dS sums to -dS_sink = P_sink delta: both know terms of every row's LSE, which callers
            do not hand out. Left out
softcap     dS is multiplied by 1 - tanh^2 per score: the first does not hold
shared v    its gradient is that of all calls that attend to it, and each knows its own dO. Left out
CP          a rank has some of the keys and rows: the vectors are added over the group first

Shape legend: s tokens of this rank, b sequences, h query heads and kv key/value heads of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_patch.stability.observe import Seen

FIELDS = ("dk2", "dk_floor2", "dv2", "dv_floor2")
ROUNDING = 0.2123
"""RMS error of rounding x to nearest over eps |x|: sqrt(E[m^-2] / 12), m = mantissa in [1, 2)
with log m uniform, E[m^-2] = 3 / (8 ln 2)."""


class _Kind(NamedTuple):
    """Layers whose sums have one shape."""

    name: str
    heads: int
    shape: tuple[int, ...]
    eps: float


class KeySums:
    """Squared sizes of both sums and of their rounding, on the device, for the whole model.

    Args:
        layers, heads: of the whole model.
        first_head: global number of this rank's first query head.
        cp: process group the sequence is split over, None if it is whole.
        device: where the sums live.
    """

    def __init__(
        self, *, layers: int, heads: int, first_head: int, cp: Any, device: torch.device
    ) -> None:
        self.first_head, self._cp = first_head, cp
        self._sums = torch.zeros(layers, heads, len(FIELDS), dtype=torch.float64, device=device)
        self._dout: dict[int, Any] = {}  # None: of no use
        self._found: dict[_Kind, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._last: tuple[Any, _Kind, int] | None = None
        """The place of the gradient that came last, its kind and layer."""

    def clear(self) -> None:
        """Begin another observation."""
        self._sums.zero_()
        self._dout, self._found, self._last = {}, {}, None

    @torch.no_grad()
    def add_output(self, seen: Seen, dout: torch.Tensor) -> None:
        """dO [s, b, h, dv] of a call; comes before its dK and dV."""
        known = _holds(seen, "v")
        total = dout.sum(0, dtype=torch.float32) if known else None  # [b, h, dv]
        self._dout[seen.site.layer] = total

    @torch.no_grad()
    def add_input(self, seen: Seen, name: str, gradient: torch.Tensor) -> None:
        """dK or dV (``name`` k or v) of a call, [s, b, kv, d or dv]."""
        # Without a dO it is the gradient of another use of k or v: this call's output has none.
        if seen.site.layer not in self._dout or not _holds(seen, name):
            return
        total = gradient.sum(0, dtype=torch.float32)  # [b, kv, d]
        size = torch.linalg.vector_norm(gradient, dim=(0, 1, 3), dtype=torch.float32)
        # Under autocast the gradient of a float32 k holds values of the dtype that k was cast to.
        dtypes = gradient.dtype, getattr(seen, name).dtype
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        kind = _Kind(name, seen.q.shape[2], total.shape, eps)
        last, self._last = self._last, (_place(gradient), kind, seen.site.layer)
        if last is not None and last[0] == self._last[0] and {name, last[1].name} != {"k"}:
            # Layers share their v, or it is their k, too: the gradient is of all of these calls.
            self._found.get(last[1], {}).pop(last[2], None)
        else:
            self._found.setdefault(kind, {})[seen.site.layer] = total, size

    @torch.no_grad()
    def totals(self) -> torch.Tensor:
        """Float64 [L, H, fields] of this rank's share. Collective over the CP group.

        All layers at once: an observation is bound by kernel launches.
        """
        kinds = sorted(kind for kind, found in self._found.items() if found)
        sums = [self._sum(kind) for kind in kinds]  # [n, b, kv, d]
        if self._cp is not None and sums:
            flat = torch.cat([x.flatten() for x in sums])
            torch.distributed.all_reduce(flat, group=self._cp)
            flat /= self._cp.size() ** 0.5  # every rank counts the square of the whole sum
            parts = flat.split([x.numel() for x in sums])
            sums = [part.view_as(x) for part, x in zip(parts, sums, strict=True)]
        for kind, total in zip(kinds, sums, strict=True):
            found = self._found[kind]
            floor = torch.stack([size for _, size in found.values()]) * (ROUNDING * kind.eps)
            both = torch.stack([total.square().sum((1, 3)), floor.square()], -1)  # [n, kv, 2]
            known = dict(zip(found, both.unbind(), strict=True))
            nothing = torch.zeros_like(both[0])
            table = torch.stack([known.get(n, nothing) for n in range(len(self._sums))])
            heads = slice(self.first_head, self.first_head + kind.heads)
            first = FIELDS.index(f"d{kind.name}2")
            place = self._sums[:, heads, first : first + 2]
            place.add_(table.repeat_interleave(kind.heads // both.shape[1], 1))
        self._dout, self._found, self._last = {}, {}, None
        return self._sums

    def _sum(self, kind: _Kind) -> torch.Tensor:
        """sum dK, or sum dV - sum dO, of the layers of a kind in their order: [n, b, kv, d]."""
        found = self._found[kind]
        total = torch.stack([total for total, _ in found.values()])
        if kind.name == "v":
            dout = torch.stack([self._dout[layer] for layer in found])  # [n, b, h, dv]
            total -= dout.unflatten(2, (total.shape[2], -1)).sum(3)
        return total


def _place(x: torch.Tensor) -> tuple[StorageWeakRef, int]:
    """Where it lies; keeps no memory, and no other tensor has it while this is kept."""
    return StorageWeakRef(x.untyped_storage()), int(x.storage_offset())


def _holds(seen: Seen, name: str) -> bool:
    """Whether the sum of dK (k) or dV (v) is known of such a call."""
    if seen.sinks is not None:
        return False
    if name == "k":
        return not seen.softcap
    return seen.dropout_p == 0.0 and (seen.geometry.causal or seen.geometry.window is None)


def key_metrics(sums: np.ndarray) -> dict[str, np.ndarray]:
    """``dk_sum`` and ``dv_sum``, float32 [L, H], of reduced sums [L, H, fields]; NaN: not known."""
    found = {}
    with np.errstate(divide="ignore", invalid="ignore"):
        for name in ("dk", "dv"):
            size, floor = (sums[..., FIELDS.index(f"{name}{end}")] for end in ("2", "_floor2"))
            found[f"{name}_sum"] = np.sqrt(size / np.where(floor > 0, floor, np.nan))
    return {name: values.astype(np.float32) for name, values in found.items()}
