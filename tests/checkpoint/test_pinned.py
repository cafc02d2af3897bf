"""The checkpoint to go back to from a danger: which one it is, and that age does not delete it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from test_newest import damage, name, run
from test_store import complete, save

from megatron_patch.checkpoint import newest, pinned
from megatron_patch.checkpoint.manifest import MANIFEST
from megatron_patch.checkpoint.store import CheckpointStore


def pin(store: CheckpointStore, danger: int, began: int) -> bool:
    names = store.directory.complete_names()
    return pinned.pin_before(store.root, names, danger=danger, began=began, good=store.is_whole)


def pins(store: CheckpointStore) -> list[str]:
    return sorted(pinned.read(store.root))


@pytest.fixture
def store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> CheckpointStore:
    caplog.set_level(logging.INFO)
    return run(tmp_path, 500, 1000, 1500)


@pytest.mark.parametrize(
    ("began", "chosen"),
    [(1501, 1500), (1500, 1000), (1001, 1000), (1000, 500), (500, 500), (1, 500)],
)
def test_the_newest_from_before_the_signs_or_the_oldest(store, began, chosen, caplog):
    assert pin(store, 1600, began)
    line = f"{name(chosen)} danger at step 1600, signs since step {began}\n"
    assert (store.root / pinned.FILE).read_text() == line
    which = "the newest from before" if chosen < began else "the oldest there is"
    assert f"checkpoint {name(chosen)} is pinned: {which}" in caplog.text
    assert "to go back to it: megatron-patch checkpoint rollback" in caplog.text


def test_it_outlives_age_and_what_the_same_signs_lead_to(store, caplog):
    store.keep_last = 2
    pin(store, 1100, 1050)
    for step in (2000, 2500, 3000):
        save(store, step)
    assert complete(store.root) == [name(1000), name(2500), name(3000)]
    again = run(store.root, 3500, keep=2)  # a restart
    caplog.clear()
    assert pin(again, 3600, 1050) and not caplog.text
    save(again, 4000)
    assert complete(store.root) == [name(1000), name(3500), name(4000)]
    (store.root / pinned.FILE).unlink()
    save(again, 4500)
    assert complete(store.root) == [name(4000), name(4500)]


def test_two_at_most(store):
    """The first stays whatever comes, a false alarm or not; of the later ones the last."""
    store.keep_last = 2
    pin(store, 1100, 1050)
    for danger in (20_000, 30_000, 40_000):
        for step in (danger - 500, danger - 100):
            save(store, step)
        assert pin(store, danger, danger - 200)
        for step in (danger + 500, danger + 1000):
            save(store, step)
        mine = [name(1000), name(danger - 500)]
        assert pins(store) == mine
        assert complete(store.root) == [*mine, name(danger + 500), name(danger + 1000)]


def test_another_danger_may_have_the_same_way_back(store):
    """Nothing was saved in the calm between: the line is of the last danger, and covers it."""
    assert pin(store, 1600, 1501) and pin(store, 1800, 1750)
    assert pinned.read(store.root) == {name(1500): "danger at step 1800, signs since step 1750"}


def test_what_a_person_pins_is_no_answer_to_a_danger(store):
    (store.root / pinned.FILE).write_text(f"{name(500)} a milestone\n\n {name(1500)}\n")
    assert pin(store, 1600, 1100)
    found = pinned.read(store.root)
    assert set(found) == {name(500), name(1000), name(1500)}
    assert found[name(500)] == "a milestone" and found[name(1500)] == ""
    # Where it is the one itself, the person's reason stays.
    (store.root / pinned.FILE).write_text(f"{name(1000)} an \x1b[31mold one")
    assert pin(store, 1600, 1100) and pinned.read(store.root) == {name(1000): "an ?[31mold one"}


def test_one_that_was_moved_aside_is_followed_by_another(store):
    """Its line stays: moved back, it is pinned again."""
    pin(store, 1600, 1100)
    moved = newest.go_back(store.directory, name(500))
    assert list(moved) == [name(1500), name(1000)]
    assert pin(store, 700, 600) and pins(store) == [name(500), name(1000)]


@pytest.mark.parametrize(
    ("line", "lost"),
    [(name(1000), False), (name(1000, 2), True), (name(10), True), ("", False),
     (f"{name(10)} danger at step 600, signs since step 50", False), (f"{name(500)} aside", False)],
)  # fmt: skip
def test_a_pin_of_nothing_is_told(store, line, lost, caplog):
    """A slip of the pen, and the checkpoint that is meant would go without a word."""
    store.directory.move_aside(store.root / name(500), "abandoned")
    (store.root / pinned.FILE).write_text(line + "\n")
    CheckpointStore(store.root).find()
    assert ("names step_" in caplog.text and "mend the line" in caplog.text) is lost


@pytest.mark.parametrize("line", ["1000", "step_00001000", "iter_0001000", "latest", "/a/b", "*"])
def test_a_line_that_names_no_checkpoint_stops_every_deletion(store, line, caplog):
    (store.root / pinned.FILE).write_text(line + "\n")
    store.keep_last = 1
    save(store, 2000)
    assert len(complete(store.root)) == 4 and "no old checkpoint is deleted" in caplog.text


def test_who_went_back_to_the_pinned_one_keeps_it(store):
    pin(store, 1600, 1100)
    newest.go_back(store.directory, name(1000))
    new = run(store.root, 1100, 1200, 1300, keep=1)
    assert pin(new, 1350, 1250) and pins(store) == [name(1000)]
    assert name(1000) in complete(store.root)
    save(new, 5000)
    assert pin(new, 5600, 5050) and pins(store) == [name(1000), name(5000)]


def test_only_what_is_complete(tmp_path):
    new = CheckpointStore(tmp_path / "new")
    new.begin(600)
    assert not pin(new, 600, 650) and not (tmp_path / "new" / pinned.FILE).exists()


def test_damaged_ones_are_passed_over(store):
    pin(store, 1600, 1501)
    assert pins(store) == [name(1500)]
    damage(store.root, 1500, "manifest")
    (store.root / name(1000) / MANIFEST).unlink()
    assert pin(store, 1700, 1501) and pins(store) == [name(500), name(1500)]
    damage(store.root, 500, "manifest")
    (store.root / pinned.FILE).unlink()
    assert not pin(store, 1600, 1501) and not (store.root / pinned.FILE).exists()


@pytest.mark.parametrize("text", ["[]", "step_0000", "step_500 x", "\xff"])
def test_a_damaged_file_deletes_nothing(store, text, caplog):
    store.keep_last = 1
    file = store.root / pinned.FILE
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(pinned.PinnedFileError, match=r"pinned: .*mend it, or delete it to pin"):
        pin(store, 1600, 1501)
    assert file.read_bytes() == text.encode("latin-1")
    save(store, 2000)
    assert len(complete(store.root)) == 4 and "no old checkpoint is deleted: " in caplog.text
    file.write_text(name(500))
    save(store, 2500)
    assert complete(store.root) == [name(500), name(2500)]


def test_a_link_to_nothing_and_a_folder_are_no_missing_file(store):
    file = store.root / pinned.FILE
    assert pinned.read(store.root) == {}
    file.symlink_to(store.root / "gone")
    with pytest.raises(pinned.PinnedFileError, match="symbolic link"):
        pinned.read(store.root)
    file.unlink()
    file.mkdir()
    with pytest.raises(pinned.PinnedFileError, match="not a plain file"):
        pinned.read(store.root)
