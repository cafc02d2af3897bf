"""What a layer asks of core attention, held against the rows of the backends.

`unsupported` compares one row of `BACKENDS` with what a layer requires. Nothing here imports torch,
so that configurations can be checked anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.backends.row import Backend, Capability, LayerRequirements


@dataclass(kw_only=True, frozen=True, slots=True)
class Machine:
    """What this machine offers; `probe` fills it."""

    missing: dict[str, str] = field(default_factory=dict)
    """Modules the table asks for that cannot be imported here, each with the reason."""
    sm: tuple[int, int] | None = None
    """Compute capability of the current GPU, None without one."""
    triton_interpreter: bool = False
    """TRITON_INTERPRET=1: Triton kernels run on the CPU."""


OURS = ("auto", "own")
"""Values of ``attention.backward`` that need no other library."""

PROJECTING = ("projected", "compensated_projected")
"""Stabilizers that take row sums out of dS."""

DELTA_ALONE = ("compensated", "dynamic_max", "none")
"""Stabilizers whose backward differs in delta alone, which other libraries can be given."""

EXACT_DELTA = ("stable_flash/compensated", "fa4/compensated")
"""How meta.json names attention (backend/stabilizer[_projected][/backward]) begins where the
low-order part of O is in delta: the guard has nothing to switch to."""

NOT_COMPENSATED = {
    "dynamic_max": "stabilizer dynamic_max: plain numerics with the paper's dynamic maximum",
    "none": "stabilizer none: plain FlashAttention-2 numerics",
    "paper_bf16": "stabilizer paper_bf16: the paper's failing emulation",
    "projected": "stabilizer projected: rows of dS sum to zero, along P K",
    "compensated_projected": "stabilizer compensated_projected: rows of dS sum to zero, along the "
    "key of the largest P",
}
"""What the start-up line says instead of ``Capability.why`` when the default is switched off."""


def unsupported(
    name: str, facts: LayerRequirements, *, machine: Machine | None = None
) -> Iterator[str]:
    """Every requirement of ``facts`` that backend ``name`` does not meet, with the remedy.

    Without ``machine`` only what the configuration alone decides is checked.
    """
    row = BACKENDS[name]
    # Without a machine, a CPU run may turn out possible on the one it will run on.
    interpreted = row.interpreted and (machine is None or machine.triton_interpreter)
    if facts.device not in row.devices and not interpreted:
        yield (
            f"training.device is {facts.device!r}; it runs on {_either(row.devices)}. Use "
            f"training.device: {row.devices[0]} or attention.backend: reference"
        )
    yield from _unsupported_shape(row, facts)
    yield from _unsupported_features(row, facts)
    if row.rules is not None:
        yield from row.rules(facts)
    if row.borrows and facts.backward not in OURS:
        for complaint in unsupported_backward(facts.backward, facts, machine=machine):
            yield f"attention.backward {facts.backward!r}: {complaint}. Use attention.backward: own"
    if machine is not None:
        yield from _unsupported_machine(row, facts, machine)


def _unsupported_shape(row: Capability, facts: LayerRequirements) -> Iterator[str]:
    if facts.dtype not in row.dtypes:
        yield (
            f"training.precision is {facts.dtype!r}; it takes {_either(row.dtypes)}. Use "
            f"training.precision: {row.dtypes[0]}, or attention.backend: reference or mcore_local"
        )
    low, high, step = row.head_dims
    dims = {facts.head_dim, facts.v_head_dim}
    for dim in sorted(dims):
        if not (low <= dim <= high and dim % step == 0):
            yield (
                f"head dimension {dim}; it takes {low}..{high} in multiples of {step}. "
                "Change model.kv_channels (or model.mla's head dims)"
            )
    if len(dims) > 1 and not row.v_head_dim:
        yield (
            f"value head dimension {facts.v_head_dim} differs from the query/key head dimension "
            f"{facts.head_dim} (multi-latent attention); it needs equal ones. Use "
            "attention.backend: stable_flash, te or reference"
        )
    if facts.mla and not row.v_head_dim and len(dims) == 1:
        yield (
            "multi-latent attention passes k_channels and v_channels, which it does not take. Use "
            "attention.backend: stable_flash, te or reference"
        )
    if facts.kv_heads != facts.heads and not row.gqa:
        yield (
            f"{facts.kv_heads} key/value heads for {facts.heads} query heads; it needs as many. "
            "Remove model.num_query_groups"
        )


def _unsupported_features(row: Capability, facts: LayerRequirements) -> Iterator[str]:
    asked = {
        "window": (
            facts.window is not None,
            f"sliding window {list(facts.window or ())} (model.window)",
        ),
        "open_window": (
            facts.window is not None and -1 in facts.window,
            f"window {list(facts.window or ())}, unlimited on one side (model.window)",
        ),
        "sinks": (facts.sinks, "attention sinks (model.softmax_type)"),
        "dropout": (facts.dropout, "attention dropout (model.attention_dropout)"),
        "thd": (facts.thd, "packed sequences (thd: data.document_attention)"),
        "deterministic": (
            facts.deterministic,
            "a bitwise repeatable backward (training.deterministic)",
        ),
        "max_logits": (facts.max_logits, "the maximum logit of each head (qk_clip)"),
        "fp8": (facts.fp8, "attention in FP8 (attention.fp8)"),
        "cp": (facts.cp > 1, f"context parallelism ({facts.cp} ranks)"),
        "stabilizers": (
            facts.stabilizer not in (row.stabilizers or ("compensated",)),
            f"attention.stabilizer {facts.stabilizer!r}",
        ),
    }
    for name, (wanted, text) in asked.items():
        if name == "open_window" and not row.window:
            continue  # already said
        if wanted and (name == "stabilizers" or not getattr(row, name)):
            alternatives = [other for other, r in BACKENDS.items() if _has(r, name, facts)]
            # `none` cannot be turned off: numerics that are a backend's own have no name here.
            remedy = "Remove that key" if name == "stabilizers" else "Turn it off"
            yield f"{text} is not something it has. {remedy}, or use {_either(alternatives)}"


def _has(row: Capability, name: str, facts: LayerRequirements) -> bool:
    return facts.stabilizer in row.stabilizers if name == "stabilizers" else getattr(row, name)


def unsupported_backward(
    name: str, facts: LayerRequirements, *, machine: Machine | None = None
) -> Iterator[str]:
    """What a backward of another library (a row of `BACKENDS`) cannot do for our own forward.

    Sinks, maximum logits and most stabilizers are the forward's. Our own in two parts is our own.
    """
    if name == "own_x2":
        if facts.cp > 1:
            yield f"context parallelism ({facts.cp} ranks) adds up gradients chunk by chunk"
        if facts.stabilizer not in PROJECTING:
            allowed = " and ".join(PROJECTING)
            yield f"attention.stabilizer {facts.stabilizer!r}: only {allowed} gain by two parts"
        return
    if facts.dropout:
        yield "attention dropout (model.attention_dropout) is drawn by each library in its own way"
    if facts.stabilizer not in DELTA_ALONE:
        yield f"attention.stabilizer {facts.stabilizer!r} changes more of the backward than delta"
    asked = dataclasses.replace(
        facts, sinks=False, max_logits=False, dropout=False, stabilizer="compensated"
    )
    for complaint in unsupported(name, asked, machine=machine):
        yield complaint.partition(". ")[0]  # its remedy is another backend


def _unsupported_machine(row: Backend, facts: LayerRequirements, machine: Machine) -> Iterator[str]:
    if row.package and row.package in machine.missing:
        yield f"{row.package} cannot be imported ({machine.missing[row.package]}). {row.install}"
    if facts.device == "cpu" and row.interpreted and not machine.triton_interpreter:
        # Already reported as a device problem; the interpreter is the way out.
        yield "on a CPU its kernels need Triton's interpreter. Set TRITON_INTERPRET=1 (very slow)"
    if facts.device == "cuda" and machine.sm is None:
        yield "training.device is 'cuda', but there is no GPU here. Use training.device: cpu"
    elif facts.device == "cuda" and machine.sm is not None and machine.sm < row.min_sm:
        yield (
            f"this GPU is sm_{machine.sm[0]}{machine.sm[1]}; it needs sm_{row.min_sm[0]}"
            f"{row.min_sm[1]} or newer. Use attention.backend: reference or mcore_local"
        )
    if row.own_rules is not None:
        yield from row.own_rules(facts)


def _either(names: tuple[str, ...] | list[str]) -> str:
    return " or ".join(names) if names else "nothing"
