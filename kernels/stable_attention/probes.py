"""Probes: what a kernel's rounding does to the backward pass, measured on any backend's tensors.

Write e_i = delta_used_i - delta_i for the error of delta = rowsum(dO * O). With P recomputed from
the LSE, sum_j dS_ij = -e_i (times sum_j P_ij), and dQ is wrong by -scale * e_i (P K)_i: the row sum
of dS is a direct probe of e. An error that is the same for all rows of a head (coherence) does not
average out over tokens or steps (arXiv 2510.04212; docs/numerics.md).

The truth is float64 from the same inputs, computed a block of rows at a time: n = 32k fits.

Shapes: q [b, sq, hq, d], k [b, sk, hk, d], v [b, sk, hk, dv], O and dO [b, sq, hq, dv] in
``layout`` (bshd, sbhd or bhsd); LSE [b, hq, sq]. A "head" is one (batch, head) pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stable_attention.reference.emulators import INT8_CODES, half_ulp
from stable_attention.reference.geometry import (
    Window,
    allowed,
    bounds,
    check_layout,
    from_bhsd,
    head_group,
    key_range,
    to_bhsd,
)


@dataclass(frozen=True, kw_only=True)
class BackendResult:
    """What a backend returned. ``low`` is O's low-order part where the backend keeps one."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    low: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None


Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], BackendResult]


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """Errors relative to RMS(delta) unless said otherwise; NaN where a tensor was not given, and
    where something that is not finite went in."""

    mean: float
    """Mean of e over rows and heads."""
    standard_error: float
    """Of ``mean``, clustered by head: rows of a head are not independent. NaN for one head."""
    t: float
    """mean / standard_error; NaN where that is."""
    rms: float
    coherence: float
    """RMS over heads of the head's mean e, over RMS(e); 1 / sqrt(rows) if rows are independent."""
    dscore_row_sum_mean: float
    """Mean of -sum_j dS_ij, with P from the backend's LSE."""
    dscore_row_sum_rms: float
    lse_error: float
    """Largest |LSE - LSE_64| (absolute)."""
    kappa: float
    """RMS(delta) over RMS under P of (dP - delta): how much an error in delta is amplified."""
    repeated_max: float
    """Share of rows whose float32 score maximum occurs more than once."""
    two_round_to_one: float
    """Share of rows with more than one P = exp(S - max S) that rounds to 1 in O's dtype."""
    dead_zone: float
    """Share of O's elements where rounding swallows everything but the largest weight's V."""
    top_probability: float
    """Mean of the largest weight of a row."""
    dq_error: float
    """||dQ - dQ_64|| / ||dQ_64|| over the probed rows."""
    dk_error: float
    dq_bias: float
    """||mean over rows of (dQ - dQ_64)|| / ||dQ_64|| per row: the part that repeats."""
    rms_delta: float
    """RMS(delta), absolute: the unit of the others."""
    rows: int
    heads: int

    def as_dict(self) -> dict[str, float | int]:
        """The fields by name, for JSON."""
        return asdict(self)


def decode_o_lo(out: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """O's low-order part in float32 from its storage: bf16 values or int8 codes of half an ulp."""
    if low.dtype == torch.int8:
        return low.float() * (half_ulp(out) / INT8_CODES)
    return low.float()


@dataclass(frozen=True)
class _Rows:
    """One block of the truth: float64, [heads, rows, ...]."""

    heads: slice
    rows: slice
    keys: slice
    scores: torch.Tensor
    p: torch.Tensor
    lse: torch.Tensor
    out: torch.Tensor
    dp: torch.Tensor
    delta: torch.Tensor


def _blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    scale: float,
    reach: tuple[int | None, int | None],
    budget: int,
) -> Iterator[_Rows]:
    """Walk over float64 attention of flat heads [heads, s, d], ``budget`` bytes a score block."""
    heads, sq, sk = q.shape[0], q.shape[1], k.shape[1]
    rows_at_once = max(1, min(sq, budget // (8 * sk)))
    heads_at_once = max(1, min(heads, budget // (8 * sk * rows_at_once)))
    for h in range(0, heads, heads_at_once):
        some = slice(h, min(heads, h + heads_at_once))
        keys64, values64 = k[some].double(), v[some].double()
        for first in range(0, sq, rows_at_once):
            rows = slice(first, min(sq, first + rows_at_once))
            low, high = key_range(rows.start, rows.stop, shift=sk - sq, sk=sk, reach=reach)
            if high <= low:
                continue
            keys = slice(low, high)
            s = torch.matmul(q[some, rows].double(), keys64[:, keys].mT) * scale
            i = torch.arange(rows.start, rows.stop, device=q.device)
            j = torch.arange(low, high, device=q.device)
            ok = allowed(i, j, shift=sk - sq, reach=reach)
            if ok is not None:
                s.masked_fill_(~ok, -math.inf)
            lse = torch.logsumexp(s, -1)
            p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
            out = torch.matmul(p, values64[:, keys])
            do64 = dout[some, rows].double()
            dp = torch.matmul(do64, values64[:, keys].mT)
            delta = (do64 * out).sum(-1)
            yield _Rows(some, rows, keys, s, p, lse, out, dp, delta)


class _Facts:
    """Sums over the probed rows of what the inputs alone decide."""

    def __init__(self, heads: int, device: torch.device) -> None:
        zeros = lambda: torch.zeros(heads, dtype=torch.float64, device=device)  # noqa: E731
        self.delta_square, self.spread = zeros(), zeros()
        self.repeated, self.round_to_one, self.dead, self.top = zeros(), zeros(), zeros(), zeros()
        self.rows = 0

    def add(self, block: _Rows, keep: torch.Tensor, flat: tuple[torch.Tensor, ...],
            scale: float) -> None:  # fmt: skip
        """``keep`` selects the probed rows of the block."""
        h = block.heads
        q, k, v, _ = flat
        delta, p, dp = block.delta[:, keep], block.p[:, keep], block.dp[:, keep]
        self.rows += int(keep.sum()) if h.start == 0 else 0
        self.delta_square[h] += delta.pow(2).sum(-1)
        self.spread[h] += (p * (dp - delta[..., None]).pow(2)).sum((-1, -2))
        top = p.max(-1)
        self.top[h] += top.values.sum(-1)
        # Scores as a kernel sees them: float32 accumulation.
        s32 = torch.matmul(q[h, block.rows][:, keep].float(), k[h, block.keys].float().mT) * scale
        s32 = s32.masked_fill(block.scores[:, keep] == -math.inf, -math.inf)
        m32 = s32.amax(-1, keepdim=True)
        self.repeated[h] += _told((s32 == m32).sum(-1) > 1, top.values).sum(-1)
        rounded = torch.exp(s32 - m32).to(v.dtype)
        self.round_to_one[h] += _told((rounded == 1).sum(-1) > 1, top.values).sum(-1)
        largest = torch.gather(
            v[h, block.keys].double(), 1, top.indices[..., None].expand(-1, -1, v.shape[-1])
        )
        out = block.out[:, keep]
        swallowed = (out.to(v.dtype).double() == largest) & (out != largest)
        self.dead[h] += _told(swallowed, out).mean(-1).sum(-1)


def _told(found: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """A yes or no as float64; NaN where ``of`` is NaN, of which no comparison tells anything."""
    return found.double().masked_fill(of.isnan(), math.nan)


class _Errors:
    """Sums over the probed rows of one backend's errors."""

    def __init__(self, result: BackendResult, layout: str, heads: int) -> None:
        used = _flat(result.out, layout, heads).double()
        if result.low is not None and result.low.numel():
            used = used + _flat(decode_o_lo(result.out, result.low), layout, heads).double()
        self.used = used
        self.lse = None if result.lse is None else result.lse.detach().flatten(0, 1).double()
        zeros = lambda: torch.zeros(used.shape[0], dtype=torch.float64, device=used.device)  # noqa: E731
        self.error, self.square, self.row_sum, self.row_sum_square = (zeros() for _ in range(4))
        self.lse_error = 0.0

    def add(self, block: _Rows, keep: torch.Tensor, dout: torch.Tensor) -> None:
        """Errors of a delta that is rowsum(dO * used)."""
        h, rows = block.heads, block.rows
        do = dout[h, rows][:, keep].double()
        e = (do * self.used[h, rows][:, keep]).sum(-1) - block.delta[:, keep]
        self.error[h] += e.sum(-1)
        self.square[h] += e.pow(2).sum(-1)
        if self.lse is None:
            return
        gap = self.lse[h, rows][:, keep] - block.lse[:, keep]
        gap = gap.masked_fill(block.lse[:, keep] == -math.inf, 0.0)  # rows that see no key
        # Not max(), which would drop a NaN.
        self.lse_error = float(gap.abs().max().clamp_min(self.lse_error))
        row_sum = torch.exp(-gap) * e
        self.row_sum[h] += row_sum.sum(-1)
        self.row_sum_square[h] += row_sum.pow(2).sum(-1)


def _flat(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """[b, s, h, d] in ``layout`` -> [b * heads, s, d], key heads repeated for their group."""
    x4 = to_bhsd(x.detach(), layout)
    return x4.repeat_interleave(head_group(heads, x4.shape[1]), 1).flatten(0, 1)


def probe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    backend: Backend | BackendResult,
    **options: Any,
) -> ProbeReport:
    """`probe_results` for one backend, called with (q, k, v, dout), or its result already."""
    result = backend if isinstance(backend, BackendResult) else backend(q, k, v, dout)
    return probe_results(q, k, v, dout, results={"": result}, **options)[""]


def probe_results(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    results: Mapping[str, BackendResult],
    layout: str = "bshd",
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    skip_rows: int = 0,
    budget: int | None = None,
) -> dict[str, ProbeReport]:
    """Judge backends' O, LSE and gradients on (q, k, v, dO) against float64, computed once.

    Gradients in ``results`` are compared where present (``dk`` summed over the group for GQA). Rows
    before ``skip_rows`` (which see few keys) are left out of every row statistic. ``budget`` bounds
    the bytes of one block of float64 scores (default 64 MiB on CPU, 1 GiB on GPU). Raises
    ValueError for packed and for empty tensors.
    """
    flat, scale, budget = _flat_heads((q, k, v, dout), layout=layout, scale=scale, budget=budget)
    hq = to_bhsd(q, layout).shape[1]
    facts = _Facts(flat[0].shape[0], q.device)
    errors = {name: _Errors(result, layout, hq) for name, result in results.items()}
    truth = _TrueGradients(flat, scale, wanted=any(r.dk is not None for r in results.values()))
    grads = {name: _Gradients(flat[0], result, layout, hq) for name, result in results.items()}
    compare = truth.wanted or any(g.dq is not None for g in grads.values())
    for block in _blocks(*flat, scale=scale, reach=bounds(causal, window), budget=budget):
        keep = torch.arange(block.rows.start, block.rows.stop, device=q.device) >= skip_rows
        dq = truth.add(block) if compare else None
        if not bool(keep.any()):
            continue
        facts.add(block, keep, flat, scale)
        for name, sums in errors.items():
            sums.add(block, keep, flat[3])
            if dq is not None:
                grads[name].add(block, keep, dq[:, keep])
    return {name: _report(facts, errors[name], grads[name], truth) for name in results}


def true_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    budget: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dQ and dK in float64, in ``layout``, with the shapes of q and k (GQA: summed over the group).

    What `probe_results` compares with. Arguments and ValueErrors as there; rows that see no key
    have a dQ of 0.
    """
    flat, scale, budget = _flat_heads((q, k, v, dout), layout=layout, scale=scale, budget=budget)
    truth = _TrueGradients(flat, scale, wanted=True)
    dq = torch.zeros_like(flat[0], dtype=torch.float64)
    for block in _blocks(*flat, scale=scale, reach=bounds(causal, window), budget=budget):
        dq[block.heads, block.rows] = truth.add(block)
    b, hq, sq, d = to_bhsd(q, layout).shape
    hk, sk = to_bhsd(k, layout).shape[1:3]
    assert truth.dk is not None
    dk = truth.dk.view(b, hk, hq // hk, sk, d).sum(2)
    return from_bhsd(dq.view(b, hq, sq, d), layout), from_bhsd(dk, layout)


def _flat_heads(
    tensors: tuple[torch.Tensor, ...], *, layout: str, scale: float | None, budget: int | None
) -> tuple[tuple[torch.Tensor, ...], float, int]:
    """q, k, v, dO as [b * hq, s, d], the scale, and the bytes of a block."""
    if layout == "thd":
        raise ValueError("layout='thd': probe sequences one by one as layout='bshd' with b = 1")
    for name, x in zip("qkv", tensors, strict=False):
        if x.numel() == 0:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: nothing in it to probe")
    q, k, v, dout = tensors
    check_layout(layout, (q, k, v), (None, None))
    if dout.shape != (*q.shape[:-1], v.shape[-1]):
        shape = (*q.shape[:-1], v.shape[-1])
        raise ValueError(f"dout has shape {tuple(dout.shape)}: use O's, {shape}")
    hq = to_bhsd(q, layout).shape[1]
    if budget is None:
        budget = (1 << 30) if q.is_cuda else (64 << 20)
    flat = tuple(_flat(x, layout, hq) for x in tensors)
    return flat, q.shape[-1] ** -0.5 if scale is None else scale, budget


class _TrueGradients:
    """dQ of a block and the running dK, float64."""

    def __init__(self, flat: tuple[torch.Tensor, ...], scale: float, *, wanted: bool) -> None:
        self.q, self.k, self.scale, self.wanted = flat[0], flat[1], scale, wanted
        self.dk = torch.zeros_like(self.k, dtype=torch.float64) if wanted else None

    def add(self, block: _Rows) -> torch.Tensor:
        """Add the block's share of dK; returns its dQ."""
        ds = block.p * (block.dp - block.delta[..., None]) * self.scale
        if self.dk is not None:
            self.dk[block.heads, block.keys] += torch.matmul(
                ds.mT, self.q[block.heads, block.rows].double()
            )
        return torch.matmul(ds, self.k[block.heads, block.keys].double())


class _Gradients:
    """A backend's dQ and dK beside the true ones."""

    def __init__(self, q: torch.Tensor, result: BackendResult, layout: str, heads: int) -> None:
        self.dq = None if result.dq is None else _flat(result.dq, layout, heads)
        self.dk = None if result.dk is None else to_bhsd(result.dk.detach(), layout)
        self.difference = self.size = 0.0
        self.mean_difference = q.new_zeros(q.shape[0], q.shape[2], dtype=torch.float64)

    def add(self, block: _Rows, keep: torch.Tensor, true: torch.Tensor) -> None:
        if self.dq is None:
            return
        gap = self.dq[block.heads, block.rows][:, keep].double() - true
        self.difference += float(gap.pow(2).sum())
        self.size += float(true.pow(2).sum())
        self.mean_difference[block.heads] += gap.sum(1)

    def errors(self, rows: int, truth: _TrueGradients) -> tuple[float, float, float]:
        """(dQ error, dK error, dQ bias)."""
        dq = dk = bias = math.nan
        if self.dq is not None and self.size != 0:
            dq = math.sqrt(self.difference / self.size)
            coherent = float((self.mean_difference / rows).pow(2).sum()) * rows
            bias = math.sqrt(coherent / self.size)
        if self.dk is not None and truth.dk is not None:
            b, hk = self.dk.shape[:2]
            true = truth.dk.view(b, hk, -1, *truth.dk.shape[1:]).sum(2)
            dk = float((self.dk.double() - true).norm() / true.norm())
        return dq, dk, bias


def _report(facts: _Facts, sums: _Errors, grads: _Gradients, truth: _TrueGradients) -> ProbeReport:
    heads, rows = sums.error.numel(), max(1, facts.rows)

    def share(x: torch.Tensor) -> float:
        return float(x.sum()) / (heads * rows)

    has_lse = sums.lse is not None
    rms_delta = math.sqrt(share(facts.delta_square))
    unit = max(rms_delta, 1e-300)
    per_head = sums.error / rows
    mean = float(per_head.mean())
    se = float(per_head.std()) / math.sqrt(heads) if heads > 1 else math.nan
    rms = math.sqrt(share(sums.square))
    spread = math.sqrt(share(facts.spread))
    dq_error, dk_error, dq_bias = grads.errors(rows, truth)
    return ProbeReport(
        mean=mean / unit,
        standard_error=se / unit,
        t=0.0 if se == 0 else mean / se,
        rms=rms / unit,
        coherence=0.0 if rms == 0 else float(per_head.pow(2).mean().sqrt()) / rms,
        dscore_row_sum_mean=share(sums.row_sum) / unit if has_lse else math.nan,
        dscore_row_sum_rms=math.sqrt(share(sums.row_sum_square)) / unit if has_lse else math.nan,
        lse_error=sums.lse_error if has_lse else math.nan,
        kappa=math.inf if spread == 0 else rms_delta / spread,
        repeated_max=share(facts.repeated),
        two_round_to_one=share(facts.round_to_one),
        dead_zone=share(facts.dead),
        top_probability=share(facts.top),
        dq_error=dq_error,
        dk_error=dk_error,
        dq_bias=dq_bias,
        rms_delta=rms_delta,
        rows=rows,
        heads=heads,
    )


__all__ = [
    "Backend",
    "BackendResult",
    "ProbeReport",
    "decode_o_lo",
    "probe",
    "probe_results",
    "true_gradients",
]
