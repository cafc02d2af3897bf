"""Checks of the tensors besides q, k and v, which become the `Extras` of a call.

Offsets and bounds of packed sequences, sinks, dropout's seed, positions of chunks. As in
`describe`, values on the device are not read.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from stable_attention.layouts import dims
from stable_attention.problem import (
    AttentionArgumentError,
    Problem,
    integer,
    require,
    show,
    sure,
)
from stable_attention.reference.geometry import sequences as sequences_of

OFF_BY_ONE = "off-by-one"
GLOBAL = "It is global."
"""Remedy for a wrong position."""

Position = int | torch.Tensor


def in_memory(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, or its values where memory holds their negative: kernels read memory."""
    return None if x is None else x.resolve_neg()


def sequences(
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    layout: str,
) -> int | None:
    """How many sequences ``thd`` packs; None for the other layouts."""
    both = (("cu_seqlens_q", cu_q, q), ("cu_seqlens_k", cu_k, k))
    for name, cu, _ in both:
        if layout != "thd":
            allowed = f"None for layout {layout!r}"
            require(cu is None, name, "given", allowed, "Use layout='thd' for it.")
        else:
            allowed = "an int32 tensor for layout 'thd'"
            require(cu is not None, name, None, allowed, "Pass both offsets.")
    if cu_q is None or cu_k is None:
        return None
    for name, cu, x in both:
        _check_offsets(name, cu, x)
    require(
        cu_q.numel() == cu_k.numel(),
        "cu_seqlens_k.numel()",
        cu_k.numel(),
        lambda: f"cu_seqlens_q's {cu_q.numel()}",
        "Both describe the same sequences.",
    )
    return cu_q.numel() - 1


def _numbers(x: Any, device: torch.device) -> bool:
    """Whether x is one int32 a packed sequence, where the kernels are."""
    return (
        isinstance(x, torch.Tensor)
        and x.dim() == 1
        and x.dtype == torch.int32
        and x.device == device
    )


def _check_offsets(name: str, cu: Any, x: torch.Tensor) -> None:
    require(
        _numbers(cu, x.device) and cu.numel() > 0,
        name,
        lambda: show(cu),
        f"a 1-D torch.int32 tensor of b + 1 offsets on {x.device}",
        "Build it with torch.tensor(..., dtype=torch.int32, device=q.device).",
    )
    require(cu.is_contiguous(), f"{name}.stride(0)", cu.stride(0), "1", "Call .contiguous().")


def check_values(
    lengths: tuple[int, int],
    longest: tuple[int, int],
    tensors: tuple[torch.Tensor | None, ...],
    written: tuple[bool, bool],
) -> None:
    """`AttentionArgumentError` for offsets, starts and bounds that do not fit; stops a GPU.

    ``written``: whether O or gradients are written at the tokens of q, and of k.
    """
    _, *found = zip(*sequences_of(*lengths, *tensors), strict=True)
    for name, bound, slices, own in zip("qk", longest, found, written, strict=True):
        spans = sorted((x.start, x.stop) for x in slices if x.stop > x.start)
        apart = all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        allowed, remedy = "sequences that share no token", "One would overwrite the other."
        require(apart or not own, f"cu_seqlens_{name}_padded", spans, allowed, remedy)
        most = max(x.stop - x.start for x in slices)
        allowed = f"at least {most}, the longest"
        require(most <= bound, f"max_seqlen_{name}", bound, allowed, "It would leave tokens out.")


def check_starts(name: str, x: Any, problem: Problem, device: torch.device) -> None:
    """`AttentionArgumentError` unless the kernels can read where sequences start."""
    ok = problem.varlen and _numbers(x, device)
    if not (ok and x.is_contiguous() and x.numel() >= problem.batch):
        steps = f" with strides {x.stride()}" if isinstance(x, torch.Tensor) else ""
        raise AttentionArgumentError(
            name,
            f"{show(x)}{steps} with layout {problem.layout!r}",
            f"a contiguous int32 tensor of at least {problem.batch} starts on {device}, with "
            "layout 'thd'",
            "Leave it out where sequences lie back to back.",
        )


def longest(name: str, bound: object, x: torch.Tensor, layout: str) -> int:
    """The bound of the longest packed sequence, at most the buffer's length.

    Without a bound every sequence may be as long as that: more empty tiles, no sync.
    """
    length = dims(x, layout)[1]
    if bound is None:
        return length
    only = f"None for layout {layout!r}"
    require(layout == "thd", name, lambda: show(bound), only, "It bounds packed sequences.")
    allowed, remedy = "None or an integer >= 0", "It bounds the longest sequence."
    most = integer(name, bound, allowed, remedy)
    require(sure(most >= 0, otherwise=True), name, most, allowed, remedy)
    if torch.compiler.is_compiling():
        torch._check(most >= 0)
        # Dynamo of torch 2.11 cannot trace sym_min; traced itself, min() is that.
        if not torch.compiler.is_dynamo_compiling():
            return torch.sym_min(most, length)
    return min(most, length)


def sink_logits(sinks: torch.Tensor | str, heads: int, device: torch.device) -> torch.Tensor:
    """Sinks as a contiguous tensor [h]."""
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
    if isinstance(sinks, str):
        return torch.zeros(heads, dtype=torch.float32, device=device)
    return sinks.resolve_neg().contiguous()


def check_seed(seed: object) -> int:
    """A dropout seed that is a number, as an int that fits int64; 0 for None and tensors."""
    if seed is None or isinstance(seed, torch.Tensor):
        return 0
    allowed = "None, an int64 scalar tensor, or an integer in -2**63..2**63 - 1"
    value = integer("dropout_seed", seed, allowed, "Cut it to 63 bits.")
    require(-(2**63) <= value < 2**63, "dropout_seed", value, allowed, "Cut it to 63 bits.")
    return value


def dropout_seed_tensor(seed: torch.Tensor | int | None, like: torch.Tensor) -> torch.Tensor:
    """The dropout seed as an int64 scalar on ``like``'s device, without a device sync."""
    if seed is None:
        return torch.randint(0, 2**62, (), dtype=torch.int64, device=like.device)
    if not isinstance(seed, torch.Tensor):
        return torch.full((), check_seed(seed), dtype=torch.int64, device=like.device)
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != like.device:
        raise AttentionArgumentError(
            "dropout_seed",
            show(seed),
            f"None, an int or an int64 scalar tensor on {like.device}",
            "The kernel reads it on the device.",
        )
    return seed.resolve_neg()


def places(positions: tuple[Position, Position]) -> tuple[int | None, int | None]:
    """Positions of row 0 of q and of k as ints, both None where one is a tensor."""
    found = [
        None
        if isinstance(p, torch.Tensor)
        else integer(name, p, "an int, or an int32 tensor of a position a sequence", GLOBAL)
        for name, p in zip(("q_position", "k_position"), positions, strict=True)
    ]
    return (None, None) if None in found else (found[0], found[1])


def position_tensors(
    positions: tuple[Position, Position], batch: int, device: torch.device
) -> list[torch.Tensor]:
    """Positions as int32 tensors [b], one of which may be given as an int."""
    like = next(p for p in positions if isinstance(p, torch.Tensor))
    found = []
    for name, p in zip(("q_position", "k_position"), positions, strict=True):
        x = p if isinstance(p, torch.Tensor) else torch.full_like(like, p)
        if not _numbers(x, device) or len(x) != batch:
            raise AttentionArgumentError(
                name,
                show(x),
                f"an int, or an int32 tensor of shape ({batch},) on {device}",
                "One global position a sequence.",
            )
        found.append(x.resolve_neg().contiguous())
    return found
