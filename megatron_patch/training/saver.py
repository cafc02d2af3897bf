"""Checkpoints of the training loop: when a failed save is survived, and which one is pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_patch.checkpoint import host_memory, pinned
from megatron_patch.checkpoint.directory import key_of
from megatron_patch.checkpoint.errors import SaveError
from megatron_patch.checkpoint.train_state import TrainState
from megatron_patch.schema.problem import ConfigError
from megatron_patch.stability import record

if TYPE_CHECKING:
    from megatron_patch.checkpoint.megatron import Checkpointer
    from megatron_patch.monitor.hub import Monitor

MAX_FAILURES = 3
"""Periodic saves that may fail in a row before the run ends: it would train for nothing."""


def check_host_memory(checkpointer: Checkpointer, monitor: Monitor) -> None:
    """Log what a save takes of each node's memory; refuse what cannot be. Collective.

    Raises ConfigError: the first save would end the run.
    """
    sharding = checkpointer.run.checkpoint.optimizer_sharding
    line, problems = host_memory.check(checkpointer.parts, sharding, checkpointer.ranks)
    monitor.say(line)
    if problems:
        raise ConfigError(problems)


class Saver:
    """Checkpoints of the loop. Every method is collective that does not say otherwise."""

    def __init__(self, checkpointer: Checkpointer, monitor: Monitor) -> None:
        self.checkpointer, self._monitor = checkpointer, monitor
        self._saved: int | None = None
        self._failures = 0
        self._covered: int | None = None  # the last danger that nothing more is pinned for
        self._logged = ""
        self.back_to: int | None = None
        """Where `rewind` goes: what `can_rewind` found last."""

    def save(self, state: TrainState) -> None:
        """A periodic checkpoint. A failure (full disk) is logged and survived a few times.

        Raises SaveError: it failed MAX_FAILURES times in a row.
        """
        # A background save that is still written, and fails, is no reason to leave this one out.
        self.poll(blocking=True)
        self._attempt(lambda: self.checkpointer.save(state), state.step)

    def poll(self, *, blocking: bool = False) -> None:
        """Commit a background save that is ready, or will be; fails as `save` does."""
        if self.checkpointer.saving:
            self._attempt(lambda: self.checkpointer.finalize(blocking=blocking), self._saved)

    def save_last(self, state: TrainState) -> None:
        """The checkpoint a run ends with, committed when this returns.

        Raises SaveError: it could not be written; the one before it is the newest.
        """
        try:
            self.checkpointer.finalize(blocking=True)
        except SaveError as error:
            self._monitor.say(f"warning: {error}; trying once more")
            self._saved = None
        if self._saved != state.step and state.step > 0:
            self.checkpointer.save(state)
            self.checkpointer.finalize(blocking=True)
            self._saved = state.step

    def _attempt(self, work: Callable[[], object], step: int | None) -> None:
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
        if not self.checkpointer.saving:
            self._failures = 0

    # ------------------------------------------------------------- going back

    def can_rewind(self, step: int) -> bool:
        """Whether there is a good checkpoint of at most ``step``: the one `rewind` goes to.

        It is verified here, before anything is given up for it, and a background save of at most
        ``step`` is waited for. A later one is left alone: a rewind gives it up.

        Raises:
            CheckpointError: the checkpoints cannot be listed.
            SaveError: as `save`.
        """
        saving = self.checkpointer.saving_step
        if saving is not None and saving <= step:
            self._attempt(lambda: self.checkpointer.finalize(blocking=True), saving)
        self.back_to = self.checkpointer.store.newest_at(step)
        return self.back_to is not None

    def rewind(self, step: int, plan: Callable[[int], None]) -> TrainState:
        """Go back to the checkpoint that ``can_rewind(step)`` found; later ones are moved aside.

        ``plan`` is called with its step, after the move and before the load.

        Raises CheckpointError: it is not good any more, and none before it is.
        """
        back_to = self.back_to
        assert back_to is not None and back_to <= step
        self.checkpointer.abandon_after(back_to)
        plan(back_to)
        state = self.checkpointer.reload()
        self._saved, self._failures = state.step, 0
        self._covered = None  # the pinned one may be among those moved aside
        return state

    def keep_before_danger(self, step: int) -> None:
        """Pin the checkpoint to go back to from the danger at the record of ``step``. Local.

        Called at every record at danger: before a save of that step deletes older ones, and again
        while there was none to pin. Only the first rank pins and deletes; a failure is logged, and
        no reason to end the run.
        """
        store = self.checkpointer.store
        if store.ranks.rank != 0:
            return
        try:
            names = [] if self._covered else store.directory.complete_names()
            began = self._signs_began(step, names)
            if not self._covered or began > self._covered:  # after a calm
                names = names or store.directory.complete_names()
                if not pinned.pin_before(
                    store.root, names, danger=step, began=began, good=store.is_whole
                ):
                    return
            self._covered, self._logged = step, ""
        except Exception as error:  # the other ranks wait, and this is no reason to end a run
            if str(error) != self._logged:
                self._monitor.say(
                    f"warning: no checkpoint from before the danger is pinned: {error}"
                )
            self._logged = str(error)

    def _signs_began(self, danger: int, names: list[str]) -> int:
        """No further back than it matters: to the last danger, or the oldest checkpoint."""
        until = self._covered or min((key_of(name)[0] for name in names), default=0)
        try:
            found = record.read(self.checkpointer.run.directory)
            return found.signs_began(danger, until=until)
        except (OSError, ValueError, LookupError, TypeError):  # no records: before it, at least
            return danger
