"""What is wrong with a model's shape, found without a GPU and before any process starts.

Includes the parts of the layout and of recompute that only the model's shape decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.registry import MAX_LAYERS
from megatron_patch.schema import model as shape
from megatron_patch.schema.effective import groups_experts
from megatron_patch.schema.problem import Problem, at_least
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import LARGEST, SMALLEST_EPS

MAX_DEPTHS, MAX_EXPERTS, MAX_PADDING = 100, 4_096, 1_048_576
"""Far above any model, as `MAX_LAYERS`: what counts them one by one would not end."""


def problems(run: RunConfig) -> Iterator[Problem]:
    """Every problem of the ``model:`` section and of how the layout divides it."""
    sizes = list(_sizes(run))
    yield from sizes
    for rules in (_ranges, _positions, _windows, _experts, _latent, _recompute, _fp8):
        yield from rules(run)
    if not sizes:  # dividing nonsense only repeats the complaint
        yield from _divisions(run)


def _sizes(run: RunConfig) -> Iterator[Problem]:
    model = run.model
    for path, section, names in (
        ("model", model, "num_layers hidden_size num_attention_heads seq_length num_query_groups "
         "kv_channels ffn_hidden_size max_position_embeddings make_vocab_size_divisible_by"),
        ("model.moe", model.moe, "num_experts top_k ffn_hidden_size shared_expert_ffn_hidden_size"),
        ("model.mla", model.mla,
         "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"),
        ("model.mtp", model.mtp, "num_layers"),
    ):  # fmt: skip
        if section is not None:
            yield from at_least(path, section, dict.fromkeys(names.split(), 1))
    depths = 0 if model.mtp is None else model.mtp.num_layers
    experts = 0 if model.moe is None else model.moe.num_experts
    for name, value, most in (
        ("num_layers", model.num_layers, MAX_LAYERS),
        ("mtp.num_layers", depths, MAX_DEPTHS),
        ("moe.num_experts", experts, MAX_EXPERTS),
        ("make_vocab_size_divisible_by", model.make_vocab_size_divisible_by, MAX_PADDING),
    ):
        if value > most:
            yield Problem(f"model.{name}", f"{value}: must be at most {most:,}")


def _ranges(run: RunConfig) -> Iterator[Problem]:
    model = run.model
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(model, name)
        if not 0.0 <= value < 1.0:
            yield Problem(f"model.{name}", f"{value}: a probability in [0, 1) is needed")
    for name, low, high in (
        ("norm_epsilon", SMALLEST_EPS, 1.0),
        ("init_std", SMALLEST_EPS, LARGEST),
        ("rotary_base", SMALLEST_EPS, LARGEST),
    ):
        if not low <= (value := getattr(model, name)) <= high:
            text = f"{value}: must be from {low:g} to {high:g}; it is used in float32"
            yield Problem(f"model.{name}", text)
    if not 0.0 < model.rotary_percent <= 1.0:
        yield Problem("model.rotary_percent", f"{model.rotary_percent}: a share in (0, 1]")
    if model.layer_spec == "te" and run.training.device == "cpu":
        text = "'te' needs a GPU and training.device is 'cpu'. Use model.layer_spec: local"
        yield Problem("model.layer_spec", text)
    if model.layer_spec == "te" and model.fp32_residual_connection:
        text = (
            "true: Transformer Engine's layers take the residual stream in the type of their "
            "weights. Set it to false, or use model.layer_spec: local"
        )
        yield Problem("model.fp32_residual_connection", text)
    yield from _rope_fusion(run)
    if model.mtp is not None and not model.mtp.loss_scaling_factor > 0:
        yield Problem(
            "model.mtp.loss_scaling_factor",
            f"{model.mtp.loss_scaling_factor}: must be more than 0; leave model.mtp out to train "
            "without the extra losses",
        )


def _rope_fusion(run: RunConfig) -> Iterator[Problem]:
    model, asked = run.model, run.model.rope_fusion
    path, text = "model.rope_fusion", ""
    if asked in ("own", "te") and model.position_embedding != "rope":
        text = (
            f"has no effect with model.position_embedding {model.position_embedding!r}: remove it"
        )
    elif asked in ("own", "te") and run.training.device == "cpu":
        text = "needs a GPU and training.device is 'cpu'. Use auto or none"
    elif asked == "te" and model.mla is not None:
        text = "Transformer Engine's kernel does not serve multi-latent attention here. Use own"
    if text:
        yield Problem(path, f"{asked!r}: {text}")


FP8_MULTIPLE = 16
"""Of the width of a matrix, and of the tokens of one (as a product of its gradients has them)."""


def _fp8(run: RunConfig) -> Iterator[Problem]:
    """What Transformer Engine's FP8 products ask of the model, before it says so in a traceback."""
    model, recipe, p = run.model, run.training.fp8, run.parallel
    if recipe == "none":
        return
    path = "training.fp8"
    if model.layer_spec != "te":
        text = f"{recipe!r} is a recipe of Transformer Engine's layers: set model.layer_spec: te"
        yield Problem(path, text)
    if run.training.precision != "bf16":
        yield Problem(path, f"{recipe!r} needs training.precision: bf16")
    if model.moe is not None:
        text = f"{recipe!r} with experts has not been tried here: use none, or a dense model"
        yield Problem(path, text)
    tp = max(1, p.tensor_model_parallel_size)
    width = shape.ffn_hidden_size(model)
    widths = {"model.hidden_size": model.hidden_size, "ffn_hidden_size": width}
    for name, width in widths.items():
        if width % (FP8_MULTIPLE * tp):
            text = f"{recipe!r} needs a multiple of {FP8_MULTIPLE} x {tp} ranks: {name} is {width}"
            yield Problem(path, text)
    tokens = model.seq_length * run.training.micro_batch_size // max(1, p.context_parallel_size)
    tokens //= tp if p.sequence_parallel else 1
    if tokens % FP8_MULTIPLE:
        text = (
            f"{recipe!r} needs a multiple of {FP8_MULTIPLE} tokens a rank, and there are {tokens}"
        )
        yield Problem(path, text)


def _positions(run: RunConfig) -> Iterator[Problem]:
    model = run.model
    longest = model.max_position_embeddings
    if longest is not None and 1 <= longest < model.seq_length:
        yield Problem(
            "model.max_position_embeddings",
            f"{longest} is less than model.seq_length ({model.seq_length}): raise it or leave it "
            "out",
        )
    if model.mtp is not None and model.position_embedding == "learned_absolute":
        text = "'learned_absolute' is not supported by multi-token prediction (model.mtp): use rope"
        yield Problem("model.position_embedding", text)
    yield from _rope_scaling(run)
    heads = model.num_attention_heads
    if model.position_embedding != "rope" or model.mla is not None or heads < 1:
        return
    width = shape.attention_head_dim(model)
    if width < 1 or not 0 < model.rotary_percent <= 1:  # said by _sizes and _ranges
        return
    rotated = int(width * model.rotary_percent)
    if rotated < 2 or rotated % 2:
        yield Problem(
            "model.rotary_percent",
            f"{model.rotary_percent} of head dimension {width} rotates {rotated} channels; "
            "rotary positions turn pairs: make it an even number of at least 2",
        )


def _rope_scaling(run: RunConfig) -> Iterator[Problem]:
    model, scaling = run.model, run.model.rope_scaling
    path = "model.rope_scaling"
    if scaling is None:
        return
    if model.position_embedding != "rope" or model.mla is not None:
        what = f"model.position_embedding {model.position_embedding}"
        what = what if model.mla is None else "multi-latent attention (model.mla)"
        yield Problem(path, f"{scaling.kind} is not available with {what}: leave it out")
    if not 1.0 < scaling.factor <= 1e4:
        yield Problem(f"{path}.factor", f"{scaling.factor}: must be more than 1, at most 10,000")
    length = scaling.original_max_position_embeddings
    if scaling.kind == "llama3":
        if length != 8192:
            text = f"{length}: Megatron-Core's llama3 scaling has 8192; set that, or yarn"
            yield Problem(f"{path}.original_max_position_embeddings", text)
        return
    if length < 1:
        yield Problem(f"{path}.original_max_position_embeddings", f"{length}: must be at least 1")
    if model.rotary_percent != 1.0:
        text = f"{model.rotary_percent}: Megatron-Core's yarn rotates whole heads; set it to 1.0"
        yield Problem("model.rotary_percent", text)
    if model.rotary_base == 1.0:
        yield Problem("model.rotary_base", "1.0: yarn needs a base other than 1")


def _windows(run: RunConfig) -> Iterator[Problem]:
    model = run.model
    window, skip = model.window, model.window_skip_freq
    if window is not None:
        if len(window) != 2 or any(side < -1 for side in window):
            text = f"{window}: two numbers [left, right] of tokens are needed, -1 = unbounded"
            yield Problem("model.window", text)
        elif window[1] > 0:
            yield Problem(
                "model.window",
                f"{window}: attention is causal, so nothing to the right is ever visible; use "
                f"[{window[0]}, 0]",
            )
        elif window[0] == -1:
            text = f"{window} hides nothing: leave model.window out for full attention"
            yield Problem("model.window", text)
    if skip is None:
        return
    path = "model.window_skip_freq"
    if window is None:
        yield Problem(path, f"{skip} has no effect without model.window: set it or leave this out")
    elif isinstance(skip, list):
        yield from _one_per_layer(path, skip, run)
    elif skip < 1:
        yield Problem(path, f"{skip}: must be at least 1, or a 0/1 list with one entry per layer")


def _one_per_layer(path: str, pattern: list[int], run: RunConfig) -> Iterator[Problem]:
    if len(pattern) != run.model.num_layers or set(pattern) - {0, 1}:
        yield Problem(
            path,
            f"{pattern}: a list needs one 0 or 1 for each of the {run.model.num_layers} layers "
            "(model.num_layers)",
        )


def _stage_without_experts(run: RunConfig) -> Iterator[Problem]:
    """Megatron-Core's whole optimizers save such a stage and cannot load it again."""
    moe, p = run.model.moe, run.parallel
    if moe is None or p.use_distributed_optimizer or p.expert_model_parallel_size == 1:
        return
    stages, layers = p.pipeline_model_parallel_size, run.model.num_layers
    chunks, freq = p.virtual_pipeline_model_parallel_size or 1, moe.layer_freq
    dealt = p.stage_layers(layers)
    if dealt is None or (len(freq) != layers if isinstance(freq, list) else freq < 1):
        return  # other checks say so
    for stage in range(stages):
        held = (
            number
            for virtual in range(chunks)
            for number in p.chunk_layers(layers, stage=stage, virtual=virtual)
        )
        if not any(shape.is_moe_layer(freq, number) for number in held):
            yield Problem(
                "parallel.use_distributed_optimizer",
                f"false, and pipeline stage {stage} has no layer with experts "
                f"(model.moe.layer_freq: {freq}), which are spread over "
                f"{p.expert_model_parallel_size} ranks: its checkpoints could be saved and not "
                "loaded. Set it to true, or give every stage such a layer",
            )
            return


def _experts(run: RunConfig) -> Iterator[Problem]:
    model, moe, parallel = run.model, run.model.moe, run.parallel
    if run.training.grouped_experts and (moe is None or model.add_bias_linear):
        why = "a dense model" if moe is None else "model.add_bias_linear: they have no biases"
        text = f"true with {why}. Set it to null or false"
        yield Problem("training.grouped_experts", text)
    if moe is None:
        return
    if moe.top_k > moe.num_experts:
        text = f"{moe.top_k} is more than model.moe.num_experts ({moe.num_experts})"
        yield Problem("model.moe.top_k", text)
    if moe.aux_loss_coeff < 0:
        yield Problem("model.moe.aux_loss_coeff", f"{moe.aux_loss_coeff}: must not be negative")
    if isinstance(moe.layer_freq, list):
        yield from _one_per_layer("model.moe.layer_freq", moe.layer_freq, run)
    elif moe.layer_freq < 1:
        yield Problem("model.moe.layer_freq", f"{moe.layer_freq}: must be at least 1")
    yield from _stage_without_experts(run)
    tp = parallel.tensor_model_parallel_size
    if tp > 1 and not parallel.sequence_parallel:
        yield Problem(
            "parallel.sequence_parallel",
            f"false with {tp} tensor-parallel ranks and experts: Megatron-Core trains MoE layers "
            "under tensor parallelism only with sequence parallelism. Set it to true",
        )
    split = {"tensor": tp, "context": parallel.context_parallel_size}
    if moe.load_balancing == "sinkhorn" and max(split.values()) > 1:
        ranks = " x ".join(f"{n} {kind}" for kind, n in split.items() if n > 1)
        yield Problem(
            "model.moe.load_balancing",
            f"'sinkhorn' balances over the tokens that one rank holds, so that {ranks}-parallel "
            "ranks, each with a part of the sequence, would train another model than one. Use "
            "aux_loss, seq_aux_loss or none",
        )
    etp = parallel.expert_tensor_parallel_size or tp
    if model.add_bias_linear and etp > 1:
        yield Problem(
            "model.add_bias_linear",
            f"true with experts split over {etp} ranks: Megatron-Core supports biases in experts "
            "only with parallel.expert_tensor_parallel_size: 1",
        )
    if model.add_bias_linear and moe.shared_expert_ffn_hidden_size:
        yield Problem(
            "model.add_bias_linear",
            "true with model.moe.shared_expert_ffn_hidden_size: Megatron-Core's shared experts "
            "have no biases. Set it to false",
        )


def _latent(run: RunConfig) -> Iterator[Problem]:
    model, mla = run.model, run.model.mla
    if mla is None:
        return
    unused = {
        "num_query_groups": "its key/value heads come from one latent",
        "kv_channels": "its head dims are model.mla.qk_head_dim and v_head_dim",
    }
    for name, why in unused.items():
        if getattr(model, name) is not None:
            yield Problem(
                f"model.{name}",
                f"{getattr(model, name)} has no effect on multi-latent attention ({why}): "
                "leave it out",
            )
    if model.add_qkv_bias:
        text = "true has no effect on multi-latent attention: leave it out"
        yield Problem("model.add_qkv_bias", text)
    if model.position_embedding != "rope":
        yield Problem(
            "model.position_embedding",
            f"{model.position_embedding!r}: multi-latent attention always rotates "
            "model.mla.qk_pos_emb_head_dim channels; use rope",
        )
    tp = run.parallel.tensor_model_parallel_size
    if tp > 1 and not run.parallel.sequence_parallel:
        yield from _latent_without_sequence_parallelism(run, tp)
    if model.qk_layernorm and mla.q_lora_rank is None and model.layer_spec == "local":
        yield Problem(
            "model.qk_layernorm",
            "true with multi-latent attention whose queries have no latent: local layers have no "
            "norm for them. Set model.mla.q_lora_rank, or this to false",
        )
    if mla.qk_pos_emb_head_dim % 2:
        yield Problem(
            "model.mla.qk_pos_emb_head_dim",
            f"{mla.qk_pos_emb_head_dim}: rotary positions turn pairs of channels; use an even "
            "number",
        )


def _latent_without_sequence_parallelism(run: RunConfig, tp: int) -> Iterator[Problem]:
    """Megatron-Core 0.19.2 computes some gradients wrongly there; see core_patches/mla.py."""
    if run.model.layer_spec == "te":
        why = "the gradient of the shared rotary key is summed over ranks only under it"
    elif run.model.qk_layernorm and run.model.mla and run.model.mla.q_lora_rank is not None:
        why = f"the gradient of the query latent's norm comes out {tp} times too large without it"
    else:
        return
    yield Problem(
        "parallel.sequence_parallel",
        f"false with multi-latent attention over {tp} tensor-parallel ranks: {why} "
        "(Megatron-Core 0.19). Set it to true",
    )


def _recompute(run: RunConfig) -> Iterator[Problem]:
    model, recompute, path = run.model, run.training.recompute, "training.recompute.modules"
    if recompute.granularity == "full":
        chunks = max(1, run.parallel.virtual_pipeline_model_parallel_size or 1)
        layers = min(run.parallel.stage_layers(model.num_layers) or [model.num_layers]) // chunks
        most, why = max(1, layers), "the layers of one pipeline stage"
        if model.mtp is not None and recompute.method == "uniform":
            most, why = 1, "since Megatron-Core recomputes model.mtp so alone; or use method block"
        if not 1 <= recompute.num_layers <= most:
            text = f"{recompute.num_layers}: must be 1 to {most}, {why}"
            yield Problem("training.recompute.num_layers", text)
    if recompute.granularity != "selective":
        return
    grouped = groups_experts(run) and model.layer_spec == "te"
    needs = {
        "moe": (model.moe, "needs an MoE model (section model.moe); name other modules"),
        "mla_up_proj": (model.mla, "needs model.mla; name other modules"),
        "moe_act": (grouped, "needs grouped experts of Transformer Engine "
                    "(training.grouped_experts, model.layer_spec: te); use 'moe'"),
        "layernorm": (model.layer_spec == "te", "runs only with Transformer Engine in "
                      "Megatron-Core 0.19 (it reads a Transformer Engine state even without FP8): "
                      "use model.layer_spec: te, or 'mlp'"),
    }  # fmt: skip
    for name, (there, text) in needs.items():
        if name in recompute.modules and not there:
            yield Problem(path, f"{name!r} {text}")


def _divisions(run: RunConfig) -> Iterator[Problem]:
    """Everything that must divide by something else."""
    model, parallel = run.model, run.parallel
    tp = max(1, parallel.tensor_model_parallel_size)
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.kv_channels is None and model.mla is None and model.hidden_size % heads:
        yield Problem(
            "model.num_attention_heads",
            f"{heads} does not divide model.hidden_size ({model.hidden_size}): change one, or set "
            "model.kv_channels",
        )
    many = "model.num_attention_heads"
    yield from _divides("model.num_query_groups", groups or 1, heads, many)
    path = "parallel.tensor_model_parallel_size"
    yield from _divides(path, tp, heads, many)
    if groups is not None and groups % tp and tp % groups:
        text = f"{tp} and model.num_query_groups ({groups}): one must divide the other"
        yield Problem(path, text)
    yield from _divides(path, tp, model.ffn_hidden_size, "model.ffn_hidden_size")
    if model.mla is not None and model.layer_spec == "local":
        latent = model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim
        yield from _divides(path, tp, latent, "model.mla.kv_lora_rank + qk_pos_emb_head_dim")
        yield from _divides(path, tp, model.mla.q_lora_rank, "model.mla.q_lora_rank")
    yield from _divisions_of_layers(run)
    yield from _divisions_of_sequence(run)
    yield from _divisions_of_heads(run)
    yield from _divisions_of_experts(run)


def _divides(path: str, divisor: int, value: int | None, what: str) -> Iterator[Problem]:
    if (value or 0) % divisor:
        yield Problem(path, f"{divisor} does not divide {what} ({value})")


def _divisions_of_layers(run: RunConfig) -> Iterator[Problem]:
    stages = max(1, run.parallel.pipeline_model_parallel_size)
    chunks = run.parallel.virtual_pipeline_model_parallel_size
    layers = run.model.num_layers
    names = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    given = {f"parallel.{name}": getattr(run.parallel, name) for name in names}
    uneven = {key: n for key, n in given.items() if n is not None}
    if uneven and stages > 1 and min(uneven.values()) > 0:
        if run.parallel.stage_layers(layers) is None:
            others, rest = stages - len(uneven), layers - sum(uneven.values())
            each = "" if chunks is None else f", each a multiple of the {chunks} model chunks"
            yield Problem(
                next(iter(uneven)),
                f"{' and '.join(map(str, uneven.values()))} of {layers} layers (model.num_layers) "
                f"leave {rest} for {others} other stage(s), which must hold equal numbers{each}",
            )
    elif layers % stages:
        text = f"{stages} does not divide model.num_layers ({layers})"
        yield Problem("parallel.pipeline_model_parallel_size", text)
    elif chunks is not None and chunks > 0 and (layers // stages) % chunks:
        text = f"{chunks} does not divide the {layers // stages} layers of a pipeline stage"
        yield Problem("parallel.virtual_pipeline_model_parallel_size", text)


def _divisions_of_sequence(run: RunConfig) -> Iterator[Problem]:
    parallel, length = run.parallel, run.model.seq_length
    cp = max(1, parallel.context_parallel_size)
    parts = 2 * cp if cp > 1 else 1
    who = [f"2 x parallel.context_parallel_size ({cp})"] if cp > 1 else []
    if parallel.sequence_parallel:
        tp = max(1, parallel.tensor_model_parallel_size)
        parts *= tp
        who.append(f"parallel.tensor_model_parallel_size ({tp})")
    if length % parts:
        near = [str(n) for n in (length - length % parts, length + -length % parts) if n]
        text = f"{length} is not a multiple of {' x '.join(who)} = {parts}; use {' or '.join(near)}"
        yield Problem("model.seq_length", text)


def _divisions_of_heads(run: RunConfig) -> Iterator[Problem]:
    """Under a2a the heads of a tensor-parallel rank are dealt to the ranks of a group."""
    model, parallel = run.model, run.parallel
    tp = max(1, parallel.tensor_model_parallel_size)
    groups = shape.query_groups(model) if model.mla is None else model.num_attention_heads
    dealt = {"query": model.num_attention_heads // tp}
    backend = BACKENDS[run.attention.backend]
    if backend.cp and not backend.chunk_primitives:  # ours replicates key/value heads as needed
        dealt["key/value"] = max(1, groups // tp)
    for kind in parallel.cp_comm_types:
        size = parallel.a2a_size(kind)
        path = "parallel.cp_comm_type"
        if kind == "a2a+p2p":
            path = "parallel.hierarchical_context_parallel_sizes"
        for what, heads in dealt.items():
            if size > 1 and heads % size:
                yield Problem(
                    path,
                    f"{kind} deals the {heads} {what} heads of a tensor-parallel rank to {size} "
                    f"ranks, and {size} does not divide {heads}: use p2p or all_gather, or another "
                    "size",
                )


def _divisions_of_experts(run: RunConfig) -> Iterator[Problem]:
    moe, parallel = run.model.moe, run.parallel
    if moe is None:
        return
    ep, path = max(1, parallel.expert_model_parallel_size), "parallel.expert_model_parallel_size"
    yield from _divides(path, ep, moe.num_experts, "model.moe.num_experts")
    tp = max(1, parallel.tensor_model_parallel_size)
    etp = parallel.expert_tensor_parallel_size or tp
    for name, ranks in (("ffn_hidden_size", etp), ("shared_expert_ffn_hidden_size", tp)):
        value = getattr(moe, name)
        if value is not None and value % max(1, ranks):
            text = f"{value} is not a multiple of the {ranks} ranks it is split over"
            yield Problem(f"model.moe.{name}", text)
