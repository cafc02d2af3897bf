"""File systems that fail for a while: tried again, nothing moved; lasting ones end the run."""

from __future__ import annotations

import errno
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_store import save

from megatron_patch.checkpoint import manifest, safe_reader, store
from megatron_patch.checkpoint.errors import (
    BadCheckpoint,
    CheckpointError,
    UnavailableError,
    first_problem,
    is_passing,
)
from megatron_patch.checkpoint.safe_metadata import METADATA, read_metadata
from megatron_patch.checkpoint.store import CheckpointStore

EIO = OSError(errno.EIO, "Input/output error")
DENIED = PermissionError(errno.EACCES, "Permission denied")


def failing(error: Exception) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("place", "error", "code"),
    [
        ("hash_file", EIO, 1),
        ("hash_file", MemoryError(), 1),
        ("hash_file", DENIED, 4),
        ("check_listing", EIO, 1),
        ("check_listing", DENIED, 4),
    ],
)
def test_checkpoints_that_cannot_be_read_now_are_tried_again(
    tmp_path, monkeypatch, place, error, code
):
    """Exit code 1, which the launcher restarts; forbidden files (4) a person has to look at."""
    found = CheckpointStore(tmp_path)
    paths = [save(found, step) for step in (1, 2)]
    home = {"hash_file": manifest, "check_listing": store}[place]
    monkeypatch.setattr(home, place, failing(error))
    with pytest.raises(CheckpointError, match="no good checkpoint") as caught:
        found.find()
    assert caught.value.exit_code == code
    assert all(path.is_dir() for path in paths)


@pytest.mark.parametrize("own", [True, False])
def test_no_steps_are_given_up_for_a_read_that_fails_once(tmp_path, monkeypatch, own):
    """The next attempt continues from the newest; by a command a person takes the older one."""
    store = CheckpointStore(tmp_path)
    first, newest = (save(store, step) for step in (1, 2))
    hash_file = manifest.hash_file

    def fail(folder: Path, *args: Any, **kwargs: Any) -> Any:
        if folder == newest:
            raise EIO
        return hash_file(folder, *args, **kwargs)

    monkeypatch.setattr(manifest, "hash_file", fail)
    with pytest.raises(UnavailableError, match="could not be read this time") as caught:
        store.find(own=own)
    remedy = f"rollback {tmp_path} --to {first.name}" if own else f"load_from: {first}"
    assert str(caught.value).endswith(remedy) and newest.is_dir()
    monkeypatch.setattr(manifest, "hash_file", hash_file)
    found = store.find(own=own)
    assert found is not None and found.path == newest


def test_one_damaged_checkpoint_among_unreadable_ones_is_for_a_person(tmp_path, monkeypatch):
    found = CheckpointStore(tmp_path)
    save(found, 1)
    (save(found, 2) / "extra").touch()
    monkeypatch.setattr(manifest, "hash_file", failing(EIO))
    with pytest.raises(CheckpointError) as caught:
        found.find()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(("error", "code"), [(EIO, 1), (DENIED, 4)])
def test_a_directory_that_cannot_be_listed(tmp_path, monkeypatch, error, code):
    found = CheckpointStore(tmp_path)
    monkeypatch.setattr(os, "listdir", failing(error))
    for look in (found.find, lambda: found.newest_at(3)):
        with pytest.raises(CheckpointError, match="cannot list") as caught:
            look()
        assert caught.value.exit_code == code


def test_what_another_rank_does_not_see_may_be_seen_from_other_nodes():
    missing = BadCheckpoint("missing", "__1_0.distcp is missing")
    refusal = first_problem([None, missing])
    assert isinstance(refusal, BadCheckpoint) and refusal.passing and not refusal.damaged


def test_errors_travel_with_class_exit_code_and_judgement():
    """As they do between ranks, pickled."""
    error = pickle.loads(pickle.dumps(UnavailableError("cannot list /x")))
    assert (type(error), error.exit_code, str(error)) == (UnavailableError, 1, "cannot list /x")
    bad = pickle.loads(pickle.dumps(BadCheckpoint("k", "w", damaged=False, passing=True)))
    assert (bad.kind, bad.reason, bad.damaged, bad.passing) == ("k", "w", False, True)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (EIO, True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (KeyError("step"), False),
    ],
)
def test_what_may_pass(error, passes):
    assert is_passing(error) is passes
    hidden = ValueError("a closed chain")
    hidden.__cause__ = hidden
    assert not is_passing(hidden)


@pytest.mark.parametrize("read", range(1, 4))
def test_a_failing_disk_is_not_taken_for_a_hostile_archive(monkeypatch, tmp_path, read):
    """A hostile one is moved aside. zipfile says "not a zip file" of some reads that failed."""
    path = tmp_path / "shard"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
        archive.writestr("archive/data/0", bytes(100_000))
    pread, reads = os.pread, [0]

    def fail(*args: Any) -> bytes:
        reads[0] += 1
        if reads[0] == read:
            raise EIO
        return pread(*args)

    with path.open("rb") as file:
        size = path.stat().st_size
        part = io.BufferedReader(safe_reader._Slice(file.fileno(), 0, size))
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(OSError, match="Input/output error"):
            safe_reader.inspect_archive(part, size)


def test_a_failing_disk_is_not_taken_for_a_hostile_index(monkeypatch, tmp_path):
    (tmp_path / METADATA).write_bytes(b"?")
    monkeypatch.setattr(Path, "read_bytes", failing(EIO))
    with pytest.raises(OSError, match="Input/output error"):
        read_metadata(tmp_path)
