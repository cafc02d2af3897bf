"""One Megatron-Core rank inside a test process, on the CPU or a GPU, and small runs for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.core_patches import cpu_mode
from megatron_patch.parallel.setup import Layout
from megatron_patch.schema.attention import AttentionConfig
from megatron_patch.schema.data import DataConfig
from megatron_patch.schema.model import MLAConfig, ModelConfig
from megatron_patch.schema.parallel import ParallelConfig
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import OptimizerConfig, TrainingConfig

SEQ, VOCAB = 16, 60
MLA = MLAConfig(kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
QUERY_MLA = replace(MLA, q_lora_rank=16)
"""Latent attention, and with a latent of the queries too."""
# Keys of the section `parallel`.
TP, CP, EP = "tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
PP, VP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
ETP, DIST = "expert_tensor_parallel_size", "use_distributed_optimizer"
SP = {"sequence_parallel": True}


@contextlib.contextmanager
def single_rank(seed: int = 1) -> Iterator[None]:
    """CPU mode, a gloo group of one, Megatron's groups and seeds; all undone at the end."""
    cpu_mode.install()
    from megatron.core import parallel_state

    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        reseed(seed)
        forget_trackers()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        cpu_mode.uninstall()


@contextlib.contextmanager
def single_gpu() -> Iterator[None]:
    """An NCCL group of one on the first GPU, Megatron's groups and seeds; undone at the end."""
    from megatron.core import parallel_state

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    reseed()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def forget_trackers() -> None:
    """Core's trackers keep the number of layers of the model before."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()


def layout(**where: int) -> Layout:
    """Coordinates of one rank on the CPU, changed as asked."""
    axes = ("tp", "pp", "cp", "dp", "ep")
    one = {f"{axis}_size": 1 for axis in axes} | {f"{axis}_rank": 0 for axis in axes}
    one |= {"rank": 0, "world_size": 1, "local_rank": 0}
    return Layout(**({"device": torch.device("cpu")} | one | where))


def reseed(seed: int = 1) -> None:
    """The default and the model-parallel random streams."""
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def tiny_run(
    model: dict[str, Any] | None = None,
    *,
    attention: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
) -> RunConfig:
    """A two-layer GPT on the CPU with the reference backend, changed as asked."""
    shape = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": SEQ,
        "ffn_hidden_size": 64,
        "make_vocab_size_divisible_by": 8,
    }
    loop = {
        "train_steps": 2,
        "global_batch_size": 2,
        "micro_batch_size": 2,
        "device": "cpu",
        "precision": "fp32",
    }
    return RunConfig(
        name="test",
        model=ModelConfig(**(shape | (model or {}))),
        training=TrainingConfig(**(loop | (training or {}))),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(),
        attention=AttentionConfig(**({"backend": "reference"} | (attention or {}))),
        parallel=ParallelConfig(**(parallel or {})),
    )


def core_attention(
    heads: int,
    head_dim: int,
    *,
    backend: str = "reference",
    options: dict[str, Any] | None = None,
    layer_number: int = 1,
    groups: Any = None,
    cp_comm_type: str | None = None,
    **changes: Any,
) -> Any:
    """`CoreAttention` of the rank, whose configuration is changed as asked."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_patch.attention.core import CoreAttention

    shape = {"num_layers": 4, "hidden_size": heads * head_dim, "num_attention_heads": heads}
    plain = {"attention_dropout": 0.0, "use_cpu_initialization": True, "cuda_graph_modules": []}
    return CoreAttention(
        config=TransformerConfig(**(shape | plain | changes)),
        layer_number=layer_number,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=cp_comm_type,
        pg_collection=groups or ProcessGroupCollection.use_mpu_process_groups(),
        backend=backend,
        options=options,
    )


def loss_and_grads(chunk: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one forward and backward pass over fixed tokens."""
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(SEQ).repeat(2, 1)
    loss = chunk(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()
    grads = {n: p.grad for n, p in chunk.named_parameters() if p.grad is not None}
    return loss.item(), grads


def fused(
    model: dict[str, Any] | None = None,
    *,
    on: bool = True,
    precision: str = "bf16",
    **training: Any,
) -> Any:
    """The chunk of `tiny_run`, weights of one seed, with ``training.compile_fusions`` or not."""
    from megatron_patch.model.build import build_model

    reseed()
    run = tiny_run(model, training={"compile_fusions": on, "precision": precision} | training)
    (chunk,) = build_model(run, vocab_size=VOCAB).chunks
    return chunk.bfloat16() if precision == "bf16" else chunk
