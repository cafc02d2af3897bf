"""Effective values of a configuration: equal where two texts mean the same.

A key that is null, or that a text of an earlier version lacks, may be written out, and a pattern
over the layers may be a number or a list. Runs are compared by these values, and the model is built
from the same functions.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache, partial
from typing import Any

from megatron_patch.schema import model
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.switches import SWITCHES, Switch


def data_seed(run: RunConfig) -> int:
    """Seed of the training order: ``data.seed``, else ``training.seed``."""
    return run.training.seed if run.data.seed is None else run.data.seed


def decay_steps(run: RunConfig) -> int:
    """Step at which a run that begins with this configuration reaches ``min_lr``."""
    return run.optimizer.decay_steps or run.training.train_steps


def warmup_end(run: RunConfig) -> int:
    """Step at which the warm-up of the learning rate is over."""
    return run.optimizer.begin_step + run.optimizer.warmup_steps


def expert_tensor_parallel_size(run: RunConfig) -> int:
    """Ranks one expert's matrices are split over: as given, else those of every matrix."""
    parallel = run.parallel
    return parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size


def rope_kernel(run: RunConfig) -> str | None:
    """What rotates queries and keys: ``own``, ``te``, ``none`` (core's steps); None: nothing."""
    asked = run.model.rope_fusion
    if run.model.position_embedding != "rope":
        return None
    if asked != "auto":
        return asked
    return "own" if run.training.device == "cuda" else "none"


def groups_experts(run: RunConfig) -> bool:
    """``training.grouped_experts``, or what its null stands for; False for a dense model."""
    asked = run.training.grouped_experts
    return run.model.moe is not None and (not run.model.add_bias_linear if asked is None else asked)


def _end_of_document(run: RunConfig) -> int | None:
    given, kind = run.data.tokenizer.eod_id, run.data.tokenizer.kind
    return 256 if given is None and kind == "bytes" else given


def masks_ends(run: RunConfig) -> bool:
    """Whether end-of-document tokens carry no loss."""
    return run.data.eod_mask_loss or run.data.document_attention


def _resets_positions(run: RunConfig) -> bool:
    """Other embeddings read no position ids; earlier versions took the key with all of them."""
    resets = run.data.reset_position_ids or run.data.document_attention
    return resets and run.model.position_embedding == "learned_absolute"


DERIVED: dict[str, Callable[[RunConfig], Any]] = {
    "run_dir": lambda run: str(run.directory),
    "checkpoint.directory": lambda run: str(run.checkpoint_directory),
    "model.num_query_groups": lambda run: model.query_groups(run.model),
    "model.kv_channels": lambda run: model.attention_head_dim(run.model),
    "model.ffn_hidden_size": lambda run: model.ffn_hidden_size(run.model),
    "model.max_position_embeddings": lambda run: model.longest_sequence(run.model),
    # Attention is causal: nothing to the right is ever visible.
    "model.window": lambda run: run.model.window and [run.model.window[0], 0],
    "model.window_skip_freq": lambda run: model.windowed_layers(run.model),
    "model.moe.ffn_hidden_size": (
        lambda run: run.model.moe and model.expert_ffn_hidden_size(run.model, run.model.moe)
    ),
    "model.moe.layer_freq": lambda run: model.moe_layers(run.model),
    "optimizer.decay_steps": decay_steps,
    "data.seed": data_seed,
    "data.eod_mask_loss": masks_ends,
    "data.reset_position_ids": _resets_positions,
    "data.tokenizer.eod_id": _end_of_document,
    "parallel.expert_tensor_parallel_size": expert_tensor_parallel_size,
}
"""Keys whose value others decide where it is null, or that have several spellings."""


def _off(switch: Switch, run: RunConfig) -> bool:
    return not switch.reads(run)


IDLE: dict[str, Callable[[RunConfig], bool]] = {
    **{key: partial(_off, switch) for key, switch in SWITCHES.items()},
    "model.rope_fusion": lambda run: run.model.position_embedding != "rope",
    "model.max_position_embeddings": (
        lambda run: run.model.position_embedding != "learned_absolute"
    ),
    "model.add_qkv_bias": lambda run: run.model.add_bias_linear,
    "training.grouped_experts": lambda run: run.model.moe is None,
}
"""Keys that nothing reads under the values of others: whether that is so."""


EARLIER: dict[str, Any] = {
    "model.rope_fusion": "none",
    "training.compile_fusions": False,
    "training.gradient_accumulation_fusion": False,
    "training.grouped_experts": False,
    "data.split": [0.98, 0.01, 0.01],
}
"""Keys whose default is for new runs: what a run did whose record lacks them."""


Change = tuple[str, Any, Any]
"""(key, old, new); a key that one of the two lacks is `ABSENT` there."""


class Absent:
    """Stands for a key that is not there (None is a value)."""

    def __str__(self) -> str:
        return "absent"


ABSENT = Absent()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Keys of two resolved configurations, as YAML holds them, whose effective values differ.

    A key that an earlier version did not write has its default. What follows from another key,
    and is written alike in both, is left out, and so is what nothing reads in either.
    """
    (old, old_written, old_idle), (new, new_written, new_idle) = _values(before), _values(after)
    idle = old_idle & new_idle
    return [
        (key, was, now)
        for key in dict.fromkeys([*new, *old])
        for was, now in [(old.get(key, ABSENT), new.get(key, ABSENT))]
        if (type(was), was) != (type(now), now)
        and not (key in DERIVED and old_written.get(key) == new_written.get(key))
        and not any(f"{key}.".startswith(f"{path}.") for path in idle)
    ]


def recorded(tree: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
    """A configuration as an earlier run recorded it, and the keys in it that are none any more.

    A key that it lacks has its default, or None where there is none.
    """
    unknown: dict[str, Any] = {}
    run = _read(RunConfig, tree, "", unknown)
    return run, list(unknown)


def _values(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Dotted path -> effective value of every scalar; what is written where it is derived; the
    paths that are `IDLE`."""
    unknown: dict[str, Any] = {}
    run = _read(RunConfig, tree, "", unknown)
    flat, written = flatten(asdict(run)) | (flatten(unknown) if unknown else {}), dict[str, Any]()
    for path, derive in DERIVED.items():
        inside = {key: value for key, value in flat.items() if f"{key}.".startswith(f"{path}.")}
        if not inside:  # of a section that is not there
            continue
        try:
            value = derive(run)
        except (ArithmeticError, AttributeError, LookupError, TypeError):
            continue  # of keys that the tree lacks, or that hold nothing of their type
        flat = {key: v for key, v in flat.items() if key not in inside} | {path: value}
        written[path] = inside
    return flat, written, set(filter(partial(_is_idle, run), IDLE))


def _is_idle(run: RunConfig, key: str) -> bool:
    try:
        return IDLE[key](run)
    except (AttributeError, TypeError):  # of keys that the tree lacks, or of no type of theirs
        return False


_hints = cache(typing.get_type_hints)


def _read(section: type, tree: Any, path: str, unknown: dict[str, Any]) -> Any:
    """A section of a tree as its dataclass; a key without default that is not there is None."""
    if not isinstance(tree, Mapping):
        return tree
    hints, values = _hints(section), dict[str, Any]()
    for item in fields(section):
        inner = f"{path}{item.name}"
        if item.name in tree:
            values[item.name] = _value(hints[item.name], tree[item.name], inner, unknown)
        elif inner in EARLIER:
            values[item.name] = EARLIER[inner]
        elif item.default is not MISSING:
            values[item.name] = item.default
        else:
            factory = item.default_factory
            values[item.name] = None if factory is MISSING else factory()
    unknown.update({f"{path}{key}": v for key, v in tree.items() if key not in values})
    return section(**values)


def _value(hint: Any, value: Any, path: str, unknown: dict[str, Any]) -> Any:
    members = typing.get_args(hint) or (hint,)
    if isinstance(value, Mapping):
        section = next((m for m in members if is_dataclass(m)), None)
        return value if section is None else _read(section, value, f"{path}.", unknown)  # type: ignore[arg-type]
    if isinstance(value, list):
        element = next((m for m in typing.get_args(hint) if typing.get_origin(m) is list), hint)
        inner = next(iter(typing.get_args(element)), Any)
        return [_value(inner, v, f"{path}.{n}", unknown) for n, v in enumerate(value)]
    number = isinstance(value, (int, str)) and not isinstance(value, bool)
    if number and float in members and not (isinstance(value, int) and int in members):
        try:
            return float(value)  # YAML 1.1 takes 1e-3 for text
        except ValueError:
            return value
    return value


def flatten(node: Any, path: str = "") -> dict[str, Any]:
    """Dotted path -> every scalar; an empty list or section is its own value."""
    if not (isinstance(node, (dict, list)) and node):
        return {path: node}
    items = node.items() if isinstance(node, dict) else enumerate(node)
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{path}.{key}" if path else str(key))
    return flat
