"""What the telemetry costs: stretches of one run with and without it, in turn.

    python benchmarks/telemetry_overhead.py --gpus 1 2 \
        --set data.blend.0.path=data/books --set data.tokenizer.path=data/tokenizer.json

Two processes differ by more than the telemetry costs (memory layout, clocks, neighbors), and so do
stretches of some seconds of one process. So one process compares with itself, in short stretches:
after a warm-up, rounds of ten steps each

    without, watched, idle, idle, watched, without

*without* is `stability.enabled: false`; *watched* makes one observation and reads its record;
*idle* is a stretch between two observations. The three kinds have the same middle, so a drift that
is even over a round cancels. Stretches begin and end with the device idle. Of every round:

    (watched - without) + what the other 40 of 50 steps cost (idle - without)

over a step, which is the cost of the default interval; means over the rounds with their standard
error, and the median with its interval of 95 % by the order of the rounds (the binomial), which
single slow stretches do not move. The same is told from single steps, for hosts on which some are
slow: medians of the steps of a round, and an observation as what its step and the next take beyond
the others of their stretch (first and last steps of stretches, which wait, are left out). What the
telemetry does between observations may be far below what pairs can see: the time its calls take on
the host there is measured beside it. GPT-2 124M at 65,536 tokens a step: 24 rounds are 1,515 steps,
about 4 minutes on one H200 (estimated from its speed); larger batches make the shares smaller.
Writes docs/results/telemetry_overhead.json (with ``--device cpu``: a smoke test, the file name says
so).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

from megatron_patch.runtime.devices import visible_devices
from megatron_patch.schema.stability import StabilityConfig

INTERVAL = StabilityConfig().interval
SHORT = 10  # steps of a stretch
WITHOUT, WATCHED, IDLE = "without", "watched", "idle"
CALLS = "calls"  # of the telemetry, in a step that is not observed
BEGINS = "begins"  # of every step
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
    ``times`` gets the seconds of every stretch ("stretches"), of the telemetry's calls in every
    idle step ("calls"), and the clock at the begin of every step ("begins").
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
            if step > WARM_UP:
                times[BEGINS].append(start)
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
        from megatron_patch.core_patches import cpu_mode

        cpu_mode.install()  # must precede Megatron's import, which the next line does
    from megatron_patch.stability import telemetry

    times: dict[str, list[float]] = {"stretches": [], CALLS: [], BEGINS: []}
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
    """Seconds of a step in every stretch, by kind, in the order of the run; of calls; begins."""
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
    command += [] if args.seconds is None else ["--seconds", str(args.seconds)]
    command += [part for key in keys for part in ("--set", key)]
    visible = {"CUDA_VISIBLE_DEVICES": visible_devices(list(range(gpus)))}
    environment = os.environ | (visible if args.device == "cuda" else {})
    with log.open("w") as stream:
        code = subprocess.run(command, stdout=stream, stderr=stream, env=environment).returncode
    if code or not out.exists():
        raise RuntimeError(f"{gpus} process(es) ended with {code}:\n{machine.why(log.read_text())}")
    told = json.loads(out.read_text())
    made = len(told["stretches"]) // len(ROUND)  # fewer than asked for, if time was over
    times: dict[str, list[float]] = {WITHOUT: [], WATCHED: [], IDLE: []}
    times |= {CALLS: told[CALLS], BEGINS: told[BEGINS]}
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


def median_and_interval(values: Sequence[float]) -> tuple[float, list[float] | None]:
    """Median of independent values and what holds it with 95 %; None for fewer than six."""
    n, ordered = len(values), sorted(values)
    tail, k = 0.5**n, 0  # chance that at most k values lie below the median
    while tail <= 0.025:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return statistics.median(ordered), [ordered[k - 1], ordered[n - k]] if k else None


def by_steps(begins: Sequence[float], rounds: int) -> dict[str, Any]:
    """Clock at the begin of every step -> the figures of `summary` from medians of single steps."""
    took = [b - a for a, b in itertools.pairwise(begins)]
    inner = range(1, SHORT - 1)
    at = SHORT - plan(1)[1][1] % SHORT  # the observed step of a stretch
    idle, observations, totals = [], [], []
    for first in range(0, rounds * len(ROUND) * SHORT, len(ROUND) * SHORT):
        steps: dict[str, list[float]] = {WITHOUT: [], WATCHED: [], IDLE: []}
        for i, kind in enumerate(ROUND):
            own = took[first + i * SHORT :][:SHORT]
            if kind != WATCHED:
                steps[kind] += [own[k] for k in inner]
                continue
            beside = statistics.median(own[k] for k in inner if k not in (at, at + 1))
            steps[kind].append(own[at] + own[at + 1] - 2 * beside)
        base = statistics.median(steps[WITHOUT])
        observations.append(statistics.mean(steps[WATCHED]))
        idle.append(statistics.median(steps[IDLE]) / base - 1)
        totals.append(observations[-1] / base / INTERVAL + idle[-1])
    found: dict[str, Any] = {}
    for name, values in (("observation", observations), ("idle", idle), ("total", totals)):
        found[name], found[f"{name}_interval"] = median_and_interval(values)
    return found


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
    median, interval = median_and_interval(totals)
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
        "paired_median": median,
        "paired_median_interval": interval,
        "by_steps": by_steps(times[BEGINS], len(rounds)),
        "noise": max(times[WITHOUT]) / min(times[WITHOUT]) - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/stability/base/gpt2_124m.yaml")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1], help="processes of a run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of 60 steps")
    parser.add_argument("--seconds", type=float, help="no further round after so many seconds")
    parser.add_argument("--set", action="append", default=[], help="more keys for the trainer")
    parser.add_argument("--work", default="runs/telemetry_overhead", help="scratch folder")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    if args.seconds is not None and not args.seconds > 0:
        parser.error(f"--seconds {args.seconds:g}: more than 0")
    if args.worker:
        return worker(args)
    Path(args.work).mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for gpus in args.gpus:
        times = measure(args, gpus)
        kept = {name: values for name, values in times.items() if name != CALLS}
        told = summary(times)
        found[str(gpus)] = {"times": kept, **told}
        print(f"{gpus} process(es): {json.dumps(told)}", flush=True)
        figures = {
            "config": args.config,
            # Where data lies is no part of what is measured, and paths are nobody's business.
            "keys": [key for key in args.set if not key.startswith("data.")],
            "interval": INTERVAL,
            "rounds": {name: len(one["times"][IDLE]) // 2 for name, one in found.items()},
            "by_processes": found,
        }
        name = "telemetry_overhead" + ("_cpu_smoke" if args.device == "cpu" else "")
        # After every count of processes: what was measured is kept if the next one fails.
        print(f"wrote {machine.write_result(name, figures, args.out)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
