"""Small problems of INT8 attention and what the kernels must share with the oracle on them.

As in suite.py, stable_attention is imported inside the functions: planting.py decides which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from attention_cases import DEVICE

# Of the norm: one code that flips (exponentials differ by an ulp) in matrices this small is 3e-3.
MOST = 5e-3
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "hk": 1},
    "full, paper": {"paper": True},
    "window, tile scales": {"scales": "tile", "window": (20, 5), "d": 128, "hq": 1,
                            "smooth_k": False, "shift": -1.0},
    "smoothed Q": {"smooth_q": True, "smooth_k": False, "hq": 1, "layout": "sbhd"},
    "packed": {"cu": ((0, 5, 5, 80), (0, 9, 20, 90)), "causal": True, "hk": 1},
    "rows without keys": {"sq": 100, "sk": 40, "causal": True, "hq": 1, "d": 128,
                          "dtype": "float16"},
}  # fmt: skip
NAMES = ("O", "dQ", "dK", "dV")


def run(
    name: str, attention: Callable[..., Any] | None = None, *, size: float = 1.0
) -> list[torch.Tensor]:
    """(O, dQ, dK, dV) of a case by the kernels, or by ``attention``; dO times ``size``."""
    from stable_attention.int8.settings import DEFAULT, PAPER, Settings

    case = {"sq": 70, "sk": 100, "hq": 2, "hk": None, "d": 64, "layout": "bshd"} | CASES[name]
    cu, shift = case.pop("cu", None), case.pop("shift", 0.0)
    hq, d, layout = case.pop("hq"), case.pop("d"), case.pop("layout")
    hk = case.pop("hk") or hq
    sq, sk, dtype = case.pop("sq"), case.pop("sk"), getattr(torch, case.pop("dtype", "bfloat16"))
    mask = {key: case.pop(key) for key in ("causal", "window") if key in case}
    settings = PAPER if case.pop("paper", False) else Settings(**case) if case else DEFAULT
    if cu is not None:
        layout, sq, sk = "thd", 85, 95  # the last tokens belong to no sequence
        packed = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in cu)
        mask |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packed, strict=True))
    gen = torch.Generator().manual_seed(len(name))

    def draw(s: int, h: int) -> torch.Tensor:
        size = {"bshd": (1, s, h, d), "sbhd": (s, 1, h, d), "thd": (s, h, d)}[layout]
        return torch.randn(size, generator=gen).to(DEVICE)

    # Far from uniform rows, so that small P are rounded away.
    q, k, v, dout = (
        draw(sq, hq) * 3 + shift,
        draw(sk, hk) + 1,
        draw(sk, hk) - 1,
        draw(sq, hq) * size,
    )
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    if attention is None:
        from stable_attention.int8.launch import int8_attention as attention
    out = attention(*leaves, settings, layout=layout, **mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]


def problems(name: str) -> list[str]:
    """Where kernels and oracle differ on a case."""
    from stable_attention.reference.int8 import int8_reference

    found = []
    for what, x, y in zip(NAMES, run(name), run(name, int8_reference), strict=True):
        error = (x.float() - y.float()).norm() / y.float().norm()
        if not error <= MOST:
            found.append(f"{what} differs from the oracle by {error:.2g} of its norm")
    return found


MEMBERS: dict[str, Callable[[], list[str]]] = {
    f"int8 {name}": functools.partial(problems, name) for name in CASES
}
