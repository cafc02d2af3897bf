"""Run a protocol: one training a cell and seed, one after another or one GPU (or several) each.

    python research/run.py research/protocols/smoke.yaml
    python research/run.py research/protocols/baselines.yaml --minutes 25

The same command again goes on: ended runs are skipped, stopped ones continue from their checkpoint,
failed ones are tried again. Every run is an ordinary run directory that resumes itself; this script
starts processes, reads their metrics.csv, and asks them to save and stop: when the time is over,
and an exploded run some steps after it has exploded. Every run is in the tables of <out>/results,
whatever it shows. Exit code 0: no run failed (exploding is not failing); 1: one did; 2: the
protocol, a configuration or its data are refused, and nothing was started.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import processes
import results
from directory import (
    EXPLODED,
    FAILED,
    FINISHED,
    GUARDED,
    NONFINITE,
    PAUSED,
    REFUSED,
    WAITING,
    Directory,
    utc,
)
from protocol import ExperimentError, Run, check_data, describe, read
from variants import VARIANTS

from megatron_patch.cli import app
from megatron_patch.cli.common import add_overrides, report_error
from megatron_patch.monitor.metrics import duration
from megatron_patch.runtime.environment import TORCHRUN_VARIABLES, visible_devices
from megatron_patch.runtime.files import write_whole

CELL = Path(__file__).resolve().with_name("cell.py")
POLL_SECONDS, LOOK_SECONDS, REPORT_SECONDS = 0.5, 5.0, 20.0
SHORTEST_SECONDS = 30.0
"""A run is not started with less training time than this left."""
GRACE_SECONDS = 60.0
"""After a request to stop, before the process is killed; at least ``save_seconds``."""
STATE_OF_EXIT = {2: REFUSED, 3: NONFINITE, 5: GUARDED}


@dataclass(slots=True)
class Active:
    """A run that has a process."""

    run: Run
    process: subprocess.Popen[bytes]
    gpus: list[int]
    began: float
    first: int
    """Step this process began at."""
    log_begins: int
    """Where its words begin in the run's log: those before are of earlier attempts."""
    step: int
    looked: float = 0.0
    asked: float | None = None
    """When it was asked to save and stop."""
    exploded: str = ""


@dataclass(slots=True)
class Runner:
    """One invocation.

    Args:
        directory: of the experiment.
        gpus: numbers of the GPUs; on the CPU, of runs side by side.
        minutes: time budget, saving included; None: none.
        steps: where runs end in this invocation.
        queue: runs to start, in order.
        say: where progress lines go.
    """

    directory: Directory
    gpus: list[int]
    minutes: float | None
    steps: int
    queue: list[Run]
    say: Callable[[str], None]
    active: list[Active] = field(default_factory=list)
    stopping: bool = False
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Start, watch and end runs until none can be started any more."""
        handlers = {n: signal.signal(n, self._stop) for n in (signal.SIGTERM, signal.SIGINT)}
        reported, told = time.monotonic(), False
        try:
            while self.queue or self.active:
                if self.queue and self._time_left() < SHORTEST_SECONDS:
                    self.say(f"out of time: {len(self.queue)} run(s) are left for the next call")
                    self.queue.clear()
                if self.stopping and not told:
                    told = True
                    self.say("stopping: running cells save first; the same command continues")
                    self.queue.clear()
                self._fill()
                self.active = [job for job in self.active if not self._watch(job)]
                if time.monotonic() - reported > REPORT_SECONDS and self.active:
                    reported = time.monotonic()
                    self.say(self._progress())
                time.sleep(POLL_SECONDS)
        finally:
            for job in self.active:
                processes.kill_tree(job.process)
                job.process.wait()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.directory.save()

    def _stop(self, number: int, _: object) -> None:
        # A batch system sends its request again while runs save; a person presses again to leave.
        if self.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stopping = True  # told by the loop: in here it may interrupt a line being written

    def _time_left(self) -> float:
        """Seconds of training that a run started now would have."""
        if self.minutes is None:
            return float("inf")
        kept = self.directory.experiment.protocol.save_seconds
        return 60 * self.minutes - (time.monotonic() - self.began) - kept

    def _fill(self) -> None:
        """Start what can start, in the order of the protocol; drop what never can.

        A run that waits for its base, or for more GPUs than are free, lets later ones pass.
        """
        for run in list(self.queue):
            free = [n for n in self.gpus if not any(n in job.gpus for job in self.active)]
            if run.base is not None and self.directory.origin(run) is None:
                running = [*self.queue, *(job.run for job in self.active)]
                if all(other.id != run.base for other in running):
                    self.queue.remove(run)
                    reason = f"{run.base} has no event yet, or no checkpoint that far before it"
                    self.directory.states[run.id].reason = reason
                    self.say(f"{run.id} cannot start: {reason}")
            elif len(free) >= run.gpus:
                self.queue.remove(run)
                self._start(run, free[: run.gpus])

    def _start(self, run: Run, gpus: list[int]) -> None:
        there = self.directory
        origin = there.origin(run) if run.base is not None else None
        keys = [*there.experiment.keys(run, there.run_dir(run)), "logging.progress=off"]
        if origin is not None:
            known = {"base": origin.base, "event": origin.event, "step": origin.step}
            there.states[run.id].origin = known
            there.save()
            keys.append(f"checkpoint.load_from={origin.path}")
        if (end := there.end(run, limit=self.steps)) < there.experiment.protocol.steps:
            keys.append(f"training.exit_at_step={end}")
        start = [sys.executable]
        if run.gpus > 1:
            start += ["-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc-per-node", str(run.gpus)]
        command = [*start, str(CELL), "--config", str(there.experiment.config)]
        command += ["--variant", run.cell.variant]
        if there.experiment.protocol.rivals:
            command += ["--rivals", str(there.experiment.protocol.rivals)]
        command += [part for key in keys for part in ("--set", key)]
        environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN_VARIABLES}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if not run.cpu:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices(gpus)
        kept = there.reached(run)
        first = kept or (0 if origin is None else origin.step)
        log = there.log(run)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            begins = out.seek(0, os.SEEK_END)
            # Its own session: a stop reaches the whole group, and ours does not reach it. Tied to
            # us all the same: killed, we must not leave it training on GPUs that look free.
            process = subprocess.Popen(
                processes.tied(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        now = time.monotonic()
        self.active.append(Active(run, process, gpus, now, first, begins, step=first))
        where = f"from step {first:,}"
        if origin is not None and not kept:
            where += f" of {origin.base} (event at {origin.event:,})"
        self.say(f"start {run.id} on {'/'.join(map(str, gpus))}: {where}")

    def _watch(self, job: Active) -> bool:
        """Look after a process; True once it has ended and its end is recorded."""
        now, code = time.monotonic(), job.process.poll()
        if code is not None:
            self._look(job)
            self._record(job, code)
            return True
        if now - job.looked > LOOK_SECONDS:
            job.looked = now
            self._look(job)
        # A run that was stopped before its first step would never get on: it has until the end.
        left = self._time_left()
        late = left <= 0 and (job.step > job.first or left <= -self._save_seconds())
        if job.asked is None and (late or self.stopping or job.exploded or self._followed(job)):
            job.asked = now
            self._ask(job)
        grace = max(GRACE_SECONDS, self._save_seconds())
        if job.asked is not None and now - job.asked > grace:
            self.say(f"{job.run.id} did not stop in {grace:g} s and is killed")
            processes.kill_tree(job.process)
            job.asked = now  # should that not do, again after as long
        return False

    def _save_seconds(self) -> float:
        return self.directory.experiment.protocol.save_seconds

    def _ask(self, job: Active) -> None:
        """SIGUSR1 to the ranks; SIGTERM would make torchrun kill them in the middle of a save."""
        pid = job.process.pid
        for rank in processes.children(pid) if job.run.gpus > 1 else [pid]:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGUSR1)

    def _look(self, job: Active) -> None:
        """Read the run's figures; name its explosion."""
        there, rule = self.directory, self.directory.rule
        job.step = max(job.first, there.last_step(job.run))
        at = there.verdict(job.run).exploded_at
        if at is not None and rule.stop_after is not None and job.step >= at + rule.stop_after:
            job.exploded = f"loss above {rule.loss:g} from step {at:,}; stopped at {job.step:,}"
        facts = there.run_dir(job.run) / "experiment.json"  # `megatron-patch report` shows it
        if job.step > job.first and not facts.exists():
            cell = job.run.cell
            tree = {"cell": cell.name, "seed": job.run.seed, "variant": cell.variant}
            tree |= {"meaning": VARIANTS[cell.variant].meaning, "asks": cell.asks}
            write_whole(facts, json.dumps(tree, indent=1, sort_keys=True) + "\n")

    def _followed(self, job: Active) -> bool:
        """Whether a run that continues none has come far enough after its own event."""
        if job.run.cell.follow is None or job.run.base is not None:
            return False
        return job.step >= self.directory.end(job.run, limit=self.steps)

    def _record(self, job: Active, code: int) -> None:
        """Record how a process ended."""
        there, state = self.directory, self.directory.states[job.run.id]
        last = there.last_step(job.run)
        state.attempts.append(
            {
                "utc": utc(),
                "seconds": round(time.monotonic() - job.began, 1),
                "exit_code": code,
                "from_step": job.first,
                "to_step": last,
                "gpus": job.run.gpus,
            }
        )
        state.state, state.reason = self._verdict(job, code)
        there.save()
        reason = f": {state.reason}" if state.reason else ""
        self.say(f"{job.run.id} is {state.state} after step {last:,}{reason}")

    def _verdict(self, job: Active, code: int) -> tuple[str, str]:
        """(state, reason) of a process that ended."""
        there, run = self.directory, job.run
        if job.exploded:
            return EXPLODED, job.exploded
        stopped = code == 0 or job.asked is not None
        if stopped and (there.run_dir(run) / "FINISHED").exists():
            return FINISHED, ""
        if stopped and (how := there.followed(run)):
            return FINISHED, how
        if stopped:
            # The request may kill a process that has saved and is leaving, and torchrun then ends
            # with an error: what is on disk counts, not the code.
            kept = there.checkpoint(run) is not None
            saved = kept and there.reached(run) == there.last_step(run)
            reason = "saved and stopped" if saved else "ended before it could save"
            return (PAUSED if kept else WAITING), reason
        with there.log(run).open("rb") as stream:
            stream.seek(max(job.log_begins, stream.seek(0, os.SEEK_END) - 16384))
            log = stream.read().decode(errors="replace")
        if run.gpus > 1:
            code = rank_exit_code(log)
        return STATE_OF_EXIT.get(code, FAILED), f"exit code {code}: {last_words(log)}"

    def _progress(self) -> str:
        """One line: what runs, how far, how long it has taken."""
        parts = []
        for job in self.active:
            rate = (job.step - job.first) / max(1.0, time.monotonic() - job.began)
            end = self.directory.end(job.run, limit=self.steps)
            parts.append(f"{job.run.id} {job.step:,}/{end:,} {rate:.1f} step/s")
        clock = duration(time.monotonic() - self.began)
        line = f"[{clock}] {'; '.join(parts)}; waiting {len(self.queue)}"
        if self.minutes is not None:
            line += f"; {duration(max(0.0, self._time_left()))} of time left"
        return line


def rank_exit_code(log: str) -> int:
    """Exit code of the rank that failed first: torchrun itself ends with 1, and names it here."""
    found = re.search(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", log, re.DOTALL)
    return int(found[1]) if found else 1


def last_words(log: str) -> str:
    """The line that says why a process ended: the program's own, else the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    own = [i for i, line in enumerate(lines) if line.startswith("megatron-patch: ")]
    found = lines[own[-1] :] if own else lines[-1:]
    text = found[0] if found else ""
    if text.endswith(":") and len(found) > 1:  # reasons follow, a line each
        text += f" {found[1]}"
    return text.removeprefix("megatron-patch: ")[:300]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("protocol", metavar="PROTOCOL", type=Path, help="protocol file")
    parser.add_argument("--out", metavar="DIR", type=Path, help="default: runs/<protocol's name>")
    parser.add_argument("--gpus", metavar="N", type=_positive, help="default: all; CPU: 1")
    parser.add_argument("--minutes", metavar="M", type=float, help="stop, saved, before it is over")
    parser.add_argument("--steps", metavar="N", type=_positive, help="end runs here for now")
    only = "cells, runs or seeds, started in this order"
    parser.add_argument("--only", metavar="CELL", nargs="+", default=[], help=only)
    parser.add_argument("--gpus-per-run", metavar="N", type=_positive)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--results", action="store_true", help="write the tables, start nothing")
    add_overrides(parser)
    args = parser.parse_args(argv)
    if args.minutes is not None and not args.minutes > 0:
        parser.error(f"--minutes {args.minutes}: must be above 0")
    return args


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number above 0")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Do what was asked.

    Raises:
        ConfigError, ExperimentError: exit code 2; nothing was started.
    """
    experiment = read(args.protocol, args.overrides, args.gpus_per_run)
    protocol = experiment.protocol
    steps = args.steps or protocol.steps
    if steps > protocol.steps:
        text = f"is more than the protocol's {protocol.steps}, which is fixed; write another one"
        raise ExperimentError(f"--steps {steps}: {text}")
    for name in args.only:
        if not any(run.among([name]) for run in experiment.runs):
            allowed = ", ".join(run.id for run in experiment.runs)
            raise ExperimentError(f"--only {name}: is no cell, run or seed; runs are {allowed}")
    runs = [run for run in experiment.runs if run.among(args.only)]
    # Named runs start in the order named: the one whose result is wanted first comes first.
    runs.sort(key=lambda run: next((i for i, x in enumerate(args.only) if run.among([x])), 0))
    gpus = _gpus(args, runs)
    if args.dry_run:
        print(describe(experiment, runs, gpus=gpus, steps=steps))
    if not args.results:
        check_data(experiment, runs)
    if args.dry_run:
        return 0
    out = args.out or Path("runs") / protocol.name
    if args.results and not (out / "experiment.json").is_file():
        raise ExperimentError(f"{out} is no experiment: it has no experiment.json")
    directory = Directory(out, experiment, _say)
    try:
        queue = [
            run
            for run in runs
            if not directory.ended(run) and directory.reached(run) < directory.end(run, limit=steps)
        ]
        try:
            if not args.results:
                Runner(directory, list(range(gpus)), args.minutes, steps, queue, _say).run()
        finally:
            table = results.write(directory)
        print(table)
        print(f"results in {directory.path / 'results'}")
    finally:
        directory.close()
    bad = [(r.id, directory.states[r.id]) for r in runs]
    bad = [(name, state) for name, state in bad if state.state in (FAILED, REFUSED)]
    for name, state in bad:
        print(f"{name} {state.state}: {state.reason}", file=sys.stderr)
    return 1 if bad and not args.results else 0


def _gpus(args: argparse.Namespace, runs: list[Run]) -> int:
    """GPUs (or runs side by side on the CPU) of this invocation."""
    import torch

    there = torch.cuda.device_count()
    cpu = all(run.cpu for run in runs)
    gpus: int = args.gpus or (max(r.gpus for r in runs) if cpu else there)
    if not cpu and not (args.dry_run or args.results) and (gpus > there or there == 0):
        raise ExperimentError(
            f"--gpus {gpus}: this process sees {there} GPU(s) (CUDA_VISIBLE_DEVICES counts); "
            "research/protocols/smoke.yaml runs on a CPU"
        )
    needed = max(run.gpus for run in runs)
    if gpus < needed and not (args.dry_run or args.results):
        text = "use --gpus, --gpus-per-run, or --only cells that need fewer"
        raise ExperimentError(f"{gpus} GPU(s) for runs of {needed}: {text}")
    return max(1, gpus)


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    """`run`, with errors that are the user's as one message."""
    args = parse(argv)
    try:
        return run(args)
    except ExperimentError as error:
        report_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return app.INTERRUPTED
    except Exception as error:
        code = app.exit_code(error)
        if code is None:
            raise
        report_error(error)
        return code


if __name__ == "__main__":
    sys.exit(main())
