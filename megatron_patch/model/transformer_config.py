"""`transformer_config`: from our configuration to Megatron-Core's `TransformerConfig`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_patch.core_patches.activation import activation_function, core_fuses
from megatron_patch.schema.effective import groups_experts, rope_kernel
from megatron_patch.schema.model import (
    RopeScalingConfig,
    attention_head_dim,
    expert_ffn_hidden_size,
    ffn_hidden_size,
    query_groups,
)
from megatron_patch.schema.run import RunConfig


def transformer_config(run: RunConfig) -> TransformerConfig:
    """Megatron-Core's configuration of the model, the layout and the precision of a run.

    The fields that belong to the training loop (``finalize_model_grads_func``, ``no_sync_func``...)
    are left for it to set.
    """
    fields: dict[str, Any] = {
        **_shape(run),
        **_precision(run),
        **_fp8(run),
        **_fusions(run),
        **_layout(run),
        **_recompute(run),
        **_experts(run),
    }
    if run.optimizer.qk_clip is not None:
        fields |= {"qk_clip": True, "qk_clip_threshold": run.optimizer.qk_clip}
    if run.model.mtp is not None:
        fields |= {
            "mtp_num_layers": run.model.mtp.num_layers,
            "mtp_loss_scaling_factor": run.model.mtp.loss_scaling_factor,
        }
    if run.model.mla is None:
        config = TransformerConfig(**fields)
        scaling = run.model.rope_scaling
        if scaling is not None and scaling.kind == "yarn":
            # Core reads these by name and declares them for latent attention only. Without
            # mscale it scales queries and keys by 0.1 ln(factor) + 1, as the paper does.
            for name, value in _yarn(scaling).items():
                setattr(config, f"yarn_{name}", value)
        return config
    return MLATransformerConfig(**fields, **_latent(run))


def _yarn(scaling: RopeScalingConfig) -> dict[str, Any]:
    return {
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": None,
        "mscale_all_dim": None,
        "correction_range_round_to_int": True,
    }


def _shape(run: RunConfig) -> dict[str, Any]:
    model = run.model
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": query_groups(model),
        "kv_channels": attention_head_dim(model),
        "ffn_hidden_size": ffn_hidden_size(model),
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "activation_func": activation_function(run),
        "gated_linear_unit": model.activation == "swiglu",
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_std,
        "window_size": None if model.window is None else tuple(model.window),
        "window_attn_skip_freq": model.window_skip_freq,
        "softmax_type": model.softmax_type,
        "fp32_residual_connection": model.fp32_residual_connection,
        "transformer_impl": "transformer_engine" if model.layer_spec == "te" else "local",
    }


def _precision(run: RunConfig) -> dict[str, Any]:
    bf16 = run.training.precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    return {
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        # Every rank draws whole matrices and keeps its part, so that weights do not depend on TP.
        # On a GPU that would be slow for large models, and core draws each part where it lives.
        "use_cpu_initialization": run.training.device == "cpu",
        "deterministic_mode": run.training.deterministic,
        "attention_softmax_in_fp32": True,
        # Its kernel is of Megatron-LM's own build.
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": run.training.accumulates_in_products,
        "cuda_graph_modules": [],  # core's own default warns that it is deprecated
    }


FP8_RECIPES = {"current": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}
"""``training.fp8`` -> core's name of the recipe."""


def _fp8(run: RunConfig) -> dict[str, Any]:
    if run.training.fp8 == "none":
        return {}
    return {
        "fp8": "hybrid" if run.training.fp8 == "current" else "e4m3",
        "fp8_recipe": FP8_RECIPES[run.training.fp8],
        "fp8_dot_product_attention": run.attention.fp8,
    }


def _fusions(run: RunConfig) -> dict[str, Any]:
    on = run.training.compiles_fusions
    return {
        "bias_activation_fusion": on and core_fuses(run),
        "bias_dropout_fusion": on,
        "apply_rope_fusion": rope_kernel(run) == "te",
        "cross_entropy_loss_fusion": on,
        "cross_entropy_fusion_impl": "native",
    }


def _layout(run: RunConfig) -> dict[str, Any]:
    parallel = run.parallel
    pipelined = parallel.pipeline_model_parallel_size > 1
    first = parallel.num_layers_in_first_pipeline_stage
    last = parallel.num_layers_in_last_pipeline_stage
    if parallel.pipeline_model_parallel_size == 2 and first is not None:
        last = None  # it has the rest; of two numbers core's virtual stages divide by zero
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": (
            parallel.virtual_pipeline_model_parallel_size if pipelined else None
        ),
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "context_parallel_size": parallel.context_parallel_size,
        "hierarchical_context_parallel_sizes": parallel.hierarchical_context_parallel_sizes,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        # Losses are summed and divided by the number of tokens once: the only scaling under which
        # loss and gradients agree between data- and context-parallel layouts.
        "calculate_per_token_loss": True,
    }
    if fields["virtual_pipeline_model_parallel_size"] is not None:
        # The interleaved schedule sends both ways at once. Batched point-to-point operations match
        # by order of posting, so with two stages, where the next and the previous rank are the
        # same, activations and gradients would silently trade places.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if parallel.context_parallel_size > 1:
        fields["cp_comm_type"] = parallel.cp_comm_type
    return fields


def _recompute(run: RunConfig) -> dict[str, Any]:
    recompute = run.training.recompute
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
    }


def _experts(run: RunConfig) -> dict[str, Any]:
    moe = run.model.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        # With one expert a token, softmax after the selection has no gradient.
        "moe_router_pre_softmax": moe.top_k == 1,
        "moe_ffn_hidden_size": expert_ffn_hidden_size(run.model, moe),
        "moe_layer_freq": moe.layer_freq,
        "moe_aux_loss_coeff": moe.aux_loss_coeff if "aux_loss" in moe.load_balancing else 0.0,
        "moe_router_load_balancing_type": moe.load_balancing,
        "moe_token_dispatcher_type": moe.token_dispatcher,
        "moe_shared_expert_intermediate_size": moe.shared_expert_ffn_hidden_size,
        "moe_router_dtype": "fp32",
        # Of Transformer Engine; local layers: `core_patches.experts`.
        "moe_grouped_gemm": groups_experts(run) and run.model.layer_spec == "te",
    }


def _latent(run: RunConfig) -> dict[str, Any]:
    mla = run.model.mla
    assert mla is not None
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope",
        "rotary_base": run.model.rotary_base,
        "rotary_percent": run.model.rotary_percent,
    }
