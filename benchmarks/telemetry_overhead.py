"""What the telemetry costs: stretches of one run with and without it, in turn.

    python benchmarks/telemetry_overhead.py --gpus 1 2 \
        --set data.blend.0.path=data/books --set data.tokenizer.path=data/tokenizer.json

Two processes differ by more than the telemetry costs (memory layout, clocks, neighbors), so one
process compares with itself: after a warm-up, rounds of

    without, default, default, without (50 steps each), every step, without (25 steps each)

A drift of the machine that is even over a round cancels in its pairs. Stretches begin and end with
the device idle; exactly one observation, and the reading of its record, lies in the middle of a
stretch ``default``. Two figures answer the question: the paired difference (default - without) with
its standard error, and, far above the noise, the cost of one observation from the stretches ``every
step`` divided by the default interval. GPT-2 124M at 65,536 tokens a step: 1,075 steps, about 4
minutes on one H200 (estimated from its speed); larger batches make the shares smaller. Writes
docs/results/telemetry_overhead.json (with ``--device cpu``: a smoke test, the file name says so).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

from megatron_patch.runtime.devices import visible_devices
from megatron_patch.stability.config import StabilityConfig

INTERVAL = StabilityConfig().interval
WITHOUT, DEFAULT, EACH = "without", "default", "every step"
ROUND = [(kind, INTERVAL) for kind in (WITHOUT, DEFAULT, DEFAULT, WITHOUT)]
ROUND += [(EACH, INTERVAL // 2), (WITHOUT, INTERVAL // 2)]
WARM_UP = 3 * INTERVAL // 2
"""Steps before the first stretch: observed steps are multiples of INTERVAL, so they come to lie in
the middle of the stretches that follow."""
TOGETHER = 2
"""Steps of the warm-up that are observed, so that nothing is compiled or allocated later."""


def plan(rounds: int) -> list[tuple[str, int, int]]:
    """(kind, first step, last step) of every stretch, 1-based."""
    found, step = [], WARM_UP
    for kind, length in ROUND * rounds:
        found.append((kind, step + 1, step + length))
        step += length
    return found


def watched_by(base: type[Any], rounds: int, seconds: list[float], device: str) -> type[Any]:
    """`Stability` that is switched on and off along the plan, and keeps time."""
    import torch

    stretches = plan(rounds)
    starts = {first: kind for kind, first, _ in stretches}
    ends = {last for _, _, last in stretches}

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    class Alternating(base):  # type: ignore[misc]
        began = 0.0

        def set_kind(self, kind: str) -> None:
            self.options = dataclasses.replace(
                self.options, enabled=kind != WITHOUT, interval=1 if kind == EACH else INTERVAL
            )

        def begin(self, step: int) -> None:
            if step == 1:
                self.set_kind(EACH)
            elif step == TOGETHER + 1:
                self.set_kind(WITHOUT)
            if step in starts:
                self.set_kind(starts[step])
                self.began = now()
            super().begin(step)

        def finish(self, step: int, result: Any) -> None:
            super().finish(step, result)
            if step == TOGETHER or (step in ends and self.options.interval == 1):
                self.flush(step)  # what the last step of a stretch sent is read in that stretch
            if step in ends:
                seconds.append(now() - self.began)

    return Alternating


def worker(args: argparse.Namespace) -> int:
    """One rank: the trainer, with the telemetry switched on and off."""
    from megatron_patch.config import load

    loaded = load(args.config, args.set)
    from megatron_patch.training import loop

    if loaded.config.training.device == "cpu":
        from megatron_patch.runtime import cpu_mode

        cpu_mode.install()  # must precede Megatron's import, which the next line does
    from megatron_patch.stability import telemetry

    seconds: list[float] = []
    telemetry.Stability = watched_by(  # type: ignore[misc]
        telemetry.Stability, args.rounds, seconds, loaded.config.training.device
    )
    code = loop.train(loaded)
    if os.environ.get("RANK", "0") == "0":
        Path(args.worker).write_text(json.dumps(seconds))
    return code


def measure(args: argparse.Namespace, gpus: int) -> dict[str, list[float]]:
    """Seconds of a step in every stretch, by kind, in the order of the run."""
    run_dir = Path(args.work) / f"processes_{gpus}"
    shutil.rmtree(run_dir, ignore_errors=True)
    out, log = Path(args.work) / f"processes_{gpus}.json", Path(args.work) / f"processes_{gpus}.log"
    out.unlink(missing_ok=True)
    steps = plan(args.rounds)[-1][2]
    keys = [
        f"run_dir={run_dir}",
        f"training.device={args.device}",
        f"training.train_steps={steps + 1}",
        f"training.exit_at_step={steps}",
        f"optimizer.warmup_steps={steps // 2}",  # must end before the run does
        "training.eval_interval=null",
        "checkpoint.interval=null",
        f"logging.interval={INTERVAL}",
        "logging.progress=off",
        f"stability.interval={INTERVAL}",
        "stability.guard=off",
        "stability.capture_at=[]",
        "stability.capture_at_grad_norm=null",
        *args.set,
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(gpus), __file__, "--worker", str(out)]
    command += ["--config", args.config, "--rounds", str(args.rounds)]
    command += [part for key in keys for part in ("--set", key)]
    visible = {"CUDA_VISIBLE_DEVICES": visible_devices(list(range(gpus)))}
    environment = os.environ | (visible if args.device == "cuda" else {})
    with log.open("w") as stream:
        code = subprocess.run(command, stdout=stream, stderr=stream, env=environment).returncode
    if code or not out.exists():
        raise RuntimeError(f"{gpus} process(es) ended with {code}:\n{log.read_text()[-2000:]}")
    times: dict[str, list[float]] = {WITHOUT: [], DEFAULT: [], EACH: [], "beside": []}
    for (kind, first, last), seconds in zip(
        plan(args.rounds), json.loads(out.read_text()), strict=True
    ):
        length = last - first + 1
        name = "beside" if kind == WITHOUT and length < INTERVAL else kind
        times[name].append(seconds / length)
    shutil.rmtree(run_dir, ignore_errors=True)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of a step by stretch -> costs as shares of a step.

    The two pairs of a round are (without, default) and (default, without): neighbors.
    """
    base = statistics.median(times[WITHOUT])
    pairs = [b / a - 1 for a, b in zip(times[WITHOUT], times[DEFAULT], strict=True)]
    each = [c - a for c, a in zip(times[EACH], times["beside"], strict=True)]
    # A round's two pairs share its drift, with opposite signs: the round is one observation.
    rounds = [statistics.mean(two) for two in zip(pairs[::2], pairs[1::2], strict=True)]
    error = statistics.stdev(rounds) / len(rounds) ** 0.5 if len(rounds) > 1 else None
    cost = statistics.median(each)
    return {
        "step_seconds": base,
        "observation_seconds": cost,
        "share_every_step": cost / base,
        f"share_every_{INTERVAL}_steps": cost / base / INTERVAL,
        "paired_difference": statistics.mean(rounds),
        "paired_standard_error": error,
        "paired_differences": pairs,
        "noise": max(times[WITHOUT]) / min(times[WITHOUT]) - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/stability/base/gpt2_124m.yaml")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1], help="processes of a run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of 250 steps")
    parser.add_argument("--set", action="append", default=[], help="more keys for the trainer")
    parser.add_argument("--work", default="runs/telemetry_overhead", help="scratch folder")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    if args.worker:
        return worker(args)
    Path(args.work).mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for gpus in args.gpus:
        times = measure(args, gpus)
        found[str(gpus)] = {"times": times, **summary(times)}
        print(f"{gpus} process(es): {json.dumps(summary(times))}", flush=True)
        figures = {
            "config": args.config,
            # Where data lies is no part of what is measured, and paths are nobody's business.
            "keys": [key for key in args.set if not key.startswith("data.")],
            "interval": INTERVAL,
            "rounds": args.rounds,
            "by_processes": found,
        }
        name = "telemetry_overhead" + ("_cpu_smoke" if args.device == "cpu" else "")
        # After every count of processes: what was measured is kept if the next one fails.
        print(f"wrote {machine.write_result(name, figures, args.out)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
