"""Deliberate bugs in the Gluon kernels of sm_90, which run on such a GPU only.

Each makes wrong numbers, none changes how often a barrier is arrived at or waited for. A kernel
that does not compile, crashes or hangs shows nothing about the error rule: that counts as missed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from error_rule import Results
from planting import Bug

CONSUMER, SOFTMAX, TILES = "hopper/consumer.py", "hopper/softmax.py", "hopper/tiles.py"
PRODUCER, BACKWARD, ROWS = "hopper/producer.py", "hopper/backward.py", "hopper/rows.py"
EXCESS, PROJECTION = "hopper/excess.py", "hopper/projection.py"
KEY_GRADIENTS, QUERY_GRADIENT = "hopper/key_gradients.py", "hopper/query_gradient.py"

# Seed 1: a run without LSE too, as seeds divisible by 3 get, would compile each kernel twice.
MANY = "b=2 sq=600 sk=600 causal=1 hq=16 hk=8 d=128 seed=1"
"""More query tiles than processors, so that tiles follow each other in a program, and the two query
heads of a group in two parts."""
FULL = "sq=300 sk=300 d=64 seed=1"
BELOW = "sq=200 sk=200 d=64 values=below seed=1"
POSITIVE = "sq=200 sk=200 causal=1 d=64 values=positive seed=1"
"""delta is large beside dP - delta, so what is wrong with it shows in dQ."""
SINK = "sq=200 sk=200 causal=1 d=64 sinks=learned seed=1"
PACKED = "layout=thd lens_q=5,200,333 lens_k=40,200,333 causal=1 left=70 hq=4 d=64 seed=1"
SEGMENTS = "sq=64 sk=4500 hq=1 hk=1 d=128 seed=1"
SEGMENTS_AWAY = "sq=64 sk=4500 hq=1 hk=1 d=256 seed=1"
SUMMED = "sq=300 sk=300 causal=1 d=64 sinks=learned stabilizer=compensated_projected seed=1"
MLA = "sq=200 sk=200 causal=1 hq=2 hk=1 d=192 dv=128 seed=1"
WIDE = "sq=300 sk=300 causal=1 d=256 sinks=learned stabilizer=compensated_projected seed=1"

BUGS = (
    # --- forward
    Bug("causal mask shows a key too many", CONSUMER, "hidden_after(s, row - first_key, True)",
        "hidden_after(s, row - first_key + 1, True)", MANY),
    Bug("keys past the end not hidden", CONSUMER, "hidden_after(s, sk - 1 - first_key, False)",
        "hidden_after(s, sk - 1 - first_key + T.BN, False)", FULL),
    Bug("K and V of another group", PRODUCER, "hk = h // T.GROUP", "hk = h % T.GROUP", MANY),
    Bug("first scores of the next tile from the other slot of K", CONSUMER,
        "q_s, of_q * 2 + W, k_s, k, T.BN", "q_s, of_q * 2 + W, k_s, k ^ 1, T.BN", MANY),
    Bug("low-order part of the other half of a tile", SOFTMAX, "store_tile(low_desc, row, column",
        "store_tile(low_desc, row ^ 64, column", POSITIVE),
    Bug("O divided by the sum of the unrounded P", CONSUMER, "share = weight * (1.0 / l)",
        "share = weight * (1.0 / l_sum)", POSITIVE),
    Bug("LSE of the rounded sum", CONSUMER, "place, (row_shift + gl.log2(l_sum)) * LN2",
        "place, (row_shift + gl.log2(l)) * LN2", MANY),
    Bug("sink left out", CONSUMER, "taken = gl.exp2(sink - with_sink)",
        "taken = 0.0 * gl.exp2(sink - with_sink)", SINK),
    Bug("total in shared memory not rescaled", SOFTMAX,
        "gl.where(held, fetched(far_s, like), 0.0) * by_row",
        "gl.where(held, fetched(far_s, like), 0.0)", SEGMENTS),
    Bug("total in global memory not rescaled", SOFTMAX,
        "return y * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, like)), 1) + x",
        "return y + x", SEGMENTS_AWAY),
    Bug("window of a packed sequence a key too wide", TILES, "middle - left, sk - 1 - last * BN",
        "middle - left - 1, sk - 1 - last * BN", PACKED),
    # --- backward in one kernel
    Bug("delta left out", BACKWARD, "ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)",
        "ds = (p * dp).to(dtype)", FULL),
    Bug("dK without the scale", BACKWARD, "rounded = (dk * gradients.scale).to(out.dtype)",
        "rounded = dk.to(out.dtype)", FULL),
    Bug("dS in the other consumer's place", BACKWARD,
        "ds_s.index(slot).slice(W * 64, 64).store(ds)",
        "ds_s.index(slot).slice(64 - W * 64, 64).store(ds)", MANY),
    Bug("second addition to dQ skipped", BACKWARD, "elif turn > 0:  # not",
        "elif turn > 1:  # not", FULL),
    Bug("next tile's scores from this tile's queries", BACKWARD,
        "k, q_s.index(following).permute((1, 0))", "k, q_s.index(slot).permute((1, 0))", MANY),
    Bug("dV from dO of the other slot", BACKWARD, "mma(p_rounded, do_s.index(slot), dv",
        "mma(p_rounded, do_s.index(slot ^ 1), dv", FULL),
    Bug("P of keys past the end not zeroed", BACKWARD, "visible = keys < item.keys",
        "visible = keys < item.keys + T.BN", BELOW),
    Bug("inputs of the batch entry before", PRODUCER, "b = head // items.heads\n            part",
        "b = gl.maximum(head // items.heads - 1, 0)\n            part", MANY),
    Bug("second part of a group's dK and dV left out", ROWS, "tl.static_range(1, PARTS)",
        "tl.static_range(2, PARTS)", MANY),
    # --- rows of dS
    Bug("target of other rows", ROWS, "tl.load(target_ptr + place + row,",
        "tl.load(target_ptr + place + row // 2,", SUMMED),
    Bug("rows not summed", EXCESS, "sums.index(i).store(total)", "sums.index(i).store(total * 0.0)",
        SUMMED),
    Bug("sums of other queries", EXCESS, "sums.index(i).store(total)",
        "sums.index(FIRST + COUNT - 1 - i + FIRST).store(total)", SUMMED),
    Bug("half of the keys of a tile not summed", EXCESS, "static_range(STEPS)",
        "static_range(STEPS // 2)", SUMMED),
    # --- backward in two kernels
    Bug("P from the other place", KEY_GRADIENTS, "fetched(p_s.index(p_place), S_L)",
        "fetched(p_s.index(p_place ^ 1), S_L)", MLA),
    Bug("every query head of a group masked as if it followed the last", KEY_GRADIENTS,
        "gl.where(middle == behind, middle - count * ROWS, middle)", "middle", MLA),
    Bug("parts of dQ's columns in the opposite order", QUERY_GRADIENT, "queries - row, part * DQ)",
        "queries - row, (T.PARTS - 1 - part) * DQ)", MLA),
    Bug("dQ of the first block overwritten", QUERY_GRADIENT, "k_s, before, i > 1, T.PARTS",
        "k_s, before, i > 2, T.PARTS", MLA),
    # --- rows of dS there
    Bug("rows of the first block alone summed", QUERY_GRADIENT,
        "pinned(sums + by_lane(widened(slopes)))", "pinned(sums + 0.0 * by_lane(widened(slopes)))",
        WIDE),
    Bug("target of wide heads left out", PROJECTION, "excess -= gl.load(numbers.target_ptr",
        "excess -= 0.0 * gl.load(numbers.target_ptr", WIDE),
    Bug("excess added along the key", PROJECTION,
        "dq * gl.expand_dims(weight, 1) - gl.expand_dims(excess, 1) * k",
        "dq * gl.expand_dims(weight, 1) + gl.expand_dims(excess, 1) * k", WIDE),
)  # fmt: skip


def wrong_numbers(verdict: dict[str, Any]) -> bool:
    """Whether the error rule called an output wrong: nothing else that went wrong names one."""
    outputs = {field.name for field in dataclasses.fields(Results)}
    return verdict["caught"] and verdict["how"].split(":")[0] in outputs
