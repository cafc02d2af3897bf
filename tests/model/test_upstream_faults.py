"""Faults of Megatron-LM #7452 that no configuration reaches: who adds the feature fails here first.

Those that can be reached are compared with one rank in tests/training/test_compositions.py.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compositions import FEATURES, VOCAB, run_of
from megatron_cpu import layout, single_rank, tiny_run

from megatron_patch.config import types
from megatron_patch.core_patches import gpt
from megatron_patch.schema.run import RunConfig
from megatron_patch.training.step import forward_step

ABSENT = {
    "1, label smoothing": "^model.*smooth|label_smooth",
    "2, gathered logits": "gather_output|parallel_output",
    "4, activations saved in shares": "fp4|saved_activations",
    "5 and 10, padding masks": "padding",
    "6, cross attention": "cross|encoder|t5|retro",
    "7, images": "vision|^model.*image|llava",
    "9, means of ranks": "per_token_loss",
    "11, linear attention": "delta|mamba|ssm|linear_att|gdn|hybrid|experimental",
    "12, checkpoints of Megatron-FSDP": "fsdp",
    "router terms": "z_loss|expert_bias|shared_expert_gate|capacity",
}
OFF = {
    "fp8": None,
    "fp4": None,
    "distribute_saved_activations": False,
    "experimental_attention_variant": None,
    "moe_z_loss_coeff": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_gate": False,
    "moe_expert_capacity_factor": None,
    "mtp_use_repeated_layer": False,
    "mtp_detach_heads": False,
    "calculate_per_token_loss": True,
}


@pytest.mark.parametrize("fault", ABSENT)
def test_no_key_leads_there(fault):
    every = {key for key, _ in types.walk(RunConfig)}
    assert "model.moe.top_k" in every and "data.tokenizer.kind" in every
    assert [key for key in every if re.search(ABSENT[fault], key)] == []


@pytest.fixture(scope="module")
def built():
    """Of every feature set: core's configuration, and the model."""
    from megatron_patch.model.build import build_model

    with single_rank():
        yield {
            name: (model.config, model.chunks[0])
            for name, model in (
                (name, build_model(run_of(features, {}), vocab_size=VOCAB))
                for name, features in FEATURES.items()
            )
        }


@pytest.mark.parametrize("name", FEATURES)
def test_core_is_told_to_leave_it(built, name):
    config, _ = built[name]
    assert {key: getattr(config, key) for key in OFF} == OFF


@pytest.mark.parametrize("name", FEATURES)
def test_groups_are_those_of_the_process(built, name):
    """Findings 4 to 7 need groups handed to the model; ours takes Megatron's own for every part."""
    from megatron.core import parallel_state

    _, model = built[name]
    tp = parallel_state.get_tensor_model_parallel_group()
    experts = parallel_state.get_expert_tensor_parallel_group()
    for part in model.modules():
        group = getattr(part, "tp_group", None)
        assert group is None or group in (tp, experts)
        assert not type(part).__module__.startswith("megatron.core.ssm")
        assert type(part).__name__ != "CrossAttention"  # finding 6
    assert type(model) is gpt.GPTModel and model.pg_collection.tp is tp


def test_the_trainer_hands_on_no_padding_mask():
    """Findings 5 and 10."""
    seen = {}

    def model(*inputs, **options):
        seen.update(options)
        return torch.ones(1, 4)

    names = ("tokens", "labels", "loss_mask", "position_ids")
    forward_step(layout())(iter([{name: torch.ones(1, 4) for name in names}]), model)
    assert set(seen) == {"labels", "loss_mask"}


@pytest.mark.parametrize(("width", "ranks"), [(64, 2), (64, 4), (16, 2), (60, 1), (128, 1)])
@pytest.mark.parametrize("fused", [False, True])
def test_logits_of_the_whole_vocabulary_are_refused(width, ranks, fused):
    """Finding 2. Taken for parts they would add log(ranks) to the loss."""
    model = SimpleNamespace(
        vocab_size=64,
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: ranks)),
        config=SimpleNamespace(cross_entropy_loss_fusion=fused),
    )
    with pytest.raises(ValueError, match="for a vocabulary of 64"):
        gpt.GPTModel.compute_language_model_loss(model, torch.zeros(1, 2), torch.zeros(2, 1, width))


def test_our_layer_takes_the_groups_it_is_given(built):
    """Megatron-Bridge hands layers groups of its own: sinks are cut and marked by those."""
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_patch.attention.core import CoreAttention
    from megatron_patch.model.transformer_config import transformer_config

    def sinks(rank, size):
        group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
        groups = SimpleNamespace(tp=group, cp=None)
        torch.manual_seed(3)
        layer = CoreAttention(
            config, 1, AttnMaskType.causal, "self", pg_collection=groups, backend="reference"
        )
        return layer.softmax_offset

    config = transformer_config(tiny_run({"softmax_type": "learnable"}))
    whole, parts = sinks(0, 1), [sinks(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)
    assert all(part.tensor_model_parallel and part.partition_dim == 0 for part in parts)


def test_transformer_engines_copies_are_not_parts():
    """ROCm Transformer Engine #715: its Linear marks every weight. Core takes the mark back.

    What a mark on copies does: tests/training/test_compositions.py, "copies marked".
    """
    from megatron.core import extensions

    text = (Path(extensions.__file__).parent / "transformer_engine.py").read_text()
    found = text[
        text.index("class TELinear(") : text.index("class TELayerNormColumnParallelLinear(")
    ]
    after = found[found.index("super().__init__(\n") :]
    assert re.search(
        r'if parallel_mode == "duplicated":.*setattr\(param, "tensor_model_parallel", False\)',
        after,
        re.DOTALL,
    )
