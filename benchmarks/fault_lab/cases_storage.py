"""Disks, directories, data files and checkpoints that fail or change under a run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_lab import hooks
from fault_lab.case import Case, Scene
from fault_lab.cases_processes import beside, in_rank, no_more_files, slow_steps
from fault_lab.lab import Outcome, Running, make_corpus

# ------------------------------------------------------------------------------------------- disks


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def small_disk(scene: Scene) -> Path:
    """The run directory on a tmpfs of 8 MB."""
    scene.lab.run_dir.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", "size=8m", "none", str(scene.lab.run_dir))
    return scene.lab.run_dir


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(4096))
        except OSError:
            return


def full_disk(after: int, *sets: str, free: int | None = None) -> Callable[[Scene], Outcome]:
    """The disk is full after a step; ``free``: somebody makes room after that step."""

    def inject(scene: Scene) -> Outcome:
        folder = small_disk(scene)

        def outside(attempt: Running) -> None:
            attempt.wait_step(after)
            fill(folder)
            attempt.mark("the disk is full")
            if free is not None:
                attempt.wait_step(free)
                (folder / "ballast").unlink()

        return scene.play(*sets, hook=slow_steps(0.15), outside=outside)

    return inject


def free_disk(scene: Scene) -> None:
    """What a person does: make room; what failed saves wrote is gone already."""
    left = [f for f in (scene.lab.store / "aside").glob("*/*") if f.name != "reason.txt"]
    assert not left, left
    (scene.lab.run_dir / "ballast").unlink(missing_ok=True)


def read_only(which: str, *, step: int | None) -> Callable[[Scene], Outcome]:
    """Remount a directory read-only before the run (None) or after a step."""

    def inject(scene: Scene) -> Outcome:
        if step is None:
            scene.first_part()
        path = scene.lab.folder / which
        path.mkdir(parents=True, exist_ok=True)
        mount("--bind", str(path), str(path))
        scene.keep["mounted"] = path

        def act(attempt: Running) -> None:
            # A mount of its own: one in which a lock file is open for writing stays writable.
            mount("--bind", str(path), str(path))
            mount("-o", "remount,ro,bind", str(path))
            attempt.mark(f"{which} is read-only")

        if step is None:
            mount("-o", "remount,ro,bind", str(path))
            return scene.play()
        outcome: Outcome = beside(act, step=step)(scene)
        return outcome

    return inject


def writable(scene: Scene) -> None:
    mount("-o", "remount,rw,bind", str(scene.keep["mounted"]))


def vanish(which: str) -> Callable[[Running], None]:
    def act(attempt: Running) -> None:
        attempt.mark(f"{which} is deleted")
        shutil.rmtree(attempt.lab.folder / which, ignore_errors=True)

    return act


def vanish_inside_a_save(scene: Scene) -> Outcome:
    def do() -> None:
        hooks.injected("the open checkpoint is deleted")
        for path in Path("run/checkpoints").glob("*.tmp"):
            shutil.rmtree(path)

    return scene.play(hook=in_rank(1, "save hash", do, step=3))


def failing_writes(scene: Scene) -> Outcome:
    """EIO from every fsync of one rank's shards."""
    return scene.play(hook=_failing_hash(5))


def _failing_hash(number: int) -> Any:
    def hook(rank: int) -> None:
        if rank != 1:
            return
        real = os.fsync

        def fsync(handle: int) -> None:
            if "distcp" in os.readlink(f"/proc/self/fd/{handle}"):
                if not Path("marked").exists():
                    hooks.injected("EIO from fsync of a shard")
                    Path("marked").touch()
                raise OSError(number, os.strerror(number))
            real(handle)

        os.fsync = fsync

    return hook


DISKS = [
    Case(name="disk full at a save, room at the next", group="storage", after="finished", code=0,
         inject=full_disk(2, free=4), says="the disk or quota is full", needs_mount=True,
         note="the failed save is reported, the run goes on"),
    Case(name="disk full until the end", group="storage", inject=full_disk(4), needs_mount=True,
         says="the disk or quota is full", repair=free_disk, most_lost=5,
         note="no save after step 3 could succeed"),
    Case(name="disk full, three saves in a row", group="storage", repair=free_disk,
         inject=full_disk(2, "checkpoint.interval=1"), says="the disk or quota is full",
         needs_mount=True),
    Case(name="input/output error while saving", group="storage", inject=failing_writes,
         says="Input/output error", most_lost=8, note="no save could succeed"),
    Case(name="read-only run directory", group="storage", inject=read_only("run", step=None),
         says="run_dir: run: cannot be used", rank_code=2, repair=writable, needs_mount=True),
    Case(name="checkpoint directory becomes read-only", group="storage",
         inject=read_only("run/checkpoints", step=4), says="Read-only file system",
         repair=writable, needs_mount=True, most_lost=5),
    Case(name="checkpoint directory vanishes", group="storage", after="finished", code=0,
         inject=beside(vanish("run/checkpoints"), step=4),
         note="the next save makes it again; earlier checkpoints are gone with it"),
    Case(name="run directory vanishes", group="storage", inject=beside(vanish("run"), step=4),
         says="run directory run is gone or was replaced", ignore=("metrics",), most_lost=8,
         note="nothing is left to resume from; the run starts again"),
    Case(name="the open checkpoint vanishes", group="storage", after="finished", code=0,
         inject=vanish_inside_a_save, says="No such file"),
    Case(name="out of file descriptors", group="storage", says="Too many open files", most_lost=5,
         inject=lambda scene: scene.play(hook=in_rank(0, "step end", no_more_files, step=4))),
]  # fmt: skip


# -------------------------------------------------------------------------------------------- data


def data_between(change: Callable[[Scene], None]) -> Callable[[Scene], Outcome]:
    """Train the first part, change the data, try to go on."""

    def inject(scene: Scene) -> Outcome:
        scene.first_part()
        change(scene)
        return scene.play()

    return inject


def hide(scene: Scene) -> None:
    (scene.lab.folder / "corpus.bin").rename(scene.lab.folder / "corpus.hidden")


def unhide(scene: Scene) -> None:
    (scene.lab.folder / "corpus.hidden").rename(scene.lab.folder / "corpus.bin")


def cut(scene: Scene) -> None:
    file = scene.lab.folder / "corpus.bin"
    scene.keep["bytes"] = file.read_bytes()
    os.truncate(file, file.stat().st_size // 2)


def flip(scene: Scene) -> None:
    file = scene.lab.folder / "corpus.bin"
    data = scene.keep["bytes"] = file.read_bytes()
    file.write_bytes(data[:1000] + bytes([data[1000] ^ 4]) + data[1001:])


def put_back(scene: Scene) -> None:
    (scene.lab.folder / "corpus.bin").write_bytes(scene.keep["bytes"])


def other_corpus(scene: Scene) -> None:
    """Another good dataset under the same name."""
    folder = scene.lab.folder
    scene.keep["files"] = {p: p.read_bytes() for p in folder.glob("corpus*") if p.is_file()}
    text = folder / "corpus.txt"
    for path in scene.keep["files"]:
        path.unlink()
    make_corpus(folder, words="another text")
    assert text.exists()


def old_corpus(scene: Scene) -> None:
    for path, data in scene.keep["files"].items():
        path.write_bytes(data)


def gone_while_running(scene: Scene) -> Outcome:
    def act(attempt: Running) -> None:
        attempt.mark("corpus.bin is deleted")
        os.unlink(attempt.lab.folder / "corpus.bin")

    file = scene.lab.folder / "corpus.bin"
    scene.keep["bytes"] = file.read_bytes()
    outcome: Outcome = beside(act, step=2)(scene)
    return outcome


def cut_while_running(scene: Scene) -> Outcome:
    def act(attempt: Running) -> None:
        attempt.mark("corpus.bin is truncated")
        os.truncate(attempt.lab.folder / "corpus.bin", 0)

    scene.keep["bytes"] = (scene.lab.folder / "corpus.bin").read_bytes()
    outcome: Outcome = beside(act, step=2)(scene)
    return outcome


DATA = [
    Case(name="data file missing at the start", group="data", inject=data_between(hide),
         says=r"corpus.bin: missing", rank_code=2, repair=unhide, within=10),
    Case(name="data file truncated at the start", group="data", inject=data_between(cut),
         says=r"truncated", rank_code=2, repair=put_back, within=10),
    Case(name="one bit of the data flipped", group="data", inject=data_between(flip),
         says=r"are not what its manifest recorded", rank_code=2, repair=put_back, within=10),
    Case(name="another corpus under the same name", group="data",
         inject=data_between(other_corpus), says="the token files are not those", rank_code=2,
         repair=old_corpus, within=10),
    Case(name="data file deleted while training", group="data", inject=gone_while_running, code=0,
         after="finished", note="it stays open: nothing is lost; the next start refuses"),
    Case(name="data file truncated while training", group="data", inject=cut_while_running,
         says=r"ended at byte .* while it was used", rank_code=2, repair=put_back),
]  # fmt: skip


# ------------------------------------------------------------------------------------- checkpoints


def checkpoint(change: Callable[[Path], None]) -> Callable[[Scene], Outcome]:
    """Train past two checkpoints, damage the newest, go on."""

    def inject(scene: Scene) -> Outcome:
        scene.first_part(6)
        store = scene.lab.store
        change(store / (store / "latest").read_text().strip())
        return scene.play()

    return inject


def shard(path: Path) -> Path:
    return sorted(path.glob("__*.distcp"))[0]


def flip_in_shard(path: Path) -> None:
    file = shard(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def damage_all(path: Path) -> None:
    for folder in path.parent.glob("step_*"):
        flip_in_shard(folder)


def all_bad(scene: Scene) -> Outcome:
    outcome = checkpoint(damage_all)(scene)
    return outcome


def restore_all(scene: Scene) -> None:
    """A person repairs them (the same bits again); they are where they were."""
    for folder in scene.lab.store.glob("step_*"):
        flip_in_shard(folder)


def key_changed(scene: Scene) -> Outcome:
    for name in ("one", "two"):
        file = scene.lab.folder / f"{name}.key"
        file.write_text(name * 16)
        file.chmod(0o600)
    scene.play("training.exit_at_step=5", "checkpoint.hmac_key_file=one.key")
    return scene.play("checkpoint.hmac_key_file=two.key")


def refused(name: str, change: Callable[[Path], None], says: str) -> Case:
    return Case(name=name, group="checkpoints", inject=checkpoint(change), says=says, code=0,
                after="finished", note="the one before it is loaded")  # fmt: skip


CHECKPOINTS = [
    refused("newest checkpoint: one bit flipped", flip_in_shard, "refused: .*SHA-256"),
    refused("newest checkpoint: shard truncated", lambda p: os.truncate(shard(p), 100),
            "refused: .*bytes, expected"),
    refused("newest checkpoint: shard missing", lambda p: shard(p).unlink(), "refused: missing"),
    refused("newest checkpoint: manifest missing", lambda p: (p / "manifest.json").unlink(),
            "refused: .*manifest.json"),
    refused("newest checkpoint: shard of another step",
            lambda p: shutil.copy(shard(p.parent / "step_00000003.attempt-1"), shard(p)) and None,
            "refused"),
    refused("pointer names nothing", lambda p: (p.parent / "latest").write_text("x\n") and None,
            "taking the newest"),
    Case(name="every checkpoint damaged", group="checkpoints", inject=all_bad, rank_code=4,
         says="no good checkpoint in", repair=restore_all, most_lost=6,
         note="it never starts from scratch by itself"),
    Case(name="signed with another key", group="checkpoints", inject=key_changed, rank_code=4,
         says="signed with another key", sets=(), most_lost=5),
]  # fmt: skip

CASES = [*DISKS, *DATA, *CHECKPOINTS]
