"""Rules between ``attention:``, the model and the layout, found without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_patch.attention import registry
from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.capabilities import unsupported
from megatron_patch.schema.problem import Problem
from megatron_patch.schema.run import RunConfig


def problems(run: RunConfig) -> Iterator[Problem]:
    """Settings that contradict each other, and what the backend cannot serve in this model."""
    yield from _stabilizer(run)
    attention = run.attention
    if attention.backward != "auto" and not BACKENDS[attention.backend].borrows:
        yield Problem(
            "attention.backward",
            f"{attention.backward!r} has no effect with attention.backend {attention.backend!r}, "
            "which has its own: leave it out, or use stable_flash",
        )
    if attention.fp8 and run.training.fp8 not in ("current", "mxfp8"):
        yield Problem(
            "attention.fp8",
            f"true with training.fp8 {run.training.fp8!r}: Transformer Engine computes attention "
            "in FP8 under the recipes current and mxfp8 alone; set training.fp8: current",
        )
    said = set()
    for facts in registry.layer_kinds(run):
        for complaint in unsupported(run.attention.backend, facts):
            if complaint not in said:
                said.add(complaint)
                yield Problem("attention.backend", f"{run.attention.backend!r}: {complaint}")


KEEP_O_LO = ("compensated", "compensated_projected")


def _stabilizer(run: RunConfig) -> Iterator[Problem]:
    attention = run.attention
    name = attention.stabilizer
    if name == "paper_bf16" and not attention.allow_broken:
        yield Problem(
            "attention.stabilizer",
            "'paper_bf16' reproduces a numerical failure on purpose: set attention.allow_broken: "
            "true if that is what you want, or use compensated",
        )
    if attention.allow_broken and name != "paper_bf16":
        yield Problem(
            "attention.allow_broken",
            f"true has no effect with attention.stabilizer {name!r}: leave it out",
        )
    if name == "projected" and run.parallel.context_parallel_size > 1:
        yield Problem(
            "attention.stabilizer",
            f"{name!r} needs whole rows of keys, and context parallelism cuts them "
            f"(parallel.context_parallel_size {run.parallel.context_parallel_size}): use "
            "compensated_projected, or context_parallel_size: 1",
        )
    if attention.o_lo != "default" and (
        name not in KEEP_O_LO or not BACKENDS[attention.backend].stabilizers
    ):
        yield Problem(
            "attention.o_lo",
            f"{attention.o_lo!r} has no effect: only backends stable_flash and fa4 with "
            f"stabilizer {' or '.join(KEEP_O_LO)} keep a low-order part; leave it out",
        )
    if name == "dynamic_max":
        if not attention.dynamic_max_beta > 1:
            yield Problem(
                "attention.dynamic_max_beta", f"{attention.dynamic_max_beta}: must be more than 1"
            )
        if not attention.dynamic_max_eps >= 0:
            yield Problem(
                "attention.dynamic_max_eps", f"{attention.dynamic_max_eps}: must not be negative"
            )
