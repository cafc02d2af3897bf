"""What each patch of the register is for, shown on Megatron-Core as it is installed.

When one of these fails core is repaired, or has learned what it lacked: take the patch out. Faults
that need several ranks are read from core's code here, and the test that shows them is named.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import operator
import sys
from fractions import Fraction
from types import CodeType, ModuleType, SimpleNamespace

import pytest
import torch
from megatron_cpu import VOCAB, single_rank, tiny_run
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patch.core_patches import cpu_mode, gpt
from megatron_patch.core_patches.optimizer import adam
from megatron_patch.core_patches.register import PATCHES
from megatron_patch.core_patches.replace import patched
from megatron_patch.runtime import environment
from megatron_patch.schema.model import MTPConfig

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None
NEEDED = {}


def shows(name):
    """Register what shows that the patch of this name is needed."""

    def take(function):
        NEEDED[name] = function
        return function

    return take


@pytest.fixture(autouse=True)
def unpatched():
    for patch in PATCHES:
        if patch.undo is not None:
            patch.undo()


@pytest.mark.parametrize("name", [patch.name for patch in PATCHES])
def test_core_needs_it(name):
    if HAVE_TE and name in ("QKV split", "norm and clipping"):
        pytest.skip("with Transformer Engine core has its own")
    assert name in NEEDED or name in {row[0] for row in USES}
    NEEDED.get(name, lambda: None)()


def names_in(function) -> set[str]:
    """Names that the code of a function, and of functions inside it, uses."""
    codes, used = [inspect.unwrap(function).__code__], set()
    while codes:
        code = codes.pop()
        used |= set(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return used


LANGUAGE = "models.common.language_module.language_module:LanguageModule"
USES = [
    ("packed rotary", "models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
     ["tolist"], []),  # lengths of documents are brought to the host
    ("Muon's matrices", f"{LANGUAGE}.setup_embeddings_and_output_layer",
     [], ["position_embeddings"]),
    ("Muon's gather",
     "optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.allgather_params",
     ["all_gather"], []),  # all matrices at once
    ("gathered logits", f"{LANGUAGE}.compute_language_model_loss",
     [], ["vocab_size", "parallel_output", "gather_output"]),  # any width is taken for a part
    ("optimizer kernel", "optimizer:_get_megatron_optimizer_based_on_param_groups",
     ["USING_PYTORCH_OPTIMIZER", "Adam"], []),  # a global of the module
    ("agreed norm", "optimizer.optimizer:ChainedOptimizer.step",
     ["get_grad_norm", "clip_grad_by_total_norm_fp32"], []),
    # Whole parameters are gathered; what follows: tests/checkpoint/test_reshardable.py.
    ("resharding",
     "optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
     ["get_parameter_state_dp_zero"], []),
    ("results queue", "dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
     ["Manager"], []),  # a queue starts a process
]  # fmt: skip
"""Patch, a function of core, names that it uses, and names that it does not."""


@pytest.mark.parametrize(("name", "place", "used", "unused"), USES)
def test_core_uses(name, place, used, unused):
    module, _, path = place.partition(":")
    function = operator.attrgetter(path)(importlib.import_module(f"megatron.core.{module}"))
    assert name in [patch.name for patch in PATCHES]
    assert names_in(function) >= {*used} and not names_in(function) & {*unused}


def l2_norm(*tensors):
    from megatron.core.utils import local_multi_tensor_l2_norm

    return local_multi_tensor_l2_norm(0, None, [list(tensors)], False)[0]


@shows("CPU mode")
def a_gpu_is_taken_for_granted():
    if torch.cuda.is_available():
        assert l2_norm(torch.ones(2)).is_cuda
    else:
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
            l2_norm(torch.ones(2))


@shows("quiet")
def core_shouts():
    from megatron.core.models.gpt.gpt_model import GPTModel

    said = GPTModel.__init__.__code__.co_consts
    assert any("GPTModel IS DEPRECATED" in text for text in said if isinstance(text, str))


@shows("QKV split")
def core_has_no_split():
    from megatron.core.transformer import attention

    assert attention.SplitAlongDim is None


@shows("norm and clipping")
def a_norm_needs_values_on_the_host():
    """Tensors of the meta device have none."""
    with cpu_mode._CudaIsCpu(), pytest.raises(RuntimeError, match="meta"):
        l2_norm(*[torch.ones(2, device="meta")] * 2)


@shows("Muon's matrices")
def a_table_of_positions_is_a_matrix():
    from megatron.core.optimizer.emerging_optimizers import _is_nonlinear_or_embedding

    assert not _is_nonlinear_or_embedding(torch.empty(4, 2))


@shows("recomputed biases")
def a_returned_parameter_becomes_an_output():
    from megatron.core.tensor_parallel import checkpoint

    x, bias = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))
    with single_rank():
        checkpoint(lambda x: (x * 2, bias), False, x)
    assert bias.grad_fn is not None


@shows("biases of experts")
def a_bias_of_experts_is_summed_over_the_sequence():
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
    config = TransformerConfig(**sizes, use_cpu_initialization=True)
    config.sequence_parallel = True
    options = {"input_is_parallel": True, "skip_bias_add": True, "is_expert": True}
    with single_rank():
        layer = RowParallelLinear(
            4, 4, config=config, init_method=torch.nn.init.ones_, bias=True, **options
        )
    assert layer.bias.sequence_parallel


@shows("Muon's experts")
def experts_are_left_whole():
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as Core

    one = SimpleNamespace(dp_cp=None, expt_dp=SimpleNamespace(size=lambda: 2))
    Core.shard_params(one, [])
    assert one.expt_dp_params_list is None


@shows("rotary positions")
def cosines_are_rounded():
    """Core multiplies by 16-bit cosines; the error against float64 is 1.4 times that of one
    rounding and more: tests/kernels/test_rotary.py."""
    from megatron.core.models.common.embeddings import rope_utils

    half = torch.full((1, 1, 1, 2), 0.01)
    out = rope_utils._apply_rotary_pos_emb_bshd(torch.tensor([[[[1.0, 0.0]]]]).bfloat16(), half)
    assert out[0, 0, 0, 0] == 1.0 and out.dtype == torch.bfloat16


@shows("weight gradients")
def apex_is_asked_for():
    from megatron.core.tensor_parallel import layers

    assert not layers._grad_accum_fusion_available


@shows("QK clip")
def every_layer_is_taken_for_attention():
    from megatron.core.optimizer.qk_clip import clip_qk

    layers = [torch.nn.Linear(2, 2)]
    inner = SimpleNamespace(module=SimpleNamespace(decoder=SimpleNamespace(layers=layers)))
    with pytest.raises(AttributeError, match="self_attention"):
        clip_qk([SimpleNamespace(module=inner)])


@shows("norms")
def sequence_parallelism_is_refused():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    flags = ("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm")
    config = SimpleNamespace(**dict.fromkeys(flags, False), normalization="RMSNorm")
    config.sequence_parallel = True
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(config, 8)


@shows("residual stream")
def norms_that_are_to_add_do_not():
    from megatron.core.models.backends import LocalSpecProvider

    plain, adding = (LocalSpecProvider().layer_norm(has_residual=x) for x in (False, True))
    assert plain is adding


@shows("cross entropy")
def logits_become_float32():
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    logits, _ = VocabParallelCrossEntropy.calculate_logits_max(torch.ones(2, 4).bfloat16())
    assert logits.dtype == torch.float32


@shows("squared ReLU")
def it_is_compiled():
    from megatron.core.activations import squared_relu

    assert hasattr(squared_relu, "_torchdynamo_orig_callable")


@shows("latent attention")
def a_rank_hands_on_its_columns():
    """And nothing sums the gradient later: tests/compositions.py, "core's latent attention"."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    layer = SimpleNamespace(
        config=SimpleNamespace(q_lora_rank=None, sequence_parallel=False),
        linear_kv_down_proj=lambda hidden: (hidden[..., :3], None),  # of 6, on two ranks
    )
    _, combined = MLASelfAttention._qkv_down_projection(layer, torch.ones(2, 1, 6))
    assert combined.shape[-1] == 3
    later = names_in(MLASelfAttention.get_query_key_value_tensors)
    assert "copy_to_tensor_model_parallel_region" not in later


@shows("grouped experts")
def local_layers_have_experts_one_by_one_alone():
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.experts import SequentialMLP

    assert LocalSpecProvider().grouped_mlp_modules(True).func is SequentialMLP


@shows("extra depths")
def tokens_of_one_step_weigh_differently():
    """4/3 in one micro-batch and 1 in another; what follows: tests/training/test_compositions.py.

    Where core sums counts over ranks (its pull request 7498) this remains.
    """
    from megatron.core.transformer import multi_token_prediction as core

    weights = []
    config = SimpleNamespace(
        mtp_num_layers=1,
        mtp_loss_scaling_factor=1.0,
        mtp_detach_heads=False,
        calculate_per_token_loss=True,
    )
    scaler = SimpleNamespace(apply=lambda main, loss: weights.append(loss.max().item()) or main)
    for mask in ([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]):
        with patched((core, "MTPLossAutoScaler", scaler)):
            core.process_mtp_loss(
                hidden_states=torch.zeros(8, 1, 1),
                labels=torch.zeros(1, 4),
                loss_mask=torch.tensor([mask]),
                output_layer=lambda states, **options: (states, None),
                output_weight=None,
                runtime_gather_output=None,
                is_training=False,
                compute_language_model_loss=lambda labels, logits: torch.ones(1, 4),
                config=config,
            )
    assert weights == pytest.approx([4 / 3, 1.0])


@shows("sinks")
def a_part_of_the_sinks_is_not_marked():
    """What follows: tests/training/test_compositions.py, "core sinks unmarked"."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_patch.model.transformer_config import transformer_config

    with single_rank():
        config = transformer_config(tiny_run({"softmax_type": "learnable"}))
        layer = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    assert not getattr(layer.softmax_offset, "tensor_model_parallel", False)


@shows("tied output layer")
def a_last_stage_allocates_an_output_layer():
    """And ours does not: a last pipeline stage alone, with tied embeddings and an extra depth."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_patch.model.build import layer_specs
    from megatron_patch.model.transformer_config import transformer_config

    run = tiny_run({"mtp": MTPConfig(), "tie_embeddings": True})
    with single_rank():
        config = transformer_config(run)
        block, mtp = layer_specs(run, config)
        core, ours = (
            model(
                config=config,
                transformer_layer_spec=block,
                vocab_size=VOCAB + 4,
                max_sequence_length=16,
                pre_process=False,
                share_embeddings_and_output_weights=True,
                mtp_block_spec=mtp,
            )
            for model in (GPTModel, gpt.GPTModel)
        )
    assert core.output_layer.weight is not None and ours.output_layer.weight is None


@shows("fused AdamW")
def adamw_is_not_fused():
    import megatron.core.optimizer as core

    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}]
    config = core.OptimizerConfig(optimizer="adam", lr=1e-3)
    with adam("torch"):
        built, _ = core._get_megatron_optimizer_based_on_param_groups(
            config, [], groups, skip_megatron_wrapping=True
        )
    assert type(built) is torch.optim.AdamW
    assert not any(group["fused"] for group in built.param_groups)


class Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@shows("weight copy")
def weights_are_copied_one_by_one():
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    bucket = SimpleNamespace(param_data=torch.zeros(4))
    models = [torch.zeros(2), torch.zeros(2)]
    spans = {
        id(x): SimpleNamespace(start=2 * i, end=2 * i + 2, size=2) for i, x in enumerate(models)
    }
    gathers = dict.fromkeys(("use_megatron_fsdp", "fp8_param_gather", "fp4_param_gather"), False)
    optimizer = SimpleNamespace(
        is_stub_optimizer=False,
        ddp_config=SimpleNamespace(**gathers),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        shard_fp32_from_float16_groups=[[torch.ones(2), torch.ones(2)]],
        model_float16_groups=[models],
        shard_fp32_groups=[],
        model_fp32_groups=[],
        buffers=[SimpleNamespace(buckets=[bucket])],
        model_param_gbuf_map=dict.fromkeys(models, (0, None, 0)),
        _is_distopt_quantized_param=lambda x: False,
        _get_model_param_range_map=lambda x: {"gbuf_world_in_bucket": spans[id(x)]},
    )
    with Copies() as seen:
        DistributedOptimizer._copy_main_params_to_model_params(optimizer)
    assert bool((bucket.param_data == 1).all()) and seen.count == 2


@shows("empty parts")
def a_part_without_parameters_asserts():
    from megatron.core.optimizer import distrib_optimizer as core

    part = SimpleNamespace(optimizer=torch.optim.AdamW([{"params": []}]), grad_scaler=None)
    with patched((core, "HAVE_APEX_OR_TE", False)), pytest.raises(AssertionError):
        core.DistributedOptimizer.state_dict(part)


@shows("own step")
def a_load_wants_a_step_that_was_never_saved():
    """Both ways of sharding whole: tests/checkpoint/test_resume.py, `core_alone`."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    weight = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.AdamW([weight])
    inner.state[weight]["step"] = torch.tensor(1.0)
    part = SimpleNamespace(
        optimizer=inner,
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        model_param_group_index_map={weight: (0, 0)},
    )
    with torch.no_grad(), pytest.raises(KeyError, match="step"):
        DistributedOptimizer._set_main_param_and_optimizer_states(
            part, weight, {"param": torch.zeros(1)}
        )


@shows("safe loading")
def an_object_with_code_comes_out_of_a_shard():
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    shard = io.BytesIO()
    torch.save(Fraction(1, 2), shard)
    shard.seek(0)
    planner = SimpleNamespace(flatten_state_dict=False, state_dict={})
    item = SimpleNamespace(dest_index=SimpleNamespace(fqn="x"))
    MCoreLoadPlanner.load_bytes(planner, item, shard)
    assert planner.state_dict["x"] == Fraction(1, 2)


@shows("core attention")
def specs_ask_a_provider_and_nobody_else():
    from megatron.core.models.gpt import gpt_layer_specs as specs

    for getter in (specs.get_gpt_layer_local_submodules, specs.get_gpt_decoder_block_spec):
        assert "core_attention" not in inspect.signature(getter).parameters


@shows("old nvrx")
def a_release_without_a_version_is_an_error():
    from megatron.core.dist_checkpointing.strategies import nvrx

    name = environment.NVRX.replace("-", "_")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, ModuleType(name))
        with pytest.raises(AttributeError, match="__version__"):
            nvrx.is_nvrx_min_version()
