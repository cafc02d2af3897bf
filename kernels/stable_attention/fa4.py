"""Every call of FlashAttention-4 (PyPI: flash-attn-4), whose interface is private and in motion.

Shape legend: as in `api`; q, k, v, O and dO are [b, s, h, d] here, LSE and its gradient [b, h, s].
"""

from __future__ import annotations

import functools
import inspect
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

VERSION = "4.0.0b36"
"""The one version whose private signatures this file was written for."""
PACKAGE = "flash-attn-4"
INSTALL = f"Install it: pip install {PACKAGE}=={VERSION} (extra fa4 of megatron-patch-stable)"
_TAKES = (
    "q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "window_size_left",
    "window_size_right", "deterministic", "dlse",
)  # fmt: skip


@functools.cache
def missing() -> str:
    """Why FlashAttention-4 cannot be called here, in one line; empty if it can.

    Looked at once: the package, its version, and the arguments of what is called.
    """
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed. {INSTALL}"
    if found != VERSION:
        return f"{PACKAGE} is {found}, not {VERSION}. {INSTALL}"
    try:
        from flash_attn.cute import interface

        given = inspect.signature(interface._flash_attn_bwd).parameters
    except Exception as error:  # a broken installation raises anything
        return f"{PACKAGE} cannot be imported ({error!r:.200}). {INSTALL}"
    lacking = [name for name in _TAKES if name not in given]
    if lacking:
        return f"{PACKAGE} {found} takes no {', '.join(lacking)} in its backward. {INSTALL}"
    return ""


def _window(window: tuple[int, int]) -> dict[str, Any]:
    """Ours in their terms: None is unlimited, and causal a flag."""
    left, right = (None if side < 0 else side for side in window)
    causal = right == 0 and left is None
    return {"causal": causal, "window": (None, None) if causal else (left, right)}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    scale: float, window: tuple[int, int], deterministic: bool,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention-4 as it is, forward and backward: O [b, sq, h, dv], differentiable."""
    from flash_attn.cute import flash_attn_func

    mask = _window(window)
    out = flash_attn_func(
        q, k, v, softmax_scale=scale, causal=mask["causal"], window_size=mask["window"],
        deterministic=deterministic,
    )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, dlse: torch.Tensor, *,
    scale: float, window: tuple[int, int], deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dQ, dK, dV) with delta = rowsum(dO o O) - dLSE.

    Raises:
        RuntimeError: (first call on a device) it does not do with dLSE what it is here for.
    """
    self_test(q.get_device(), q.dtype)
    return _backward(
        dout, q, k, v, out, lse, dlse, scale=scale, window=window, deterministic=deterministic
    )


def _backward(dout, q, k, v, out, lse, dlse, *, scale, window, deterministic):
    from flash_attn.cute import interface

    mask = _window(window)
    found = interface._flash_attn_bwd(
        q, k, v, out, dout, lse, scale, mask["causal"],
        window_size_left=mask["window"][0], window_size_right=mask["window"][1],
        deterministic=deterministic, dlse=dlse,
    )  # fmt: skip
    return found[0], found[1], found[2]


@functools.cache
def self_test(device: int, dtype: torch.dtype, run: Callable[..., Any] | None = None) -> None:
    """Its gradients of a small problem against float32, with O zeros and -delta as dLSE, once.

    It waits for the GPU, in the first backward of a process.

    Raises:
        RuntimeError: they are not those.
    """
    import torch

    where = torch.device("cpu" if device < 0 else f"cuda:{device}")
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 128, 2, 64, generator=generator).to(dtype) for _ in range(4))
    # [b, h, s, d], float32, causal. By formulas: a backward pass, where this runs, records none.
    wide, *exact = (x.float().transpose(1, 2) for x in (dout, q, k, v))
    scores = exact[0] @ exact[1].mT * 0.125
    scores = scores.masked_fill(torch.ones(128, 128).triu(1).bool(), -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    delta = (wide * (p @ exact[2])).sum(-1)
    ds = p * (wide @ exact[2].mT - delta[..., None]) * 0.125
    wanted = (ds @ exact[1], ds.mT @ exact[0], p.mT @ wide)
    given = (x.to(where) for x in (dout, q, k, v, torch.zeros_like(dout), lse, -delta))
    dout, q, k, v, out, lse, dlse = given
    found = (run or _backward)(
        dout, q, k, v, out, lse, dlse, scale=0.125, window=(-1, 0), deterministic=False
    )
    for name, x, y in zip(("dQ", "dK", "dV"), found, wanted, strict=True):
        error = (x.float().cpu().transpose(1, 2) - y).norm() / y.norm()
        if not error < 0.02:
            raise RuntimeError(
                f"flash-attn-4 {VERSION}: {name} is off by {error:.1e} of its norm when delta is "
                "given as a gradient of LSE; use attention.backward: own"
            )


__all__ = ["INSTALL", "PACKAGE", "VERSION", "attention", "backward", "missing", "self_test"]
