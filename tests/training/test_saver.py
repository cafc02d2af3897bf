"""When a failed save ends a run and when it does not."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_patch.checkpoint.errors import SaveError
from megatron_patch.checkpoint.store import CheckpointStore
from megatron_patch.checkpoint.train_state import TrainState
from megatron_patch.training.saver import MAX_FAILURES, Saver


class Disk:
    """A Checkpointer whose disk is full when told so; ``background`` saves fail when committed."""

    def __init__(self, *, background: bool = False) -> None:
        self.full, self.background, self.saving = False, background, False
        self.saved: list[int] = []
        self._step = 0
        self.store = self

    @property
    def saving_step(self) -> int | None:
        return self._step if self.saving else None

    def newest_at(self, step: int) -> int | None:
        return max((saved for saved in self.saved if saved <= step), default=None)

    def save(self, progress: TrainState) -> None:
        self.finalize(blocking=True)
        self._step, self.saving = progress.step, True
        if not self.background:
            self.finalize(blocking=True)

    def finalize(self, *, blocking: bool = False) -> bool:
        if self.saving:
            self.saving = False
            if self.full:
                raise SaveError("no space left on device")
            self.saved.append(self._step)
        return True


class Said(list[str]):
    """A Monitor that keeps what is said."""

    say = list.append


def make(*, background: bool = False) -> tuple[Saver, Disk, Said]:
    disk, said = Disk(background=background), Said()
    return Saver(disk, said), disk, said  # type: ignore[arg-type]


def failing_at(step: int) -> tuple[Saver, Disk, Said]:
    """A background save that will fail; the disk is cleared once that is known."""
    saver, disk, said = make(background=True)
    disk.full = True
    saver.save(TrainState(step))

    def say(message: str) -> None:
        said.append(message)
        disk.full = False

    said.say = say  # type: ignore[method-assign]
    return saver, disk, said


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_survived_twice_in_a_row(background):
    saver, disk, said = make(background=background)
    disk.full = True
    for step in range(1, MAX_FAILURES):
        saver.save(TrainState(step))
        saver.poll()
    assert len(said) == MAX_FAILURES - 1 and "no space left" in said[0]
    with pytest.raises(SaveError):
        saver.save(TrainState(9))
        saver.poll()


def test_a_good_save_starts_the_count_anew():
    saver, disk, _ = make()
    for step in range(1, 10):
        disk.full = step % MAX_FAILURES != 0
        saver.save(TrainState(step))
    assert disk.saved == [3, 6, 9]


def test_a_background_save_that_fails_late_costs_no_other():
    """It is still written when the next one is due."""
    saver, disk, said = failing_at(5)
    saver.save(TrainState(10))
    saver.poll()
    assert disk.saved == [10] and len(said) == 1


@pytest.mark.parametrize("background", [False, True])
def test_the_last_checkpoint_is_committed_once(background):
    saver, disk, _ = make(background=background)
    saver.save(TrainState(5))
    saver.save_last(TrainState(5))
    assert disk.saved == [5]
    saver.save_last(TrainState(6))
    assert disk.saved == [5, 6]


def test_a_failed_background_save_is_made_good_at_the_end():
    saver, disk, said = failing_at(5)
    saver.save_last(TrainState(5))
    assert disk.saved == [5] and "trying once more" in said[0]


def test_the_last_save_must_succeed():
    saver, disk, _ = make()
    disk.full = True
    with pytest.raises(SaveError):
        saver.save_last(TrainState(5))


def test_a_background_save_that_is_old_enough_is_something_to_go_back_to():
    """It is waited for; a later one would be given up, so it is not committed for it."""
    saver, disk, said = make(background=True)
    saver.save(TrainState(5))
    assert not saver.can_rewind(4) and disk.saving and not disk.saved
    assert saver.can_rewind(5) and disk.saved == [5]
    disk.full = True
    saver.save(TrainState(6))
    assert saver.can_rewind(6) and disk.saved == [5] and "no space left" in said[0]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Saver, Path]:
    """Checkpoints of steps 2, 4 and 8."""
    store = CheckpointStore(tmp_path, keep_last=None)
    for step in (2, 4, 8):
        save(store, step)

    def reload() -> TrainState:
        found = store.find()
        assert found is not None
        return TrainState(step=found.manifest.step)

    checkpointer = SimpleNamespace(
        store=store,
        saving=False,
        saving_step=None,
        abandon_after=store.abandon_after,
        reload=reload,
    )
    return Saver(checkpointer, Said()), tmp_path  # type: ignore[arg-type]


def damage(root: Path, step: int) -> None:
    shard = root / f"step_{step:08d}.attempt-1" / "shard"
    shard.write_bytes(shard.read_bytes().swapcase())


def save(store: CheckpointStore, step: int) -> None:
    attempt = store.begin(step)
    (attempt.path / "shard").write_bytes(b"some weights")
    store.commit(attempt, store.hash_files(attempt, ["shard"]), {})


def test_nothing_is_given_up_for_a_damaged_checkpoint(stored):
    """The newest is good, and the next start must find it."""
    saver, root = stored
    before = sorted(os.listdir(root))
    damage(root, 2)
    damage(root, 4)
    assert not saver.can_rewind(6)
    assert sorted(os.listdir(root)) == before
    assert (root / "latest").read_text() == "step_00000008.attempt-1\n"


def test_a_rewind_passes_over_a_damaged_checkpoint(stored):
    """The batches that are left out are counted from where it really goes."""
    saver, root = stored
    damage(root, 4)
    told: list[int] = []
    assert saver.can_rewind(6)
    assert saver.rewind(6, told.append).step == 2 and told == [2]
    assert (root / "latest").read_text() == "step_00000002.attempt-1\n"
    aside = sorted(name.split(".2")[0] for name in os.listdir(root / "aside"))
    assert aside == ["step_00000004.attempt-1.abandoned", "step_00000008.attempt-1.abandoned"]


def test_a_position_advances():
    position = TrainState(step=4, consumed_samples=32, consumed_tokens=1024)
    position.advance(sequences=8, length=32)
    assert (position.step, position.consumed_samples, position.consumed_tokens) == (5, 40, 1280)
