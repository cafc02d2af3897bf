"""What captured heads say about the errors of attention; plain causal attention, on a CPU.

    python research/analysis/captured.py MODE [CAPTURE ...]

A CAPTURE is a file that ``stability.capture_at`` wrote; default: those of the test suite. Every
query head of its first sequence is taken apart in float64; kernels are emulated rounding by
rounding (``stable_attention.reference.emulators``). Writes a section of captured_heads.json.

growth      a factor on all logits of a head has, for row r, the derivative sum_j dS_rj S_rj.
            noise: RMS over rows of what an implementation's dS adds to it, over its RMS; above 1
            the error decides whether logits grow; null where nothing of the derivative is left.
            side: sum of those errors over the root of the sum of their squares; 1 in RMS over
            heads where they push logits up as often as down
shared      do rows share the rounding error eps of O? shared_o |mean O|^2 / mean |O|^2;
            shared_error the same of eps, times the rows: 1 if independent; explained: share of the
            variance of dO eps that dO (mean eps) explains; dead: correlation of eps with O - v of
            the largest weight, -1 where O is rounded back to that value
centered    K minus its mean over tokens, V minus the mean of O. share |mean K|^2 / mean |K|^2;
            common: scaled q . mean K, mean over rows; noise of either; moved: RMS over rows of
            what rounding the centered K to 16 bits moves a row's logits by
exponent    exp2(s c - m c) as one multiply-add is not 1 at the maximum: relative RMS errors of
            delta by exponent and by the sum that divides O, all else exact
recomputed  error of dK where delta is exact and P of the backward comes from one float32 LSE, its
            exponent rounded in three orders; dS is rounded to BF16 in all
sizes       Frobenius norms of dQ and dK, and of their errors by plain numerics, `compensated`,
            `projected`, `compensated_projected` and attention in float32
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import shared
import torch

from megatron_patch.stability.capture import CaptureFile
from stable_attention.reference import reference_attention
from stable_attention.reference.emulators import (
    COMPENSATED,
    COMPENSATED_PROJECTED,
    FLASH2,
    PROJECTED,
    Rounding,
    emulate,
)

TESTS = shared.RESULTS.parents[1] / "tests"
SKIPPED = 64
"""Rows left out, as `megatron-patch probe` does: they see few keys."""
NOTHING = 1e-12
"""Share of the error below which a derivative is float64's own rounding."""
KINDS = {
    "none": FLASH2,
    "low_order_o": replace(FLASH2, o_lo=COMPENSATED.o_lo),
    "consistent_sum": replace(COMPENSATED, o_lo=None),
    "compensated": COMPENSATED,
}


@dataclass(frozen=True)
class Head:
    """One query head of one sequence: q, k [s, d]; v, dout [s, dv]; all float64."""

    place: dict[str, Any]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    scale: float

    def scores(self) -> torch.Tensor:
        """q k^T, not scaled, -inf where the mask is: [s, s]."""
        hidden = torch.ones(len(self.q), len(self.k), dtype=torch.bool).triu(1)
        return (self.q @ self.k.T).masked_fill(hidden, -math.inf)

    def weights(self) -> torch.Tensor:
        """P: [s, s]."""
        return torch.softmax(self.scores() * self.scale, -1)

    def true_ds(self) -> torch.Tensor:
        """dS, [s, s]."""
        p, dp = self.weights(), self.dout @ self.v.T
        return p * (dp - (p * dp).sum(-1, keepdim=True))

    def emulated(self, rounding: Rounding) -> Any:
        """An implementation on these tensors."""
        q, k, v, dout = (x[None, None] for x in (self.q, self.k, self.v, self.dout))
        seen = ~self.scores().isinf()
        return emulate(q, k, v, dout, rounding=rounding, scale=self.scale, mask=seen)


def heads(paths: list[Path]) -> Iterator[Head]:
    """Every head of these files, of the first sequence.

    Raises:
        SystemExit: a file is no capture, or of other attention.
    """
    for path in paths or sorted(TESTS.rglob("captures/*.pt")):
        try:
            one = CaptureFile.load(path)
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from None
        if not one.causal or one.window or one.sinks is not None or one.dropout_p:
            raise SystemExit(f"{path}: only plain causal attention without dropout is simulated")
        folder = path.parent.parent
        there = path.parent.name == "captures" and (folder / "config.yaml").is_file()
        run = shared.run_name(folder) if there else one.run_name
        for h, head in enumerate(one.heads):
            kv = one.head_to_kv[h]
            q, k, v, dout = one.q[:, 0, h], one.k[:, 0, kv], one.v[:, 0, kv], one.dout[:, 0, h]
            place = {"run": run, "step": one.step, "layer": one.layer, "head": head}
            yield Head(place, q.double(), k.double(), v.double(), dout.double(), one.scale)


def growth(one: Head) -> dict[str, Any]:
    found: dict[str, Any] = {"largest_logit": float(one.scores().max() * one.scale)}
    for name, rounding in KINDS.items():
        error, true = _factor(one, rounding)
        side = float(error.sum() / error.norm())
        found[name] = {"noise": _ratio(error, true), "side": side}
    return found


def noise(one: Head, rounding: Rounding = FLASH2) -> float | None:
    """RMS of the error over RMS of the true derivative by a factor on the logits."""
    return _ratio(*_factor(one, rounding))


def _factor(one: Head, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """(error, true) derivative by a factor on all logits, row by row."""
    s = (one.scores() * one.scale).nan_to_num(neginf=0.0)
    true = (one.true_ds() * s).sum(-1)
    found = (one.emulated(rounding).ds[0, 0].double() * s).sum(-1)
    return (found - true)[SKIPPED:], true[SKIPPED:]


def _ratio(error: torch.Tensor, true: torch.Tensor) -> float | None:
    known = true.norm() > NOTHING * error.norm()
    return float(error.norm() / true.norm()) if known else None


def shared_rows(one: Head) -> dict[str, Any]:
    weights = one.weights()
    nearest = one.v[weights.argmax(-1)][SKIPPED:]
    out, dout = (weights @ one.v)[SKIPPED:], one.dout[SKIPPED:]
    eps, away = out.bfloat16().double() - out, out - nearest
    e = (dout * eps).sum(1)
    norms = eps.norm() * away.norm()
    return {
        "rows": len(out),
        "largest_logit": float(one.scores().max() * one.scale),
        "shared_o": _one_vector(out),
        "shared_error": _one_vector(eps) * len(out),
        "explained": 1 - float((e - dout @ eps.mean(0)).square().sum() / e.square().sum()),
        "dead": float((eps * away).sum() / norms) if norms else 0.0,
    }


def _one_vector(rows: torch.Tensor) -> float:
    return float(rows.mean(0).square().sum() / rows.square().sum(1).mean())


def centered(one: Head) -> dict[str, Any]:
    mean, p = one.k.mean(0), one.weights()
    by_k = replace(one, k=(one.k - mean).bfloat16().double())
    by_v = replace(one, v=(one.v - (p @ one.v).mean(0)).bfloat16().double())
    exact = replace(one, k=one.k - mean).scores()
    moved = ((by_k.scores() - exact) * one.scale).masked_fill(exact.isinf(), 0.0)
    moved -= (p * moved).sum(-1, keepdim=True)  # what all keys of a row share moves no softmax
    return {
        "share": float(mean.square().sum() / one.k.square().sum(-1).mean()),
        "largest_logit": float(one.scores().max() * one.scale),
        "largest_centered": float(exact.max() * one.scale),
        "common": float((one.q @ mean)[SKIPPED:].mean() * one.scale),
        "moved": float((p * moved.square()).sum(-1)[SKIPPED:].mean().sqrt()),
        "noise": noise(one),
        "noise_k_centered": noise(by_k),
        "noise_v_centered": noise(by_v),
    }


def exponent(one: Head) -> dict[str, Any]:
    raw = one.scores()
    delta = ((one.weights() @ one.v) * one.dout).sum(-1)[SKIPPED:]
    c = torch.tensor(one.scale * math.log2(math.e), dtype=torch.float32)
    s = raw.float()
    m = s.amax(-1, keepdim=True)
    fused = s.double() * c.double() - (m * c).double()  # one rounding, as a multiply-add
    ways = {"multiply-add": fused.float().double(), "subtract first": ((s - m) * c).double()}
    found: dict[str, Any] = {"largest_row_maximum": float((m * one.scale).abs().max())}
    for name, exponents in ways.items():
        p = torch.exp2(exponents)
        rounded = p.bfloat16().double()
        for kind, total in (("unrounded", p), ("rounded", rounded)):
            out = rounded @ one.v / total.sum(-1, keepdim=True)
            error = (out * one.dout).sum(-1)[SKIPPED:] - delta
            found[f"{name}, {kind}"] = float(error.norm() / delta.norm())
    return found


def recomputed(one: Head) -> dict[str, Any]:
    raw, lse = one.scores(), torch.logsumexp(one.scores() * one.scale, -1, keepdim=True)
    dk, dp = one.true_ds().T @ one.q, one.dout @ one.v.T
    delta = (one.weights() * dp).sum(-1, keepdim=True)
    c = torch.tensor(one.scale * math.log2(math.e), dtype=torch.float32)
    s, log2e = raw.float(), torch.tensor(math.log2(math.e), dtype=torch.float32)
    base2, natural = (lse * math.log2(math.e)).float(), lse.float() * log2e
    ways = {
        "LSE in base 2, multiply-add": (s.double() * c.double() - base2.double()).float(),
        "natural LSE, multiply-add": (s.double() * c.double() - natural.double()).float(),
        "natural LSE, product first": s * c - natural,
    }
    found: dict[str, Any] = {"largest_logit": float(raw.max() * one.scale)}
    for name, exponents in ways.items():
        ds = (torch.exp2(exponents.double()) * (dp - delta)).bfloat16().double()
        found[name] = _ratio(ds.T @ one.q - dk, dk)
    return found


def sizes(one: Head) -> dict[str, Any]:
    ds = one.true_ds() * one.scale
    true = {"dq": ds @ one.k, "dk": ds.T @ one.q}
    q, k, v = (x.float()[None, None].requires_grad_() for x in (one.q, one.k, one.v))
    out = reference_attention(q, k, v, layout="bhsd", causal=True, scale=one.scale)
    grads = torch.autograd.grad(out, (q, k), one.dout.float()[None, None])
    found = {"float32": [x.bfloat16() for x in grads]}  # as a trainer rounds them
    kinds = {name: KINDS[name] for name in ("none", "compensated")}
    kinds |= {"projected": PROJECTED, "compensated_projected": COMPENSATED_PROJECTED}
    for name, rounding in kinds.items():
        emulated = one.emulated(rounding)
        found[name] = [emulated.dq, emulated.dk]
    return {
        "largest_logit": float(one.scores().max() * one.scale),
        "true": {of: float(x.norm()) for of, x in true.items()},
        "errors": {
            name: {
                of: float((x[0, 0].double() - true[of]).norm())
                for of, x in zip(("dq", "dk"), pair, strict=True)
            }
            for name, pair in found.items()
        },
    }


EXAMINE: dict[str, Callable[[Head], dict[str, Any]]] = {"growth": growth, "shared": shared_rows}
EXAMINE |= {"centered": centered, "exponent": exponent, "recomputed": recomputed, "sizes": sizes}


def main() -> int:
    parser = shared.arguments(__doc__)
    parser.add_argument("what", choices=EXAMINE)
    parser.add_argument("captures", nargs="*", type=Path, metavar="CAPTURE")
    args = parser.parse_args()
    rows = [one.place | EXAMINE[args.what](one) for one in heads(args.captures)]
    where = operator.itemgetter("run", "step", "layer", "head")
    new = {where(row) for row in rows}
    old = shared.read("captured_heads", args.out).get(args.what, {"heads": []})
    kept = [{"commit": old["commit"]} | row for row in old["heads"] if where(row) not in new]
    section = {args.what: shared.describe() | {"heads": kept + rows}}
    print(f"wrote {shared.write('captured_heads', section, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
