"""Hugging Face's ``config.json`` and our ``model:`` section, in both directions.

What a family's file cannot say, or our model cannot compute, is refused with the field, its value
and what to do; fields that decide nothing here are named, so that nothing is left out in silence.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_patch.attention.registry import MAX_LAYERS
from megatron_patch.checkpoint.inspect import RequestError
from megatron_patch.schema import effective
from megatron_patch.schema import model as shape
from megatron_patch.schema.kinds import kind_of
from megatron_patch.schema.model import ModelConfig, MoEConfig, RopeScalingConfig

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""``model_type`` of every family, and its class with a language-model head."""
GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""Names of an activation there, and ours."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Megatron-Core's llama3 scaling."""
_NOTHING = """
    architectures model_type transformers_version dtype torch_dtype use_cache _name_or_path
    bos_token_id eos_token_id pad_token_id pretraining_tp output_router_logits attn_pdrop embd_pdrop
    resid_pdrop attention_dropout router_jitter_noise reorder_and_upcast_attn n_ctx
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params hidden_dropout output_attentions output_hidden_states return_dict
    gradient_checkpointing
"""
SAYS_NOTHING = frozenset(_NOTHING.split())
"""Fields that change nothing in the function from tokens to logits, dropout being off."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "mixtral": {"rope_theta": 1e6, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32,
              "head_dim": 128},
    "qwen3_moe": {"sliding_window": 4096, "num_key_value_heads": 4},
}  # fmt: skip
"""What classes of transformers take where a file says nothing, unlike ours."""
_MISSING: Any = object()


@dataclass
class _Fields:
    """A ``config.json``: what is read is noted, what stands against it is collected."""

    values: dict[str, Any]
    seen: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def get(
        self, name: str, default: Any = _MISSING, *, kind: type | tuple[type, ...] = int
    ) -> Any:
        """A field of that type; ``default`` where it is absent or null."""
        self.seen.add(name)
        value = self.values.get(name)
        if value is None and default is not _MISSING:
            return default
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if right and (not isinstance(value, int | float) or math.isfinite(value)):
            return value
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(k.__name__ for k in kinds)
        self.problems.append(f"{name}: {value!r:.60}, {wanted} is needed")
        return 1 if int in kinds else kinds[0]()

    def must(self, name: str, wanted: Any, why: str, *, given: Any = _MISSING) -> None:
        """Refuse a field that is there, not null, and not ``wanted``."""
        self.seen.add(name.rpartition(".")[2])
        value = self.values.get(name) if given is _MISSING else given
        if value is not None and value != wanted:
            self.problems.append(f"{name}: {value!r:.60}, only {wanted!r} can be imported: {why}")


def read(values: dict[str, Any], *, seq_length: int | None) -> tuple[ModelConfig, int, list[str]]:
    """The model that a ``config.json`` describes, its vocabulary, and the fields nothing reads.

    Args:
        values: the file.
        seq_length: tokens of a training sequence; None: as many as the file's positions.

    Raises RequestError: naming every field that is missing or has a value we do not compute.
    """
    family = str(values.get("model_type"))
    fields = _Fields(DEFAULTS.get(family, {}) | values)
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise RequestError(f"config.json: model_type: {family!r:.60} is not one of {known}")
    fields.must("quantization_config", None, "dequantize it first, in transformers")
    fields.must("add_cross_attention", False, "a decoder has no encoder to look at")
    found = _gpt2(fields) if family == "gpt2" else _llama(fields, family)
    longest = found.pop("longest")
    vocab = fields.get("vocab_size")
    if vocab < 1:
        fields.problems.append(f"vocab_size: {vocab}, at least 1 is needed")
    length = longest if seq_length is None else seq_length
    if not 1 <= length <= longest:
        fields.problems.append(f"--seq-length {length}: 1 to {longest}, the file's positions")
    if fields.problems:
        raise RequestError("config.json cannot be imported:\n  " + "\n  ".join(fields.problems))
    common = {"tie_embeddings": found.pop("tie"), "init_std": found.pop("std")}
    model = ModelConfig(seq_length=length, max_position_embeddings=longest, **common, **found)
    return model, vocab, sorted(set(values) - fields.seen - SAYS_NOTHING)


def _gpt2(fields: _Fields) -> dict[str, Any]:
    fields.must("scale_attn_weights", True, "logits are always divided by sqrt(head dim)")
    fields.must("scale_attn_by_inverse_layer_idx", False, "logits are scaled alike in all layers")
    hidden = fields.get("n_embd")
    activation = fields.get("activation_function", "gelu_new", kind=str)
    if activation not in GELU:
        fields.problems.append(f"activation_function: {activation!r}, not one of {', '.join(GELU)}")
    return {
        "num_layers": fields.get("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": fields.get("n_head"),
        "ffn_hidden_size": fields.get("n_inner", 4 * hidden),
        "position_embedding": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": float(fields.get("layer_norm_epsilon", 1e-5, kind=(float, int))),
        "activation": GELU.get(activation, "gelu"),
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "longest": fields.get("n_positions"),
        "tie": fields.get("tie_word_embeddings", True, kind=bool),
        "std": float(fields.get("initializer_range", 0.02, kind=(float, int))),
    }


def _llama(fields: _Fields, family: str) -> dict[str, Any]:
    layers, heads = fields.get("num_hidden_layers"), fields.get("num_attention_heads")
    if not 1 <= layers <= MAX_LAYERS:
        fields.problems.append(f"num_hidden_layers: {layers}, at most {MAX_LAYERS} are possible")
        layers = 1
    fields.must("hidden_act", "silu", "the MLP is SwiGLU")
    base, scaling = _rope(fields)
    biases = _biases(fields, family)
    return {
        "num_layers": layers,
        "hidden_size": fields.get("hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": fields.get("num_key_value_heads", heads),
        "kv_channels": fields.get("head_dim", None),
        "ffn_hidden_size": fields.get("intermediate_size"),
        "rotary_base": base,
        "rope_scaling": scaling,
        "norm_epsilon": float(fields.get("rms_norm_eps", kind=(float, int))),
        "qk_layernorm": family.startswith("qwen3"),
        **biases,
        **_windows(fields, family, layers),
        "moe": _experts(fields, family, layers) if family in ("mixtral", "qwen3_moe") else None,
        "longest": fields.get("max_position_embeddings"),
        "tie": fields.get("tie_word_embeddings", False, kind=bool),
        "std": float(fields.get("initializer_range", 0.02, kind=(float, int))),
    }


def _biases(fields: _Fields, family: str) -> dict[str, bool]:
    if family == "qwen2":
        return {"add_qkv_bias": True}
    attention = fields.get("attention_bias", False, kind=bool)
    mlp = fields.get("mlp_bias", False, kind=bool)
    if attention != mlp or (attention and family != "llama"):
        text = "Megatron-Core has biases in all linear layers, in query/key/value alone, or none"
        fields.problems.append(f"attention_bias: {attention}, mlp_bias: {mlp}: {text}")
    return {"add_bias_linear": attention, "add_qkv_bias": attention}


def _rope(fields: _Fields) -> tuple[float, RopeScalingConfig | None]:
    """Base and scaling, from version 5's ``rope_parameters`` or from the two fields before it."""
    new = fields.get("rope_parameters", None, kind=dict)
    rope = dict(new or fields.get("rope_scaling", None, kind=dict) or {})
    fields.seen |= {"rope_theta", "rope_scaling"}
    theta = rope.pop("rope_theta", fields.values.get("rope_theta", 10000.0))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    for values in (fields.values, rope):
        given = values.get("partial_rotary_factor")
        fields.must("partial_rotary_factor", 1.0, "these families turn whole heads", given=given)
    rope.pop("partial_rotary_factor", None)
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < 1e30:
        fields.problems.append(f"rope_theta: {theta!r:.60}, a number above 0 is needed")
        theta = 1.0
    if kind == "default":
        return float(theta), None
    if kind not in ("llama3", "yarn"):
        text = "only default, llama3 and yarn can be imported"
        fields.problems.append(f"rope_type: {kind!r:.60}, {text}")
        return float(theta), None
    return float(theta), _scaling(fields, kind, rope)


def _scaling(fields: _Fields, kind: Any, rope: dict[str, Any]) -> RopeScalingConfig | None:
    factor, length = rope.pop("factor", None), rope.get("original_max_position_embeddings")
    if type(factor) not in (int, float) or type(length) is not int or not 1 < factor < 1e6:
        text = f"factor {factor!r:.20} and original_max_position_embeddings {length!r:.20}"
        fields.problems.append(f"rope_type {kind}: {text}: numbers above 1 are needed")
        return None
    constants: dict[str, Any] = dict(LLAMA3)
    if kind == "yarn":
        constants = {"beta_fast": 32, "beta_slow": 1, "truncate": True,
                     "attention_factor": 0.1 * math.log(factor) + 1,
                     "original_max_position_embeddings": length}  # fmt: skip
    for name, value in rope.items():
        wanted = constants.get(name)
        if type(value) is not float or wanted is None or not math.isclose(value, wanted):
            fields.must(f"rope.{name}", wanted, f"constants of {kind} are fixed", given=value)
    return RopeScalingConfig(
        kind=kind, factor=float(factor), original_max_position_embeddings=length
    )


def _windows(fields: _Fields, family: str, layers: int) -> dict[str, Any]:
    """``sliding_window`` w lets a token see w tokens, itself among them.

    What the family's class in transformers does not read is not read here either.
    """
    if family == "llama":
        return {}
    width = fields.get("sliding_window", None)
    used = fields.get("use_sliding_window", False, kind=bool)
    first = fields.get("max_window_layers", layers)
    if family.startswith("qwen") and not used:
        width = None
    pattern = [1] * layers
    if family in ("qwen2", "qwen3"):
        pattern = [int(index >= first) for index in range(layers)]
        if (kinds := fields.get("layer_types", None, kind=list)) is not None:
            pattern = [int(kind == "sliding_attention") for kind in kinds]
            if set(kinds) - {"sliding_attention", "full_attention"} or len(kinds) != layers:
                fields.problems.append(f"layer_types: {kinds!r:.80}: full_attention or "
                                       f"sliding_attention for each of {layers}")  # fmt: skip
    if width is None or not any(pattern):
        return {}
    if width < 1:
        # transformers masks every key, or fails; less than 0 to the left is unlimited to our model.
        fields.problems.append(f"sliding_window: {width}, at least 1 is needed, or null for none")
    return {"window": [width - 1, 0], "window_skip_freq": None if all(pattern) else pattern}


def _experts(fields: _Fields, family: str, layers: int) -> MoEConfig:
    top_k = fields.get("num_experts_per_tok", 2)
    fields.seen |= {"num_experts", "num_local_experts"}
    name = "num_experts" if "num_experts" in fields.values else "num_local_experts"
    experts = fields.get(name)
    coefficient = float(fields.get("router_aux_loss_coef", 0.001, kind=(float, int)))
    if family == "mixtral":
        if top_k == 1:
            text = "with one expert a token its share would be 1, and the router without gradient"
            fields.problems.append(f"num_experts_per_tok: 1: {text}")
        return MoEConfig(num_experts=experts, top_k=top_k, aux_loss_coeff=coefficient)
    why = "shares of the chosen experts sum to 1, or (one expert a token) are its probability"
    normal = fields.get("norm_topk_prob", False, kind=bool)
    fields.must("norm_topk_prob", top_k > 1, why, given=normal)
    step = max(1, fields.get("decoder_sparse_step", 1))
    dense = fields.get("mlp_only_layers", [], kind=list)
    pattern = [int(n not in dense and (n + 1) % step == 0) for n in range(layers)]
    return MoEConfig(
        num_experts=experts, top_k=top_k, ffn_hidden_size=fields.get("moe_intermediate_size"),
        layer_freq=1 if all(pattern) else pattern, aux_loss_coeff=coefficient,
    )  # fmt: skip


# ------------------------------------------------------------------------------------- export


def _family_of(model: ModelConfig) -> str:
    """The family most like a model."""
    if model.position_embedding == "learned_absolute":
        return "gpt2"
    if model.moe is not None:
        return "qwen3_moe" if model.qk_layernorm else "mixtral"
    if model.qk_layernorm:
        return "qwen3"
    if model.add_qkv_bias and not model.add_bias_linear:
        return "qwen2"
    return "llama" if model.window is None else "mistral"


def write(model: ModelConfig, *, vocab_size: int, precision: str) -> dict[str, Any]:
    """The ``config.json`` of a model, in the form that transformers 4 and 5 read.

    Args:
        vocab_size: rows of the embedding that are exported.
        precision: bf16 or fp32, of the weights.

    Raises RequestError: what it would be read as computes something else; naming the keys.
    """
    family = _family_of(model)
    values = _written(model, family, vocab_size, precision)
    try:
        again, _, _ = read(values, seq_length=model.seq_length)
    except RequestError as error:
        raise RequestError(f"this model cannot be exported as {family}: {error}") from None
    trees = [{"model": asdict(x)} for x in (again, model)]
    wrong = [
        f"{key}: {ours}, and {family} has {theirs}"
        for key, theirs, ours in effective.changes(*trees)
        if kind_of(key) == "meaning"
        and not (key == "model.moe.load_balancing" and ours != "sinkhorn")  # routes alike
    ]
    if wrong:
        text = f"this model cannot be exported; of the families {family} is nearest:\n  "
        raise RequestError(text + "\n  ".join(wrong))
    return values


def _written(model: ModelConfig, family: str, vocab_size: int, precision: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "torch_dtype": "bfloat16" if precision == "bf16" else "float32",
        "vocab_size": vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
    }
    if family == "gpt2":
        return found | {
            "n_layer": model.num_layers,
            "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads,
            "n_inner": shape.ffn_hidden_size(model),
            "n_positions": shape.longest_sequence(model),
            "activation_function": {"gelu": "gelu", "relu": "relu"}.get(
                model.activation, "gelu_new"
            ),
            "layer_norm_epsilon": model.norm_epsilon,
            "attn_pdrop": model.attention_dropout,
            "embd_pdrop": model.hidden_dropout,
            "resid_pdrop": model.hidden_dropout,
        }
    found |= {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": shape.query_groups(model),
        "head_dim": shape.attention_head_dim(model),
        "intermediate_size": shape.ffn_hidden_size(model),
        "max_position_embeddings": shape.longest_sequence(model),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "attention_dropout": model.attention_dropout,
    }
    if family in ("llama", "qwen3", "qwen3_moe"):
        found["attention_bias"] = model.add_bias_linear
    if family == "llama":
        found["mlp_bias"] = model.add_bias_linear
    return found | _written_rope(model) | _written_windows(model, family) | _written_moe(model)


def _written_rope(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling is None:
        return {}
    rope = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        return {"rope_scaling": rope | LLAMA3}
    length = scaling.original_max_position_embeddings
    return {"rope_scaling": rope | {"original_max_position_embeddings": length}}


def _written_windows(model: ModelConfig, family: str) -> dict[str, Any]:
    width = None if model.window is None else model.window[0] + 1
    if not family.startswith("qwen"):
        return {"sliding_window": width} if family != "llama" else {}
    found = {"use_sliding_window": width is not None, "sliding_window": width}
    pattern = shape.windowed_layers(model)
    if pattern is None or family == "qwen3_moe":
        return found
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return found | {"layer_types": kinds, "max_window_layers": (*pattern, 1).index(1)}


def _written_moe(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    found = {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.aux_loss_coeff}
    width = shape.expert_ffn_hidden_size(model, moe)
    if not model.qk_layernorm:
        return found | {"num_local_experts": moe.num_experts, "intermediate_size": width}
    dense = [n for n, sparse in enumerate(shape.moe_layers(model) or []) if not sparse]
    return found | {
        "num_experts": moe.num_experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": moe.top_k > 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
