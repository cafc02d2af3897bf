"""One run of an experiment, inside its own process: preconditions, variant, then the trainer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.experiments import preconditions, variants
from megatron_patch.experiments.errors import ExperimentError

if TYPE_CHECKING:
    from megatron_patch.config import Loaded

FINGERPRINT = "experiment.json"


def train(loaded: Loaded, *, variant: str, reference: Path, checked_steps: int) -> int:
    """`megatron_patch.training.trainer.train` as one run of an experiment; its exit code.

    Args:
        loaded: the checked configuration.
        variant: a name of `variants.VARIANTS`.
        reference: fingerprint file of the seed, see `preconditions.check`.
        checked_steps: steps whose batches are hashed.

    Raises:
        ExperimentError: the run is not comparable with the others of its seed, or the variant does
            not fit the configuration; no step was made.
    """
    import torch

    from megatron_patch.parallel import setup
    from megatron_patch.training import trainer

    variants.install(variant, loaded.config)
    preconditions.read(reference)  # a file that is no fingerprint is told before anything is built
    build = trainer.build_session

    def build_and_check(run: Any, layout: Any, *args: Any, **named: Any) -> Any:
        built = build(run, layout, *args, **named)
        problem: list[str | None] = [None]
        if layout.rank == 0:
            mine = fingerprint(run, built[0].chunks, checked_steps)
            record(run, variant, mine)
            try:
                preconditions.check(mine, reference)
            except ExperimentError as error:
                problem = [str(error)]
        # All ranks end together: one that left alone would leave the others in a collective.
        torch.distributed.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise ExperimentError(problem[0])
        return built

    trainer.build_session = build_and_check  # type: ignore[assignment]
    try:
        return trainer.train(loaded)
    except ExperimentError:
        # Raised on all ranks alike: without this, threads of the groups abort the exit.
        setup.destroy()
        raise
    finally:
        trainer.build_session = build


def fingerprint(run: Any, chunks: list[Any], checked_steps: int) -> dict[str, Any]:
    """What this process found, as `preconditions.Fingerprint.as_dict`."""
    from megatron_patch.runtime import environment

    report = environment.report()
    batches, data = preconditions.hash_batches(run, checked_steps)
    return preconditions.Fingerprint(
        weights=preconditions.hash_weights(chunks),
        batches=batches,
        data=data,
        model=dataclasses.asdict(run.model),
        checked_steps=checked_steps,
        environment={key: report.get(key) for key in preconditions.COMPARED},
    ).as_dict()


def record(run: Any, variant: str, mine: dict[str, Any]) -> None:
    """Leave variant and hashes in the run directory."""
    from megatron_patch.runtime.files import write_whole
    from megatron_patch.schema.checkpoint import run_directory

    facts = {key: value for key, value in mine.items() if key not in ("weights", "model")}
    facts |= {"variant": variant, "meaning": variants.VARIANTS[variant].meaning}
    path = run_directory(run) / FINGERPRINT
    write_whole(path, json.dumps(facts, indent=1, sort_keys=True) + "\n")
