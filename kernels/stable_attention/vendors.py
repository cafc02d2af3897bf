"""Backward passes of other libraries that serve ours: a table, one row a vendor and its features.

Our forward keeps O's low-order part and the LSE of the rounded sum, our preprocess makes delta of
them, and a vendor's backward gets that delta by a carrier O (`triton.carrier`) or by a gradient of
LSE. Its gradients are then those of our own backward but for the order of its sums.

Rows without a carrier (one or two non-zero numbers in dO; FP16 beyond its range) are known on the
device only. To read that on the host would stop the launches of every layer, and no CUDA graph
could hold it. So our own backward is launched too, once a call, for sequences whose lengths the
carrier's kernel wrote: where all rows have a carrier they are empty, and its programs return at
once; where one has none, it overwrites the vendor's gradients.

Shape legend: as in `api`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from stable_attention import configs, dispatch, fa4
from stable_attention.layouts import dims
from stable_attention.problem import BACKWARDS, AttentionArgumentError, Extras, Problem
from stable_attention.triton.backward import backward
from stable_attention.triton.carrier import carrier

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# From each layout to [b, h, s, d] and [b, s, h, d], and back.
_TO_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}
_TO_BSHD = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
_FROM_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}
_FROM_BSHD = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vendor:
    """A backward pass and what it can do; what is not in ``features`` it is never asked."""

    name: str
    archs: frozenset[str]
    features: frozenset[str]
    head_dims: Collection[int]
    backward: Callable[..., Gradients]
    rules: Callable[[Problem], Iterator[str]] = lambda problem: iter(())
    """What else it lacks for a problem, here and now."""
    takes_dlse: bool = False
    """Has an argument for the gradient of LSE; others leave such calls to our own backward."""


def _cudnn(problem: Problem, dout, q, k, v, *, lse, delta, extras: Extras) -> Gradients:
    """torch's cuDNN attention. It copies dO where O lies otherwise: the carrier lies as dO does."""
    into = torch.empty_like(dout)
    ends = carrier(dout, delta, layout=problem.layout, into=into, sk=problem.sk)
    order = _TO_BHSD[problem.layout]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(x.permute(order) for x in (dout, q, k, v, into)), lse.unsqueeze(-1), *_no_dropout(q),
        None, None, None, problem.sq, problem.sk, 0.0, problem.causal, scale=problem.scale,
    )  # fmt: skip
    return _finished(problem, found, ends, (dout, q, k, v), lse, delta, extras)


def _flash(problem: Problem, dout, q, k, v, *, lse, delta, extras: Extras) -> Gradients:
    """torch's FlashAttention-2. It copies what is not contiguous as [b, s, h, d]."""
    batch, s, heads, d = dims(dout, problem.layout)
    into = dout.new_empty((batch, s, heads, d)).transpose(1, 2).permute(_FROM_BHSD[problem.layout])
    ends = carrier(dout, delta, layout=problem.layout, into=into, sk=problem.sk)
    order = _TO_BHSD[problem.layout]
    views = [x.permute(order) for x in (dout, q, k, v, into)]
    aten = torch.ops.aten
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *views, lse, 0.0, problem.causal, scale=problem.scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_backward(
            *views, lse, None, None, problem.sq, problem.sk, 0.0, problem.causal,
            *_no_dropout(q), scale=problem.scale,
        )  # fmt: skip
    return _finished(problem, found, ends, (dout, q, k, v), lse, delta, extras)


def _fa4(problem: Problem, dout, q, k, v, *, lse, delta, extras: Extras) -> Gradients:
    """FlashAttention-4. It takes a gradient of LSE, so delta goes there, and O is zeros.

    Every row has that: nothing to check, and a gradient of LSE is part of delta already.
    """
    order = _TO_BSHD[problem.layout]
    out = torch.zeros_like(dout)
    dout, q, k, v, out = (x.permute(order) for x in (dout, q, k, v, out))
    found = fa4.backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        -delta,
        scale=problem.scale,
        window=(problem.window_left, problem.window_right),
        deterministic=problem.deterministic,
    )
    back = _FROM_BSHD[problem.layout]
    dq, dk, dv = (x.permute(back).contiguous() for x in found)
    return dq, dk, dv


def _cudnn_rules(problem: Problem) -> Iterator[str]:
    if min(problem.sq, problem.sk) < 2:
        yield "a length of 1"


def _flash_rules(problem: Problem) -> Iterator[str]:
    if problem.deterministic and not torch.are_deterministic_algorithms_enabled():
        yield "deterministic without torch.use_deterministic_algorithms(True)"


def _fa4_rules(problem: Problem) -> Iterator[str]:
    if why := fa4.missing():
        yield why
    if problem.sq != problem.sk and "window" in dispatch.needs(problem):
        yield "window, sq != sk"


def _no_dropout(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Philox seed and offset that nobody draws with."""
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    return zero, zero


def _finished(
    problem: Problem,
    found: Gradients,
    ends: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    delta: torch.Tensor,
    extras: Extras,
) -> Gradients:
    """A vendor's gradients [b, h, s, d] in the problem's layout; our own where ``ends`` are."""
    dout, q, k, v = tensors
    back = _FROM_BHSD[problem.layout]
    dq, dk, dv = (x.permute(back).contiguous() for x in found)
    n = problem.batch + 1
    own = Extras(extras.sinks, ends[0, :n], ends[1, :n], start_q=ends[2], start_k=ends[2])
    # The portable kernels: those of Hopper know no lengths of sequences.
    return backward(
        problem, dout, q, k, v, lse=lse, delta=delta, extras=own, gradients=(dq, dk, dv)
    )


# Whatever the forward made of O, delta is ours; "paper_bf16" rounds in its backward too.
_FORWARDS = frozenset({"compensated", "dynamic_max", "none", "low_order_o", "consistent_sum"})
_COMMON = _FORWARDS | {"causal", "sinks", "gqa", "o_lo in int8 or fp32"}
_GPUS = frozenset({"sm80", "sm90", "sm100"})

VENDORS = (
    # No vendor's: our portable kernels, which multiply P and dS in two parts of the tensors' type.
    # Without a projection delta's error remains, and is the larger one.
    Vendor(
        name="own_x2",
        archs=_GPUS | {"interpreter"},
        features=frozenset(dispatch.FEATURES)
        - {"chunks", "packed chunks", "chunks with dropout", "paper_bf16", *_FORWARDS},
        head_dims=range(8, 257, 8),
        backward=backward,
        takes_dlse=True,
    ),
    Vendor(
        name="sdpa_cudnn",
        archs=_GPUS,
        features=_COMMON,
        head_dims=range(8, 129, 8),
        backward=_cudnn,
        rules=_cudnn_rules,
    ),
    Vendor(
        name="sdpa_flash",
        archs=_GPUS,
        features=_COMMON | {"deterministic"},
        head_dims=range(8, 257, 8),
        backward=_flash,
        rules=_flash_rules,
    ),
    # torch's flash attention for the CPU, beside Triton's interpreter.
    Vendor(
        name="sdpa_flash",
        archs=frozenset({"interpreter"}),
        features=_COMMON - {"gqa"} | {"deterministic"},
        head_dims=range(8, 257, 8),
        backward=_flash,
        rules=_flash_rules,
    ),
    Vendor(
        name="fa4",
        archs=frozenset({"sm90"}),
        features=_COMMON | {"window", "deterministic"},
        head_dims=(64, 96, 128, 256),
        backward=_fa4,
        takes_dlse=True,
        rules=_fa4_rules,
    ),
    # Its backward for head dim 256 takes no gradient of LSE there.
    Vendor(
        name="fa4",
        archs=frozenset({"sm100"}),
        features=_COMMON | {"window", "deterministic"},
        head_dims=(64, 128),
        backward=_fa4,
        takes_dlse=True,
        rules=_fa4_rules,
    ),
)

AUTO: dict[str, str] = {}
"""The backward that "auto" is on an architecture, for the problems it can serve: measured there to
be faster than our own, to have its errors and to repeat bit for bit. Our own where nothing stands
here: on sm90 it is the fastest of those that repeat (docs/assets/borrowed.json)."""


def lacks(row: Vendor, problem: Problem, arch: str) -> Iterator[str]:
    """What a vendor cannot do of a problem."""
    yield from sorted(set(dispatch.needs(problem)) - row.features)
    if arch not in row.archs:
        yield f"architecture {arch}"
    yield from (f"head dim {d}" for d in {problem.d, problem.dv} if d not in row.head_dims)
    yield from row.rules(problem)


def select(problem: Problem, device: torch.device) -> Vendor | None:
    """Whose backward serves a problem; None for our own.

    Raises:
        AttentionArgumentError: a vendor was asked for that cannot; with all that it lacks.
    """
    wanted = problem.backward
    if wanted == "own" or (wanted == "auto" and not AUTO):
        return None
    arch = configs.arch_of(device)
    name = AUTO.get(arch, "own") if wanted == "auto" else wanted
    rows = [row for row in VENDORS if row.name == name]
    row = next((x for x in rows if arch in x.archs), rows[0] if rows else None)
    missing = [] if row is None else list(lacks(row, problem, arch))
    if not missing:
        return row
    if wanted == "auto":
        return None
    others = [x for x in BACKWARDS if x in ("auto", "own") or x in alternatives(problem, arch)]
    raise AttentionArgumentError(
        "backward",
        f"{wanted!r}, which lacks {', '.join(missing)}",
        ", ".join(map(repr, others)),
        "Take one of them, or do without what is lacking.",
    )


def alternatives(problem: Problem, arch: str) -> list[str]:
    """Names of the vendors whose backward could serve a problem on an architecture."""
    return [row.name for row in VENDORS if not any(lacks(row, problem, arch))]
