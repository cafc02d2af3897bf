"""The checkpoint to go back to from a danger: which one it is, and that age does not delete it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from test_lineage import damage, name, point, run
from test_store import complete, save

from megatron_patch.checkpoint import keeping
from megatron_patch.checkpoint.manifest import MANIFEST
from megatron_patch.checkpoint.store import CheckpointStore


def keep(store: CheckpointStore, danger: int, began: int) -> bool:
    return keeping.keep(
        store.root, store.trained(), danger=danger, began=began, good=store.is_whole
    )


@pytest.fixture
def store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> CheckpointStore:
    caplog.set_level(logging.INFO)
    return run(tmp_path, 500, 1000, 1500)


@pytest.mark.parametrize(
    ("began", "chosen"),
    [(1501, 1500), (1500, 1000), (1001, 1000), (1000, 500), (500, 500), (1, 500)],
)
def test_the_newest_from_before_the_signs_or_the_oldest(
    store: CheckpointStore, began: int, chosen: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert keep(store, 1600, began)
    kept = keeping.read(store.root)
    assert kept == {name(chosen): keeping.Kept(danger=1600, since=began)}
    assert str(kept[name(chosen)]) == f"danger at step 1,600, signs since step {began:,}"
    which = "the newest from before" if chosen < began else "the oldest there is"
    assert f"checkpoint {name(chosen)} is kept: {which}" in caplog.text
    assert "danger at step 1,600; to go back to it see docs/checkpoints.md, going" in caplog.text


def test_danger_without_a_watch_before_it(store: CheckpointStore) -> None:
    assert keep(store, 1500, 1500)
    (kept,) = keeping.read(store.root).items()
    assert kept[0] == name(1000) and str(kept[1]) == "danger at step 1,500"


def test_it_outlives_age_and_what_the_same_signs_lead_to(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.keep_last = 2
    keep(store, 1100, 1050)
    for step in (2000, 2500, 3000):
        save(store, step)
    assert complete(store.root) == [name(1000), name(2500), name(3000)]
    again = run(store.root, 3500, keep=2)  # a restart
    caplog.clear()
    assert keep(again, 3600, 1050) and not caplog.text
    save(again, 4000)
    assert complete(store.root) == [name(1000), name(3500), name(4000)]
    (store.root / keeping.FILE).unlink()
    save(again, 4500)
    assert complete(store.root) == [name(4000), name(4500)]


def test_a_danger_after_a_calm_keeps_one_of_its_own(store: CheckpointStore) -> None:
    """The first stays whatever comes, a false alarm or not; of the later ones the last."""
    store.keep_last = 2
    keep(store, 1100, 1050)
    for danger in (20_000, 30_000, 40_000):
        for step in (danger - 500, danger - 100):
            save(store, step)
        assert keep(store, danger, danger - 200)
        for step in (danger + 500, danger + 1000):
            save(store, step)
        mine = [name(1000), name(danger - 500)]
        assert list(keeping.read(store.root)) == mine
        assert complete(store.root) == [*mine, name(danger + 500), name(danger + 1000)]


def test_another_danger_may_have_the_same_way_back(store: CheckpointStore) -> None:
    """Nothing was saved in the calm between: the entry is of the last danger, and covers it."""
    assert keep(store, 1600, 1501) and keep(store, 1800, 1750)
    assert keeping.read(store.root) == {name(1500): keeping.Kept(danger=1800, since=1750)}


def test_what_a_person_keeps_is_no_answer_to_a_danger(store: CheckpointStore) -> None:
    by_hand = {name(500): "a milestone", name(1500): ""}
    (store.root / keeping.FILE).write_text(json.dumps(by_hand))
    assert keep(store, 1600, 1100)
    kept = keeping.read(store.root)
    assert set(kept) == {name(500), name(1000), name(1500)}
    assert str(kept[name(500)]) == "a milestone" and str(kept[name(1500)]) == "without a reason"
    # Where it is the one itself, the person's word stays.
    (store.root / keeping.FILE).write_text(json.dumps({name(1000): "an \x1b[31mold\n one"}))
    assert keep(store, 1600, 1100)
    assert {n: str(k) for n, k in keeping.read(store.root).items()} == {
        name(1000): "an ?[31mold? one"
    }


def test_one_that_is_gone_is_followed_by_another(store: CheckpointStore) -> None:
    keep(store, 1600, 1100)
    store.abandon_after(500)  # a rewind
    found = CheckpointStore(store.root, keep_last=1)
    found.find()
    assert found.trained() == [name(500)] and keep(found, 700, 600)
    assert set(keeping.read(store.root)) == {name(1000), name(500)}


def test_the_branch_left_behind_is_not_the_one_that_is_trained(store: CheckpointStore) -> None:
    """What was kept for it stays; the new branch gets one of its own."""
    keep(store, 1600, 1501)
    point(store.root, 1000)
    new = run(store.root, 1400, 1700)
    assert keep(new, 1800, 1600)
    new.keep_last = 1
    assert set(keeping.read(store.root)) == {name(1500), name(1400)}
    save(new, 2000)
    assert complete(store.root) == [name(1400), name(1500), name(2000)]


def test_who_went_back_to_the_kept_one_keeps_it(store: CheckpointStore) -> None:
    keep(store, 1600, 1100)
    point(store.root, 1000)
    new = run(store.root, 1100, 1200, 1300, keep=1)
    assert keep(new, 1350, 1250) and list(keeping.read(store.root)) == [name(1000)]
    assert name(1000) in complete(store.root)
    save(new, 5000)
    assert keep(new, 5600, 5050) and set(keeping.read(store.root)) == {name(1000), name(5000)}


def test_only_what_is_complete_and_this_runs_own(tmp_path: Path) -> None:
    run(tmp_path, 500)
    never = CheckpointStore(tmp_path)  # resume: never
    assert not keep(never, 600, 600) and not (tmp_path / keeping.FILE).exists()
    save(never, 1000)  # its parent is not known: what lies before it is another training's
    assert keep(never, 1100, 1050) and list(keeping.read(tmp_path)) == [name(1000)]
    new = CheckpointStore(tmp_path / "new")
    new.find()  # and then load_from another run
    assert not keep(new, 600, 600)
    new.begin(600)
    assert not keep(new, 600, 650) and not (tmp_path / "new" / keeping.FILE).exists()


def test_damaged_ones_are_passed_over(store: CheckpointStore) -> None:
    damage(store.root, 1000, "manifest")
    (store.root / name(1500) / MANIFEST).unlink()
    keep(store, 1600, 1501)
    assert list(keeping.read(store.root)) == [name(500)]


def test_a_kept_one_that_was_damaged_is_joined_by_another(store: CheckpointStore) -> None:
    keep(store, 1600, 1501)
    damage(store.root, 1500, "manifest")
    assert keep(store, 1700, 1501) and set(keeping.read(store.root)) == {name(1500), name(1000)}


def test_nothing_to_keep_where_all_are_damaged(store: CheckpointStore) -> None:
    for step in (500, 1000, 1500):
        damage(store.root, step, "manifest")
    assert not keep(store, 1600, 1501) and not (store.root / keeping.FILE).exists()


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"step_0000', '{"step_500": "x"}', '{"step_00000500.attempt-1": 5}', "\xff"),
        *("[" * 100_000, '{"step_00000500.attempt-1": {"danger": 5}}'),
        '{"step_00000500.attempt-1": {"danger": 5, "signs_since": "4"}}',
    ],
)
def test_a_damaged_file_deletes_nothing(
    store: CheckpointStore, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.keep_last = 1
    file = store.root / keeping.FILE
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(keeping.KeptFileError, match=r"kept.json: .*put the right one back, e.g."):
        keep(store, 1600, 1501)
    assert file.read_bytes() == text.encode("latin-1")
    save(store, 2000)
    assert complete(store.root) == [name(500), name(1000), name(1500), name(2000)]
    assert "no old checkpoint is deleted: " in caplog.text
    file.write_text(json.dumps({name(500): ""}))
    save(store, 2500)
    assert complete(store.root) == [name(500), name(2500)]


def test_a_link_to_nothing_and_a_folder_are_no_missing_file(store: CheckpointStore) -> None:
    file = store.root / keeping.FILE
    assert keeping.read(store.root) == {}
    file.symlink_to(store.root / "gone")
    with pytest.raises(keeping.KeptFileError, match="symbolic link"):
        keeping.read(store.root)
    file.unlink()
    file.mkdir()
    with pytest.raises(keeping.KeptFileError, match="not a plain file"):
        keeping.read(store.root)
