"""A plain Megatron-Core training script, with our attention put into its layer spec.

Nothing here comes from the trainer of this repository; the three lines marked below are all that a
Megatron-Core program needs, and those marked m watch its attention (``--monitor DIR``). Train a
small GPT on a repeating sequence, which it learns by heart:

    python examples/plain_megatron.py --cpu                        # one process, no GPU
    torchrun --nproc-per-node 2 examples/plain_megatron.py --tp 2 --backend sdpa_flash
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

SEQ, VOCAB, BATCH = 64, 128, 4


def build_model(args: argparse.Namespace):
    """GPTModel with a stock layer spec, its core attention replaced."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    from megatron_patch.attention.core import core_attention_spec  # 1
    from megatron_patch.attention.replace import replace_core_attention  # 2

    dtype = torch.float32 if args.cpu else torch.bfloat16
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=args.tp,
        use_cpu_initialization=args.cpu,
        bf16=not args.cpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    spec = get_gpt_layer_local_spec()
    spec, replaced = replace_core_attention(spec, core_attention_spec(args.backend))  # 3
    print(f"core attention replaced in {replaced} layer spec by {args.backend}")
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
    )
    return config, model if args.cpu else Float16Module(config, model.cuda())


def train(args: argparse.Namespace) -> list[float]:
    """A few optimizer steps; returns the loss of each."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_patch.stability import AttentionMonitor, MonitorOptions  # m

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    config, model = build_model(args)
    monitor: Any = None  # what docs/integrations.md calls the monitor

    def finalize(*parts: Any, **named: Any) -> None:
        finalize_model_grads(*parts, **named)
        if monitor is not None:
            monitor.grads_reduced()  # m

    config.finalize_model_grads_func = finalize
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        min_lr=3e-3,
        bf16=not args.cpu,
        params_dtype=config.params_dtype,
    )
    optimizer = get_megatron_optimizer(settings, [model])

    if args.monitor:
        options = MonitorOptions(interval=2)
        monitor = AttentionMonitor([model], optimizer, directory=args.monitor, options=options)  # m
    device = "cpu" if args.cpu else torch.cuda.current_device()
    tokens = (torch.arange(SEQ + 1, device=device) * 7 % 50).repeat(BATCH, 1)
    positions = torch.arange(SEQ, device=device).repeat(BATCH, 1)

    def forward_step(_, net):
        losses = net(tokens[:, :-1], positions, None, labels=tokens[:, 1:])  # [b, s]
        return losses, lambda out: (out.mean(), {"loss": out.mean().item()})

    step = get_forward_backward_func()
    history = []
    for number in range(1, args.steps + 1):
        if monitor is not None:
            monitor.before_step(number)  # m
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = step(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[model],
            num_microbatches=1,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        history.append(reports[0]["loss"])
        if monitor is not None:
            found = monitor.after_step(number, loss=history[-1], grad_norm=norm)  # m
            for action in monitor.switched(found):
                print(f"step {number}: {action}")  # a loop of one's own would carry it out
        if dist.get_rank() == 0:
            print(f"step {number}: loss {history[-1]:.4f}", flush=True)
    if monitor is not None:
        monitor.finish(args.steps)
        monitor.close()
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="reference", help="see: megatron-patch doctor")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--monitor", metavar="DIR", help="watch attention, records go there")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        parser.exit(2, "plain_megatron.py: PyTorch sees no GPU here; --cpu runs without one\n")
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0)):
        os.environ.setdefault(name, str(value))  # for a start without torchrun
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if args.cpu:
        # Only because Megatron-Core assumes CUDA everywhere; a GPU program needs none of this.
        from megatron_patch.core_patches import cpu_mode

        cpu_mode.install()
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo" if args.cpu else "nccl")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
