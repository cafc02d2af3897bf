"""How much closer O is when every tile of keys has a maximum of its own.

    python benchmarks/split_keys.py [--out docs/results]

A tile's largest weight is then exactly 1 and is not rounded (`numerics.row_shift`).
FlashAttention-2 has that in the pieces into which it splits the keys of small problems. Simulated
in float64 but for P and O, which are rounded to BF16 (any machine, seconds): one running maximum
over tiles of 64 keys, and one a tile. Writes ``split_keys.json`` for docs/numerics.md.

Shape legend: q, k, v [h, s, d]; scores [h, s, keys of a tile].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from machine import describe

ROOT = Path(__file__).resolve().parent.parent
HEADS, TILE = 16, 64
SHAPES = ((64, 256), (96, 512), (192, 256), (256, 256), (256, 2048))
"""(d, keys)."""


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def output(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, one_maximum: bool, exact: bool = False
) -> torch.Tensor:
    """O as BF16 (``exact``: without any rounding), tile by tile."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    m = torch.full(scores.shape[:-1], -torch.inf, dtype=torch.float64)
    acc, total = torch.zeros_like(q), torch.zeros_like(m)
    for first in range(0, k.shape[1], TILE):
        keys = slice(first, first + TILE)
        own = scores[..., keys].amax(-1)
        m_new = torch.maximum(m, own)
        shift = m_new if one_maximum else own
        p = torch.exp(scores[..., keys] - shift[..., None])
        here, before = torch.exp(shift - m_new), torch.exp(m - m_new)
        part = (p if exact else _rounded(p)) @ v[:, keys]
        acc = acc * before[..., None] + part * here[..., None]
        total = total * before + p.sum(-1) * here
        m = m_new
    out = acc / total[..., None]
    return out if exact else _rounded(out)


def measure(d: int, s: int) -> dict[str, float]:
    """RMS errors of O of both ways."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (_rounded(torch.randn(HEADS, s, d, generator=generator)) for _ in range(3))
    truth = output(q, k, v, one_maximum=True, exact=True)
    found = {}
    for name, one_maximum in (("one_maximum", True), ("pieces", False)):
        error = output(q, k, v, one_maximum=one_maximum) - truth
        found[name] = float(f"{float(error.pow(2).mean().sqrt()):.4g}")
    return {"d": d, "keys": s} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    args = parser.parse_args()
    result = describe() | {"heads": HEADS, "tile": TILE, "rows": [measure(*x) for x in SHAPES]}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "split_keys.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(row)


if __name__ == "__main__":
    main()
