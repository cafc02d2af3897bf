"""One attention problem, described and validated once.

Shape legend: b batch (or number of packed sequences), sq/sk query/key length, h query heads,
kv_heads key/value heads, d query/key head dim, dv value head dim, tq/tk packed token counts.

Only facts that the host knows are checked here. Values that live on the device (``cu_seqlens``) are
never read, because reading them would stop the GPU; set ``STABLE_ATTENTION_DEBUG=1`` to check them
too. The kernels clamp them, so bad values give wrong numbers but never touch foreign memory.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import torch

from stable_attention.arguments import (
    OFF_BY_ONE,
    AttentionArgumentError,
    check_flags,
    check_numbers,
    choose,
    integer,
    require,
    show,
    sure,
    window_bounds,
)

LAYOUTS = ("bshd", "sbhd", "bhsd", "thd")
DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
UNLIMITED = -1
# The largest logical extent: positions and tile starts are 32-bit inside the kernels.
MAX_LENGTH = 2**31 - 2**12
# How far apart positions that only the device knows may lie where there is a window.
MAX_DISTANCE = 2**29

# Offsets inside a tile are 32-bit: rows of the tallest one, and how far apart its first and last
# may start, a head dim before the end.
MAX_TILE_ROWS = 256
MAX_TILE_EXTENT = 2**31 - MAX_HEAD_DIM

Position = int | torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A validated attention problem: everything a launcher needs besides the tensors themselves."""

    layout: str
    dtype: torch.dtype
    batch: int
    """Batch size; for ``thd`` the number of packed sequences."""
    sq: int
    """Query length; for ``thd`` the upper bound ``max_seqlen_q``."""
    sk: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    tq: int
    """Query tokens in memory for ``thd``, else ``batch * sq``."""
    tk: int
    scale: float
    window_left: int = UNLIMITED
    """Keys visible before the aligned diagonal, ``UNLIMITED`` for all."""
    window_right: int = UNLIMITED
    """Keys visible after the aligned diagonal; causal is 0."""
    softcap: float = 0.0
    has_sinks: bool = False
    dropout_p: float = 0.0
    stabilizer: str = "compensated"
    residual: str = "bf16"
    deterministic: bool = False

    @property
    def varlen(self) -> bool:
        return self.layout == "thd"

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads


def dims(x: torch.Tensor, layout: str) -> tuple[int, int, int, int]:
    """(batch, sequence, heads, head dim) of a tensor; ``thd`` counts as batch 1."""
    if layout == "bshd":
        return x.shape[0], x.shape[1], x.shape[2], x.shape[3]
    if layout == "sbhd":
        return x.shape[1], x.shape[0], x.shape[2], x.shape[3]
    if layout == "bhsd":
        return x.shape[0], x.shape[2], x.shape[1], x.shape[3]
    return 1, x.shape[0], x.shape[1], x.shape[2]


def row_shape(layout: str, x: torch.Tensor) -> tuple[int, ...]:
    """The shape of what has one number a query row and head (LSE, delta) of x in a layout."""
    b, s, h, _ = dims(x, layout)
    return (h, s) if layout == "thd" else (b, h, s)


def strides(x: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """(batch, sequence, head) strides in elements; a packed tensor has batch stride 0."""
    s = x.stride()
    if layout == "bshd":
        return s[0], s[1], s[2]
    if layout == "sbhd":
        return s[1], s[0], s[2]
    if layout == "bhsd":
        return s[0], s[2], s[1]
    return 0, s[0], s[1]


def shape(layout: str, *, batch: int, length: int, heads: int, d: int) -> tuple[int, ...]:
    """The shape of a tensor in a layout, the inverse of `dims`."""
    return {
        "bshd": (batch, length, heads, d),
        "sbhd": (length, batch, heads, d),
        "bhsd": (batch, heads, length, d),
        "thd": (length, heads, d),
    }[layout]


def tokens_are_close(x: torch.Tensor, layout: str) -> bool:
    """Whether 32-bit offsets inside a tile reach all its rows (where it starts is 64-bit)."""
    return _reached(strides(x, layout)[1], dims(x, layout)[1])


def _reached(step: int, length: int) -> bool:
    return step * MAX_TILE_ROWS < MAX_TILE_EXTENT or step * (length - 1) < MAX_TILE_EXTENT


def _check_step(name: str, step: int, length: int) -> None:
    if not _reached(step, length):
        raise AttentionArgumentError(
            f"{name}'s stride from token to token",
            step,
            f"below {MAX_TILE_EXTENT // MAX_TILE_ROWS}",
            "Call .contiguous() on it; if tokens themselves are that large, cut the batch.",
        )


def check_token_stride(name: str, x: torch.Tensor, layout: str) -> None:
    """Raise `AttentionArgumentError` unless `tokens_are_close`."""
    _check_step(name, strides(x, layout)[1], dims(x, layout)[1])


def readable(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x, or a contiguous copy where kernels could not address it: autograd's dO has any strides."""
    return x if x.stride(-1) == 1 and tokens_are_close(x, layout) else x.contiguous()


def _bounds_that_hide(
    left: int,
    right: int,
    *,
    sq: int,
    sk: int,
    buffers: tuple[int, int],
    positions: tuple[Position, Position] | None,
) -> tuple[int, int]:
    """The window without bounds that hide no key from any query.

    Kernels add a bound to positions in 32 bits, where a huge one overflows into a wrong mask. Of
    what remains, the sums fit: a left bound only meets queries behind it, a right one keys ahead.
    ``buffers`` are the lengths in memory: they decide where sq and sk come from data.
    """
    if left <= 0 and right <= 0:
        return left, right
    most = MAX_LENGTH
    if positions is None:
        idle = (
            sure(left >= sk, otherwise=False) or left >= buffers[1],
            sure(right >= sq, otherwise=False) or right >= buffers[0],
        )
    elif any(isinstance(p, torch.Tensor) for p in positions):
        most = MAX_DISTANCE
        idle = left >= sq + MAX_DISTANCE, right >= sk + MAX_DISTANCE
    else:
        shift = int(positions[0]) - int(positions[1])
        # Chunks keep other idle bounds: one kernel serves all pairs of a ring.
        far = abs(shift) + max(left, right) + sq + sk > MAX_LENGTH
        idle = far and left >= sq + shift, far and right >= sk - shift
    require(
        sure(sq + sk <= most, otherwise=False) or sum(buffers) <= most,
        "length of q plus length of k",
        lambda: sq + sk,
        f"<= {most} with a window",
        "Cut it in chunks, or give max_seqlen_q and max_seqlen_k.",
    )
    return UNLIMITED if idle[0] else left, UNLIMITED if idle[1] else right


def check_rank(name: str, x: object, layout: str) -> None:
    """`AttentionArgumentError` unless x is a tensor with the dimensions of a layout."""
    if not isinstance(x, torch.Tensor):
        raise AttentionArgumentError(name, show(x), "a tensor", "Pass torch tensors.")
    rank = 3 if layout == "thd" else 4
    if x.dim() != rank:
        raise AttentionArgumentError(
            f"{name}.dim()",
            x.dim(),
            f"{rank} for layout {layout!r}",
            "Name the layout the tensors really have.",
        )


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Rank, dtype, device and stride rules of q, k and v."""
    choose("layout", layout, LAYOUTS)
    for name, x in (("q", q), ("k", k), ("v", v)):
        # Plain conditions: every call comes past, and texts of devices and dtypes take longer.
        check_rank(name, x, layout)
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise AttentionArgumentError(
                f"{name}.dtype",
                x.dtype,
                "torch.bfloat16 or torch.float16, the same for q, k and v",
                "Cast the inputs; for float32 or float64 use stable_attention.reference.",
            )
        if x.device != q.device:
            raise AttentionArgumentError(
                f"{name}.device",
                x.device,
                f"q's device {q.device}",
                "Move the tensors to one device.",
            )
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            raise AttentionArgumentError(
                f"{name}.stride(-1)",
                x.stride(-1),
                "1 (the head dimension is contiguous)",
                "Call .contiguous() on it; every other stride is free.",
            )
        check_token_stride(name, x, layout)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    bq, _, h, d = dims(q, layout)
    bk, sk, kv_heads, dk = dims(k, layout)
    bv, sv, v_heads, dv = dims(v, layout)
    require(
        bk == bq and bv == bq, "batch of k, v", (bk, bv), lambda: f"q's {bq}", "Check the layout."
    )
    require(sv == sk, "length of v", sv, lambda: f"k's length {sk}", "Check the layout.")
    require(v_heads == kv_heads, "heads of v", v_heads, f"k's {kv_heads}", "Check the layout.")
    require(dk == d, "head dim of k", dk, f"q's head dim {d}", "Only v may differ.")
    require(
        kv_heads > 0 and h % kv_heads == 0,
        "heads of q",
        h,
        f"a multiple of the {kv_heads} key/value heads",
        "Grouped-query attention shares each key/value head among equally many query heads.",
    )
    for name, size in (("head dim of q and k", d), ("head dim of v", dv)):
        require(
            8 <= size <= MAX_HEAD_DIM and size % 8 == 0,
            name,
            size,
            f"8..{MAX_HEAD_DIM} in steps of 8",
            "Pad with zeros (flash_compat does) and pass the unpadded scale.",
        )


def _check_cu(name: str, cu: torch.Tensor, like: torch.Tensor, total: int) -> None:
    require(
        isinstance(cu, torch.Tensor)
        and cu.dim() == 1
        and cu.dtype == torch.int32
        and cu.device == like.device
        and cu.numel() > 0,
        name,
        lambda: show(cu),
        f"a 1-D torch.int32 tensor of b + 1 offsets on {like.device}",
        "Build it with torch.tensor(..., dtype=torch.int32, device=q.device).",
    )
    require(cu.is_contiguous(), f"{name}.stride(0)", cu.stride(0), "1", "Call .contiguous().")
    if os.environ.get("STABLE_ATTENTION_DEBUG") == "1":
        values = cu.tolist()
        require(
            all(a <= b for a, b in itertools.pairwise(values))
            and values[0] >= 0
            and values[-1] <= total,
            name,
            values,
            f"non-decreasing offsets in 0..{total}",
            "Offsets count tokens and the last one is the number of tokens used.",
        )


def _batch_of(
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    layout: str,
) -> int:
    if layout != "thd":
        for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
            require(
                cu is None, name, "given", f"None for layout {layout!r}", "Use layout='thd' for it."
            )
        return dims(q, layout)[0]
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        require(
            cu is not None, name, None, "an int32 tensor for layout 'thd'", "Pass both offsets."
        )
    assert cu_q is not None and cu_k is not None
    _check_cu("cu_seqlens_q", cu_q, q, q.shape[0])
    _check_cu("cu_seqlens_k", cu_k, k, k.shape[0])
    require(
        cu_q.numel() == cu_k.numel(),
        "cu_seqlens_k.numel()",
        cu_k.numel(),
        lambda: f"cu_seqlens_q's {cu_q.numel()}",
        "Both describe the same sequences.",
    )
    return cu_q.numel() - 1


def _longest(name: str, bound: object, length: int) -> int:
    """The bound of the longest packed sequence, at most the buffer's length.

    Without a bound every sequence may be as long as that: more empty tiles, no sync.
    """
    if bound is None:
        return length
    allowed, remedy = "None or an integer >= 0", "It bounds the longest sequence."
    most = integer(name, bound, allowed, remedy)
    require(sure(most >= 0, otherwise=True), name, most, allowed, remedy)
    if torch.compiler.is_compiling():
        torch._check(most >= 0)
        # Dynamo of torch 2.11 cannot trace sym_min; traced itself, min() is that.
        if not torch.compiler.is_dynamo_compiling():
            return torch.sym_min(most, length)
    return min(most, length)


def _check_sinks(sinks: torch.Tensor | str, heads: int, device: torch.device) -> None:
    if isinstance(sinks, str):
        ok = sinks == OFF_BY_ONE
    else:
        ok = (
            isinstance(sinks, torch.Tensor)
            and sinks.shape == (heads,)
            and sinks.is_floating_point()
            and sinks.device == device
        )
    require(
        ok,
        "sinks",
        lambda: show(sinks),
        f"None, {OFF_BY_ONE!r} or a floating tensor of shape ({heads},) on {device}",
        "One logit per query head.",
    )


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | str | None = None,
    dropout_p: float = 0.0,
    stabilizer: str = "compensated",
    residual: str = "bf16",
    deterministic: bool = False,
    positions: tuple[Position, Position] | None = None,
) -> Problem:
    """Validate every host-known fact and return the `Problem`.

    ``positions`` are those of row 0 of q and of k where they are chunks of a longer sequence.
    Raises `AttentionArgumentError` (a `ValueError`) naming value, allowed set and remedy.
    """
    check_tensors(q, k, v, layout)
    _check_shapes(q, k, v, layout)
    batch = _batch_of(cu_seqlens_q, cu_seqlens_k, q, k, layout)
    _, lq, heads, d = dims(q, layout)
    _, lk, kv_heads, _ = dims(k, layout)
    dv = v.shape[-1]
    sq, sk = lq, lk
    if layout == "thd":
        sq = _longest("max_seqlen_q", max_seqlen_q, lq)
        sk = _longest("max_seqlen_k", max_seqlen_k, lk)
    token = dv if layout == "bhsd" else heads * dv * (batch if layout == "sbhd" else 1)
    _check_step("the output", token, lq)
    for name, value in (("length of q", lq), ("length of k", lk)):
        require(value <= MAX_LENGTH, name, value, f"<= {MAX_LENGTH}", "Cut it in chunks.")
    check_flags(causal=causal, deterministic=deterministic)
    scale, softcap, dropout_p = check_numbers(
        scale=d**-0.5 if scale is None else scale,
        softcap=softcap,
        dropout_p=dropout_p,
        stabilizer=stabilizer,
        residual=residual,
    )
    left, right = window_bounds(causal, window)
    left, right = _bounds_that_hide(
        left, right, sq=sq, sk=sk, buffers=(lq, lk), positions=positions
    )
    if sinks is not None:
        _check_sinks(sinks, heads, q.device)
    return Problem(
        layout=layout,
        dtype=q.dtype,
        batch=batch,
        sq=sq,
        sk=sk,
        heads=heads,
        kv_heads=kv_heads,
        d=d,
        dv=dv,
        tq=lq if layout == "thd" else batch * lq,
        tk=lk if layout == "thd" else batch * lk,
        scale=scale,
        window_left=left,
        window_right=right,
        softcap=softcap,
        has_sinks=sinks is not None,
        dropout_p=dropout_p,
        stabilizer=stabilizer,
        residual=residual,
        deterministic=deterministic,
    )
