"""Going back leaves a branch behind: nothing returns to it, and retention does not count it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_store import aside, complete, save

from megatron_patch.checkpoint import lineage
from megatron_patch.checkpoint.errors import CheckpointError
from megatron_patch.checkpoint.manifest import MANIFEST
from megatron_patch.checkpoint.store import CheckpointStore


def name(step: int, attempt: int = 1) -> str:
    return f"step_{step:08d}.attempt-{attempt}"


def damage(root: Path, step: int, how: str = "bit", attempt: int = 1) -> None:
    folder = root / name(step, attempt)
    if how == "manifest":
        (folder / MANIFEST).write_bytes(b"{")
        return
    if how == "unreadable":  # as a folder it can be listed, and not read as a file
        (folder / MANIFEST).unlink()
        (folder / MANIFEST).mkdir()
        return
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes().swapcase())


def point(root: Path, step: int) -> None:
    (root / "latest").write_text(name(step) + "\n")


def run(root: Path, *steps: int, keep: int | None = None) -> CheckpointStore:
    """A process: looks for a checkpoint, continues it, saves."""
    store = CheckpointStore(root, keep_last=keep)
    store.find()
    for step in steps:
        save(store, step)
    return store


@pytest.fixture
def went_back(tmp_path: Path) -> Path:
    """500, 1000, 1500, 2000; back to 1000; 1100."""
    run(tmp_path, 500, 1000, 1500, 2000)
    point(tmp_path, 1000)
    store = run(tmp_path, 1100)
    assert store.check(tmp_path / name(1100)).manifest.info["parent"] == name(1000)
    assert store.check(tmp_path / name(500)).manifest.info["parent"] is None
    return tmp_path


@pytest.mark.parametrize("how", ["bit", "manifest", "unreadable"])
def test_a_damaged_one_is_followed_by_its_parent(
    went_back: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Also at the next start, when the damaged one is gone and ``latest`` still names it."""
    damage(went_back, 1100, how)
    assert CheckpointStore(went_back).find().path.name == name(1000)
    assert f"continuing from the older checkpoint {name(1000)}" in caplog.text
    assert CheckpointStore(went_back).find().path.name == name(1000)
    damage(went_back, 1000)
    assert CheckpointStore(went_back).find().path.name == name(500)


def test_manifests_alone_say_it_too(went_back: Path) -> None:
    (went_back / "lineage").unlink()
    damage(went_back, 1100)
    assert CheckpointStore(went_back).find().path.name == name(1000)


def test_what_was_left_behind_is_not_taken_unasked(went_back: Path) -> None:
    for step in (1100, 1000, 500):
        damage(went_back, step)
    before = complete(went_back)
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            CheckpointStore(went_back).find()
        assert f"{name(2000)}, {name(1500)}; to continue" in str(error.value)
        assert f"write its name into {went_back / 'latest'}" in str(error.value)
        assert error.value.exit_code == 4
    assert complete(went_back) == before and aside(went_back) == []
    point(went_back, 1500)
    assert CheckpointStore(went_back).find().path.name == name(1500)


def test_going_back_to_a_damaged_one(tmp_path: Path) -> None:
    """Who went back from 2000 does not want it, whatever is wrong with 1000."""
    run(tmp_path, 500, 1000, 1500, 2000)
    point(tmp_path, 1000)
    damage(tmp_path, 1000)
    assert CheckpointStore(tmp_path).find().path.name == name(500)


def test_a_lost_pointer_means_the_branch_saved_last(went_back: Path) -> None:
    (went_back / "latest").unlink()
    assert CheckpointStore(went_back).find().path.name == name(1100)


def test_stores_of_earlier_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody recorded parents: newest first, and what is newer than ``latest`` comes last."""
    for step in (500, 1000, 1500, 2000):
        save(CheckpointStore(tmp_path, keep_last=None), step)  # never looked: writes no parent
    (tmp_path / "lineage").unlink()
    assert CheckpointStore(tmp_path).find().path.name == name(2000)
    damage(tmp_path, 2000)
    assert CheckpointStore(tmp_path).find(move_aside=False).path.name == name(1500)
    point(tmp_path, 1000)
    damage(tmp_path, 1000)
    assert CheckpointStore(tmp_path).find(move_aside=False).path.name == name(500)
    damage(tmp_path, 500)
    caplog.clear()
    assert CheckpointStore(tmp_path).find(move_aside=False).path.name == name(1500)
    assert f"continuing from {name(1500)}, which is NEWER than {name(1000)}" in caplog.text
    assert "older checkpoint" not in caplog.text


def test_an_earlier_version_went_on_by_this_one(tmp_path: Path) -> None:
    for step in (500, 1000, 1500):
        save(CheckpointStore(tmp_path, keep_last=None), step)
    (tmp_path / "lineage").unlink()
    point(tmp_path, 1000)
    run(tmp_path, 1100)
    damage(tmp_path, 1100)
    damage(tmp_path, 1000)
    assert CheckpointStore(tmp_path).find().path.name == name(500)


def test_retention_keeps_the_last_of_the_branch_that_is_trained(tmp_path: Path) -> None:
    run(tmp_path, 500, 1000, 1500, 2000, 2500, keep=3)
    point(tmp_path, 1500)
    store = run(tmp_path, 2000, 2500, keep=3)
    live = [name(1500), name(2000, 2), name(2500, 2)]
    assert complete(tmp_path) == sorted([*live, name(2500)])
    save(store, 3000)
    assert complete(tmp_path) == sorted([name(2000, 2), name(2500), name(2500, 2), name(3000)])
    save(store, 3500)  # the one left behind is as old as any now
    assert complete(tmp_path) == [name(2500, 2), name(3000), name(3500)]


def test_saves_off_the_interval_do_not_push_out_what_a_rewind_needs(tmp_path: Path) -> None:
    """Steps 5 to 7 are graceful stops; the newest that is 4 steps older than the newest stays."""
    store = CheckpointStore(tmp_path, keep_last=2, keep_behind=4)
    kept = []
    for step in (4, 5, 6, 7, 8, 9, 10, 12, 16):
        save(store, step)
        kept.append([int(left[5:13]) for left in complete(tmp_path)])
    assert kept[:5] == [[4], [4, 5], [4, 5, 6], [4, 6, 7], [4, 7, 8]]
    assert kept[5:] == [[4, 8, 9], [4, 9, 10], [4, 10, 12], [12, 16]]


def test_a_rewind_stays_on_the_branch(tmp_path: Path) -> None:
    """The newest before step 1600 is 1400, though 1500 of the other branch lies between."""
    run(tmp_path, 500, 1000, 1500, 2000)
    point(tmp_path, 1000)
    store = run(tmp_path, 1100, 1400, 1700)
    assert store.newest_at(1600) == 1400
    store.abandon_after(1600)
    assert (tmp_path / "latest").read_text().strip() == name(1400)
    assert store.find().path.name == name(1400)
    save(store, 1700)
    assert store.check(tmp_path / name(1700, 2)).manifest.info["parent"] == name(1400)
    assert name(1500) in complete(tmp_path)
    assert [left.split(".abandoned")[0] for left in aside(tmp_path)] == [name(1700), name(2000)]


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    lineage.record(tmp_path, name(1), lineage.NONE)
    with (tmp_path / "lineage").open("a") as file:
        file.write(f"{name(2)} step_000\n../../x {name(1)}\n{name(3)} {name(1)[:9]}")
    lineage.record(tmp_path, name(4), name(1))
    found = lineage.recorded(tmp_path)
    assert found.parents == {name(1): None, name(4): name(1)} and found.last == name(4)
    (tmp_path / "lineage").write_bytes(f"{name(1)} {name(4)}\n{name(4)} {name(1)}\n".encode())
    loop = lineage.recorded(tmp_path)
    branch = lineage.branch([name(4), name(1)], name(4), loop, loop.parents.__getitem__)
    assert branch.live == [name(4), name(1)] and not branch.other
