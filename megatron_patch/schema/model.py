"""The ``model:`` section: the shape of the GPT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, frozen=True, slots=True)
class MoEConfig:
    """Mixture of experts; leave ``model.moe`` out for a dense model."""

    num_experts: int
    """Experts in every MoE layer (over all expert-parallel ranks)."""
    top_k: int = 2
    """Experts each token is routed to."""
    ffn_hidden_size: int | None = None
    """Hidden size of one expert's MLP; default: ``model.ffn_hidden_size``."""
    layer_freq: int | list[int] = 1
    """N: every Nth layer is an MoE layer, starting with the first; or a 0/1 list, one per layer."""
    aux_loss_coeff: float = 0.01
    """Weight of the load-balancing loss."""
    load_balancing: Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"] = "aux_loss"
    """How routing is balanced over experts."""
    token_dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens travel to their experts."""
    shared_expert_ffn_hidden_size: int | None = None
    """Hidden size of an always-on shared expert; none by default."""


@dataclass(kw_only=True, frozen=True, slots=True)
class MLAConfig:
    """Multi-latent attention; leave ``model.mla`` out for ordinary attention."""

    q_lora_rank: int | None = None
    """Rank of the query down-projection; null: queries are projected directly."""
    kv_lora_rank: int = 512
    """Rank of the shared key/value latent."""
    qk_head_dim: int = 128
    """Per-head query/key width without position."""
    qk_pos_emb_head_dim: int = 64
    """Per-head width that carries the rotary position."""
    v_head_dim: int = 128
    """Per-head value width."""


@dataclass(kw_only=True, frozen=True, slots=True)
class MTPConfig:
    """Multi-token prediction; leave ``model.mtp`` out to predict one token."""

    num_layers: int = 1
    """Extra prediction depths."""
    loss_scaling_factor: float = 0.1
    """Weight of the extra losses."""


@dataclass(kw_only=True, frozen=True, slots=True)
class RopeScalingConfig:
    """Rotary frequencies for longer sequences; none by default."""

    kind: Literal["llama3", "yarn"]
    """Llama 3.1's scaling, or YaRN (arXiv:2309.00071)."""
    factor: float
    """How much longer the sequences become."""
    original_max_position_embeddings: int
    """Length the frequencies were made for; llama3: 8192."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ModelConfig:
    """The shape of the GPT and everything that changes what it computes."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads."""
    seq_length: int
    """Tokens of one training sequence."""
    num_query_groups: int | None = None
    """Key/value heads (grouped-query attention); default: one per query head."""
    kv_channels: int | None = None
    """Head dimension; default: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = None
    """Hidden size of the MLP; default: 4 x hidden_size (8/3 x, rounded up to 256, for swiglu)."""
    max_position_embeddings: int | None = None
    """Longest sequence the position embedding covers; default: seq_length."""
    position_embedding: Literal["learned_absolute", "rope", "none"] = "rope"
    """Where positions enter: a learned table, rotary queries and keys, or nowhere."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Share of the head dimension that is rotated."""
    rope_scaling: RopeScalingConfig | None = None
    """Rotary frequencies for longer sequences."""
    rope_fusion: Literal["auto", "own", "te", "none"] = "auto"
    """Kernel of the rotation: ours (auto: on a GPU), Transformer Engine's, or none."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of the layer and final norms."""
    norm_epsilon: float = 1e-5
    """Epsilon of the norms."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "relu", "squared_relu"] = "swiglu"
    """Activation of the MLP; swiglu is gated, gelu_tanh OpenAI's."""
    add_bias_linear: bool = False
    """Bias in the linear layers of attention output and MLP."""
    add_qkv_bias: bool = False
    """Bias in the query/key/value projection."""
    qk_layernorm: bool = False
    """Normalize queries and keys per head before attention."""
    tie_embeddings: bool = False
    """Share the input embedding and the output projection."""
    hidden_dropout: float = 0.0
    """Dropout probability of the residual branches."""
    attention_dropout: float = 0.0
    """Dropout probability of the attention weights."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output projections use init_std / sqrt(2 layers)."""
    window: list[int] | None = None
    """Sliding window [left, right] in tokens, -1 = unbounded; null: full causal attention."""
    window_skip_freq: int | list[int] | None = None
    """N: every Nth layer is NOT windowed; or a 0/1 list, one per layer (1 = windowed)."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention sink: none, a fixed zero logit, or a learnable logit per head."""
    fp32_residual_connection: bool = False
    """Keep the residual stream in FP32 while layers compute in BF16."""
    make_vocab_size_divisible_by: int = 128
    """The embedding is padded to a multiple of this (that tensor_model_parallel_size divides)."""
    layer_spec: Literal["local", "te"] = "local"
    """Layers from Megatron-Core's own modules, or from Transformer Engine."""
    moe: MoEConfig | None = None
    """Mixture of experts."""
    mla: MLAConfig | None = None
    """Multi-latent attention."""
    mtp: MTPConfig | None = None
    """Multi-token prediction."""

    @property
    def attention_layers(self) -> int:
        """Layers with attention: the decoder's, then one per multi-token-prediction depth."""
        return self.num_layers + (self.mtp.num_layers if self.mtp is not None else 0)


def query_groups(model: ModelConfig) -> int:
    """Key/value heads: as given, else one per query head."""
    return model.num_query_groups or model.num_attention_heads


def attention_head_dim(model: ModelConfig) -> int:
    """Width of a head: as given, else hidden_size / num_attention_heads (0 heads count as 1)."""
    return model.kv_channels or model.hidden_size // max(1, model.num_attention_heads)


def longest_sequence(model: ModelConfig) -> int:
    """Tokens that a table of positions covers: as given, else seq_length."""
    return model.max_position_embeddings or model.seq_length


def ffn_hidden_size(model: ModelConfig) -> int:
    """Hidden size of the MLP: as given, else 4 h, or 8/3 h rounded up to 256 for swiglu."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    if model.activation != "swiglu":
        return 4 * model.hidden_size
    return -(-(8 * model.hidden_size) // (3 * 256)) * 256


def padded_vocab_size(model: ModelConfig, ids: int, *, ranks: int) -> int:
    """``ids`` rounded up to a multiple of ``make_vocab_size_divisible_by`` that ``ranks`` divides.

    ``ranks`` is the tensor-parallel size. Padded rows take part in the softmax, so the size must
    not depend on it: with the usual 128 it is the same for every power of two up to 128, and a
    checkpoint fits all of them.
    """
    step = math.lcm(model.make_vocab_size_divisible_by, ranks)
    return -(-ids // step) * step


def is_moe_layer(layer_freq: int | list[int], layer_number: int) -> bool:
    """Whether the 1-based layer is an MoE layer (N: every Nth, starting with the first)."""
    if isinstance(layer_freq, int):
        return (layer_number - 1) % layer_freq == 0
    return bool(layer_freq[layer_number - 1])


def expert_ffn_hidden_size(model: ModelConfig, moe: MoEConfig) -> int:
    """Hidden size of one expert's MLP: as given, else that of a dense MLP."""
    return moe.ffn_hidden_size or ffn_hidden_size(model)


def moe_layers(model: ModelConfig) -> list[int] | None:
    """1 for every MoE layer and 0 for every dense one; None without experts."""
    if model.moe is None:
        return None
    numbers = range(1, model.num_layers + 1)
    return [int(is_moe_layer(model.moe.layer_freq, number)) for number in numbers]


def windowed_layers(model: ModelConfig) -> list[int] | None:
    """1 for every layer with a sliding window and 0 for every other; None without a window."""
    if model.window is None:
        return None
    numbers = range(1, model.num_layers + 1)
    return [int(is_windowed_layer(model.window_skip_freq, number)) for number in numbers]


def is_windowed_layer(skip_freq: int | list[int] | None, layer_number: int) -> bool:
    """Whether the 1-based layer is windowed (Megatron-Core: every Nth layer is NOT windowed)."""
    if skip_freq is None:
        return True
    if isinstance(skip_freq, int):
        return layer_number % skip_freq != 0
    return bool(skip_freq[layer_number - 1])
