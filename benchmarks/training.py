"""Training runs, timed: tokens/s and MFU beside plain PyTorch and at long context.

    python benchmarks/training.py speed --tokens FILE --dataset PREFIX --tokenizer FILE
    python benchmarks/training.py long --dataset PREFIX --tokenizer FILE --gpus 8

Both commands start the trainer as a user would and write parts of docs/assets/training.json.

``speed``: one run after the other on the same GPUs, several rounds: plain PyTorch under
torch.compile (GPT-2), the trainer, Megatron-Core with Transformer Engine, variants. ``long``:
``configs/long_context_3b_128k.yaml`` with one sequence a step, beside what the planner says; with
fewer GPUs than 8, shorten ``--seq-length``.

Shapes of the plain model: x [b, s] token ids, h [b, s, c], q/k/v [b, heads, s, d], logits
[b*s, vocab].
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CONTEXT, LEARNING_RATE = 1024, 6e-4
COLUMNS = ("tokens_per_s", "mfu", "tflops_per_device", "memory_gib")


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


def batches(
    path: str, micro_batch: int, *, device: torch.device, seed: int, context: int = CONTEXT
):
    """Endless (x, y) pairs at random offsets of a file of uint16 token ids, kept on the device."""
    data = torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int16)).to(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    window = torch.arange(context + 1, device=device)
    while True:
        size, last = (micro_batch, 1), len(data) - context - 1
        start = torch.randint(last, size, device=device, generator=generator)
        ids = data[start + window].long() & 0xFFFF
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def plain(args: argparse.Namespace) -> int:
    """A rank of the plain run: the model, batch and precision of configs/gpt2_124m.yaml.

    BF16 compute, FP32 main weights, AdamW, clip 1.0; attention is what SDPA picks for causal BF16.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl")
    torch.manual_seed(1234)
    model = GPT(layers=12, width=768, heads=12, vocab=32768, context=CONTEXT).to(device)
    run = torch.compile(model)
    if world > 1:
        run = nn.parallel.DistributedDataParallel(run, gradient_as_bucket_view=True)
    decay = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    stream = batches(args.tokens, args.micro_batch, device=device, seed=1000 + rank)
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
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 100)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        times.append(time.perf_counter() - begin)
    if rank == 0:
        median = statistics.median(times[args.warmup :])
        figures = {
            "tokens_per_s": args.global_batch * CONTEXT / median,
            "step_seconds": median,
            "loss_last": losses[-1],
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "gpus": world,
        }
        with open(args.out, "w") as out:
            json.dump(figures, out)
        print(figures, flush=True)
    if world > 1:
        dist.destroy_process_group()
    return 0


def core(args: argparse.Namespace) -> int:
    """A rank of the rival: Megatron-Core and Transformer Engine as their users start them.

    The shape, batch and AdamW of ``--config``; layers, attention, rotary kernel and AdamW of
    Transformer Engine, core's fusions, weight gradients accumulated in the products.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from megatron_patch.config import load
    from megatron_patch.core_patches.weight_gradient import weight_gradient
    from megatron_patch.model.transformer_config import transformer_config
    from megatron_patch.parallel import setup

    te = ["model.layer_spec=te", "attention.backend=te", "training.compile_fusions=true"]
    rope = load(args.config, args.set).config.model.position_embedding == "rope"
    run = load(args.config, [*args.set, *te, *["model.rope_fusion=te"] * rope]).config
    model, o, batch = run.model, run.optimizer, run.training.micro_batch_size
    layout = setup.initialize(run)
    weight_gradient.install()  # Apex's kernel where it is installed, else cuBLAS
    config = transformer_config(run)
    config.moe_grouped_gemm = config.moe_permute_fusion = config.num_moe_experts is not None
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=args.vocab,
        max_sequence_length=model.seq_length,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type=model.position_embedding,
        rotary_base=model.rotary_base,
    ).cuda()
    sharded = run.parallel.use_distributed_optimizer
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=run.parallel.overlap_grad_reduce,
            overlap_param_gather=run.parallel.overlap_param_gather,
            use_distributed_optimizer=sharded,
        ),
        module=Float16Module(config, chunk),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=o.lr, weight_decay=o.weight_decay, adam_beta1=o.beta1,
            adam_beta2=o.beta2, clip_grad=o.clip_grad, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=sharded,
            overlap_param_gather=run.parallel.overlap_param_gather,
        ),
        [wrapped],
    )  # fmt: skip
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if run.parallel.overlap_grad_reduce:
        config.no_sync_func = wrapped.no_sync
    shape, device = (batch, model.seq_length), layout.device
    positions = torch.arange(model.seq_length, device=device).expand(shape)
    seed = 1000 + layout.dp_rank
    stream = batches(args.tokens, batch, device=device, seed=seed, context=model.seq_length)

    def forward(iterator: Any, module: Any) -> Any:
        x, y = next(stream)
        losses = module(x, positions, None, labels=y)
        count = torch.tensor(losses.numel(), dtype=torch.int32, device=device)
        return losses, lambda x: (x.float().sum(), count, {"loss": x.detach().float().mean()})

    accumulate = run.training.global_batch_size // (batch * layout.dp_size)
    times, losses = [], []
    for _ in range(args.steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=None, model=wrapped,
            num_microbatches=accumulate, seq_length=model.seq_length, micro_batch_size=batch,
            forward_only=False,
        )  # fmt: skip
        optimizer.step()
        losses.append(float(found[-1]["loss"]))
        times.append(time.perf_counter() - begin)
    if layout.rank == 0:
        median = statistics.median(times[args.warmup :])
        tokens = run.training.global_batch_size * model.seq_length
        figures = {
            "tokens_per_s": tokens / median,
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "loss_last": losses[-1],
            "losses": losses[:8],
        }
        args.out.write_text(json.dumps(figures))
        print(figures, flush=True)
    setup.destroy()
    return 0


def common(args: argparse.Namespace) -> dict[str, object]:
    """Keys of every run of the trainer."""
    return {
        "training.train_steps": args.steps,
        "checkpoint.interval": None,
        "data.blend": f"[{{path: {args.dataset}}}]",
        "data.tokenizer.path": args.tokenizer,
    }


def train(
    args: argparse.Namespace, name: str, devices: list[int], keys: dict[str, object]
) -> tuple[Path, dict[str, Any]]:
    """Run the trainer in ``--work``: its run directory, and exit code with the error if any."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    run_dir, log = work / name, work / f"{name}.log"
    shutil.rmtree(run_dir, ignore_errors=True)
    more = common(args) | {"run_dir": run_dir, "training.eval_steps": 1}
    command = machine.train_command(args.config, more | keys, args.set)
    code = machine.torchrun(command, processes=len(devices), log=log, devices=devices, threads=4)
    return run_dir, {"exit": code} | ({"error": machine.why(log.read_text())} if code else {})


def medians(run_dir: Path, warmup: int, columns: tuple[str, ...]) -> dict[str, Any]:
    """Medians of the steps after ``warmup``, and their losses."""
    rows = [row for step, row in machine.metrics(run_dir).items() if step > warmup]
    losses = [round(float(row["loss"]), 5) for row in rows]
    found: dict[str, Any] = {"loss_last": losses[-1], "losses": losses, "steps": len(rows)}
    for column in columns:
        values = [float(row[column]) for row in rows if row.get(column)]
        found[column] = statistics.median(values) if values else None
    return found


# speed


def timed(args: argparse.Namespace) -> dict[str, object]:
    """Keys of the trainer's runs and of Megatron-Core's."""
    return {
        "training.train_steps": args.steps,
        "training.micro_batch_size": args.micro_batch,
        "training.global_batch_size": args.global_batch,
        "optimizer.warmup_steps": args.warmup,
    }


def run_plain(args: argparse.Namespace, gpus: int, tag: str) -> dict[str, Any]:
    command = ["plain", "--tokens", args.tokens]
    for name in ("micro_batch", "global_batch"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return run_rank(args, gpus, f"plain_{tag}", command)


def run_core(args: argparse.Namespace, gpus: int, tag: str) -> dict[str, Any]:
    sets = [*args.set, *(f"{key}={value}" for key, value in timed(args).items())]
    command = ["core", "--config", args.config, *(x for text in sets for x in ("--set", text))]
    command += ["--tokens", f"{args.dataset}.bin"]
    return run_rank(args, gpus, f"core_{tag}", command)


def run_rank(args: argparse.Namespace, gpus: int, tag: str, command: list[str]) -> dict[str, Any]:
    """One of this file's rank commands on ``gpus`` GPUs: its exit code and figures, or error."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    out, log = work / f"{tag}.json", work / f"{tag}.log"
    steps = ["--steps", str(args.steps), "--warmup", str(args.warmup), "--out", str(out)]
    devices = list(range(gpus))
    code = machine.torchrun(
        [__file__, *command, *steps], processes=gpus, log=log, devices=devices, threads=4
    )
    return {"exit": code} | (
        {"error": machine.why(log.read_text())} if code else json.loads(out.read_text())
    )


def run_trainer(
    args: argparse.Namespace, gpus: int, tag: str, settings: list[str]
) -> dict[str, Any]:
    keys = timed(args) | {"logging.interval": 4}
    more = dict(setting.split("=", 1) for setting in settings)
    run_dir, row = train(args, f"trainer_{tag}", list(range(gpus)), keys | more)
    return (
        row if row["exit"] else row | medians(run_dir, args.warmup, ("tokens_per_s", "memory_gib"))
    )


def speed(args: argparse.Namespace) -> int:
    """All systems in turn, ``--rounds`` times; written after every run."""
    systems: dict[str, Any] = {"trainer": partial(run_trainer, settings=[])}
    if args.tokens:
        systems = {"plain PyTorch, torch.compile": run_plain} | systems
    if not args.without_core:
        systems["Megatron-Core, Transformer Engine"] = run_core
    for variant in args.variant:
        name, _, keys = variant.partition(":")
        systems[f"trainer, {name}"] = partial(run_trainer, settings=keys.split(","))
    rows: list[dict[str, Any]] = []
    figures = {name: getattr(args, name) for name in ("steps", "global_batch", "micro_batch")}
    settings = [key for key in args.set if not key.startswith(("data.", "name="))]
    figures |= {"config": Path(args.config).name, "settings": settings}
    for turn, gpus, (index, (name, run)) in itertools.product(
        range(args.rounds), args.gpus, enumerate(systems.items())
    ):
        row = {"system": name, "round": turn, "gpus": gpus}
        rows.append(row | run(args, gpus, f"{index}"))
        print(rows[-1], flush=True)
        part = f"rounds, {args.label}"
        machine.write_result("training", figures | {"runs": rows}, args.out, part=part)
    return int(any("error" in row for row in rows))


# long


def long_keys(args: argparse.Namespace, mode: str) -> dict[str, object]:
    """Keys of one run over those of the configuration."""
    keys: dict[str, object] = {
        "model.seq_length": args.seq_length,
        "parallel.context_parallel_size": args.gpus,
        "parallel.cp_comm_type": mode,
        "training.global_batch_size": 1,
        "training.eval_interval": None,
        "optimizer.warmup_steps": 1,
    }
    if mode == "a2a+p2p":
        keys["parallel.hierarchical_context_parallel_sizes"] = f"[2, {args.gpus // 2}]"
    return keys


def planned(args: argparse.Namespace, mode: str) -> dict[str, float]:
    """Tokens/s and memory of a GPU that the planner expects of a run."""
    keys = long_keys(args, mode) | common(args)
    sets = [f"{key}={machine.text_of(value)}" for key, value in keys.items()]
    plan = machine.plan_of(args.config, [*sets, *args.set], gpu=args.gpu, gpus=args.gpus)
    return {
        "planned_tokens_per_s": plan.speed.tokens_per_second,
        "planned_memory_gib": plan.worst.allocated / 2**30,
    }


def long(args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for mode in args.modes:
        name = f"long_context_{mode}".replace("+", "_")
        run_dir, row = train(args, name, list(range(args.gpus)), long_keys(args, mode))
        row |= {"mode": mode, "gpus": args.gpus}
        if row["exit"] == 0:
            row |= planned(args, mode) | medians(run_dir, args.warmup, COLUMNS)
        rows.append(row)
        print(row, flush=True)
        config = Path(args.config).stem
        figures = {"runs": rows, "seq_length": args.seq_length, "config": config}
        machine.write_result("training", figures, args.out, part=f"long context, {args.gpus} GPUs")
    return int(any(row["exit"] for row in rows))


def command(
    commands: Any, name: str, run: Any, steps: int, *, config: str = "", warmup: int = 10
) -> argparse.ArgumentParser:
    one = commands.add_parser(name)
    one.set_defaults(run=run)
    one.add_argument("--steps", type=int, default=steps, help="optimizer steps of every run")
    one.add_argument("--warmup", type=int, default=warmup, help="steps that are not timed")
    if name != "long":
        one.add_argument("--micro-batch", type=int, default=64, help="sequences at once")
        one.add_argument("--global-batch", type=int, default=256, help="sequences a step")
    one.add_argument("--out", type=Path, default=machine.RESULTS, help="folder of the result")
    if config:
        one.add_argument("--dataset", required=True, help="prefix of a prepared dataset")
        one.add_argument("--tokenizer", required=True, help="its tokenizer.json")
        one.add_argument("--config", default=config)
        one.add_argument("--set", action="append", default=[], help="more keys of the trainer")
        one.add_argument("--work", default=f"runs/training_{name}", help="scratch folder")
    return one


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="speed | long")
    one = command(commands, "speed", speed, 30, config="configs/gpt2_124m.yaml")
    one.add_argument("--tokens", help="uint16 token file of the same text: plain PyTorch's GPT-2")
    one.add_argument("--label", default="GPT-2 124M", help="name of the shape in the result")
    one.add_argument("--gpus", type=int, nargs="+", default=[1], help="numbers of GPUs, in turn")
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--without-core", action="store_true", help="losses of backends alone")
    one.add_argument("--variant", action="append", default=[], metavar="NAME:KEY=VALUE,...")
    one = command(commands, "long", long, 8, config="configs/long_context_3b_128k.yaml", warmup=3)
    one.add_argument("--gpus", type=int, default=8)
    one.add_argument("--gpu", default="h200", help="kind of GPU the plan assumes")
    one.add_argument("--seq-length", type=int, default=131072)
    one.add_argument("--modes", nargs="+", default=["p2p", "all_gather", "a2a"])
    one = command(commands, "plain", plain, 60)  # a rank of `speed`; --out is a file
    one.add_argument("--tokens", required=True)
    one = commands.add_parser("core")  # a rank of the rival; --out is a file
    one.set_defaults(run=core)
    one.add_argument("--config", required=True)
    one.add_argument("--tokens", required=True)
    one.add_argument("--set", action="append", default=[])
    one.add_argument("--vocab", type=int, default=32768)
    one.add_argument("--steps", type=int, default=30)
    one.add_argument("--warmup", type=int, default=10)
    one.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
