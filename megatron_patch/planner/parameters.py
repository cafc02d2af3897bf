"""Every parameter of every rank, by name and shape, as `model.build` makes them.

Shape legend: h hidden; q, g query and key/value heads; d head dim; f MLP width; V padded
vocabulary; tp, ep, etp tensor, expert and expert-tensor parallel sizes; E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_patch.schema.effective import expert_tensor_parallel_size
from megatron_patch.schema.model import (
    MLAConfig,
    MoEConfig,
    attention_head_dim,
    expert_ffn_hidden_size,
    ffn_hidden_size,
    is_moe_layer,
    longest_sequence,
    query_groups,
)
from megatron_patch.schema.parallel import ParallelConfig
from megatron_patch.schema.run import RunConfig


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of one rank."""

    name: str
    shape: tuple[int, ...]
    split: bool = False
    """Divided over tensor-parallel ranks; the others hold copies."""
    expert: bool = False
    """Reduced over the expert-data-parallel group, in a buffer of its own."""
    tied: bool = False
    """A table of which first and last pipeline stage hold one each, in a bucket of its own."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one model chunk (virtual pipeline stage) of one pipeline rank holds."""

    layers: tuple[int, ...]
    """1-based numbers of its transformer layers."""
    first: bool
    """Has the embedding."""
    last: bool
    """Has the final norm, the output projection, and multi-token prediction."""


def chunks_of(run: RunConfig, stage: int) -> list[Chunk]:
    """The chunks of pipeline rank ``stage``: one, or one per virtual stage (interleaved order)."""
    p = run.parallel
    pp, vp = p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for virtual in range(vp):
        layers = p.chunk_layers(run.model.num_layers, stage=stage, virtual=virtual)
        first, last = stage == 0 and virtual == 0, stage == pp - 1 and virtual == vp - 1
        chunks.append(Chunk(tuple(layers), first, last))
    return chunks


def chunk_parameters(run: RunConfig, chunk: Chunk, vocab: int) -> list[Parameter]:
    """Parameters of ``chunk`` on one rank, in the order of ``named_parameters()``.

    Args:
        run: a configuration that passed its checks.
        chunk: from `chunks_of`.
        vocab: V, padded.
    """
    return list(_Namer(run, vocab).chunk(chunk))


class _Namer:
    """Generators of parameters; ``prefix`` ends with a dot."""

    def __init__(self, run: RunConfig, vocab: int) -> None:
        self.run, self.model, self.vocab = run, run.model, vocab
        self.h = run.model.hidden_size
        self.tp = run.parallel.tensor_model_parallel_size
        self.te = run.model.layer_spec == "te"
        p = run.parallel
        self.etp = expert_tensor_parallel_size(run)
        # As core: experts divided like everything else are reduced like everything else.
        self.own_group = p.expert_model_parallel_size > 1 or self.etp != self.tp

    def chunk(self, chunk: Chunk) -> Iterator[Parameter]:
        model, h = self.model, self.h
        pipelined = self.run.parallel.pipeline_model_parallel_size > 1
        # Kept equal by an all-reduce: the first stage's embedding, and on the last stage the one of
        # multi-token prediction, or else the output projection.
        copied = pipelined and (model.tie_embeddings or model.mtp is not None)
        rows = self.vocab // self.tp
        # Multi-token prediction embeds the tokens again, on the last stage.
        if chunk.first or (chunk.last and model.mtp is not None):
            yield Parameter("embedding.word_embeddings.weight", (rows, h), split=True, tied=copied)
            if model.position_embedding == "learned_absolute":
                longest = longest_sequence(model)
                yield Parameter("embedding.position_embeddings.weight", (longest, h))
        for index, number in enumerate(chunk.layers):
            yield from self.layer(f"decoder.layers.{index}.", number)
        if not chunk.last:
            return
        yield from self.norm("decoder.final_layernorm.", h)
        for depth in range(model.mtp.num_layers if model.mtp is not None else 0):
            yield from self.extra_depth(f"mtp.layers.{depth}.")
        # Where it is tied, the last stage multiplies by the embedding if it has one.
        if not model.tie_embeddings or (pipelined and model.mtp is None):
            tied = copied and model.mtp is None
            yield Parameter("output_layer.weight", (rows, h), split=True, tied=tied)

    def extra_depth(self, prefix: str) -> Iterator[Parameter]:
        """One depth of multi-token prediction (DeepSeek-V3, arXiv:2412.19437)."""
        yield from self.norm(f"{prefix}enorm.", self.h)
        yield from self.norm(f"{prefix}hnorm.", self.h)
        yield Parameter(f"{prefix}eh_proj.weight", (self.h // self.tp, 2 * self.h), split=True)
        yield from self.layer(f"{prefix}mtp_model_layer.", self.model.num_layers)
        yield from self.norm(f"{prefix}final_layernorm.", self.h)

    def layer(self, prefix: str, number: int) -> Iterator[Parameter]:
        """Transformer layer with the 1-based ``number``."""
        yield from self.norm(f"{prefix}input_layernorm.", self.h)
        attention = f"{prefix}self_attention."
        if self.model.softmax_type == "learnable":
            heads = self.model.num_attention_heads // self.tp
            yield Parameter(f"{attention}core_attention.softmax_offset", (heads,), split=True)
        if self.model.mla is None:
            yield from self.attention(attention)
        else:
            yield from self.latent_attention(attention, self.model.mla)
        yield from self.norm(f"{prefix}pre_mlp_layernorm.", self.h)
        moe = self.model.moe
        if moe is None or not is_moe_layer(moe.layer_freq, number):
            yield from self.mlp(f"{prefix}mlp.", ffn_hidden_size(self.model), self.tp)
        else:
            yield from self.experts(f"{prefix}mlp.", moe)

    def norm(self, prefix: str, width: int) -> Iterator[Parameter]:
        yield Parameter(f"{prefix}weight", (width,))
        if self.model.normalization == "LayerNorm":
            yield Parameter(f"{prefix}bias", (width,))

    def attention(self, prefix: str) -> Iterator[Parameter]:
        model, h = self.model, self.h
        q = model.num_attention_heads
        g, d = query_groups(model), attention_head_dim(model)
        yield Parameter(f"{prefix}linear_proj.weight", (h, q * d // self.tp), split=True)
        if model.add_bias_linear:
            yield Parameter(f"{prefix}linear_proj.bias", (h,))
        rows = (q + 2 * g) * d // self.tp
        yield Parameter(f"{prefix}linear_qkv.weight", (rows, h), split=True)
        if model.add_bias_linear or model.add_qkv_bias:
            yield Parameter(f"{prefix}linear_qkv.bias", (rows,), split=True)
        if model.qk_layernorm:
            yield from self.norm(f"{prefix}q_layernorm.", d)
            yield from self.norm(f"{prefix}k_layernorm.", d)

    def latent_attention(self, prefix: str, mla: MLAConfig) -> Iterator[Parameter]:
        h, tp, q = self.h, self.tp, self.model.num_attention_heads
        # Transformer Engine layers keep the down projections whole on every rank.
        down = 1 if self.te else tp
        wide = q * (mla.qk_head_dim + mla.qk_pos_emb_head_dim) // tp
        out = q * mla.v_head_dim // tp
        yield Parameter(f"{prefix}linear_proj.weight", (h, out), split=True)
        if self.model.add_bias_linear:
            yield Parameter(f"{prefix}linear_proj.bias", (h,))
        rank = mla.q_lora_rank
        if rank is None:
            yield Parameter(f"{prefix}linear_q_proj.weight", (wide, h), split=True)
        else:
            shape = rank // down, h
            yield Parameter(f"{prefix}linear_q_down_proj.weight", shape, split=not self.te)
            yield Parameter(f"{prefix}linear_q_up_proj.weight", (wide, rank), split=True)
        latent = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        shape = latent // down, h
        yield Parameter(f"{prefix}linear_kv_down_proj.weight", shape, split=not self.te)
        expand = q * (mla.qk_head_dim + mla.v_head_dim) // tp
        yield Parameter(f"{prefix}linear_kv_up_proj.weight", (expand, mla.kv_lora_rank), split=True)
        if self.model.qk_layernorm:
            if rank is not None:
                yield from self.norm(f"{prefix}q_layernorm.", rank)
            yield from self.norm(f"{prefix}kv_layernorm.", mla.kv_lora_rank)

    def mlp(
        self, prefix: str, width: int, ranks: int, *, expert: bool = False
    ) -> Iterator[Parameter]:
        h, gated = self.h, 2 if self.model.activation == "swiglu" else 1
        rows = gated * width // ranks
        bias = self.model.add_bias_linear
        yield Parameter(f"{prefix}linear_fc1.weight", (rows, h), split=True, expert=expert)
        if bias:
            yield Parameter(f"{prefix}linear_fc1.bias", (rows,), split=True, expert=expert)
        down = h, width // ranks
        yield Parameter(f"{prefix}linear_fc2.weight", down, split=True, expert=expert)
        if bias:
            yield Parameter(f"{prefix}linear_fc2.bias", (h,), expert=expert)

    def experts(self, prefix: str, moe: MoEConfig) -> Iterator[Parameter]:
        yield Parameter(f"{prefix}router.weight", (moe.num_experts, self.h))
        if self.model.add_bias_linear:
            yield Parameter(f"{prefix}router.bias", (moe.num_experts,))
        width = expert_ffn_hidden_size(self.model, moe)
        for local in range(moe.num_experts // self.run.parallel.expert_model_parallel_size):
            where = f"{prefix}experts.local_experts.{local}."
            yield from self.mlp(where, width, self.etp, expert=self.own_group)
        if moe.shared_expert_ffn_hidden_size is not None:
            shared = moe.shared_expert_ffn_hidden_size
            yield from self.mlp(f"{prefix}shared_experts.", shared, self.tp)


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters of the whole model, copies on other ranks not counted."""

    total: int
    active: int
    """Those one token meets: all but the experts it is not routed to."""
    embedding: int
    """Token and position tables and the output projection (once, where tied)."""


def model_counts(run: RunConfig, vocab: int) -> Counts:
    """Count the model of ``run``; ``vocab`` is padded."""
    # The same model on one rank.
    sharded = run.parallel.use_distributed_optimizer
    alone = replace(run, parallel=ParallelConfig(use_distributed_optimizer=sharded))
    (chunk,) = chunks_of(alone, 0)
    parameters = chunk_parameters(alone, chunk, vocab)
    total = sum(p.numel for p in parameters)
    experts = sum(p.numel for p in parameters if ".experts." in p.name)
    moe = run.model.moe
    idle = 0 if moe is None else experts * (moe.num_experts - moe.top_k) // moe.num_experts
    tables = sum(p.numel for p in parameters if p.name.startswith(("embedding.", "output_layer.")))
    return Counts(total, total - idle, tables)
