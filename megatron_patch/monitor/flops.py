"""Model FLOPs of one training step: what the mathematics needs, not what the kernels execute.

Shapes
    h hidden, q query heads, g key/value heads, d head dim, f MLP width, V vocabulary, s sequence
    c mean number of keys a query attends to: (s + 1) / 2 when causal, less under a window

Conventions
    A product [m, k] x [k, n] counts 2 m k n; the backward pass counts twice the forward pass (the
    gradients of both operands), so a training step is 3x the forward matrix products (Kaplan et
    al. 2020, arXiv:2001.08361; Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Norms,
    activations, softmax, rotary embeddings and the embedding lookup are left out. Recomputed
    activations are not counted: MFU, not hardware utilization. Attention counts only the unmasked
    half of the score matrix; counting all of it (as appendix B does) gives larger MFU figures for
    the same speed.
"""

from __future__ import annotations

from megatron_patch.schema.model import (
    MLAConfig,
    ModelConfig,
    attention_head_dim,
    expert_ffn_hidden_size,
    ffn_hidden_size,
    is_moe_layer,
    is_windowed_layer,
    query_groups,
)
from megatron_patch.schema.run import RunConfig

BACKWARD_FACTOR = 3.0  # forward + twice the forward in the backward pass


def mean_context(seq_length: int, window: tuple[int, int] | None = None) -> float:
    """Mean number of keys a query sees under the causal mask and a window of ``left`` keys back.

    Args:
        seq_length: s, tokens.
        window: (left, right) reach in tokens, -1 = unbounded; right is cut off by causality.
    """
    left = -1 if window is None else window[0]
    if left < 0 or left >= seq_length:
        return (seq_length + 1) / 2
    ramp = left * (left + 1) / 2  # queries 0 .. left-1 see 1 .. left keys
    return (ramp + (seq_length - left) * (left + 1)) / seq_length


def _attention(model: ModelConfig, context: float) -> float:
    """Forward FLOPs per token of grouped-query attention: projections and both score products."""
    h, q = model.hidden_size, model.num_attention_heads
    g, d = query_groups(model), attention_head_dim(model)
    projections = 2 * h * d * (q + 2 * g) + 2 * q * d * h
    return projections + 2 * q * (d + d) * context


def _latent_attention(model: ModelConfig, mla: MLAConfig, context: float) -> float:
    """Forward FLOPs per token of multi-latent attention (DeepSeek-V2, arXiv:2405.04434)."""
    h, q = model.hidden_size, model.num_attention_heads
    d_qk, d_v = mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim
    if mla.q_lora_rank is None:
        query = 2 * h * q * d_qk
    else:
        query = 2 * mla.q_lora_rank * (h + q * d_qk)
    latent = 2 * h * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    expand = 2 * mla.kv_lora_rank * q * (mla.qk_head_dim + d_v)
    out = 2 * q * d_v * h
    return query + latent + expand + out + 2 * q * (d_qk + d_v) * context


def _mlp(hidden: int, width: int, gated: bool) -> float:
    return 2 * hidden * width * (3 if gated else 2)


def _layer(model: ModelConfig, layer_number: int) -> float:
    """Forward FLOPs per token of one transformer layer (1-based number)."""
    window = None
    if model.window is not None and is_windowed_layer(model.window_skip_freq, layer_number):
        window = (model.window[0], model.window[1])
    context = mean_context(model.seq_length, window)
    mla = model.mla
    attend = _attention(model, context) if mla is None else _latent_attention(model, mla, context)
    gated, h = model.activation == "swiglu", model.hidden_size
    moe = model.moe
    if moe is None or not is_moe_layer(moe.layer_freq, layer_number):
        return attend + _mlp(h, ffn_hidden_size(model), gated)
    experts = moe.top_k * _mlp(h, expert_ffn_hidden_size(model, moe), gated)
    shared = _mlp(h, moe.shared_expert_ffn_hidden_size or 0, gated)
    return attend + experts + shared + 2 * h * moe.num_experts


def flops_per_token(run: RunConfig, *, vocab_size: int) -> float:
    """FLOPs of forward and backward per trained token.

    Args:
        run: configuration; only ``run.model`` matters.
        vocab_size: V, rows of the output projection that are computed (the padded size).
    """
    model = run.model
    h = model.hidden_size
    forward = sum(_layer(model, n) for n in range(1, model.num_layers + 1))
    forward += 2 * h * vocab_size
    if model.mtp is not None:
        # Each depth: the [2h, h] merge of hidden state and embedding, one layer, its own logits
        # (DeepSeek-V3, arXiv:2412.19437, sec. 2.2).
        depth = 2 * (2 * h) * h + _layer(model, model.num_layers) + 2 * h * vocab_size
        forward += model.mtp.num_layers * depth
    return BACKWARD_FACTOR * forward
