"""Records travel whole, in files of bounded size, and never over what is there."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path

import pytest

from megatron_patch.experiments import archive
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.publish import Target, publish
from megatron_patch.experiments.store import Store

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
    for name in ("experiment.json", "runs/a-s1/metrics.csv", "reference/seed_1.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
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
    with pytest.raises(ExperimentError, match="give all archives"):
        list(archive.unpack(packed[1:], tmp_path / "b"))
    assert len(list(archive.unpack(packed, tmp_path / "b"))) == 3
    with pytest.raises(ExperimentError, match="does not fit"):
        list(archive.pack(source, tmp_path / "zip2", files=1, limit=66_000))
    with pytest.raises(ExperimentError, match="no experiment"):
        list(archive.pack(tmp_path, tmp_path / "zip3", files=1, limit=SMALL))


def rewrite(path: Path, change: dict[str, bytes], manifest: dict | None = None) -> Path:
    """The archive with members replaced, its manifest changed."""
    with zipfile.ZipFile(path) as source:
        content = {n: source.read(n) for n in source.namelist()}
    facts = json.loads(content[archive.MANIFEST])
    facts["files"] |= manifest or {}
    content |= {archive.MANIFEST: json.dumps(facts).encode()} | change
    target = path.with_name("changed.zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in content.items():
            out.writestr(name, data)
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
    for name in ("../evil", "/evil", "a/../../evil", "a\\..\\evil"):
        refused(rewrite(good, {name: b"x"}, {name: entry}), "refuses to write")
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
