"""The oracle: attention written down as its formula, in whatever precision is asked for.

Whole score matrices, autograd for the gradients, no tiling and no recomputation, so that it shares
no line and no trick with the kernels or with ``blockwise``. ``compute=torch.float64`` is the truth
tests compare with; ``compute=q.dtype`` is "PyTorch in the same dtype", the yardstick of the error
rule. For long sequences use ``reference_attention`` on float64 inputs.

Shapes: q [b, sq, hq, d], k [b, sk, hk, d], v [b, sk, hk, dv] in ``layout``; scores [b, hq, sq, sk].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stable_attention.reference import dropout
from stable_attention.reference.geometry import (
    Window,
    allowed,
    bounds,
    check_layout,
    head_group,
    sequences,
    to_bhsd,
)


@dataclass(frozen=True)
class OracleResult:
    """``out`` in the given layout, ``lse`` [b, hq, sq] or [hq, t], ``max_logits`` [hq]."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor


@dataclass(frozen=True)
class _Mask:
    reach: tuple[int | None, int | None]
    softcap: float
    scale: float
    dropout_p: float
    seed: int
    offsets: tuple[int, int]
    given: torch.Tensor | None


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    rules: _Mask,
    batch: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """O [b, hq, sq, dv], LSE [b, hq, sq], max logits [hq]; k and v have hq heads here."""
    b, h, sq, sk = *q.shape[:3], k.shape[2]
    device = q.device
    s = torch.matmul(q, k.transpose(-1, -2)) * rules.scale
    if rules.softcap:
        s = rules.softcap * torch.tanh(s / rules.softcap)
    rows, columns = torch.arange(sq, device=device), torch.arange(sk, device=device)
    ok = allowed(rows, columns, shift=sk - sq, reach=rules.reach)
    if ok is not None:
        s = s.masked_fill(~ok, -math.inf)
    top = s.detach().amax((0, 2, 3)) if s.numel() else s.new_full((h,), -math.inf)
    full = s
    if sink is not None:
        full = torch.cat([s, sink.to(s.dtype).view(1, h, 1, 1).expand(b, h, sq, 1)], -1)
    empty = (full == -math.inf).all(-1) if full.shape[-1] else s.new_ones(b, h, sq).bool()
    # A row without keys is computed on zeros and replaced afterwards: no NaN, zero gradients.
    safe = full.masked_fill(empty[..., None], 0.0)
    if full.shape[-1] == 0:
        return q.new_zeros(b, h, sq, v.shape[-1]), q.new_full((b, h, sq), -math.inf), top
    lse = torch.logsumexp(safe, -1).masked_fill(empty, -math.inf)
    p = torch.softmax(safe, -1)[..., :sk].masked_fill(empty[..., None], 0.0)
    if rules.dropout_p:
        p = p * _keep(rules, b, h, rows, columns, batch).to(p.dtype) / (1 - rules.dropout_p)
    return torch.matmul(p, v), lse, top


def _keep(
    rules: _Mask, b: int, h: int, rows: torch.Tensor, columns: torch.Tensor, batch: int
) -> torch.Tensor:
    if rules.given is not None:
        return rules.given[batch : batch + b, :h, : len(rows), : len(columns)]
    return dropout.keep_mask(
        rules.seed,
        rules.dropout_p,
        batches=torch.arange(b, device=rows.device) + batch + rules.offsets[0],
        heads=torch.arange(h, device=rows.device) + rules.offsets[1],
        rows=rows,
        columns=columns,
    )


def oracle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    compute: torch.dtype = torch.float64,
    layout: str = "bshd",
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    sinks: str | torch.Tensor | None = None,
    softcap: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    dropout_keep: torch.Tensor | None = None,
    batch_offset: int = 0,
    head_offset: int = 0,
) -> OracleResult:
    """Attention by the book, every operation in ``compute``; differentiable in q, k, v and sinks.

    Arguments as for ``reference_attention``; ``dropout_keep`` (boolean [b, hq, sq, sk]) replaces
    the mask drawn from ``dropout_seed``. Rows without keys: O = 0, LSE = -inf, zero gradients.
    """
    check_layout(layout, (q, k, v), (cu_seqlens_q, cu_seqlens_k))
    q4, k4, v4 = (to_bhsd(x, layout).to(compute) for x in (q, k, v))
    b, h, sq = q4.shape[:3]
    g = head_group(h, k4.shape[1])
    k4, v4 = k4.repeat_interleave(g, 1), v4.repeat_interleave(g, 1)
    sink = sinks if isinstance(sinks, torch.Tensor) else None
    if isinstance(sinks, str):
        assert sinks == "off-by-one"
        sink = torch.zeros(h, dtype=compute, device=q.device)
    rules = _Mask(
        reach=bounds(causal, window),
        softcap=float(softcap),
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        dropout_p=float(dropout_p),
        seed=int(dropout_seed),
        offsets=(batch_offset, head_offset),
        given=dropout_keep,
    )
    cu = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded)
    if layout != "thd":
        out, lse, top = _one(q4, k4, v4, sink, rules, 0)
        perm = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}[layout]
        return OracleResult(out.permute(perm), lse, top)
    # Tokens of no sequence stay 0 (LSE -inf).
    out, lse = q4.new_zeros(b, h, sq, v4.shape[-1]), q4.new_full((b, h, sq), -math.inf)
    top = torch.full((h,), -math.inf, dtype=compute, device=q.device)
    for batch, rows, keys in sequences(sq, k4.shape[2], *cu):
        part = _one(q4[:, :, rows], k4[:, :, keys], v4[:, :, keys], sink, rules, batch)
        out = torch.cat([out[:, :, : rows.start], part[0], out[:, :, rows.stop :]], 2)
        lse = torch.cat([lse[:, :, : rows.start], part[1], lse[:, :, rows.stop :]], 2)
        top = torch.maximum(top, part[2])
    return OracleResult(out[0].transpose(0, 1), lse[0], top)


def gradients(
    outputs: tuple[torch.Tensor, ...],
    inputs: tuple[torch.Tensor, ...],
    cotangents: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """Gradients of sum(outputs * cotangents), zeros (never None) for inputs that do not matter."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(x) for x in inputs)
    grads = torch.autograd.grad(
        [o for o, _ in pairs], inputs, [c.to(o.dtype) for o, c in pairs], allow_unused=True
    )
    return tuple(
        torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)
    )
