"""Put another module into any Megatron-Core spec, without touching the spec that was given.

    spec, count = replace_core_attention(get_gpt_layer_local_spec(), MyCoreAttention)

Layer specs, block specs and multi-token-prediction specs nest `ModuleSpec`s, dataclasses of
submodules, lists and ``functools.partial``s; `rewrite_spec` walks all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.spec_utils import ModuleSpec, import_module

FIELD = "core_attention"


def replace_core_attention(
    spec: Any, new: Any, *, only: Iterable[type] | None = None
) -> tuple[Any, int]:
    """Copy a spec with its core attention replaced.

    Args:
        spec: `ModuleSpec` (layer, MTP layer), `TransformerBlockSubmodules`,
            `MultiTokenPredictionBlockSubmodules`, a list of layer specs, or any dataclass of
            submodules. It is not modified; module-level singletons are safe to pass.
        new: a module class, or `ModuleSpec(module=cls, params={...})` to hand it options.
        only: replace only these classes; default: Megatron-Core's own `DotProductAttention` and
            `TEDotProductAttention`. The class of ``new`` is always included, so that replacing
            twice is the same as once. Other algorithms (sparse attention, a cross attention of
            another class) stay as they are.

    Returns (the copy, number of places replaced). A block of identical layers repeats one layer
    spec and counts once; a block with dense and MoE layers counts twice.

    Raises ValueError: nothing was replaced; the message lists the core-attention classes found.
    """
    wanted = set(default_classes() if only is None else only) | {module_class(new)}
    found: list[type] = []

    def decide(name: str, value: Any) -> Any:
        if name != FIELD or value is None:
            return KEEP
        found.append(module_class(value))
        return new if found[-1] in wanted else KEEP

    result, count = rewrite_spec(spec, decide)
    if count == 0:
        there = ", ".join(sorted({_name(cls) for cls in found})) or "no core attention at all"
        names = ", ".join(sorted(_name(cls) for cls in wanted))
        raise ValueError(
            f"nothing to replace in this {type(spec).__name__}: it holds {there}, and only {names} "
            "are replaced; pass only={...} with the class to replace"
        )
    return result, count


def default_classes() -> frozenset[type]:
    """The core-attention classes of Megatron-Core that compute plain softmax attention."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    # Without Transformer Engine the second is a stand-in object, which specs carry all the same.
    return frozenset({DotProductAttention, TEDotProductAttention})


def _name(cls: Any) -> str:
    return getattr(cls, "__qualname__", "TEDotProductAttention (not installed)")


class _Keep:
    pass


KEEP = _Keep()
"""What a ``decide`` function returns to leave a field as it is."""


def rewrite_spec(spec: Any, decide: Callable[[str, Any], Any]) -> tuple[Any, int]:
    """Copy a spec, asking ``decide(field name, value)`` about every field of every dataclass in it.

    A field for which ``decide`` returns something other than `KEEP` gets that value; the others are
    walked further. All containers are copied, leaves (classes, functions, configs) are shared.

    Returns:
        (the copy, number of fields replaced); a container reached twice is copied and counted once.
    """
    copies: dict[int, Any] = {}
    alive: list[Any] = []  # keeps ids unique while the walk lasts
    count = 0

    def field(name: str, value: Any) -> Any:
        nonlocal count
        decided = decide(name, value)
        if decided is KEEP:
            return walk(value)
        count += 1
        return decided

    def walk(node: Any) -> Any:
        if id(node) in copies:
            return copies[id(node)]
        result = rebuilt(node)
        copies[id(node)] = result
        alive.append(node)
        return result

    def rebuilt(node: Any) -> Any:
        if isinstance(node, (list, tuple)) and type(node) in (list, tuple):
            return type(node)(walk(item) for item in node)
        if type(node) is dict:
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, functools.partial):
            keywords = {key: field(key, value) for key, value in node.keywords.items()}
            return functools.partial(node.func, *[walk(a) for a in node.args], **keywords)
        if isinstance(node, ModelParallelConfig):
            return node  # a configuration inside params: identity matters, and nothing to replace
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            result = copy.copy(node)
            for f in dataclasses.fields(node):
                if hasattr(node, f.name):
                    value = field(f.name, getattr(node, f.name))
                    object.__setattr__(result, f.name, value)  # frozen ones too
            return result
        return node

    return walk(spec), count


def module_class(value: Any) -> type:
    """The class a spec entry builds: a class, a `ModuleSpec`, a partial, or an import path."""
    if isinstance(value, ModuleSpec):
        value = value.module
    if isinstance(value, functools.partial):
        return module_class(value.func)
    if isinstance(value, tuple):
        value = import_module(value)
    return value
