"""The start from another run's checkpoint: what differs, what is refused, where its data goes on.

Refused, before anything is loaded, is what changes the meaning of the weights (`schema.kinds`) and
is not named in ``checkpoint.intended_changes``, and a run that would train nothing. Everything else
that differs stands in one table at start. The position in the data is kept in samples per dataset
(`data.position`), whatever batch size, blend and layout become.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from megatron_patch.data import tokenizers
from megatron_patch.data.errors import DataError
from megatron_patch.data.loader import build_loaders
from megatron_patch.data.position import Position
from megatron_patch.faults.skips import Skips
from megatron_patch.parallel.first_rank import on_first_rank
from megatron_patch.schema.checkpoint import CARRIED
from megatron_patch.schema.data import DataConfig, DatasetConfig, TokenizerConfig
from megatron_patch.schema.kinds import Kind, entry, kind_of
from megatron_patch.schema.problem import DEFAULT, ConfigError, Problem
from megatron_patch.training.resume_rules import another_run, continue_run, differences
from megatron_patch.training.schedule import Schedule

if TYPE_CHECKING:
    from megatron_patch.checkpoint.megatron import Checkpointer
    from megatron_patch.data.loader import Loaders
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.schema.run import Loaded, RunConfig

ITSELF = ("name", "run_dir", "checkpoint.directory", "checkpoint.load_from",
          "checkpoint.load_step", "checkpoint.load_weights_only", "checkpoint.carry_over",
          "checkpoint.intended_changes")  # fmt: skip
"""Keys that make it another run, or that name this start: no news in the table."""
SECTIONS = ("model.moe", "model.mla", "model.mtp", "model.rope_scaling")
"""Present or not, as a whole."""
SEEDS = ("data.seed", "training.seed")
ALONE: Any = SimpleNamespace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1)
ORDER: tuple[Kind, ...] = ("meaning", "data", "schedule", "other")


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value is another than in the checkpoint's configuration."""

    key: str
    kind: Kind
    old: str
    new: str


@dataclass(slots=True)
class Parent:
    """The checkpoint that a run starts from."""

    path: Path
    step: int
    changes: list[Change]
    position: Position | None
    """In its data; None where it cannot be known."""
    notes: list[str]
    """Lines of the table about what could not be compared."""
    rate: float | None
    """Learning rate that the next step would have had in its run."""


class Inheritance:
    """Judges a start from another run's checkpoint; ``loaders`` is this run's data at its start."""

    def __init__(self, loaded: Loaded, layout: Layout, loaders: Loaders) -> None:
        self._loaded, self._layout, self._loaders = loaded, layout, loaders
        self.parent: Parent | None = None
        """What was accepted last; None for a run that goes on from a checkpoint of its own."""

    def check(self, path: Path, state: Mapping[str, Any]) -> None:
        """Accept a checkpoint of another run, before anything of it is loaded. Collective.

        ``state`` is what it holds under ``run`` (`checkpoint.content`).

        Raises ConfigError: its weights mean something else here, nothing would be trained, or an
        intended change is none; on all ranks.
        """

        def examine() -> Parent:
            try:
                parent, problems = self._examine(path, state)
            except Exception as error:  # the other ranks wait
                text = f"{path}: what it records of its run cannot be read ({error!r:.300})"
                problems = [Problem("checkpoint.load_from", text)]
            if problems:
                raise ConfigError(problems)
            return parent

        self.parent = on_first_rank(examine, ConfigError, rank=self._layout.rank)

    def another_run(self, saved: str) -> str | None:
        """Why a checkpoint saved with the configuration ``saved`` is not this run's; None: it is.

        The run directory's own copy cannot tell: a new one may name an old
        ``checkpoint.directory``.
        """
        return another_run(saved, self._loaded)

    def resume(
        self, checkpointer: Checkpointer, scheduler: Any, *, step: int, skips: Skips
    ) -> list[str]:
        """Let data and schedule go on where the loaded checkpoint was. Collective.

        Args:
            checkpointer: has loaded, or found nothing to load.
            scheduler: this run's; adapted.
            step: steps done.
            skips: global batches that this run leaves out.

        Returns lines for the log: the table of a start from another run, what a change changes.

        Raises:
            ConfigError: the run is beyond its end, or data or schedule are not those of its steps.
        """
        check_begin(self._loaded.config, step=step)
        if self.parent is not None:
            lines = self.begin(step=step, skips=skips)
        else:
            lines = []
            check_length(self._loaded.config, step=step)
            self._resume_data(checkpointer.loaded_extra, step)
        return lines + continue_run(
            self._loaded, self._layout, self._loaders, scheduler=scheduler,
            checkpoint=checkpointer.loaded_own, step=step,
        )  # fmt: skip

    def _resume_data(self, saved: Mapping[str, Any], step: int) -> None:
        try:
            self._loaders.resume(saved.get("data"))
        except ValueError as error:
            hint = ""
            if self._loaded.origins.get("data.split") == DEFAULT:
                hint = "; earlier versions had data.split: [0.98, 0.01, 0.01] where none was given"
            text = (
                f"the tokens, or their order, are not those the first {step} steps were trained on "
                f"({error}): put the old ones back, or start a new run with "
                f"checkpoint.load_from{hint}"
            )
            raise ConfigError([Problem("data", text)]) from None

    def begin(self, *, step: int, skips: Skips) -> list[str]:
        """Put the data where the other run left it, by this run's blend; the table."""
        parent = self.parent
        assert parent is not None
        batch, ahead = skips.batch(step) + 1, skips.batch(step + 1)
        # What is left out before the first step lies behind where the data goes on: counted from
        # the first step, it would be read in spite of the list.
        if parent.position is not None and batch <= parent.position.batch <= ahead:
            batch = parent.position.batch  # which counts what that run left out
        run = self._loaded.config
        carried, intended = run.checkpoint.carried, run.checkpoint.intended_changes
        fresh = "data" not in carried
        rows: list[tuple[str, str]] = [("note", note) for note in parent.notes]
        for kind in ORDER:
            for change in (c for c in parent.changes if c.kind == kind):
                meant = " (intended)" if change.key in intended else ""
                if change.key in SEEDS and not fresh:
                    meant = " (datasets that go on keep their order)"
                rows.append((kind, f"{change.key}: {change.old} -> {change.new}{meant}"))
            if kind == "data":
                rows += [("data", line) for line in self._place_data(parent, batch, fresh=fresh)]
            if kind == "schedule" and (line := _rates(parent, run)):
                rows.append(("schedule", line))
        what = "everything" if len(carried) == len(CARRIED) else "weights"
        if carried and what != "everything":
            what += f" and {', '.join(name for name in CARRIED if name in carried)}"
        what += " only" if not carried else ""
        head = f"start from {parent.path}, step {parent.step:,}, {what}; what differs from it:"
        return [head, *(f"  {kind:<9} {text}" for kind, text in rows)]

    def _place_data(self, parent: Parent, batch: int, *, fresh: bool) -> list[str]:
        position = parent.position
        if fresh or position is None:
            nothing = Position(batch, batch, 1, (), (), (), (), "")
            self._loaders.start_from(nothing, batch)
        if fresh:
            counts = [
                f"{taken.source.name}: {taken.describe()} by it, none counts here"
                for taken in (() if position is None else position.reading)
            ]
            return [*counts, "every dataset starts at its first sample"]
        if position is None:
            return ["every dataset starts at its first sample: nothing is left out, and what the "
                    "checkpoint's run has read is read again"]  # fmt: skip
        return self._loaders.start_from(position, batch)

    # --------------------------------------------------------------------- the first rank

    def _examine(self, path: Path, state: Mapping[str, Any]) -> tuple[Parent, list[Problem]]:
        """What the checkpoint is, and what stands against the start."""
        text, step = str(state["config"]), int(state["progress"]["step"])
        tree: Any = None
        changes: list[Change] = []
        notes: list[str] = []
        try:
            changes, tree = compare(text, self._loaded), yaml.safe_load(text)
            if "training" not in tree:  # `checkpoint import` made it
                changes = [change for change in changes if change.kind == "meaning"]
                notes.append("imported: there is no run to compare with, only the model")
        except (ValueError, yaml.YAMLError) as error:
            why = str(error).splitlines()[0]
            notes.append(f"it records no configuration that can be read ({why}): not compared")
        position, why = self._position(path, state, tree, step)
        notes += [why] if why else []
        changes += self._tokenizer_change(position, tree)
        problems = judge(changes, self._loaded.config, step=step)
        rate = _rate_of(state, self._loaded.config, step)
        return Parent(path, step, changes, position, notes, rate), problems

    def _position(
        self, path: Path, state: Mapping[str, Any], tree: Any, step: int
    ) -> tuple[Position | None, str]:
        """Where the checkpoint's run was in its data, and what is to be said about that."""
        extra = dict(state.get("extra", {}))
        if extra.get("data") is not None:
            return Position.from_dict(extra["data"]), ""
        # Earlier versions recorded no position. Their order followed from the configuration.
        unknown = "it records no position in its data (an earlier version saved it), and "
        if tree is None:
            return None, unknown + "nothing else tells it"
        skips = Skips.from_dict(extra["faults"]["skips"]) if "faults" in extra else Skips()
        try:
            loaders = build_loaders(_recorded(self._loaded.config, tree), ALONE)
        except (ValueError, KeyError, TypeError) as error:
            why = error.problems[0] if isinstance(error, DataError) else repr(error)
            return None, unknown + f"its datasets cannot be looked at: {why}"
        try:
            fingerprint = loaders.fingerprint
            position = Position.from_dict(loaders.position(skips.batch(step + 1)))
        finally:
            loaders.close()
        known = _known_fingerprint(path, tree)
        if known is None:
            return position, (
                "it records no position in its data (an earlier version saved it): counted by its "
                "configuration, and no data.sha256 of its run is there to prove that its token "
                "files are those found now"
            )
        if known != fingerprint:
            return None, unknown + "its token files are not those found now"
        return position, ""

    def _tokenizer_change(self, position: Position | None, tree: Any) -> list[Change]:
        """Whether ids mean other text than in the checkpoint's run, by hash."""
        own = self._loaded.config.data.tokenizer
        new = f"{_tokenizer_text(own)}, SHA-256 {self._loaders.tokenizer[:12]}"
        recorded = {} if tree is None else dict(tree["data"].get("tokenizer") or {})
        known = {field.name for field in fields(TokenizerConfig)}
        theirs = TokenizerConfig(**{k: v for k, v in recorded.items() if k in known})
        old, sha256 = _tokenizer_text(theirs), None if position is None else position.tokenizer
        if sha256 is None and tree is None:
            return []
        if sha256 is None:
            try:
                sha256 = tokenizers.build(theirs).sha256
            except DataError:
                if theirs == own:
                    return []
                return [Change("data.tokenizer", "meaning", f"{old}, which is not there", new)]
        if sha256 == self._loaders.tokenizer:
            return []
        return [Change("data.tokenizer", "meaning", f"{old}, SHA-256 {sha256[:12]}", new)]


def compare(saved: str, loaded: Loaded) -> list[Change]:
    """What differs between a recorded configuration and this run's, but for the tokenizer.

    Raises ValueError: ``saved`` holds no settings; a YAMLError: it is no YAML.
    """
    trees = [yaml.load(text, Loader=yaml.BaseLoader) for text in (saved, loaded.dump_yaml())]
    found = {
        path: (old, new)
        for path, old, new in differences(saved, loaded.dump_yaml())
        # It came with an update, and nobody has set it.
        if not (old == "absent" and loaded.origins.get(path) == DEFAULT)
    }
    # A section that one of the two has not is one change.
    missing = [section for section in SECTIONS if section in found]
    changes: dict[str, Change] = {}
    for path, (old, new) in found.items():
        key = next((s for s in missing if path.startswith(s + ".")), entry(path) or path)
        kind = kind_of(key)
        if kind == "other":  # whole sections have one entry
            key = ".".join(part for part in path.split(".") if not part.isdecimal())
        if key in ITSELF or key == "data.tokenizer":
            continue
        if key != path or "absent" in (old, new):  # a list or a section
            old, new = (_text(tree, key) for tree in trees)
        if old == new:  # datasets at another place
            continue
        changes[key] = Change(key, kind, old, new)
    return list(changes.values())


def judge(changes: list[Change], run: RunConfig, *, step: int) -> list[Problem]:
    """What stands against a start from a checkpoint of ``step``, with these changes."""
    intended = run.checkpoint.intended_changes
    differ = {change.key: change for change in changes if change.kind == "meaning"}
    problems = [
        Problem(
            key,
            f"{change.new}, but the checkpoint's weights were trained with {change.old}, and mean "
            "something else here: set it back, or name it in checkpoint.intended_changes: "
            f"[{', '.join([*intended, key])}]",
        )
        for key, change in differ.items()
        if key not in intended
    ]
    problems += [
        Problem(
            "checkpoint.intended_changes",
            f"{key} is the same in the checkpoint, or has no effect here: leave it out; "
            f"what differs in meaning: {', '.join(differ) or 'nothing'}",
        )
        for key in intended
        if key not in differ
    ]
    if "step" not in run.checkpoint.carried:
        return problems
    return problems + [
        Problem(
            f"training.{name}",
            f"{value}, but the checkpoint to start from is of step {step:,} already: nothing would "
            "be trained; set a larger one, or leave step out of checkpoint.carry_over "
            "(load_weights_only: true: weights alone) to start at step 0 from its weights",
        )
        for name in ("train_steps", "exit_at_step")
        if (value := getattr(run.training, name)) is not None and value <= step
    ]


def check_length(run: RunConfig, *, step: int) -> None:
    """Refuse to call a run finished that is beyond its end.

    Raises ConfigError: the run's own newest checkpoint is of a later step than ``train_steps``.
    """
    if step > run.training.train_steps:
        text = (
            f"{run.training.train_steps}, but this run is at step {step:,} already: {step} ends it "
            "there, a larger one goes on, and 'megatron-patch checkpoint rollback' goes back to an "
            "earlier checkpoint"
        )
        raise ConfigError([Problem("training.train_steps", text)])


def check_begin(run: RunConfig, *, step: int) -> None:
    """Refuse a schedule that begins after the next step: that one has no learning rate.

    Raises ConfigError: ``optimizer.begin_step`` is above the steps done.
    """
    if run.optimizer.begin_step > step:
        text = (
            f"{run.optimizer.begin_step}, but the run goes on after step {step:,}, which has no "
            f"learning rate then: set it to {step}, or name a later checkpoint "
            "(checkpoint.load_from, load_step)"
        )
        raise ConfigError([Problem("optimizer.begin_step", text)])


# ------------------------------------------------------------------------ what was recorded


def _recorded(run: RunConfig, tree: dict[str, Any]) -> RunConfig:
    """``run`` with the data of a recorded configuration: enough to follow its order."""
    data, training = tree["data"], tree["training"]

    def datasets(name: str) -> list[DatasetConfig]:
        return [DatasetConfig(path=str(d["path"]), weight=float(d["weight"])) for d in data[name]]

    recorded = DataConfig(
        blend=datasets("blend"),
        split=[float(share) for share in data["split"]],
        train=datasets("train"),
        seed=None if data["seed"] is None else int(data["seed"]),
    )
    batches: dict[str, Any] = {n: int(training[n]) for n in ("seed", "global_batch_size")}
    # A checkpoint without a position is older than batch_size_rampup.
    batches |= {"batch_size_rampup": None, "micro_batch_size": 1, "eval_interval": None}
    model = replace(run.model, seq_length=int(tree["model"]["seq_length"]))
    return replace(run, data=recorded, model=model, training=replace(run.training, **batches))


def _known_fingerprint(path: Path, tree: dict[str, Any]) -> str | None:
    """What the run of a checkpoint wrote down about its data; None where that is not found."""
    run_dir = tree.get("run_dir") or Path("runs") / str(tree.get("name"))
    for folder in (path.absolute().parent.parent, path.absolute().parent, Path(run_dir)):
        try:
            return (folder / "data.sha256").read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
    return None


def _rate_of(state: Mapping[str, Any], run: RunConfig, step: int) -> float | None:
    """Learning rate of the step after ``step`` in the checkpoint's run; None: it does not tell."""
    try:
        return Schedule.saved(state, run).rate(step + 1)
    except (AssertionError, AttributeError, KeyError, StopIteration, TypeError, ValueError,
            yaml.YAMLError):  # fmt: skip
        return None


def _rates(parent: Parent, run: RunConfig) -> str:
    """The learning rate of the next step, before and after; empty where nothing is to be said."""
    if "step" not in run.checkpoint.carried:
        moments = "optimizer" in run.checkpoint.carried
        what = "schedule starts" if moments else "optimizer and schedule start"
        return f"{what} anew: learning rate {Schedule.of(run).rate(1):.6g} at step 1"
    rate = Schedule.of(run).rate(parent.step + 1)
    at = f"learning rate of step {parent.step + 1:,}"
    if parent.rate is None:
        return f"{at}: {rate:.6g}"
    if parent.rate != rate:
        return f"{at}: {parent.rate:.6g} -> {rate:.6g}"
    changed = any(change.kind == "schedule" for change in parent.changes)
    return f"{at}: {rate:.6g}, as before" if changed else ""


def _tokenizer_text(config: TokenizerConfig) -> str:
    return config.kind if config.path is None else f"{config.kind} {config.path}"


def _text(tree: Any, key: str) -> str:
    """A value of a configuration in one line."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return "absent"
        tree = tree[part]
    if isinstance(tree, list) and tree and all(isinstance(d, dict) for d in tree):
        # Datasets by name: what they are is told by content.
        tree = [f"{Path(str(d.get('path'))).name} {d.get('weight')}" for d in tree]
    if isinstance(tree, str):
        return tree
    return yaml.safe_dump(tree, default_flow_style=True, width=10**6).strip().replace("'", "")
