"""From bare GPTModel chunks to trainable ones: precision, data parallelism, AdamW."""

from __future__ import annotations

from typing import Any

import torch

from megatron_patch.core_patches import optimizer as core
from megatron_patch.core_patches import quiet
from megatron_patch.schema.run import RunConfig


def wrap_chunks(run: RunConfig, chunks: list[Any]) -> list[Any]:
    """Float16Module (for bf16) and Megatron's DistributedDataParallel around every chunk.

    Gradients are accumulated and reduced in FP32 whatever the compute precision.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    p = run.parallel
    wrapped = []
    quiet.drop_notices()
    for index, chunk in enumerate(chunks):
        config = chunk.config
        cpu = run.training.device == "cpu"
        module = chunk.to("cpu" if cpu else torch.device("cuda", torch.cuda.current_device()))
        if run.training.precision == "bf16":
            module = Float16Module(config, module)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=p.overlap_grad_reduce,
            overlap_param_gather=p.overlap_param_gather,
            use_distributed_optimizer=p.use_distributed_optimizer and run.optimizer.name != "muon",
            check_for_nan_in_grad=False,  # training.finite does it, before the update
        )
        wrapped.append(
            DistributedDataParallel(
                config=config,
                ddp_config=ddp_config,
                module=module,
                # Only the first chunk's communication can hide behind later chunks' work.
                disable_bucketing=index > 0 and not p.overlap_param_gather,
            )
        )
    return wrapped


def build_optimizer(run: RunConfig, chunks: list[Any]) -> tuple[Any, str]:
    """Megatron's optimizer over the wrapped chunks, and one line that says which kernel it runs.

    Weight decay applies to matrices; one-dimensional parameters (norms, biases, attention sinks)
    are never decayed. Under bf16 the main weights, gradients and moments are FP32.

    Muon's update of a matrix has the RMS of AdamW's (scale 0.2 sqrt of the longer side, Liu et al.
    2025, arXiv:2502.16982), so that its learning rate and decay serve. Matrices that tensor
    parallelism splits are gathered: the update does not depend on the layout.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    o, bf16 = run.optimizer, run.training.precision == "bf16"
    muon, sharded = o.name == "muon", run.parallel.use_distributed_optimizer
    config = OptimizerConfig(
        optimizer="muon" if muon else "adam",
        lr=o.lr,
        min_lr=o.min_lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        clip_grad=o.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=sharded and not muon,
        use_layer_wise_distributed_optimizer=sharded and muon,
        overlap_param_gather=run.parallel.overlap_param_gather,
        muon_momentum=o.muon_momentum,
        muon_nesterov=True,
        muon_extra_scale_factor=0.2,
        muon_tp_mode="duplicated",
    )
    if muon:
        core.prepare_muon(chunks)
    with core.adam(o.implementation) as name:
        # An installed kernel of others would take the gate away (`training.gate`).
        core.norm_and_clipping.install(any_kernel=name == "torch")
        with core.dealing_out_experts():
            optimizer = get_megatron_optimizer(config, chunks)
    if muon:
        core.split_shared_groups(chunks, optimizer)
    core.copy_weights_at_once(optimizer)
    detail = ""
    if name == "torch" and run.training.device == "cuda":
        core.use_fused_kernel(optimizer)
        detail = " (fused)"
    state = "sharded over data-parallel ranks" if sharded else "whole"
    asked = "" if o.implementation == "auto" else ", as configured"
    matrices = "Megatron-Core Muon for matrices, else " if muon else ""
    if muon and sharded:
        core.gather_on_gloo(optimizer)
        state += " by whole matrices"
    kernel = core.IMPLEMENTATIONS[name]
    return optimizer, f"optimizer: {matrices}{kernel}{detail}{asked}; state FP32, {state}"


def connect(run: RunConfig, chunks: list[Any], optimizer: Any, *, finalize: Any) -> Any:
    """Give the schedules of Megatron-Core their hooks; returns the TransformerConfig.

    ``finalize`` is called with (chunks, num_tokens, ...) when local gradients are complete.
    """
    config = chunks[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize
    if run.parallel.overlap_grad_reduce:
        one = len(chunks) == 1
        config.no_sync_func = chunks[0].no_sync if one else [c.no_sync for c in chunks]
        if not one:
            config.grad_sync_func = [c.start_grad_sync for c in chunks]
    return config
