"""What the telemetry costs: stretches of one run with and without it, or runs as they were made.

    python benchmarks/telemetry_cost.py --gpus 1 2 \
        --set data.blend.0.path=data/books --set data.tokenizer.path=data/tokenizer.json
    python benchmarks/telemetry_cost.py --runs RUN ...

Writes parts of docs/assets/telemetry_cost.json. ``pairs``: two processes differ by more than the
telemetry costs (memory layout, clocks, neighbors), and so do stretches of some seconds of one
process. So one process compares with itself, in short stretches: after a warm-up, rounds of ten
steps each

    without, watched, idle, idle, watched, without

*without* is `stability.enabled: false`; *watched* makes one observation and reads its record;
*idle* is a stretch between two observations. The three kinds have the same middle, so a drift that
is even over a round cancels. Stretches begin and end with the device idle. Of every round:

    (watched - without) + what the other 40 of 50 steps cost (idle - without)

over a step, which is the cost of the default interval; means over the rounds with their standard
error. What the telemetry does between observations may be below what pairs can see: the time its
calls take on the host there is measured beside it. 24 rounds are 1,515 steps.

``runs``: from the step times of run directories whose every step is logged. An observed step, a
multiple of ``stability.interval``, and the one after it, which reads the record, are compared with
the median step around them; the same is done between observations, where nothing should be found.
Medians over an attempt: checkpoints and captures fall out; the share is also given by means. No
GPU, no torch. Without `--fresh`, attempts of the stored result stay, with the commit they were read
at.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

from megatron_patch.schema.stability import StabilityConfig
from megatron_patch.stability import record

INTERVAL = StabilityConfig().interval
SHORT = 10  # steps of a stretch
WITHOUT, WATCHED, IDLE = "without", "watched", "idle"
CALLS = "calls"  # of the telemetry, in a step that is not observed
ROUND = (WITHOUT, WATCHED, IDLE, IDLE, WATCHED, WITHOUT)
ENABLED = {WATCHED: SHORT, IDLE: sys.maxsize}
"""The interval of a stretch's observations; sys.maxsize: none."""
WARM_UP = 75
"""Steps before the first stretch: observed steps are multiples of SHORT, so they come to lie in the
middle of the stretches that follow."""
TOGETHER = 2
"""Steps of the warm-up that are observed, so that nothing is compiled or allocated later."""


def plan(rounds: int) -> list[tuple[str, int, int]]:
    """(kind, first step, last step) of every stretch, 1-based."""
    first = WARM_UP + 1
    return [
        (kind, first + i * SHORT, first + (i + 1) * SHORT - 1)
        for i, kind in enumerate(ROUND * rounds)
    ]


def idle_clock(device: str) -> float:
    """The clock once the device has nothing left to do."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def watched_by(
    base: type[Any],
    rounds: int,
    times: dict[str, list[float]],
    *,
    device: str,
    until: float = math.inf,
) -> type[Any]:
    """`Stability` that is switched on and off along the plan, and keeps time.

    The run is asked to stop after the first round that ends later than ``until`` (monotonic clock).
    ``times`` gets the seconds of every stretch ("stretches") and of the telemetry's calls in every
    idle step ("calls").
    """
    stretches = plan(rounds)
    starts = {first: kind for kind, first, _ in stretches}
    ends = {last for _, _, last in stretches}

    class Alternating(base):  # type: ignore[misc]
        kind = WITHOUT
        began = calls = 0.0

        def set_kind(self, kind: str, interval: int) -> None:
            self.kind = kind
            self.options = dataclasses.replace(
                self.options, enabled=kind != WITHOUT, interval=interval
            )

        def begin(self, step: int) -> None:
            if step == 1:
                self.set_kind(WATCHED, 1)
            elif step == TOGETHER + 1:
                self.set_kind(WITHOUT, INTERVAL)
            if step in starts:
                self.set_kind(starts[step], ENABLED.get(starts[step], INTERVAL))
                self.began = idle_clock(device)
            start = time.perf_counter()
            super().begin(step)
            self.calls = time.perf_counter() - start

        def reduced(self) -> None:
            start = time.perf_counter()
            super().reduced()
            self.calls += time.perf_counter() - start

        def finish(self, step: int, result: Any) -> None:
            start = time.perf_counter()
            super().finish(step, result)
            if self.kind == IDLE:
                times[CALLS].append(self.calls + time.perf_counter() - start)
            if step == TOGETHER:
                self.flush(step)  # no record is left for a stretch that is to read none
            if step in ends:
                times["stretches"].append(idle_clock(device) - self.began)
                whole = len(times["stretches"]) % len(ROUND) == 0
                if whole and time.monotonic() > until and os.environ.get("RANK", "0") == "0":
                    os.kill(os.getpid(), signal.SIGTERM)  # the trainer stops all ranks in order

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

    times: dict[str, list[float]] = {"stretches": [], CALLS: []}
    telemetry.Stability = watched_by(  # type: ignore[misc]
        telemetry.Stability,
        args.rounds,
        times,
        device=loaded.config.training.device,
        until=math.inf if args.seconds is None else time.monotonic() + args.seconds,
    )
    code = loop.train(loaded)
    if os.environ.get("RANK", "0") == "0":
        Path(args.worker).write_text(json.dumps(times))
    return code


def measure(args: argparse.Namespace, gpus: int) -> dict[str, list[float]]:
    """Seconds of a step in every stretch, by kind, in the order of the run; of calls."""
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
    command = [__file__, "--worker", str(out), "--config", args.config]
    command += ["--rounds", str(args.rounds)]
    command += [] if args.seconds is None else ["--seconds", str(args.seconds)]
    command += [part for key in keys for part in ("--set", key)]
    devices = list(range(gpus)) if args.device == "cuda" else None
    code = machine.torchrun(command, processes=gpus, log=log, devices=devices)
    if code or not out.exists():
        raise RuntimeError(f"{gpus} process(es) ended with {code}:\n{machine.why(log.read_text())}")
    told = json.loads(out.read_text())
    made = len(told["stretches"]) // len(ROUND)  # fewer than asked for, if time was over
    times: dict[str, list[float]] = {WITHOUT: [], WATCHED: [], IDLE: []}
    times[CALLS] = told[CALLS]
    if not made:
        raise RuntimeError(f"{gpus} process(es): --seconds {args.seconds} is over before a round")
    for (kind, _, _), seconds in zip(plan(made), told["stretches"], strict=False):
        times[kind].append(seconds / SHORT)
    shutil.rmtree(run_dir, ignore_errors=True)
    return times


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of independent values, and its standard error if there are several."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.mean(values), error


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of a step by stretch -> costs, of an observation and as shares of a step.

    An observation is what a watched stretch takes beyond an idle one; the total of 50 steps has
    both beyond those without. A round, whose stretches have the same middle, is one measurement of
    every difference.
    """
    base = statistics.median(times[WITHOUT])
    by_round = {
        kind: [statistics.mean(two) for two in zip(*[iter(times[kind])] * 2, strict=True)]
        for kind in (WITHOUT, WATCHED, IDLE)
    }
    rounds = list(zip(*by_round.values(), strict=True))
    observation, observation_error = mean_and_error([SHORT * (b - c) for _, b, c in rounds])
    idle, idle_error = mean_and_error([c / a - 1 for a, _, c in rounds])
    rest = INTERVAL - SHORT
    totals = [(SHORT * (b / a - 1) + rest * (c / a - 1)) / INTERVAL for a, b, c in rounds]
    total, error = mean_and_error(totals)
    return {
        "step_seconds": base,
        "observation_seconds": observation,
        "observation_standard_error": observation_error,
        "share_every_step": observation / base,
        f"share_every_{INTERVAL}_steps": observation / base / INTERVAL,
        "idle_difference": idle,
        "idle_standard_error": idle_error,
        "idle_call_seconds": statistics.mean(times[CALLS]),
        "paired_difference": total,
        "paired_standard_error": error,
        "noise": max(times[WITHOUT]) / min(times[WITHOUT]) - 1,
    }


# Runs as they were made

SETTLED = 100
"""Steps of an attempt that are left out: compilation, first allocations, clocks."""
AROUND = range(4, 20)
"""Distances of the steps that an observation is compared with."""
BETWEEN = 10
"""Distance of the steps where nothing is observed."""
FEWEST = 10  # observations
SHORTEST = AROUND.stop + 1
"""Interval from which the steps around an observation hold no other."""


def attempts(run: Path) -> list[dict[int, float]]:
    """Seconds by step of every attempt; its clock starts anew with it."""
    found: list[dict[int, float]] = []
    last = math.inf
    with (run / "metrics.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            elapsed = float(row["elapsed_seconds"])
            if elapsed < last:
                found.append({})
            found[-1][int(row["step"])] = float(row["step_seconds"])
            last = elapsed
    return found


def cost(seconds: dict[int, float], interval: int) -> dict[str, Any] | None:
    """Figures of one attempt; None if it has too few observations."""
    if not seconds:
        return None
    first, last = min(seconds) + SETTLED, max(seconds)
    observed, control, steps = [], [], []
    for step in range(first + interval - first % interval, last - AROUND.stop, interval):
        near = [seconds.get(step + sign * far) for far in AROUND for sign in (-1, 1)]
        usual = statistics.median(x for x in near if x is not None)
        observed.append(_extra(seconds, step, usual))
        control.append(_extra(seconds, step + BETWEEN, usual))
        steps.append(usual)
    if len(observed) < FEWEST:
        return None
    step_seconds = statistics.median(steps)
    extra, nothing = statistics.median(observed), statistics.median(control)
    low, _, high = statistics.quantiles(observed, n=4)
    return {
        "observations": len(observed),
        "from_step": min(seconds),
        "to_step": last,
        "step_seconds": step_seconds,
        "observation_seconds": extra,
        "quartiles": [low, high],
        "between_seconds": nothing,
        "share": (extra - nothing) / interval / step_seconds,
        "share_of_means": statistics.mean(x - y for x, y in zip(observed, control, strict=True))
        / interval
        / step_seconds,
    }


def _extra(seconds: dict[int, float], step: int, usual: float) -> float:
    return sum(seconds.get(s, usual) - usual for s in (step, step + 1))


def from_runs(runs: list[Path], *, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``known`` rows and those of every attempt that says enough; SystemExit for no run."""
    rows = list(known)
    for run in runs:
        try:
            interval = record.read(run).meta["interval"]
            there = json.loads((run / "environment.json").read_text())["attempts"]
            found = attempts(run)
        except (OSError, ValueError, KeyError) as error:
            told = f"{run} is no run directory with telemetry and metrics: {error}"
            raise SystemExit(told) from None
        if interval < SHORTEST:
            raise SystemExit(f"{run}: observed every {interval} steps; {SHORTEST} or more needed")
        if len(there) != len(found):
            raise SystemExit(f"{run}: {len(there)} attempts made, {len(found)} in its log")
        for attempt, seconds in zip(there, found, strict=True):
            figures = cost(seconds, interval)
            if figures is not None:
                facts = ("world_size", "gpu", "commit", "torch")
                made = {name: attempt.get(name) for name in facts}
                rows.append({"run": run.name, "interval": interval} | made | figures)
    if len(rows) == len(known):
        raise SystemExit(f"no attempt has {FEWEST} observations after its first {SETTLED} steps")
    return rows


def stored(folder: Path) -> list[dict[str, Any]]:
    """Attempts of the stored result; each names the commit it was read at."""
    path = folder / "telemetry_cost.json"
    old = (json.loads(path.read_text()) if path.exists() else {}).get("runs", {"attempts": []})
    return [{"read_at": old["commit"]} | row for row in old["attempts"]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/gpt2_124m.yaml")
    parser.add_argument("--runs", nargs="+", type=Path, metavar="RUN", help="judge these instead")
    parser.add_argument("--fresh", action="store_true", help="--runs: forget the stored attempts")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1], help="processes of a run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of 60 steps")
    parser.add_argument("--seconds", type=float, help="no further round after so many seconds")
    parser.add_argument("--set", action="append", default=[], help="more keys for the trainer")
    parser.add_argument("--work", default="runs/telemetry_cost", help="scratch folder")
    parser.add_argument("--out", type=Path, default=machine.RESULTS, help="folder of the result")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    if args.seconds is not None and not args.seconds > 0:
        parser.error(f"--seconds {args.seconds:g}: more than 0")
    if args.worker:
        return worker(args)
    if args.runs:
        rows = from_runs(args.runs, known=[] if args.fresh else stored(args.out))
        print(machine.write_result("telemetry_cost", {"attempts": rows}, args.out, part="runs"))
        return 0
    Path(args.work).mkdir(parents=True, exist_ok=True)
    for gpus in args.gpus:
        times = measure(args, gpus)
        kept = {name: values for name, values in times.items() if name != CALLS}
        told = summary(times)
        print(f"{gpus} process(es): {json.dumps(told)}", flush=True)
        figures = {
            "config": args.config,
            # Where data lies is no part of what is measured, and paths are nobody's business.
            "keys": [key for key in args.set if not key.startswith("data.")],
            "interval": INTERVAL,
            "rounds": len(times[IDLE]) // 2,
            "by_processes": {str(gpus): {"times": kept, **told}},
        }
        what = "CPU rank" if args.device == "cpu" else "GPU"
        part = f"pairs, {gpus} {what}{'s' * (gpus > 1)}"
        print(machine.write_result("telemetry_cost", figures, args.out, part=part), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
