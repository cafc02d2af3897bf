"""The patch for launchers: reaches what a spec cannot, checks what it touches, leaves no trace."""

from importlib import metadata

import pytest
from megatron.core import package_info
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_patch.attention import patch
from megatron_patch.attention.core import CoreAttention
from megatron_patch.attention.patch import patched_core_attention


def core_of(layer):
    found = layer.submodules.self_attention.submodules.core_attention
    return getattr(found, "module", found)


def test_every_gpt_spec_built_inside_gets_it_and_none_after(rank):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=2,
        moe_ffn_hidden_size=32,
        moe_layer_freq=[0, 1],
        mtp_num_layers=1,
        cuda_graph_modules=[],
    )
    original = LocalSpecProvider.core_attention
    with patched_core_attention("reference"):
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
        latent = get_gpt_layer_local_spec(multi_latent_attention=True)
        inside = [*block.layer_specs, mtp.layer_specs[0].submodules.mtp_model_layer, latent]
    assert [core_of(layer) for layer in inside] == [CoreAttention] * 4
    assert LocalSpecProvider.core_attention is original
    assert core_of(get_gpt_layer_local_spec()) is DotProductAttention


def test_nested_and_after_an_error():
    def inside():
        return get_gpt_layer_local_spec().submodules.self_attention.submodules.core_attention

    with pytest.raises(KeyError), patched_core_attention("reference"):
        with patched_core_attention("stable_flash", stabilizer="none"):
            assert inside().params["backend"] == "stable_flash"
        assert inside().params["backend"] == "reference"
        raise KeyError
    assert inside() is DotProductAttention


def test_an_unknown_megatron_is_refused(monkeypatch):
    original = LocalSpecProvider.core_attention
    monkeypatch.setattr(patch, "core_version", lambda: "0.20.1")
    with pytest.raises(RuntimeError, match=r"0\.20\.1 is not 0\.19"), patched_core_attention("te"):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(LocalSpecProvider, "core_attention", lambda self, config: None)
    with pytest.raises(RuntimeError, match="does not exist"), patched_core_attention("te"):
        pass
    monkeypatch.undo()
    assert LocalSpecProvider.core_attention is original


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2+abc1234", "0.19.0rc0", "0.19.9", None])
def test_a_checkout_of_megatron_lm_has_no_distribution(monkeypatch, version):
    """The version is that of the package that is imported."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    if version is not None:
        monkeypatch.setattr(package_info, "__version__", version)
    with patched_core_attention("reference"):
        assert core_of(get_gpt_layer_local_spec()) is CoreAttention
