"""kill -9 of a rank in the middle of a step on GPUs: does the job restart and lose nothing?

    python benchmarks/restart_on_gpus.py --gpus 8
    python benchmarks/restart_on_gpus.py --gpus 2 --device cpu     # does the script work?

A GPT-2 of 124M parameters is trained twice in deterministic mode by the shipped batch script, node
script and torchrun, with shims in place of Slurm's commands: once undisturbed, once with SIGKILL to
one rank inside the backward pass of a step between two checkpoints. The script restarts the ranks
by itself; loss and gradient norm of every step and the final weights, optimizer state, random
streams and data of every rank must be those of the undisturbed run, bit by bit. Writes
``docs/results/restart_<gpus>gpu.json``; exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))
import machine
from fault_lab import job as script
from fault_lab import lab

STEPS, INTERVAL, KILLED = 40, 10, 27
SMALL = (f"training.train_steps={STEPS}", f"checkpoint.interval={INTERVAL}")
GPT2 = (
    "training.device=cuda",
    "training.precision=bf16",
    "training.micro_batch_size=4",
    "model.num_layers=12",
    "model.hidden_size=768",
    "model.num_attention_heads=12",
    "model.ffn_hidden_size=3072",
    "model.seq_length=1024",
    "attention.backend=stable_flash",
    "optimizer.lr=6.0e-4",
)


def train(folder: Path, fault: str, args: argparse.Namespace) -> dict[str, Any]:
    """One job to its end: what it came to, and how it went."""
    shutil.rmtree(folder, ignore_errors=True)
    run = lab.Lab(folder, ranks=args.gpus)
    gpu = args.device == "cuda"
    batch = f"training.global_batch_size={(8 if gpu else 2) * args.gpus}"
    job = script.Job(run, fault, (*SMALL, *(GPT2 if gpu else ()), batch), gpu=gpu)
    outcome = job.drive(None, step=0, limit=args.limit)
    found = run.result()
    starts = sorted(p.name for p in run.run_dir.glob("logs/*.*"))
    print(f"{folder.name}: exit code {outcome.code} after {outcome.seconds:.0f} s, {len(starts)} "
          f"start(s), finished: {found['finished']}", flush=True)  # fmt: skip
    if outcome.code or not found["finished"]:
        print(outcome.output[-3000:])
    told = outcome.line(r"they left no exit code") if fault != "none" else None
    facts = {
        "code": outcome.code,
        "seconds": outcome.seconds,
        "starts": len(starts),
        "orphans": outcome.orphans,
        "seconds_after_the_kill": outcome.after_fault,
        "told": told,
        "timed_out": outcome.timed_out,
    }
    return found | {"job": facts}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, required=True, help="ranks, each with a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, default=Path("restart-work"), help="scratch folder")
    parser.add_argument("--limit", type=float, default=280, help="seconds a job may take")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    args.work = args.work.resolve()
    began = time.monotonic()
    lab.isolate()
    whole = train(args.work / "unbroken", "none", args)
    victim = args.gpus - 1
    broken = train(args.work / "killed", f"backward:{KILLED}:{victim}:1", args)
    different = list(lab.compare(whole, broken))
    restarted = broken["job"]["starts"] == 2 and whole["job"]["starts"] == 1
    result = {
        "gpus": args.gpus,
        "device": args.device,
        "steps": STEPS,
        "checkpoint_interval": INTERVAL,
        "killed": {"rank": victim, "step": KILLED, "place": "backward pass"},
        "different": different,
        "restarted": restarted,
        "steps_compared": len(whole["metrics"]),
        "ranks_compared": len(whole["ranks"]),
        "loss": {step: values[0] for step, values in broken["metrics"].items()},
        "unbroken": whole["job"],
        "after_the_kill": broken["job"],
        "seconds": time.monotonic() - began,
    }
    good = (
        not different
        and restarted
        and len(whole["metrics"]) == STEPS
        and len(whole["ranks"]) == args.gpus
        and not broken["job"]["orphans"]
    )
    name = f"restart_{args.gpus}gpu" if args.device == "cuda" else f"restart_{args.gpus}cpu"
    path = machine.write_result(name, result | {"good": good}, args.out)
    print(
        json.dumps({k: result[k] for k in ("different", "restarted", "after_the_kill")}, indent=1)
    )
    print(f"{'the same in every bit' if good else 'NOT the same'}; wrote {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
