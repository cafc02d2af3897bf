"""``megatron-patch experiment stability``: from a protocol file to its verdict table."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.experiments import earlier, plan, publish, results, unrecorded
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.process import check_data
from megatron_patch.experiments.protocol import Experiment, read
from megatron_patch.experiments.publish import Target
from megatron_patch.experiments.runner import Runner
from megatron_patch.experiments.store import FAILED, REFUSED, State, Store, what_next


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The command line."""

    config: Path
    out: Path | None
    gpus: int | None
    minutes: float | None
    steps: int | None
    only: list[str]
    overrides: list[str]
    gpus_per_run: int | None = None
    widen: bool = False
    target: Target | None = None
    retry: bool = False
    dry_run: bool = False


def run(request: Request) -> int:
    """Do what was asked; 0 if no run failed or was refused (whatever its verdict), else 1.

    Raises:
        ConfigError: the protocol, or the configuration of one of its runs.
        ExperimentError: the directory holds something else, --only names nothing, or there are
            not the GPUs or the data that the runs need; or it was removed meanwhile.
    """
    experiment = read(request.config, request.overrides, gpus_per_run=request.gpus_per_run)
    protocol = experiment.protocol
    steps = min(request.steps or protocol.steps, protocol.steps)
    if request.steps is not None and request.steps > protocol.steps:
        raise ExperimentError(
            f"--steps {request.steps} is more than the protocol's {protocol.steps}: a protocol is "
            "fixed beforehand; write another one for a longer experiment"
        )
    _check_only(experiment, request.only)
    there = _gpus(experiment)
    gpus = (there or 1) if request.gpus is None else request.gpus
    if there == 0 and request.gpus is None and not request.dry_run:
        raise ExperimentError(
            "this process sees no GPU (CUDA_VISIBLE_DEVICES counts), and the protocol's runs train "
            "on one; --dry-run shows the plan, configs/stability/smoke.yaml runs on a CPU"
        )
    if there is not None and gpus > there and not request.dry_run:
        raise ExperimentError(
            f"--gpus {gpus}: this process may use {there} (CUDA_VISIBLE_DEVICES counts); leave "
            "--gpus out to use all of them"
        )
    needed = max(experiment.gpus_of(r) for r in experiment.runs if r.among(request.only))
    if gpus < needed:
        raise ExperimentError(
            f"{gpus} GPU(s) for runs of {needed}: use --gpus, --gpus-per-run, or --only cells that "
            "need fewer"
        )
    if request.widen:
        _check_widen(experiment, there)
    if request.dry_run:
        text = plan.describe(
            experiment,
            steps=steps,
            gpus=gpus,
            minutes=request.minutes,
            only=request.only,
            widen=request.widen,
        )
        print(text)
    out = _folder(request, protocol.name)
    if request.dry_run or not (out / "experiment.json").exists():
        # Before a directory is the protocol's: what is wrong may need another --set.
        check_data(experiment, [r for r in experiment.runs if r.among(request.only)], _say)
    if request.dry_run:
        return 0
    return _run(request, experiment, steps=steps, gpus=gpus)


def _folder(request: Request, name: str) -> Path:
    """The experiment's, of the protocol of that name."""
    return request.out or Path("runs") / name


def _report(request: Request, store: Store) -> dict[str, Any]:
    """Write and copy the results, also when the runs have ended with an error."""
    if store.is_gone():
        raise ExperimentError(
            f"{store.path / 'experiment.json'} was removed while runs trained: they were ended "
            "and there are no results. The same command goes on with what is left in "
            f"{store.path / 'runs'}; use an --out that nothing else empties"
        )
    try:
        result = _write(request, store)
    except (OSError, ExperimentError):
        # What became of --results-dir meanwhile must not cost the experiment's own results.
        results.write(store)
        _say(f"results in {store.path / 'results'}")
        raise
    if request.target is not None:
        for line in publish.publish(store, request.target):
            _say(line)
        _say(f"results copied to {request.target.folder}")
    return result


def _run(request: Request, experiment: Experiment, *, steps: int, gpus: int) -> int:
    protocol = experiment.protocol
    store = Store(_folder(request, protocol.name), experiment)
    try:
        if request.retry:
            _forget_failures(store)
        devices = [gpu for gpu in range(gpus) for _ in range(protocol.runs_per_gpu)]
        seconds = None if request.minutes is None else 60 * request.minutes
        for note in [*store.notes, *unrecorded.catch_up(store)]:
            _say(note)
        _write(request, store)  # what would refuse the results refuses before hours of work
        only = set(request.only)
        runner = Runner(store, devices, seconds, steps, only, say=_say, widen=request.widen)
        if request.target is not None:
            runner.publish = functools.partial(_publish, store, request.target)
        try:
            runner.run()
        finally:
            result = _report(request, store)
        print(results.markdown(result))
        print(f"results in {store.path / 'results'}")
    finally:
        store.close()
    # Not of the table: an earlier result that is kept may stand there in a failed run's place.
    states = [(run.id, store.states[run.id]) for run in experiment.runs]
    bad = [(name, state) for name, state in states if state.state in (FAILED, REFUSED)]
    for name, state in bad:
        print(f"{name} {state.state}: {state.reason}", file=sys.stderr)
    if bad:
        asked = {run.id for run in experiment.runs if run.among(request.only)}
        print(what_next(dict(bad), asked), file=sys.stderr)
    return 1 if bad else 0


def show(request: Request) -> int:
    """Write the results of what is there, and start nothing; 0.

    Raises:
        ConfigError, ExperimentError: as `run`; or there is no experiment.
    """
    experiment = read(request.config, request.overrides)
    out = _folder(request, experiment.protocol.name)
    if not (out / "experiment.json").is_file():
        raise ExperimentError(f"{out} is no experiment: it has no experiment.json")
    store = Store(out, experiment)
    try:
        for note in unrecorded.catch_up(store):
            _say(note)
        result = _write(request, store)
        if request.target is not None:
            for line in publish.publish(store, request.target):
                _say(line)
        print(results.markdown(result))
    finally:
        store.close()
    return 0


def _write(request: Request, store: Store) -> dict[str, Any]:
    """Results in the experiment's directory, with those kept that are to be published beside."""
    before = None
    if request.target is not None:
        request.target.make()
        before = earlier.read(request.target.folder, store.experiment.protocol.name)
    return results.write(store, before)


def _publish(store: Store, target: Target) -> None:
    """In between; the runs must not end because a copy could not be made."""
    try:
        list(publish.publish(store, target))
    except Exception as error:  # whatever it is: what it would end took hours
        known = isinstance(error, OSError | ExperimentError)
        why = error if known else f"{type(error).__name__}: {error}"
        _say(f"warning: results could not be copied to {target.folder}: {why}")


def _say(text: str) -> None:
    print(text, flush=True)


def _check_only(experiment: Experiment, only: list[str]) -> None:
    known = frozenset[str]().union(*(r.names for r in experiment.runs))
    strange = sorted(set(only) - known)
    if strange:
        raise ExperimentError(
            f"--only {' '.join(strange)}: {experiment.protocol.name} has no such cell, run or "
            f"seed; it has {', '.join(dict.fromkeys(r.cell.name for r in experiment.runs))}, and "
            f"{', '.join(dict.fromkeys(f's{r.seed}' for r in experiment.runs))}"
        )


def _check_widen(experiment: Experiment, there: int | None) -> None:
    shared = experiment.protocol.runs_per_gpu
    if there is None:
        raise ExperimentError(
            "--widen gives runs idle GPUs, and these run on the CPU: leave it out"
        )
    if shared > 1:
        raise ExperimentError(
            f"--widen gives runs idle GPUs, and here {shared} share one (runs_per_gpu): leave it "
            "out, or set runs_per_gpu to 1"
        )


def _forget_failures(store: Store) -> None:
    """Failed and refused runs are started again; what they did stays on record."""
    for name, state in store.states.items():
        if state.state in (FAILED, REFUSED):
            reason = f"retried: {state.reason}"
            # The origin, too: what is recorded began there, whether it goes on now or not.
            store.states[name] = State(reason=reason, attempts=state.attempts, origin=state.origin)
    store.save()


def _gpus(experiment: Experiment) -> int | None:
    """GPUs this process may use; None for protocols of CPU runs."""
    from megatron_patch.experiments.protocol import trainer_config

    first = trainer_config(experiment.config, experiment.runs[0], steps=experiment.protocol.steps)
    if first.config.training.device == "cpu":
        return None
    import torch

    return torch.cuda.device_count()
