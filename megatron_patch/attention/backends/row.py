"""The row of a backend: what it can do, and all that the other rooms ask of it; what layers ask.

A backend is one file in this folder with one row (two, where two kernels share the code). Files of
rows import torch inside their functions only, so that configurations can be checked anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_patch.attention.backends.call import AttentionCall, Result
    from megatron_patch.schema.run import RunConfig

FLOAT = 4


class Shapes(Protocol):
    """Sizes of one rank and layer, as the planner has them."""

    T: int
    """Tokens."""
    q: int
    """Query heads."""
    g: int
    """Key/value heads."""
    d: int
    dv: int
    w: int
    """Bytes of an activation."""


def flash_bytes(n: Shapes, keys: int, stabilizer: str, o_lo: str) -> int:
    """Bytes a flash kernel keeps for its backward beside q, k and v: O and LSE."""
    return n.T * n.q * (n.w * n.dv + FLOAT)


def no_scores(n: Shapes, keys: int) -> int:
    """Bytes of scores a flash kernel writes: none."""
    return 0


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
    cp_comm_type: str | None = None
    mla: bool = False
    fp8: bool = False
    """``attention.fp8``."""
    stabilizer: str = "compensated"
    backward: str = "auto"
    """``attention.backward``."""


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
    fp8: bool = False
    min_sm: tuple[int, int] = (0, 0)
    package: str | None = None
    """Module that must be importable, or distribution and version (name==version)."""
    stabilizers: tuple[str, ...] = ()
    """The stabilizers it has a choice of; the others accept only the default setting."""
    borrows: bool = False
    """Can take the backward pass of another library (``attention.backward``)."""
    own_options: tuple[str, ...] = ()
    """Settings of this backend alone: keys of ``attention.int8``."""
    wants_qk_norm: bool = False
    """Is known to diverge without normalized queries and keys; start-up says so."""
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True, frozen=True, slots=True)
class Backend(Capability):
    """One row of `BACKENDS`."""

    name: str
    """Value of ``attention.backend``."""
    run: Callable[[AttentionCall], Result] | None = None
    """Serves a call of `CoreAttention`; None: `module` replaces that."""
    module: tuple[str, str] | None = None
    """Python module and class of a core attention of Megatron-Core's own."""
    interpreted: bool = False
    """Runs on a CPU under Triton's interpreter."""
    install: str = "Reinstall this distribution: the kernels are part of it"
    """The remedy where ``package`` is missing."""
    rules: Callable[[LayerRequirements], Iterable[str]] | None = None
    """Requirements that no field expresses: what is not met on any machine, with the remedy."""
    own_rules: Callable[[LayerRequirements], Iterable[str]] | None = None
    """The same of this machine's environment."""
    chunk_primitives: str | None = None
    """Module with which `context_parallel` splits its sequences; None: it splits them itself."""
    exact_delta: bool = False
    """Its backward does not build delta from a stored 16-bit O."""
    switchable: bool = False
    """The stability guard can exchange its numerics for the compensated ones."""
    keeps_qk: bool = True
    """The backward reads q and k themselves; False: ``saved_bytes`` holds what it reads instead."""
    saved_bytes: Callable[[Any, int, str, str], int] = flash_bytes
    """(`Shapes`, keys a query sees, stabilizer, o_lo) -> bytes kept for the backward beside q,
    k and v."""
    score_bytes: Callable[[Any, int], int] = no_scores
    """(`Shapes`, keys a query sees) -> bytes of scores it works on in its backward."""
    summed_head_dims: tuple[int, ...] = ()
    """Head dims whose dQ a kernel sums in a float32 buffer (`stable_attention.dispatch`)."""
    warm: Callable[[RunConfig, Iterable[LayerRequirements]], None] | None = None
    """Compiles what kinds of layer of a run need on the current GPU; None: nothing is compiled."""
