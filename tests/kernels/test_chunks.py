"""Sequences cut into chunks: as accurate as uncut, whatever the number of chunks and their order.

Partials merged in 16 bits lose accuracy with every hop (FA #1088, ring-flash-attention #42).
"""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import DEVICE, Case, make_inputs
from chunk_runs import run_chunked
from error_rule import HALF_ULP, run_oracle, run_ours

RMS_RATIO, MAX_RATIO = 1.1, 1.5

SMALL = [
    ("sq=48 sk=48 causal=1 hq=4", 2, "contiguous"),
    ("sq=50 sk=50 causal=1 sinks=learned", 4, "zigzag"),
    ("sq=40 sk=40 left=9 causal=1", 3, "contiguous"),
    ("sq=34 sk=34 dropout=0.2 sinks=learned", 2, "zigzag"),
    ("sq=64 sk=64 causal=1 dropout=0.2 hq=2 hk=1", 4, "contiguous"),
    ("sq=33 sk=33 causal=1 o_lo=int8 dtype=fp16 softcap=3", 2, "contiguous"),
    ("sq=40 sk=40 causal=1 d=96 o_lo=int8", 2, "zigzag"),
    ("sq=40 sk=40 causal=1 d=192 dv=128 sinks=learned", 2, "contiguous"),
    ("sq=34 sk=34 left=9 d=64 dv=80 o_lo=int8 dtype=fp16", 2, "contiguous"),
    ("sq=50 sk=50 causal=1 hq=4 sinks=learned stabilizer=compensated_projected", 4, "zigzag"),
    ("sq=40 sk=40 d=96 dropout=0.2 hq=2 hk=1 stabilizer=compensated_projected", 3, "contiguous"),
]
LARGE = [
    (line, chunks, order)
    for line in (
        "sq=2048 sk=2048 causal=1 hq=4 d=64",
        "sq=2048 sk=2048 hq=4 d=128 b=2",
        "sq=2048 sk=2048 causal=1 left=600 sinks=learned d=64",
        "sq=1999 sk=1999 causal=1 dropout=0.1 d=64",
        "sq=2048 sk=2048 causal=1 hq=4 d=64 o_lo=int8 dtype=fp16",
        "sq=2048 sk=2048 causal=1 hq=4 d=192 dv=128",
        "sq=2048 sk=2048 causal=1 hq=4 d=64 sinks=learned stabilizer=compensated_projected",
        "sq=1999 sk=1999 causal=1 left=600 hq=4 hk=2 d=128 b=2 stabilizer=compensated_projected",
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


def test_starts_of_packed_chunks_are_checked() -> None:
    """As in `stable_attention`: a view of every other start was read as every start."""
    from stable_attention.chunks import chunk_forward

    q = torch.randn(20, 2, 16).bfloat16().to(DEVICE)
    cu = torch.tensor([0, 8, 16], dtype=torch.int32, device=DEVICE)
    packed = {"layout": "thd", "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    far = torch.tensor([0, 99, 12, 99], dtype=torch.int32, device=DEVICE)
    for name in ("cu_seqlens_q_padded", "cu_seqlens_k_padded"):
        bad = (far[::2], far[:1], far[:2].long(), far[:2].to("meta"))
        for starts in bad:
            with pytest.raises(ValueError, match=name):
                chunk_forward(q, q, q, **packed, **{name: starts})
        chunk_forward(q, q, q, **packed, **{name: far[::2].contiguous()})


def test_partials_that_the_kernels_cannot_read_are_refused() -> None:
    """finish_chunks took columns for rows where the last dimension was strided."""
    from stable_attention.chunks import finish_chunks

    out = torch.randn(1, 5, 2, 16, device=DEVICE)
    lse = torch.randn(1, 2, 5, device=DEVICE)
    turned = out.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=r"out is torch\.float32 with stride 2"):
        finish_chunks(turned, lse, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"lse is torch\.float32 with stride 2"):
        finish_chunks(out, lse.mT.contiguous().mT, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"out is torch\.bfloat16"):
        finish_chunks(out.bfloat16(), lse, dtype=torch.bfloat16)


def test_delta_of_views_with_strides_of_their_own() -> None:
    """O and its low-order part need not lie alike in memory."""
    from stable_attention.chunks import chunk_delta

    wide = torch.randn(1, 5, 2, 32, device=DEVICE).bfloat16()
    out, low = wide[..., :16], torch.randn(1, 5, 2, 16, device=DEVICE).bfloat16() / 256
    dout = torch.randn(1, 5, 2, 16, device=DEVICE).bfloat16()
    lse = torch.randn(1, 2, 5, device=DEVICE)
    want, _ = chunk_delta(dout, out.contiguous(), lse, low=low)
    for views in ((out, low), (out.mT.contiguous().mT, low), (out, low.mT.contiguous().mT)):
        got, _ = chunk_delta(dout, views[0], lse, low=views[1])
        assert torch.equal(got, want)


def projecting(
    rows: torch.Tensor, dq: torch.Tensor, *, sums=torch.float32, key=torch.bfloat16
) -> dict[str, object]:
    from stable_attention.chunks import ProjectedRows

    kept = ProjectedRows(rows.to(sums), rows, dq.to(key))
    return {"stabilizer": "compensated_projected", "rows": kept, "lse": rows, "delta": rows}


def test_accumulators_may_be_views_that_do_not_overlap() -> None:
    from stable_attention.layouts import overlaps

    x = torch.zeros(3, 4, 5, 6)
    for view in (x, x[1:, ::2], x.transpose(0, 2), x[:, :, 1:3], x[:1].expand(1, 4, 5, 6), x[0:0]):
        assert not overlaps(view)
    for view in (x[:, :1].expand_as(x), x.unfold(1, 2, 1), x.as_strided((3, 4), (2, 1))):
        assert overlaps(view)


def wrong_calls() -> dict[str, tuple[str, dict]]:
    """The function, and what to change in a call of it that is right, by what is wrong then."""
    f32, rows = torch.zeros(1, 4, 4, 16, device=DEVICE), torch.zeros(1, 4, 4, device=DEVICE)
    sinks = torch.zeros(4, device=DEVICE)
    return {
        "part is a": ("merge", {"part": f32[:, :3], "part_lse": rows[..., :3]}),
        "part is a torch.float32 tensor of shape (1, 4, 4, 8)": ("merge", {"part": f32[..., :8]}),
        "lse is a": ("merge", {"lse": rows[..., :2]}),
        "part_lse is a": ("merge", {"part_lse": rows[:, :2]}),
        "out.dim() is 3": ("merge", {"out": f32[0]}),
        "part_lse is [0.0]": ("merge", {"part_lse": [0.0]}),
        "layout is 'hbsd'": ("merge", {"layout": "hbsd"}),
        "lse is": ("finish", {"lse": rows[0]}),
        "sinks is a": ("finish", {"sinks": sinks[:2]}),
        "sinks is 0.0": ("finish", {"sinks": 0.0}),
        "sinks.dtype is torch.int64": ("finish", {"sinks": sinks.long()}),
        "stabilizer is 'x'": ("finish", {"stabilizer": "x"}),
        "o_lo is 'x'": ("finish", {"o_lo": "x"}),
        "dtype is torch.int8": ("finish", {"dtype": torch.int8}),
        "dout is a": ("delta", {"dout": f32[..., :8].bfloat16()}),
        "lse is a torch.float32 tensor of shape (1, 4, 2)": ("delta", {"lse": rows[..., :2]}),
        "lse is torch.float64": ("delta", {"lse": rows.double()}),
        "dlse is a": ("delta", {"dlse": rows[:, :1]}),
        "low is a": ("delta", {"low": f32[:, :2].bfloat16()}),
        "sinks is a torch.float32 tensor of shape (1,)": ("delta", {"sinks": sinks[:1]}),
        "dout is a torch.bfloat16 tensor": ("backward", {"dout": f32[..., :8].bfloat16()}),
        "lse is a torch.float32 tensor of shape (1, 1, 2)": ("backward", {"lse": rows[:, :1, :2]}),
        "delta is a": ("backward", {"delta": rows[..., :2]}),
        "delta is torch.bfloat16": ("backward", {"delta": rows.bfloat16()}),
        "dk is a": ("backward", {"dk": f32[:, :2]}),
        "dv is torch.bfloat16": ("backward", {"dv": f32.bfloat16()}),
        "sinks is given": ("forward", {"sinks": sinks}),
        "sinks is given; ": ("backward", {"sinks": sinks}),
        "q_position is 1.5": ("forward", {"q_position": 1.5}),
        "k_position is 'x'": ("forward", {"k_position": "x"}),
        "dropout_p is None": ("forward", {"dropout_p": None}),
        "dropout_seed is 1.5": ("forward", {"dropout_p": 0.1, "dropout_seed": 1.5}),
        "batch_offset is -1": ("forward", {"batch_offset": -1}),
        "beta is 'x'": ("forward", {"beta": "x"}),
        "part_lse is a negative": ("merge", {"part_lse": torch._neg_view(rows)}),
        "lse is a negative view": ("backward", {"lse": torch._neg_view(rows)}),
        "dq is a negative view": ("backward", {"dq": torch._neg_view(f32)}),
        "layout is 'x'": ("project", {"layout": "x"}),
        "rows is None": ("project", {"rows": None}),
        "lse is a torch.float32 tensor of shape (1, 4, 1)": ("project", {"lse": rows[..., :1]}),
        "delta is torch.float64": ("project", {"delta": rows.double()}),
        "dlse is a torch.float32 tensor of shape (1, 1, 4)": ("project", {"dlse": rows[:, :1]}),
        "dq.dim() is 3": ("project", {"dq": f32[0]}),
        "dq.dtype is torch.bfloat16": ("project", {"dq": f32.bfloat16()}),
        "scale is 'x'": ("project", {"scale": "x"}),
        "out is of shape": ("merge", {"out": f32[:, :1].expand_as(f32)}),
        "lse is of shape": ("merge", {"lse": rows[:, :1].expand_as(rows)}),
        "lse is of shape (1, 4, 4) with strides (16, 0, 1)": (
            "finish",
            {"lse": rows[:, :1].expand_as(rows), "sinks": sinks},
        ),
        "dq is of shape": ("backward", {"dq": f32[:, :, :1].expand_as(f32)}),
        "dk is of shape": ("backward", {"dk": f32[:, :1].expand_as(f32)}),
        "dv is of shape": ("backward", {"dv": f32.as_strided(f32.shape, (256, 64, 8, 1))}),
        "dq, dk, dv is one tensor twice": ("backward", {"dk": f32, "dv": f32}),
        "dq is of shape (1, 4, 4, 16)": ("project", {"dq": f32[:, :1].expand_as(f32)}),
        "dout.dtype is torch.float32": ("backward", {"dout": f32}),
        "dout.dtype is torch.float64": ("delta", {"dout": f32.double()}),
        "out.dtype is torch.int32": ("delta", {"out": f32.int()}),
        "low.dtype is torch.float64": ("delta", {"low": f32.double()}),
        "rows is a tuple": ("backward", projecting(rows, f32) | {"rows": tuple(range(5))}),
        "rows.excess.dtype is": ("backward", projecting(rows, f32, sums=torch.bfloat16)),
        "rows.key.dtype is": ("backward", projecting(rows, f32, key=torch.float32)),
        "rows.excess is of shape": ("backward", projecting(rows[:, :1].expand_as(rows), f32)),
    }


@pytest.mark.parametrize("text", wrong_calls())
def test_tensors_that_do_not_belong_together_are_refused(text: str) -> None:
    """The kernels trust the first tensor's shape, and read foreign memory through the others."""
    from stable_attention import AttentionArgumentError, chunks

    q = torch.zeros(1, 4, 4, 16, device=DEVICE).bfloat16()
    f32, rows = q.float(), torch.zeros(1, 4, 4, device=DEVICE)
    partial, grads = {"out": f32, "lse": rows}, {"dq": f32, "dk": f32.clone(), "dv": f32.clone()}
    right = {
        "forward": {"q": q, "k": q, "v": q},
        "merge": partial | {"part": f32.clone(), "part_lse": rows.clone()},
        "finish": partial | {"dtype": torch.bfloat16},
        "delta": {"dout": q, "out": q, "lse": rows},
        "backward": {"dout": q, "q": q, "k": q, "v": q, "lse": rows, "delta": rows} | grads,
        "project": {"dq": f32, "rows": chunks.ProjectedRows(rows, rows, q), "lse": rows}
        | {"delta": rows},
    }
    name, changes = wrong_calls()[text]
    several = {x: getattr(chunks, f"{x}_chunks") for x in ("merge", "finish", "project")}
    function = several.get(name) or getattr(chunks, f"chunk_{name}")
    function(**right[name])
    with pytest.raises(AttentionArgumentError) as caught:
        function(**right[name] | changes)
    assert str(caught.value).startswith(text) and "; allowed: " in str(caught.value)


def test_gradients_and_sinks_that_are_views_which_negate() -> None:
    from stable_attention.chunks import chunk_delta, chunk_forward, finish_chunks

    q, k, v, dout = (torch.randn(1, 24, 2, 16, device=DEVICE).bfloat16() for _ in range(4))
    sinks = torch.tensor([2.0, -1.0], device=DEVICE)
    dlse = torch.randn(1, 2, 24, device=DEVICE)
    found = []
    for negative in (torch.neg, torch._neg_view):
        out, lse = chunk_forward(q, k, v)
        given = {"sinks": negative(sinks)}
        out, low = finish_chunks(out, lse, dtype=q.dtype, **given)
        given |= {"dlse": negative(dlse), "low": low}
        found.append((lse, *chunk_delta(negative(dout), out, lse, **given)))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_positions_starts_and_offsets_that_are_views_which_negate() -> None:
    """Kernels read memory, in which all were negative: they clamped it to no keys at all."""
    from stable_attention.chunks import chunk_forward

    q, k, v = (torch.randn(24, 2, 16, device=DEVICE).bfloat16() for _ in range(3))
    cu, at, seed = ([0, 9, 20], [20, 30], 7)
    found = []
    for view in (torch.neg, torch._neg_view):
        cu_q, cu_k, start_q, start_k, place_q, place_k = (
            view(-torch.tensor(x, dtype=torch.int32, device=DEVICE))
            for x in (cu, cu, [1, 12], [0, 11], at, [0, 16])
        )
        out, lse = chunk_forward(
            q, k, v, layout="thd", causal=True, dropout_p=0.3,
            q_position=place_q, k_position=place_k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
            cu_seqlens_q_padded=start_q, cu_seqlens_k_padded=start_k,
            dropout_seed=view(-torch.tensor(seed, device=DEVICE)),
        )  # fmt: skip
        assert out.any()
        found.append((out, lse))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_autograd_knows_what_was_changed_in_place() -> None:
    """A loss of a partial, whose gradient was that of the merged one without a word."""
    from stable_attention.chunks import chunk_backward, chunk_forward, finish_chunks, merge_chunks

    q, k, v = (torch.randn(1, 24, 2, 16, device=DEVICE).bfloat16() for _ in range(3))
    weight = torch.ones(1, 24, 2, 16, device=DEVICE, requires_grad=True)
    out, lse = chunk_forward(q, k, v)
    loss = (out * weight).sum()
    merge_chunks(out, lse, *chunk_forward(q, k, v))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    known = lse._version
    finish_chunks(out, lse, dtype=q.dtype)
    assert lse._version == known
    finish_chunks(out, lse, dtype=q.dtype, sinks=torch.zeros(2, device=DEVICE))
    grads = {name: torch.zeros(1, 24, 2, 16, device=DEVICE) for name in ("dq", "dk", "dv")}
    chunk_backward(q, q, k, v, lse, torch.zeros_like(lse), **grads)
    assert lse._version > known and all(x._version for x in grads.values())
