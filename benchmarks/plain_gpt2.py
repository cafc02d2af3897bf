"""GPT-2 124M in plain PyTorch under torch.compile: the peer the trainer is timed against.

    torchrun --nproc-per-node 2 benchmarks/plain_gpt2.py --tokens corpus.bin --out plain.json

The same shape, batch, precision (BF16 compute, FP32 main weights) and data as
``configs/gpt2_124m.yaml``: learned positions, LayerNorm, GELU, tied embedding, AdamW, clip 1.0.
Attention is whatever ``scaled_dot_product_attention`` picks for causal BF16 (flash or cuDNN).
Times are wall-clock medians over steps, the first ``--warmup`` left out.

Shapes: x [b, s] token ids, h [b, s, c], q/k/v [b, heads, s, d], logits [b*s, vocab].
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Pre-norm transformer block with fused QKV."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        b, s, c = h.shape
        qkv = self.qkv(self.norm1(h)).view(b, s, 3, self.heads, c // self.heads)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.proj(o.transpose(1, 2).reshape(b, s, c))
        return h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with tied embeddings; returns the mean cross entropy."""

    def __init__(self, *, layers: int, width: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * layers) if residual else 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), y.view(-1))


def batches(path: str, *, micro_batch: int, context: int, device: torch.device, seed: int):
    """Endless (x, y) pairs at random offsets of a file of uint16 token ids, kept on the device."""
    data = torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int16)).to(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    window = torch.arange(context + 1, device=device)
    while True:
        start = torch.randint(
            len(data) - context - 1, (micro_batch, 1), device=device, generator=generator
        )
        ids = data[start + window].long() & 0xFFFF
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", required=True, help="file of uint16 token ids")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--warmup", type=int, default=15, help="steps left out of the median")
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences a forward pass")
    parser.add_argument("--global-batch", type=int, default=512, help="sequences a step")
    parser.add_argument("--context", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--vocab", type=int, default=32768, help="rows of the embedding")
    parser.add_argument("--layers", type=int, default=12, help="transformer layers")
    parser.add_argument("--width", type=int, default=768, help="residual width")
    parser.add_argument("--heads", type=int, default=12, help="attention heads")
    parser.add_argument("--lr", type=float, default=6e-4, help="peak learning rate")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl")
    torch.manual_seed(1234)
    model = GPT(
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        vocab=args.vocab,
        context=args.context,
    ).to(device)
    run = torch.compile(model)
    if world > 1:
        run = nn.parallel.DistributedDataParallel(run, gradient_as_bucket_view=True)
    decay = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    stream = batches(
        args.tokens,
        micro_batch=args.micro_batch,
        context=args.context,
        device=device,
        seed=1000 + rank,
    )
    accumulate = args.global_batch // (args.micro_batch * world)
    times, losses = [], []
    for step in range(args.steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        total = torch.zeros((), device=device)
        for micro in range(accumulate):
            if world > 1:
                run.require_backward_grad_sync = micro == accumulate - 1
            x, y = next(stream)
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(x, y) / accumulate
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 100)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        times.append(time.perf_counter() - begin)
    if rank == 0:
        median = statistics.median(times[args.warmup :])
        figures = {
            "tokens_per_s": args.global_batch * args.context / median,
            "step_seconds": median,
            "loss_last": losses[-1],
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "gpus": world,
        }
        with open(args.out, "w") as out:
            json.dump(figures, out)
        print(figures, flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
