"""Sums over sampled rows, on the device, shaped for the whole model; and what follows from them.

Every rank adds its own heads, layers and rows into zeros of the model's shape, so that one SUM and
one MAX over all ranks are right under tensor (other heads), pipeline (other layers), context and
data parallelism (other rows) alike.

Shape legend: L layers, H query heads of the whole model; b, h, r sequences, heads of this rank,
sampled rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.observe import EXACT, Seen
from megatron_patch.stability.sampling import (
    Geometry,
    RowFacts,
    Sample,
    measure,
    pick_rows,
    sample,
)
from stable_attention.api import stable_attention
from stable_attention.probes import decode_residual
from stable_attention.reference import reference_attention
from stable_attention.stabilizers import KNOWN

LINEAR = (
    "rows", "entropy", "first", "top", "plain_rows", "plain", "plain_sign", "used_rows", "used",
)  # fmt: skip
SQUARES = ("delta2", "plain2", "used2", "growth2", "push2")
FIELDS = (*LINEAR, *SQUARES, "spread")


class HeadSums:
    """The sums of one observation.

    Args:
        layers, heads: of the whole model.
        first_head: global number of this rank's first query head.
        rows, sequences: how many are sampled.
        device: where the sums live.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        first_head: int,
        rows: int,
        sequences: int,
        device: torch.device,
    ) -> None:
        self.first_head, self.rows, self.sequences = first_head, rows, sequences
        self.sums = torch.zeros(layers, heads, len(FIELDS), dtype=torch.float64, device=device)
        self.maxima = torch.full((layers, heads), -math.inf, device=device)
        self.phase = 0
        self._samples: dict[Any, Sample] = {}

    def clear(self, *, phase: int) -> None:
        """Begin another observation; the rows are a function of ``phase`` alone."""
        self.sums.zero_()
        self.maxima.fill_(-math.inf)
        self.phase = phase
        self._samples = {}

    def add(self, seen: Seen, dout: torch.Tensor) -> None:
        """One call and its dO [s, b, h, dv]. Collective over the context-parallel group."""
        geometry, b = seen.geometry, min(self.sequences, seen.q.shape[1])
        low = None if seen.low is None else seen.low[:, :b]
        exact = low is None and seen.dropout_p == 0.0 and seen.site.backend in EXACT
        sampled = self._sample(seen.q, geometry)
        facts = measure(
            seen.q[:, :b],
            seen.k[:, :b],
            seen.v[:, :b],
            dout[:, :b],
            sampled=sampled,
            geometry=geometry,
            sinks=seen.sinks,
            plain=exact,
        )
        h = seen.q.shape[2]
        heads = slice(self.first_head, self.first_head + h)
        mine = self.sums[seen.site.layer, heads]  # [h, fields]
        rows = sampled.rows
        stored = seen.out[rows, :b], None if low is None else low[rows]
        values = _values(seen, *stored, facts)
        whole = len(values) == len(FIELDS) - 1
        nothing = facts.delta if whole else torch.zeros_like(facts.delta)
        # One stack and one sum for all fields: an observation is bound by kernel launches.
        every = torch.stack([values.get(name, nothing) for name in FIELDS[:-1]])  # [.., b, h, r]
        every[len(LINEAR) :].square_()
        mine[:, :-1].add_(every.sum((1, 3), dtype=torch.float64).T)
        if seen.dropout_p == 0.0:
            mine[:, -1].add_(facts.spread)
        top = seen.max_logits
        if top is None:
            top = facts.max_logit if geometry.size > 1 else exact_max_logits(seen)
        where = self.maxima[seen.site.layer, heads]
        torch.maximum(where, top.detach().float(), out=where)

    def _sample(self, q: torch.Tensor, geometry: Geometry) -> Sample:
        """Rows and mask, made once an observation for all layers that share them."""
        key = (q.shape[0], geometry.causal, geometry.window)
        if key not in self._samples:
            per_rank = -(-self.rows // geometry.size)
            rows = pick_rows(q.shape[0], per_rank, phase=self.phase, device=q.device)
            self._samples[key] = sample(rows, tokens=q.shape[0], geometry=geometry)
        return self._samples[key]


def _values(
    seen: Seen, out: torch.Tensor, low: torch.Tensor | None, facts: RowFacts
) -> dict[str, torch.Tensor]:
    """Values of the sampled rows by field, [b, h, r], those of `SQUARES` not squared yet.

    ``out`` and ``low`` [r, b, h, dv] are as stored. What was not measured is left out.
    """
    clean, stored = seen.dropout_p == 0.0, _rows(out)
    ones = torch.ones_like(facts.delta)
    values = {"rows": ones, "entropy": facts.entropy, "first": facts.first, "top": facts.top}
    plain = used = None
    if low is not None:
        lost = _rows(decode_residual(out, low))
        of = [stored, -lost, *([stored + lost - facts.out] if clean else [])]
        values["delta2"], plain, *rest = _dots(facts.dout, of)
        used = rest[0] if rest else None
    elif clean:
        truth = facts.plain if facts.plain is not None else stored
        values["delta2"], plain = _dots(facts.dout, [stored, truth - facts.out])
        # Where a low-order part exists that was not handed out (context parallelism), delta is
        # better than O alone; a backend that is exact has not used such an O.
        kept = KNOWN.get(seen.site.stabilizer)
        better = facts.plain is not None or (kept is not None and kept.keeps_residual)
        used = None if better else plain
    else:
        (values["delta2"],) = _dots(facts.dout, [stored])
    for name, e in (("plain", plain), ("used", used)):
        if e is not None:
            values |= {f"{name}_rows": ones, name: e, f"{name}2": e}
    if plain is not None:
        values["plain_sign"] = plain.sign()
    if used is not None:
        values |= {"growth2": facts.growth, "push2": used * facts.logit}
    return values


def _dots(dout: torch.Tensor, of: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """rowsum(dO * x) of several x at once."""
    return (dout * torch.stack(of)).sum(-1).unbind()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[r, b, h, d] -> float32 [b, h, r, d]."""
    return x.float().permute(1, 2, 0, 3)


def exact_max_logits(seen: Seen) -> torch.Tensor:
    """Float32 [h] largest logits of a call whose backend does not return them: one more forward.

    16-bit tensors on a GPU go through the library's kernel, the rest through its reference.
    """
    q, k, v = seen.q, seen.k, seen.v
    kernel = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    kernel = kernel and all(d % 8 == 0 and 8 <= d <= 256 for d in (q.shape[-1], v.shape[-1]))
    options = {"stabilizer": "none"} if kernel else {}
    result = (stable_attention if kernel else reference_attention)(
        q,
        k,
        v,
        layout="sbhd",
        causal=seen.geometry.causal,
        window=seen.geometry.window,
        scale=seen.geometry.scale,
        return_max_logits=True,
        **options,  # type: ignore[arg-type]
    )
    assert isinstance(result, tuple)
    return result[1]


def head_metrics(sums: np.ndarray, maxima: np.ndarray) -> dict[str, np.ndarray]:
    """HEAD_METRICS (without the weights' norms) from reduced sums.

    Args:
        sums: float64 [L, H, fields]; maxima: float32 [L, H], -inf where nothing was seen.

    Returns:
        float32 [L, H] by name; NaN where nothing was measured.
    """
    s = {name: sums[..., i] for i, name in enumerate(FIELDS)}
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = np.where(s["rows"] > 0, s["rows"], np.nan)
        plain_rows = np.where(s["plain_rows"] > 0, s["plain_rows"], np.nan)
        used_rows = np.where(s["used_rows"] > 0, s["used_rows"], np.nan)
        delta_rms = np.sqrt(s["delta2"] / rows)
        found = {
            "max_logit": np.where(np.isneginf(maxima), np.nan, maxima),
            "delta_error_mean": s["plain"] / plain_rows / delta_rms,
            "delta_error_rms": np.sqrt(s["plain2"] / plain_rows) / delta_rms,
            "delta_error_sign": s["plain_sign"] / plain_rows,
            "used_error_mean": s["used"] / used_rows / delta_rms,
            "used_error_rms": np.sqrt(s["used2"] / used_rows) / delta_rms,
            "kappa": np.where(s["spread"] > 0, np.sqrt(s["delta2"] / s["spread"]), np.nan),
            "growth_noise": np.where(s["growth2"] > 0, np.sqrt(s["push2"] / s["growth2"]), np.nan),
            "entropy": s["entropy"] / rows,
            "first_token_mass": s["first"] / rows,
            "top_mass": s["top"] / rows,
            "delta_rms": delta_rms,
        }
    assert set(found) < set(HEAD_METRICS)
    return {name: value.astype(np.float32) for name, value in found.items()}
