"""What every attention backend can do, as a table, and what a layer asks of it.

`BACKENDS` is the only place that knows; `unsupported` compares one row with what a layer requires.
Nothing here imports torch, so that configurations can be checked anywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_TE_DETERMINISM = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@dataclass(kw_only=True, frozen=True, slots=True)
class LayerRequirements:
    """What one kind of layer asks of core attention."""

    kind: str
    """Layer kind as printed, e.g. ``self-attention`` or ``self-attention, window 128``."""
    dtype: str
    """``bf16``, ``fp16`` or ``fp32``: type of q, k and v."""
    device: str
    """``cuda`` or ``cpu``."""
    head_dim: int
    v_head_dim: int
    heads: int
    """Query heads of one tensor-parallel rank."""
    kv_heads: int
    """Key/value heads of one tensor-parallel rank."""
    window: tuple[int, int] | None = None
    sinks: bool = False
    dropout: bool = False
    thd: bool = False
    deterministic: bool = False
    max_logits: bool = False
    cp: int = 1
    mla: bool = False
    stabilizer: str = "compensated"


@dataclass(kw_only=True, frozen=True, slots=True)
class Machine:
    """What this machine offers; `probe` fills it."""

    missing: dict[str, str] = field(default_factory=dict)
    """Modules the table asks for that cannot be imported here, each with the reason."""
    sm: tuple[int, int] | None = None
    """Compute capability of the current GPU, None without one."""
    triton_interpreter: bool = False
    """TRITON_INTERPRET=1: Triton kernels run on the CPU."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Capability:
    """One row of the table. Every field is a limit; the defaults are the widest."""

    kernel: str
    """What actually runs."""
    reason: str
    """What it is good for, in a few words, for the start-up line."""
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    head_dims: tuple[int, int, int] = (8, 256, 8)
    """Smallest, largest, multiple of."""
    v_head_dim: bool = True
    """Value head dim may differ from the query/key head dim (MLA)."""
    gqa: bool = True
    window: bool = True
    open_window: bool = True
    """A window may be unlimited on one side (-1)."""
    sinks: bool = True
    softcap: bool = False
    dropout: bool = True
    thd: bool = True
    deterministic: bool = True
    max_logits: bool = True
    cp: bool = False
    min_sm: tuple[int, int] = (0, 0)
    package: str | None = None
    """Module that must be importable."""
    stabilizers: bool = False
    """Has a choice of stabilizers; others accept only the default setting."""
    notes: tuple[str, ...] = ()


NOT_COMPENSATED = {
    "dynamic_max": "stabilizer dynamic_max: plain numerics with the paper's dynamic maximum",
    "none": "stabilizer none: plain FlashAttention-2 numerics",
    "paper_bf16": "stabilizer paper_bf16: the paper's failing emulation",
}
"""What the start-up line says instead of ``Capability.why`` when the default is switched off."""

BACKENDS: dict[str, Capability] = {
    "stable_flash": Capability(
        kernel="stable_attention (Triton)",
        reason="compensated numerics at flash speed",
        min_sm=(8, 0),
        softcap=True,
        cp=True,
        stabilizers=True,
        package="stable_attention.api",
        notes=("on a CPU only under Triton's interpreter (TRITON_INTERPRET=1)",),
    ),
    "sdpa_cudnn": Capability(
        kernel="scaled_dot_product_attention, cuDNN",
        reason="the fastest vendor kernel",
        head_dims=(8, 128, 8),
        v_head_dim=False,
        window=False,
        sinks=False,
        thd=False,
        deterministic=False,
        max_logits=False,
        min_sm=(8, 0),
        notes=("its backward accumulates in an order that changes from run to run",),
    ),
    "sdpa_flash": Capability(
        kernel="scaled_dot_product_attention, FlashAttention-2",
        reason="the vendor kernel with a repeatable backward",
        v_head_dim=False,
        window=False,
        sinks=False,
        thd=False,
        max_logits=False,
        min_sm=(8, 0),
        notes=("deterministic under torch.use_deterministic_algorithms, set by training",),
    ),
    "te": Capability(
        kernel="Transformer Engine DotProductAttention (picks FlashAttention, cuDNN or unfused)",
        reason="what Megatron users run today",
        cp=True,
        min_sm=(8, 0),
        package="transformer_engine",
        notes=(
            "deterministic needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the environment",
            "its own rules for sinks, windows and packed input apply on top",
        ),
    ),
    "mcore_local": Capability(
        kernel="Megatron-Core DotProductAttention (unfused)",
        reason="the stock baseline, any device; materializes the score matrix",
        devices=("cuda", "cpu"),
        dtypes=("bf16", "fp16", "fp32"),
        head_dims=(1, 1 << 16, 1),
        v_head_dim=False,
        open_window=False,
        thd=False,
        max_logits=False,
    ),
    "reference": Capability(
        kernel="stable_attention.reference (blockwise float32 PyTorch)",
        reason="exact float32 arithmetic anywhere; slow",
        devices=("cuda", "cpu"),
        dtypes=("bf16", "fp16", "fp32"),
        head_dims=(1, 1 << 16, 1),
        softcap=True,
        cp=True,
    ),
}


def unsupported(
    name: str, facts: LayerRequirements, *, machine: Machine | None = None
) -> Iterator[str]:
    """Every requirement of ``facts`` that backend ``name`` does not meet, with the remedy.

    Without ``machine`` only what the configuration alone decides is checked.
    """
    row = BACKENDS[name]
    # Without a machine, a CPU run may turn out possible on the one it will run on.
    interpreted = name == "stable_flash" and (machine is None or machine.triton_interpreter)
    if facts.device not in row.devices and not interpreted:
        yield (
            f"training.device is {facts.device!r}; it runs on {_either(row.devices)}. Use "
            f"training.device: {row.devices[0]} or attention.backend: reference"
        )
    yield from _unsupported_shape(row, facts)
    yield from _unsupported_features(row, facts)
    if machine is not None:
        yield from _unsupported_machine(name, row, facts, machine)


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
        "thd": (facts.thd, "packed sequences (thd)"),
        "deterministic": (
            facts.deterministic,
            "a bitwise repeatable backward (training.deterministic)",
        ),
        "max_logits": (facts.max_logits, "the maximum logit of each head (qk_clip)"),
        "cp": (facts.cp > 1, f"context parallelism ({facts.cp} ranks)"),
        "stabilizers": (
            facts.stabilizer != "compensated",
            f"attention.stabilizer {facts.stabilizer!r}",
        ),
    }
    for name, (wanted, text) in asked.items():
        if name == "open_window" and not row.window:
            continue  # already said
        if wanted and not getattr(row, name):
            alternatives = [other for other, r in BACKENDS.items() if getattr(r, name)]
            # `none` cannot be turned off: numerics that are a backend's own have no name here.
            remedy = "Remove that key" if name == "stabilizers" else "Turn it off"
            yield f"{text} is not something it has. {remedy}, or use {_either(alternatives)}"


def _unsupported_machine(
    name: str, row: Capability, facts: LayerRequirements, machine: Machine
) -> Iterator[str]:
    if row.package and row.package in machine.missing:
        remedy = {
            "transformer_engine": "Install the te extra: pip install megatron-patch-stable[te]",
        }.get(row.package, "Reinstall this distribution: the kernels are part of it")
        yield f"{row.package} cannot be imported ({machine.missing[row.package]}). {remedy}"
    if facts.device == "cpu" and name == "stable_flash" and not machine.triton_interpreter:
        # Already reported as a device problem; the interpreter is the way out.
        yield "on a CPU its kernels need Triton's interpreter. Set TRITON_INTERPRET=1 (very slow)"
    if facts.device == "cuda" and machine.sm is None:
        yield "training.device is 'cuda', but there is no GPU here. Use training.device: cpu"
    elif facts.device == "cuda" and machine.sm is not None and machine.sm < row.min_sm:
        yield (
            f"this GPU is sm_{machine.sm[0]}{machine.sm[1]}; it needs sm_{row.min_sm[0]}"
            f"{row.min_sm[1]} or newer. Use attention.backend: reference or mcore_local"
        )
    if name == "te" and facts.deterministic and os.environ.get(_TE_DETERMINISM) != "0":
        yield (
            f"training.deterministic with Transformer Engine needs {_TE_DETERMINISM}=0 in the "
            "environment. Export it before start"
        )


def _either(names: tuple[str, ...] | list[str]) -> str:
    return " or ".join(names) if names else "nothing"
