"""What each key decides: the function that the weights compute, the data, the schedule, or neither.

A start from another run's checkpoint is judged by this table: a difference in what a checkpoint
*means* is refused unless ``checkpoint.intended_changes`` names the key.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["meaning", "data", "schedule", "other"]

_KEYS: dict[Kind, str] = {
    # The function from token ids to logits, and how text became ids. A checkpoint's weights fit
    # other values of most of these, and compute something else with them.
    "meaning": """
        model.num_layers model.hidden_size model.num_attention_heads model.seq_length
        model.num_query_groups model.kv_channels model.ffn_hidden_size
        model.max_position_embeddings model.position_embedding model.rotary_base
        model.rotary_percent model.rope_scaling model.rope_scaling.kind
        model.rope_scaling.factor model.rope_scaling.original_max_position_embeddings
        model.normalization model.norm_epsilon model.activation
        model.add_bias_linear model.add_qkv_bias model.qk_layernorm model.tie_embeddings
        model.window model.window_skip_freq model.softmax_type
        model.moe model.moe.num_experts model.moe.top_k model.moe.ffn_hidden_size
        model.moe.layer_freq model.moe.load_balancing model.moe.shared_expert_ffn_hidden_size
        model.mla model.mla.q_lora_rank model.mla.kv_lora_rank model.mla.qk_head_dim
        model.mla.qk_pos_emb_head_dim model.mla.v_head_dim
        model.mtp model.mtp.num_layers
        data.tokenizer data.eod_mask_loss data.reset_position_ids
        data.document_attention
    """,
    # Which tokens are read, and in which order.
    "data": """
        data.blend data.split data.train data.valid data.test data.seed training.seed
    """,
    # Batch, length, rates, and what is added to the loss.
    "schedule": """
        training.train_steps training.global_batch_size training.batch_size_rampup
        training.micro_batch_size
        training.exit_at_step training.exit_after_minutes
        optimizer.lr optimizer.min_lr optimizer.schedule optimizer.warmup_steps
        optimizer.begin_step optimizer.schedule_from optimizer.decay_steps optimizer.wsd_decay_steps
        optimizer.wsd_decay_style optimizer.weight_decay optimizer.beta1 optimizer.beta2
        optimizer.eps optimizer.clip_grad optimizer.name optimizer.muon_momentum optimizer.qk_clip
        model.hidden_dropout model.attention_dropout model.moe.aux_loss_coeff
        model.mtp.loss_scaling_factor
    """,
    # How and where: rounding, speed, what is watched. init_std is of weights that are replaced;
    # another padded vocabulary is another shape, which does not load.
    "other": """
        name run_dir
        model.init_std model.fp32_residual_connection model.make_vocab_size_divisible_by
        model.layer_spec model.rope_fusion model.moe.token_dispatcher
        training.device training.precision training.deterministic training.recompute
        training.eval_interval training.eval_steps training.eval_test
        training.check_finite training.compile_fusions
        training.gradient_accumulation_fusion training.grouped_experts training.fp8
        optimizer.implementation
        data.verify data.num_workers
        attention.backend attention.stabilizer attention.backward attention.o_lo
        attention.dynamic_max_beta attention.dynamic_max_eps attention.allow_broken
        attention.fp8 attention.int8.smooth_k attention.int8.smooth_q attention.int8.scales
        attention.int8.normalizer attention.int8.projection
        parallel checkpoint logging stability faults cluster
    """,
}
KINDS: dict[str, Kind] = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}
"""Kind of a key, or of all keys below it that have no entry of their own."""
MEANING: tuple[str, ...] = tuple(sorted(key for key in KINDS if KINDS[key] == "meaning"))
"""What ``checkpoint.intended_changes`` may name."""


def entry(path: str) -> str | None:
    """The key of `KINDS` that a dotted path of a value belongs to: itself, or the nearest above."""
    while path not in KINDS:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return None
    return path


def kind_of(path: str) -> Kind:
    """The kind of a value; ``other`` for what is no key any more."""
    found = entry(path)
    return "other" if found is None else KINDS[found]
