"""The choice of an attention backend: by name, checked against the capability table, said aloud.

`select` raises one error that lists everything unmet; `layer_kinds` finds the kinds of attention
layer of a configuration; `table` prints the table. Nothing imports torch until `probe` runs.
"""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from importlib import metadata

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.backends.row import LayerRequirements
from megatron_patch.attention.capabilities import (
    NOT_COMPENSATED,
    Machine,
    unsupported,
    unsupported_backward,
)
from megatron_patch.schema.model import attention_head_dim, query_groups
from megatron_patch.schema.run import RunConfig

BORROWED = ("sdpa_cudnn", "sdpa_flash", "fa4")
"""Backends whose backward pass can serve the forward of ``stable_flash``."""
BACKWARDS = ("own_x2", *BORROWED)
"""What can serve it beside its own backward pass."""

MAX_LAYERS = 10_000
"""Far above any model; one that asks for more has a mistyped number of layers."""


class BackendError(ValueError):
    """A backend cannot serve a configuration; the text lists every unmet requirement."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Selection:
    """The backend chosen for one kind of layer."""

    kind: str
    backend: str
    kernel: str
    reason: str

    def line(self) -> str:
        """The start-up line."""
        return f"attention: {self.kind} -> {self.backend}: {self.kernel}; {self.reason}"


def select(
    run: RunConfig, facts: LayerRequirements, *, machine: Machine | None = None
) -> Selection:
    """The configured backend for one kind of layer.

    Args:
        run: the configuration; ``attention.backend`` names the backend.
        facts: what the layer kind asks for, see `requirements_of`.
        machine: default: this one, probed.

    Raises BackendError: every requirement that is not met, each with its remedy, and the backends
    that could serve the same facts.
    """
    return check(run.attention.backend, facts, machine=machine)


def check(name: str, facts: LayerRequirements, *, machine: Machine | None = None) -> Selection:
    """`select` by backend name, for programs that have no `RunConfig`."""
    if name not in BACKENDS:
        raise BackendError(f"backend {name!r} is not one of {', '.join(BACKENDS)}")
    machine = probe() if machine is None else machine
    complaints = list(unsupported(name, facts, machine=machine))
    if complaints:
        alternatives = [
            n for n in BACKENDS if n != name and not list(unsupported(n, facts, machine=machine))
        ]
        remedy = f"backends that can serve this layer here: {', '.join(alternatives) or 'none'}"
        listed = "\n".join(f"  - {c}" for c in complaints)
        raise BackendError(
            f"attention backend {name!r} cannot serve {facts.kind}; unmet requirements:\n{listed}\n"
            f"{remedy}"
        )
    row = BACKENDS[name]
    reason = NOT_COMPENSATED.get(facts.stabilizer, row.reason) if row.stabilizers else row.reason
    kernel = row.kernel + _backward(name, facts, machine)
    return Selection(kind=facts.kind, backend=name, kernel=kernel, reason=reason)


def _backward(name: str, facts: LayerRequirements, machine: Machine) -> str:
    """Whose backward runs, for the start-up line, and with ``auto`` what else could be asked."""
    if name == "fa4" and facts.stabilizer == "compensated":
        return ", backward; forward stable_attention (Triton)"
    if not BACKENDS[name].borrows or facts.backward == "own":
        return ""
    if facts.backward != "auto":
        return f", backward {facts.backward}"
    others = [n for n in BACKWARDS if not list(unsupported_backward(n, facts, machine=machine))]
    return f", backward own (or attention.backward: {', '.join(others)})" if others else ""


def probe() -> Machine:
    """Look at this machine: importable packages, GPU architecture, Triton interpreter."""
    import torch

    packages = [row.package for row in BACKENDS.values() if row.package]
    return Machine(
        missing={name: reason for name in packages if (reason := _import_error(name))},
        sm=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
        triton_interpreter=os.environ.get("TRITON_INTERPRET") == "1",
    )


@functools.cache
def _import_error(name: str) -> str:
    """Why a module cannot be imported, in one line; empty if it can.

    Of a distribution and version (name==version) only these are looked at: imports take seconds.
    """
    distribution, _, version = name.partition("==")
    if version:
        try:
            found = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return "it is not installed"
        return "" if found == version else f"{found} is installed"
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything, OSError included
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def requirements_of(
    run: RunConfig,
    *,
    window: tuple[int, int] | None,
    mtp: bool = False,
    cp_comm_type: str | None = None,
) -> LayerRequirements:
    """The facts of one kind of layer of a configuration (``window`` None: full causal).

    ``cp_comm_type`` names the mode in the layer kind, where several ranks share a sequence.
    """
    model, parallel = run.model, run.parallel
    tp = max(1, parallel.tensor_model_parallel_size)
    groups = query_groups(model)
    head_dim = v_head_dim = attention_head_dim(model)
    if model.mla is not None:
        head_dim = model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim
        v_head_dim = model.mla.v_head_dim
        groups = model.num_attention_heads
    kind = "multi-token prediction: " if mtp else ""
    kind += "multi-latent attention" if model.mla is not None else "self-attention"
    kind += f", window {list(window)}" if window is not None else ""
    if cp_comm_type is not None and parallel.context_parallel_size > 1:
        kind += f", context parallel {cp_comm_type}"
    return LayerRequirements(
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
        thd=run.data.document_attention,
        deterministic=run.training.deterministic,
        max_logits=run.optimizer.qk_clip is not None,
        cp=parallel.context_parallel_size,
        cp_comm_type=cp_comm_type,
        fp8=run.attention.fp8,
        mla=model.mla is not None,
        stabilizer=run.attention.stabilizer,
        backward=run.attention.backward,
    )


def layer_kinds(run: RunConfig) -> list[LayerRequirements]:
    """The facts of every kind of attention layer in a model, without repeats."""
    model = run.model
    kinds = []
    # A mistyped number of layers is the model section's to refuse; it must not be counted up to.
    layers = min(model.num_layers, MAX_LAYERS)
    numbers = range(1, layers + 1)
    windows = [layer_window(run, number) for number in numbers]
    modes = [layer_cp_comm_type(run, number) for number in numbers]
    for window, mode in dict.fromkeys(zip(windows, modes, strict=True)):
        kinds.append(requirements_of(run, window=window, cp_comm_type=mode))
    if model.mtp is not None:
        # Depth k of multi-token prediction is built like the last layer, but its attention is
        # numbered k: it takes the window and the mode of layer k (core's
        # MultiTokenPredictionLayer and is_layer_window_attention, 0.19.2).
        depths = range(1, min(model.mtp.num_layers, MAX_LAYERS) + 1)
        pairs = [(layer_window(run, number), layer_cp_comm_type(run, number)) for number in depths]
        for window, mode in dict.fromkeys(pairs):
            kinds.append(requirements_of(run, window=window, mtp=True, cp_comm_type=mode))
    return kinds


def layer_cp_comm_type(run: RunConfig, number: int) -> str | None:
    """How the ranks of layer ``number`` (1-based) share a sequence; None where none do."""
    parallel = run.parallel
    if parallel.context_parallel_size == 1:
        return None
    kinds = parallel.cp_comm_type
    if isinstance(kinds, str):
        return kinds
    return kinds[number - 1] if number <= len(kinds) else None


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
    """The capability table as text, for ``megatron-patch doctor``."""
    machine = probe()
    columns = [
        ("dtypes", lambda r: "/".join(r.dtypes)),
        (
            "head dims",
            lambda r: "any" if r.head_dims[2] == 1 else f"{r.head_dims[0]}..{r.head_dims[1]}",
        ),
        *((name, lambda row, name=name: "yes" if getattr(row, name) else "-") for name in _FLAGS),
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
        lines.append(f"{name}: {row.kernel}; {row.reason}")
        lines.extend(f"    {note}" for note in row.notes)
        if row.borrows:
            there = [other for other in BORROWED if _here(other, machine) == "yes"]
            lines.append(f"    attention.backward here: {', '.join(['own', 'own_x2', *there])}")
    return "\n".join(lines)


_FLAGS = ("v_head_dim", "gqa", "window", "sinks", "softcap", "dropout", "thd", "deterministic",
          "max_logits", "cp", "fp8")  # fmt: skip


def _here(name: str, machine: Machine) -> str:
    """Whether the backend can run on this machine, and what it lacks."""
    row = BACKENDS[name]
    if row.package and row.package in machine.missing:
        return f"no {row.package}"
    if machine.sm is None and "cpu" not in row.devices:
        return "interpreter" if machine.triton_interpreter and row.interpreted else "needs a GPU"
    if machine.sm is not None and machine.sm < row.min_sm:
        return f"needs sm_{row.min_sm[0]}{row.min_sm[1]}"
    return "yes"
