"""Core attention replaced in every kind of spec, and nothing else touched."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import pytest
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_patch.attention.replace import module_class, replace_core_attention


class New:
    """Stands for a core attention; specs only carry the class."""


class Sparse:
    """Another algorithm."""


def core_classes(spec) -> list[type]:
    """The class of every core attention in a spec, found without the code under test."""
    found = []

    def visit(node, seen):
        if id(node) in seen or isinstance(node, type):
            return
        seen.add(id(node))
        if isinstance(node, functools.partial):
            node = node.keywords
        if isinstance(node, dict):
            node = list(node.values())
        if isinstance(node, (list, tuple)):
            for item in node:
                visit(item, seen)
        elif dataclasses.is_dataclass(node):
            for field in dataclasses.fields(node):
                value = getattr(node, field.name, None)
                if field.name == "core_attention" and value is not None:
                    found.append(module_class(value))
                else:
                    visit(value, seen)

    visit(spec, set())
    return found


def config(**changes) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, **changes}
    )


def moe_block(rank):
    settings = config(num_moe_experts=2, moe_ffn_hidden_size=32, moe_layer_freq=[0, 1, 1, 0])
    return get_gpt_decoder_block_spec(settings, use_transformer_engine=False)


SPECS = {
    "dense": (lambda _: get_gpt_layer_local_spec(), 1),
    "rmsnorm with qk norm": (
        lambda _: get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True),
        1,
    ),
    "mla": (lambda _: get_gpt_layer_local_spec(multi_latent_attention=True), 1),
    "moe layer": (lambda _: get_gpt_layer_local_spec(num_experts=4), 1),
    "block of equal layers": (
        lambda _: get_gpt_decoder_block_spec(config(), use_transformer_engine=False),
        1,
    ),
    "block of dense and moe layers": (moe_block, 2),
    "list of layers": (lambda _: [get_gpt_layer_local_spec(), get_gpt_layer_local_spec()], 2),
    "t5 decoder with cross attention": (lambda _: get_t5_decoder_with_local_block_spec(2), 2),
}


@pytest.mark.parametrize("name", SPECS)
def test_counts_and_leaves_the_original(rank, name):
    build, expected = SPECS[name]
    spec = build(rank)
    before = core_classes(spec)
    replaced, count = replace_core_attention(spec, New)
    assert count == expected
    assert set(core_classes(replaced)) == {New} and len(core_classes(replaced)) == len(before)
    assert core_classes(spec) == before and set(before) == {DotProductAttention}
    # Nothing but core attention differs: putting the old class back gives an equal spec.
    back, _ = replace_core_attention(replaced, DotProductAttention, only={New})
    assert repr(back) == repr(spec)


def test_mtp(rank):
    settings = config(mtp_num_layers=1)
    layer = get_gpt_layer_local_spec()
    mtp = get_gpt_mtp_block_spec(settings, layer, use_transformer_engine=False)
    replaced, count = replace_core_attention(mtp, New)
    assert count == 1 and core_classes(replaced) == [New]
    # A replaced decoder layer carries over, and replacing again changes nothing.
    carried = get_gpt_mtp_block_spec(
        settings, replace_core_attention(layer, New)[0], use_transformer_engine=False
    )
    assert core_classes(carried) == [New]
    assert repr(replace_core_attention(carried, New)[0]) == repr(carried)


def test_module_level_spec_of_another_family_keeps_its_sparse_attention():
    """Hybrid specs are module-level singletons with TE's class and a sparse attention in them."""
    before = core_classes(hybrid_stack_spec)
    replaced, count = replace_core_attention(hybrid_stack_spec, New)
    kept = [c for c in before if c is not TEDotProductAttention]
    assert count == before.count(TEDotProductAttention) > 0
    assert kept and [c for c in core_classes(replaced) if c is not New] == kept
    assert core_classes(hybrid_stack_spec) == before


@pytest.mark.skipif(not HAVE_TE, reason="Transformer Engine is not installed")
def test_transformer_engine_layer():
    for options in ({}, {"multi_latent_attention": True}, {"num_experts": 2}):
        spec = get_gpt_layer_with_transformer_engine_spec(**options)
        replaced, count = replace_core_attention(spec, New)
        assert count == 1 and core_classes(replaced) == [New]


def with_core(value) -> ModuleSpec:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = value
    return spec


@pytest.mark.parametrize(
    "value",
    [
        ModuleSpec(module=DotProductAttention, params={"attention_dropout": 0.0}),
        functools.partial(DotProductAttention, attention_dropout=0.0),
        ModuleSpec(
            module=("megatron.core.transformer.dot_product_attention", "DotProductAttention")
        ),
    ],
    ids=["spec", "partial", "import path"],
)
def test_every_way_to_name_the_old_class(value):
    new = ModuleSpec(module=New, params={"backend": "x"})
    replaced, count = replace_core_attention(with_core(value), new)
    assert count == 1
    assert replaced.submodules.self_attention.submodules.core_attention is new


def test_replacing_twice_is_replacing_once():
    once, _ = replace_core_attention(get_gpt_layer_local_spec(), New)
    twice, count = replace_core_attention(once, New)
    assert count == 1 and repr(twice) == repr(once)


def test_nothing_to_replace_is_an_error():
    with pytest.raises(ValueError, match=r"holds Sparse.*only DotProductAttention, New"):
        replace_core_attention(with_core(Sparse), New)
    with pytest.raises(ValueError, match="no core attention at all"):
        replace_core_attention(ModuleSpec(module=New), New)


def test_only_chooses_what_is_replaced():
    spec = [with_core(Sparse), with_core(DotProductAttention)]
    replaced, count = replace_core_attention(spec, New, only={Sparse})
    assert count == 1 and core_classes(replaced) == [New, DotProductAttention]


def test_a_configuration_inside_params_is_shared_not_copied():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = config()
    spec = get_gpt_layer_local_spec()
    spec.params["config"] = settings
    replaced, _ = replace_core_attention(spec, New)
    assert replaced.params is not spec.params and replaced.params["config"] is settings
