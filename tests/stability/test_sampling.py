"""Sampled rows in float32 against a plain float64 softmax, whole and split over ranks."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from megatron_patch.context_parallel.layout import shard
from megatron_patch.stability import sampling
from megatron_patch.stability.sampling import Geometry, RowFacts, measure, pick_rows, sample
from stable_attention.reference.emulators import FLASH2, emulate

S, B, KV, G, D, DV = 48, 2, 2, 3, 16, 8
H = KV * G
SCALE = 0.3


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """q, k, v, dO with a sink on the first key."""
    gen = torch.Generator().manual_seed(seed)
    shapes = ((S, B, H, D), (S, B, KV, D), (S, B, KV, DV), (S, B, H, DV))
    q, k, v, do = (torch.randn(s, generator=gen) for s in shapes)
    k[0] = 2.0 * q.mean((0, 2))[:, None] + 0.5
    return tuple(x.to(dtype) for x in (q, k, v, do))


def truth(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, geometry: Geometry,
    sinks: torch.Tensor | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Every row fact [b, h, s] in float64."""
    q, k, v, do = (x.double().permute(1, 2, 0, 3) for x in (q, k, v, do))
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    s = q @ k.mT * geometry.scale
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    ok = (j <= i) if geometry.causal else torch.ones(S, S, dtype=torch.bool)
    if geometry.window is not None:
        left, right = geometry.window
        ok &= (i - j <= left) if left >= 0 else ok
        ok &= (j - i <= right) if right >= 0 else ok
    s = s.masked_fill(~ok, -math.inf)
    full = s
    if sinks is not None:
        full = torch.cat([s, sinks.double().view(1, H, 1, 1).expand(B, H, S, 1)], -1)
    p_full = full.softmax(-1)
    p = p_full[..., :S]
    out, dp = p @ v, do @ v.mT
    delta = (do * out).sum(-1)
    spread = (p * (dp - delta[..., None]) ** 2).sum(-1)
    if sinks is not None:
        spread = spread + p_full[..., S] * delta**2
    seen = s.masked_fill(~ok, 0.0)
    return {
        "out": out,
        "delta": delta,
        "logit": (p * seen).sum(-1),
        "common": (q * k.mean(2, keepdim=True)).sum(-1) * geometry.scale,
        "growth": (p * (dp - delta[..., None]) * seen).sum(-1),
        "entropy": torch.special.entr(p_full).sum(-1),
        "first": p[..., 0],
        "top": p.amax(-1),
        "logits": s,
        "spread": spread,
    }


def look(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    rows: torch.Tensor,
    geometry: Geometry,
    **options: Any,
) -> RowFacts:
    seen = sample(rows, tokens=q.shape[0], geometry=geometry)
    return measure(q[rows], k, v, do[rows], sampled=seen, geometry=geometry, **options)


def check(facts: RowFacts, want: dict[str, torch.Tensor], rows: torch.Tensor) -> None:
    for name in ("out", "delta", "logit", "common", "growth", "entropy", "first", "top"):
        torch.testing.assert_close(
            getattr(facts, name).double(), want[name][:, :, rows], rtol=2e-5, atol=2e-6
        )


GEOMETRIES = [
    (Geometry(scale=SCALE, causal=True), False),
    (Geometry(scale=SCALE, causal=False), True),
    (Geometry(scale=SCALE, causal=True, window=(7, 0)), False),
    (Geometry(scale=SCALE, causal=False, window=(5, 3)), True),
]


@pytest.mark.parametrize(("geometry", "with_sinks"), GEOMETRIES)
@pytest.mark.parametrize("block_bytes", [1 << 26, 4 * B * H * 9 * 5])
def test_row_facts(geometry, with_sinks, block_bytes, monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK_BYTES", block_bytes)
    q, k, v, do = tensors()
    sinks = torch.linspace(-1, 2, H) if with_sinks else None
    rows = pick_rows(S, 9, phase=3)
    facts = look(q, k, v, do, rows, geometry, sinks=sinks)
    want = truth(q, k, v, do, geometry, sinks)
    check(facts, want, rows)
    torch.testing.assert_close(
        facts.max_logit.double(), want["logits"][:, :, rows].amax((2, 3)), rtol=1e-5, atol=1e-6
    )
    spread = want["spread"][:, :, rows].sum(2)
    torch.testing.assert_close(facts.spread.double(), spread, rtol=1e-4, atol=1e-6)


def test_a_saturated_sink_keeps_its_kappa():
    """P (dP - delta)^2 would lose every digit as a difference of squares."""
    q, k, v, do = tensors()
    k[0] += 40 * torch.sign(q).mean((0, 2))[:, None]
    q = q.abs()
    geometry = Geometry(scale=SCALE, causal=True)
    k[0] = 6.0
    rows = torch.arange(8, S)
    facts = look(q, k, v, do, rows, geometry)
    want = truth(q, k, v, do, geometry, None)
    spread = want["spread"][:, :, rows].sum(2)
    assert float((want["delta"][:, :, rows] ** 2).sum(2).div(spread).sqrt().min()) > 30
    torch.testing.assert_close(facts.spread.double(), spread, rtol=2e-3, atol=0)


def test_large_logits_leave_their_growth_its_digits():
    """Summed against zero, float32 loses them: rows of dS sum to zero, and are multiplied by S."""
    q, k, v, do = tensors()
    q, k = 1 + 0.05 * q, 87 + 0.1 * k
    k[0] = 89.6  # a saturated sink: logits of 430, those of the other keys 12 below
    rows = torch.arange(8, S)
    geometry = Geometry(scale=SCALE, causal=True)
    want = truth(q, k, v, do, geometry, None)
    assert float(want["logit"][:, :, rows].min()) > 300 and float(want["top"].min()) > 0.999
    found = look(q, k, v, do, rows, geometry).growth.double()
    growth = want["growth"][:, :, rows]
    error = (found - growth).norm(dim=(0, 2)) / growth.norm(dim=(0, 2))
    assert float(error.max()) < 1e-3


def test_plain_is_what_a_plain_kernel_stores():
    q, k, v, do = tensors(dtype=torch.bfloat16)
    rows = torch.arange(6, S)
    facts = look(q, k, v, do, rows, Geometry(scale=SCALE, causal=True), plain=True)
    flat = [x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(G, 2),
                                            v.repeat_interleave(G, 2), do)]  # fmt: skip
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    emulated = emulate(*flat, rounding=FLASH2, scale=SCALE, mask=mask).out[:, :, rows].float()
    exact = truth(q, k, v, do, Geometry(scale=SCALE, causal=True), None)["out"][:, :, rows]
    # float32 sums in another order change the rounding of a few elements.
    assert float((facts.plain != emulated).float().mean()) < 0.01
    error = (facts.plain.double() - exact).norm() / (emulated.double() - exact).norm()
    assert 0.97 < float(error) < 1.03


class Ranks:
    """Threads as ranks: gather and reduce meet at a barrier. Stands for a process group."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.local = threading.local()

    def size(self) -> int:
        return len(self.slots)

    def rank(self) -> int:
        return int(self.local.rank)

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.slots[self.rank()] = x.clone()
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("geometry", "with_sinks"), GEOMETRIES)
def test_split_over_ranks(size, geometry, with_sinks, monkeypatch):
    """Every rank's rows see all keys, at their zigzag positions; the spreads add up."""

    def reduce(x: torch.Tensor, group: Any, op: Any) -> torch.Tensor:
        parts = torch.stack(group.exchange(x))
        largest = op == torch.distributed.ReduceOp.MAX
        return x.copy_(parts.amax(0) if largest else parts.sum(0))

    monkeypatch.setattr(sampling, "_reduce", reduce)
    monkeypatch.setattr(sampling, "gather", lambda x, group: group.exchange(x))
    ranks = Ranks(size)
    every = tensors()
    sinks = torch.linspace(-1, 2, H) if with_sinks else None
    local = pick_rows(S // size, 5, phase=1)
    split = Geometry(
        scale=geometry.scale, causal=geometry.causal, window=geometry.window, group=ranks
    )
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        ranks.local.rank = rank
        mine = [shard(x, rank=rank, size=size, dim=0) for x in every]
        try:
            found[rank] = look(*mine, local, split, sinks=sinks)
        except BaseException as error:
            found[rank] = error
            ranks.barrier.abort()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = truth(*every, geometry, sinks)
    positions = [shard(torch.arange(S), rank=r, size=size, dim=0)[local] for r in range(size)]
    for rank in range(size):
        assert isinstance(found[rank], RowFacts), found[rank]
        check(found[rank], want, positions[rank])
        rows = torch.cat(positions)
        torch.testing.assert_close(
            found[rank].max_logit.double(),
            want["logits"][:, :, rows].amax((2, 3)),
            rtol=1e-5,
            atol=1e-6,
        )
    spread = want["spread"][:, :, torch.cat(positions)].sum(2)
    total = sum(facts.spread.double() for facts in found.values())
    torch.testing.assert_close(total, spread, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("count", [1, 5, 32, 5000])
def test_rows_are_spread_in_order_and_move(tokens, count):
    for phase in range(4):
        rows = pick_rows(tokens, count, phase=phase).tolist()
        assert rows == sorted(set(rows)) and rows[0] >= 0 and rows[-1] < tokens
        assert len(rows) == max(1, min(count, tokens - min(64, tokens // 8)))
    if tokens == 1024 and count == 32:
        assert not torch.equal(*(pick_rows(tokens, count, phase=p) for p in (0, 1)))
