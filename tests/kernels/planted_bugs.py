"""Deliberate bugs in the shipped kernels, each of which the suite must catch (see planting.py).

The control run must pass one member of each kind; that the kernels pass them all is the suite
itself.

    PYTHONPATH=kernels python tests/kernels/planted_bugs.py [--jobs 2] [--only NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from planting import Bug, run_all

HERE = Path(__file__).resolve().parent
FORWARD, BACKWARD = "triton/forward.py", "triton/backward.py"
MEMORY, PARTS = "triton/memory.py", "triton/parts.py"
NUMERICS, GEOMETRY, PREPROCESS = "numerics.py", "triton/geometry.py", "triton/preprocess.py"
PROJECTION, HOPPER_ROWS = "triton/projection.py", "hopper/rows.py"
INT8_FORWARD, INT8_BACKWARD = "int8/forward.py", "int8/backward.py"
INT8_CODES = "int8/quantise.py"
PHILOX, DESCRIPTORS = "philox.py", "triton/descriptors.py"
CAUSAL = "sq=45 sk=70 causal=1 layout=sbhd b=2"
FULL = "b=2 sq=70 sk=45 hq=2 hk=1 layout=bshd"
MQA = "sq=65 sk=65 causal=1 hq=4 hk=1 dtype=fp16"
LEFT = "sq=40 sk=90 causal=1 left=33 hq=4 memory=strided"
BAND = "sq=90 sk=40 left=11 right=5"
WIDE_BAND = "sq=70 sk=70 left=35 right=40 hq=1 hk=1"
PLAIN, SEGMENTS, LATE, EARLY = (
    f"sq=33 sk=200 hq=1 hk=1 path={path}" for path in ("plain", "segments", "late", "early")
)
EARLY_SPLIT = "sq=33 sk=130 d=192 dv=192 dtype=fp16 hq=1 hk=1 causal=1 path=early"
EARLY_LATE = "sq=40 sk=170 causal=1 dropout=0.2 sinks=learned path=early-late"
REVERSE = "layout=thd lens_q=0,5,40 lens_k=4,0,130 causal=1 path=reverse"
TMA = "layout=sbhd sq=45 sk=70 b=2 hq=2 causal=1 sinks=learned d=40 dv=24 path=tma"
TMA_PACKED = "layout=thd lens_q=0,5,33,1,20 lens_k=4,0,33,1,40 hq=4 hk=2 left=9 unused=3 path=tma"
LATE_DROPOUT = "sq=40 sk=170 causal=1 dropout=0.2 softcap=3 sinks=learned path=late"
SINKS = "sq=64 sk=64 causal=1 sinks=learned dlse=1"
SOFTCAP = "sq=34 sk=66 softcap=3 causal=1"
DROPOUT = "sq=34 sk=34 dropout=0.3 b=2 hq=2 hk=1"
ODD_DIMS = "sq=50 sk=50 right=3 d=40 dv=24"
PACKED = "layout=thd lens_q=20,1,40 lens_k=33,33,2 hq=2 hk=1 o_lo=int8"
GAPS = "layout=thd lens_q=9,37 lens_k=9,37 gaps=4 left=3 dropout=0.2 memory=fused"
SPLIT = "sq=45 sk=70 causal=1 d=96 hq=2 hk=1"
SPLIT_LATE = "sq=33 sk=130 d=80 dtype=fp16 hq=1 hk=1 path=late"
SPLIT_SEGMENTS = "sq=33 sk=130 d=96 hq=1 hk=1 path=segments"
SPLIT_WIDE = "d=192 sq=33 sk=40 hq=1 hk=1 path=late"
SPLIT_SINK = "sq=34 sk=40 d=64 dv=96 sinks=learned dropout=0.2 o_lo=int8 hq=2 hk=1"
TMA_FLAT = "layout=bhsd sq=45 sk=70 b=2 hq=4 hk=2 causal=1 d=96 dv=64 memory=fused path=tma"
TMA_FLAT_PACKED = (
    "layout=thd lens_q=9,37 lens_k=9,37 gaps=4 left=3 hq=4 hk=2 d=64 dv=96 memory=fused path=tma"
)
SPLIT_TMA = "layout=thd lens_q=9,37 lens_k=9,37 causal=1 d=72 dv=160 path=tma"
SPLIT_NARROW = "sq=20 sk=36 left=13 d=136 dv=72 memory=strided"
MLA = "sq=20 sk=40 causal=1 d=192 dv=128"
GROUPED = "ffpa-301 grouped dK and dV accumulate in float32"
TALL = "sq=33 sk=130 d=32 hq=1 hk=1 values=tall"
SINK_SUM = "sq=64 sk=64 causal=1 sinks=learned hq=4 dlse=1 stabilizer=compensated_projected"
ALONG_KEY, ALONG_MEAN = "projected along a key", "projected, equal sinks"
IN_CHUNKS = "projected along a key, chunks"
TWO_PARTS = "two parts, projected along a key"
EMPTY_ROWS = "pytorch-109517 fully masked rows poison the gradients"
BELOW = "FA-1947 P of masked positions not zeroed"

BUGS = (
    # --- the numerics this library exists for
    Bug("delta rounded to bf16", NUMERICS, "return tl.sum(do.to(tl.float32) * o, 1)",
        "return tl.sum(do.to(tl.float32) * o, 1).to(tl.bfloat16).to(tl.float32)", "saturated sink"),
    Bug("delta ignores the low-order part", PREPROCESS, "o += residual_decode(low, hi)",
        "o += 0.0 * residual_decode(low, hi)", "saturated sink"),
    Bug("O divided by the float32 sum", FORWARD,
        "l_rounded = tl.max(l_acc, 1) if ROUNDED else l", "l_rounded = l",
        "values of one"),
    Bug("LSE from the rounded sum", FORWARD, "log_sum_exp(m, l), mask=row_ok",
        "log_sum_exp(m, l_rounded), mask=row_ok", CAUSAL),
    Bug("low-order part with the wrong sign", NUMERICS, "low = o - wide\n",
        "low = wide - o\n", "low-order part, bf16"),
    Bug("int8 codes truncated", NUMERICS, "low * (127.0 * inverse) + 12582912.0",
        "tl.floor(low * (127.0 * inverse)) + 12582912.0", "low-order part, int8"),
    Bug("int8 codes decoded with a whole ulp", NUMERICS, "(half * (1.0 / 127.0))",
        "(half * (2.0 / 127.0))", "saturated sink, int8"),
    Bug("scores rounded to bf16", NUMERICS, "    if PAPER:\n        s = s.to(tl.bfloat16)",
        "    if True:\n        s = s.to(tl.bfloat16)", CAUSAL),
    Bug("accumulator rounded to bf16", NUMERICS, "acc = tl.dot(p, v, acc * alpha[:, None])",
        "acc = tl.dot(p, v, acc * alpha[:, None]).to(tl.bfloat16).to(tl.float32)", CAUSAL),
    Bug("1.6 % output bias", FORWARD, "inverse(l_rounded) * keep_scale)",
        "inverse(l_rounded) * keep_scale * 1.016)", FULL),
    Bug("l rounded to bf16", NUMERICS, "total = total * over_lanes(alpha) + tl.sum(lanes, 1)",
        "total = (total * over_lanes(alpha) + tl.sum(lanes, 1)).to(tl.bfloat16).to(tl.float32)",
        FULL),
    # --- online softmax
    Bug("l not rescaled", NUMERICS, "total * over_lanes(alpha) + tl.sum(lanes, 1)",
        "total + tl.sum(lanes, 1)", FULL),
    Bug("low-order part of the unrounded O", NUMERICS, "return rounded, widen(rounded)",
        "return rounded, p", "low-order part, bf16"),
    Bug("l of one lane", FORWARD, "l = tl.sum(l, 1)", "l = tl.max(l, 1)", FULL),
    Bug("O not rescaled where sums are early", PARTS, "return (pinned(acc[0]),)",
        "return (pinned(acc[0] / alpha[:, None]),)", EARLY),
    Bug("second part of O not rescaled where sums are early", PARTS,
        "return (pinned(acc[0]), pinned(acc[1]))",
        "return (pinned(acc[0]), pinned(acc[1] / alpha[:, None]))", EARLY_SPLIT),
    Bug("early l_rounded left out", FORWARD,
        "l_acc = pinned(accumulate(l_acc, alpha, p, ones, False))", "pass", EARLY),
    Bug("early l_rounded sums the dropped P", FORWARD,
        "pinned(tl.dot(p, ones))", "pinned(tl.dot(weights, ones))", EARLY_LATE),
    Bug("queries' descriptor of the first head", FORWARD, "q_ptr, q_tail, of_q,",
        "q_ptr, q_tail, bundles.Head(b, h * 0, start_q, sq),", TMA),
    Bug("O not rescaled", NUMERICS, "acc = tl.dot(p, v, acc * alpha[:, None])",
        "acc = tl.dot(p, v, acc)", PLAIN),
    Bug("segments not rescaled", NUMERICS, "total * tl.exp2(m_before - m)[:, None] + part",
        "total + part", SEGMENTS),
    Bug("first segment overwritten", FORWARD, "acc = add_segment_parts(acc, part, m_before, m)",
        "acc = part", SEGMENTS),
    Bug("O not rescaled when a tile joins late", NUMERICS, "total * alpha[:, None] + part",
        "total + part", LATE),
    Bug("l_rounded not rescaled when a tile joins late", NUMERICS,
        "total * over_lanes(alpha) + one_a_lane(part)", "total + one_a_lane(part)", LATE),
    Bug("last tile's product left out", FORWARD, "        acc = add_late_parts(acc, part, alpha)\n"
        "        l_acc = add_late", "        l_acc = add_late", LATE),
    Bug("last tile's sum left out", FORWARD, "        l_acc = add_late_sum(l_acc, l_part, alpha)\n"
        "    elif", "        pass\n    elif", LATE),
    Bug("first tile from the end skipped", FORWARD, "n = end - BN - t * BN",
        "n = end - 2 * BN - t * BN", REVERSE),
    Bug("edge at the end not masked in the one loop", FORWARD,
        "(n < full_lo) | (n >= full_hi), n", "(n < full_lo), n", TMA),
    Bug("edge at the start not masked in the one loop", FORWARD,
        "(n < full_lo) | (n >= full_hi), n", "(n >= full_hi), n", TMA_PACKED),
    Bug("late l sums the dropped P", FORWARD, "        l_part = tl.dot(p, ones)",
        "        l_part = tl.dot(weights, ones)", LATE_DROPOUT),
    Bug("running maximum forgotten", NUMERICS, "new_top = tl.maximum(top, r)", "new_top = r", TALL),
    Bug("one running maximum for all tiles", NUMERICS,
        "return tl.maximum(r, top - OWN_SHIFT_BOUND), new_top", "return new_top, new_top",
        "a shift of its own"),
    Bug("shift falls without bound", NUMERICS, "return tl.maximum(r, top - OWN_SHIFT_BOUND)",
        "return r", TALL),
    Bug("rows without keys divide by zero", NUMERICS,
        "return tl.where(l > 0, 1.0 / tl.where(l > 0, l, 1.0), 0.0)", "return 1.0 / l", EMPTY_ROWS),
    Bug("empty row's maximum subtracted", NUMERICS,
        'tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new', "m_new", EMPTY_ROWS),
    Bug("maximum logit in log2 units", FORWARD, "tl.max(seen, 0) * LN2", "tl.max(seen, 0)", FULL),
    Bug("maximum logit stored by key head", FORWARD, "tl.atomic_max(max_ptr + h,",
        "tl.atomic_max(max_ptr + h // GROUP,", FULL),
    # --- masks and tile ranges
    Bug("left window exclusive", GEOMETRY, "(cols >= rows + (shift - left))",
        "(cols > rows + (shift - left))", "window bounds"),
    Bug("left window one too wide", GEOMETRY, "(cols >= rows + (shift - left))",
        "(cols >= rows + (shift - left - 1))", BAND),
    Bug("right window exclusive", GEOMETRY, "tl.minimum(rows + (shift + right), last)",
        "tl.minimum(rows + (shift + right - 1), last)", "window bounds"),
    Bug("right window of dK, dV exclusive", GEOMETRY, "first = cols - (shift + right)",
        "first = cols - (shift + right) + 1", CAUSAL),
    Bug("left window of dK, dV one too wide", GEOMETRY, "(rows <= cols - (shift - left))",
        "(rows <= cols - (shift - left) + 1)", BAND),
    Bug("causal mask aligned top-left", GEOMETRY, "    shift = sk - sq\n    if CHUNKED",
        "    shift = 0\n    if CHUNKED", CAUSAL),
    Bug("keys past the end visible", GEOMETRY, "last = sk - 1", "last = sk", PACKED),
    Bug("last visible key tile skipped", GEOMETRY,
        "hi = tl.minimum(hi, last + shift + right + 1)",
        "hi = tl.minimum(hi, last + shift + right)", MQA),
    Bug("diagonal tile not masked", GEOMETRY,
        "full_hi = tl.minimum(full_hi, m0 + shift + right + 1)",
        "full_hi = tl.minimum(full_hi, m0 + shift + right + BN)", CAUSAL),
    Bug("first visible query tile skipped", GEOMETRY,
        "lo = tl.maximum(lo, n0 - shift - right)",
        "lo = tl.maximum(lo, n0 - shift - right + BM)", CAUSAL),
    Bug("last visible query tile skipped", GEOMETRY,
        "hi = tl.minimum(hi, last - shift + left + 1)",
        "hi = tl.minimum(hi, last - shift + left + 1 - BM)", BAND),
    Bug("edge tiles after the band visited wrongly", GEOMETRY,
        "full_hi + (t - before) * STEP", "full_lo + (t - before) * STEP", WIDE_BAND),
    Bug("masked P not zeroed in dK, dV", BACKWARD, "p = tl.where(ok, p, 0.0)",
        "p = tl.where(ok, p, p)", CAUSAL, occurrence=0, total=2),
    Bug("masked P not zeroed in dQ", BACKWARD, "p = tl.where(ok, p, 0.0)",
        "p = tl.where(ok, p, p)", BELOW, occurrence=1, total=2),
    # --- grouped heads
    Bug("forward head map interleaved", FORWARD, "hk = h // GROUP",
        "hk = h % (heads // GROUP)", LEFT),
    Bug("dQ head map interleaved", BACKWARD, "    hk = h // GROUP", "    hk = h % (heads // GROUP)",
        LEFT),
    Bug("dK head map interleaved", BACKWARD, "h = hk * GROUP + g", "h = hk + g * (heads // GROUP)",
        LEFT),
    Bug("grouped dK, dV accumulated in bf16", BACKWARD,
        "        h64 = h.to(tl.int64)\n        of_q",
        "        dk = (dk[0].to(tl.bfloat16).to(tl.float32),)\n"
        "        dv = (dv[0].to(tl.bfloat16).to(tl.float32),)\n"
        "        h64 = h.to(tl.int64)\n        of_q", GROUPED),
    Bug("only the first head of a group counted", BACKWARD, "for g in range(0, GROUP):",
        "for g in range(0, 1):", MQA),
    # --- gradients
    Bug("dQ scaled twice", BACKWARD, "dq, scale, m0", "dq, scale * scale, m0", FULL),
    Bug("dK not scaled", BACKWARD, "dk, scale, n0", "dk, 1.0, n0", FULL),
    Bug("dQ accumulated in bf16", BACKWARD,
        "dq = add_rest(ds, ds_rounded, k, add_dot_parts(ds_rounded, k, dq), T.SPLIT)",
        "dq = (add_dot_parts(ds_rounded, k, dq)[0].to(tl.bfloat16).to(tl.float32),)", PLAIN),
    Bug("dLSE with the wrong sign", PREPROCESS, "delta -= tl.load(dlse_ptr",
        "delta += tl.load(dlse_ptr", SINKS),
    Bug("softcap's slope forgotten", NUMERICS, "ds = ds * (1.0 - s * s)", "ds = ds * 1.0", SOFTCAP),
    # --- sinks
    Bug("sink gradient missing", PREPROCESS, "-tl.sum(p_sink * delta, 0)",
        "-0.0 * tl.sum(p_sink * delta, 0)", SINKS),
    Bug("sink gradient without dLSE", PREPROCESS, "-tl.sum(p_sink * delta, 0)",
        "-tl.sum(p_sink * row_delta(do, o), 0)", SINKS),
    Bug("sink missing from the running maximum", NUMERICS, "m_new = tl.maximum(m, sink2)",
        "m_new = m", "sinks without keys"),
    Bug("sink missing from LSE", NUMERICS, "m_new, l * alpha + weight,", "m_new, l * alpha,",
        SINKS),
    # --- dropout
    Bug("dropped dP not rescaled in dQ", BACKWARD, "dp = tl.where(keep, dp * drop.keep_scale, 0.0)",
        "dp = tl.where(keep, dp, 0.0)", DROPOUT, occurrence=1, total=2),
    Bug("dV not rescaled", BACKWARD, "dv, keep_scale, n0", "dv, 1.0, n0", DROPOUT),
    Bug("backward's mask transposed", BACKWARD, "drop.q_pos + m0, drop.k_pos + mask.first",
        "drop.q_pos + mask.first, drop.k_pos + m0", DROPOUT),
    Bug("same mask for the whole batch", PHILOX,
        "zero + head.to(tl.uint32), zero + batch.to(tl.uint32)\n",
        "zero + head.to(tl.uint32), zero\n", DROPOUT),
    Bug("l sums the dropped P", FORWARD, "accumulate(l_acc, alpha, p, ones, False)",
        "accumulate(l_acc, alpha, weights, ones, False)", DROPOUT, occurrence=1, total=2),
    # --- memory
    Bug("packed LSE read without the sequence's start", BACKWARD,
        "row = b64 * stride_lb + h64 * stride_lh + start_q",
        "row = b64 * stride_lb + h64 * stride_lh", PACKED, occurrence=0, total=2),
    Bug("gaps between sequences ignored", GEOMETRY, "tl.load(starts + b)", "begin", GAPS),
    Bug("sequence one token too long", GEOMETRY, "n = tl.load(cu + b + 1) - begin",
        "n = tl.load(cu + b + 1) - begin + 1", PACKED),
    Bug("columns past the head dim written", MEMORY,
        "(tl.arange(0, C) < WIDTH)[None, :]\n        tl.store",
        "(tl.arange(0, C) < C)[None, :]\n        tl.store", ODD_DIMS),
    Bug("last rows of O not written", FORWARD, "row_ok = rows < sq", "row_ok = rows < sq - 1",
        FULL),
    # --- head dims of two parts
    Bug("second part missing from S of the forward", FORWARD, "return dot_over_parts(q, k)",
        "return tl.dot(q[0], tl.trans(k[0]))", SPLIT_LATE),
    Bug("second part missing from masked S of the forward", FORWARD,
        "s = _scores(q, k, n, mask.length, MASKED, T)",
        "s = _scores((q[0],), k, n, mask.length, MASKED, T)", SPLIT),
    Bug("second part missing from S of dK, dV", BACKWARD, "s = dot_over_parts(k, q)",
        "s = tl.dot(k[0], tl.trans(q[0]))", SPLIT),
    Bug("second part missing from S of dQ", BACKWARD, "s = dot_over_parts(q, k)",
        "s = tl.dot(q[0], tl.trans(k[0]))", MLA),
    Bug("second part missing from dP of dK", BACKWARD, "dp = dot_over_parts(v, do)",
        "dp = tl.dot(v[0], tl.trans(do[0]))", SPLIT_SINK),
    Bug("second part missing from dP of dQ", BACKWARD, "dp = dot_over_parts(do, v)",
        "dp = tl.dot(do[0], tl.trans(v[0]))", SPLIT_SINK),
    Bug("second part of dK not summed", BACKWARD, "dk = add_dot_parts(ds_rounded, q, dk)",
        "dk = (tl.dot(ds_rounded, q[0], dk[0]), dk[1])", MLA),
    Bug("second part of dV not summed", BACKWARD, "dv = add_dot_parts(p_rounded, do, dv)",
        "dv = (tl.dot(p_rounded, do[0], dv[0]), dv[1])", SPLIT),
    Bug("second part of dQ not summed", BACKWARD,
        "dq = add_rest(ds, ds_rounded, k, add_dot_parts(ds_rounded, k, dq), T.SPLIT)",
        "dq = (tl.dot(ds_rounded, k[0], dq[0]), dq[1])", MLA),
    Bug("second part of O not summed", PARTS, "accumulate(acc[1], alpha, p, v[1], PAPER),",
        "acc[1] * alpha[:, None],", SPLIT),
    Bug("second part of O overwritten by each late tile", PARTS,
        "return (add_late(total[0], part[0], alpha), add_late(total[1], part[1], alpha))",
        "return (add_late(total[0], part[0], alpha), part[1])", SPLIT_LATE),
    Bug("second part of O not rescaled between segments", PARTS,
        "add_segment(total[1], part[1], m_before, m),", "total[1] + part[1],", SPLIT_SEGMENTS),
    Bug("second part of O not normalized", PARTS,
        "(x[0] * factor[:, None], x[1] * factor[:, None])", "(x[0] * factor[:, None], x[1])",
        SPLIT),
    Bug("second part's late product left out", PARTS,
        "return (tl.dot(p, v[0]), tl.dot(p, v[1]))",
        "return (tl.dot(p, v[0]), tl.dot(p, v[1]) * 0.0)", SPLIT_WIDE),
    Bug("second part of O stored at the wrong column", FORWARD, "DV - C1, HAS_LOW, TMA, C1",
        "DV - C1, HAS_LOW, TMA, C1 // 2", SPLIT),
    Bug("second part of O stored over the first", FORWARD, "DV - C1, HAS_LOW, TMA, C1",
        "DV - C1, HAS_LOW, TMA, 0", SPLIT_SINK),
    Bug("second part of a gradient stored over the first", BACKWARD, "WIDTH - C1, ADD, TMA, C1",
        "WIDTH - C1, ADD, TMA, 0", SPLIT),
    Bug("second part of a gradient not scaled", BACKWARD, "grad[1] * scale, row0",
        "grad[1], row0", SPLIT),
    Bug("gradient columns past d written", BACKWARD, "R, C - C1, WIDTH - C1, ADD",
        "R, C - C1, C - C1, ADD", SPLIT_NARROW),
    Bug("columns of O past d_v written in the second part", FORWARD, "REST, DV - C1",
        "REST, REST", SPLIT_NARROW),
    Bug("second part read past the head dim", PARTS, "R, C - C1, WIDTH - C1, RAGGED, TMA, C1",
        "R, C - C1, C - C1, RAGGED, TMA, C1", SPLIT_NARROW),
    Bug("second part read from column 0", MEMORY, "* stride + COLUMN + offsets",
        "* stride + offsets", SPLIT),
    Bug("second part's descriptor read from column 0", MEMORY, "ptr[1], row0, COLUMN], 1)",
        "ptr[1], row0, 0], 1)", SPLIT_TMA),
    Bug("second part read through the first's descriptor", PARTS, "source(tail, head",
        "source(ptr, head", SPLIT_TMA),
    # --- descriptors
    Bug("descriptor of the first batch entry", MEMORY, "[ptr[4], ptr[1], row0, COLUMN]), [R, C])",
        "[0, ptr[1], row0, COLUMN]), [R, C])", TMA),
    Bug("descriptor of the first head", MEMORY, "[ptr[4], ptr[1], row0, COLUMN]), [R, C])",
        "[ptr[4], 0, row0, COLUMN]), [R, C])", TMA),
    Bug("output written through the descriptor of the first head", MEMORY,
        "[ptr[4], ptr[1], row0, COLUMN], tl", "[ptr[4], 0, row0, COLUMN], tl", TMA),
    Bug("packed descriptor without the sequence's start", MEMORY,
        "load_ragged(ptr[0], ptr[2], ptr[3], [ptr[1]", "load_ragged(ptr[0], 0, ptr[3], [ptr[1]",
        SPLIT_TMA),
    Bug("packed descriptor reads into the next sequence", MEMORY,
        "load_ragged(ptr[0], ptr[2], ptr[3], [ptr[1]",
        "load_ragged(ptr[0], ptr[2], ptr[3] + 8, [ptr[1]", SPLIT_TMA),
    Bug("packed output written into the next sequence", MEMORY,
        "to_ragged_indices(ptr[2], ptr[3], row0)\n        ptr[0].store([far, end, ptr[1]",
        "to_ragged_indices(ptr[2], ptr[3] + 8, row0)\n        ptr[0].store([far, end, ptr[1]",
        SPLIT_TMA),
    Bug("flat descriptor without the batch's offset", MEMORY, "(b * stride_b + h * stride_h)",
        "(h * stride_h)", TMA_FLAT),
    Bug("flat descriptor without the head's offset", MEMORY, "(b * stride_b + h * stride_h)",
        "(b * stride_b)", TMA_FLAT),
    Bug("flat packed output at the first head", MEMORY, "row, ptr[1] + COLUMN], tl",
        "row, COLUMN], tl", TMA_FLAT_PACKED),
    Bug("flat columns of a padded head dim", DESCRIPTORS, "if d == tile_width(d) and",
        "if", TMA),
    Bug("descriptor with the strides of heads and tokens exchanged", DESCRIPTORS,
        "steps = [step_b, step_h, step_s, 1]", "steps = [step_b, step_s, step_h, 1]", TMA),
    Bug("second part read from the wrong column", PARTS, "WIDTH - C1, RAGGED, TMA, C1",
        "WIDTH - C1, RAGGED, TMA, C1 // 2", SPLIT_TMA),
    # --- rows of dS that sum to what they should
    Bug("row sums of dS to zero in spite of a sink", PREPROCESS, "target += p_sink * delta",
        "target += 0.0", SINK_SUM),
    Bug("row sums of dS to zero in spite of dLSE", PREPROCESS,
        "target += tl.load(dlse_ptr + row + rows, mask=ok, other=0.0)", "target += 0.0", SINK_SUM),
    Bug("row sum of the unrounded dS", BACKWARD, "projection.follow(state, ds, ds_rounded, p",
        "projection.follow(state, ds, ds, p", ALONG_KEY),
    Bug("row sum of P dP alone", BACKWARD, "projection.follow(state, ds, ds_rounded, p",
        "projection.follow(state, ds, (p * dp).to(ds_rounded.dtype), p", ALONG_KEY),
    Bug("largest key of another group", BACKWARD,
        "row_ok,\n            source(key_ptr, of_k",
        "row_ok,\n            source(key_ptr, bundles.Head(b, h * 0, start_k, sk)", ALONG_KEY),
    Bug("largest key without its tile", NUMERICS, "tl.where(new > rank, n, tile)",
        "tl.where(new > rank, 0, tile)", ALONG_KEY),
    Bug("largest key of the last tile", NUMERICS,
        "tl.maximum(rank, new), tl.where(new > rank, n, tile)", "new, tile * 0 + n", ALONG_KEY),
    Bug("row sum of the last tile alone", PROJECTION, "(tl.dot(rounded, ones, state[0]),)",
        "(tl.dot(rounded, ones),)", ALONG_KEY),
    Bug("row sum of the last chunk alone", PROJECTION,
        "tl.load(excess_ptr + rows, mask=row_ok, other=0.0) + tl", "tl", IN_CHUNKS),
    Bug("largest key of the last chunk", PROJECTION, "found &= row_ok & (top >",
        "found &= row_ok & (top > 0.0 *", IN_CHUNKS),
    Bug("P K not divided by its weights", PROJECTION, "weight / tl.where(whole > 0, whole, 1.0)",
        "weight", ALONG_MEAN),
    Bug("dK from the delta of a 16-bit O", PROJECTION, "corrected = delta + excess",
        "excess *= 0.0\n    corrected = delta + excess", "projected, saturated sink"),
    Bug("dK from the first part of delta", PROJECTION, "+ (excess - back), mask",
        "* 0.0, mask", "projected, each row to itself"),
    Bug("two parts: dQ of P that does not sum to 1", PROJECTION, "weight /= total",
        "weight /= 1.0", TWO_PARTS),
    Bug("two parts: sum of P without its sink", PROJECTION, "total += p_sink",
        "total += 0.0 * p_sink", TWO_PARTS),
    Bug("two parts: target with another sink's P", PROJECTION, "(p_sink / total - p_sink) * delta",
        "0.0 * delta", TWO_PARTS),
    Bug("two parts: gradient of another sink's P", PROJECTION, "p_sink / total, mask",
        "p_sink, mask", TWO_PARTS),
    Bug("dQ without the second plane of LSE", PROJECTION, "weight = tl.exp2(-rest)",
        "weight = tl.exp2(rest * 0.0)", "large logits, projected along a key"),
    Bug("dK, dV without the second plane of LSE", BACKWARD, "- rest[None, :])", "+ 0.0)",
        "large logits, projected"),
    Bug("second plane rounded away", NUMERICS, "lo = (base - (hi - back)) + (log - back)",
        "lo = log * 0.0", "large logits, projected"),
    Bug("sm_90: row sums to zero in spite of a sink", HOPPER_ROWS, "excess -= tl.load(target_ptr",
        "excess -= 0.0 * tl.load(target_ptr", "sm_90, sinks"),
    Bug("sm_90: key of another group", HOPPER_ROWS, "(h // group) * stride_kh", "0 * stride_kh",
        "sm_90, projected"),
    Bug("sm_90: dK with what delta lacks", HOPPER_ROWS, "NEARLY_ALL = tl.constexpr(15 / 16)",
        "NEARLY_ALL = tl.constexpr(2.0)", "sm_90, saturated"),
    Bug("sm_90: dK of another head", HOPPER_ROWS, "dk_ptr += b * stride_kb + h * stride_kh",
        "dk_ptr += b * stride_kb + 0 * stride_kh", "sm_90, saturated"),
    Bug("sm_90: a block of rows without its share of dK", HOPPER_ROWS, "for i in range(begin,",
        "for i in range(begin + STEP,", "sm_90, saturated"),
    Bug("sm_90: the largest dS has nearly all of P", HOPPER_ROWS, "if common < keys:",
        "if common < 0:", "sm_90, saturated"),
    Bug("sm_90: excess of the last chunk alone", HOPPER_ROWS, "mask=ok, other=0.0) + excess",
        "mask=ok, other=0.0) * 0 + excess", "sm_90, chunks"),
    Bug("sm_90: key of the last chunk", HOPPER_ROWS, "better = found & (p >",
        "better = found & (2 >", "sm_90, chunks"),
    Bug("sm_90: excess of a tile that saw no key", HOPPER_ROWS,
        "+ tile) > 0, excess, 0.0)", "+ tile) > -1, excess, 0.0)", "sm_90, causal chunks"),
    Bug("sm_90: one plane of LSE for large logits", HOPPER_ROWS, "tl.where(largest <= LARGEST",
        "tl.where(largest <= 1e30", "sm_90, large logits"),
    # --- INT8
    Bug("codes cut off, not rounded", INT8_CODES, "nearest(codes), m0", "codes.to(tl.int8), m0",
        "int8 causal"),
    Bug("mean of K over the buffer", INT8_CODES, "tl.div_rn(mean, n.to(tl.float32))",
        "tl.div_rn(mean, t.to(tl.float32))", "int8 packed"),
    Bug("P against the row's maximum so far", INT8_FORWARD, "top = tl.exp2(tile_max - base)",
        "top = tl.exp2(m_new - base)", "int8 full, paper"),
    Bug("O divided by the sum of P", INT8_FORWARD, "inverse(l_rounded if ROUNDED else l)",
        "inverse(l)", "int8 causal"),
    Bug("phantom keys in a tile's scale", INT8_BACKWARD,
        "        if not T.ROW:\n            # Keys",
        "        if T.ROW:\n            # Keys", "int8 window, tile scales"),
    Bug("scale of dS with an epsilon", INT8_BACKWARD,
        "inverse_of(_largest(ds, T.ROW) + queries.bad)",
        "inverse_of(_largest(ds, T.ROW) + queries.bad + 0.3)", "int8 causal"),
    Bug("dK without the mean of Q", INT8_BACKWARD, "* mu[None, :]\n    return dk, dv",
        "* 0.0\n    return dk, dv", "int8 smoothed Q"),
    Bug("rows of dS not projected", INT8_BACKWARD, "dq -= excess[:, None] * pk",
        "dq -= excess[:, None] * pk * 0.0", "int8 causal"),
    Bug("dK from the delta of O", INT8_BACKWARD, "delta + error, mask", "delta, mask",
        "int8 causal"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # Everything heavy is imported once, before the forks; the package itself only after them.
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import torch
    import torch.fx.experimental.symbolic_shapes  # with sympy: a second of every child's
    import triton
    import triton.experimental.gluon.language

    torch.set_num_threads(1)
    assert triton.__version__ and "stable_attention" not in sys.modules
    bugs = [bug for bug in BUGS if args.only in bug.name]
    started = time.monotonic()
    controls = {} if args.only else {"control": [CAUSAL, EMPTY_ROWS, "window bounds"]}
    verdicts = run_all(bugs, jobs=args.jobs, controls=controls)
    if args.json:
        args.json.write_text(json.dumps(verdicts, indent=1))
    missed = [b.name for b in bugs if not verdicts[b.name]["caught"]]
    false = [n for n, v in verdicts.items() if n == "control" and v["caught"]]
    print(
        f"{len(bugs) - len(missed)}/{len(bugs)} caught, {len(false)} false alarms, "
        f"{time.monotonic() - started:.0f} s"
    )
    return 1 if missed or false else 0


if __name__ == "__main__":
    sys.exit(main())
