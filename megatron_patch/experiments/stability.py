"""``megatron-patch experiment stability``: from a protocol file to its verdict table."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.experiments import plan, results
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.protocol import Experiment, read
from megatron_patch.experiments.runner import Runner
from megatron_patch.experiments.store import FAILED, REFUSED, State, Store


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
    retry: bool = False
    dry_run: bool = False


def run(request: Request) -> int:
    """Do what was asked; 0 if no run failed or was refused (whatever its verdict), else 1.

    Raises:
        ConfigError: the protocol, or the configuration of one of its runs.
        ExperimentError: the directory holds something else, or --only names nothing.
    """
    experiment = read(request.config, request.overrides)
    protocol = experiment.protocol
    steps = min(request.steps or protocol.steps, protocol.steps)
    if request.steps is not None and request.steps > protocol.steps:
        raise ExperimentError(
            f"--steps {request.steps} is more than the protocol's {protocol.steps}: a protocol is "
            "fixed beforehand; write another one for a longer experiment"
        )
    _check_only(experiment, request.only)
    gpus = request.gpus if request.gpus is not None else _gpus(experiment)
    if gpus < protocol.gpus_per_run:
        raise ExperimentError(
            f"{gpus} GPU(s) for runs of {protocol.gpus_per_run}: use --gpus, or set gpus_per_run "
            "in a protocol of its own"
        )
    if request.dry_run:
        print(
            plan.describe(
                experiment, steps=steps, gpus=gpus, minutes=request.minutes, only=request.only
            )
        )
        return 0
    return _run(request, experiment, steps=steps, gpus=gpus)


def _run(request: Request, experiment: Experiment, *, steps: int, gpus: int) -> int:
    protocol = experiment.protocol
    store = Store(request.out or Path("runs") / protocol.name, experiment)
    try:
        if request.retry:
            _forget_failures(store)
        devices = [gpu for gpu in range(gpus) for _ in range(protocol.runs_per_gpu)]
        seconds = None if request.minutes is None else 60 * request.minutes
        runner = Runner(store, devices, seconds, steps, set(request.only), say=_say)
        try:
            runner.run()
        finally:
            result = results.write(store)
        print(results.markdown(result))
        print(f"results in {store.path / 'results'}")
    finally:
        store.close()
    bad = [r for r in result["runs"] if r["state"] in (FAILED, REFUSED)]
    for entry in bad:
        print(f"{entry['run']} {entry['state']}: {entry['reason']}", file=sys.stderr)
    return 1 if bad else 0


def _say(text: str) -> None:
    print(text, flush=True)


def _check_only(experiment: Experiment, only: list[str]) -> None:
    known = {name for r in experiment.runs for name in (r.cell.name, r.id)}
    strange = sorted(set(only) - known)
    if strange:
        raise ExperimentError(
            f"--only {' '.join(strange)}: {experiment.protocol.name} has no such cell or run; it "
            f"has {', '.join(dict.fromkeys(r.cell.name for r in experiment.runs))}"
        )


def _forget_failures(store: Store) -> None:
    """Failed and refused runs are started again; what they did stays on record."""
    for name, state in store.states.items():
        if state.state in (FAILED, REFUSED):
            store.states[name] = State(reason=f"retried: {state.reason}", attempts=state.attempts)
    store.save()


def _gpus(experiment: Experiment) -> int:
    """GPUs of this machine; 1 for protocols of CPU runs."""
    from megatron_patch.experiments.protocol import trainer_config

    first = trainer_config(experiment.config, experiment.runs[0], steps=experiment.protocol.steps)
    if first.config.training.device == "cpu":
        return 1
    import torch

    return torch.cuda.device_count()
