"""FLOP counts against figures worked out by hand or counted by PyTorch."""

import pytest
from run_config import run_config

from megatron_patch.monitor.flops import flops_per_token, mean_context
from megatron_patch.schema.model import MLAConfig, MoEConfig, MTPConfig, is_moe_layer


def brute_context(s: int, left: int) -> float:
    reach = s if left < 0 else left
    return sum(min(i, reach) + 1 for i in range(s)) / s


@pytest.mark.parametrize("s", [1, 7, 64])
@pytest.mark.parametrize("left", [-1, 0, 1, 5, 63, 64, 1000])
def test_mean_context_counts_unmasked_keys(s, left):
    assert mean_context(s, (left, 0)) == pytest.approx(brute_context(s, left))
    assert mean_context(s) == (s + 1) / 2


def test_gpt2_small_by_hand():
    """12 h^2 weights a layer (4 attention, 8 MLP), 2 FLOPs each, 4 h c for the scores, 2 h V."""
    h, layers, s, v = 768, 12, 1024, 50304
    run = run_config(
        model={
            "num_layers": layers,
            "hidden_size": h,
            "num_attention_heads": 12,
            "seq_length": s,
            "ffn_hidden_size": None,
            "activation": "gelu",
        }
    )
    forward = layers * (24 * h * h + 4 * h * (s + 1) / 2) + 2 * h * v
    assert flops_per_token(run, vocab_size=v) == pytest.approx(3 * forward)


def test_matrix_products_agree_with_pytorch_counter():
    """The projections of a GQA + SwiGLU layer, counted by torch.utils.flop_counter."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    h, f, q, g, tokens, v = 64, 160, 8, 2, 16, 128
    d = h // q
    run = run_config(
        model={
            "num_layers": 1,
            "num_attention_heads": q,
            "num_query_groups": g,
            "ffn_hidden_size": f,
            "seq_length": 1,  # one key per query: the score products stay out of the comparison
        }
    )
    x = torch.randn(tokens, h)
    shapes = [(h, d * (q + 2 * g)), (q * d, h), (h, f), (h, f), (f, h), (h, v)]
    with FlopCounterMode(display=False) as counter:
        for rows, columns in shapes:
            torch.randn(tokens, rows) @ torch.randn(rows, columns)
    assert x.shape == (tokens, h)
    scores = 4 * h * 1
    found = flops_per_token(run, vocab_size=v)
    assert found == pytest.approx(3 * (counter.get_total_flops() / tokens + scores))


def test_mixture_counts_active_experts_only():
    dense = run_config(model={"activation": "gelu", "ffn_hidden_size": 128})
    sparse = run_config(
        model={
            "activation": "gelu",
            "ffn_hidden_size": 128,
            "moe": MoEConfig(num_experts=8, top_k=2, layer_freq=2),
        }
    )
    h, f = 64, 128
    router, one_expert = 2 * h * 8, 4 * h * f
    difference = 3 * (router + one_expert)  # layer 1 of 2 is sparse: 2 experts instead of 1 MLP
    found = flops_per_token(sparse, vocab_size=256) - flops_per_token(dense, vocab_size=256)
    assert found == pytest.approx(difference)
    assert [is_moe_layer(2, n) for n in (1, 2, 3, 4)] == [True, False, True, False]
    assert [is_moe_layer([0, 1], n) for n in (1, 2)] == [False, True]


def test_latent_attention_and_extra_depths_by_hand():
    h, q, s, v, f = 64, 4, 32, 256, 128
    mla = MLAConfig(
        q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=12
    )
    run = run_config(
        model={"num_layers": 1, "mla": mla, "mtp": MTPConfig(num_layers=2), "activation": "gelu"}
    )
    down, up = h * 24 + h * (16 + 4), 24 * q * 12 + 16 * q * (8 + 12)
    attention = 2 * (down + up + q * 12 * h) + 2 * q * (12 + 12) * (s + 1) / 2
    layer = attention + 4 * h * f
    depth = layer + 4 * h * h + 2 * h * v
    assert flops_per_token(run, vocab_size=v) == pytest.approx(3 * (layer + 2 * h * v + 2 * depth))


def test_window_layers_are_cheaper():
    full = run_config(model={"seq_length": 1024})
    local = run_config(model={"seq_length": 1024, "window": [63, 0], "window_skip_freq": 2})
    h = 64
    difference = 3 * 4 * h * (mean_context(1024) - mean_context(1024, (63, 0)))
    found = flops_per_token(full, vocab_size=256) - flops_per_token(local, vocab_size=256)
    assert found == pytest.approx(difference)  # layer 1 windowed, layer 2 (2 % 2 == 0) not
