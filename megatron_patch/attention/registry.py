"""Which attention backend can do what, and the choice of one for a layer kind.

The capabilities are a table, `BACKENDS`; `unmet` compares a row with the facts of a layer, `select`
raises one error that lists everything unmet, `table` prints it. Nothing here imports torch, so that
configurations can be checked anywhere.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.config.root import RunConfig


class BackendError(ValueError):
    """A backend cannot serve a configuration; the text lists every unmet requirement."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Facts:
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

    packages: frozenset[str] = frozenset()
    """Import names that are installed, of those the table asks for."""
    sm: tuple[int, int] | None = None
    """Compute capability of the current GPU, None without one."""
    triton_interpreter: bool = False
    """TRITON_INTERPRET=1: Triton kernels run on the CPU."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Capability:
    """One row of the table. Every field is a limit; the defaults are the widest."""

    kernel: str
    """What actually runs."""
    why: str
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
    """Import name that must be installed."""
    stabilizers: bool = False
    """Has a choice of stabilizers; others accept only the default setting."""
    notes: tuple[str, ...] = field(default=())


BACKENDS: dict[str, Capability] = {
    "stable_flash": Capability(
        kernel="stable_attention (Triton)",
        why="compensated numerics at flash speed",
        min_sm=(8, 0),
        softcap=True,
        stabilizers=True,
        package="stable_attention.ops",
        notes=("on a CPU only under Triton's interpreter (TRITON_INTERPRET=1)",),
    ),
    "sdpa_cudnn": Capability(
        kernel="scaled_dot_product_attention, cuDNN",
        why="the fastest vendor kernel",
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
        why="the vendor kernel with a repeatable backward",
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
        why="what Megatron users run today; context parallel",
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
        why="the stock baseline, any device; materializes the score matrix",
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
        why="exact float32 arithmetic anywhere; slow",
        devices=("cuda", "cpu"),
        dtypes=("bf16", "fp16", "fp32"),
        head_dims=(1, 1 << 16, 1),
        softcap=True,
    ),
}


@dataclass(kw_only=True, frozen=True, slots=True)
class Selection:
    """The backend chosen for one kind of layer."""

    kind: str
    backend: str
    kernel: str
    why: str

    def line(self) -> str:
        """The start-up line."""
        return f"attention: {self.kind} -> {self.backend}: {self.kernel}; {self.why}"


def select(run: RunConfig, facts: Facts, *, machine: Machine | None = None) -> Selection:
    """The configured backend for one kind of layer.

    Args:
        run: the configuration; ``attention.backend`` names the backend.
        facts: what the layer kind asks for, see `facts_of`.
        machine: default: this one, probed.

    Raises:
        BackendError: every requirement that is not met, each with its remedy, and the backends that
            could serve the same facts.
    """
    return check(run.attention.backend, facts, machine=machine)


def check(name: str, facts: Facts, *, machine: Machine | None = None) -> Selection:
    """`select` by backend name, for programs that have no `RunConfig`."""
    if name not in BACKENDS:
        raise BackendError(f"backend {name!r} is not one of {', '.join(BACKENDS)}")
    machine = probe() if machine is None else machine
    complaints = list(unmet(name, facts, machine=machine))
    if complaints:
        able = [n for n in BACKENDS if n != name and not list(unmet(n, facts, machine=machine))]
        remedy = f"backends that can serve this layer here: {', '.join(able) or 'none'}"
        listed = "\n".join(f"  - {c}" for c in complaints)
        raise BackendError(
            f"attention backend {name!r} cannot serve {facts.kind}; unmet requirements:\n{listed}\n"
            f"{remedy}"
        )
    row = BACKENDS[name]
    return Selection(kind=facts.kind, backend=name, kernel=row.kernel, why=row.why)


def unmet(name: str, facts: Facts, *, machine: Machine | None = None) -> Iterator[str]:
    """Every requirement of ``facts`` that backend ``name`` does not meet, with the remedy.

    Without ``machine`` only what the configuration alone decides is checked.
    """
    row = BACKENDS[name]
    interpreted = name == "stable_flash" and machine is not None and machine.triton_interpreter
    if facts.device not in row.devices and not interpreted and not _could_interpret(name, machine):
        yield (
            f"training.device is {facts.device!r}; it runs on {_either(row.devices)}. Use "
            f"training.device: {row.devices[0]} or attention.backend: reference"
        )
    yield from _unmet_shape(row, facts, interpreted=interpreted or _could_interpret(name, machine))
    yield from _unmet_features(row, facts)
    if machine is not None:
        yield from _unmet_machine(name, row, facts, machine)


def _could_interpret(name: str, machine: Machine | None) -> bool:
    """Whether a CPU run may turn out possible on the machine it will run on."""
    return name == "stable_flash" and machine is None


def _unmet_shape(row: Capability, facts: Facts, *, interpreted: bool) -> Iterator[str]:
    if facts.dtype not in row.dtypes:
        remedy = f"Use training.precision: {row.dtypes[0]}, or attention.backend: reference or mcore_local"
        yield f"training.precision is {facts.dtype!r}; it takes {_either(row.dtypes)}. {remedy}"
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
            f"{facts.head_dim} (multi-latent attention); it needs equal ones. Use attention.backend: "
            "stable_flash, te or reference"
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


def _unmet_features(row: Capability, facts: Facts) -> Iterator[str]:
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
            able = [other for other, r in BACKENDS.items() if getattr(r, name)]
            yield f"{text} is not something it has. Turn it off, or use {_either(able)}"


def _unmet_machine(name: str, row: Capability, facts: Facts, machine: Machine) -> Iterator[str]:
    if row.package and row.package not in machine.packages:
        remedy = {
            "transformer_engine": "Install the te extra: pip install megatron-patch-stable[te]",
        }.get(row.package, "Reinstall this distribution: the kernels are part of it")
        yield f"the module {row.package} is not installed. {remedy}"
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
            f"training.deterministic with Transformer Engine. Export {_TE_DETERMINISM}=0 before start"
        )


_TE_DETERMINISM = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@functools.cache
def probe() -> Machine:
    """Look at this machine: installed packages, GPU architecture, Triton interpreter."""
    packages = {r.package for r in BACKENDS.values() if r.package}
    try:
        import torch

        sm = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    except ImportError:
        sm = None
    return Machine(
        packages=frozenset(p for p in packages if _importable(p)),
        sm=sm,
        triton_interpreter=os.environ.get("TRITON_INTERPRET") == "1",
    )


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def facts_of(run: RunConfig, *, window: tuple[int, int] | None, mtp: bool = False) -> Facts:
    """The facts of one kind of layer of a configuration (``window`` None: full causal)."""
    model, parallel = run.model, run.parallel
    tp = parallel.tensor_model_parallel_size
    groups = model.num_query_groups or model.num_attention_heads
    head_dim = model.kv_channels or model.hidden_size // max(1, model.num_attention_heads)
    v_head_dim = head_dim
    if model.mla is not None:
        head_dim = model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim
        v_head_dim = model.mla.v_head_dim
        groups = model.num_attention_heads
    kind = "multi-token prediction: " if mtp else ""
    kind += "multi-latent attention" if model.mla is not None else "self-attention"
    kind += f", window {list(window)}" if window is not None else ""
    return Facts(
        kind=kind,
        dtype=run.training.precision,
        device=run.training.device,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        heads=max(1, model.num_attention_heads // tp),
        kv_heads=max(1, groups // tp),
        window=window,
        sinks=model.softmax_type != "vanilla",
        dropout=model.attention_dropout > 0,
        deterministic=run.training.deterministic,
        cp=parallel.context_parallel_size,
        mla=model.mla is not None,
        stabilizer=run.attention.stabilizer,
    )


def layer_kinds(run: RunConfig) -> list[Facts]:
    """The facts of every kind of attention layer in a model, without repeats."""
    model = run.model
    kinds = []
    windows = [layer_window(run, number) for number in range(1, model.num_layers + 1)]
    for window in dict.fromkeys(windows):
        kinds.append(facts_of(run, window=window))
    if model.mtp is not None:
        kinds.append(facts_of(run, window=windows[-1] if windows else None, mtp=True))
    return kinds


def layer_window(run: RunConfig, number: int) -> tuple[int, int] | None:
    """The window of layer ``number`` (1-based), by Megatron-Core's rule."""
    window, skip = run.model.window, run.model.window_skip_freq
    if window is None or len(window) != 2:
        return None
    windowed = True
    if isinstance(skip, int):
        windowed = skip == 0 or number % skip != 0
    elif isinstance(skip, list):
        windowed = bool(skip[number - 1]) if number <= len(skip) else True
    return (window[0], window[1]) if windowed else None


def table() -> str:
    """The capability table as text, for ``megatron-patch backends list``."""
    machine = probe()
    columns = [
        ("dtypes", lambda r: "/".join(r.dtypes)),
        (
            "head dims",
            lambda r: "any" if r.head_dims[2] == 1 else f"{r.head_dims[0]}..{r.head_dims[1]}",
        ),
        *((name, _flag(name)) for name in _FLAGS),
        ("device", lambda r: "/".join(r.devices)),
    ]
    header = ["backend", *(title for title, _ in columns), "here"]
    rows = [
        [name, *(cell(row) for _, cell in columns), _here(name, machine)]
        for name, row in BACKENDS.items()
    ]
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip()
        for r in [header, *rows]
    ]
    lines.append("")
    for name, row in BACKENDS.items():
        lines.append(f"{name}: {row.kernel}; {row.why}")
        lines.extend(f"    {note}" for note in row.notes)
    return "\n".join(lines)


_FLAGS = (
    "v_head_dim",
    "gqa",
    "window",
    "sinks",
    "softcap",
    "dropout",
    "thd",
    "deterministic",
    "max_logits",
    "cp",
)


def _flag(name: str):
    return lambda row: "yes" if getattr(row, name) else "-"


def _here(name: str, machine: Machine) -> str:
    """Whether the backend can run on this machine, and what it lacks."""
    row = BACKENDS[name]
    if row.package and row.package not in machine.packages:
        return f"needs {row.package}"
    if machine.sm is None and "cpu" not in row.devices:
        return (
            "interpreter"
            if machine.triton_interpreter and name == "stable_flash"
            else "needs a GPU"
        )
    if machine.sm is not None and machine.sm < row.min_sm:
        return f"needs sm_{row.min_sm[0]}{row.min_sm[1]}"
    return "yes"


def _either(names: tuple[str, ...] | list[str]) -> str:
    return " or ".join(names) if names else "nothing"
