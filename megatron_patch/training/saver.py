"""When a failed save is survivable, and how far the run is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_patch.checkpoint import keeping
from megatron_patch.checkpoint.errors import SaveError
from megatron_patch.checkpoint.progress import Progress
from megatron_patch.checkpoint.shelf import key_of
from megatron_patch.schema.checkpoint import run_directory
from megatron_patch.stability import record

if TYPE_CHECKING:
    from megatron_patch.checkpoint.megatron import Checkpointer
    from megatron_patch.monitor.hub import Monitor
    from megatron_patch.schema.run import RunConfig

MAX_FAILURES = 3
"""Periodic saves that may fail in a row before the run ends: it would train for nothing."""


@dataclass(slots=True)
class Position:
    """How far the run is, counted over all ranks."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    abandoned_saves: int = 0
    switched_at: int = 0

    def advance(self, run: RunConfig) -> None:
        """One more step is done."""
        self.step += 1
        self.consumed_samples += run.training.global_batch_size
        self.consumed_tokens += run.training.global_batch_size * run.model.seq_length

    def progress(self) -> Progress:
        """As checkpoints record it."""
        return Progress(
            step=self.step,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            abandoned_saves=self.abandoned_saves,
            switched_at=self.switched_at,
        )


class Saver:
    """Checkpoints of the loop. Every method is collective that does not say otherwise."""

    def __init__(self, checkpointer: Checkpointer, monitor: Monitor) -> None:
        self._checkpointer, self._monitor = checkpointer, monitor
        self._saved: int | None = None
        self._failures = 0
        self._covered: int | None = None  # the last danger that nothing more is kept for
        self._told = ""
        self.back_to: int | None = None
        """Where `rewind` goes: what `can_rewind` found last."""

    def load(self) -> Position | None:
        """Resume from the newest good checkpoint, or ``load_from``; None for a fresh start."""
        progress = self._checkpointer.load()
        if progress is None:
            return None
        return Position(**progress.as_dict())

    @property
    def extra(self) -> dict[str, Any]:
        """What the loaded checkpoint carried beside the state; empty for a fresh start."""
        return self._checkpointer.loaded_extra

    def can_rewind(self, step: int) -> bool:
        """Whether there is a good checkpoint of at most ``step``: the one `rewind` goes to.

        It is verified here, before anything is given up for it, and a background save of at most
        ``step`` is waited for. A later one is left alone: a rewind gives it up.

        Raises:
            CheckpointError: the checkpoints cannot be listed.
            SaveError: as `poll`.
        """
        saving = self._checkpointer.saving_step
        if saving is not None and saving <= step:
            self._attempt(lambda: self._checkpointer.finalize(blocking=True), saving)
        self.back_to = self._checkpointer.store.newest_at(step)
        return self.back_to is not None

    def rewind(self, step: int, plan: Callable[[int], None]) -> Position:
        """Go back to the checkpoint that ``can_rewind(step)`` found; later ones are moved aside.

        Args:
            step: newest step wanted.
            plan: told the step of that checkpoint, after the move and before anything is loaded.

        Raises:
            CheckpointError: it is not good any more, and none before it is.
        """
        back_to = self.back_to
        assert back_to is not None and back_to <= step
        self._checkpointer.abandon_after(back_to)
        plan(back_to)
        progress = self._checkpointer.reload()
        self._saved, self._failures = progress.step, 0
        self._covered = None  # the kept one may be among those moved aside
        return Position(**progress.as_dict())

    def save(self, position: Position) -> None:
        """A periodic checkpoint. A failure (full disk) is reported and survived a few times.

        Raises:
            SaveError: it failed MAX_FAILURES times in a row.
        """
        self._attempt(lambda: self._checkpointer.save(position.progress()), position.step)

    def keep_before_danger(self, step: int) -> None:
        """Keep the checkpoint to go back to from the danger at the record of ``step``. Local.

        Called at every record at danger: before a save of that step deletes older ones, and again
        while there was none to keep. Only the first rank keeps and deletes; a failure is told, and
        no reason to end the run.
        """
        store = self._checkpointer.store
        if store.ranks.rank != 0:
            return
        try:
            line = [] if self._covered else store.trained()
            began = self._signs_began(step, line)
            if not self._covered or began > self._covered:  # after a calm
                line = line or store.trained()
                root, good = store.root, store.is_whole
                if not keeping.keep(root, line, danger=step, began=began, good=good):
                    return
            self._covered, self._told = step, ""
        except Exception as error:  # the other ranks wait, and this is no reason to end a run
            if str(error) != self._told:
                self._monitor.say(f"warning: no checkpoint from before the danger is kept: {error}")
            self._told = str(error)

    def _signs_began(self, danger: int, line: list[str]) -> int:
        """No further back than it matters: to the last danger, or the oldest checkpoint."""
        until = self._covered or min((key_of(name)[0] for name in line), default=0)
        try:
            found = record.read(run_directory(self._checkpointer.run))
            return found.signs_began(danger, until=until)
        except (OSError, ValueError, LookupError, TypeError):  # no records: before it, at least
            return danger

    @property
    def saving(self) -> bool:
        """Whether a background save is not committed yet."""
        return self._checkpointer.saving

    def poll(self) -> None:
        """Commit a background save that is ready."""
        if self._checkpointer.saving:
            self._attempt(lambda: self._checkpointer.finalize(blocking=False), self._saved)

    def finish(self) -> None:
        """Commit a background save, waiting for its writers.

        Raises:
            SaveError: it was abandoned.
        """
        self._checkpointer.finalize(blocking=True)

    def _attempt(self, work: object, step: int | None) -> None:
        assert callable(work)
        try:
            work()
        except SaveError as error:
            self._saved = None
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            self._monitor.say(
                f"warning: {error}; training goes on, {MAX_FAILURES - self._failures} more "
                "failure(s) in a row end it"
            )
            return
        self._saved = step
        if not self._checkpointer.saving:
            self._failures = 0

    def save_last(self, position: Position) -> None:
        """The checkpoint a run ends with, committed when this returns.

        Raises:
            SaveError: it could not be written; the one before it is the newest.
        """
        try:
            self._checkpointer.finalize(blocking=True)
        except SaveError as error:
            self._monitor.say(f"warning: {error}; trying once more")
            self._saved = None
        if self._saved != position.step and position.step > 0:
            self._checkpointer.save(position.progress())
            self._checkpointer.finalize(blocking=True)
            self._saved = position.step
