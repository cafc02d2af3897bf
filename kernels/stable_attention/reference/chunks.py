"""The chunk primitives of `stable_attention.chunks`, in float32 PyTorch for any device.

Same functions, same keywords, so that context parallelism runs on either. float64 inputs are
computed and accumulated in float64. Packed offsets and tensor positions are read on the host: this
is the exact and slow path, which stops a GPU.

Shapes: as in `blockwise`; positions are global, so a query row i and a key column j of a pair see
each other by (j + k_position) - (i + q_position).
"""

from __future__ import annotations

import math

import torch

from stable_attention.reference.blockwise import At, Rules, backward_one, five_dims, forward_one
from stable_attention.reference.geometry import Window, bounds, from_bhsd, sequences

Position = int | torch.Tensor


def _rules(
    q: torch.Tensor,
    k: torch.Tensor,
    layout: str,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_position: Position = 0,
    k_position: Position = 0,
    batch_offset: int = 0,
    head_offset: int = 0,
    **numerics: object,
) -> tuple[Rules, list[tuple[slice, slice, At]]]:
    """The rules of a pair of chunks, and (rows, keys, where they are) of every sequence in it.

    ``numerics`` (stabilizer, o_lo, beta, eps, deterministic, backward) change nothing
    here.
    """
    if dropout_p and dropout_seed is None:
        raise ValueError("dropout needs dropout_seed: all chunks must share one")
    rules = Rules(
        layout=layout,
        reach=bounds(causal, window),
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=0 if dropout_seed is None else int(dropout_seed),
        batch_offset=batch_offset,
        head_offset=head_offset,
        compute=torch.float64 if q.dtype == torch.float64 else torch.float32,
    )
    axis = {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}[layout]
    cu = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded)
    found = []
    for batch, rows, keys in sequences(q.shape[axis], k.shape[axis], *cu):
        q_at, k_at = (
            int(p[batch]) if isinstance(p, torch.Tensor) else p for p in (q_position, k_position)
        )
        found.append((rows, keys, At(batch, q_at - k_at, q_at, k_at)))
    return rules, found


def chunk_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bshd",
    return_max_logits: bool = False,
    **options,
) -> tuple[torch.Tensor, ...]:
    """As `stable_attention.chunks.chunk_forward`; numerics do not matter."""
    rules, pieces = _rules(q, k, layout, **options)
    q5, k5, v5 = five_dims(rules, q, k, v)
    out, lse = q5.new_zeros(*q5.shape[:-1], v5.shape[-1]), q5.new_full(q5.shape[:-1], -math.inf)
    top = q5.new_full(q5.shape[1:3], -math.inf)
    for rows, keys, at in pieces:
        inputs = q5[..., rows, :], k5[..., keys, :], v5[..., keys, :]
        out[..., rows, :], lse[..., rows], part = forward_one(*inputs, None, rules, at)
        top = torch.maximum(top, part)
    out = from_bhsd(out.flatten(1, 2), layout)
    lse = lse.flatten(1, 2)[0] if layout == "thd" else lse.flatten(1, 2)
    return (out, lse, top.flatten()) if return_max_logits else (out, lse)


def _rows_like(lse: torch.Tensor, layout: str) -> torch.Tensor:
    """A view of row values, [b, h, s] or [h, t], that multiplies an O in ``layout``."""
    if layout == "thd":
        return lse.transpose(0, 1)[..., None]
    return lse.permute({"bshd": (0, 2, 1), "sbhd": (2, 0, 1), "bhsd": (0, 1, 2)}[layout])[..., None]


def merge_chunks(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    *,
    layout: str = "bshd",
) -> None:
    """As `stable_attention.chunks.merge_chunks`."""
    total = torch.logaddexp(lse, part_lse)
    safe = total.masked_fill(total == -math.inf, 0.0)
    old, new = torch.exp(lse - safe), torch.exp(part_lse - safe)
    out.mul_(_rows_like(old, layout)).add_(part * _rows_like(new, layout))
    lse.copy_(total)


def finish_chunks(
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dtype: torch.dtype,
    layout: str = "bshd",
    sinks: torch.Tensor | None = None,
    stabilizer: str = "compensated",
    o_lo: str = "bf16",
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `stable_attention.chunks.finish_chunks`; the low-order part is all that rounding lost."""
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))
        safe = total.masked_fill(total == -math.inf, 0.0)
        out = out * _rows_like(torch.exp(lse - safe), layout)
        lse.copy_(total)
    high = out.to(dtype)
    return high, (out - high.to(out.dtype) if dtype != out.dtype else out.new_empty(0))


def chunk_delta(
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    layout: str = "bshd",
    low: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `stable_attention.chunks.chunk_delta`."""
    whole = out.to(lse.dtype)
    if low is not None and low.numel():
        whole = whole + low.to(lse.dtype)
    rows = (dout.to(lse.dtype) * whole).sum(-1)
    perm = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2), "thd": (1, 0)}[layout]
    delta = rows.permute(perm).contiguous()
    if dlse is not None:
        delta = (delta - dlse).masked_fill(lse == -math.inf, 0.0)  # not 0 * NaN later
    if sinks is None:
        return delta, None
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
    share = -(weight * delta).sum(-1)
    return delta, share if layout == "thd" else share.sum(0)


def chunk_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    rows: None = None,
    layout: str = "bshd",
    **options,
) -> None:
    """As `stable_attention.chunks.chunk_backward`: adds to dq, dk and dv."""
    rules, pieces = _rules(q, k, layout, **options)
    q5, k5, v5 = five_dims(rules, q, k, v)
    do5, *_ = five_dims(rules, dout, k)
    lse5, delta5 = (x.reshape(q5.shape[:-1]) for x in (lse, delta))
    assert dq.dtype == dk.dtype == dv.dtype == rules.compute, "accumulators of another type"
    sums = five_dims(rules, dq, dk, dv)  # views of the caller's accumulators
    for tokens, keys, at in pieces:
        inputs = (q5[..., tokens, :], k5[..., keys, :], v5[..., keys, :])
        given = (do5[..., tokens, :], lse5[..., tokens], delta5[..., tokens])
        views = (sums[0][..., tokens, :], sums[1][..., keys, :], sums[2][..., keys, :])
        backward_one(inputs + given, views, rules, at)


def projected_rows(q: torch.Tensor, lse: torch.Tensor, *, stabilizer: str) -> None:
    """As `stable_attention.chunks.projected_rows`: None, for dS is not rounded here."""
