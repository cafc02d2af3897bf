"""Samples of benchmarks/fuzz_checkpoints.py: damage is refused, nothing good is lost."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fuzz_checkpoints as fuzz


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Stores with two good checkpoints: {signed: root}."""
    found = {}
    for signed in (False, True):
        found[signed] = tmp_path_factory.mktemp("pristine") / "store"
        fuzz.two_checkpoints(found[signed], fuzz.KEY if signed else None)
    return found


@pytest.mark.parametrize("kind", fuzz.CORRUPTIONS)
def test_corruptions_are_refused(pristine: dict[bool, Path], tmp_path: Path, kind: str) -> None:
    for seed in range(4):
        signed = bool(seed % 2)
        reason = fuzz.corrupt_once(
            pristine[signed], tmp_path / "work", kind, seed, key=fuzz.KEY if signed else None
        )
        assert reason


def test_the_hash_is_what_catches_a_flipped_bit(
    pristine: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hashing the same damage is accepted: the corruption test can fail."""
    from megatron_patch.checkpoint import store

    monkeypatch.setattr(store, "check_file", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError, match="accepted: swapped pages"):
        fuzz.corrupt_once(pristine[False], tmp_path / "work", "swapped pages", 1, key=None)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.85, 1.0])
def test_full_disk(tmp_path: Path, share: float) -> None:
    """Room for nothing ... room for all: the save fails in words or succeeds, step 100 stays."""
    room = int(share * (sum(fuzz.SHARDS.values()) + 256 * 1024))
    _, outcome = fuzz.full_disk_once(tmp_path / "disk", room)
    assert outcome == ("saved" if share == 1.0 else "refused")


@pytest.mark.parametrize("part", range(8))
def test_kill_in_a_save(pristine: dict[bool, Path], tmp_path: Path, part: int) -> None:
    """SIGKILL before the nth call that touches the disk, eight of about sixty."""
    work = tmp_path / "work"
    shutil.copytree(pristine[False], work)
    killed, _ = fuzz.killed_save(work, at=1 + part * 7)
    assert killed
    fuzz.check_after_kill(work)


def test_kill_points_reach_every_phase(pristine: dict[bool, Path], tmp_path: Path) -> None:
    """A save that is not killed makes more calls than the last kill point above."""
    work = tmp_path / "work"
    shutil.copytree(pristine[False], work)
    killed, calls = fuzz.killed_save(work)
    assert not killed and calls > 1 + 7 * 7
    assert fuzz.CheckpointStore(work).find().manifest.step == 300
