# ruff: noqa: E402  (where the repository lies is found first)
"""Errors and time of borrowed backwards (`attention.backward`) on one GPU, beside our own.

    PYTHONPATH=kernels python research/borrowed.py [errors] [captures] [speed]

Writes the parts of these names of docs/assets/borrowed.json, which choose what `auto` is. Errors
are relative norms against float64: in the regimes of tests/regimes.py, causal, at lengths and
heads of `SIZES`, and of every head of the captures in tests/stability/captures. ``speed``: medians
of CUDA-event intervals as benchmarks/attention.py takes them, at its shapes that have one head dim.

Predicted before this script ran first, from a measurement of earlier kernels whose script was not
kept: every figure of the table that is an error within 0.02 of that one, every time within 0.1, and
`auto` stays our own. Seen on an H200: within 0.01, but for 2,048 keys, 0.035 less (that one had
head dim 128 there, too); 0.08; so. The machine's hold ended after 20 of 24 shapes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / p) for p in ("benchmarks", "tests", "")]

import attention
import projection
from machine import describe_kernels, write_result
from regimes import REGIMES, make_regime

from stable_attention import fa4, stable_attention

BACKWARDS = ("own", "sdpa_cudnn", "sdpa_flash", "fa4")
SIZES = ((512, 4, 64), (2048, 4, 64), (8192, 2, 64), (32768, 1, 64), (512, 4, 128))
"""Keys, heads, head dim."""


@functools.cache
def served() -> tuple[str, ...]:
    """Names of `BACKWARDS` that can run here."""
    if why := fa4.missing():
        print(f"without fa4: {why}", flush=True)
        return BACKWARDS[:-1]
    return BACKWARDS


def told(inputs: projection.Tensors, dout: Any, scale: float) -> dict[str, dict[str, float | None]]:
    """Gradient -> backward -> error of `compensated`, causal."""
    exact = projection.truth(inputs, dout, scale)
    found = {}
    for name in served():
        call = projection.ours("compensated", scale=scale, causal=True, backward=name)
        found[name] = projection.distances(projection.gradients(call, inputs, dout), exact)
    return {key: {name: row[key] for name, row in found.items()} for key in ("dq", "dk", "dv")}


def errors() -> Iterator[dict[str, Any]]:
    for n, heads, d in SIZES:
        for regime in REGIMES:
            *inputs, dout = (
                x[None] for x in make_regime(regime, heads=heads, n=n, d=d, device="cuda")
            )
            same = {"regime": regime, "n": n, "heads": heads, "d": d}
            yield same | told(tuple(inputs), dout, d**-0.5)


def captures() -> Iterator[dict[str, Any]]:
    for same, inputs, dout, scale in projection.captured_heads([]):
        yield same | told(inputs, dout, scale)


def speed() -> Iterator[dict[str, Any]]:
    table = {name: {"backward": name, "deterministic": name == "own"} for name in served()}
    if "fa4" in table:
        table["fa4 deterministic"] = {"backward": "fa4", "deterministic": True}
    for shape in attention.shapes():
        if shape.d != shape.dv or shape.d not in (64, 128):
            continue
        calls = {
            name: functools.partial(stable_attention, causal=shape.causal, **how)
            for name, how in table.items()
        }
        same = {name: getattr(shape, name) for name in ("b", "s", "h", "kv_heads", "d", "causal")}
        yield same | attention.measure(calls, attention.tensors(shape), budget_ms=40.0)


def main() -> None:
    parts = {"errors": errors, "captures": captures, "speed": speed}
    if unknown := [name for name in sys.argv[1:] if name not in parts]:
        raise SystemExit(
            f"no part {unknown[0]!r}: name some of {', '.join(parts)}, or none for all"
        )
    for part in sys.argv[1:] or parts:
        head, rows = describe_kernels(), []
        for row in parts[part]():
            rows.append(row)
            print(row, flush=True)
            write_result("borrowed", {"rows": rows}, part=part, head=head)


if __name__ == "__main__":
    main()
