"""What a checkpoint holds, as Megatron-Core's sharded state dicts, and how it is compared.

model, model0, model1 ...   parameters (one entry a virtual pipeline stage)
optimizer                   moments and main weights
rng_state                   one object a rank
run                         progress, schedule, layout, configuration text: plain data
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_patch.checkpoint import optimizer_state, random_state, reshardable
from megatron_patch.checkpoint.errors import (
    BadCheckpoint,
    CheckpointError,
    MismatchError,
    is_passing,
    no_checkpoint,
)
from megatron_patch.parallel.buffers import unwrap

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

RNG = "rng_state"
COMMON = "common_state"
NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\.|" + RNG + r"(/|$)|" + COMMON + r"(/|$)")
SCALES = re.compile(r"(.*\.)?_extra_state(/|$)")
"""FP8 scales of Transformer Engine's layers: empty without FP8, absent from local layers."""
NORM_OF_EXPERTS = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
"""The norm before experts, as Transformer Engine's layers and as local ones save it."""
SHOWN = 12


@dataclass(slots=True)
class Parts:
    """The live objects a checkpoint is made of."""

    chunks: list[Any]
    """Model chunks of this rank; wrappers are looked through."""
    optimizer: Any
    schedule: Any
    distributed_optimizer: bool

    def models(self) -> dict[str, Any]:
        """Bare models by their name in the state dict."""
        bare = [unwrap(chunk) for chunk in self.chunks]
        if len(bare) == 1:
            return {"model": bare[0]}
        return {f"model{index}": model for index, model in enumerate(bare)}


def core_metadata(optimizer_sharding: str) -> dict[str, Any]:
    """The options core's ``sharded_state_dict`` methods read."""
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": optimizer_sharding,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def model_state(parts: Parts, metadata: dict[str, Any]) -> dict[str, Any]:
    """Sharded parameters, sharing memory with the models."""
    return {name: m.sharded_state_dict(metadata=metadata) for name, m in parts.models().items()}


def local_part(
    parts: Parts, *, optimizer_sharding: str, rng: tuple[int, int] | None
) -> dict[str, Any]:
    """The sharded state dict without the optimizer. Local: no rank waits for another.

    ``rng``: (rank, world size) to include this rank's random streams; None leaves them out.
    """
    from megatron.core.dist_checkpointing import ShardedObject

    optimizer_state.ensure_state(parts.optimizer)
    state = model_state(parts, core_metadata(optimizer_sharding))
    if rng is not None:
        state[RNG] = ShardedObject(RNG, random_state.capture(), (rng[1],), (rng[0],))
    return state


def add_optimizer(
    state: dict[str, Any], parts: Parts, *, optimizer_sharding: str, loading: bool
) -> None:
    """Complete what `local_part` made, to save or to load into (``loading``: nothing is read).

    Collective among data-parallel ranks when ``fully_reshardable`` state is saved: slices travel
    (`reshardable`), and a rank that fails in between leaves those waiting that it owes some.
    Otherwise local.
    """
    models = {name: state[name] for name in parts.models()}
    fitting, settings = reshardable.fitting, optimizer_state.settings_of_empty_parts
    with torch.no_grad(), fitting(parts.optimizer), settings(parts.optimizer):
        state["optimizer"] = parts.optimizer.sharded_state_dict(
            models if len(models) > 1 else state["model"],
            is_loading=loading,
            metadata=core_metadata(optimizer_sharding),
        )
    if loading:
        optimizer_state.without_groups(parts.optimizer, state["optimizer"])


def check_options(
    info: Mapping[str, Any],
    *,
    carried: Collection[str],
    distributed_optimizer: bool,
    precision: str,
    layout: dict[str, Any],
) -> None:
    """Compare what a manifest says with this run, before a request is built.

    ``carried``: what is taken over beside the weights.

    Raises MismatchError: an option that cannot change on a resume differs.
    """
    remedy = (
        "set it back, or start a new run from it with checkpoint.load_from, without optimizer in "
        "checkpoint.carry_over"
    )
    if info.get("weights_only") and ("optimizer" in carried or "step" in carried):
        raise MismatchError(
            "it holds weights only, no optimizer, schedule or position in the data: start from it "
            "with checkpoint.load_from and checkpoint.load_weights_only: true"
        )
    if "optimizer" not in carried:
        return
    if info.get("distributed_optimizer") != distributed_optimizer:
        raise MismatchError(
            "it was saved with parallel.use_distributed_optimizer: "
            f"{str(info.get('distributed_optimizer')).lower()}, this run has "
            f"{str(distributed_optimizer).lower()}; {remedy}"
        )
    if info.get("precision") != precision:
        raise MismatchError(
            f"it was saved with training.precision: {info.get('precision')}, this run has "
            f"{precision}; {remedy}"
        )
    before, axes = dict(info.get("layout") or {}), ("tp", "pp", "ep", "virtual_stages")
    changed = [axis for axis in axes if before.get(axis) != layout[axis]]
    if info.get("optimizer_sharding") == "dp_reshardable" and changed:
        raise MismatchError(
            "its optimizer state was saved with checkpoint.optimizer_sharding: dp_reshardable, "
            f"which loads on other data-parallel sizes only, and {', '.join(changed)} changed; "
            "resume on the old layout, save with fully_reshardable, then change"
        )


def ask_for_what_is_saved(request: dict[str, Any], index: Metadata) -> None:
    """Fit ``request`` to a checkpoint of another `model.layer_spec`. Local.

    Scales that it lacks are left out, and the norm before experts goes by the name it has there.
    """
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    saved = index.state_dict_metadata

    def kept(entry: Any) -> Any:
        absent = isinstance(entry, ShardedObject) and SCALES.match(entry.unique_key)
        if absent and entry.unique_key not in saved:
            return LocalNonpersistentObject(None)
        if isinstance(entry, ShardedTensor) and entry.key not in saved:
            for name, other in (NORM_OF_EXPERTS, NORM_OF_EXPERTS[::-1]):
                if (there := entry.key.replace(name, other)) in saved:
                    return replace(entry, key=there)
        return entry

    dict_list_map_inplace(kept, request)


def describe(request: dict[str, Any]) -> list[Any]:
    """What this rank asks for: core's sharded tensors and objects, without their data. Local."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
    from megatron.core.dist_checkpointing.utils import extract_sharded_base

    sharded, _ = extract_sharded_base(load_preprocess(request)[0])
    return [entry.without_data() for entry in nested_values(sharded)]


def check_fit(asked: list[list[Any]], index: Metadata, *, skip: str) -> None:
    """Compare names and global shapes of what is asked for with what is saved. Reads nothing.

    Args:
        asked: what `describe` says on every rank.
        index: of the checkpoint.
        skip: regular expression of saved names that need not be asked for.

    Raises:
        MismatchError: naming parameters that differ, are missing or are left over.
        CheckpointingException: (core's, on the first rank only) the ranks' parts overlap or do not
            cover a tensor.
    """
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.validation import validate_sharding_integrity

    everything: dict[str, tuple[int, ...] | None] = {}
    for entry in (entry for part in asked for entry in part):
        if isinstance(entry, ShardedTensor):
            everything[entry.key] = tuple(entry.global_shape)
        elif isinstance(entry, ShardedObject):
            everything[entry.unique_key] = None
    saved = index.state_dict_metadata
    problems = [
        f"{name}: the model has shape {list(shape)}, the checkpoint {list(_size(saved[name]))}"
        for name, shape in sorted(everything.items())
        if shape is not None and name in saved and tuple(_size(saved[name])) != shape
    ]
    problems += [f"{name}: not in the checkpoint" for name in sorted(set(everything) - set(saved))]
    problems += [
        f"{name}: in the checkpoint, but not in the model"
        for name in sorted(set(saved) - set(everything))
        if not re.match(skip, name) and not SCALES.match(name)
    ]
    if problems:
        more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        head = "the checkpoint does not fit this configuration:"
        text = "\n  ".join([head, *problems[:SHOWN], *more])
        if all(problem.startswith("optimizer.") for problem in problems):
            text += (
                "\nthe model fits, the optimizer is another one: set optimizer.name back, or leave "
                "optimizer out of checkpoint.carry_over"
            )
        raise MismatchError(text)
    validate_sharding_integrity(asked)


def _size(entry: Any) -> tuple[int, ...]:
    return tuple(getattr(entry, "size", ()))


def read(request: dict[str, Any], folder: Path, index: Metadata) -> dict[str, Any]:
    """Load into ``request`` and return the state dict, reading nothing but data. Local.

    Core would check the sharding between two of its reads, in a collective: a rank whose first
    read fails would leave the others in it. `check_fit` has done that.

    Raises:
        BadCheckpoint: a shard holds something that is not data.
        CheckpointError: it cannot be loaded for another reason; an UnavailableError where that is
            the file system or the machine.
    """
    from megatron.core import dist_checkpointing

    from megatron_patch.checkpoint.safe_reader import safe_loading

    try:
        quiet = warnings.catch_warnings(action="ignore")  # core and torch about their own future
        with safe_loading(index), torch.no_grad(), quiet:
            return dist_checkpointing.load(request, str(folder), validate_access_integrity=False)
    except (Exception, CheckpointException) as error:  # torch's is a BaseException
        cause = _cause(error)
        if isinstance(cause, (BadCheckpoint, CheckpointError)):
            raise cause from None
        raise no_checkpoint(
            f"{folder.name} cannot be loaded: {type(cause).__name__}: {cause}",
            passing=is_passing(cause),
        ) from error


def _cause(error: BaseException) -> BaseException:
    """The first exception inside torch's collection of them, or the exception itself."""
    if isinstance(error, CheckpointException):
        for inner, _ in error.failures.values():
            return _cause(inner)
    return error
