"""Does the backend change training? The first steps of GPT-2 124M, backend beside backend.

    python benchmarks/first_steps.py --dataset data/books --tokenizer tokenizer.json --gpus 4

Every backend trains the same model from the same seed on the same batches, on its own GPUs, side by
side. ``sdpa_cudnn`` runs twice: its backward is not repeatable, so the distance between its two
runs is the run-to-run noise that a difference between backends is judged by. Writes
``first_steps.json`` (losses of every step and the distances) and a plot beside it.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import machine

from megatron_patch.runtime.devices import visible_devices

RUNS = (
    ("sdpa_cudnn", "sdpa_cudnn"),
    ("sdpa_cudnn again", "sdpa_cudnn"),
    ("stable_flash", "stable_flash"),
    ("sdpa_flash", "sdpa_flash"),
)


def train(args: argparse.Namespace, label: str, backend: str, devices: list[int]) -> list[float]:
    """Loss of every step."""
    slug = f"{label.replace(' ', '_')}_{len(devices)}"
    run_dir = Path(args.work) / slug
    shutil.rmtree(run_dir, ignore_errors=True)
    keys = {
        "run_dir": run_dir,
        "attention.backend": backend,
        "training.train_steps": args.steps,
        "training.global_batch_size": args.global_batch,
        "training.micro_batch_size": args.micro_batch,
        "optimizer.warmup_steps": args.steps // 2,
        "optimizer.schedule": "constant",
        "checkpoint.interval": "null",
        "logging.interval": 1,
        "training.eval_steps": 1,
        "data.blend": f"[{{path: {args.dataset}}}]",
        "data.tokenizer.path": args.tokenizer,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(len(devices)), "-m", "megatron_patch", "train"]
    command += ["--config", args.config]
    for key, value in keys.items():
        command += ["--set", f"{key}={value}"]
    visible = visible_devices(devices)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "2"}
    log = Path(args.work) / f"{slug}.log"
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=out, env=environment).returncode
    if code:
        raise RuntimeError(f"{label} ended with exit code {code}:\n{machine.why(log.read_text())}")
    with (run_dir / "metrics.csv").open() as lines:
        return [float(row["loss"]) for row in csv.DictReader(lines)]


def distance(a: list[float], b: list[float]) -> dict[str, float]:
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    tail = len(gaps) // 4
    signed = sum(x - y for x, y in zip(a[-tail:], b[-tail:], strict=True)) / tail
    return {"max": max(gaps), "mean": sum(gaps) / len(gaps), "last_quarter_signed": signed}


def draw(curves: dict[str, list[float]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for label, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=label, linewidth=0.9)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, help="prepared dataset prefix")
    parser.add_argument("--tokenizer", required=True, help="its tokenizer.json")
    parser.add_argument("--config", default="configs/gpt2_124m.yaml", help="configuration")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs of this machine to use")
    parser.add_argument("--per-run", type=int, nargs="+", default=[1, 2], help="GPUs of one run")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--global-batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences a forward pass")
    parser.add_argument("--work", default="runs/first_steps", help="scratch folder")
    parser.add_argument("--out", default=None, help="folder of the result; default docs/results")
    args = parser.parse_args()
    Path(args.work).mkdir(parents=True, exist_ok=True)
    out = Path(args.out) if args.out else machine.RESULTS
    results: dict[str, object] = {"steps": args.steps, "global_batch": args.global_batch}
    for per_run in args.per_run:
        slots = max(1, args.gpus // per_run)
        free = [[s * per_run + i for i in range(per_run)] for s in range(slots)]

        def one(run: tuple[str, str], free: list[list[int]] = free) -> list[float]:
            devices = free.pop()
            try:
                return train(args, *run, devices)
            finally:
                free.append(devices)

        with ThreadPoolExecutor(slots) as pool:
            losses = list(pool.map(one, RUNS))
        curves = {label: values for (label, _), values in zip(RUNS, losses, strict=True)}
        base = curves["sdpa_cudnn"]
        gaps = {label: distance(values, base) for label, values in curves.items() if values != base}
        results[f"{per_run}_gpu"] = {"losses": curves, "distance_to_sdpa_cudnn": gaps}
        print(per_run, "GPU:", gaps, flush=True)
        draw(curves, out / f"first_steps_{per_run}gpu.png")
    machine.write_result("first_steps", results, out)


if __name__ == "__main__":
    main()
