"""Tokens/s, MFU and memory of training at 128k context through the trainer.

    python benchmarks/long_context.py --dataset data/corpus --tokenizer data/tokenizer.json --gpus 8

Trains ``configs/long_context_3b_128k.yaml`` for a few steps, once for each ``--modes``, with a
batch of one sequence a step: time and memory of a pass do not depend on how many are accumulated.
With fewer GPUs than 8, shorten the context (``--seq-length``). Writes ``long_context_<N>gpu.json``,
with what the planner says of the same runs; ``--replan FILE`` writes that anew, without a GPU.
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

sys.path.insert(0, str(Path(__file__).parent))
import machine

COLUMNS = ("tokens_per_s", "mfu", "tflops_per_device", "memory_gib")


def settings(args: argparse.Namespace, mode: str, run_dir: Path) -> list[str]:
    """Keys of one run over those of the configuration."""
    keys: dict[str, object] = {
        "run_dir": run_dir,
        "model.seq_length": args.seq_length,
        "parallel.context_parallel_size": args.gpus,
        "parallel.cp_comm_type": mode,
        "training.train_steps": args.steps,
        "training.global_batch_size": 1,
        "training.eval_interval": "null",
        "training.eval_steps": 1,
        "optimizer.warmup_steps": 1,
        "checkpoint.interval": "null",
        "data.blend": f"[{{path: {args.dataset}}}]",
        "data.tokenizer.path": args.tokenizer,
    }
    if mode == "a2a+p2p":
        keys["parallel.hierarchical_context_parallel_sizes"] = f"[2, {args.gpus // 2}]"
    return [*(f"{key}={value}" for key, value in keys.items()), *args.set]


def planned(args: argparse.Namespace, mode: str) -> dict[str, float]:
    """Tokens/s and memory of a GPU that the planner expects of a run."""
    from megatron_patch.config import load
    from megatron_patch.planner.hardware import gpu_named
    from megatron_patch.planner.plan import Machine, make_plan, vocabulary_of

    run = load(args.config, settings(args, mode, Path("planned"))).config
    plan = make_plan(run, Machine(gpu_named(args.gpu), 1, args.gpus), vocabulary_of(run, None))
    return {
        "planned_tokens_per_s": plan.speed.tokens_per_second,
        "planned_memory_gib": plan.worst.allocated / 2**30,
    }


def train(args: argparse.Namespace, mode: str) -> dict[str, object]:
    """One run; medians of its steps after the warm-up, or the end of its log."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    name = f"long_context_{mode}".replace("+", "_")
    run_dir = work / name
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.gpus), "-m", "megatron_patch", "train"]
    command += ["--config", args.config]
    command += [part for one in settings(args, mode, run_dir) for part in ("--set", one)]
    log = work / f"{name}.log"
    with log.open("w") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "4"}
        code = subprocess.run(command, stdout=out, stderr=out, env=environment).returncode
    row: dict[str, object] = {"mode": mode, "gpus": args.gpus, "exit": code}
    if code:
        return row | {"error": machine.why(log.read_text())}
    with (run_dir / "metrics.csv").open() as lines:
        rows = [r for r in csv.DictReader(lines) if int(r["step"]) > args.warmup]
    for column in COLUMNS:
        values = [float(r[column]) for r in rows if r.get(column)]
        row[column] = statistics.median(values) if values else None
    return row | planned(args, mode) | {"loss_last": float(rows[-1]["loss"]), "steps": len(rows)}


def replan(args: argparse.Namespace) -> int:
    """Write what the planner of this tree says beside the figures of a result."""
    result = machine.read_result(args.replan, "--replan")
    args.seq_length, args.gpus = result["seq_length"], result["runs"][0]["gpus"]
    for row in (row for row in result["runs"] if "error" not in row):
        row |= planned(args, row["mode"])
    result["planned_at"] = machine.commit()
    args.replan.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", default="data/corpus", help="prepared dataset prefix")
    parser.add_argument("--tokenizer", required=True, help="its tokenizer.json")
    parser.add_argument("--config", default="configs/long_context_3b_128k.yaml")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--gpu", default="h200", help="kind of GPU the plan assumes")
    parser.add_argument("--seq-length", type=int, default=131072)
    parser.add_argument("--modes", nargs="+", default=["p2p", "all_gather", "a2a"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3, help="steps left out")
    parser.add_argument("--set", action="append", default=[], help="more keys for the trainer")
    parser.add_argument("--work", default="runs/long_context", help="scratch folder")
    parser.add_argument("--out", type=Path, default=None, help="folder of the result")
    parser.add_argument("--replan", metavar="FILE", type=Path, help="plan a result's runs again")
    args = parser.parse_args()
    if args.replan:
        return replan(args)
    rows = []
    for mode in args.modes:
        rows.append(train(args, mode))
        print(rows[-1], flush=True)
        figures = {"runs": rows, "seq_length": args.seq_length, "config": Path(args.config).stem}
        machine.write_result(f"long_context_{args.gpus}gpu", figures, args.out)
    return int(any(row["exit"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
