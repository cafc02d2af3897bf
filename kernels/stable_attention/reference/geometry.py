"""Layouts and masks shared by the reference implementations.

Shapes: b batch, s sequence (sq queries, sk keys), t packed tokens, hq query heads, hk key/value
heads, g = hq / hk query heads that share one key head, d head dim (dv for V).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stable_attention.problem import AttentionArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUTS = ("bshd", "sbhd", "bhsd", "thd")
# Permutation that brings a dense layout to [b, h, s, d]; each is its own inverse but sbhd's.
_TO_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}
_FROM_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}

Window = tuple[int | None, int | None] | None


def to_bhsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    """View of a dense ``layout`` tensor as [b, h, s, d]; packed [t, h, d] becomes [1, h, t, d]."""
    if layout == "thd":
        return x.transpose(0, 1).unsqueeze(0)
    return x.permute(_TO_BHSD[layout])


def from_bhsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Inverse of ``to_bhsd``, contiguous in ``layout``."""
    if layout == "thd":
        return x.squeeze(0).transpose(0, 1).contiguous()
    return x.permute(_FROM_BHSD[layout]).contiguous()


def check_layout(
    layout: str, qkv: tuple[torch.Tensor, ...], cu_seqlens: tuple[torch.Tensor | None, ...]
) -> None:
    """ValueError unless q, k and v belong together in ``layout``, with their ``cu_seqlens``."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    rank = 3 if layout == "thd" else 4
    for name, x in zip("qkv", qkv, strict=True):
        if x.dim() != rank:
            shape = tuple(x.shape)
            raise ValueError(f"layout={layout!r} takes tensors of {rank} dims, {name} has {shape}")
        if not x.is_floating_point():
            raise ValueError(f"{name} is of {x.dtype}: use a floating type")
    if any((layout == "thd") != (cu is not None) for cu in cu_seqlens[:2]):
        raise ValueError("cu_seqlens_q and cu_seqlens_k go with layout='thd', and only with it")
    (bq, hq, _, d), (bk, hk, sk, dk), (bv, hv, sv, _) = (to_bhsd(x, layout).shape for x in qkv)
    head_group(hq, hk)
    if not (bq == bk == bv and hk == hv and sk == sv and d == dk):
        shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in zip("qkv", qkv, strict=True))
        raise ValueError(
            f"{shapes} in layout={layout!r}: use one batch for all, as many tokens and heads in v "
            "as in k, and q's head dim in k"
        )


def head_group(q_heads: int, kv_heads: int) -> int:
    """Query heads per key head; ValueError where they do not divide."""
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads cannot share {kv_heads} key/value heads evenly")
    return q_heads // kv_heads


def bounds(causal: bool, window: Window) -> tuple[int | None, int | None]:
    """(left, right) reach of a query around its own position; None is unbounded.

    A query at position p sees keys p - left .. p + right, both ends included. Positions are
    bottom-right aligned: query i of sq sits at i + sk - sq.
    """
    left, right = (None, None) if window is None else _pair(window)
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return left, (0 if causal else right)


def _pair(window: object) -> tuple[int | None, int | None]:
    ok = isinstance(window, tuple | list) and len(window) == 2
    if not ok or not all(x is None or isinstance(x, int) for x in window):  # type: ignore[attr-defined]
        raise ValueError(f"window={window!r}: use None or (left, right), integers or None")
    return window[0], window[1]  # type: ignore[index]


def allowed(
    rows: torch.Tensor, columns: torch.Tensor, *, shift: int, reach: tuple[int | None, int | None]
) -> torch.Tensor | None:
    """Boolean [rows, columns]: may the query see the key? None where all may.

    ``shift`` = sk - sq turns a query index into its position among the keys.
    """
    left, right = reach
    if left is None and right is None:
        return None
    distance = columns[None, :] - (rows[:, None] + shift)
    ok = torch.ones_like(distance, dtype=torch.bool)
    if right is not None:
        ok &= distance <= right
    if left is not None:
        ok &= distance >= -left
    return ok


def key_range(
    first: int, last: int, *, shift: int, sk: int, reach: tuple[int | None, int | None]
) -> tuple[int, int]:
    """Half-open range of keys that queries first..last-1 can see at all; ``shift`` as above."""
    left, right = reach
    low = 0 if left is None else max(0, first + shift - left)
    high = sk if right is None else min(sk, last + shift + right)
    return min(low, sk), max(high, 0)


def sequences(
    sq: int,
    sk: int,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    starts_q: torch.Tensor | None = None,
    starts_k: torch.Tensor | None = None,
) -> Iterator[tuple[int, slice, slice]]:
    """(batch index, query slice, key slice) of every sequence; one for all of a dense batch.

    Lengths come from ``cu_seqlens``; ``starts`` (default the same offsets) say where in memory a
    sequence begins when there are gaps between sequences.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None:
        yield 0, slice(0, sq), slice(0, sk)
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q without cu_seqlens_k, or the reverse: pass both")
    if cu_seqlens_q.numel() != cu_seqlens_k.numel():
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.numel()} entries and cu_seqlens_k "
            f"{cu_seqlens_k.numel()}: both need one more than there are sequences"
        )
    queries = _slices("cu_seqlens_q", cu_seqlens_q, starts_q, sq)
    keys = _slices("cu_seqlens_k", cu_seqlens_k, starts_k, sk)
    for i, (own, seen) in enumerate(zip(queries, keys, strict=True)):
        yield i, own, seen


def _slices(
    name: str, cu_seqlens: torch.Tensor, starts: torch.Tensor | None, tokens: int
) -> list[slice]:
    ends: list[int] = cu_seqlens.tolist()
    begin = ends if starts is None else starts.tolist()
    found = [slice(begin[i], begin[i] + ends[i + 1] - ends[i]) for i in range(len(ends) - 1)]
    for x in found:
        if not 0 <= x.start <= x.stop <= tokens:
            raise AttentionArgumentError(
                name if starts is None else f"{name}_padded",
                f"{begin}, which put a sequence at {x.start}..{x.stop}",
                f"non-decreasing offsets in 0..{tokens}",
                "Offsets count tokens.",
            )
    return found
