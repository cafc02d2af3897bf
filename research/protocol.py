"""A protocol: one YAML file that fixes cells, seeds, length and verdict before the first run.

A *cell* is one setting; a *run* is one cell with one seed. Every run of a seed trains on the same
batches from the same initial weights, so that two cells differ in what they set and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from variants import VARIANTS

from megatron_patch.config import Loaded, load
from megatron_patch.monitor.metrics import duration
from megatron_patch.schema.problem import ConfigError, Problem

NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,47}")
MICRO_BATCH = "training.micro_batch_size="


class ExperimentError(ValueError):
    """An experiment that cannot go on as asked; the text names what differs and the remedy."""

    exit_code = 2


@dataclass(kw_only=True, frozen=True, slots=True)
class CellConfig:
    """One setting of the experiment."""

    name: str
    """Name of the cell: lower-case letters, digits and ``_``."""
    set: list[str] = field(default_factory=list)
    """Keys of the trainer configuration this cell changes, as ``section.key=value``."""
    variant: str = "plain"
    """Change of core attention that is no key of the trainer; see research/variants.py."""
    seeds: list[int] | None = None
    """Seeds of this cell; default: the protocol's."""
    asks: str = ""
    """The question this cell answers, one line, for the tables."""
    gpus: int | None = None
    """Data-parallel GPUs of a run of this cell; default: the protocol's gpus_per_run."""
    from_cell: str | None = None
    """Start from a checkpoint of this cell's run of the same seed instead of from step 0."""
    before: int = 0
    """With from_cell: the newest checkpoint at least this many steps before that run's event (the
    first window with a gradient norm above explosion.grad_norm); negative: so many after it."""
    follow: int | None = None
    """The run ends so many steps after that event (without from_cell: after its own); null: at the
    protocol's end."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ExplosionConfig:
    """When a run counts as exploded. Figures are means over windows of steps."""

    window: int = 50
    """Steps of one window."""
    from_step: int = 2000
    """Windows that end before this step count for nothing (large gradients are normal there)."""
    grad_norm: float = 1.0
    """The first window with a mean gradient norm above this is the event."""
    loss: float = 4.5
    """A run whose window loss rises above this after having been below has exploded."""
    stop_after: int | None = 500
    """Stop an exploded run this many steps later; null: let it run to its end."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Protocol:
    """The whole file."""

    name: str
    """Name of the experiment; its directory is ``runs/<name>`` unless --out says otherwise."""
    description: str = ""
    """What it is for, one paragraph."""
    config: str
    """Trainer configuration of every run, relative to the protocol file."""
    set: list[str] = field(default_factory=list)
    """Keys of it changed in every run."""
    steps: int
    """Optimizer steps of every run."""
    seeds: list[int]
    """Seeds of every cell."""
    gpus_per_run: int = 1
    """Data-parallel GPUs of one run."""
    single_pass: bool = False
    """A GPU takes its share of a batch in one pass: micro_batch_size is global_batch_size over a
    run's GPUs, unless a key sets it. False: as the trainer configuration says."""
    save_seconds: float = 90.0
    """Time kept free at the end of --minutes for saving and leaving."""
    steps_per_second: float | None = None
    """Expected speed of one run, for --dry-run; null: unknown."""
    rivals: int = 0
    """Steps between observations of the published monitors (research/rivals.py); 0: none. It
    changes no run, and may differ between two calls."""
    explosion: ExplosionConfig = field(default_factory=ExplosionConfig)
    """When a run counts as exploded."""
    cells: list[CellConfig]
    """The cells, in the order in which they are started."""

    def problems(self) -> Iterator[Problem]:
        """Everything that can be said before the trainer configuration is read."""
        if not NAME.fullmatch(self.name):
            yield Problem("name", f"{self.name[:60]!r}: use at most 48 of a-z 0-9 _")
        for key in ("steps", "gpus_per_run"):
            if getattr(self, key) < 1:
                yield Problem(key, f"{getattr(self, key)}: must be at least 1")
        if self.rivals != 0 and self.rivals < 4:
            yield Problem("rivals", f"{self.rivals}: must be at least 4 steps, or 0")
        if self.save_seconds < 0:
            yield Problem("save_seconds", f"{self.save_seconds}: must not be negative")
        if self.explosion.window < 1 or self.explosion.from_step < 0:
            yield Problem("explosion", "window must be at least 1 and from_step not negative")
        yield from _seeds("seeds", self.seeds)
        if not self.cells:
            yield Problem("cells", "[] is no experiment: name at least one cell")
        names = [cell.name for cell in self.cells]
        for index, cell in enumerate(self.cells):
            where = f"cells[{index}]"
            # --only takes s1 for a seed.
            if not NAME.fullmatch(cell.name) or re.fullmatch(r"s\d+", cell.name):
                text = "use at most 48 of a-z 0-9 _, and no seed's name (s1)"
                yield Problem(f"{where}.name", f"{cell.name[:60]!r}: {text}")
            if names.index(cell.name) != index:
                yield Problem(f"{where}.name", f"{cell.name!r} is the name of two cells")
            if cell.variant not in VARIANTS:
                allowed = ", ".join(VARIANTS)
                yield Problem(f"{where}.variant", f"{cell.variant!r}: use one of {allowed}")
            if cell.seeds is not None:
                yield from _seeds(f"{where}.seeds", cell.seeds)
            for key in ("gpus", "follow"):
                value = getattr(cell, key)
                if value is not None and value < 1:
                    yield Problem(f"{where}.{key}", f"{value}: must be at least 1, or null")
            yield from self._base_problems(where, cell)

    def _base_problems(self, where: str, cell: CellConfig) -> Iterator[Problem]:
        """What can be wrong with a cell that starts from another one's checkpoints."""
        if cell.from_cell is None:
            if cell.before:
                yield Problem(f"{where}.from_cell", "before needs it: name a cell")
            return
        base = next((c for c in self.cells if c.name == cell.from_cell), None)
        if base is None or base.from_cell is not None:
            allowed = ", ".join(c.name for c in self.cells if c.from_cell is None)
            text = f"{cell.from_cell!r}: name a cell that starts at step 0 ({allowed})"
            yield Problem(f"{where}.from_cell", text)
            return
        missing = set(cell.seeds or self.seeds) - set(base.seeds or self.seeds)
        if missing:
            text = f"{sorted(missing)}: {base.name} has no runs of these seeds"
            yield Problem(f"{where}.seeds", text)


def _seeds(path: str, seeds: list[int]) -> Iterator[Problem]:
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        yield Problem(path, f"{seeds}: name at least one seed, none twice, none negative")


@dataclass(frozen=True, slots=True)
class Run:
    """One cell with one seed."""

    cell: CellConfig
    seed: int
    gpus: int
    overrides: tuple[str, ...]
    """Everything that makes this run out of the trainer configuration, in order."""
    cpu: bool = False
    """Whether it trains on the CPU, once the configuration was read."""

    @property
    def id(self) -> str:
        """Name of the run and of its directory."""
        return f"{self.cell.name}-s{self.seed}"

    @property
    def base(self) -> str | None:
        """Id of the run whose checkpoints this one starts from."""
        return None if self.cell.from_cell is None else f"{self.cell.from_cell}-s{self.seed}"

    def among(self, only: Collection[str]) -> bool:
        """Whether --only picks it, by cell, by run or by seed (``s1``); nothing given picks all."""
        return not only or not {self.cell.name, self.id, f"s{self.seed}"}.isdisjoint(only)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A protocol that passed every check, with its runs."""

    protocol: Protocol
    config: Path
    """The trainer configuration."""
    runs: tuple[Run, ...]
    """All runs: every cell of the first seed, then every cell of the next."""

    def by_id(self, name: str) -> Run:
        """The run of this id."""
        return next(run for run in self.runs if run.id == name)

    def load(self, run: Run, run_dir: Path | None = None) -> Loaded:
        """The configuration of one run, checked as ``megatron-patch train`` checks it."""
        return load(self.config, self.keys(run, run_dir))

    def keys(self, run: Run, run_dir: Path | None = None) -> list[str]:
        """All overrides. The length is always the protocol's: schedules may depend on it."""
        where = [] if run_dir is None else [f"run_dir={run_dir}"]
        steps = f"training.train_steps={self.protocol.steps}"
        return [*run.overrides, f"name={run.id}", steps, *where]


def read(
    path: str | os.PathLike[str], overrides: Collection[str] = (), gpus_per_run: int | None = None
) -> Experiment:
    """Load a protocol and check the configuration of each of its runs.

    Args:
        path: the protocol file.
        overrides: ``section.key=value`` for every run (where the data lie, for example).
        gpus_per_run: instead of the protocol's, for cells that do not say theirs. Batches and
            update are the same on any number of GPUs.

    Raises:
        ConfigError: every problem of the protocol, or of the first run that is refused.
    """
    protocol: Protocol = load(path, root=Protocol).config  # type: ignore[assignment]
    if gpus_per_run is not None:
        protocol = replace(protocol, gpus_per_run=gpus_per_run)
    common = (*protocol.set, *overrides)
    seeds = list(
        dict.fromkeys([*protocol.seeds, *(s for c in protocol.cells for s in c.seeds or ())])
    )
    runs = tuple(
        Run(
            cell,
            seed,
            cell.gpus or protocol.gpus_per_run,
            (*common, *cell.set, f"training.seed={seed}"),
        )
        for seed in seeds
        for cell in protocol.cells
        if seed in (cell.seeds or protocol.seeds)
    )
    experiment = Experiment(protocol, Path(path).parent / protocol.config, runs)
    return replace(experiment, runs=tuple(_checked(experiment, run) for run in runs))


def _checked(experiment: Experiment, run: Run) -> Run:
    """``run`` with its batch cut for its GPUs.

    Raises:
        ConfigError: what an experiment asks of a run beyond a valid configuration.
    """
    protocol, config = experiment.protocol, experiment.load(run).config
    batch = config.training.global_batch_size
    found = [Problem("variant", text) for text in VARIANTS[run.cell.variant].unmet(config)]
    if config.stability.guard == "switch" and run.cell.variant != "plain":
        found.append(Problem("stability.guard", "switch would undo the variant: use warn or off"))
    if any(cell.from_cell == run.cell.name for cell in protocol.cells):
        kept, interval = config.checkpoint.keep_last, config.checkpoint.interval
        why = "other cells start from this one's checkpoints"
        if kept is not None:
            found.append(Problem("checkpoint.keep_last", f"{kept}: {why}; set it to null"))
        if interval is None:
            found.append(Problem("checkpoint.interval", f"null: {why}; set a number of steps"))
    one_pass = protocol.single_pass and not any(k.startswith(MICRO_BATCH) for k in run.overrides)
    if one_pass and batch % run.gpus:
        text = f"{run.gpus}: {batch} sequences cannot be shared; take a number that divides them"
        found.append(Problem("gpus_per_run", text))
    if found:
        where = f"(run {run.id} of {protocol.name})"
        raise ConfigError([Problem(p.path, f"{p.message} {where}") for p in found])
    cut = (f"{MICRO_BATCH}{batch // run.gpus}",) if one_pass else ()
    cpu = config.training.device == "cpu"
    return replace(run, overrides=(*run.overrides, *cut), cpu=cpu)


def check_data(experiment: Experiment, runs: list[Run]) -> None:
    """Whether the data that ``runs`` name are there: each would find the same, on its GPU.

    Raises:
        ExperimentError: all that is wrong with them.
    """
    from megatron_patch.data import tokenizers
    from megatron_patch.data.errors import DataError, Unanswered
    from megatron_patch.data.verify import check_quickly

    found: dict[str, None] = {}  # every problem once: the runs share their data
    configs = [experiment.load(run).config for run in runs]
    for path, tokenizer in {(p, c.data.tokenizer) for c in configs for p in c.data.paths}:
        try:
            problems = check_quickly(path, tokenizers.build(tokenizer)).problems
        except DataError as error:
            problems = error.problems
        for problem in problems:
            if isinstance(problem, Unanswered):  # a file system that may answer the run itself
                print(f"warning: {problem}", flush=True)
            else:
                found[str(problem)] = None
    if found:
        listed = "".join(f"\n  - {text}" for text in found)
        raise ExperimentError(
            f"no run is started: the data of {experiment.protocol.name} cannot be used:{listed}\n"
            "Prepare them (megatron-patch prepare-data), or say where they are: --set "
            "data.blend.0.path=... --set data.tokenizer.path=..."
        )


def describe(experiment: Experiment, runs: list[Run], *, gpus: int, steps: int) -> str:
    """The text of ``--dry-run``: the runs in the order they start, and their time at most."""
    protocol = experiment.protocol
    lines = [f"{protocol.name}: {len(runs)} runs of {steps:,} steps on {gpus} GPU(s) or CPU seats"]
    for run in runs:
        keys = " ".join([*run.cell.set, f"variant={run.cell.variant}"])
        lines.append(f"  {run.id}  {run.gpus} GPU(s)  {keys}  {run.cell.asks}".rstrip())
    if protocol.steps_per_second is not None:
        made = [
            steps
            if run.base is None or run.cell.follow is None
            else min(steps, run.cell.before + run.cell.follow)
            for run in runs
        ]
        seconds = sum(made) / protocol.steps_per_second / gpus
        lines.append(f"at {protocol.steps_per_second:g} steps/s a GPU: about {duration(seconds)}")
    return "\n".join(lines)
