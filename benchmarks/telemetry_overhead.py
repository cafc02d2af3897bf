"""What the telemetry costs: paired runs of the trainer with and without it.

    python benchmarks/telemetry_overhead.py --config configs/gpt2_124m.yaml --gpus 1 2 \
        --set data.blend='[{path: data/corpus}]' --set data.tokenizer.path=data/tokenizer.json

Three kinds of run in turn, repeated: without telemetry, at the default interval, and at every step.
Runs of one kind differ by more than the telemetry costs, so the figure to judge by is the cost of
one observation, (every step - without), divided by the default interval; the paired difference
beside it shows that nothing else is hidden. Writes docs/results/telemetry_overhead.json (with
``--device cpu``: a smoke test, the file name says so).
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

from megatron_patch.stability.config import StabilityConfig

INTERVAL = StabilityConfig().interval
KINDS = {
    "without": ["stability.enabled=false"],
    "default": [f"stability.interval={INTERVAL}"],
    "every step": ["stability.interval=1"],
}


def run_once(args: argparse.Namespace, gpus: int, kind: str, repeat: int) -> list[float]:
    """Seconds of a step, one value a log line, of the lines after the warm-up."""
    tag = f"{kind.replace(' ', '_')}_{gpus}_{repeat}"
    run_dir = Path(args.work) / tag
    shutil.rmtree(run_dir, ignore_errors=True)
    keys = [
        f"run_dir={run_dir}",
        f"training.device={args.device}",
        f"training.train_steps={args.steps}",
        "training.eval_interval=null",
        "training.eval_steps=1",
        "training.exit_at_step=null",
        "checkpoint.interval=null",
        f"logging.interval={INTERVAL}",
        "logging.progress=off",
        *args.set,
        *KINDS[kind],
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(gpus), "-m", "megatron_patch", "train"]
    command += ["--config", args.config]
    command += [part for key in keys for part in ("--set", key)]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    environment = os.environ | (visible if args.device == "cuda" else {})
    log = Path(args.work) / f"{tag}.log"
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=out, env=environment).returncode
    if code:
        raise RuntimeError(f"{tag} ended with {code}:\n{log.read_text()[-2000:]}")
    with (run_dir / "metrics.csv").open() as lines:
        rows = [r for r in csv.DictReader(lines) if int(r["step"]) > args.warmup]
    return [float(r["step_seconds"]) for r in rows]


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of a run's log lines, one value a run -> costs as shares of a step."""
    base = statistics.median(times["without"])
    pairs = [b / a - 1 for a, b in zip(times["without"], times["default"], strict=True)]
    each = statistics.median(times["every step"]) - base
    return {
        "step_seconds": base,
        "observation_seconds": each,
        "share_every_step": each / base,
        f"share_every_{INTERVAL}_steps": each / base / INTERVAL,
        "paired_difference": statistics.median(pairs),
        "paired_differences": pairs,
        "noise": max(times["without"]) / min(times["without"]) - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/gpt2_124m.yaml")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1], help="processes of a run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=50, help="steps left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="more keys for the trainer")
    parser.add_argument("--work", default="runs/telemetry_overhead", help="scratch folder")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    if args.steps < args.warmup + INTERVAL:
        parser.error(f"--steps must be at least --warmup + {INTERVAL}: one log line is measured")
    Path(args.work).mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for gpus in args.gpus:
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for repeat in range(args.repeats):
            for kind in KINDS:
                times[kind].append(statistics.median(run_once(args, gpus, kind, repeat)))
                print(f"{gpus} process(es), {kind}: {times[kind][-1]:.5f} s a step", flush=True)
        found[str(gpus)] = {"times": times, **summary(times)}
    name = "telemetry_overhead" + ("_cpu_smoke" if args.device == "cpu" else "")
    figures = {
        "config": args.config,
        "keys": args.set,
        "interval": INTERVAL,
        "steps": args.steps,
        "by_processes": found,
    }
    print(f"wrote {machine.write_result(name, figures, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
