"""Sequences cut into chunks: as accurate as uncut, whatever the number of chunks and their order.

Partials merged in 16 bits lose accuracy with every hop (FA #1088, ring-flash-attention #42).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, Case, make_inputs
from chunk_runs import key_order, pieces, run_chunked
from error_rule import HALF_ULP, run_oracle, run_ours

RMS_RATIO, MAX_RATIO = 1.1, 1.5

SMALL = [
    ("sq=48 sk=48 causal=1 hq=4", 2, "contiguous"),
    ("sq=50 sk=50 causal=1 sinks=learned", 4, "zigzag"),
    ("sq=40 sk=40 left=9 causal=1", 3, "contiguous"),
    ("sq=34 sk=34 dropout=0.2", 2, "zigzag"),
    ("sq=33 sk=33 causal=1 residual=int8 dtype=fp16 softcap=3", 2, "contiguous"),
    ("sq=40 sk=40 causal=1 d=96 residual=int8", 2, "zigzag"),
    ("sq=40 sk=40 causal=1 d=192 dv=128 sinks=learned", 2, "contiguous"),
    ("sq=34 sk=34 left=9 d=64 dv=80 residual=int8 dtype=fp16", 2, "contiguous"),
]
LARGE = [
    (line, chunks, order)
    for line in (
        "sq=2048 sk=2048 causal=1 hq=4 d=64",
        "sq=2048 sk=2048 hq=4 d=128 b=2",
        "sq=2048 sk=2048 causal=1 left=600 sinks=learned d=64",
        "sq=1999 sk=1999 causal=1 dropout=0.1 d=64",
        "sq=2048 sk=2048 causal=1 hq=4 d=64 residual=int8 dtype=fp16",
        "sq=2048 sk=2048 causal=1 hq=4 d=192 dv=128",
    )
    for chunks in (2, 4, 8, 16)
    for order in ("contiguous", "zigzag")
]


def compare_with_uncut(line: str, chunks: int, order: str, device: str) -> None:
    case = Case.parse(line)
    given = make_inputs(case, device)
    truth = run_oracle(case, given, torch.float64).named()
    whole = run_ours(case, given, poison=False).named()
    cut = run_chunked(case, given, chunks, order).named()
    for name in ("out", "dq", "dk", "dv"):
        mine, theirs = cut[name].double() - truth[name], whole[name].double() - truth[name]
        rms = lambda x: float(x.pow(2).mean().sqrt())  # noqa: E731
        few = min(1.0, math.sqrt(256 / mine.numel()))
        slack = HALF_ULP[cut[name].dtype] * rms(truth[name]) * few
        assert rms(mine) <= RMS_RATIO * rms(theirs) + slack, (name, rms(mine) / rms(theirs))
        limit = MAX_RATIO * float(theirs.abs().max()) + 4 * slack
        assert float(mine.abs().max()) <= limit, (name, float(mine.abs().max()), limit)
    for name in ("lse", "max_logits"):
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-5, atol=1e-5)
    if "dsink" in whole:
        # Sums of delta, which sees the rounding of P: random, and another one in every cut.
        size = float(truth["dsink"].abs().max())
        torch.testing.assert_close(cut["dsink"], whole["dsink"], rtol=0, atol=5e-3 * size)


@pytest.mark.parametrize(("line", "chunks", "order"), SMALL)
def test_chunks(line: str, chunks: int, order: str) -> None:
    compare_with_uncut(line, chunks, order, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize(("line", "chunks", "order"), LARGE)
def test_many_chunks(line: str, chunks: int, order: str) -> None:
    compare_with_uncut(line, chunks, order, "cuda")


def test_ring_order_visits_every_chunk_once() -> None:
    for chunks in (2, 4, 8, 16):
        for order in ("contiguous", "zigzag"):
            for i in range(chunks):
                assert sorted(key_order(i, chunks, order)) == list(range(chunks))
        assert [s.stop - s.start for s in pieces(chunks * 3 + 1, chunks)][-1] >= 3


def test_merging_far_apart_scores_does_not_overflow() -> None:
    """EasyContext #14: log(1 + exp(b - a)) overflows where one part outweighs the other."""
    from stable_attention.chunks import merge_chunks

    device = DEVICE
    for low, high in ((-300.0, 300.0), (300.0, -300.0), (-math.inf, 5.0), (5.0, -math.inf)):
        out = torch.full((1, 3, 2, 32), 2.0, device=device)
        part = torch.full_like(out, 7.0)
        lse = torch.full((1, 2, 3), low, device=device)
        part_lse = torch.full_like(lse, high)
        want = 7.0 if high > low else 2.0
        merge_chunks(out, lse, part, part_lse)
        assert bool((out == want).all()) and bool((lse == max(low, high)).all())
    out, lse = torch.zeros(1, 3, 2, 32, device=device), torch.full((1, 2, 3), -math.inf)
    merge_chunks(out, lse.to(device), out.clone(), lse.to(device).clone())
    assert not out.any()


def test_sixteen_bit_partials_would_be_seen() -> None:
    """The tolerance is sharp: the same merge of BF16 partials fails it."""
    case = Case(sq=48, sk=48, hq=2, hk=2, causal=1, seed=3)
    given = make_inputs(case)
    truth = run_oracle(case, given, torch.float64).out
    whole = run_ours(case, given, poison=False).out
    rough = run_ours(replace(case, stabilizer="none"), given, poison=False).out
    rms = lambda x: float((x.double() - truth).pow(2).mean().sqrt())  # noqa: E731
    twice = (rough.float() * 1.003).bfloat16()
    assert rms(twice) > RMS_RATIO * rms(whole)
