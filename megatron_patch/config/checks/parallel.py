"""Rules between ``parallel:`` and other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.schema.parallel import OWN_BACKENDS
from megatron_patch.schema.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.schema.run import RunConfig


def problems(run: RunConfig) -> Iterator[Problem]:
    """Experts, layers and backends that the layout asks for and the model has not."""
    if run.parallel.expert_model_parallel_size > 1 and run.model.moe is None:
        yield Problem(
            "parallel.expert_model_parallel_size",
            f"{run.parallel.expert_model_parallel_size} needs an MoE model (section model.moe); a "
            "dense model has no experts to spread",
        )
    yield from _modes_per_layer(run)
    yield from _gradient_wire(run)


def _modes_per_layer(run: RunConfig) -> Iterator[Problem]:
    kinds, layers, mtp = run.parallel.cp_comm_type, run.model.num_layers, run.model.mtp
    if not isinstance(kinds, list):
        return
    path = "parallel.cp_comm_type"
    if len(kinds) != layers:
        yield Problem(
            path,
            f"{len(kinds)} entries for {layers} layers (model.num_layers): give one value "
            "for all of them, or a list with one entry per layer",
        )
    elif mtp is not None and mtp.num_layers > layers:
        # Depths of multi-token prediction are numbered from 1 and take the first entries.
        yield Problem(
            path,
            f"a list of {layers} entries does not reach {mtp.num_layers} depths "
            "of multi-token prediction (model.mtp.num_layers): give one value",
        )


def _gradient_wire(run: RunConfig) -> Iterator[Problem]:
    wire, kinds = run.parallel.cp_gradient_wire, run.parallel.cp_comm_types
    if wire == "fp32" or not kinds:
        return
    if run.attention.backend not in OWN_BACKENDS:
        yield Problem(
            "parallel.cp_gradient_wire",
            f"{wire} is an option of attention.backend "
            f"{' and '.join(OWN_BACKENDS)}, not of {run.attention.backend}: leave it out",
        )
    elif kinds == ["a2a"]:
        yield Problem(
            "parallel.cp_gradient_wire",
            f"{wire} has no effect under parallel.cp_comm_type a2a, whose "
            "gradients travel complete, or in FP32 where heads are replicated: leave it out, "
            "or use p2p, all_gather or a2a+p2p",
        )
