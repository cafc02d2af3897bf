"""Records travel whole, in files of bounded size, and never over what is there."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_patch.experiments import archive
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.publish import Target, publish
from megatron_patch.experiments.store import Store
from megatron_patch.training import run_directory

SMALL = 1 << 20


def make(out: Path, protocol: Path, steps: dict[str, int], *, noise: int = 0) -> Path:
    """An experiment whose runs have logged so many steps."""
    store = Store(out, read(protocol))
    for run in store.experiment.runs:
        if run.id not in steps:
            continue
        folder = store.run_dir(run)
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / "big").write_bytes(b"0" * 100)
        rows = [f"{i},4.0,0.3\n" for i in range(1, steps[run.id] + 1)]
        (folder / "metrics.csv").write_text("step,loss,grad_norm\n" + "".join(rows))
        (folder / "captures").mkdir(exist_ok=True)
        (folder / "captures" / "x.pt").write_bytes(random.Random(0).randbytes(noise))
        store.states[run.id].state = "paused"
    store.reference(store.experiment.runs[0]).parent.mkdir(exist_ok=True)
    store.reference(store.experiment.runs[0]).write_text('{"environment": {"gpu": "H200"}}')
    store.save()
    store.close()
    return out


def only(folder: Path) -> Path:
    """The one archive in a folder: experiment, job, number."""
    (path,) = folder.glob("tiny.*.0.zip")
    return path


def test_round_trip(protocol: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "a", protocol, {"a-s1": 5, "b-s1": 7})
    said = list(archive.pack(source, tmp_path / "zip", files=8, limit=SMALL))
    assert len(said) == 1 and only(tmp_path / "zip").name in said[0]
    target = tmp_path / "b"
    assert list(archive.unpack([only(tmp_path / "zip")], target)) == [
        "a-s1: taken, to step 5",
        "b-s1: taken, to step 7",
    ]
    for name in ("runs/a-s1/metrics.csv", "reference/seed_1.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    made, fixed = (json.loads((d / "experiment.json").read_text()) for d in (target, source))
    assert made.pop("job") != fixed.pop("job") and made == fixed
    assert not (target / "runs" / "a-s1" / "checkpoints").exists()
    store = Store(target, read(protocol))
    assert store.states["a-s1"].state == "paused" and not store.has_checkpoint(
        store.experiment.runs[0]
    )
    store.close()


def test_merging_keeps_what_went_further(protocol: Path, tmp_path: Path) -> None:
    first = make(tmp_path / "a", protocol, {"a-s1": 5, "b-s1": 7})
    list(archive.pack(first, tmp_path / "zip", files=8, limit=SMALL))
    target = make(tmp_path / "b", protocol, {"a-s1": 9, "b-s1": 2})
    said = list(archive.unpack([only(tmp_path / "zip")], target))
    assert said == ["a-s1: kept what is here (step 9; the archive has 5)", "b-s1: taken, to step 7"]
    assert len((target / "runs/a-s1/metrics.csv").read_text().splitlines()) == 10
    assert len((target / "runs/b-s1/metrics.csv").read_text().splitlines()) == 8
    # What was replaced is set aside, its checkpoints too.
    assert (target / "runs/b-s1.replaced_1/checkpoints/big").exists()


def test_size_limits(protocol: Path, tmp_path: Path) -> None:
    """Captured tensors are left out before records are, and that is said."""
    source = make(tmp_path / "a", protocol, {"a-s1": 5, "b-s1": 7, "a-s2": 3}, noise=300_000)
    said = list(archive.pack(source, tmp_path / "zip", files=2, limit=400_000))
    assert sum("left out, no room: runs/" in line for line in said) == 1
    packed = sorted((tmp_path / "zip").iterdir())
    assert len(packed) == 2 and all(p.stat().st_size <= 400_000 for p in packed)
    with pytest.raises(ExperimentError, match="missing of the 2 archives"):
        list(archive.unpack(packed[1:], tmp_path / "b"))
    assert len(list(archive.unpack(packed, tmp_path / "b"))) == 3
    with pytest.raises(ExperimentError, match="does not fit"):
        list(archive.pack(source, tmp_path / "zip2", files=1, limit=66_000))
    with pytest.raises(ExperimentError, match="no experiment"):
        list(archive.pack(tmp_path, tmp_path / "zip3", files=1, limit=SMALL))


def spread(source: Path) -> None:
    """Records that no archive of 160 kB has room for together, and runs that have ended."""
    for folder in (source / "runs").iterdir():
        dice = random.Random(folder.name)
        rows = [f"{i},{dice.random()},{dice.random()}\n" for i in range(1, 3001)]
        (folder / "metrics.csv").write_text("step,loss,grad_norm\n" + "".join(rows))
    states = json.loads((source / "states.json").read_text())
    for state in states.values():
        state["state"] = "finished"
    (source / "states.json").write_text(json.dumps(states))


def test_a_set_with_archives_missing_or_mixed_is_refused(protocol: Path, tmp_path: Path) -> None:
    """A state without its run's rows would be final: the run would never be started again."""
    source = make(tmp_path / "a", protocol, {"a-s1": 5, "b-s1": 7, "a-s2": 3})
    spread(source)
    folder = tmp_path / "zip"
    list(archive.pack(source, folder, files=4, limit=160_000))
    found = sorted(folder.iterdir())
    assert len(found) == 3
    for lacking in reversed(found):
        rest = [path for path in found if path != lacking]
        with pytest.raises(ExperimentError, match=f"missing of the 3 .*: {lacking.name}; ") as told:
            list(archive.unpack(rest, tmp_path / "b"))
        assert "\n" not in str(told.value) and all(str(path) in str(told.value) for path in rest)
    # A copy that was made while they were replaced: some of each call.
    before = found[0].read_bytes()
    list(archive.pack(source, folder, files=4, limit=160_000))
    after = found[0].read_bytes()
    found[0].write_bytes(before)
    with pytest.raises(ExperimentError, match=f": {found[0].name}; copy them again"):
        list(archive.unpack(found, tmp_path / "b"))
    assert not (tmp_path / "b").exists()
    found[0].write_bytes(after)
    assert len(list(archive.unpack([*found, found[0]], tmp_path / "b"))) == 3


def test_copies_of_two_times_are_put_together_as_two(protocol: Path, tmp_path: Path) -> None:
    """The later one counts, whichever is named first, and the earlier is no attempt of its own."""
    source = make(tmp_path / "a", protocol, {"a-s1": 5})
    for name, steps in (("early", 5), ("late", 9)):
        make(source, protocol, {"a-s1": steps})
        list(archive.pack(source, tmp_path / name, files=1, limit=SMALL))
    found = [only(tmp_path / name) for name in ("early", "late")]
    for order in (found, found[::-1]):
        list(archive.unpack(order, tmp_path / order[0].parent.name / "b"))
        runs = tmp_path / order[0].parent.name / "b" / "runs"
        assert [path.name for path in runs.iterdir()] == ["a-s1"]
        assert len((runs / "a-s1" / "metrics.csv").read_text().splitlines()) == 10


def test_archives_that_do_not_say_how_many_they_are(protocol: Path, tmp_path: Path) -> None:
    """Those of earlier versions are taken as they are."""
    source = make(tmp_path / "a", protocol, {"a-s1": 5, "b-s1": 7, "a-s2": 3})
    spread(source)
    list(archive.pack(source, tmp_path / "zip", files=4, limit=160_000))
    old = [
        rewrite(path, {}, drop=("pack", "archive", "archives"), name=f"old{path.name[-6:]}")
        for path in sorted((tmp_path / "zip").iterdir())
    ]
    assert len(list(archive.unpack(old, tmp_path / "b"))) == 3


def test_new_archives_take_the_old_ones_place_together(
    protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that fails in between leaves the set that was there."""
    source = make(tmp_path / "a", protocol, {"a-s1": 5, "b-s1": 7, "a-s2": 3})
    spread(source)
    folder = tmp_path / "zip"
    list(archive.pack(source, folder, files=4, limit=160_000))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for table in (source / "runs").glob("*/metrics.csv"):
        table.write_text(table.read_text() + "3001,4.0,0.3\n")
    write, calls = archive._write, []

    def fails(*args: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        write(*args)

    monkeypatch.setattr(archive, "_write", fails)
    with pytest.raises(OSError, match="No space"):
        list(archive.pack(source, folder, files=4, limit=160_000))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_directory_in_use_is_left_alone(protocol: Path, tmp_path: Path) -> None:
    """Neither under a launcher, which has the states in memory, nor under a run's own trainer."""
    source = make(tmp_path / "a", protocol, {"a-s1": 9})
    list(archive.pack(source, tmp_path / "zip", files=1, limit=SMALL))
    target = make(tmp_path / "b", protocol, {"a-s1": 5})
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    store = Store(target, read(protocol))
    with pytest.raises(ExperimentError, match=f"{target}: another process runs .*another --out"):
        list(archive.unpack([only(tmp_path / "zip")], target))
    store.close()
    trainer, _ = run_directory._lock(target / "runs" / "a-s1", [])
    assert trainer is not None
    with pytest.raises(ExperimentError, match=r"runs/a-s1: a process trains .*another --out"):
        list(archive.unpack([only(tmp_path / "zip")], target))
    trainer.close()
    (target / "runs" / "a-s1" / run_directory.LOCK).unlink()
    assert {p: before.get(p) for p in target.rglob("*")} == before
    assert len(list(archive.unpack([only(tmp_path / "zip")], target))) == 1
    Store(target, read(protocol)).close()  # given back


def test_a_directory_without_locks_is_said(
    protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "a", protocol, {"a-s1": 9})
    list(archive.pack(source, tmp_path / "zip", files=1, limit=SMALL))

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, *rest = archive.unpack([only(tmp_path / "zip")], tmp_path / "b")
    assert "has no locks" in first and rest == ["a-s1: taken, to step 9"]


def telemetry(source: Path) -> Path:
    """The experiment ended, its runs with records beside their metrics."""
    for folder in (source / "runs").iterdir():
        (folder / "stability").mkdir()
        (folder / "stability" / "records.bin").write_bytes(b"x" * 100)
    states = json.loads((source / "states.json").read_text())
    for state in states.values():
        state["state"] = "exploded"
    (source / "states.json").write_text(json.dumps(states))
    return source


def tree(folder: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("into", ["nothing", "shorter", "another"])
def test_an_unpack_that_was_interrupted_anywhere_is_repeated(
    protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, into: str
) -> None:
    """As killed after any write or rename; what the call then makes is what one call makes."""
    source = telemetry(make(tmp_path / "a", protocol, {"a-s1": 5, "b-s1": 7}))
    list(archive.pack(source, tmp_path / "zip", files=1, limit=SMALL))
    monkeypatch.setattr(archive.secrets, "token_hex", lambda size: "0" * 2 * size)
    here = tmp_path / "here"
    if into != "nothing":  # "another": one that went further, but is not the same attempt
        make(here, protocol, {"a-s1": 3, "b-s1": 9 if into == "another" else 2})
        other = here / "runs" / "b-s1" / "metrics.csv"
        other.write_text(other.read_text().replace("4.0", "5.0"))

    def unpack(name: str) -> list[str]:
        return list(archive.unpack([only(tmp_path / "zip")], tmp_path / name))

    def fresh(name: str) -> Path:
        if here.exists():
            shutil.copytree(here, tmp_path / name)
        return tmp_path / name

    whole = fresh("whole")
    unpack("whole")
    left, count = [0], 0
    renames = ((os, "rename"), (os, "replace"), (Path, "rename"))
    for owner, name in (*renames, (os, "fsync"), (Path, "write_bytes")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), left))
    remove = shutil.rmtree
    said = []
    for count in range(1000):
        out = fresh(f"b{count}")
        left[0] = count
        monkeypatch.setattr(archive.shutil, "rmtree", lambda *_, **__: None)  # killed
        try:
            unpack(out.name)
            break
        except KeyboardInterrupt:
            left[0] = 10_000
            monkeypatch.setattr(archive.shutil, "rmtree", remove)
            said += unpack(out.name)
            assert tree(out) == tree(whole), f"interrupted after {count}"
    assert 20 < count < 1000
    assert any(line.startswith("removed what an interrupted 'unpack' has left") for line in said)


def counted(call: Callable, left: list[int]) -> Callable:
    """The call, as long as some are left."""

    def counting(*args: object, **options: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return call(*args, **options)

    return counting


def test_what_an_unpack_has_left_is_not_packed(protocol: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "a", protocol, {"a-s1": 5})
    (source / "runs" / archive.UNPACKING / "b-s1").mkdir(parents=True)
    (source / "runs" / archive.UNPACKING / "b-s1" / "metrics.csv").write_text("step")
    list(archive.pack(source, tmp_path / "zip", files=1, limit=SMALL))
    assert list(archive.unpack([only(tmp_path / "zip")], tmp_path / "b")) == [
        "a-s1: taken, to step 5"
    ]


def rewrite(
    path: Path,
    change: dict[str, bytes],
    manifest: dict | None = None,
    *,
    drop: tuple[str, ...] = (),
    name: str = "changed.zip",
) -> Path:
    """The archive with members replaced, its manifest changed."""
    with zipfile.ZipFile(path) as source:
        content = {n: source.read(n) for n in source.namelist()}
    facts = json.loads(content[archive.MANIFEST])
    facts["files"] |= manifest or {}
    facts = {key: value for key, value in facts.items() if key not in drop}
    content |= {archive.MANIFEST: json.dumps(facts).encode()} | change
    target = path.with_name(name)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for member, data in content.items():
            out.writestr(member, data)
    return target


def test_damaged_and_hostile_archives(protocol: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "a", protocol, {"a-s1": 5})
    list(archive.pack(source, tmp_path / "zip", files=1, limit=SMALL))
    good = only(tmp_path / "zip")
    target = tmp_path / "b"

    def refused(path: Path, message: str) -> None:
        with pytest.raises(ExperimentError, match=message):
            list(archive.unpack([path], target))
        assert not target.exists()

    refused(rewrite(good, {"runs/a-s1/metrics.csv": b"step"}), "is damaged")
    bomb = {"runs/a-s1/metrics.csv": b"0" * 50_000_000}
    refused(rewrite(good, bomb), "longer than its manifest says")
    import hashlib

    entry = {"sha256": hashlib.sha256(b"x").hexdigest(), "size": 1}
    for name in ("../evil", "/evil", "a/../../evil", "a\\..\\evil", "runs/.unpacking/a/x"):
        refused(rewrite(good, {name: b"x"}, {name: entry}), "refuses to write")
    deep = b"[" * 200_000
    for name, data in (
        ("experiment.json", b"{}"),
        ("experiment.json", b'{"name": "a", "explosion": {}, "runs": []}'),
        ("experiment.json", deep),
        ("reference/seed_1.json", b"{}"),
        ("reference/seed_1.json", b'{"environment": {}, "weights": 5}'),
        ("reference/seed_1.json", deep),
    ):
        entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        refused(rewrite(good, {name: data}, {name: entry}), f"{name} is damaged")
    (tmp_path / "no.zip").write_bytes(b"PK not at all")
    refused(tmp_path / "no.zip", "not an archive")
    refused(tmp_path / "missing.zip", "not an archive")


def test_other_experiments_and_machines_are_not_mixed(protocol: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "a", protocol, {"a-s1": 5})
    list(archive.pack(source, tmp_path / "zip", files=1, limit=SMALL))
    good = only(tmp_path / "zip")
    target = make(tmp_path / "b", protocol, {"b-s1": 2})
    (target / "reference" / "seed_1.json").write_text('{"environment": {"gpu": "A100"}}')
    with pytest.raises(ExperimentError, match=r"seed_1.json differs"):
        list(archive.unpack([good], target))
    for damaged in ("{}", '{"environment": []}', '{"environment": {}, "weights": []}'):
        (target / "reference" / "seed_1.json").write_text(damaged)
        with pytest.raises(ExperimentError, match=r"seed_1.json is damaged"):
            list(archive.unpack([good], target))
    protocol.write_text(protocol.read_text().replace("optimizer.lr=2e-3", "optimizer.lr=5e-3"))
    other = make(tmp_path / "c", protocol, {"b-s1": 2})
    with pytest.raises(ExperimentError, match="another experiment"):
        list(archive.unpack([good], other))


def test_two_jobs_bring_their_records_into_one_folder(protocol: Path, tmp_path: Path) -> None:
    """Each replaces its own archives and leaves the other's; one call unpacks all of them."""
    folder = tmp_path / "copies"
    for name, run in (("a", "a-s1"), ("b", "b-s1"), ("a", "a-s1")):
        store = Store(make(tmp_path / name, protocol, {run: 5}), read(protocol))
        list(publish(store, Target(folder=folder, archives=2)))
        store.close()
    found = sorted(folder.glob("*.zip"))
    assert len(found) == 2
    list(archive.unpack(found, tmp_path / "home"))
    store = Store(tmp_path / "home", read(protocol))
    assert {store.states[run].state for run in ("a-s1", "b-s1")} == {"paused"}
    assert [store.last_step(run) for run in store.experiment.runs] == [5, 5, 0]
    store.close()
    # Of two jobs that do not belong together nothing is taken.
    facts = '{"environment": {"gpu": "A100"}}'
    (tmp_path / "b" / "reference" / "seed_1.json").write_text(facts)
    store = Store(tmp_path / "b", read(protocol))
    list(archive.pack(store.path, folder, files=2, limit=SMALL))
    store.close()
    with pytest.raises(ExperimentError, match=r"seed_1.json differs"):
        list(archive.unpack(found, tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_two_directories_made_of_one_archive_are_two_jobs(protocol: Path, tmp_path: Path) -> None:
    """Neither removes the other's archives, nor takes its rows for its own."""
    list(archive.pack(make(tmp_path / "a", protocol, {"b-s1": 5}), tmp_path / "zip", files=1,
                      limit=SMALL))  # fmt: skip
    folder = tmp_path / "copies"
    for name, loss in (("b", "3.0"), ("c", "2.0")):
        out = tmp_path / name
        list(archive.unpack([only(tmp_path / "zip")], out))
        store = Store(make(out, protocol, {"a-s1": 30 if name == "b" else 40}), read(protocol))
        rows = out / "runs" / "a-s1" / "metrics.csv"
        rows.write_text(rows.read_text().replace("4.0", loss))
        list(publish(store, Target(folder=folder, archives=1)))
        store.close()
    assert len(list(folder.glob("*.zip"))) == 2
    found = json.loads((folder / "tiny.json").read_text())["runs"]
    steps = {run["run"]: run["steps"] for run in found if run["steps"]}
    assert steps == {"a-s1": 40, "a-s1.attempt_1": 30, "b-s1": 5}


def test_a_target_that_is_a_file_is_refused(protocol: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "a", protocol, {"a-s1": 5})
    list(archive.pack(source, tmp_path / "zip", files=1, limit=SMALL))
    (tmp_path / "file").touch()
    with pytest.raises(ExperimentError, match=r"--to .*cannot be written"):
        list(archive.pack(source, tmp_path / "file", files=1, limit=SMALL))
    with pytest.raises(ExperimentError, match=r"--out .*cannot be written"):
        list(archive.unpack([only(tmp_path / "zip")], tmp_path / "file"))
    with pytest.raises(ExperimentError, match=r"--out .*cannot be written"):
        Store(tmp_path / "file", read(protocol))


def test_the_directory_of_a_run_is_no_experiments(protocol: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "a", protocol, {"a-s1": 5})
    list(archive.pack(source, tmp_path / "zip", files=1, limit=SMALL))
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", "train.log"):
        (run / name).touch()
    with pytest.raises(ExperimentError, match=r"--out .*directory of a run"):
        list(archive.unpack([only(tmp_path / "zip")], run))
    with pytest.raises(ExperimentError, match=r"--out .*directory of a run"):
        Store(run, read(protocol))
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "train.log"]
    # Trained into by mistake, an experiment stays one.
    for name in ("config.yaml", "train.log"):
        (source / name).touch()
    Store(source, read(protocol)).close()
