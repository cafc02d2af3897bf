"""The process of one run: its command line, how it is asked to stop, what its log says."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.experiments import origin
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.protocol import Experiment, Run, runtime_keys, trainer_config
from megatron_patch.experiments.store import Store
from megatron_patch.runtime import lifeline


@dataclass(slots=True)
class Active:
    """A run that has a process."""

    run: Run
    process: subprocess.Popen[bytes]
    seats: list[int]
    began: float
    first_step: int
    """Where this process began."""
    log_begins: int = 0
    """Where its words begin in the run's log: those before are of earlier attempts."""
    paced: tuple[float, int] | None = None
    """When its first steps were seen, and how far it was: its speed is counted from there."""
    asked_to_stop: float | None = None
    exploded: str = ""
    looked: float = 0.0
    wanted_wider: bool = False
    """It was asked to stop because it goes on with more GPUs."""
    step: int = 0
    loss: float | None = None
    """Of the last step; None before the first."""


def cell_command(store: Store, run: Run, *, gpus: int, steps: int, left: float) -> list[str]:
    """The command line of one run; ``left`` seconds of training (inf: no limit)."""
    start = ["-m", "megatron_patch"]
    if gpus > 1:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        start += ["-m", "megatron_patch"]
    command = [sys.executable, *start, "experiment", "cell"]
    command += ["--config", str(store.experiment.config), "--variant", run.cell.variant]
    command += ["--reference", str(store.reference(run))]
    command += ["--checked-steps", str(store.experiment.protocol.checked_steps)]
    begins = origin.find(store, run) if run.base is not None else None
    whole = store.experiment.protocol.steps
    keys = [*run.overrides, *runtime_keys(run, whole, store.run_dir(run)), "logging.progress=off"]
    if begins is not None:
        keys.append(f"checkpoint.load_from={begins.path}")
    if steps < whole:
        keys.append(f"training.exit_at_step={steps}")
    if left != float("inf"):
        keys.append(f"training.exit_after_minutes={max(left, 1.0) / 60:.3f}")
    return command + [part for key in keys for part in ("--set", key)]


def check_data(experiment: Experiment, runs: Sequence[Run], say: Callable[[str], None]) -> None:
    """Whether the data and tokenizers that ``runs`` name are there and belong together.

    Asked once, before any of them is started: each would find the same, when it has its GPU and has
    loaded its libraries. The bytes are left to the runs, which hash them. So is what a file system
    did not answer, which may pass; ``say`` gets it.

    Raises:
        ExperimentError: all that is wrong with them.
    """
    from megatron_patch.data import tokenizers
    from megatron_patch.data.errors import DataError, Unanswered
    from megatron_patch.data.verify import check_quickly, dataset_paths

    found: dict[str, None] = {}  # every problem once: the runs share their data
    asked = set()
    for run in runs:
        config = trainer_config(experiment.config, run, steps=experiment.protocol.steps).config
        paths, tokenizer = dataset_paths(config), None
        if (config.data.tokenizer, *paths) in asked:
            continue
        asked.add((config.data.tokenizer, *paths))
        try:
            tokenizer = tokenizers.build(config.data.tokenizer)
        except DataError as error:
            found |= dict.fromkeys(error.problems)
        for path in paths:
            found |= dict.fromkeys(check_quickly(path, tokenizer).problems)
    for problem in found:
        if isinstance(problem, Unanswered):
            say(f"warning: {problem}")
    listed = "".join(f"\n  - {text}" for text in found if not isinstance(text, Unanswered))
    if listed:
        raise ExperimentError(
            f"no run is started: the data of {experiment.protocol.name} cannot be used:{listed}\n"
            "Prepare them (megatron-patch prepare-data), or say where they are: --set "
            "data.blend.0.path=... --set data.tokenizer.path=..."
        )


def on_cpu(run: Run, store: Store) -> bool:
    """Whether a run trains on the CPU."""
    loaded = trainer_config(store.experiment.config, run, steps=store.experiment.protocol.steps)
    return loaded.config.training.device == "cpu"


def ask_ranks(process: subprocess.Popen[bytes], *, torchrun: bool) -> bool:
    """SIGUSR1 to the training processes; whether there was one.

    Not SIGTERM to torchrun: it would kill them 30 s later, in the middle of a save.
    """
    pid = process.pid
    asked = False
    for rank in lifeline.children(pid) if torchrun else [pid]:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGUSR1)
            asked = True
    return asked


def tail(log: Path, begins: int) -> str:
    """The end of what a log has from a byte on."""
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(begins, log.stat().st_size - 16384))
        return stream.read().decode(errors="replace")


def rank_exit_code(log: str) -> int:
    """Exit code of the rank that failed first: torchrun itself ends with 1, and says it here."""
    root = log.rpartition("Root Cause (first observed failure)")[2]
    found = re.search(r"exitcode\s*:\s*(-?\d+)", root)
    return int(found[1]) if found else 1


def last_words(log: str) -> str:
    """The line that says why a process ended: the program's own, else the last one.

    Reasons that are indented below a line of its own that ends in a colon are a part of it.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    own = [i for i, line in enumerate(lines) if line.lstrip().startswith("megatron-patch: ")]
    at = own[-1] if own else len(lines) - 1
    found = lines[at].strip() if lines else ""
    if found.endswith(":"):
        reasons = itertools.takewhile(lambda line: line[:1].isspace(), lines[at + 1 :])
        found += " " + "; ".join(line.strip().removeprefix("- ") for line in reasons)
    return found.removeprefix("megatron-patch: ").removeprefix("[rank0]: ").strip()[:300]
