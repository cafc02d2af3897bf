"""What the CPU suite runs: feature cases, known faults, identities.

One list for two users: the tests, and the planted bugs (planted_bugs.py), each of which must be
caught by members of this list. Property checks return a list of problems, empty when all is well.

stable_attention is imported inside the functions, so that planting.py decides which copy runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from attention_cases import DEVICE, Case, forward_path, make_inputs
from error_rule import check_case, run_oracle, run_ours, run_specified
from hopper_rows import on_hopper, problems
from int8_cases import MEMBERS as INT8

FEATURES = [
    "b=2 sq=70 sk=45 hq=2 hk=1 layout=bshd",
    "sq=45 sk=70 causal=1 layout=sbhd b=2",
    "sq=70 sk=45 causal=1 layout=bhsd",
    "sq=65 sk=65 causal=1 hq=4 hk=1 dtype=fp16",
    "sq=40 sk=90 causal=1 left=33 hq=4 memory=strided",
    "sq=90 sk=40 left=11 right=5",
    "sq=50 sk=50 right=3 d=40 dv=24",
    "sq=33 sk=33 sinks=off-by-one d=64 dv=32",
    "sq=64 sk=64 causal=1 sinks=learned dlse=1",
    "sq=34 sk=66 softcap=3 causal=1",
    "sq=34 sk=34 dropout=0.3 b=2 hq=2 hk=1",
    "sq=40 sk=70 dropout=0.17 causal=1 left=20 dtype=fp16",
    "sq=40 sk=40 o_lo=int8 causal=1 sinks=learned",
    "sq=64 sk=64 values=repeat causal=1",
    "sq=40 sk=64 values=outlier",
    "sq=64 sk=64 values=above dlse=1",
    "sq=33 sk=130 d=32 hq=1 hk=1 values=tall",
    "sq=33 sk=130 d=32 hq=1 hk=1 values=tall path=plain dtype=fp16",
    "layout=thd lens_q=9,37 lens_k=9,170 d=96 values=tall sinks=learned path=segments",
    "sq=64 sk=64 scale=0.5 gain=3 memory=fused",
    "sq=48 sk=48 memory=expanded b=3",
    "sq=64 sk=64 causal=1 stabilizer=none dtype=fp16",
    "sq=64 sk=64 causal=1 deterministic=0 hq=4",
    "layout=thd lens_q=0,5,33,1,20 lens_k=4,0,33,1,40 causal=1 sinks=learned unused=3 dlse=1",
    "layout=thd lens_q=9,37 lens_k=9,37 gaps=4 left=3 dropout=0.2 memory=fused",
    "layout=thd lens_q=20,1,40 lens_k=33,33,2 hq=2 hk=1 o_lo=int8",
    # Head dims of two parts (triton/parts.py), whole and partly filled.
    "d=96 dv=128 sq=20 sk=36 causal=1",
    "sq=45 sk=70 causal=1 d=96 hq=2 hk=1",
    "sq=33 sk=130 d=80 dtype=fp16 hq=1 hk=1 path=late",
    "sq=33 sk=130 d=96 hq=1 hk=1 path=segments",
    "sq=33 sk=130 d=192 dv=192 dtype=fp16 hq=1 hk=1 path=reverse",
    "sq=34 sk=40 d=64 dv=96 sinks=learned dropout=0.2 o_lo=int8 hq=2 hk=1",
    "layout=thd lens_q=9,37 lens_k=9,37 causal=1 d=72 dv=160 path=tma",
    "layout=thd lens_q=0,5,33,1 lens_k=4,0,33,40 d=160 dv=96 dtype=fp16 unused=3 left=9",
    "sq=20 sk=36 left=13 d=136 dv=72 memory=strided",
    "sq=20 sk=40 causal=1 d=192 dv=128",
    "sq=40 sk=70 right=7 d=192 dv=128 o_lo=int8 dtype=fp16 path=tma-segments",
    "layout=sbhd sq=45 sk=70 b=2 hq=2 causal=1 sinks=learned d=40 dv=24 path=tma",
    "layout=bhsd sq=45 sk=70 b=2 hq=4 hk=2 causal=1 d=96 dv=64 memory=fused path=tma",
    "layout=thd lens_q=9,37 lens_k=9,37 gaps=4 left=3 hq=4 hk=2 d=64 dv=96 memory=fused path=tma",
    "layout=thd lens_q=0,5,33,1,20 lens_k=4,0,33,1,40 hq=4 hk=2 left=9 unused=3 path=tma",
    "d=192 sq=33 sk=40 hq=1 hk=1 path=late",
    "sq=40 sk=40 d=96 dv=64 softcap=3 dlse=1 causal=1 stabilizer=none",
    "sq=40 sk=40 d=128 dv=96 layout=bhsd memory=fused dropout=0.17",
    "sq=34 sk=34 d=88 dv=104 layout=sbhd b=2 left=5 right=9",
    "sq=33 sk=200 hq=1 hk=1",
    "sq=70 sk=70 left=35 right=40 hq=1 hk=1",
    "sq=33 sk=200 hq=1 hk=1 path=plain",
    "sq=33 sk=200 hq=1 hk=1 path=segments",
    "sq=33 sk=200 hq=1 hk=1 path=late",
    "sq=33 sk=200 hq=1 hk=1 path=reverse",
    "sq=40 sk=170 causal=1 dropout=0.2 softcap=3 sinks=learned path=late",
    "sq=40 sk=170 causal=1 dropout=0.2 softcap=3 sinks=learned path=reverse",
    "sq=40 sk=130 left=90 right=50 stabilizer=none path=reverse",
    "layout=thd lens_q=0,5,40 lens_k=4,0,130 causal=1 path=reverse",
    "sq=33 sk=200 hq=1 hk=1 path=early",
    "sq=33 sk=130 d=192 dv=192 dtype=fp16 hq=1 hk=1 causal=1 path=early",
    "sq=33 sk=200 hq=1 hk=1 path=early-segments",
    "sq=40 sk=170 causal=1 dropout=0.2 sinks=learned path=early-late",
    "sq=40 sk=170 causal=1 dropout=0.2 sinks=learned dtype=fp16 path=early-reverse",
    "sq=40 sk=130 left=90 right=50 stabilizer=none path=early",
    # Rows of dS that sum to what they should (triton/projection.py).
    "sq=65 sk=65 causal=1 hq=4 hk=1 dtype=fp16 stabilizer=compensated_projected",
    "sq=64 sk=64 causal=1 sinks=learned hq=4 dlse=1 stabilizer=compensated_projected",
    "sq=64 sk=64 causal=1 sinks=learned hq=4 dlse=1 stabilizer=projected",
    "sq=66 sk=34 dropout=0.3 b=2 hq=4 stabilizer=compensated_projected",
    "sq=40 sk=70 dropout=0.17 causal=1 left=20 dtype=fp16 stabilizer=projected",
    "sq=90 sk=40 left=11 right=5 stabilizer=compensated_projected",
    "sq=70 sk=45 causal=1 layout=bhsd stabilizer=projected",
    "sq=40 sk=70 causal=1 d=192 dv=128 stabilizer=projected",
    "sq=45 sk=70 causal=1 d=96 hq=2 hk=1 o_lo=int8 stabilizer=compensated_projected",
    "layout=thd lens_q=0,5,33,1,20 lens_k=4,0,33,1,40 causal=1 sinks=learned unused=3 dlse=1 "
    "stabilizer=compensated_projected",
    "layout=thd lens_q=9,37 lens_k=9,37 gaps=4 left=3 dropout=0.2 stabilizer=projected",
    "layout=sbhd sq=45 sk=70 b=2 hq=4 hk=2 causal=1 sinks=learned d=40 dv=24 path=tma "
    "stabilizer=compensated_projected",
    "layout=thd lens_q=9,37 lens_k=9,37 causal=1 d=72 dv=160 path=tma stabilizer=projected",
    "sq=60 sk=20 causal=1 stabilizer=compensated_projected",
    "sq=33 sk=200 hq=4 hk=2 values=repeat stabilizer=compensated_projected",
    "sq=40 sk=64 values=outlier stabilizer=projected",
]

FAULTS = {
    "FA-334 backward NaN at length 1, d 16": "sq=1 sk=1 d=16",
    "FA-443 packed backward NaN, keys 1 against 256 queries":
        "layout=thd lens_q=80,70 lens_k=1,1 causal=0",
    "FA-1947 P of masked positions not zeroed": "layout=thd lens_q=33,7 lens_k=33,7 values=below",
    "pytorch-196678 dQ NaN when length % 128 == 64 and LSE < -88":
        "sq=64 sk=64 values=below d=32",
    "cudnn-1072 one query, 128 keys, LSE -122: dK, dV NaN": "sq=1 sk=128 values=below",
    "cudnn-160 K outlier of 70 at length 2": "sq=2 sk=2 values=outlier",
    "pytorch-109517 fully masked rows poison the gradients": "sq=60 sk=20 causal=1",
    "pytorch-158212 length not a multiple of the block, with LSE": "sq=65 sk=63 dlse=1 left=20",
    "FA-2324 tokens past the last sequence stay unwritten":
        "layout=thd lens_q=20,11 lens_k=20,11 unused=9 causal=1",
    "TE-3216 d 256, batch 2: wrong sign of dQ on outliers":
        "b=2 sq=20 sk=20 hq=1 hk=1 d=256 values=outlier causal=1",
    "FA-2541 views of one fused QKV projection": "sq=40 sk=40 memory=fused causal=1",
    "FA-2552 d_v off the reduce width": "sq=33 sk=33 d=64 dv=40",
    "FA-2706 dSink must include dLSE": "sq=40 sk=40 sinks=learned dlse=1",
    "TE-3249 sink with packed sequences and d_v 192":
        "layout=thd lens_q=9,20 lens_k=9,20 hq=1 hk=1 d=64 dv=192 sinks=learned causal=1",
    "nsa-27 head map of grouped queries": "sq=20 sk=20 hq=6 hk=3 d=32 dv=16",
    "ffpa-301 grouped dK and dV accumulate in float32": "sq=64 sk=40 hq=16 hk=1 values=positive",
    "FA-2860 launch grid far larger than the sequences":
        "layout=thd lens_q=3,2 lens_k=3,2 causal=1 unused=60",
    "FA-2562 no queries in any sequence": "layout=thd lens_q=0,0 lens_k=3,4 unused=2",
    "FA-1254 no keys in any sequence": "layout=thd lens_q=3,4 lens_k=0,0 unused=2 sinks=learned",
    "expanded keys and values": "b=2 sq=20 sk=20 memory=expanded",
}  # fmt: skip


def values_of_one(
    dtype: torch.dtype = torch.bfloat16, o_lo: str = "bf16", path: str = ""
) -> list[str]:
    """V = 1 gives O = 1 exactly, low-order part 0: l sums the P that multiplied V (FA PR #2721)."""
    from stable_attention import stable_attention
    from stable_attention.probes import decode_o_lo

    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 70, 2, 32, generator=gen).to(DEVICE, dtype) * 2 for _ in range(2))
    v = torch.ones_like(k)
    with forward_path(path):
        out, low = stable_attention(
            q, k, v, causal=True, window=(50, 0), o_lo=o_lo, return_o_lo=True
        )
    rest = float(decode_o_lo(out, low).abs().max())
    problems = [] if torch.equal(out, torch.ones_like(out)) else [f"O is {out.min()}..{out.max()}"]
    return problems + ([f"low-order part of 1 is {rest}"] if rest > 2.0**-20 else [])


def low_order_part(o_lo: str) -> list[str]:
    """Three equal keys: P = 1 exactly, O = a mean of three values; hi + low must be that mean."""
    from stable_attention import stable_attention
    from stable_attention.probes import decode_o_lo
    from stable_attention.reference.emulators import half_ulp

    gen = torch.Generator().manual_seed(1)
    q, v = (torch.randn(1, 40, 1, 32, generator=gen).to(DEVICE).bfloat16() for _ in range(2))
    k = q[:, :1].expand(1, 40, 1, 32)
    out, low = stable_attention(q, k, v, causal=True, window=(2, 0), o_lo=o_lo, return_o_lo=True)
    total = torch.nn.functional.pad(v.double(), (0, 0, 0, 0, 2, 0))
    mean = (total[:, 2:] + total[:, 1:-1] + total[:, :-2])[:, 2:] / 3
    hi = out[:, 2:]
    rest = mean - hi.double()
    step = half_ulp(hi).double() * (1 / 127 if o_lo == "int8" else 2.0**-8)
    error = (decode_o_lo(hi, low[:, 2:]).double() - rest).abs() / step
    # Float32 sums leave 2^-22 of O, 2^-13 half ulps, at either side of a rounding.
    limit = 0.5 + (2.0**-13 * 127 if o_lo == "int8" else 2.0**-5)
    worst = float(error.max())
    return [f"{o_lo} low-order part off by {worst:.2f} of its step"] if worst > limit else []


def backend_result(tensors, stabilizer="compensated", o_lo="bf16"):
    """What the kernels make of causal (q, k, v, dO) in bhsd, for a probe."""
    from stable_attention import stable_attention
    from stable_attention.probes import BackendResult

    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out, lse, low = stable_attention(
        *leaves, layout="bhsd", causal=True, stabilizer=stabilizer, o_lo=o_lo,
        deterministic=True, return_lse=True, return_o_lo=True,
    )  # fmt: skip
    dq, dk, _ = torch.autograd.grad(out, leaves, tensors[3])
    return BackendResult(out=out, lse=lse, low=low, dq=dq, dk=dk)


def _delta_report(regime: str, stabilizer: str, o_lo: str):
    from regimes import make_regime

    from stable_attention.probes import probe

    given = [x[None] for x in make_regime(regime, heads=1, n=96, device=DEVICE)]
    result = backend_result(given, stabilizer, o_lo)
    return probe(*given, backend=result, layout="bhsd", causal=True, skip_rows=48)


def saturated_sink(stabilizer: str = "compensated", o_lo: str = "bf16") -> list[str]:
    """Plain BF16 O makes dQ 100 % wrong here; hi + low and float32 delta bring it back."""
    report = _delta_report("one", stabilizer, o_lo)
    problems = []
    coarse = 8 if o_lo == "int8" else 1
    if report.dq_error > 0.03 * coarse:
        problems.append(f"dQ error {report.dq_error:.3f} in regime one")
    if report.rms > 1e-6 * coarse:
        problems.append(f"delta error {report.rms:.2e} in regime one")
    if not report.lse_error < 1e-5:
        problems.append(f"LSE error {report.lse_error:.2e} in regime one")
    return problems


def equal_sinks() -> list[str]:
    """Two equal sinks with small values: the paper's tie."""
    report = _delta_report("tie2s", "compensated", "bf16")
    return [f"delta error {report.rms:.2e} in regime tie2s"] if report.rms > 2e-6 else []


def rows_that_sum_to_zero(stabilizer: str, regime: str) -> list[str]:
    """dQ and dK of four query heads on two key heads, whose sinks lie past the first tile of keys.

    What a rounded row of dS sums to is all that is wrong with dQ here: 0.3 to 40 times its size.
    """
    from oracle import gradients, oracle_attention
    from regimes import make_regime

    from stable_attention import stable_attention

    n, group = 96, 2
    q, k, v, dout = (x[None].to(DEVICE) for x in make_regime(regime, heads=2, n=n))
    q = torch.cat([q, q.roll(1, 2)], 2).unflatten(2, (group, n)).flatten(1, 2)
    dout = torch.cat([dout, dout.roll(7, 2)], 2).unflatten(2, (group, n)).flatten(1, 2)
    k, v = (x.roll(40, 2) for x in (k, v))
    found = []
    for run, kind in ((stable_attention, torch.bfloat16), (oracle_attention, torch.float64)):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        if run is stable_attention:
            out = stable_attention(*leaves, layout="bhsd", stabilizer=stabilizer)
        else:
            out = oracle_attention(*leaves, layout="bhsd", compute=kind).out
        found.append(gradients((out,), leaves, (dout.to(kind),)))
    problems = []
    for name, ours, truth in zip(("dQ", "dK", "dV"), *found, strict=True):
        error = float((ours.double() - truth).norm() / truth.norm())
        if not error < 0.01:
            problems.append(f"{name} error {error:.3f} in regime {regime}")
    return problems


def each_row_to_itself(
    stabilizer: str = "projected", backward: str = "own", limit: float = 0.01
) -> list[str]:
    """P is 1 to seven digits, dK of the size of delta's last bit: FP32 attention loses it."""
    from exactness import distance, drawn, gradients, sdpa

    q, _, v, dout = drawn((1, 2, 128, 64))
    q = 2.125 * q.sign()
    leaves = [x.double().requires_grad_() for x in (q, q, v)]
    truth = torch.autograd.grad(sdpa(*leaves, is_causal=True), leaves, dout.double())
    options = {"layout": "bhsd", "causal": True, "stabilizer": stabilizer, "backward": backward}
    found = gradients((q, q, v, dout), **options)
    errors = (distance(x, y) for x, y in zip(found, truth, strict=True))
    pairs = zip(("dQ", "dK", "dV"), errors, strict=True)
    return [f"{name} error {error:.4f}" for name, error in pairs if not error < limit]


def in_two_parts(stabilizer: str) -> list[str]:
    """With sinks and a gradient of LSE: P and its sink sum to 1, whatever O was divided by."""
    from exactness import distance, drawn, gradients
    from oracle import oracle_attention

    q, k, v, dout = drawn((1, 2, 96, 64))
    given = (q, k, v, torch.tensor([0.5, 3.0], device=DEVICE))
    how = {"layout": "bhsd", "causal": True, "stabilizer": stabilizer, "return_lse": True}
    found = gradients((*given, dout), **how)
    leaves = [x.double().requires_grad_() for x in given]
    told = oracle_attention(*leaves[:3], sinks=leaves[3], layout="bhsd", causal=True)
    ends = dout.double(), torch.ones_like(told.lse)
    truth = torch.autograd.grad((told.out, told.lse), leaves, ends)
    problems = []
    for name, x, y in zip(("dQ", "dK", "dV", "dSink"), found, truth, strict=True):
        limit = 2e-6 if name == "dSink" else 1.3 * distance(y.to(x.dtype), y)
        if not distance(x, y) < limit:
            problems.append(f"{name} error {distance(x, y):.2e} in two parts, limit {limit:.2e}")
    return problems


def chunks_that_sum_to_zero(
    stabilizer: str = "compensated_projected", causal: bool = False
) -> list[str]:
    """dQ of equal sinks as exact as uncut: the sum and the largest key go from chunk to chunk."""
    from chunk_runs import run_chunked
    from regimes import make_regime

    case = Case(sq=96, sk=96, d=64, hq=2, hk=2, causal=causal, stabilizer=stabilizer)
    given = make_inputs(case)
    regime = (x.transpose(0, 1)[None].to(DEVICE) for x in make_regime("tie3", heads=2, n=96))
    given.q, given.k, given.v, given.dout = (x.contiguous() for x in regime)
    given.k, given.v = (x.roll(40, 1) for x in (given.k, given.v))
    truth = run_oracle(case, given, torch.float64).named()
    found = run_chunked(case, given, 4, "zigzag").named()
    errors = {x: found[x].double() - truth[x] for x in ("dq", "dk", "dv")}
    sizes = {x: float(e.norm() / truth[x].norm()) for x, e in errors.items()}
    return [f"{x} error {size:.3f} over chunks" for x, size in sizes.items() if not size < 0.01]


def large_logits(stabilizer: str, size: float = 1e6, d: int = 64, dv: int = 64) -> list[str]:
    """Every float32 score is exact here, and weights of four keys differ: P must be right.

    In log2 units the scale is a power of two: a GPU's multiply-add rounds the scaled score together
    with its shift, the interpreter before.
    """
    from oracle import gradients, oracle_attention

    from stable_attention import stable_attention

    gen = torch.Generator().manual_seed(0)
    n, scale = 64, math.log(2) / 8
    # Scores are integers of at most 23 bits: one large product, and small integers beside it.
    q, k = (torch.randint(-1, 2, (1, 1, n, d), generator=gen).float() for _ in range(2))
    root = 2.0 ** round(math.log2((size * 8) ** 0.5))
    q[..., 0], k[..., 0] = root, 0.0
    k[..., 5:9, 0] = root
    k[..., 5:9, 1:] *= torch.rand(d - 1, generator=gen) < 0.5
    v, dout = (torch.randn(1, 1, n, dv, generator=gen) for _ in range(2))
    tensors = [x.to(DEVICE).bfloat16() for x in (q, k, v)]
    dout = dout.to(DEVICE).bfloat16()
    leaves = [x.requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    ours = gradients(
        (stable_attention(*leaves, layout="bhsd", scale=scale, stabilizer=stabilizer),),
        leaves,
        (dout,),
    )
    truth = oracle_attention(*exact, layout="bhsd", scale=scale, compute=torch.float64).out
    problems = []
    pairs = zip(ours, gradients((truth,), exact, (dout.double(),)), strict=True)
    for name, (mine, want) in zip(("dQ", "dK", "dV"), pairs, strict=True):
        # dQ and dK along the large feature: a difference of nearly equal numbers, times 1e3.
        mine, want = (x.double()[..., 1:] if name != "dV" else x.double() for x in (mine, want))
        error = float((mine - want).norm() / want.norm())
        if not error < 4e-3:
            problems.append(f"{name} error {error:.4f} at logits of {size:g}")
    return problems


def own_shift(stabilizer: str = "compensated", path: str = "") -> list[str]:
    """O is closer than with one running maximum: every tile has a P of exactly 1."""
    case = Case(sq=64, sk=512, d=32, hq=1, hk=1, stabilizer=stabilizer, path=path, seed=3)
    given = make_inputs(case)
    truth = run_oracle(case, given, torch.float64).out
    specified = run_specified(case, given)
    assert specified is not None
    ours = run_ours(case, given, return_lse=False).out
    error, one_maximum = (
        float((x.double() - truth.double()).pow(2).mean().sqrt()) for x in (ours, specified.out)
    )
    if error > 0.95 * one_maximum:
        return [f"RMS error of O {error:.3e}, {one_maximum:.3e} with one maximum"]
    return []


def sinks_without_keys() -> list[str]:
    """LSE of a row without keys is its sink, not NaN; a sink of 100 does not overflow (FA 2752)."""
    given = make_inputs(case := Case(sq=12, sk=4, causal=1, sinks="learned", dlse=1))
    given.sinks = torch.tensor([100.0, -100.0], device=DEVICE)
    ours = run_ours(case, given)
    problems = [
        f"{name} is not finite"
        for name, x in ours.named().items()
        if name != "max_logits" and not bool(torch.isfinite(x).all())
    ]
    for head, rows, want in ((0, 12, 100.0), (1, 8, -100.0)):
        error = float((ours.lse[0, head, :rows] - want).abs().max())
        if not error < 1e-4:
            problems.append(f"LSE of sink {want} is off by {error}")
    return problems + (["O of rows without keys is not 0"] if ours.out[:, :8].any() else [])


def window_bounds() -> list[str]:
    """Each query sees exactly left + 1 + right keys where the sequence has them (TE 1197)."""
    from stable_attention import stable_attention

    n = 21
    q = torch.zeros(1, n, 1, 32, dtype=torch.bfloat16, device=DEVICE)
    v = torch.zeros_like(q)
    v[0, :, 0, :n] = torch.eye(n)
    problems = []
    for left, right, causal in ((3, 2, False), (0, 0, False), (4, 9, True), (-1, 1, False)):
        out = stable_attention(q, q, v, window=(left, right), causal=causal)[0, :, 0, :n]
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        seen = (j <= i + (0 if causal else right)) & ((j >= i - left) if left >= 0 else True)
        if not torch.equal((out > 0).cpu(), seen):
            problems.append(f"window {(left, right)} causal {causal} shows other keys")
    return problems


def on_sm90(check: Callable[..., list[str]], *arguments: object) -> list[str]:
    with on_hopper():
        return check("compensated_projected", *arguments)


PROPERTIES: dict[str, Callable[[], list[str]]] = {
    "values of one": values_of_one,
    "values of one, fp16": lambda: values_of_one(torch.float16),
    "values of one, early": lambda: values_of_one(path="early"),
    "values of one, int8": lambda: values_of_one(o_lo="int8"),
    "low-order part, bf16": lambda: low_order_part("bf16"),
    "low-order part, int8": lambda: low_order_part("int8"),
    "saturated sink": saturated_sink,
    "saturated sink, int8": lambda: saturated_sink(o_lo="int8"),
    "equal sinks": equal_sinks,
    "sinks without keys": sinks_without_keys,
    "a shift of its own": own_shift,
    "a shift of its own, plain numerics": lambda: own_shift("none"),
    "a shift of its own, segments": lambda: own_shift(path="segments"),
    "window bounds": window_bounds,
    "projected, equal sinks": lambda: rows_that_sum_to_zero("projected", "tie3"),
    "projected, saturated sink": lambda: rows_that_sum_to_zero("projected", "one"),
    "projected, each row to itself": each_row_to_itself,
    "two parts, projected": lambda: in_two_parts("projected"),
    "two parts, projected along a key": lambda: in_two_parts("compensated_projected"),
    "projected along a key, chunks": chunks_that_sum_to_zero,
    "projected along a key": lambda: rows_that_sum_to_zero("compensated_projected", "tie3"),
    "large logits, projected": lambda: large_logits("projected"),
    "large logits, projected along a key": lambda: large_logits("compensated_projected"),
    "sm_90, projected": lambda: on_sm90(rows_that_sum_to_zero, "tie3"),
    "sm_90, saturated": lambda: on_sm90(rows_that_sum_to_zero, "one"),
    "sm_90, large logits": lambda: on_sm90(large_logits),
    "sm_90, sinks": problems,
    "sm_90, chunks": lambda: on_sm90(chunks_that_sum_to_zero),
    "sm_90, causal chunks": lambda: on_sm90(chunks_that_sum_to_zero, True),
}


def run_member(name: str) -> list[str]:
    """Problems of one member: a property by name, otherwise a case line of FEATURES or FAULTS."""
    if name in PROPERTIES:
        return PROPERTIES[name]()
    if name in INT8:
        return INT8[name]()
    return check_case(Case.parse(FAULTS.get(name, name))).problems


MEMBERS = (*FEATURES, *FAULTS, *PROPERTIES, *INT8)
