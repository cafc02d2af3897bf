"""Attention problems as data: one line of text each, so that a failure can be repeated.

A ``Case`` is everything a run depends on; ``str(case)`` and ``Case.parse`` are inverse, and
``python tests/kernels/attention_cases.py "<line>"`` runs it (PYTHONPATH=kernels).

Shapes: q [b, sq, hq, d], k [b, sk, hk, d], v [b, sk, hk, dv] in ``layout``; thd packs the
sequences of ``lens_q``/``lens_k``, with ``unused`` tokens after the last one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Where the tests run the kernels: in the interpreter, or compiled where there is a GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: str = "bshd"
    dtype: str = "bf16"
    b: int = 1
    sq: int = 64
    sk: int = 64
    hq: int = 2
    hk: int = 2
    d: int = 32
    dv: int = 0
    """0: as d."""
    causal: int = 0
    left: int = -1
    right: int = -1
    scale: float = 0.0
    """0: d ** -0.5."""
    sinks: str = "none"
    """none, off-by-one or learned."""
    softcap: float = 0.0
    dropout: float = 0.0
    stabilizer: str = "compensated"
    o_lo: str = "bf16"
    deterministic: int = 1
    lens_q: str = ""
    """Comma-separated lengths for thd."""
    lens_k: str = ""
    unused: int = 0
    gaps: int = 0
    """Unused tokens between packed sequences (cu_seqlens_*_padded)."""
    memory: str = "plain"
    """plain, fused (q, k, v are views of one tensor), strided (dO is a view), expanded (K, V)."""
    values: str = "gauss"
    """gauss, outlier (K has a huge channel), positive (all of one sign), repeat (equal keys),
    below and above (every score near -160 or +160 at d = 32, so LSE is too), tall (the scores of
    three keys are near 160, all others near 0)."""
    gain: float = 1.0
    path: str = ""
    """How the forward kernel sums up tiles (a name of `PATHS`), or "tma": all kernels load through
    descriptors, the forward late as on sm_90, or "tma-segments"; "": as shipped."""
    dlse: int = 0
    """Also send a gradient into LSE."""
    seed: int = 0

    def __str__(self) -> str:
        default = Case()
        named = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return " ".join(named)

    @property
    def id(self) -> str:
        return str(self).replace(" ", "-") or "default"

    @staticmethod
    def parse(line: str) -> Case:
        kinds = {f.name: type(getattr(Case(), f.name)) for f in dataclasses.fields(Case)}
        pairs = (word.split("=", 1) for word in line.split())
        return Case(**{name: kinds[name](value) for name, value in pairs})

    @property
    def v_dim(self) -> int:
        return self.dv or self.d

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        return (
            [int(n) for n in self.lens_q.split(",")],
            [int(n) for n in self.lens_k.split(",")],
        )

    def repro(self) -> str:
        return f'PYTHONPATH=kernels python tests/kernels/attention_cases.py "{self}"'


@dataclass
class Inputs:
    """Tensors of a case; ``leaf`` is what gradients are taken of (q, k, v, maybe sinks)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    sinks: torch.Tensor | str | None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None

    def arguments(self, case: Case) -> dict[str, Any]:
        """What ``stable_attention``, the reference and the oracle all understand."""
        named: dict[str, Any] = {
            "layout": case.layout,
            "causal": bool(case.causal),
            "window": None if case.left < 0 and case.right < 0 else (case.left, case.right),
            "scale": case.scale or None,
            "softcap": case.softcap,
            "sinks": self.sinks,
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_k": self.cu_k,
            "dropout_p": case.dropout,
            "dropout_seed": 1234567 + case.seed,
        }
        if case.gaps:
            named["cu_seqlens_q_padded"] = self.starts_q
            named["cu_seqlens_k_padded"] = self.starts_k
        return named


PATHS: dict[str, dict[str, int]] = {
    "plain": {"segment": 0},
    "segments": {"segment": 2},  # tiles
    "late": {"segment": 1},
    "reverse": {"segment": 1, "ones": 16, "reverse": 1},
    "early": {"segment": 0, "early": 1},
    "early-segments": {"segment": 2, "early": 1},
    "early-late": {"segment": 1, "early": 1},
    "early-reverse": {"segment": 1, "early": 1, "reverse": 1},
}


@contextlib.contextmanager
def forward_path(name: str) -> Iterator[None]:
    """The tile table with forward rows on one of `PATHS`, or all rows with TMA ("tma*")."""
    from stable_attention import configs

    lookup = configs.lookup

    def changed(which: str, problem: Any, device: torch.device) -> Any:
        tile = lookup(which, problem, device)
        if name.startswith("tma"):
            # As sm_90 ships them, or with the segments of the row.
            late = which == "forward" and name == "tma"
            segment = tile.bn if late else tile.segment
            return dataclasses.replace(tile, tma=True, query_tma=int(late), segment=segment)
        if which != "forward" or not name:
            return tile
        path = PATHS[name]
        return dataclasses.replace(tile, **path | {"segment": path["segment"] * tile.bn})

    configs.lookup = changed
    try:
        yield
    finally:
        configs.lookup = lookup


def _shape(case: Case, s: int, h: int, d: int) -> tuple[int, ...]:
    return {
        "bshd": (case.b, s, h, d),
        "sbhd": (s, case.b, h, d),
        "bhsd": (case.b, h, s, d),
        "thd": (s, h, d),
    }[case.layout]


def _offsets(lens: list[int], gap: int) -> tuple[list[int], list[int], int]:
    cu, starts, at = [0], [], 0
    for n in lens:
        cu.append(cu[-1] + n)
        starts.append(at)
        at += n + gap
    return cu, starts, at


def make_inputs(case: Case, device: str = DEVICE) -> Inputs:
    """Seeded tensors of a case, drawn on the CPU so that every device sees the same numbers."""
    gen = torch.Generator().manual_seed(case.seed * 7919 + 17)
    dtype = DTYPES[case.dtype]
    sq, sk = case.sq, case.sk
    cu: dict[str, torch.Tensor] = {}
    if case.layout == "thd":
        for name, lens in zip("qk", case.lengths, strict=True):
            offsets, starts, total = _offsets(lens, case.gaps)
            cu["cu_" + name] = torch.tensor(offsets, dtype=torch.int32, device=device)
            cu["starts_" + name] = torch.tensor(starts, dtype=torch.int32, device=device)
            sq, sk = (total + case.unused, sk) if name == "q" else (sq, total + case.unused)

    def draw(s: int, h: int, d: int) -> torch.Tensor:
        x = torch.randn(_shape(case, s, h, d), generator=gen)
        return x.abs() if case.values == "positive" else x

    q, k = draw(sq, case.hq, case.d) * case.gain, draw(sk, case.hk, case.d)
    v, dout = draw(sk, case.hk, case.v_dim), draw(sq, case.hq, case.v_dim)
    if case.values == "outlier":
        k[..., 0] += 70.0
        q[..., 0] = q[..., 0].abs()
    if case.values in ("below", "above"):
        q[..., 0] += 30.0
        k[..., 0] += 30.0 if case.values == "above" else -30.0
    if case.values == "tall":
        # Three keys hundreds of powers of two above all that follow.
        q[..., 0] += 30.0
        k.movedim(TOKENS[case.layout], 0)[:3, ..., 0] += 30.0
    if case.values == "repeat":
        k[:] = k[..., :1, :] if case.layout != "thd" else k[:1]
    tensors = _place(case, [x.to(device).to(dtype) for x in (q, k, v, dout)])
    sinks: torch.Tensor | str | None = None if case.sinks == "none" else "off-by-one"
    if case.sinks == "learned":
        sinks = torch.randn(case.hq, generator=gen).to(device) * 2
    dlse = None
    if case.dlse:
        lse_shape = (case.hq, sq) if case.layout == "thd" else (case.b, case.hq, sq)
        dlse = torch.randn(lse_shape, generator=gen).to(device)
    return Inputs(*tensors, dlse, sinks, **cu)


TOKENS = {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}


def _place(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same numbers in another memory order."""
    q, k, v, dout = tensors
    axis = 1 if case.layout in ("bhsd", "thd") else 2
    fits = q.shape[-1] == v.shape[-1] and q.numel() // case.hq == k.numel() // case.hk
    if case.memory == "fused" and fits:
        fused = torch.cat([q, k, v], axis)
        q, k, v = fused.split([q.shape[axis], k.shape[axis], v.shape[axis]], axis)
    elif case.memory == "strided":
        dout = torch.stack([dout, torch.full_like(dout, float("nan"))], 1)[:, 0]
        q = torch.cat([q, torch.full_like(q, float("nan"))[..., :8]], -1)[..., : q.shape[-1]]
    elif case.memory == "expanded" and case.layout != "thd":
        batch = 1 if case.layout == "sbhd" else 0
        k = k.narrow(batch, 0, 1).expand_as(k)
        v = v.narrow(batch, 0, 1).expand_as(v)
    return [q, k, v, dout]


HEAD_DIMS = (32, 40, 48, 64, 72, 80, 96, 104, 128, 160, 192, 256)


def random_case(rng: random.Random, *, small: bool, kernel: Case | None = None) -> Case:
    """A legal random case. ``kernel`` fixes what the compiler sees (dims, dtype, feature flags)."""
    kind = random_kernel(rng) if kernel is None else kernel
    top = 96 if small else 700
    sq = rng.choice([1, 3, 17, 64, 65, 127, 128, 200, rng.randrange(1, top)])
    sk = rng.choice([1, 2, 33, 64, 113, 128, 129, 256, rng.randrange(1, top), sq, sq])
    if small:
        sq, sk = min(sq, top), min(sk, top)
    hk = rng.choice([1, 2, 3])
    group = kind.hq // kind.hk
    left, right = kind.left, kind.right
    values = ["gauss", "gauss", "gauss", "outlier", "positive"]
    if kind.stabilizer in ("compensated", "compensated_projected"):
        # Equal keys are the regime in which plain FA2 numerics ("none") lose dQ: docs/numerics.md.
        values.append("repeat")
    changes: dict[str, Any] = {
        "b": rng.choice([1, 1, 2, 3]),
        "sq": sq,
        "sk": sk,
        "hk": hk,
        "hq": hk * group,
        "left": left if left < 0 else rng.choice([0, 1, 5, 63, rng.randrange(1, top)]),
        "right": right if right < 0 else rng.choice([0, 1, 7, 64, rng.randrange(1, top)]),
        "seed": rng.randrange(10**6),
        "memory": rng.choice(["plain", "plain", "fused", "strided", "expanded"]),
        "values": rng.choice(values),
        "scale": rng.choice([0.0, 0.0, 0.0, 0.25]),
    }
    if kind.layout == "thd":
        count = rng.randrange(1, 5)
        lens_k = [rng.choice([0, 1, 2, 64, rng.randrange(1, top)]) for _ in range(count)]
        lens_q = [rng.choice([0, 1, 64, n, n, rng.randrange(1, top)]) for n in lens_k]
        same = rng.random() < 0.4
        changes |= {
            "b": 1,
            "lens_q": ",".join(map(str, lens_k if same else lens_q)),
            "lens_k": ",".join(map(str, lens_k)),
            "unused": rng.choice([0, 0, 5]),
            "gaps": rng.choice([0, 0, 3]),
        }
    return dataclasses.replace(kind, **changes)


def random_kernel(rng: random.Random) -> Case:
    """What decides which code is compiled; shapes and values are drawn by ``random_case``."""
    d = rng.choice(HEAD_DIMS)
    mask = rng.choice(["full", "causal", "causal", "left", "right", "both"])
    group = rng.choice([1, 1, 2, 4])
    stabilizer = rng.choice(["compensated"] * 5 + ["none", "projected", "compensated_projected"])
    return Case(
        layout=rng.choice(["bshd", "bshd", "sbhd", "bhsd", "thd", "thd"]),
        dtype=rng.choice(["bf16", "bf16", "fp16"]),
        d=d,
        dv=rng.choice([0, 0, 0, 64, 96, 128]),
        hq=group,
        hk=1,
        causal=int(mask == "causal"),
        left=1 if mask in ("left", "both") or (mask == "causal" and rng.random() < 0.3) else -1,
        right=1 if mask in ("right", "both") else -1,
        sinks=rng.choice(["none", "none", "off-by-one", "learned"]),
        softcap=0.0 if "projected" in stabilizer else rng.choice([0.0, 0.0, 0.0, 20.0]),
        dropout=rng.choice([0.0, 0.0, 0.0, 0.17]),
        stabilizer=stabilizer,
        o_lo=rng.choice(["bf16", "bf16", "int8"]) if stabilizer == "compensated" else "bf16",
        deterministic=rng.choice([1, 0]),
        dlse=rng.choice([0, 0, 1]),
    )


def main() -> int:
    root = Path(__file__).resolve().parent
    sys.path[:0] = [str(root), str(root.parent)]
    import interpreter_shim

    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        interpreter_shim.install_on_import()
    from error_rule import check_case

    report = check_case(Case.parse(" ".join(sys.argv[1:])))
    print(report.table())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
