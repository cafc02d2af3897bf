"""`int8_attention`: the call, its autograd rule, and the launches of both passes.

Shape legend: as in `api` (head dims of q, k and v are the same here).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
import triton

from stable_attention import configs, ops
from stable_attention.api import check_device
from stable_attention.describe import OF_TENSORS, describe
from stable_attention.dispatch import on_device
from stable_attention.eager import eager
from stable_attention.int8.backward import dkdv_kernel, dq_kernel
from stable_attention.int8.forward import forward_kernel
from stable_attention.int8.quantise import (
    NONE,
    OWN,
    SEQUENCE,
    Codes,
    Side,
    block_count,
    quantise,
    row_steps,
    turned,
)
from stable_attention.int8.settings import BLOCK, DEFAULT, HEAD_DIMS, Settings
from stable_attention.layouts import readable, strides
from stable_attention.once import once_differentiable
from stable_attention.problem import (
    UNLIMITED,
    AttentionArgumentError,
    Extras,
    Options,
    Problem,
    require,
    show,
)
from stable_attention.triton.launches import Arguments, launch
from stable_attention.triton.options import LOG2E
from stable_attention.triton.preprocess import preprocess
from stable_attention.triton.results import allocate, new_gradients


class Tile(NamedTuple):
    """The tile that a program owns; its steps are of `BLOCK`."""

    rows: int
    warps: int
    stages: int


# The fastest of three each on an H200 with the default settings. Own tiles of 128 rows shrink to 64
# where a scale or a mean belongs to 64 of them (`_tile`).
TILES = {
    ("forward", 64): Tile(128, 4, 3), ("forward", 128): Tile(128, 8, 3),
    ("dq", 64): Tile(64, 4, 2), ("dq", 128): Tile(128, 8, 2),
    ("dkdv", 64): Tile(128, 8, 2), ("dkdv", 128): Tile(128, 8, 3),
}  # fmt: skip


class Kept(NamedTuple):
    """What the forward leaves for the backward, beside V: codes and scales of Q and K, O, LSE."""

    q: Codes
    k: Codes
    out: torch.Tensor
    lse: torch.Tensor


def _sides(problem: Problem, extras: Extras) -> tuple[Side, Side]:
    cu_q, cu_k, start_q, start_k, *_ = extras.pointers()
    return (
        Side(problem.sq, problem.tq, problem.heads, cu_q, start_q),
        Side(problem.sk, problem.tk, problem.kv_heads, cu_k, start_k),
    )


def _common(
    problem: Problem, settings: Settings, tile: Tile, *, own: int, steps: int
) -> dict[str, Any]:
    """Keyword arguments of all three kernels.

    ``own`` is the length that own tiles cut, ``steps`` the one of `_sides` that they step along.
    """
    return {
        "sq": problem.sq, "sk": problem.sk, "tq": problem.tq, "tk": problem.tk,
        "heads": problem.heads, "tiles": triton.cdiv(own, tile.rows),
        "total": block_count(problem, _sides(problem, Extras())[steps]),
        "blocks": triton.cdiv(problem.sq, BLOCK),
        "left": problem.window_left, "right": problem.window_right,
        "unit": problem.scale * LOG2E, "GROUP": problem.group, "D": problem.d,
        "VARLEN": problem.varlen,
        "HAS_LEFT": problem.window_left != UNLIMITED,
        "HAS_RIGHT": problem.window_right != UNLIMITED,
        "SMOOTH_Q": settings.smooth_q,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _tile(kernel: str, problem: Problem, settings: Settings, device: torch.device) -> Tile:
    tile = TILES[kernel, problem.d]
    small = settings.smooth_q
    if kernel != "forward":
        # Ada has 99 KiB of shared memory a program.
        small |= settings.scales == "tile" or configs.arch_of(device).startswith("sm8")
    if not small:
        return tile
    stages = tile.stages if kernel == "forward" else 2  # a third does not fit there
    return tile._replace(rows=BLOCK, warps=problem.d // 16, stages=stages)


def _row_steps(problem: Problem) -> tuple[int, ...]:
    sides = _sides(problem, Extras())
    return row_steps(sides[0], problem.varlen) + row_steps(sides[1], problem.varlen)


def _forward_arguments(problem: Problem, settings: Settings, *tensors: Any) -> Arguments:
    tile = _tile("forward", problem, settings, tensors[0].device)
    out = tensors[7]
    named = _common(problem, settings, tile, own=problem.sq, steps=1) | {
        "BM": tile.rows, "BN": BLOCK, "ROUNDED": settings.normalizer == "rounded",
        "EVEN": not problem.varlen and problem.sk % BLOCK == 0,
    }  # fmt: skip
    positional = (*tensors, *strides(out, problem.layout), *_row_steps(problem))
    return (named["tiles"] * problem.heads, problem.batch), positional, named


@on_device
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    extras: Extras,
    settings: Settings,
) -> Kept:
    """Quantise Q, K and V, and attend."""
    result = allocate(problem, q.device, out_dtype=q.dtype, with_max_logits=False, with_lse=True)
    queries, keys = _sides(problem, extras)
    q8 = quantise(problem, q, queries, OWN if settings.smooth_q else NONE)
    k8 = quantise(problem, k, keys, SEQUENCE if settings.smooth_k else NONE)
    v8 = quantise(problem, v, keys)
    if q.numel() and problem.batch:
        tensors = (
            q8.codes, k8.codes, turned(problem, v8.codes, keys), q8.scale, k8.scale, v8.scale,
            q8.mu, result.out, result.lse, *extras.pointers()[:4],
        )  # fmt: skip
        arguments = functools.partial(_forward_arguments, problem, settings)
        launch(forward_kernel, (problem, settings), tensors, arguments)
    return Kept(q8, k8, result.out, result.lse)


def _dq_arguments(problem: Problem, settings: Settings, *tensors: Any) -> Arguments:
    tile = _tile("dq", problem, settings, tensors[0].device)
    v, do, dq = tensors[6:9]
    named = _common(problem, settings, tile, own=problem.sq, steps=1) | {
        "BM": tile.rows, "BN": BLOCK, "ROW": settings.scales == "row",
        "PROJECT": settings.projection, "scale": problem.scale,
        "EVEN": not problem.varlen and problem.sk % BLOCK == 0,
    }  # fmt: skip
    steps = (x for y in (v, do, dq) for x in strides(y, problem.layout))
    positional = (*tensors, *steps, *_row_steps(problem))
    return (named["tiles"] * problem.heads, problem.batch), positional, named


def _dkdv_arguments(problem: Problem, settings: Settings, *tensors: Any) -> Arguments:
    tile = _tile("dkdv", problem, settings, tensors[0].device)
    v, do, dk, dv = tensors[8:12]
    named = _common(problem, settings, tile, own=problem.sk, steps=0) | {
        "BM": BLOCK, "BN": tile.rows, "ROW": settings.scales == "row", "scale": problem.scale,
        "EVEN": not problem.varlen and problem.sq % BLOCK == 0 and problem.sk % tile.rows == 0,
    }  # fmt: skip
    steps = (x for y in (v, do, dk, dv) for x in strides(y, problem.layout))
    positional = (*tensors, *steps, *_row_steps(problem))
    return (named["tiles"] * problem.kv_heads, problem.batch), positional, named


@on_device
def backward(
    dout: torch.Tensor,
    v: torch.Tensor,
    kept: Kept,
    problem: Problem,
    extras: Extras,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV)."""
    if not (dout.numel() and v.numel() and problem.batch):
        return torch.zeros_like(dout), torch.zeros_like(v), torch.zeros_like(v)
    # dQ is shaped as dO, and dK as V.
    _, (dq, dk, dv) = new_gradients(problem, dout, v, v)
    delta, _ = preprocess(problem, dout, kept.out, low=None, lse=kept.lse, dlse=None, extras=extras)
    queries, keys = _sides(problem, extras)
    q8, k8, do8 = kept.q, kept.k, quantise(problem, dout, queries)
    small = (kept.lse, delta, *extras.pointers()[:4])
    tensors = (
        q8.codes, k8.codes, turned(problem, k8.codes, keys), q8.scale, k8.scale, q8.mu,
        v, dout, dq, *small,
    )  # fmt: skip
    arguments = functools.partial(_dq_arguments, problem, settings)
    launch(dq_kernel, (problem, settings), tensors, arguments)
    tensors = (
        q8.codes, turned(problem, q8.codes, queries), k8.codes,
        turned(problem, do8.codes, queries), q8.scale, k8.scale, do8.scale, q8.mu,
        v, dout, dk, dv, *small,
    )  # fmt: skip
    arguments = functools.partial(_dkdv_arguments, problem, settings)
    launch(dkdv_kernel, (problem, settings), tensors, arguments)
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    """Differentiable once."""

    @staticmethod
    def forward(ctx, q, k, v, problem, extras, settings, *ends):
        kept = forward(q, k, v, problem, extras, settings)
        small = extras.pointers()[:4]
        ctx.save_for_backward(v, *kept.q, *kept.k, kept.out, kept.lse, *small, *ends)
        ctx.problem, ctx.settings = problem, settings
        return kept.out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        # All but V were made so: hooks of saved tensors may have laid them out anew.
        v, *rest = ctx.saved_tensors
        v, rest = (
            readable(v, ctx.problem.layout),
            [x if x is None else x.contiguous() for x in rest],
        )
        kept = Kept(Codes(*rest[:3]), Codes(*rest[3:6]), rest[6], rest[7])
        cu_q, cu_k, start_q, start_k = rest[8:12]
        extras = Extras(cu_q=cu_q, cu_k=cu_k, start_q=start_q, start_k=start_k)
        dout = readable(dout, ctx.problem.layout)
        grads = backward(dout, v, kept, ctx.problem, extras, ctx.settings)
        return (*grads, None, None, None, None, None)


@eager
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    settings: Settings,
    **packed: Any,
) -> torch.Tensor:
    """`int8_attention` with parsed options.

    Raises:
        AttentionArgumentError: as there, and for dropout or a softcap.
    """
    q, k, v = ops.under_autocast(q, k, v)
    require(isinstance(settings, Settings), "settings", show(settings), "a Settings", "Make one.")
    served = [name for name in OF_TENSORS if name != "dropout_seed"]
    for name, x in packed.items():
        if name not in served and x is not None:
            raise AttentionArgumentError(name, "given", f"None, and {', '.join(served)}", _OTHER)
    for name, value in (("dropout_p", options.dropout_p), ("softcap", options.softcap)):
        require(value == 0, name, value, "0 for INT8 attention", _OTHER)
    # Its numerics are `Settings`; of the shared launches "none" takes delta from O alone.
    options = dataclasses.replace(options, stabilizer="none", backward="own")
    problem, extras = describe(q, k, v, options, **packed)
    dims = (problem.d, problem.dv)
    ok = problem.d in HEAD_DIMS and problem.dv == problem.d
    require(ok, "head dims", dims, f"{HEAD_DIMS}, the same for q, k and v", _OTHER)
    check_device(q)
    # Codes are kept, not q and k: without an end of each in the graph, a second derivative by them
    # would leave this call out and not raise.
    ends = [x[:0].clone() if x.requires_grad else None for x in (q, k)]
    out = _Attention.apply(q, k, v, problem, extras, settings, *ends)
    assert isinstance(out, torch.Tensor)
    return out


_OTHER = "Use stable_attention, in 16 bits."


def int8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: Settings = DEFAULT,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    **packed: Any,
) -> torch.Tensor:
    """softmax(scale * q k^T + mask) v, six of its seven products in INT8; differentiable once.

    Q K^T (in both passes), P V, P^T dO, dS K and dS^T Q are in INT8; dP = dO V^T stays in 16 bits.
    Scales hold for blocks of 64 tokens, and the mean of K for the sequence: through their
    rounding, O at a token depends on later ones too, under a causal mask as well.

    Args:
        q, k, v: bfloat16 or float16 in ``layout``, head dim 64 or 128 for all three; q may have
            a multiple of the heads of k and v.
        settings: the method, see `Settings`; `PAPER` is SageBwd as published.
        layout, causal, window, scale: as in `stable_attention`.
        **packed: cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
            max_seqlen_q and max_seqlen_k of `stable_attention`, for thd.

    Returns:
        O in ``layout`` and q's dtype. Kept for the backward: codes and scales of Q and K (1 byte an
        element, 4 a row), V and O in 16 bits, LSE.

    Raises:
        AttentionArgumentError: a `ValueError` with the value, the allowed set and the remedy.
        NotImplementedError: inside transforms and traces of torch (`eager`).
    """
    options = Options.of(layout=layout, causal=causal, window=window, scale=scale)
    return attend(q, k, v, options, settings, **packed)


__all__ = ["attend", "backward", "forward", "int8_attention"]
