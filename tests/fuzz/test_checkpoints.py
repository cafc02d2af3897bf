"""What the checkpoint store survives: damage, full disks, SIGKILL inside a save.

A store holds checkpoints of steps 100 and 200. The newer one is damaged, or a save on top of it is
broken: what is bad is refused with a reason, and what is good loads.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from bounded import examples, fuzz, randoms
from damage import extend, flip_bit, missing, swap_pages, truncate, zero_page
from full_disk import file_size_limit, small_disk
from sample_store import SHARDS, save, write_files

from megatron_patch.checkpoint.errors import BadCheckpoint, SaveError
from megatron_patch.checkpoint.manifest import MANIFEST, SEAL
from megatron_patch.checkpoint.store import CheckpointStore

KEY = b"a key of the fuzzer, 32 bytes ok"
NEWEST, OLDER = "step_00000200.attempt-1", "step_00000100.attempt-1"
Damage = Callable[[Path, random.Random, Path], None]
"""(directory of step 200, generator, directory of step 100)"""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Stores with two good checkpoints: {signed: root}."""
    found = {}
    for signed in (False, True):
        found[signed] = tmp_path_factory.mktemp("pristine") / "store"
        store = CheckpointStore(found[signed], hmac_key=KEY if signed else None)
        save(store, 100)
        save(store, 200)
    return found


def any_file(path: Path, rng: random.Random, *, shards: bool = False) -> Path:
    filled = sorted(file for file in path.iterdir() if file.stat().st_size)
    return path / rng.choice(list(SHARDS)) if shards else rng.choice(filled)


def in_place(edit: Callable[[Path, random.Random], None], *, shards: bool = False) -> Damage:
    """The edit of any one file."""

    def anywhere(path: Path, rng: random.Random, old: Path) -> None:
        edit(any_file(path, rng, shards=shards), rng)

    anywhere.__name__ = edit.__name__
    return anywhere


def swap_files(path: Path, rng: random.Random, old: Path) -> None:
    first, second = rng.sample(sorted(path.iterdir()), 2)
    spare = path.parent / "spare"
    os.rename(first, spare)
    os.rename(second, first)
    os.rename(spare, second)


def stale_file(path: Path, rng: random.Random, old: Path) -> None:
    file = any_file(path, rng, shards=True)
    shutil.copy(old / file.name, file)


def stale_manifest(path: Path, rng: random.Random, old: Path) -> None:
    for name in (MANIFEST, SEAL):
        shutil.copy(old / name, path / name)


def extra(path: Path, rng: random.Random, old: Path) -> None:
    name = rng.choice(["__9_0.distcp", "common.pt", ".metadata.tmp", "__0.metadata", "x"])
    (path / name).write_bytes(bytes(rng.randrange(100)))


def torn_resave(path: Path, rng: random.Random, old: Path) -> None:
    """A writer that re-saves in place and dies: some files of step 300, the rest of step 200."""
    fresh = path.parent / "fresh"
    fresh.mkdir()
    write_files(fresh, 300)
    for name in rng.sample(list(SHARDS), rng.randrange(1, len(SHARDS))):
        shutil.copy(fresh / name, path / name)
    shutil.rmtree(fresh)


def foreign_step(path: Path, rng: random.Random, old: Path) -> None:
    """The whole directory of step 100 under the name of step 200."""
    shutil.rmtree(path)
    shutil.copytree(old, path)


def empty(path: Path, rng: random.Random, old: Path) -> None:
    for file in sorted(path.iterdir()):
        if rng.random() < 0.9 or file.name == MANIFEST:
            file.unlink()


def link(path: Path, rng: random.Random, old: Path) -> None:
    """A file replaced by a link to an equal copy outside."""
    file = any_file(path, rng)
    target = path.parent / f"outside-{file.name}"
    os.rename(file, target)
    file.symlink_to(target)


EXCHANGED = in_place(swap_pages, shards=True)
DAMAGES: list[Damage] = [
    *map(in_place, (flip_bit, truncate, extend, missing)), in_place(zero_page, shards=True),
    EXCHANGED, swap_files, stale_file, stale_manifest, extra, torn_resave, foreign_step, empty,
    link,
]  # fmt: skip


def damaged(pristine: dict[bool, Path], work: Path, damage: Damage, rng: random.Random) -> None:
    """Damage a copy of a store: the newest checkpoint is refused, the older one loads.

    Raises:
        AssertionError: the damage was accepted, or the older checkpoint does not load.
    """
    signed = rng.choice([False, True])
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(pristine[signed], work)
    damage(work / NEWEST, rng, work / OLDER)
    store = CheckpointStore(work, hmac_key=KEY if signed else None)
    try:
        store.check(work / NEWEST)
    except BadCheckpoint as bad:
        assert bad.reason, "refused without a reason"
    else:
        raise AssertionError("the damage was accepted")
    found = store.find()
    assert found is not None and found.manifest.step == 100


@examples(4, 40)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused(pristine, tmp_path, damage, count):
    fuzz(lambda rng: damaged(pristine, tmp_path / "work", damage, rng), count, rng=randoms)


def test_the_hash_is_what_catches_a_flipped_bit(pristine, tmp_path, monkeypatch):
    """Without hashing the same damage is accepted: the test above can fail."""
    from megatron_patch.checkpoint import store

    monkeypatch.setattr(store, "check_file", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError, match="accepted"):
        damaged(pristine, tmp_path / "work", EXCHANGED, random.Random(1))


# ------------------------------------------------------------------- full disks


def save_on_full_disk(store: CheckpointStore) -> str:
    try:
        attempt = store.begin(200)
        error, digests = None, {}
        try:
            digests = store.hash_files(attempt, write_files(attempt.path, 200))
        except OSError as caught:
            error = caught
        store.agree(attempt, error)
        store.commit(attempt, digests, {})
    except SaveError as refused:
        text = str(refused)
        assert "No space left" in text or "File too large" in text or "disk or quota" in text, text
        return "refused"
    return "saved"


@pytest.mark.parametrize(
    "share",
    [0.0, 0.3, 0.6, 0.85, 1.0]
    + [pytest.param(n / 20, marks=pytest.mark.slow) for n in range(1, 20)],
)
def test_full_disk(tmp_path, share):
    """Room for nothing ... room for all: the save fails in words or succeeds, step 100 stays."""
    room = int(share * (sum(SHARDS.values()) + 256 * 1024))
    folder = tmp_path / "disk"
    with small_disk(folder, sum(SHARDS.values()) + 64 * 1024 + room) as mounted:
        store = CheckpointStore(folder, keep_last=None)
        save(store, 100)
        # A limit of 0 would forbid the identity file and everything else at once.
        with nullcontext() if mounted else file_size_limit(max(room, 1)):
            outcome = save_on_full_disk(store)
        found = CheckpointStore(folder).find()
        expected = 200 if outcome == "saved" else 100
        assert found is not None and found.manifest.step == expected, outcome
    if share in (0.0, 1.0):
        assert outcome == ("saved" if share else "refused")


# ------------------------------------------------------------------------ kills

# Counts the calls by which a save touches the disk, and dies before the one it is told to.
KILLER = """
import builtins, io, os, signal, sys
at, calls = int(os.environ["DIE_AT"]), 0
def dying(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
sys.path.insert(0, os.environ["HERE"])
from sample_store import CheckpointStore, save
for name in ("open", "mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "listdir", "pread"):
    setattr(os, name, dying(getattr(os, name)))
builtins.open = io.open = dying(io.open)
store = CheckpointStore(os.environ["STORE"], keep_last=2)
save(store, 300)
print(calls, flush=True)
"""


def killed_save(root: Path, *, at: int = 0) -> tuple[bool, int]:
    """A save of step 300 in a process of its own: (whether it was killed, calls it made).

    Args:
        root: store with checkpoints of steps 100 and 200.
        at: dies before this call that touches the disk; 0: never.
    """
    environment = os.environ | {
        "DIE_AT": str(at), "STORE": str(root), "HERE": str(Path(__file__).parent),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", KILLER], env=environment, stdout=subprocess.PIPE, text=True
    )
    return done.returncode == -signal.SIGKILL, int(done.stdout or 0)


def check_after_kill(root: Path) -> None:
    """A killed save leaves a store that loads the old or the new one, and can save again."""
    found = CheckpointStore(root).find()
    assert found is not None and found.manifest.step in (200, 300), found
    CheckpointStore(root).check(root / NEWEST)
    store = CheckpointStore(root, keep_last=2)
    save(store, 400)
    after = store.find()
    assert after is not None and after.manifest.step == 400
    assert not list(root.glob("*.tmp")), list(root.iterdir())


@pytest.fixture
def work(pristine: dict[bool, Path], tmp_path: Path) -> Path:
    shutil.copytree(pristine[False], tmp_path / "work")
    return tmp_path / "work"


POINTS = range(1, 51, 7)


@pytest.mark.parametrize("at", POINTS)
def test_kill_before_a_call_that_touches_the_disk(work, at):
    killed, _ = killed_save(work, at=at)
    assert killed
    check_after_kill(work)


def test_kill_points_reach_every_phase(work):
    """A save that is not killed makes more calls than the last kill point above."""
    killed, calls = killed_save(work)
    assert not killed and POINTS[-1] < calls < POINTS[-1] + 30
    found = CheckpointStore(work).find()
    assert found is not None and found.manifest.step == 300


@pytest.mark.slow
def test_kill_before_every_call(pristine, tmp_path):
    for at in range(1, 1000):
        work = tmp_path / str(at)
        shutil.copytree(pristine[False], work)
        killed, calls = killed_save(work, at=at)
        if not killed:
            assert calls == at - 1 > POINTS[-1]
            return
        check_after_kill(work)
