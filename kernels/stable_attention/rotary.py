"""Rotary position embedding in one kernel: float32 arithmetic and one rounding of each result.

Frameworks multiply by a cosine and a sine that were rounded to the tensor's type, and round both
products and their sum. Here angles, cosines, sines, products and sums are float32. The backward
pass is the rotation by the opposite angles and needs nothing of the forward's input.

Shape legend: x [..., h, d], contiguous in d alone: [s, b, h, d] (sequence first) or packed
[t, h, d]; n one token of all, pair i < r / 2 of the r rotated channels. Channels from r on are
copied.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stable_attention import numerics  # noqa: F401  (exact BF16 under the interpreter)
from stable_attention.eager import eager
from stable_attention.once import once_differentiable
from stable_attention.problem import number, show
from stable_attention.triton.launches import launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = 16
"""Heads of one program."""


@triton.jit(do_not_specialize=("batch", "heads"))
def rotary_kernel(
    x_ptr, out_ptr, angle_ptr, position_ptr,
    stride_s, stride_b, stride_h, batch, heads, scale,
    D: tl.constexpr, R: tl.constexpr, BP: tl.constexpr, BREST: tl.constexpr, BH: tl.constexpr,
    PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, ANGLE_STEP: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    s = n // batch
    row = s
    if HAS_POSITIONS:
        row = tl.load(position_ptr + s)
    pair = tl.arange(0, BP)
    turned = pair < R // 2
    angle = tl.load(angle_ptr + row * R + pair * ANGLE_STEP, mask=turned, other=0.0)
    cos = (tl.cos(angle) * scale)[None, :]
    sin = (tl.sin(angle) * scale)[None, :]
    if BACKWARD:
        sin = -sin
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    source = x_ptr + s.to(tl.int64) * stride_s + (n % batch).to(tl.int64) * stride_b
    source = source + head[:, None] * stride_h  # [BH, 1]
    target = out_ptr + (n.to(tl.int64) * heads + head[:, None]) * D
    mask = (head < heads)[:, None] & turned[None, :]
    if PAIRS_IN:
        first, second = 2 * pair[None, :], 2 * pair[None, :] + 1
    else:
        first, second = pair[None, :], pair[None, :] + R // 2
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    if PAIRS_OUT:
        first, second = 2 * pair[None, :], 2 * pair[None, :] + 1
    else:
        first, second = pair[None, :], pair[None, :] + R // 2
    kind = out_ptr.dtype.element_ty
    tl.store(target + first, (a * cos - b * sin).to(kind), mask=mask)
    tl.store(target + second, (b * cos + a * sin).to(kind), mask=mask)
    if R < D:
        rest = R + tl.arange(0, BREST)[None, :]
        mask = (head < heads)[:, None] & (rest < D)
        tl.store(target + rest, tl.load(source + rest, mask=mask, other=0.0), mask=mask)


def _arguments(
    x: torch.Tensor,
    out: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor | None,
    *,
    form: tuple[bool, bool],
    scale: float,
    backward: bool,
) -> Any:
    *tokens, heads, d = x.shape
    batch = tokens[1] if len(tokens) == 2 else 1
    r = angles.shape[-1]
    reads, writes = form[::-1] if backward else form
    block = min(HEADS, triton.next_power_of_2(heads))
    positional = (
        x, out, angles, positions,
        x.stride(0), x.stride(1) if len(tokens) == 2 else 0, x.stride(-2), batch, heads, scale,
    )  # fmt: skip
    named = {
        "D": d, "R": r, "BP": triton.next_power_of_2(r // 2),
        "BREST": triton.next_power_of_2(max(1, d - r)), "BH": block,
        "PAIRS_IN": reads, "PAIRS_OUT": writes, "ANGLE_STEP": 2 if form[1] else 1,
        "HAS_POSITIONS": positions is not None, "BACKWARD": backward, "num_warps": 4,
    }  # fmt: skip
    return (tokens[0] * batch, triton.cdiv(heads, block)), positional, named


def _turn(
    x: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor | None,
    *,
    form: tuple[bool, bool],
    scale: float,
    backward: bool,
) -> torch.Tensor:
    x = x.resolve_neg()
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch(
            rotary_kernel,
            (form, scale, backward),
            (x, out, angles, positions),
            lambda *tensors: _arguments(*tensors, form=form, scale=scale, backward=backward),
        )
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, angles, positions, form, scale) -> torch.Tensor:
        ctx.save_for_backward(angles, positions)
        ctx.form, ctx.scale = form, scale
        return _turn(x, angles, positions, form=form, scale=scale, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # They were made so: hooks of saved tensors may have laid them out anew.
        angles, positions = ctx.saved_tensors
        angles = angles.contiguous()
        positions = None if positions is None else positions.contiguous()
        dx = _turn(grads[0], angles, positions, form=ctx.form, scale=ctx.scale, backward=True)
        return dx, None, None, None, None


@eager
def rotary(
    x: torch.Tensor,
    angles: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    regroup: bool = False,
    scale: float = 1.0,
) -> torch.Tensor:
    """Turn the first r channels of every head by its token's angles.

    Args:
        x: [s, b, h, d] or [t, h, d], BF16, FP16 or FP32, any strides.
        angles: [rows, r] float32, in radians; r even and at most d. Each pair's angle stands where
            the channels of the pair do, so twice in a row. A row a position, or, without
            ``positions``, a row for each of the s (or t) tokens.
        positions: [s] or [t] int32 on the device: the row of ``angles`` of every token.
        interleaved: pairs are channels (2i, 2i + 1); else (i, i + r / 2).
        regroup: read pairs (2i, 2i + 1) and write (i, i + r / 2), as multi-latent attention does;
            the angles are those of the output.
        scale: factor of cosine and sine.

    Returns:
        Contiguous, of the shape and type of ``x``; differentiable in ``x``.

    Raises:
        ValueError: a type, a shape or a combination that this does not take.
        NotImplementedError: inside transforms and traces of torch (`eager`).
    """
    for name, y in (("x", x), ("angles", angles), ("positions", positions)):
        if not isinstance(y, torch.Tensor) and not (y is None and name == "positions"):
            raise ValueError(f"{name} is a {type(y).__name__}; allowed: tensors. Make one of it.")
    r = angles.shape[-1] if angles.dim() else 0
    if x.dtype not in DTYPES or angles.dtype != torch.float32:
        raise ValueError(
            f"rotary takes x of BF16, FP16 or FP32 and float32 angles, not {x.dtype} and "
            f"{angles.dtype}: convert them"
        )
    if x.dim() not in (3, 4) or angles.dim() != 2 or r % 2 or not 0 < r <= x.shape[-1]:
        raise ValueError(
            f"rotary takes x [s, b, h, d] or [t, h, d] and angles [rows, r] with r even and at "
            f"most d, not {tuple(x.shape)} and {tuple(angles.shape)}"
        )
    if positions is None and angles.shape[0] < x.shape[0]:
        raise ValueError(
            f"{angles.shape[0]} rows of angles for {x.shape[0]} tokens: pass a row for each, or "
            "positions"
        )
    for name, y in (("angles", angles), ("positions", positions)):
        if y is not None and y.device != x.device:
            raise ValueError(f"{name} is on {y.device}, x on {x.device}: move it there")
    if positions is not None and (
        positions.dtype != torch.int32 or positions.shape != x.shape[:1] or positions.stride(0) != 1
    ):
        raise ValueError(
            f"rotary takes contiguous int32 positions, one for each of {x.shape[0]} tokens, not "
            f"{positions.dtype} of shape {tuple(positions.shape)} and strides {positions.stride()}"
        )
    if angles.requires_grad and torch.is_grad_enabled():
        raise ValueError("rotary has no gradient for angles, and these want one: detach them")
    if interleaved and regroup:
        raise ValueError("regroup writes halves, interleaved writes pairs: choose one")
    form = (interleaved or regroup, interleaved)
    scale = number("scale", scale, "a number", "It multiplies cosine and sine.")
    angles = angles.resolve_neg().contiguous()
    positions = None if positions is None else positions.resolve_neg()
    result: torch.Tensor = _Rotary.apply(x, angles, positions, form, scale)
    return result


def packed_positions(
    cu_seqlens: torch.Tensor, tokens: int, *, cp_size: int = 1, cp_rank: int = 0
) -> torch.Tensor:
    """Position of each of this rank's packed tokens in its own sequence. No host wait.

    Args:
        cu_seqlens: [n + 1] starts of the sequences over all ranks, padding included.
        tokens: of this rank.
        cp_size, cp_rank: context parallelism; a rank holds chunks ``cp_rank`` and
            ``2 cp_size - 1 - cp_rank`` of the 2 cp_size equal chunks of every sequence.

    Returns:
        [tokens] int32. Tokens beyond the last sequence count on from its end.

    Raises:
        ValueError: a rank that is none, or offsets that are not [n + 1].
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank}; allowed: 0..{cp_size - 1}, below cp_size")
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens is {show(cu_seqlens)}; allowed: a tensor [n + 1] of offsets")
    starts = cu_seqlens.to(torch.int32) // cp_size
    token = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    which = torch.searchsorted(starts[1:-1].contiguous(), token, right=True)
    place = token - starts[which]
    if cp_size == 1:
        return place
    half = (starts[which + 1] - starts[which]) // 2
    late = place - half + (2 * cp_size - 1 - cp_rank) * half
    return torch.where(place < half, place + cp_rank * half, late)
