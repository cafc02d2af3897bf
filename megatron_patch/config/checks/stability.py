"""Rules between ``stability:`` and other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_patch.attention import registry
from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.capabilities import EXACT_DELTA, unsupported
from megatron_patch.schema.model import attention_head_dim
from megatron_patch.schema.problem import Problem
from megatron_patch.schema.run import RunConfig

CAPTURE_MIB = 1024
"""Largest capture file that is asked for by name."""


def problems(run: RunConfig) -> Iterator[Problem]:
    """A guard with nothing to switch to; captures of what the run has not."""
    if run.stability.guard == "switch":
        yield from _switch(run)
    yield from _captures(run)


def _switch(run: RunConfig) -> Iterator[Problem]:
    attention = run.attention
    switchable = [row.name for row in BACKENDS.values() if row.switchable]
    if attention.backend not in switchable:
        yield Problem(
            "stability.guard",
            f"switch has nothing to switch to with attention.backend {attention.backend!r} "
            f"(it can with {', '.join(switchable)}); use guard: warn or stop",
        )
    elif f"{attention.backend}/{attention.stabilizer}".startswith(EXACT_DELTA):
        yield Problem(
            "stability.guard",
            f"switch has nothing to switch to: attention.stabilizer is {attention.stabilizer} "
            "already; use guard: warn or stop",
        )
    elif attention.backend != "stable_flash":
        for facts in registry.layer_kinds(run):
            for complaint in unsupported("stable_flash", facts):
                yield Problem(
                    "stability.guard", f"switch: stable_flash cannot take over: {complaint}"
                )


def _captures(run: RunConfig) -> Iterator[Problem]:
    options, model = run.stability, run.model
    for name in ("capture_steps", "capture_at"):
        if getattr(options, name) and run.data.document_attention:
            text = "captures hold no ends of documents: leave it out, or data.document_attention"
            yield Problem(f"stability.{name}", text)
    for name, values, low, high in (
        ("capture_steps", options.capture_steps, 1, run.training.train_steps),
        ("capture_layers", options.capture_layers, 0, model.attention_layers - 1),
        ("capture_heads", options.capture_heads, 0, model.num_attention_heads - 1),
    ):
        for value in values:
            if not low <= value <= high:
                yield Problem(f"stability.{name}", f"{value}: must be in {low}..{high}")
    if options.capture_steps:
        size = capture_mib(run, heads=len(options.capture_heads))
        if size > CAPTURE_MIB:
            yield Problem(
                "stability.capture_heads",
                f"one capture file would take {size:,.0f} MiB, more than {CAPTURE_MIB:,}: name "
                "fewer heads",
            )


def capture_mib(run: RunConfig, *, heads: int) -> float:
    """Upper bound of one capture file, MiB: q, k, v, O and dO of one tensor-parallel rank.

    ``heads``: query heads that were asked for, 0 for all.
    """
    model = run.model
    all_heads = max(1, model.num_attention_heads // max(1, run.parallel.tensor_model_parallel_size))
    heads = min(all_heads, heads or all_heads)
    head_dim = attention_head_dim(model)
    if model.mla is not None:
        head_dim = model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim
    values = 5 * model.seq_length * heads * head_dim
    return values * (2 if run.training.precision == "bf16" else 4) / 2**20
