"""Sums over sampled rows, on the device, shaped for the whole model; and what follows from them.

Every rank adds its own heads, layers and rows into zeros of the model's shape, so that one SUM and
one MAX over all ranks are right under tensor (other heads), pipeline (other layers), context and
data parallelism (other rows) alike.

Shape legend: L layers, H query heads of the whole model; s tokens, b sampled sequences, h query and
kv key/value heads of this rank; r sampled rows; n calls that are computed as one.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.observe import Seen
from megatron_patch.stability.sampling import (
    BLOCK_BYTES,
    Geometry,
    RowFacts,
    Sample,
    measure,
    pick_rows,
    sample,
)
from stable_attention.api import stable_attention
from stable_attention.probes import decode_o_lo
from stable_attention.reference import reference_attention
from stable_attention.stabilizers import KNOWN

log = logging.getLogger(__name__)

LINEAR = (
    "rows", "entropy", "first", "top", "common",
    "plain_rows", "plain", "plain_sign", "used_rows", "used",
)  # fmt: skip
SQUARES = ("delta2", "plain2", "used2", "growth2", "push2")
FIELDS = (*LINEAR, *SQUARES, "spread")


HELD_BYTES = 128 << 20
"""Copies that wait for further layers, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What a call's tensors can tell."""

    geometry: Geometry
    clean: bool
    """No dropout: O can be compared with attention in float32."""
    exact: bool
    """The backend has no 16-bit O in its delta; a plain kernel's is emulated."""
    better: bool
    """Delta was better than O alone, by a low-order part that was not handed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """What is needed of one call; `copied`, none of it is the graph's own memory."""

    layer: int
    source: _Source
    shapes: tuple[Any, ...]
    tokens: int
    """Of Q; those of K are others in cross attention."""
    q: torch.Tensor  # [r, b, h, d]
    k: torch.Tensor  # [s, b, kv, d]
    v: torch.Tensor  # [s, b, kv, dv]
    dout: torch.Tensor  # [r, b, h, dv]
    out: torch.Tensor  # [r, b, h, dv]
    low: torch.Tensor | None
    sinks: torch.Tensor | None
    top: torch.Tensor | None  # [h]

    @property
    def held(self) -> int:
        """Bytes."""
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.dout, self.out))

    def copied(self) -> _Call:
        """The same, to be computed when the graph's tensors are gone and the weights are others."""
        # Sinks are a parameter: by the time of `totals` the optimizer has changed it.
        sinks = None if self.sinks is None else self.sinks.clone()
        return replace(self, k=self.k.clone(), v=self.v.clone(), sinks=sinks)


class HeadSums:
    """The sums of one observation.

    A call is copied when its dO arrives and computed with those of other layers, as many as fit
    `HELD_BYTES` and one block of keys: an observation is bound by kernel launches, by their number
    and not by what they do. `totals` computes what still waits. A call so large that no other fits
    beside it is computed at once, without copies of its K and V.

    Args:
        layers, heads: of the whole model.
        first_head: global number of this rank's first query head.
        rows, sequences: how many are sampled.
        device: where the sums live.
    """

    def __init__(
        self, *, layers: int, heads: int, first_head: int, rows: int, sequences: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.first_head, self.rows, self.sequences = first_head, rows, sequences
        self._sums = torch.zeros(layers, heads, len(FIELDS), dtype=torch.float64, device=device)
        self._maxima = torch.full((layers, heads), -math.inf, device=device)
        self.phase = 0
        self._samples: dict[Any, Sample] = {}
        self._waiting: list[_Call] = []

    def clear(self, *, phase: int) -> None:
        """Begin another observation; the rows are a function of ``phase`` alone."""
        self._sums.zero_()
        self._maxima.fill_(-math.inf)
        self.phase = phase
        self._samples, self._waiting = {}, []

    def totals(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(float64 sums [L, H, fields], float32 largest logits [L, H]) of all calls so far.

        Collective over the context-parallel group, as `add` is.
        """
        self._compute()
        return self._sums, self._maxima

    @torch.no_grad()
    def add(self, seen: Seen, dout: torch.Tensor) -> None:
        """One call and its dO [s, b, h, dv]. Collective: all ranks compute at the same calls."""
        if seen.changed:
            _warn_changed(seen.site.name)
            return
        call = self._call(seen, dout)
        if self._waiting and not self._fits(call):
            self._compute()
        self._waiting.append(call)
        if self._fits(call):  # another like it would
            self._waiting[-1] = call.copied()
        else:
            self._compute()

    def _call(self, seen: Seen, dout: torch.Tensor) -> _Call:
        geometry, b = seen.geometry, min(self.sequences, seen.q.shape[1])
        rows, clean = self._sample(seen.q.shape[0], geometry).rows, seen.dropout_p == 0.0
        exact = seen.low is None and clean and seen.site.exact_delta
        numerics = KNOWN.get(seen.site.stabilizer)
        source = _Source(
            geometry=geometry,
            clean=clean,
            exact=exact,
            # Where a low-order part exists that was not handed out (context parallelism), or the
            # backward corrects delta, it is better than O alone; a backend that is exact has not
            # used such an O.
            better=exact
            or (numerics is not None and (numerics.keeps_o_lo or bool(numerics.projection))),
        )
        top = seen.max_logits
        if top is None and geometry.size == 1 and geometry.starts is None:
            top = exact_max_logits(seen)
        pieces = [x[:, :b] for x in (seen.q, seen.k, seen.v)]
        shapes = [(x.shape, x.dtype) for x in (*pieces, seen.out, seen.low) if x is not None]
        return _Call(
            layer=seen.site.layer,
            source=source,
            shapes=(*shapes, seen.low is None, seen.sinks is None, top is None),
            tokens=seen.q.shape[0],
            q=pieces[0][rows],
            k=pieces[1],
            v=pieces[2],
            dout=dout[rows, :b],
            out=seen.out[rows, :b],
            low=None if seen.low is None else seen.low[rows, :b],
            sinks=seen.sinks,
            top=None if top is None else top.detach(),
        )

    def _fits(self, call: _Call) -> bool:
        """Whether it can be computed with those that wait: in one block, and few enough copies."""
        first = self._waiting[0]
        if (first.source, first.shapes) != (call.source, call.shapes):
            return False
        count, ranks = len(self._waiting) + 1, call.source.geometry.size
        scores = 4 * call.q[..., 0].numel() * ranks * call.k.shape[0]
        return count * scores <= BLOCK_BYTES and count * call.held <= HELD_BYTES

    @torch.no_grad()
    def _compute(self) -> None:
        """Add up the calls that wait, as one batch of n times b sequences."""
        calls, self._waiting = self._waiting, []
        if not calls:
            return
        source, n, (_, b, h, _) = calls[0].source, len(calls), calls[0].q.shape
        q, k, v, dout, out, low = (
            _joined([getattr(call, name) for call in calls])
            for name in ("q", "k", "v", "dout", "out", "low")
        )
        sinks = None
        if calls[0].sinks is not None:
            every_sink = torch.stack([call.sinks for call in calls if call.sinks is not None])
            sinks = every_sink.repeat_interleave(b, 0)
        facts = measure(
            *(q, k, v, dout),
            sampled=self._sample(calls[0].tokens, source.geometry),
            geometry=source.geometry,
            sinks=sinks,
            plain=source.exact,
        )
        values = _values(source, out, low, facts)
        whole = len(values) == len(FIELDS) - 1
        nothing = facts.delta if whole else torch.zeros_like(facts.delta)
        # One stack and one sum for all fields.
        every = torch.stack([values.get(name, nothing) for name in FIELDS[:-1]])  # [.., n b, h, r]
        every[len(LINEAR) :].square_()
        spread = facts.spread if source.clean else torch.zeros_like(facts.spread)
        new = torch.cat(
            [
                every.unflatten(1, (n, b)).sum((2, 4), dtype=torch.float64),
                spread.view(1, n, b, h).sum(2, dtype=torch.float64),
            ]
        ).permute(1, 2, 0)  # [n, h, fields]
        tops = [call.top for call in calls if call.top is not None]
        if not tops:
            tops = list(facts.max_logit.view(n, b, h).amax(1).unbind())
        heads = slice(self.first_head, self.first_head + h)
        for call, mine, top in zip(calls, new.unbind(), tops, strict=True):
            self._sums[call.layer, heads].add_(mine)
            where = self._maxima[call.layer, heads]
            torch.maximum(where, top.float(), out=where)

    def _sample(self, tokens: int, geometry: Geometry) -> Sample:
        """Rows and mask, made once an observation for all layers that share them."""
        key = (tokens, geometry.causal, geometry.window)
        if key not in self._samples:
            per_rank = -(-self.rows // geometry.size)
            rows = pick_rows(tokens, per_rank, phase=self.phase, device=self._sums.device)
            self._samples[key] = sample(rows, tokens=tokens, geometry=geometry)
        return self._samples[key]


@functools.cache
def _warn_changed(name: str) -> None:
    log.warning(
        "the attention of %s is not observed: what it returned is changed in place before the "
        "backward pass; change a copy of it",
        name,
    )


def _joined(pieces: list[torch.Tensor | None]) -> Any:
    """Sequences of all calls in a row, [.., n b, .., ..]; None if calls have none."""
    there = [x for x in pieces if x is not None]
    return torch.cat(there, 1) if len(there) > 1 else pieces[0]


def _values(
    source: _Source, out: torch.Tensor, low: torch.Tensor | None, facts: RowFacts
) -> dict[str, torch.Tensor]:
    """Values of the sampled rows by field, [b, h, r], those of `SQUARES` not squared yet.

    ``out`` and ``low`` [r, b, h, dv] are as stored. What was not measured is left out.
    """
    clean, stored = source.clean, _rows(out)
    ones = torch.ones_like(facts.delta)
    named = ("entropy", "first", "top", "common")
    values = {"rows": ones} | {name: getattr(facts, name) for name in named}
    plain = used = None
    if low is not None:
        lost = _rows(decode_o_lo(out, low))
        of = [stored, -lost, *([stored + lost - facts.out] if clean else [])]
        values["delta2"], plain, *rest = _dots(facts.dout, of)
        used = rest[0] if rest else None
    elif clean:
        truth = facts.plain if facts.plain is not None else stored
        values["delta2"], plain = _dots(facts.dout, [stored, truth - facts.out])
        used = None if source.better else plain
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
    options: dict[str, Any] = {"stabilizer": "none"} if kernel else {}
    options |= {name: getattr(seen.geometry, name) for name in ("causal", "window", "scale")}
    attention = stable_attention if kernel else reference_attention
    result = attention(q, k, v, layout="sbhd", return_max_logits=True, **options)
    assert isinstance(result, tuple)
    return result[1]


def head_metrics(sums: np.ndarray, maxima: np.ndarray) -> dict[str, np.ndarray]:
    """HEAD_METRICS (without the weights' norms) from reduced sums.

    ``sums``: float64 [L, H, fields]; maxima: float32 [L, H], -inf where nothing was seen.

    Returns float32 [L, H] by name; NaN where nothing was measured.
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
            "common_logit": s["common"] / rows,
            "entropy": s["entropy"] / rows,
            "first_token_mass": s["first"] / rows,
            "top_mass": s["top"] / rows,
            "delta_rms": delta_rms,
        }
    assert set(found) < set(HEAD_METRICS)
    return {name: value.astype(np.float32) for name, value in found.items()}
