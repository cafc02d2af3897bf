"""What the checkpoint store survives: corruptions, full disks, kills. Figures go to docs/results.

    python benchmarks/fuzz_checkpoints.py            # everything, a few minutes; root for the tmpfs
    python benchmarks/fuzz_checkpoints.py --only kills --seed 7

A store of two checkpoints is made; the newer one is damaged, or a save on top of it is broken, and
the store has to refuse what is bad with a reason and load what is good. A corruption counts as
caught only if nothing of the damaged directory was accepted and the older one still verifies.
tests/checkpoint/test_faults.py runs a sample of the same functions.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from megatron_patch.checkpoint.errors import BadCheckpoint, CheckpointError, SaveError
from megatron_patch.checkpoint.manifest import MANIFEST, PAGE_BYTES, SEAL
from megatron_patch.checkpoint.store import CheckpointStore

KEY = b"a key of the fuzzer, 32 bytes ok"
SHARDS = {"__0_0.distcp": 2 * PAGE_BYTES + 4321, "__1_0.distcp": 70_000, ".metadata": 3_000}


def write_files(folder: Path, step: int) -> list[str]:
    """Shards that differ from step to step, as a writer would leave them."""
    noise = random.Random(step)
    for name, size in SHARDS.items():
        (folder / name).write_bytes(noise.randbytes(size))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return [*SHARDS, "metadata.json"]


def save(store: CheckpointStore, step: int) -> Path:
    """One complete checkpoint."""
    attempt = store.begin(step)
    return store.commit(attempt, store.hash_files(attempt, write_files(attempt.path, step)), {})


def two_checkpoints(root: Path, key: bytes | None = None) -> CheckpointStore:
    """A store with good checkpoints of steps 100 and 200."""
    store = CheckpointStore(root, hmac_key=key)
    save(store, 100)
    save(store, 200)
    return store


# ------------------------------------------------------------------ corruptions


def flip_bit(path: Path, rng: random.Random, old: Path) -> str:
    file = _any_file(path, rng)
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) * 8)
    data[at // 8] ^= 1 << at % 8
    file.write_bytes(data)
    return f"bit {at} of {file.name}"


def zero_page(path: Path, rng: random.Random, old: Path) -> str:
    file = _any_file(path, rng, shards=True)
    data = bytearray(file.read_bytes())
    at = rng.randrange(max(1, len(data) // 4096)) * 4096
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    file.write_bytes(data)
    return f"4 KiB of {file.name} at {at} zeroed"


def truncate(path: Path, rng: random.Random, old: Path) -> str:
    file = _any_file(path, rng)
    size = rng.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} cut to {size}"


def grow(path: Path, rng: random.Random, old: Path) -> str:
    file = _any_file(path, rng)
    with file.open("ab") as out:
        out.write(rng.randbytes(rng.choice([1, 512, 4096])))
    return f"{file.name} grown"


def swap_files(path: Path, rng: random.Random, old: Path) -> str:
    first, second = rng.sample(_files(path), 2)
    spare = path.parent / "spare"
    os.rename(first, spare)
    os.rename(second, first)
    os.rename(spare, second)
    return f"{first.name} and {second.name} swapped"


def swap_pages(path: Path, rng: random.Random, old: Path) -> str:
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    first, second = rng.sample(range(len(data) // 4096), 2)
    one, two = (slice(p * 4096, p * 4096 + 4096) for p in (first, second))
    data[one], data[two] = data[two], data[one]
    file.write_bytes(data)
    return f"pages {first} and {second} of {file.name} swapped"


def stale_file(path: Path, rng: random.Random, old: Path) -> str:
    file = _any_file(path, rng, shards=True)
    shutil.copy(old / file.name, file)
    return f"{file.name} of step 100"


def stale_manifest(path: Path, rng: random.Random, old: Path) -> str:
    for name in (MANIFEST, SEAL):
        shutil.copy(old / name, path / name)
    return "manifest and seal of step 100"


def missing(path: Path, rng: random.Random, old: Path) -> str:
    file = _any_file(path, rng)
    file.unlink()
    return f"{file.name} missing"


def extra(path: Path, rng: random.Random, old: Path) -> str:
    name = rng.choice(["__9_0.distcp", "common.pt", ".metadata.tmp", "__0.metadata", "x"])
    (path / name).write_bytes(rng.randbytes(rng.randrange(100)))
    return f"{name} added"


def torn_resave(path: Path, rng: random.Random, old: Path) -> str:
    """A writer that re-saves in place and dies: some files of step 300, the rest of step 200."""
    fresh = path.parent / "fresh"
    fresh.mkdir()
    write_files(fresh, 300)
    changed = rng.sample(list(SHARDS), rng.randrange(1, len(SHARDS)))
    for name in changed:
        shutil.copy(fresh / name, path / name)
    shutil.rmtree(fresh)
    return f"{', '.join(changed)} of another save"


def foreign_step(path: Path, rng: random.Random, old: Path) -> str:
    """The whole directory of step 100 under the name of step 200."""
    shutil.rmtree(path)
    shutil.copytree(old, path)
    return "the directory of step 100"


def empty_directory(path: Path, rng: random.Random, old: Path) -> str:
    for file in path.iterdir():
        if rng.random() < 0.9 or file.name == MANIFEST:
            file.unlink()
    return "files deleted"


def link(path: Path, rng: random.Random, old: Path) -> str:
    """A file replaced by a link to an equal copy outside."""
    file = _any_file(path, rng)
    target = path.parent / f"outside-{file.name}"
    os.rename(file, target)
    file.symlink_to(target)
    return f"{file.name} is a link"


CORRUPTIONS: dict[str, Callable[[Path, random.Random, Path], str]] = {
    "bit": flip_bit,
    "page": zero_page,
    "truncation": truncate,
    "growth": grow,
    "swapped files": swap_files,
    "swapped pages": swap_pages,
    "stale file": stale_file,
    "stale manifest": stale_manifest,
    "missing": missing,
    "extra": extra,
    "torn re-save": torn_resave,
    "foreign step": foreign_step,
    "emptied": empty_directory,
    "link": link,
}


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.stat().st_size)


def _any_file(path: Path, rng: random.Random, *, shards: bool = False) -> Path:
    return path / rng.choice(list(SHARDS)) if shards else rng.choice(_files(path))


def corrupt_once(pristine: Path, work: Path, kind: str, seed: int, *, key: bytes | None) -> str:
    """Damage a copy of ``pristine`` and load: the reason it was refused for.

    Raises:
        AssertionError: the damage was accepted, or the older checkpoint does not load.
    """
    rng = random.Random(f"{kind} {seed}")
    shutil.copytree(pristine, work)
    newest, older = work / "step_00000200.attempt-1", work / "step_00000100.attempt-1"
    what = CORRUPTIONS[kind](newest, rng, older)
    store = CheckpointStore(work, hmac_key=key)
    try:
        store.check(newest)
    except BadCheckpoint as bad:
        reason = bad.why
    else:
        raise AssertionError(f"accepted: {kind}, seed {seed}: {what}")
    found = store.find()
    assert found is not None and found.manifest.step == 100, f"{kind}, seed {seed}: {what}"
    assert reason, f"{kind}, seed {seed}: refused without a reason"
    shutil.rmtree(work)
    return reason


def corruptions(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """``count`` random corruptions; half of them of signed checkpoints."""
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for key in (None, KEY):
        two_checkpoints(folder / f"pristine-{key is not None}", key)
    rng = random.Random(seed)
    for number in range(count):
        key = (None, KEY)[number % 2]
        kind = list(CORRUPTIONS)[number % len(CORRUPTIONS)]
        reason = corrupt_once(
            folder / f"pristine-{key is not None}",
            folder / "work",
            kind,
            rng.randrange(1 << 30),
            key=key,
        )
        kinds[kind] += 1
        examples.setdefault(kind, reason)
    return {"tried": count, "refused": count, "by_kind": dict(kinds), "reasons": examples}


# ------------------------------------------------------------------- full disks


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[str]:
    """``folder`` as a tmpfs of ``size`` bytes; where that cannot be mounted, nothing is limited.

    Yields ``tmpfs`` or ``RLIMIT_FSIZE``, which `full_disk_once` then sets for the failing save: a
    limit on the size of single files, the nearest thing a user without root can have.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if (
        os.geteuid() == 0
        and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    ):
        try:
            yield "tmpfs"
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    yield "RLIMIT_FSIZE"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def full_disk_once(folder: Path, room: int) -> tuple[str, str]:
    """Save step 200 with ``room`` bytes left after step 100; (mechanism, what happened).

    Raises:
        AssertionError: the failed save counts, or the earlier checkpoint does not load.
    """
    used = sum(SHARDS.values()) + 64 * 1024
    with small_disk(folder, used + room) as mechanism:
        store = CheckpointStore(folder, keep_last=None)
        save(store, 100)
        # A file limit of 0 would forbid the identity file and everything else at once.
        limit = file_size_limit(max(room, 1)) if mechanism == "RLIMIT_FSIZE" else nullcontext()
        with limit:
            outcome = _save_on_full_disk(store)
        found = CheckpointStore(folder).find()
        expected = 200 if outcome == "saved" else 100
        assert found is not None and found.manifest.step == expected, (room, outcome)
    shutil.rmtree(folder)
    return mechanism, outcome


def _save_on_full_disk(store: CheckpointStore) -> str:
    attempt = None
    try:
        attempt = store.begin(200)
        error: BaseException | None = None
        digests = {}
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


def full_disks(count: int, folder: Path) -> dict[str, Any]:
    """Saves with room for nothing up to room for all."""
    whole = sum(SHARDS.values()) + 256 * 1024
    outcomes: Counter[str] = Counter()
    mechanism = ""
    for number in range(count):
        mechanism, outcome = full_disk_once(folder / "disk", whole * number // (count - 1))
        outcomes[outcome] += 1
    return {
        "thresholds": count,
        "mechanism": mechanism,
        "outcomes": dict(outcomes),
        "previous_lost": 0,
    }


# ------------------------------------------------------------------------ kills

# Counts the calls by which a save touches the disk, and dies before the one it is told to.
KILLER = """
import builtins, os, signal, sys, io
at, calls = int(os.environ["DIE_AT"]), 0
def dying(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
sys.path.insert(0, os.environ["FUZZ_PATH"])
import fuzz_checkpoints as fuzz
from pathlib import Path
for name in ("open", "mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "listdir", "pread"):
    setattr(os, name, dying(getattr(os, name)))
real = io.open
def opened(*args, **kwargs):
    file = dying(real)(*args, **kwargs)
    return file
builtins.open = io.open = opened
store = fuzz.CheckpointStore(os.environ["STORE"], keep_last=2)
print("started", flush=True)
fuzz.save(store, 300)
print("calls", calls, flush=True)
"""


def killed_save(root: Path, at: int = 0, after: float | None = None) -> tuple[bool, int]:
    """A save of step 300 in a process of its own, killed; (whether it was, calls it made).

    Args:
        root: store with checkpoints of steps 100 and 200.
        at: dies before this call that touches the disk; 0: never.
        after: seconds after the save began until an outside kill.
    """
    environment = {
        **os.environ,
        "DIE_AT": str(at),
        "STORE": str(root),
        "FUZZ_PATH": str(Path(__file__).resolve().parent),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", KILLER], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    if after is not None:
        time.sleep(after)
        process.kill()
    rest = process.stdout.read()
    process.wait()
    calls = int(rest.split()[-1]) if "calls" in rest else 0
    return process.returncode == -signal.SIGKILL, calls


def check_after_kill(root: Path) -> str:
    """What a killed save left: a store that loads the old or the new one, and can save again.

    Raises:
        AssertionError: anything else.
    """
    (doubt,) = {path.name for path in root.glob("step_00000200.attempt-1")}
    found = CheckpointStore(root).find()
    assert found is not None and found.manifest.step in (200, 300), found
    CheckpointStore(root).check(root / doubt)
    store = CheckpointStore(root, keep_last=2)
    save(store, 400)
    after = store.find()
    assert after is not None and after.manifest.step == 400
    assert not list(root.glob("*.tmp")), list(root.iterdir())
    return "new" if found.manifest.step == 300 else "old"


def kills(points: int, instants: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kills before evenly spread calls of a save, and at random instants."""
    pristine = folder / "pristine-kill"
    two_checkpoints(pristine)
    work = folder / "work"
    shutil.copytree(pristine, work)
    started = time.perf_counter()
    _, calls = killed_save(work)
    duration = time.perf_counter() - started
    shutil.rmtree(work)
    outcomes: Counter[str] = Counter()
    for number in range(points):
        shutil.copytree(pristine, work)
        at = 1 + number * (calls - 1) // max(points - 1, 1)
        killed, _ = killed_save(work, at=at)
        assert killed, f"call {at} of {calls} was not reached"
        outcomes[check_after_kill(work)] += 1
        shutil.rmtree(work)
    rng = random.Random(seed)
    random_outcomes: Counter[str] = Counter()
    for _ in range(instants):
        shutil.copytree(pristine, work)
        killed, _ = killed_save(work, after=rng.uniform(0, min(duration, 0.05)))
        random_outcomes[check_after_kill(work) if killed else "finished first"] += 1
        shutil.rmtree(work)
    return {
        "calls_of_a_save": calls,
        "points": points,
        "loaded_after_points": dict(outcomes),
        "instants": instants,
        "loaded_after_instants": dict(random_outcomes),
        "lost": 0,
    }


# ------------------------------------------------------------------------- main


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--corruptions", type=int, default=308)
    parser.add_argument("--thresholds", type=int, default=20)
    parser.add_argument("--points", type=int, default=30)
    parser.add_argument("--instants", type=int, default=30)
    parser.add_argument("--only", choices=["corruptions", "disks", "kills"])
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    figures: dict[str, Any] = {"seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="fuzz-checkpoints-") as name:
        folder = Path(name)
        if options.only in (None, "corruptions"):
            figures["corruptions"] = corruptions(options.corruptions, options.seed, folder)
        if options.only in (None, "disks"):
            figures["full_disks"] = full_disks(options.thresholds, folder)
        if options.only in (None, "kills"):
            figures["kills"] = kills(options.points, options.instants, options.seed, folder)
    print(json.dumps(figures, indent=1))
    if options.only is None:
        from machine import write_result

        print(f"wrote {write_result('checkpoint_faults', figures, options.out).name}")
    return 0


if __name__ == "__main__":
    assert issubclass(SaveError, CheckpointError)
    raise SystemExit(main())
