"""Tokens/s and MFU of the trainer on GPT-2 124M, beside plain PyTorch under torch.compile.

    python benchmarks/gpt2_throughput.py --tokens corpus.bin --dataset data/books --gpus 1 2

Runs, one after the other on the same GPUs, ``benchmarks/plain_gpt2.py`` and the trainer with every
backend named, same shape and batch, and again the plain peer at the end (its two figures bound the
machine's drift). Writes ``gpt2_124m_throughput_<N>gpu.json``.

    python benchmarks/gpt2_throughput.py --join FIRST.json SECOND.json --out FOLDER

puts together what was run in several goes on one machine, in that order.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

from megatron_patch.runtime.devices import visible_devices

HERE = Path(__file__).parent
CONTEXT = 1024


def torchrun(args: argparse.Namespace, gpus: int, arguments: list[str], log: Path) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(gpus), *arguments]
    visible = visible_devices([args.first_device + i for i in range(gpus)])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "4"}
    with log.open("w") as out:
        return subprocess.run(command, stdout=out, stderr=out, env=environment).returncode


def run_plain(args: argparse.Namespace, gpus: int, work: Path, tag: str) -> dict[str, object]:
    out = work / f"{tag}.json"
    arguments = [str(HERE / "plain_gpt2.py"), "--tokens", args.tokens, "--out", str(out)]
    arguments += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    arguments += ["--micro-batch", str(args.micro_batch), "--global-batch", str(args.global_batch)]
    code = torchrun(args, gpus, arguments, work / f"{tag}.log")
    row: dict[str, object] = {"system": "plain PyTorch, torch.compile", "gpus": gpus, "exit": code}
    if code == 0:
        row |= json.loads(out.read_text())
    else:
        row["error"] = machine.why((work / f"{tag}.log").read_text())
    return row


def run_trainer(
    args: argparse.Namespace, gpus: int, work: Path, backend: str, *, fused: bool = False
) -> dict[str, object]:
    tag = f"trainer_{backend}{'_fused' if fused else ''}_{gpus}"
    run_dir = work / tag
    shutil.rmtree(run_dir, ignore_errors=True)
    keys = {
        "run_dir": run_dir,
        "attention.backend": backend,
        "training.train_steps": args.steps,
        "training.micro_batch_size": args.micro_batch,
        "training.global_batch_size": args.global_batch,
        "checkpoint.interval": "null",
        "logging.interval": 4,
        "optimizer.warmup_steps": args.warmup,
        "training.compile_fusions": str(fused).lower(),
        "training.eval_steps": 1,
        "data.blend": f"[{{path: {args.dataset}}}]",
        "data.tokenizer.path": args.tokenizer,
    }
    arguments = ["-m", "megatron_patch", "train", "--config", args.config]
    for key, value in keys.items():
        arguments += ["--set", f"{key}={value}"]
    arguments += [part for extra in args.set for part in ("--set", extra)]
    code = torchrun(args, gpus, arguments, work / f"{tag}.log")
    system = f"trainer, {backend}{', compile_fusions' if fused else ''}"
    row: dict[str, object] = {"system": system, "gpus": gpus, "exit": code}
    if code:
        row["error"] = machine.why((work / f"{tag}.log").read_text())
        return row
    with (run_dir / "metrics.csv").open() as lines:
        rows = [r for r in csv.DictReader(lines) if int(r["step"]) > args.warmup]
    row["tokens_per_s"] = statistics.median(float(r["tokens_per_s"]) for r in rows)
    row["step_seconds"] = args.global_batch * CONTEXT / float(str(row["tokens_per_s"]))
    row["loss_last"] = float(rows[-1]["loss"])
    return row


def add_mfu(row: dict[str, object], flops_per_token: float, peak: float | None) -> None:
    if "tokens_per_s" in row:
        rate = float(str(row["tokens_per_s"])) * flops_per_token / int(str(row["gpus"]))
        row["tflops_per_gpu"] = rate / 1e12
        if peak:
            row["mfu"] = rate / 1e12 / peak


def join(paths: list[Path]) -> dict[str, Any]:
    """One result of several; they must agree in everything but their runs and the time of day."""
    first, *others = (machine.read_result(path, "--join") for path in paths)
    for path, result in zip(paths, (first, *others), strict=True):
        if not isinstance(result.get("runs"), list) or "micro_batch" not in result:
            raise SystemExit(f"--join {path}: not a result of this script; name those it wrote")
    for path, other in zip(paths[1:], others, strict=True):
        for name in sorted((first.keys() | other.keys()) - {"runs", "utc"}):
            if first.get(name) != other.get(name):
                raise SystemExit(
                    f"--join {path}: {name} is {other.get(name)!r}, in {paths[0]} "
                    f"{first.get(name)!r}; join runs of one machine, commit and shape"
                )
        if first["utc"][:10] != other["utc"][:10]:
            raise SystemExit(f"--join {path}: it was made on another day than {paths[0]}")
    return first | {"runs": [row for result in (first, *others) for row in result["runs"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--join", nargs="+", type=Path, help="no run: results to put together")
    parser.add_argument("--tokens", help="uint16 token file for the plain peer")
    parser.add_argument("--dataset", help="prepared dataset prefix of the same text")
    parser.add_argument("--tokenizer", help="tokenizer.json of both")
    parser.add_argument("--config", default="configs/gpt2_124m.yaml", help="trainer configuration")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1], help="GPU counts to time")
    parser.add_argument("--first-device", type=int, default=0, help="index of the first GPU used")
    parser.add_argument("--backends", nargs="+", default=["sdpa_cudnn", "sdpa_flash"])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of every run")
    parser.add_argument("--warmup", type=int, default=10, help="steps left out")
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences a forward pass")
    parser.add_argument("--global-batch", type=int, default=256, help="sequences a step")
    parser.add_argument("--set", action="append", default=[], help="more keys for the trainer")
    parser.add_argument("--work", default="runs/throughput", help="scratch folder")
    parser.add_argument("--out", default=None, help="folder of the result; default docs/results")
    args = parser.parse_args()
    out = Path(args.out) if args.out else None
    if args.join:
        joined = join(args.join)
        gpus = "_".join(str(n) for n in dict.fromkeys(row["gpus"] for row in joined["runs"]))
        print(machine.write_result(f"gpt2_124m_throughput_{gpus}gpu", joined, out))
        return
    for name in ("tokens", "dataset", "tokenizer"):
        if getattr(args, name) is None:
            parser.error(f"--{name} is needed to run anything")
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)

    from megatron_patch.config import load
    from megatron_patch.monitor.flops import flops_per_token
    from megatron_patch.monitor.peaks import peak_tflops

    config = load(args.config).config
    flops = flops_per_token(config, vocab_size=32768)
    import torch

    peak = peak_tflops(torch.cuda.get_device_name(0))
    rows: list[dict[str, object]] = []
    figures = {
        "runs": rows,
        "flops_per_token": flops,
        "peak_tflops": peak,
        "steps": args.steps,
        "global_batch": args.global_batch,
        "micro_batch": args.micro_batch,
    }
    tag = "_".join(map(str, args.gpus))
    for gpus in args.gpus:
        plan = [("plain", f"plain_{gpus}_a"), *(("trainer", b) for b in args.backends)]
        plan += [("fused", args.backends[-1]), ("plain", f"plain_{gpus}_b")]
        for kind, name in plan:
            if kind == "plain":
                row = run_plain(args, gpus, work, name)
            else:
                row = run_trainer(args, gpus, work, name, fused=kind == "fused")
            add_mfu(row, flops, peak)
            rows.append(row)
            print({k: v for k, v in row.items() if k != "error"}, flush=True)
            if "error" in row:
                print(row["error"], flush=True)
            # After every run: a machine that is lost takes the next one along, not all of them.
            machine.write_result(f"gpt2_124m_throughput_{tag}gpu", figures, out)


if __name__ == "__main__":
    main()
