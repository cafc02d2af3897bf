"""Training runs, timed: tokens/s and MFU beside plain PyTorch, at long context, and loss curves.

    python benchmarks/training.py speed --tokens FILE --dataset PREFIX --tokenizer FILE --gpus 1
    python benchmarks/training.py long --dataset PREFIX --tokenizer FILE --gpus 8
    python benchmarks/training.py backends --dataset PREFIX --tokenizer FILE --gpus 4

Every command starts the trainer as a user would and writes parts of docs/assets/training.json.

``speed``: GPT-2 124M, one run after the other on the same GPUs: plain PyTorch under torch.compile,
the trainer with every backend named, and plain PyTorch again (its two figures bound the machine's
drift). ``long``: ``configs/long_context_3b_128k.yaml`` with one sequence a step, beside what the
planner says; with fewer GPUs than 8, shorten ``--seq-length``; ``--replan`` plans the runs of the
stored result anew, without a GPU. ``backends``: the same model from the same seed on the same
batches with every backend, side by side. ``sdpa_cudnn`` runs twice: its backward is not repeatable,
so the distance between its two runs is the noise that differences are judged by.

Shapes of the plain model: x [b, s] token ids, h [b, s, c], q/k/v [b, heads, s, d], logits
[b*s, vocab].
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
import machine
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CONTEXT = 1024
BACKENDS = (
    ("sdpa_cudnn", "sdpa_cudnn"),
    ("sdpa_cudnn again", "sdpa_cudnn"),
    ("stable_flash", "stable_flash"),
    ("sdpa_flash", "sdpa_flash"),
)
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
    return 0


def train(
    args: argparse.Namespace, name: str, devices: list[int], keys: dict[str, object]
) -> tuple[Path, dict[str, Any]]:
    """Run the trainer in ``--work``: its run directory, and exit code with the error if any."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    run_dir, log = work / name, work / f"{name}.log"
    shutil.rmtree(run_dir, ignore_errors=True)
    common: dict[str, object] = {
        "run_dir": run_dir,
        "training.train_steps": args.steps,
        "training.eval_steps": 1,
        "checkpoint.interval": None,
        "data.blend": f"[{{path: {args.dataset}}}]",
        "data.tokenizer.path": args.tokenizer,
    }
    command = machine.train_command(args.config, common | keys, args.set)
    code = machine.torchrun(command, processes=len(devices), log=log, devices=devices, threads=4)
    return run_dir, {"exit": code} | ({"error": machine.why(log.read_text())} if code else {})


def medians(run_dir: Path, warmup: int, columns: tuple[str, ...]) -> dict[str, Any]:
    """Medians of the steps after ``warmup``, and the last loss."""
    rows = [row for step, row in machine.metrics(run_dir).items() if step > warmup]
    found: dict[str, Any] = {"loss_last": float(rows[-1]["loss"]), "steps": len(rows)}
    for column in columns:
        values = [float(row[column]) for row in rows if row.get(column)]
        found[column] = statistics.median(values) if values else None
    return found


# speed


def run_plain(args: argparse.Namespace, gpus: int, tag: str) -> dict[str, Any]:
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    out, log = work / f"{tag}.json", work / f"{tag}.log"
    command = [__file__, "plain", "--tokens", args.tokens, "--out", str(out)]
    for name in ("steps", "warmup", "micro_batch", "global_batch"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    devices = [args.first_device + i for i in range(gpus)]
    code = machine.torchrun(command, processes=gpus, log=log, devices=devices, threads=4)
    row: dict[str, Any] = {"system": "plain PyTorch, torch.compile", "gpus": gpus, "exit": code}
    return row | ({"error": machine.why(log.read_text())} if code else json.loads(out.read_text()))


def run_trainer(args: argparse.Namespace, gpus: int, backend: str, fused: bool) -> dict[str, Any]:
    keys: dict[str, object] = {
        "attention.backend": backend,
        "training.micro_batch_size": args.micro_batch,
        "training.global_batch_size": args.global_batch,
        "logging.interval": 4,
        "optimizer.warmup_steps": args.warmup,
        "training.compile_fusions": fused,
    }
    name = f"trainer_{backend}{'_fused' * fused}_{gpus}"
    devices = [args.first_device + i for i in range(gpus)]
    run_dir, row = train(args, name, devices, keys)
    row |= {"system": f"trainer, {backend}{', compile_fusions' * fused}", "gpus": gpus}
    if row["exit"] == 0:
        row |= medians(run_dir, args.warmup, ("tokens_per_s",))
        row["step_seconds"] = args.global_batch * CONTEXT / row["tokens_per_s"]
    return row


def speed(args: argparse.Namespace) -> int:
    from megatron_patch.config import load
    from megatron_patch.monitor.flops import flops_per_token
    from megatron_patch.monitor.peaks import peak_tflops

    flops = flops_per_token(load(args.config).config, vocab_size=32768)
    peak = peak_tflops(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    failed = False
    for gpus in args.gpus:
        rows: list[dict[str, Any]] = []
        figures = {"runs": rows, "flops_per_token": flops, "peak_tflops": peak}
        figures |= {name: getattr(args, name) for name in ("steps", "global_batch", "micro_batch")}
        plan = [("plain", "a"), *(("trainer", b) for b in args.backends)]
        plan += [("fused", args.backends[-1]), ("plain", "b")]
        for kind, name in plan:
            if kind == "plain":
                row = run_plain(args, gpus, f"plain_{gpus}_{name}")
            else:
                row = run_trainer(args, gpus, name, kind == "fused")
            if "error" not in row:
                row["tflops_per_gpu"] = row["tokens_per_s"] * flops / gpus / 1e12
                row |= {"mfu": row["tflops_per_gpu"] / peak} if peak else {}
            rows.append(row)
            failed |= "error" in row
            print(row, flush=True)
            # After every run: a machine that is lost takes the next one along, not all of them.
            part = f"gpt2_124m, {gpus} GPU{'s' * (gpus > 1)}"
            machine.write_result("training", figures, args.out, part=part)
    return int(failed)


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
    keys = long_keys(args, mode) | {
        "training.train_steps": args.steps,
        "checkpoint.interval": None,
        "data.blend": f"[{{path: {args.dataset}}}]",
        "data.tokenizer.path": args.tokenizer,
    }
    sets = [f"{key}={machine.text_of(value)}" for key, value in keys.items()]
    plan = machine.plan_of(args.config, [*sets, *args.set], gpu=args.gpu, gpus=args.gpus)
    return {
        "planned_tokens_per_s": plan.speed.tokens_per_second,
        "planned_memory_gib": plan.worst.allocated / 2**30,
    }


def long(args: argparse.Namespace) -> int:
    part = f"long context, {args.gpus} GPUs"
    if args.replan:
        path = (args.out or machine.RESULTS) / "training.json"
        result = json.loads(path.read_text())[part]
        args.seq_length = result["seq_length"]
        for row in (row for row in result["runs"] if "error" not in row):
            row |= planned(args, row["mode"])
        result["planned_at"] = machine.commit()
        machine.write_result("training", result, args.out, part=part, head={})
        return 0
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
        machine.write_result("training", figures, args.out, part=part)
    return int(any(row["exit"] for row in rows))


# backends


def curve(args: argparse.Namespace, label: str, backend: str, devices: list[int]) -> list[float]:
    """Loss of every step."""
    keys: dict[str, object] = {
        "attention.backend": backend,
        "training.global_batch_size": args.global_batch,
        "training.micro_batch_size": args.micro_batch,
        "optimizer.warmup_steps": args.steps // 2,
        "optimizer.schedule": "constant",
        "logging.interval": 1,
    }
    name = f"{label.replace(' ', '_')}_{len(devices)}"
    run_dir, row = train(args, name, devices, keys)
    if row["exit"]:
        raise RuntimeError(f"{label} ended with exit code {row['exit']}:\n{row['error']}")
    return [float(found["loss"]) for _, found in sorted(machine.metrics(run_dir).items())]


def distance(a: list[float], b: list[float]) -> dict[str, float]:
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    tail = len(gaps) // 4
    signed = sum(x - y for x, y in zip(a[-tail:], b[-tail:], strict=True)) / tail
    return {"max": max(gaps), "mean": sum(gaps) / len(gaps), "last_quarter_signed": signed}


def backends(args: argparse.Namespace) -> int:
    results: dict[str, Any] = {"steps": args.steps, "global_batch": args.global_batch}
    for per_run in args.per_run:
        slots = max(1, args.gpus // per_run)
        free = [[s * per_run + i for i in range(per_run)] for s in range(slots)]

        def one(run: tuple[str, str], free: list[list[int]] = free) -> list[float]:
            devices = free.pop()
            try:
                return curve(args, *run, devices)
            finally:
                free.append(devices)

        with ThreadPoolExecutor(slots) as pool:
            losses = list(pool.map(one, BACKENDS))
        curves = {label: values for (label, _), values in zip(BACKENDS, losses, strict=True)}
        base = curves["sdpa_cudnn"]
        gaps = {label: distance(values, base) for label, values in curves.items() if values != base}
        results[f"{per_run}_gpu"] = {"losses": curves, "distance_to_sdpa_cudnn": gaps}
        print(per_run, "GPU:", gaps, flush=True)
    machine.write_result("training", results, args.out, part="first steps")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = found.add_subparsers(required=True, metavar="speed | long | backends")

    def command(name: str, run: Any, steps: int, config: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name)
        one.set_defaults(run=run)
        one.add_argument("--steps", type=int, default=steps, help="optimizer steps of every run")
        if name != "plain":
            one.add_argument("--dataset", required=True, help="prefix of a prepared dataset")
            one.add_argument("--tokenizer", required=True, help="its tokenizer.json")
            one.add_argument("--config", default=config)
            one.add_argument("--set", action="append", default=[], help="more keys of the trainer")
            one.add_argument("--work", default=f"runs/training_{name}", help="scratch folder")
            one.add_argument("--out", type=Path, help="folder of the result; default docs/assets")
        if name != "long":
            one.add_argument("--micro-batch", type=int, default=32, help="sequences at once")
            batch = 64 if name == "backends" else 256
            one.add_argument("--global-batch", type=int, default=batch, help="sequences a step")
        if name != "backends":
            one.add_argument("--warmup", type=int, default=3 if name == "long" else 10)
        return one

    one = command("speed", speed, 30, "configs/gpt2_124m.yaml")
    one.add_argument("--tokens", required=True, help="uint16 token file of the same text")
    one.add_argument("--gpus", type=int, nargs="+", default=[1], help="GPU counts to time")
    one.add_argument("--first-device", type=int, default=0, help="index of the first GPU used")
    one.add_argument("--backends", nargs="+", default=["sdpa_cudnn", "sdpa_flash", "stable_flash"])
    one = command("long", long, 8, "configs/long_context_3b_128k.yaml")
    one.add_argument("--gpus", type=int, default=8)
    one.add_argument("--gpu", default="h200", help="kind of GPU the plan assumes")
    one.add_argument("--seq-length", type=int, default=131072)
    one.add_argument("--modes", nargs="+", default=["p2p", "all_gather", "a2a"])
    one.add_argument("--replan", action="store_true", help="plan the stored runs again")
    one = command("backends", backends, 200, "configs/gpt2_124m.yaml")
    one.add_argument("--gpus", type=int, default=4, help="GPUs of this machine to use")
    one.add_argument("--per-run", type=int, nargs="+", default=[1, 2], help="GPUs of one run")
    one = command("plain", plain, 60, "")  # a rank of `speed`
    one.add_argument("--tokens", required=True)
    one.add_argument("--out", required=True, help="JSON file to write")
    for name, value in (("context", 1024), ("vocab", 32768), ("layers", 12), ("width", 768),
                        ("heads", 12)):  # fmt: skip
        one.add_argument(f"--{name}", type=int, default=value)
    one.add_argument("--lr", type=float, default=6e-4, help="peak learning rate")
    return found


def main() -> int:
    args = parser().parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
