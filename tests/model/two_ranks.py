"""Worker of test_parallel.py: builds models over two gloo ranks; what it saw as JSON in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from megatron_cpu import EP, ETP, PP, QUERY_MLA, SEQ, SP, TP, VOCAB, VP, reseed, tiny_run

from megatron_patch.core_patches import cpu_mode
from megatron_patch.schema.model import MoEConfig, MTPConfig


def groups(run):
    from megatron.core import parallel_state

    p = run.parallel
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=p.expert_model_parallel_size,
        expert_tensor_parallel_size=p.expert_tensor_parallel_size,
    )
    reseed()


DENSE = {"qk_layernorm": True, "normalization": "LayerNorm"}
LATENT = {
    "qk_layernorm": True,
    "init_std": 0.2,  # large enough for the rotary key to matter
    "mla": QUERY_MLA,
}


def norm_grads(*, model=DENSE, mark=True, fused=False, **parallel):
    """Loss and gradients of all norms after core's finalization, by name."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron_patch.model.build import build_model

    run = tiny_run(model, parallel=parallel, training={"compile_fusions": fused})
    groups(run)
    built = build_model(run, vocab_size=VOCAB)
    (chunk,) = built.chunks
    if not mark:
        for parameter in chunk.parameters():
            parameter.sequence_parallel = False
    model = DistributedDataParallel(built.config, DistributedDataParallelConfig(), chunk)
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(SEQ).repeat(2, 1)
    losses = model(tokens, positions, None, labels=tokens.roll(-1, 1))
    losses.sum().backward()
    finalize_model_grads([model], torch.tensor(losses.numel()))
    grads = {n: p.main_grad.tolist() for n, p in chunk.named_parameters() if "norm" in n}
    return {"loss": losses.mean().item(), "grads": grads}


def stock_latent_attention(**parallel):
    """The same with Megatron-Core's own latent attention in the spec."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megatron_patch.model import build

    ours, build.MLASelfAttention = build.MLASelfAttention, MLASelfAttention
    try:
        return norm_grads(model=LATENT, **parallel)
    finally:
        build.MLASelfAttention = ours


def layers(model, **parallel):
    """Global layer numbers of every chunk of this rank, and whether it holds MTP."""
    from megatron_patch.model.build import build_model

    run = tiny_run(model, parallel=parallel)
    groups(run)
    chunks = build_model(run, vocab_size=VOCAB).chunks
    return [[[layer.layer_number for layer in c.decoder.layers], c.mtp_process] for c in chunks]


def experts(**parallel):
    """Loss and number of local experts of an MoE model."""
    from megatron_patch.model.build import build_model

    run = tiny_run({"moe": MoEConfig(num_experts=4)}, parallel=parallel)
    groups(run)
    (chunk,) = build_model(run, vocab_size=VOCAB).chunks
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(3))
    loss = chunk(tokens, torch.arange(SEQ).repeat(2, 1), None, labels=tokens).mean()
    loss.backward()
    return [loss.item(), len(chunk.decoder.layers[0].mlp.experts.local_experts)]


def main() -> None:
    cpu_mode.install()
    dist.init_process_group("gloo")
    tp2 = {TP: 2}
    seen = {
        "dp2": norm_grads(),
        "tp2": norm_grads(**tp2),
        "tp2 sp": norm_grads(**tp2, **SP),
        "tp2 sp compiled loss": norm_grads(**tp2, **SP, fused=True),
        "tp2 sp unmarked": norm_grads(mark=False, **tp2, **SP),
        "mla dp2": norm_grads(model=LATENT),
        "mla tp2 sp": norm_grads(model=LATENT, **tp2, **SP),
        "mla tp2": norm_grads(model=LATENT, **tp2),
        "mla tp2 stock": stock_latent_attention(**tp2),
        "pp2": layers({}, **{PP: 2}),
        "pp2 vp2": layers({"num_layers": 4, "mtp": MTPConfig()}, **{PP: 2, VP: 2}),
        "ep2": experts(**{EP: 2}),
        "tp2 sp moe": experts(**{TP: 2, ETP: 1, EP: 2}, **SP),
    }
    Path(f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
