"""QK-Clip in hybrids, with sharded weights and for what both of our backends measure."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cpu import single_rank

from megatron_patch.core_patches.qk_clip import clip_qk

HEADS, GROUPS, DIM, HIDDEN = 4, 2, 8, 32


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with single_rank():
        yield


def hybrid(backend: str = "reference", *, bf16: bool = False) -> Any:
    """A chunk as core wraps it: one layer with attention, one without, logits far above 1."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from megatron_patch.attention.core import core_attention_spec
    from megatron_patch.attention.replace import replace_core_attention

    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, qk_clip=True,
        qk_clip_threshold=1.0, init_method_std=1.0, bf16=bf16, add_bias_linear=False,
        params_dtype=torch.bfloat16 if bf16 else torch.float32, cuda_graph_modules=[],
    )  # fmt: skip
    spec, _ = replace_core_attention(get_gpt_layer_local_spec(), core_attention_spec(backend))
    torch.manual_seed(0)
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList(
        [torch.nn.Linear(2, 2), build_module(spec, config=config, layer_number=2)]
    )
    model = torch.nn.Module()
    model.decoder = decoder
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = model
    return wrapped


def forward(chunk: Any, *, seed: int = 0) -> Any:
    """One pass; the attention module with the logits of it."""
    layer = chunk.module.module.decoder.layers[1]
    weight = layer.self_attention.linear_qkv.weight
    x = torch.randn(16, 2, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(weight.dtype)
    layer.train()(x, None)
    return layer.self_attention


@pytest.mark.parametrize(("backend", "bf16"), [("reference", False), ("stable_flash", True)])
def test_a_layer_without_attention_is_no_hindrance(backend: str, bf16: bool) -> None:
    chunk = hybrid(backend, bf16=bf16)
    attention = forward(chunk)
    before = attention.core_attention.current_max_attn_logits.clone()
    assert (before > 1).all()
    weight = attention.linear_qkv.weight.clone()
    assert clip_qk([chunk], log_max_only=True) == float(before.max())
    assert attention.core_attention.current_max_attn_logits is None
    assert torch.equal(weight, attention.linear_qkv.weight)
    forward(chunk)
    assert clip_qk([chunk]) == float(before.max())
    forward(chunk)
    after = attention.core_attention.current_max_attn_logits
    # Each group's largest is at the threshold.
    torch.testing.assert_close(
        after.view(GROUPS, -1).amax(1), torch.ones(GROUPS), rtol=2e-2 if bf16 else 1e-4, atol=0
    )
    assert clip_qk([chunk], log_max_only=True) == float(after.max())
    assert clip_qk([chunk]) == 0.0  # nothing was measured since


def with_shard(chunk: Any, rank: int) -> Any:
    """The chunk as the distributed optimizer of one of two ranks leaves it: a flat FP32 shard."""
    weight = chunk.module.module.decoder.layers[1].self_attention.linear_qkv.weight
    n = weight.numel()
    cut = (0, n // 3) if rank == 0 else (n // 3, n)
    weight.main_param = weight.detach().float().flatten()[slice(*cut)].clone()
    weight.main_param_sharded = True
    begin, size = 64, 2 * (64 + n // 3)  # the bucket's halves cut the weight
    chunk.buffers = [
        SimpleNamespace(
            data_parallel_group=SimpleNamespace(rank=lambda: rank, size=lambda: 2),
            ddp_config=SimpleNamespace(use_distributed_optimizer=True),
            buckets=[SimpleNamespace(grad_data=torch.empty(max(size, 1)), offset=0)],
            params=[weight],
            param_index_map={weight: (begin, begin + n, 0)},
        )
    ]
    if rank == 1:  # its half has to hold the rest
        chunk.buffers[0].buckets[0].offset = begin + n // 3 - (begin + n)
        chunk.buffers[0].buckets[0].grad_data = torch.empty(2 * (begin + n))
    chunk.expert_parallel_buffers = []
    return weight, cut


@pytest.mark.parametrize("rank", [0, 1])
def test_the_shard_of_the_distributed_optimizer_is_scaled_like_the_weight(rank: int) -> None:
    chunk = hybrid(bf16=True)
    weight, cut = with_shard(chunk, rank)
    forward(chunk)
    whole = weight.detach().float().flatten()
    clip_qk([chunk])
    assert weight.main_param.dim() == 1 and weight.main_param_sharded
    now = weight.detach().float().flatten()
    assert not torch.equal(whole, now)
    torch.testing.assert_close(weight.main_param, now[slice(*cut)], rtol=1e-2, atol=1e-6)
    kept = weight.main_param.clone()
    chunk.module.module.decoder.layers[1].self_attention.config.qk_clip_threshold = 1e9
    forward(chunk)
    clip_qk([chunk])  # nothing is above
    assert torch.equal(kept, weight.main_param)


def test_an_optimizer_without_weights_to_scale_is_refused() -> None:
    chunk = hybrid(bf16=True)
    weight, _ = with_shard(chunk, 0)
    weight.main_param = None
    forward(chunk)
    with pytest.raises(ValueError, match="use_precision_aware_optimizer"):
        clip_qk([chunk])
