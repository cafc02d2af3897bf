"""The newest complete checkpoint is the one to continue, and going back moves newer ones aside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_store import aside, complete, save

from megatron_patch.checkpoint import inspect, newest, pinned
from megatron_patch.checkpoint.directory import FORMAT, IDENTITY, LATEST, NEXT, CheckpointDirectory
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


def point(root: Path, step: int, attempt: int = 1) -> None:
    (root / LATEST).write_text(name(step, attempt) + "\n")


def latest(root: Path) -> str:
    return (root / LATEST).read_text()


def run(root: Path, *steps: int, keep: int | None = None) -> CheckpointStore:
    """A process: looks for a checkpoint, continues it, saves."""
    store = CheckpointStore(root, keep_last=keep)
    store.find()
    for step in steps:
        save(store, step)
    return store


def found(root: Path) -> str:
    checkpoint = CheckpointStore(root).find()
    assert checkpoint is not None
    return checkpoint.path.name


def moved(root: Path) -> list[str]:
    """Names of what was moved aside."""
    return [left.split(".2")[0].rpartition(".")[0] for left in aside(root) if left[:4] == "step"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """500, 1000, 1500 and 2000, written by this version."""
    run(tmp_path, 500, 1000, 1500, 2000)
    assert latest(tmp_path) == name(2000) + "\n"
    return tmp_path


def of_earlier_version(root: Path, *lines: str) -> None:
    """Make the store one that the version before wrote: no format, and its ``lineage``."""
    facts = json.loads((root / IDENTITY).read_text())
    assert facts.pop("format") == FORMAT
    (root / IDENTITY).write_text(json.dumps(facts) + "\n")
    (root / "lineage").write_text("".join(line + "\n" for line in lines))


def snapshot(root: Path) -> dict[str, bytes | str | None]:
    """Every entry of a store but its shards, and what it holds."""
    return {
        os.fspath(p): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in sorted(root.rglob("*"))
        if p.name != "__0_0.distcp"
    }


def wished(pointer: Path, wish: str, text: str) -> None:
    """Make of ``latest`` what a person does."""
    if pointer.is_dir() and not pointer.is_symlink():
        pointer.rmdir()
    pointer.unlink(missing_ok=True)
    if wish == "a directory":
        pointer.mkdir()
    elif wish.startswith("a link"):
        pointer.symlink_to(text)
    else:
        pointer.write_text(text)


WISHES = {
    "other trainers": "step_00000010",
    "a step": "1000\n",
    "Megatron-LM": "iter_0000500",
    "the beginning of another": "step_0000050",
    "absolute, the newest": "{root}/step_00001500.attempt-1/\n",
    "long": "/" + "a/" * 1000 + "1000",
    "moved aside": "step_00002000.attempt-1",
    "incomplete": "step_00001700.attempt-1.tmp",
    "two": "step_00001000.attempt-1\nstep_00001500.attempt-1\n",
    "prose": "please go back\n",
    "a link to the newest": "{root}/step_00001500.attempt-1",
    "a link to nothing": "gone",
    "a directory": "",
}
"""What a person makes of ``latest``."""


LINE = [f"{name(500)} -", *(f"{name(s)} {name(s - 500)}" for s in (1000, 1500, 2000))]


class TestLatest:
    """The four cases of issue 40: honoured once, refused later in two ways, recovered."""

    @pytest.mark.parametrize("lines", [LINE, []])
    def test_an_older_one_in_a_store_of_an_earlier_version_is_honoured_once(
        self, store, caplog, lines
    ):
        of_earlier_version(store, *lines)
        point(store, 1000)
        assert found(store) == name(1000)
        assert moved(store) == [name(1500), name(2000)] and complete(store) == [
            name(500),
            name(1000),
        ]
        assert f"is of an earlier version, and its run was at {name(1000)}: moving" in caplog.text
        assert f"aside/ ({name(2000)}, {name(1500)})" in caplog.text
        run(store, 1500)
        point(store, 1000)  # once
        with pytest.raises(CheckpointError, match="is newer"):
            found(store)

    def test_an_older_one_is_refused_later(self, store):
        point(store, 1000)
        for _ in range(2):
            with pytest.raises(CheckpointError) as error:
                found(store)
            command = f"megatron-patch checkpoint rollback {store} --to"
            assert str(error.value) == (
                f"{store / LATEST} names {name(1000)}, and {name(2000)} is newer; to go back, "
                f"which moves newer ones aside: {command} {name(1000)}; to continue from the "
                f"newest: {command} {name(2000)}"
            )
            assert error.value.exit_code == 4
        assert len(complete(store)) == 4 and not aside(store)

    def test_one_that_is_not_there_is_refused_later(self, store):
        point(store, 1250)
        with pytest.raises(CheckpointError, match="is not a complete checkpoint here") as error:
            found(store)
        assert str(error.value).endswith(f"rollback {store} --to {name(2000)}")

    @pytest.mark.parametrize(
        "data",
        [None, b"", b"\n", b"\0" * 24, b"step_0000", b"step_00002000.att\0\0\0\0\0\0",
         b"step_00002000", b"\xff\n", b"step_0000\x802000.attempt-1", b"st\0p_00001000.attempt-1"],
    )  # fmt: skip
    def test_an_empty_or_torn_one_recovers_with_a_warning(self, store, caplog, data):
        """What a crash leaves: nothing, NUL bytes, the beginning of the name, bytes of no text."""
        (store / LATEST).unlink()
        if data is not None:
            (store / LATEST).write_bytes(data)
        assert found(store) == name(2000)
        assert f"taking the newest, {name(2000)}" in caplog.text
        run(store, 2500)
        assert latest(store) == name(2500) + "\n"

    @pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16"])
    def test_an_editor_s_spelling_of_the_name_is_the_name(self, store, codec, caplog):
        for text in ("{}\n", "{}\r\n", " {} \n\n", "{}\0\0"):
            (store / LATEST).write_bytes(text.format(name(2000)).encode(codec))
            assert found(store) == name(2000) and not caplog.text
            (store / LATEST).write_bytes(text.format(name(1000)).encode(codec))
            with pytest.raises(CheckpointError, match=f"--to {name(1000)}; to continue"):
                found(store)

    @pytest.mark.parametrize("earlier_version", [False, True])
    def test_a_wish_is_refused_with_the_commands(self, store, earlier_version):
        """And nothing is rewritten, by however many starts, a look or a pruning."""
        newest.go_back(CheckpointDirectory(store), name(1500))  # 2000 is aside
        (store / (name(1700) + ".tmp")).mkdir()
        if earlier_version:
            of_earlier_version(store, *LINE[:3])
        command = f"megatron-patch checkpoint rollback {store} --to "
        for wish, text in WISHES.items():
            wished(store / LATEST, wish, text.format(root=store))
            before = snapshot(store)
            for look in (found, found, run):
                with pytest.raises(CheckpointError) as error:
                    look(store)
                assert error.value.exit_code == 4, wish
            told = str(error.value)
            assert told.startswith(f"{store / LATEST} "), wish
            assert told.endswith(f"; to continue from the newest: {command}{name(1500)}"), wish
            assert f"aside: {command}STEP;" in told, wish
            assert ("(it was moved to" in told) is (wish == "moved aside"), wish
            with pytest.raises(CheckpointError, match=f"checkpoint.load_from: {store}/step_0000"):
                CheckpointStore(store).find(own=False)
            if wish != "moved aside":  # a name: prune keeps what it names, were it there
                with pytest.raises(CheckpointError):
                    inspect.plan(store, [], last=1, every=None)
            assert snapshot(store) == before, wish
        for wish in ("a link to nothing", "a directory", "prose"):
            wished(store / LATEST, wish, WISHES[wish])
            inspect.roll_back(store, name(1500))
            assert found(store) == name(1500) and latest(store) == name(1500) + "\n"

    def test_another_run_s_store_is_judged_alike_and_not_changed(self, store):
        """``load_from``."""
        reader = CheckpointStore(store)
        of_earlier_version(store, *LINE)
        point(store, 1000)
        before = sorted(os.listdir(store))
        assert reader.find(own=False).path.name == name(1000)  # type: ignore[union-attr]
        damage(store, 1000)
        assert reader.find(own=False).path.name == name(500)  # type: ignore[union-attr]
        assert sorted(os.listdir(store)) == before
        newest.go_back(reader.directory, name(1500))
        point(store, 500)
        with pytest.raises(CheckpointError, match="is newer"):
            reader.find(own=False)


class TestEarlierVersion:
    """What its ``latest`` had left behind is never the newest of those that stay."""

    @pytest.fixture
    def went_back(self, tmp_path: Path) -> Path:
        """500, 1000, 1500, 2000; back to 1000; 1100 and 1700, which ``latest`` names."""
        run(tmp_path, 500, 1000, 1100, 1500, 1700, 2000)
        other = [f"{name(1100)} {name(1000)}", f"{name(1700)} {name(1100)}"]
        of_earlier_version(tmp_path, *LINE, *other)
        point(tmp_path, 1700)
        return tmp_path

    def test_both_sides_of_the_branch_that_is_trained(self, went_back):
        """1500 is older than 1700, and would come next when that is damaged."""
        assert found(went_back) == name(1700)
        assert moved(went_back) == [name(1500), name(2000)]
        assert "lineage" in aside(went_back), "which says nothing of what is saved from now on"
        damage(went_back, 1700)
        assert found(went_back) == name(1100)

    def test_a_lost_pointer_means_the_branch_saved_last(self, went_back):
        (went_back / LATEST).unlink()
        assert found(went_back) == name(1700)

    def test_it_need_not_be_there_any_more(self, went_back):
        """Moved aside as damaged by the start before."""
        os.rename(went_back / name(1700), went_back / "gone")
        assert found(went_back) == name(1100) and latest(went_back) == name(1100) + "\n"

    def test_nothing_older_is_for_a_person(self, went_back):
        for step in (500, 1000, 1100, 1700):
            os.rename(went_back / name(step), went_back / f"gone-{step}")
        for _ in range(2):
            with pytest.raises(
                CheckpointError, match="to continue from the newest: megatron-patch"
            ):
                found(went_back)
        newest.go_back(CheckpointDirectory(went_back), name(1500))
        assert found(went_back) == name(1500) and moved(went_back) == [name(2000)]

    def test_a_save_without_a_look_takes_it_over_as_well(self, went_back):
        save(CheckpointStore(went_back, keep_last=None), 1800)
        assert found(went_back) == name(1800) and name(2000) not in complete(went_back)

    def test_what_nobody_recorded_is_older_still(self, tmp_path):
        """Stores of before ``lineage``, gone on by the version before; torn lines."""
        run(tmp_path, 500, 1000, 1100, 1500)
        torn = [f"{name(2)} step_000", f"../../x {name(1)}", f"{name(1500)} {name(1)[:9]}"]
        of_earlier_version(tmp_path, f"{name(1100)} {name(1000)}", *torn, f"{name(500)} ?")
        point(tmp_path, 1100)
        assert found(tmp_path) == name(1100) and complete(tmp_path) == [
            name(500),
            name(1000),
            name(1100),
        ]

    def test_a_loop_in_it_ends(self, went_back):
        lines = f"{name(1500)} {name(1700)}\n{name(1700)} {name(1500)}\n"
        (went_back / "lineage").write_text(lines)
        assert found(went_back) == name(1700)

    def test_kept_json_becomes_pinned(self, went_back):
        kept = {name(500): {"danger": 560, "signs_since": 505}, name(1000): "before the\nnew data"}
        (went_back / "kept.json").write_text(json.dumps(kept))
        told = {
            name(500): "danger at step 560, signs since step 505",
            name(1000): "before the new data",
        }
        assert pinned.read(went_back) == told, "before the first start, as well"
        run(went_back, 1800, keep=1)
        assert pinned.read(went_back) == told and complete(went_back) == [
            name(500),
            name(1000),
            name(1800),
        ]
        assert not (went_back / "kept.json").exists() and "kept.json" in aside(went_back)

    @pytest.mark.parametrize("text", ["", "[]", '{"step_0000', '{"x": "y"}', "[" * 100_000])
    def test_a_damaged_kept_json_deletes_nothing(self, went_back, text, caplog):
        (went_back / "kept.json").write_text(text)
        run(went_back, 1800, keep=1)
        assert len(complete(went_back)) == 5
        assert "no old checkpoint is deleted: " in caplog.text and "kept.json: " in caplog.text


def test_a_rewind(store):
    checkpoints = CheckpointStore(store, keep_last=None)
    assert checkpoints.newest_at(1600) == 1500
    checkpoints.abandon_after(1600)
    assert latest(store) == name(1500) + "\n" and found(store) == name(1500)
    save(checkpoints, 2000)
    assert complete(store)[-1] == name(2000, 2), "numbers of those moved aside are not used again"
    with pytest.raises(CheckpointError, match="and no checkpoint of step 400 or before"):
        checkpoints.abandon_after(400)


def test_a_save_of_an_earlier_step_leaves_no_newer_one(store):
    """Its training did not continue them: the next start must not, either."""
    save(CheckpointStore(store, keep_last=None), 1200)
    assert complete(store) == [name(500), name(1000), name(1200)]
    with pytest.raises(CheckpointError, match="no checkpoint of step 100 or before"):
        save(CheckpointStore(store, keep_last=None), 100)
    assert found(store) == name(1200)


class Killed(BaseException):
    """Ends the process, as far as the disk is concerned."""


def kill_before_rename(number: int, work: Callable[[], Any]) -> None:
    """Do ``work`` in a process that ends before the rename after so many others."""
    calls = 0

    def dying(real: Any) -> Any:
        def call(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > number:
                raise Killed
            real(*args)

        return call

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "rename", dying(os.rename))
        patch.setattr(os, "replace", dying(os.replace))
        work()


@pytest.mark.parametrize("renames", range(4))
def test_a_rewind_that_was_killed_is_finished_by_the_next_start(store, renames):
    """Announced, then a rename a checkpoint, then the pointer: at no instant is it undecided."""
    kill_before_rename(renames, lambda: CheckpointStore(store).abandon_after(1000))
    if renames == 0:  # not announced: as if nothing had been asked
        assert found(store) == name(2000)
        return
    assert CheckpointStore(store).find(own=False).path.name == name(1000)  # type: ignore[union-attr]
    assert found(store) == name(1000) and latest(store) == name(1000) + "\n"
    assert moved(store) == [name(1500), name(2000)] and not (store / NEXT).exists()


@pytest.mark.parametrize("renames", range(6))
def test_an_upgrade_that_was_killed_is_finished_by_the_next_start(store, renames):
    of_earlier_version(store, *LINE)
    point(store, 1000)
    kill_before_rename(renames, lambda: found(store))
    assert CheckpointStore(store).find(own=False).path.name == name(1000)  # type: ignore[union-attr]
    assert found(store) == name(1000) and moved(store) == [name(1500), name(2000)]
    assert CheckpointDirectory(store).current and "lineage" in aside(store)


def test_a_commit_killed_before_the_pointer_is_the_newest(store, monkeypatch):
    """And killed before the directory has its name, it is none."""
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointDirectory, "publish", lambda self: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(store, 2500)
    assert latest(store) == name(2000) + "\n"
    assert found(store) == name(2500) and latest(store) == name(2500) + "\n"
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(store, 3000)
    assert (store / NEXT).exists() and found(store) == name(2500) and not (store / NEXT).exists()
