"""`build_model`: the GPTModel chunks of this pipeline rank, with our attention and norms inside."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_patch.attention import registry
from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.core import core_attention_spec
from megatron_patch.attention.replace import (
    KEEP,
    module_class,
    replace_core_attention,
    rewrite_spec,
)
from megatron_patch.core_patches import quiet, residual
from megatron_patch.core_patches.cross_entropy import is_compiled
from megatron_patch.core_patches.experts import Experts, GroupedMLP
from megatron_patch.core_patches.gpt import GPTModel
from megatron_patch.core_patches.mla import MLASelfAttention
from megatron_patch.core_patches.norms import norm_class
from megatron_patch.core_patches.rope import own_rope, packed_rope
from megatron_patch.core_patches.sinks import mark_sinks
from megatron_patch.core_patches.split import qkv_split
from megatron_patch.core_patches.weight_gradient import weight_gradient
from megatron_patch.model.transformer_config import transformer_config
from megatron_patch.schema.effective import groups_experts, rope_kernel
from megatron_patch.schema.model import longest_sequence, padded_vocab_size

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch.schema.run import RunConfig

__all__ = ["BuiltModel", "build_model", "layer_specs", "transformer_config"]

log = logging.getLogger(__name__)

RECOMPILE_LIMIT = 32
"""Shapes a compiled function may meet."""

REMEDY = {
    "model.layer_spec": "model.layer_spec: local",
    "model.rope_fusion": "model.rope_fusion: own",
}

_HYBRID_NOTE = (
    "model: GPTModel of Megatron-Core 0.19, which it plans to replace by HybridModel "
    "(docs/backends.md)"
)

_ALONG_THE_STREAM = {"input_layernorm": False, "pre_mlp_layernorm": False, "layer_norm": True}
"""Norms whose input is the residual stream; whether it ends there."""
_NORM_FIELDS = {"q_layernorm", "k_layernorm", "kv_layernorm", "enorm", "hnorm", *_ALONG_THE_STREAM}


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """The model of this rank."""

    chunks: list[GPTModel]
    """One per virtual pipeline stage; one without virtual stages."""
    selections: list[registry.Selection]
    """The attention backend of every kind of layer in the whole model."""
    config: TransformerConfig
    """The configuration all chunks share; the training loop sets its hooks on it."""
    vocab_size: int
    """Rows of the embedding: token ids, padded."""


def build_model(run: RunConfig, *, vocab_size: int, initialize: bool = True) -> BuiltModel:
    """Build this rank's part of the model. Process groups and seeds must have been set.

    Args:
        run: the configuration.
        vocab_size: number of token ids, before padding.
        initialize: draw the weights; False where all of them are loaded.

    Returns:
        Chunks in ``params_dtype`` on the run's device, before precision and data-parallel wrapping.

    Raises BackendError: the attention backend cannot serve one of the layer kinds.
    """
    selections = [registry.select(run, facts) for facts in registry.layer_kinds(run)]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        for selection in selections:
            log.info(selection.line())
        log.info(_HYBRID_NOTE)
    _check_transformer_engine(run)
    config = transformer_config(run)
    config.perform_initialization = initialize
    qkv_split.install()
    if run.training.accumulates_in_products:
        weight_gradient.install()
    packed_rope.undo()  # it lies over the other one
    if rope_kernel(run) == "own":
        own_rope.install()
    else:
        own_rope.undo()
    if run.data.document_attention:
        packed_rope.install()
    if is_compiled(config):
        # A norm is compiled for every width, with and without gradients: latent attention under
        # full recompute reaches torch's limit of 8, after which the rest would run eagerly.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    stages = config.virtual_pipeline_model_parallel_size
    ranks = run.parallel.tensor_model_parallel_size
    padded = padded_vocab_size(run.model, vocab_size, ranks=ranks)
    chunks = [
        _chunk(run, config, padded, None if stages is None else stage)
        for stage in range(stages or 1)
    ]
    return BuiltModel(chunks, selections, config, padded)


def _check_transformer_engine(run: RunConfig) -> None:
    asked = {
        "model.layer_spec": run.model.layer_spec == "te",
        "model.rope_fusion": rope_kernel(run) == "te",
    }
    if any(asked.values()) and not HAVE_TE:
        key = next(key for key, wanted in asked.items() if wanted)
        raise ValueError(
            f"{key} is 'te', and Transformer Engine cannot be imported here. Install the "
            f"te extra (pip install megatron-patch-stable[te]), or use {REMEDY[key]}"
        )


def layer_specs(
    run: RunConfig, config: TransformerConfig, vp_stage: int | None = None
) -> tuple[TransformerBlockSubmodules, Any]:
    """The block spec of one chunk and its multi-token-prediction spec (or None), ready to build."""
    te = run.model.layer_spec == "te"
    _check_transformer_engine(run)
    new = core_attention_spec(run.attention.backend, **_backend_options(run))
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=run.model.normalization, vp_stage=vp_stage
    )
    if block.layer_specs:
        block, _ = replace_core_attention(block, new)
    mtp = None
    if run.model.mtp is not None:
        # The last layer of the whole decoder, which this rank need not hold.
        last = get_gpt_decoder_layer_specs(
            config, use_transformer_engine=te, normalization=run.model.normalization
        )[-1]
        mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=te, vp_stage=vp_stage)
        if mtp is not None:
            mtp, _ = replace_core_attention(mtp, new)
    if te:
        return block, mtp
    return _with_our_modules(run, block), _with_our_modules(run, mtp)


def _with_our_modules(run: RunConfig, spec: Any) -> Any:
    """Every local norm replaced, the final one of the block included, latent attention, experts."""
    kind = run.model.normalization

    def decide(name: str, value: Any) -> Any:
        if name == "module" and value is multi_latent_attention.MLASelfAttention:
            return MLASelfAttention
        if name == "experts" and module_class(value) is SequentialMLP:
            return partial(GroupedMLP if groups_experts(run) else Experts, **value.keywords)
        if name not in _NORM_FIELDS or value is None or module_class(value) in (IdentityOp, L2Norm):
            return KEEP
        last = _ALONG_THE_STREAM.get(name)
        if last is None or not run.training.compiles_fusions:
            return norm_class(kind)
        return residual.stream_norm_class(kind, last=last)

    return None if spec is None else rewrite_spec(spec, decide)[0]


def _backend_options(run: RunConfig) -> dict[str, Any]:
    attention = run.attention
    options: dict[str, Any] = {}
    if run.parallel.cp_gradient_wire != "fp32":
        options["gradient_wire"] = run.parallel.cp_gradient_wire
    row = BACKENDS[attention.backend]
    options |= {name: getattr(attention.int8, name) for name in row.own_options}
    if not row.stabilizers:
        return options
    options["stabilizer"] = attention.stabilizer
    if attention.backward != "auto":
        options["backward"] = attention.backward
    if attention.o_lo != "default":
        options["o_lo"] = attention.o_lo
    if attention.stabilizer == "dynamic_max":
        options |= {"beta": attention.dynamic_max_beta, "eps": attention.dynamic_max_eps}
    if attention.allow_broken:
        options["allow_broken"] = True
    return options


def _chunk(
    run: RunConfig, config: TransformerConfig, padded_vocab: int, vp_stage: int | None
) -> GPTModel:
    model, scaling = run.model, run.model.rope_scaling
    block, mtp = layer_specs(run, config, vp_stage)
    quiet.drop_notices()
    virtual = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocab,
        max_sequence_length=longest_sequence(model),
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type=(
            "yarn" if scaling is not None and scaling.kind == "yarn" else model.position_embedding
        ),
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=scaling is not None and scaling.kind == "llama3",
        rope_scaling_factor=1.0 if scaling is None else scaling.factor,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    mark_sinks(chunk)
    if model.moe is not None and model.add_bias_linear:
        _keep_experts_apart(chunk)
    _give_views_of_biases(chunk)
    if is_compiled(config) and config.recompute_granularity != "full":
        residual.join(chunk.decoder)
    return chunk if run.training.device == "cpu" else chunk.cuda(torch.cuda.current_device())


def _keep_experts_apart(chunk: GPTModel) -> None:
    """Leave the reductions out that sum too much: biases of experts are not split over ranks.

    Core adds them in place to what a reduction of one rank returned, which autograd forbids. Over
    several ranks of experts core leaves it out itself. Under sequence parallelism it would sum
    their gradients over tensor-parallel ranks once more, after those that hold copies have.
    """
    for module in chunk.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.explicit_expert_comm = True
            module.bias.sequence_parallel = False


def _give_views_of_biases(chunk: GPTModel) -> None:
    """Let MLPs that are recomputed return views of their biases, which core adds later.

    A parameter that a checkpointed function returns is made its output, in the backward pass too:
    that would start itself again without end.
    """
    for module in chunk.modules():
        if getattr(module, "recompute_mlp", False):
            module.mlp.linear_fc2.register_forward_hook(_with_view)


def _with_view(module: Any, inputs: Any, result: Any) -> Any:
    out, bias = result
    return out, None if bias is None else bias.view_as(bias)
