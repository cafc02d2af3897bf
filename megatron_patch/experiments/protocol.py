"""A protocol: which runs an experiment consists of, fixed before the first of them starts.

A protocol file is YAML under the rules of every configuration here (strict keys, ``base:``). It
names one trainer configuration and the cells; a cell is that configuration with a few keys changed
(``set``) and possibly core attention changed in a way no key expresses (``variant``). A *run* is
one cell with one seed. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megatron_patch.config import ConfigError, Problem, load
from megatron_patch.experiments.variants import VARIANTS

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_patch.config import Loaded
    from megatron_patch.schema.run import RunConfig

NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,47}")


@dataclass(kw_only=True, frozen=True, slots=True)
class CellConfig:
    """One setting of the experiment."""

    name: str
    """Name of the cell: lower-case letters, digits and ``_``."""
    set: list[str] = field(default_factory=list)
    """Keys of the trainer configuration this cell changes, as ``section.key=value``."""
    variant: str = "plain"
    """Change of core attention that is no key of the trainer; see docs/experiments.md."""
    seeds: list[int] | None = None
    """Seeds of this cell; default: the protocol's."""
    asks: str = ""
    """The question this cell answers, one line, for the tables."""
    gpus: int | None = None
    """Data-parallel GPUs of a run of this cell; default: the protocol's gpus_per_run."""
    from_cell: str | None = None
    """Start from checkpoints of this cell's run of the same seed instead of from step 0."""
    before: int = 0
    """With from_cell: the newest checkpoint at least this many steps before that run's first window
    with a gradient norm above explosion.grad_norm; negative: so many steps after it."""
    follow: int | None = None
    """The run ends so many steps after that window (without from_cell: after its own first such
    window); null: at the protocol's end."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ExplosionConfig:
    """When a run counts as exploded. Figures are means over windows of steps."""

    window: int = 50
    """Steps of one window."""
    from_step: int = 2000
    """Windows that end before this step count for nothing (large gradients are normal there)."""
    grad_norm: float = 1.0
    """The first window with a mean gradient norm above this is reported."""
    loss: float = 4.5
    """A run whose window loss rises above this after having been below has exploded."""
    stop_after: int | None = 500
    """Stop an exploded run this many steps later; null: let it run to its end."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Protocol:
    """An experiment."""

    name: str
    """Name of the experiment; its results lie in ``runs/<name>`` unless --out says otherwise."""
    description: str = ""
    """What it is for, one paragraph."""
    config: str
    """Trainer configuration of every run, relative to the protocol file."""
    set: list[str] = field(default_factory=list)
    """Keys of it changed in every run."""
    steps: int
    """Optimizer steps of every run."""
    seeds: list[int]
    """Seeds of every cell: all runs of one seed see the same batches and initial weights."""
    gpus_per_run: int = 1
    """Data-parallel GPUs of one run."""
    single_pass: bool = False
    """A GPU takes its share of a batch in one pass: micro_batch_size is global_batch_size over a
    run's GPUs, unless a key sets it. False: as the trainer configuration says."""
    runs_per_gpu: int = 1
    """Runs that share a GPU at the same time."""
    checked_steps: int = 20
    """Steps whose batches are hashed and compared between the runs of a seed."""
    save_seconds: float = 90.0
    """Time kept free at the end of a time budget for saving and leaving."""
    steps_per_second: float | None = None
    """Expected speed of one run, for the plan that --dry-run prints; null: unknown. Where runs
    share a GPU, the speed beside the others. With another number of GPUs a run (--gpus-per-run) it
    is taken to grow in proportion."""
    explosion: ExplosionConfig = field(default_factory=ExplosionConfig)
    """When a run counts as exploded."""
    cells: list[CellConfig]
    """The cells, in the order in which they are started."""

    def problems(self, whole: Protocol) -> Iterator[Problem]:
        """Everything that can be said before the trainer configuration is read."""
        if not NAME.fullmatch(self.name):
            yield Problem("name", f"{self.name[:60]!r}: use at most 48 of a-z 0-9 _")
        for key in ("steps", "gpus_per_run", "runs_per_gpu", "checked_steps"):
            if getattr(self, key) < 1:
                yield Problem(key, f"{getattr(self, key)}: must be at least 1")
        if self.save_seconds < 0:
            yield Problem("save_seconds", f"{self.save_seconds}: must not be negative")
        if self.explosion.window < 1 or self.explosion.from_step < 0:
            yield Problem("explosion", "window must be at least 1 and from_step not negative")
        yield from _seeds("seeds", self.seeds)
        if not self.cells:
            yield Problem("cells", "[] is no experiment: name at least one cell")
        names = [cell.name for cell in self.cells]
        own = (seed for cell in self.cells for seed in cell.seeds or ())
        seeds = {f"s{seed}" for seed in (*self.seeds, *own)}
        for index, cell in enumerate(self.cells):
            where = f"cells[{index}]"
            if not NAME.fullmatch(cell.name):
                yield Problem(f"{where}.name", f"{cell.name[:60]!r}: use at most 48 of a-z 0-9 _")
            if names.index(cell.name) != index:
                yield Problem(f"{where}.name", f"{cell.name!r} is the name of two cells")
            if cell.name in seeds:
                yield Problem(
                    f"{where}.name", f"{cell.name!r}: --only takes that for a seed; use another"
                )
            if cell.variant not in VARIANTS:
                allowed = ", ".join(VARIANTS)
                yield Problem(f"{where}.variant", f"{cell.variant!r}: use one of {allowed}")
            if cell.seeds is not None:
                yield from _seeds(f"{where}.seeds", cell.seeds)
            if cell.gpus is not None and cell.gpus < 1:
                yield Problem(f"{where}.gpus", f"{cell.gpus}: must be at least 1")
            if cell.follow is not None and cell.follow < 1:
                yield Problem(f"{where}.follow", f"{cell.follow}: must be at least 1, or null")
            yield from self._origin(where, cell)

    def _origin(self, where: str, cell: CellConfig) -> Iterator[Problem]:
        """What can be wrong with a cell that starts from another one's checkpoints."""
        if cell.from_cell is None:
            if cell.before:
                yield Problem(f"{where}.from_cell", "before needs it: name a cell")
            return
        base = next((c for c in self.cells if c.name == cell.from_cell), None)
        if base is None or base.from_cell is not None:
            allowed = ", ".join(c.name for c in self.cells if c.from_cell is None)
            yield Problem(
                f"{where}.from_cell",
                f"{cell.from_cell!r}: name a cell that starts at step 0 ({allowed})",
            )
            return
        missing = set(cell.seeds or self.seeds) - set(base.seeds or self.seeds)
        if missing:
            yield Problem(
                f"{where}.seeds", f"{sorted(missing)}: {base.name} has no runs of these seeds"
            )


MICRO_BATCH = "training.micro_batch_size="


def _seeds(path: str, seeds: list[int]) -> Iterator[Problem]:
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        yield Problem(path, f"{seeds}: name at least one seed, none twice, none negative")


@dataclass(frozen=True, slots=True)
class Run:
    """One cell with one seed."""

    cell: CellConfig
    seed: int
    overrides: tuple[str, ...]
    """Everything that makes this run out of the trainer configuration, in order."""
    batch: int = 0
    """Sequences of a step, once the configuration was read."""
    micro_batch: int | None = None
    """Sequences of a pass; None: a GPU's whole share of the batch, whatever their number."""

    @property
    def id(self) -> str:
        """Name of the run and of its directory."""
        return f"{self.cell.name}-s{self.seed}"

    @property
    def names(self) -> frozenset[str]:
        """What --only may call it: its cell, itself, or its seed as ``s1``."""
        return frozenset((self.cell.name, self.id, f"s{self.seed}"))

    def among(self, only: Collection[str]) -> bool:
        """Whether ``only``, of what `names` has, picks it; an empty one picks every run."""
        return not only or not self.names.isdisjoint(only)

    @property
    def base(self) -> str | None:
        """Id of the run whose checkpoints this one starts from."""
        return None if self.cell.from_cell is None else f"{self.cell.from_cell}-s{self.seed}"

    def fits(self, gpus: int) -> bool:
        """Whether so many GPUs can share the batch."""
        return self.batch % (gpus * (self.micro_batch or 1)) == 0

    def widest(self, own: int, most: int) -> int:
        """The largest number of GPUs up to ``most`` that can share the batch; at least ``own``."""
        return next((gpus for gpus in range(most, own, -1) if self.fits(gpus)), own)

    def on(self, gpus: int) -> Run:
        """The run with its batch cut for so many GPUs.

        Batches and update are the same; what differs is the order in which gradients are summed.
        """
        if self.micro_batch is not None:
            return self
        rest = [text for text in self.overrides if not text.startswith(MICRO_BATCH)]
        return replace(self, overrides=(*rest, f"{MICRO_BATCH}{self.batch // gpus}"))


@dataclass(frozen=True, slots=True)
class Experiment:
    """A protocol that passed every check, with its runs."""

    protocol: Protocol
    config: Path
    """The trainer configuration."""
    runs: tuple[Run, ...]
    """All runs: every cell of the first seed, then every cell of the next."""

    def gpus_of(self, run: Run) -> int:
        """Data-parallel GPUs of a run."""
        return run.cell.gpus or self.protocol.gpus_per_run

    def by_id(self, name: str) -> Run:
        """The run of this id."""
        return next(run for run in self.runs if run.id == name)


def read(
    path: str | os.PathLike[str],
    overrides: list[str] | None = None,
    *,
    gpus_per_run: int | None = None,
) -> Experiment:
    """Load a protocol and check the configuration of each of its runs.

    Args:
        path: the protocol file.
        overrides: ``section.key=value`` for the trainer configuration of every run (where the
            data lie, for example).
        gpus_per_run: instead of the protocol's, for cells that do not say theirs. Batches and
            update are the same on any number of GPUs, so this is no part of what is fixed.

    Raises:
        ConfigError: every problem of the protocol, or of the first run whose configuration is
            refused.
    """
    from pathlib import Path

    protocol: Protocol = load(path, root=Protocol).config  # type: ignore[assignment]
    if gpus_per_run is not None:
        speed = protocol.steps_per_second
        if speed is not None:  # measured with the protocol's; near enough for a plan
            speed *= gpus_per_run / protocol.gpus_per_run
        protocol = replace(protocol, gpus_per_run=gpus_per_run, steps_per_second=speed)
    config = Path(path).parent / protocol.config
    common = (*protocol.set, *(overrides or []))
    seeds = list(dict.fromkeys(s for c in protocol.cells for s in (c.seeds or protocol.seeds)))
    runs = tuple(
        Run(cell, seed, (*common, *cell.set, f"training.seed={seed}"))
        for seed in sorted(seeds, key=lambda s: (s not in protocol.seeds, seeds.index(s)))
        for cell in protocol.cells
        if seed in (cell.seeds or protocol.seeds)
    )
    checked = []
    for run in runs:
        loaded = trainer_config(config, run, steps=protocol.steps)
        _check(run, loaded, protocol)
        checked.append(_cut(run, loaded, protocol))
    return Experiment(protocol, config, tuple(checked))


def _cut(run: Run, loaded: Loaded, protocol: Protocol) -> Run:
    """``run``, which knows how its batch is cut; by ``single_pass`` without accumulation."""
    training, gpus = loaded.config.training, run.cell.gpus or protocol.gpus_per_run
    chosen = any(text.startswith(MICRO_BATCH) for text in run.overrides)
    one_pass = protocol.single_pass and not chosen
    if one_pass and training.global_batch_size % gpus:
        text = f"{training.global_batch_size} sequences on {gpus} GPUs (run {run.id}): take a "
        raise ConfigError([Problem("gpus_per_run", text + "number that divides them")])
    micro = None if one_pass else training.micro_batch_size
    return replace(run, batch=training.global_batch_size, micro_batch=micro).on(gpus)


def trainer_config(config: Path, run: Run, *, steps: int, run_dir: Path | None = None) -> Loaded:
    """The configuration of one run, checked as ``megatron-patch train`` checks it."""
    return load(config, [*run.overrides, *runtime_keys(run, steps, run_dir)])


def runtime_keys(run: Run, steps: int, run_dir: Path | None) -> list[str]:
    """Name, length and place. The length is always the protocol's: schedules may depend on it."""
    where = [] if run_dir is None else [f"run_dir={run_dir}"]
    return [f"name={run.id}", f"training.train_steps={steps}", *where]


def _check(run: Run, loaded: Loaded, protocol: Protocol) -> None:
    """What an experiment asks of a run beyond a valid configuration."""
    found: list[Problem] = []
    config, variant = loaded.config, VARIANTS[run.cell.variant]
    split = config.parallel
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    for axis in axes:
        if getattr(split, axis) != 1:
            found.append(Problem(f"parallel.{axis}", "experiments split data only: set it to 1"))
    if config.training.device == "cpu" and (run.cell.gpus or protocol.gpus_per_run) > 1:
        found.append(Problem("gpus_per_run", "is for GPUs; leave it at 1 with device: cpu"))
    found += _checkpoints(run, config, protocol)
    found += [Problem("variant", text) for text in variant.unmet(config)]
    guard = getattr(getattr(config, "stability", None), "guard", None)
    if guard == "switch" and variant.wrap is not None:
        found.append(Problem("stability.guard", "switch would undo the variant: use warn or off"))
    if found:
        raise ConfigError(
            [Problem(p.path, f"{p.message} (run {run.id} of {protocol.name})") for p in found]
        )


def _checkpoints(run: Run, config: RunConfig, protocol: Protocol) -> Iterator[Problem]:
    """A run that others start from must keep its checkpoints."""
    if not any(cell.from_cell == run.cell.name for cell in protocol.cells):
        return
    if config.checkpoint.keep_last is not None:
        yield Problem(
            "checkpoint.keep_last",
            f"{config.checkpoint.keep_last}: other cells start from this one's checkpoints; set "
            "it to null",
        )
    if config.checkpoint.interval is None:
        yield Problem("checkpoint.interval", "null: other cells start from this one's checkpoints")
