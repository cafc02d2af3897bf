"""Which kernel set serves a problem: a table, one row a set, first match wins.

A second set for an architecture (Hopper kernels, say) is one more row above the portable one; its
three functions have the signatures of `triton.forward.forward`, `triton.preprocess.preprocess` and
`triton.backward.backward`. Whatever a row does not list in ``features`` it never sees.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import triton

from stable_attention import configs
from stable_attention.hopper import launch as hopper
from stable_attention.problem import KEPT, UNLIMITED, AttentionArgumentError, Problem, choose
from stable_attention.stabilizers import KNOWN
from stable_attention.triton.backward import backward
from stable_attention.triton.forward import forward
from stable_attention.triton.preprocess import preprocess

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECTING = tuple(name for name, kind in KNOWN.items() if kind.projection)
FEATURES = (
    "causal", "window", "softcap", "sinks", "dropout", "varlen", "gqa", "different v head dim",
    "compensated", "dynamic_max", "none", "paper_bf16", "low_order_o", "consistent_sum",
    *PROJECTING,
    "deterministic", "chunks", "packed chunks", "chunks with dropout", "dropout in a band",
    "softcap in a band", "projection with dropout", "causal, sq != sk",
    "o_lo in int8 or fp32",
)  # fmt: skip


P = ParamSpec("P")
R = TypeVar("R")


def on_device(launch: Callable[P, R]) -> Callable[P, R]:
    """``launch`` on the device of its first tensor: Triton uses the current one, whatever it is."""

    @functools.wraps(launch)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        first = arguments[0] if arguments else next(iter(named.values()))
        assert isinstance(first, torch.Tensor)
        if first.device.type != "cuda" or first.device.index == torch.cuda.current_device():
            return launch(*arguments, **named)
        with torch.cuda.device(first.device):
            return launch(*arguments, **named)

    return run


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class KernelSet:
    """One implementation of forward, preprocess and backward, and what it can do."""

    name: str
    archs: frozenset[str]
    features: frozenset[str]
    head_dims: Collection[int]
    """Of q, k and v."""
    forward: Callable[..., Any]
    preprocess: Callable[..., Any]
    backward: Callable[..., Any]
    mixed_head_dims: Collection[tuple[int, int]] | None = ()
    """Of q and k, and of v, where they differ; None: any two of ``head_dims``."""


# Triton 3.9 has removed calls of Gluon that the kernels of sm_90 make; 3.8 was not tried.
GLUON = frozenset({"sm90"} if triton.__version__.startswith(("3.6.", "3.7.")) else ())
# P K is added up nowhere on sm_90.
_OTHER_PROJECTIONS = frozenset(PROJECTING) - {"compensated_projected"}
_NOT_ON_HOPPER = frozenset(
    {
        "different v head dim", "paper_bf16",
        # At d 128 it needs 16 bytes more of shared memory than there are.
        "projection with dropout",
        *_OTHER_PROJECTIONS,
        # Of packed chunks a band per sequence is missing, of dropout keys from any position on.
        "packed chunks", "chunks with dropout",
        # The first spills 2.3 kB at d 64 and was not timed; the second took 1.6 times as long.
        "dropout in a band", "softcap in a band",
    }
)  # fmt: skip
_NOT_FORWARD = frozenset({"dynamic_max", "o_lo in int8 or fp32", "dropout", "softcap"})
# Of the head dims beside 64 and 128; nobody has tried them there.
_NOT_BESIDE_64_AND_128 = _OTHER_PROJECTIONS | {
    "softcap", "softcap in a band", "dropout", "dropout in a band", "projection with dropout",
    "paper_bf16", "chunks", "packed chunks", "chunks with dropout",
}  # fmt: skip
KERNEL_SETS = (
    KernelSet(
        name="hopper",
        archs=GLUON,
        features=frozenset(FEATURES) - _NOT_ON_HOPPER - _NOT_FORWARD,
        head_dims=(64, 128),
        forward=hopper.forward,
        preprocess=preprocess,
        backward=hopper.backward,
    ),
    KernelSet(
        name="hopper_backward",
        archs=GLUON,
        features=frozenset(FEATURES) - _NOT_ON_HOPPER,
        head_dims=(64, 128),
        forward=forward,
        preprocess=preprocess,
        backward=hopper.backward,
    ),
    KernelSet(
        name="hopper_forward",
        archs=GLUON,
        features=(
            frozenset(FEATURES) - _NOT_BESIDE_64_AND_128 - _NOT_FORWARD - {"different v head dim"}
        ),
        head_dims=(96,),
        forward=hopper.forward,
        preprocess=preprocess,
        backward=backward,
    ),
    KernelSet(
        name="hopper_wide",
        archs=GLUON,
        features=frozenset(FEATURES) - _NOT_BESIDE_64_AND_128 - _NOT_FORWARD,
        head_dims=(256,),
        mixed_head_dims=((192, 128),),
        forward=hopper.forward,
        preprocess=preprocess,
        backward=hopper.backward,
    ),
    KernelSet(
        name="hopper_wide_backward",
        archs=GLUON,
        features=frozenset(FEATURES) - _NOT_BESIDE_64_AND_128,
        head_dims=(256,),
        mixed_head_dims=((192, 128),),
        forward=forward,
        preprocess=preprocess,
        backward=hopper.backward,
    ),
    KernelSet(
        name="triton",
        archs=frozenset({"sm80", "sm90", "sm100", "interpreter"}),
        features=frozenset(FEATURES),
        head_dims=range(8, 257, 8),
        forward=forward,
        preprocess=preprocess,
        backward=backward,
        mixed_head_dims=None,
    ),
)


SELECTED = "STABLE_ATTENTION_KERNELS"
"""Environment variable: names of the sets that may serve, with commas; all where it is not set."""


def allowed() -> tuple[KernelSet, ...]:
    """The sets that `SELECTED` leaves; `AttentionArgumentError` for a name that is none."""
    wanted = os.environ.get(SELECTED)
    if not wanted:
        return KERNEL_SETS
    names = [row.name for row in KERNEL_SETS]
    picked = wanted.split(",")
    for name in picked:
        choose(SELECTED, name, names, "Name one or several, with commas between them.")
    return tuple(row for row in KERNEL_SETS if row.name in picked)


def needs(problem: Problem) -> Iterator[str]:
    """The features of `FEATURES` that a problem uses."""
    band = (
        problem.varlen
        or problem.chunked
        or problem.window_left != UNLIMITED
        or problem.window_right > 0
        or (problem.window_right == 0 and problem.sq != problem.sk)
    )
    flags = {
        "causal": problem.window_right == 0,
        "window": problem.window_left != UNLIMITED or problem.window_right > 0,
        "softcap": problem.softcap > 0,
        "sinks": problem.has_sinks,
        "dropout": problem.dropout_p > 0,
        "varlen": problem.varlen,
        "gqa": problem.group > 1,
        "different v head dim": problem.d != problem.dv,
        "deterministic": problem.deterministic,
        "chunks": problem.chunked,
        "packed chunks": problem.chunked and problem.varlen,
        "chunks with dropout": problem.chunked and problem.dropout_p > 0,
        "dropout in a band": problem.dropout_p > 0 and band,
        "softcap in a band": problem.softcap > 0 and band,
        "projection with dropout": (
            bool(KNOWN[problem.stabilizer].projection) and problem.dropout_p > 0
        ),
        "causal, sq != sk": problem.window_right == 0 and problem.sq != problem.sk,
        "o_lo in int8 or fp32": (KNOWN[problem.stabilizer].keeps_o_lo and problem.o_lo != "bf16"),
        problem.stabilizer: True,
    }
    return (name for name, used in flags.items() if used)


def _missing_head_dims(row: KernelSet, d: int, dv: int) -> list[str]:
    if d != dv and row.mixed_head_dims is not None:
        return [] if (d, dv) in row.mixed_head_dims else [f"head dims {d} and {dv}"]
    return [f"head dim {x}" for x in sorted({d, dv}) if x not in row.head_dims]


def select(problem: Problem, device: torch.device) -> KernelSet:
    """The first kernel set that serves the problem on the device's architecture.

    Raises `AttentionArgumentError` with what every set lacks.
    """
    return _selected(problem, configs.arch_of(device), tuple(allowed()))


@functools.lru_cache(maxsize=KEPT)
def _selected(problem: Problem, arch: str, rows: tuple[KernelSet, ...]) -> KernelSet:
    wanted = set(needs(problem))
    lacks = []
    for row in rows:
        missing = sorted(wanted - row.features)
        if arch not in row.archs:
            missing.append(f"architecture {arch}")
        missing += _missing_head_dims(row, problem.d, problem.dv)
        if not missing:
            return row
        lacks.append(f"{row.name} lacks {', '.join(missing)}")
    raise AttentionArgumentError("the call", "; ".join(lacks), table(), "Change what is lacking.")


def table() -> str:
    """The capability table as markdown."""
    names = " | ".join(row.name for row in KERNEL_SETS)
    lines = [f"| | {names} |", "| --- |" + " --- |" * len(KERNEL_SETS)]
    lines.append(
        "| architectures | " + " | ".join(", ".join(sorted(r.archs)) for r in KERNEL_SETS) + " |"
    )
    lines += [
        f"| {feature} | "
        + " | ".join("yes" if feature in r.features else "no" for r in KERNEL_SETS)
        + " |"
        for feature in FEATURES
    ]
    return "\n".join(lines)
