"""Checks of a call's tensors: from `Options` and tensors to a `Problem` and `Extras` (extras.py).

Only facts that the host knows are checked. Values that live on the device (``cu_seqlens``) are
never read, because reading them would stop the GPU; set ``STABLE_ATTENTION_DEBUG=1`` to check them
too. The kernels clamp them, so bad values give wrong numbers but never touch foreign memory.

Shape legend: as in `problem`.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from stable_attention import extras
from stable_attention.extras import Position
from stable_attention.layouts import (
    MAX_HEAD_DIM,
    MAX_TILE_EXTENT,
    MAX_TILE_ROWS,
    dims,
    extents,
    reached,
    strides,
)
from stable_attention.pieces import PLAIN
from stable_attention.problem import (
    KEPT,
    LARGEST,
    SMALLEST,
    UNLIMITED,
    AttentionArgumentError,
    Extras,
    Options,
    Problem,
    build,
    constant,
    remembered,
    require,
    show,
    sure,
)
from stable_attention.stabilizers import KNOWN

DTYPES = (torch.bfloat16, torch.float16)
# The largest logical extent: positions and tile starts are 32-bit inside the kernels.
MAX_LENGTH = 2**31 - 2**12
# How far apart positions that only the device knows may lie where there is a window.
MAX_DISTANCE = 2**29

_checked: dict[tuple[object, ...], Problem] = {}
"""Calls of q, k and v alone that passed every check, by all that the checks look at."""


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    *,
    sinks: torch.Tensor | str | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_seed: torch.Tensor | int | None = None,
    positions: tuple[Position, Position] | None = None,
) -> tuple[Problem, Extras]:
    """Check every fact that the host knows; the `Problem` and the other tensors of the call.

    ``positions`` are those of row 0 of q and of k where they are chunks of a longer sequence.

    Raises:
        AttentionArgumentError: names value, allowed set and remedy.
    """
    alone = (
        sinks is cu_seqlens_q is cu_seqlens_k is cu_seqlens_q_padded is cu_seqlens_k_padded is None
        and max_seqlen_q is max_seqlen_k is dropout_seed is positions is None
    )
    signature = _signature(q, k, v, options) if alone else None
    if signature is not None and (known := _checked.get(signature)) is not None:
        return known, Extras()
    layout = options.layout
    _check_tensors(q, k, v, layout)
    sequences = extras.sequences(cu_seqlens_q, cu_seqlens_k, q, k, layout)
    sq = extras.longest("max_seqlen_q", max_seqlen_q, q, layout)
    sk = extras.longest("max_seqlen_k", max_seqlen_k, k, layout)
    places = None if positions is None else extras.places(positions)
    problem = _validated(
        options, q.dtype, q.shape, k.shape, v.shape, sequences, sq, sk, sinks is not None, places
    )
    if sinks is not None:
        sinks = extras.sink_logits(sinks, problem.heads, q.device)
    for name, x in (("q", cu_seqlens_q_padded), ("k", cu_seqlens_k_padded)):
        if x is not None:
            extras.check_starts(f"cu_seqlens_{name}_padded", x, problem, q.device)
    told = (
        extras.in_memory(cu_seqlens_q), extras.in_memory(cu_seqlens_k),
        extras.in_memory(cu_seqlens_q_padded), extras.in_memory(cu_seqlens_k_padded),
    )  # fmt: skip
    if sequences and os.environ.get("STABLE_ATTENTION_DEBUG") == "1":
        grads = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
        extras.check_values((len(q), len(k)), (sq, sk), told, (True, grads))
    extras.check_seed(dropout_seed)
    seed = extras.dropout_seed_tensor(dropout_seed, q) if problem.dropout_p > 0 else None
    pos_q = pos_k = None
    if positions is not None and places == (None, None):
        pos_q, pos_k = extras.position_tensors(positions, problem.batch, q.device)
    if signature is not None:
        if len(_checked) >= KEPT:
            _checked.clear()
        _checked[signature] = problem
    return problem, Extras(sinks, *told, seed, pos_q, pos_k)


def _signature(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[object, ...] | None:
    """All that the checks of a call of q, k and v alone look at; None: such a call is not kept."""
    if options.dropout_p > 0 or torch.compiler.is_compiling():
        return None
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    try:
        return (
            options, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        )  # fmt: skip
    except RuntimeError:  # nested or sparse
        return None


# Keywords of a call beside its `Options`, but for those that chunks do without or have apart.
OF_TENSORS = tuple(
    name for name in describe.__kwdefaults__ or () if name not in ("sinks", "positions")
)


def check_rank(name: str, x: object, layout: str) -> None:
    """`AttentionArgumentError` unless x is a tensor with the dimensions of a layout."""
    if not isinstance(x, torch.Tensor):
        raise AttentionArgumentError(name, show(x), "a tensor", "Pass torch tensors.")
    if x.is_nested or x.layout is not torch.strided:
        remedy = "Pass its values: of sequences packed, as layout='thd' with cu_seqlens."
        raise AttentionArgumentError(name, "nested or sparse", "a dense tensor", remedy)
    # Memory holds minus its values, and kernels read memory. A compiler makes none.
    if not torch.compiler.is_compiling() and x.is_neg():
        remedy = f"Pass {name}.resolve_neg()."
        raise AttentionArgumentError(name, "a negative view", "values as memory has them", remedy)
    rank = 3 if layout == "thd" else 4
    if x.dim() != rank:
        raise AttentionArgumentError(
            f"{name}.dim()",
            x.dim(),
            f"{rank} for layout {layout!r}",
            "Name the layout the tensors really have.",
        )


def check_token_stride(name: str, x: torch.Tensor, layout: str) -> None:
    """`AttentionArgumentError` unless kernels can address all tokens of x."""
    _check_step(name, strides(x, layout)[1], dims(x, layout)[1])


def _check_step(name: str, step: int, length: int) -> None:
    if not reached(step, length):
        raise AttentionArgumentError(
            f"{name}'s stride from token to token",
            step,
            f"below {MAX_TILE_EXTENT // MAX_TILE_ROWS}",
            "Call .contiguous() on it; if tokens themselves are that large, cut the batch.",
        )


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Rank, dtype, device and stride rules of q, k and v."""
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


@remembered
def _validated(
    options: Options,
    dtype: torch.dtype,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    sequences: int | None,
    sq: int,
    sk: int,
    has_sinks: bool,
    places: tuple[int | None, int | None] | None,
) -> Problem:
    """The `Problem` of tensors of these shapes; ``places`` are those of `extras.places`."""
    _check_shapes(q, k, v, options.layout)
    batch, lq, heads, d = extents(q, options.layout)
    lk = extents(k, options.layout)[1]
    token = v[-1] if options.layout == "bhsd" else heads * v[-1]
    _check_step("the output", token * (batch if options.layout == "sbhd" else 1), lq)
    for name, length in (("length of q", lq), ("length of k", lk)):
        require(length <= MAX_LENGTH, name, length, f"<= {MAX_LENGTH}", "Cut it in chunks.")
    scale = constant(d**-0.5) if options.scale is None else options.scale
    if options.softcap > 0:
        ratio = scale / options.softcap
        allowed, remedy = "2**-126..2**127", "Choose a softcap of the size of the logits."
        require(SMALLEST <= ratio <= LARGEST, "scale / softcap", ratio, allowed, remedy)
    if KNOWN[options.stabilizer].projection:
        _check_projection(options, places)
    left, right = _bounds_that_hide(
        options.window_left, options.window_right, sq=sq, sk=sk, buffers=(lq, lk), places=places
    )
    found: dict[str, Any] = {"scale": scale, "window_left": left, "window_right": right}
    if places is not None:
        found["chunked"] = True
        for name, place, length in (("q", places[0], sq), ("k", places[1], sk)):
            if place is not None:
                if not 0 <= place <= MAX_LENGTH - length:
                    allowed = f"0 <= position <= {MAX_LENGTH} - {length} (the length)"
                    name = f"{name}_position"
                    raise AttentionArgumentError(name, place, allowed, extras.GLOBAL)
                found[f"pos_{name}"] = place
    return build(options, dtype, q, k, v, sequences, sq, sk, has_sinks, **found)


def _check_projection(options: Options, places: object) -> None:
    """`AttentionArgumentError` for what leaves rows of dS that need not sum to zero."""
    plain = "compensated" if KNOWN[options.stabilizer].keeps_o_lo else "none"
    with_ = f"with stabilizer={options.stabilizer!r}"
    require(
        options.softcap == 0,
        "softcap",
        options.softcap,
        f"0 {with_}: the derivative of tanh comes after the sum that is known",
        f"Use stabilizer={plain!r} with a softcap.",
    )
    # Chunks make dK before a row's sum is known: delta has to be exact without it.
    require(
        places is None or options.stabilizer == "compensated_projected",
        "stabilizer",
        repr(options.stabilizer),
        "'compensated_projected' or one that does not project, for chunks",
        "A row's sum is known after its last chunk. Use stabilizer='compensated_projected'.",
    )


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size, layout: str) -> None:
    bq, _, h, d = extents(q, layout)
    bk, sk, kv_heads, dk = extents(k, layout)
    bv, sv, v_heads, dv = extents(v, layout)
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


def _bounds_that_hide(
    left: int,
    right: int,
    *,
    sq: int,
    sk: int,
    buffers: tuple[int, int],
    places: tuple[int | None, int | None] | None,
) -> tuple[int, int]:
    """The window without bounds that hide no key from any query.

    Kernels add a bound to positions in 32 bits, where a huge one overflows into a wrong mask. Of
    what remains, the sums fit: a left bound only meets queries behind it, a right one keys ahead.
    ``buffers`` are the lengths in memory: they decide where sq and sk come from data.
    """
    if left <= 0 and right <= 0:
        return left, right
    most = MAX_LENGTH
    if places is None:
        idle = (
            sure(left >= sk, otherwise=False) or left >= buffers[1],
            sure(right >= sq, otherwise=False) or right >= buffers[0],
        )
    elif places[0] is None or places[1] is None:
        most = MAX_DISTANCE
        idle = left >= sq + MAX_DISTANCE, right >= sk + MAX_DISTANCE
    else:
        shift = places[0] - places[1]
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
