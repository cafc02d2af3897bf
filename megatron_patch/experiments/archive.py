"""Carry an experiment's records between machines, in a few files of bounded size.

Checkpoints stay behind: a 124M run with its optimizer is 1.6 GB. What travels is enough for every
table, plot and report; a run that was cut can be continued only where its checkpoints are, and
starts again from step 0 elsewhere.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.files import make_folder, read_json, refuse_run, write_json
from megatron_patch.experiments.preconditions import alike, comparable
from megatron_patch.experiments.store import ENDED, differences, job_of, lock, set_aside
from megatron_patch.experiments.verdict import Row, begins_with, parse_rows, read_rows
from megatron_patch.runtime.files import replacing, sync_directory, write_whole
from megatron_patch.training.run_directory import is_taken

FORMAT = "megatron-patch experiment 1"
MANIFEST = "manifest.json"
LEFT_BEHIND = ("checkpoints", "last_checkpoint.json", "tensorboard", "wandb")
SHARED = ("experiment.json", "states.json")
UNPACKING = ".unpacking"
"""In ``runs/``: where the files of a run lie until all of them are there."""
SHOWN = 3
_LARGEST = 1 << 30
_SLACK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Archive:
    """One archive that was read, every byte checked."""

    path: Path
    experiment: str
    job: str
    pack: str
    """Which call of `pack` wrote it, the time first; empty in archives that do not say."""
    number: int
    of: int
    """How many archives that call wrote."""
    files: dict[str, bytes]


def pack(experiment: Path, to: Path, *, files: int, limit: int) -> Iterator[str]:
    """Write ``<to>/<name>.<job>.<n>.zip``; yields what was written and what was left out.

    ``job`` is this directory's own: archives of several jobs may lie in one folder. Those that are
    there are replaced when all new ones are whole, so that a machine lost meanwhile leaves one set.

    Args:
        experiment: directory of an experiment.
        to: folder of the archives.
        files: how many archives at most.
        limit: bytes of one archive at most.

    Raises:
        ExperimentError: no experiment there, its small records alone do not fit, or ``to`` cannot
            be written.
    """
    if not (experiment / "experiment.json").is_file():
        raise ExperimentError(f"{experiment} is no experiment: it has no experiment.json")
    fixed = read_json(experiment / "experiment.json")
    name, job = str(fixed.get("name")), job_of(fixed)
    bins: list[list[tuple[Path, bytes]]] = [[] for _ in range(files)]
    room = [limit - _SLACK] * files
    left_out = []
    for path in sorted(_records(experiment), key=lambda p: (_rank(p, experiment), p)):
        data = path.read_bytes()
        size = len(zlib.compress(data, 6)) + 512
        place = next((i for i in range(files) if size <= room[i]), None)
        if place is not None:
            bins[place].append((path.relative_to(experiment), data))
            room[place] -= size
        elif _rank(path, experiment) == 0:
            raise ExperimentError(f"{path} does not fit into {files} files of {limit:,} bytes")
        else:
            left_out.append((path.relative_to(experiment), len(data)))
    make_folder(to, "--to")
    yield from _write_all(to, {"experiment": name, "job": job}, [b for b in bins if b])
    for relative, size in left_out:
        yield f"left out, no room: {relative} ({size:,} bytes)"


def _records(experiment: Path) -> Iterator[Path]:
    for folder, inside, names in os.walk(experiment):
        inside[:] = [n for n in inside if n not in (*LEFT_BEHIND, UNPACKING)]
        for name in set(names).difference(LEFT_BEHIND):
            path = Path(folder) / name
            if not name.startswith(".") and not name.endswith(".tmp") and not path.is_symlink():
                yield path


def _rank(path: Path, experiment: Path) -> int:
    """What must travel first: records, then logs, then telemetry, then captured tensors."""
    parts = path.relative_to(experiment).parts
    if "captures" in parts:
        return 3
    if "stability" in parts[2:]:
        return 2
    return 1 if parts[0] == "logs" or path.suffix == ".log" else 0


def _write_all(
    to: Path, names: dict[str, str], contents: list[list[tuple[Path, bytes]]]
) -> Iterator[str]:
    """Archives that say which call wrote them, and how many it wrote."""
    made = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    facts: dict[str, str | int] = {
        **names, "pack": f"{made}-{secrets.token_hex(4)}", "archives": len(contents)
    }  # fmt: skip
    targets = [to / _name(**names, number=number) for number in range(len(contents))]
    drafts = [target.with_name(f"{target.name}.new") for target in targets]
    try:
        for number, content in enumerate(contents):
            _write(drafts[number], facts | {"archive": number}, content)
        for draft, target in zip(drafts, targets, strict=True):
            os.replace(draft, target)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    sync_directory(to)
    for target, content in zip(targets, contents, strict=True):
        yield f"{target}: {len(content)} files, {target.stat().st_size:,} bytes"


def _name(*, experiment: str, job: str, number: int) -> str:
    return f"{experiment}.{job}.{number}.zip"


def _write(target: Path, names: dict[str, str | int], content: list[tuple[Path, bytes]]) -> None:
    files = {
        relative.as_posix(): {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        for relative, data in content
    }
    manifest = {"format": FORMAT, **names, "files": files}
    with replacing(target, "wb") as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
        for relative, data in content:
            archive.writestr(relative.as_posix(), data)


def unpack(archives: list[Path], out: Path) -> Iterator[str]:
    """Merge archives, of one job or several, into ``out``; yields what was taken and what was not.

    A run appears whole. After an interruption the same call again does what is left.

    Raises:
        ExperimentError: a damaged or foreign archive, one without the others of its 'pack', or one
            of another experiment or machine than ``out`` or the other archives hold; ``out`` is
            the directory of a run; it, or one of its runs that the archives have, is in use.
            Nothing has been changed then.
    """
    refuse_run(out)
    sets = _sets([_read(path) for path in archives])
    _check(sets, out)  # before anything is made
    make_folder(out, "--out")
    notes: list[str] = []
    with lock(out, notes):
        yield from notes
        _check(sets, out)  # what is there may have become another one until it was ours
        _check_idle(sets, out)
        drafts = out / "runs" / UNPACKING
        if drafts.exists():
            shutil.rmtree(drafts)
            yield f"removed what an interrupted 'unpack' has left: {drafts}"
        try:
            for content in sets:
                yield from _merge(content, out)
        finally:
            shutil.rmtree(drafts, ignore_errors=True)


def _check(sets: list[dict[str, bytes]], out: Path) -> None:
    """Refuse archives that do not go with each other, or with ``out``."""
    seen = _shared_files(out)
    for content in sets:
        for needed in SHARED:
            if needed not in content:
                raise ExperimentError(f"{needed} is missing: give all archives of one 'pack'")
        _compare(content, seen, out)
        seen = {n: d for n, d in content.items() if _is_shared(n)} | seen


def _check_idle(sets: list[dict[str, bytes]], out: Path) -> None:
    """Refuse to replace a run under its trainer, which may have outlived its launcher."""
    for run in sorted({run for content in sets for run in _runs_of(content)}):
        if is_taken(out / "runs" / run):
            raise ExperimentError(
                f"{out / 'runs' / run}: a process trains in this run directory right now; wait "
                "until it has ended, or name another --out"
            )


def _runs_of(content: dict[str, bytes]) -> set[str]:
    """Runs of which there is a file."""
    found = (PurePosixPath(name).parts for name in content)
    return {parts[1] for parts in found if parts[0] == "runs" and len(parts) > 2}


def _sets(archives: list[_Archive]) -> list[dict[str, bytes]]:
    """What every call of `pack` wrote, all its archives together; the newest call first."""
    names = {archive.experiment for archive in archives}
    if len(names) != 1:
        raise ExperimentError(f"archives of different experiments: {', '.join(sorted(names))}")
    groups: dict[tuple[str, str], list[_Archive]] = {}
    for archive in archives:
        groups.setdefault((archive.pack, archive.job), []).append(archive)
    # Of one job's, the later records go on from the earlier: taken first, nothing is set aside.
    ordered = sorted(groups.items(), key=lambda group: group[0][0], reverse=True)
    for (made, _), group in ordered:
        if made:
            _check_complete(group)
    return [{n: d for archive in group for n, d in archive.files.items()} for _, group in ordered]


def _check_complete(group: list[_Archive]) -> None:
    """Refuse a part of what a 'pack' wrote: a run's state and its rows may be in different ones."""
    given, one = {archive.number for archive in group}, group[0]
    count = one.of - len(given)
    if count <= 0:
        return
    lacking = (number for number in range(one.of) if number not in given)
    missing = [
        _name(experiment=one.experiment, job=one.job, number=number)
        for number in itertools.islice(lacking, SHOWN)
    ]
    more = f" and {count - SHOWN} more" if count > SHOWN else ""
    raise ExperimentError(
        f"missing of the {one.of} archives of 'pack' {one.pack}: {', '.join(missing)}{more}; copy "
        "them again, all at one time (while they are replaced, a copy gets some of an older "
        f"'pack'), or leave out {', '.join(str(archive.path) for archive in group)}"
    )


def _is_shared(name: str) -> bool:
    return name == "experiment.json" or name.startswith("reference/")


def _shared_files(out: Path) -> dict[str, bytes]:
    """What all runs of the experiment in ``out`` share; empty without one."""
    paths = [out / "experiment.json", *sorted((out / "reference").glob("*.json"))]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in paths if p.is_file()}


def _read(path: Path) -> _Archive:
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(_member(archive, MANIFEST, limit=1 << 24))
            if manifest["format"] != FORMAT:
                raise ExperimentError(f"{path}: format {manifest['format']!r}, not {FORMAT!r}")
            found = {}
            for name, facts in manifest["files"].items():
                _check_name(path, name)
                data = _member(archive, name, limit=min(int(facts["size"]), _LARGEST))
                if hashlib.sha256(data).hexdigest() != facts["sha256"]:
                    raise ExperimentError(f"{path}: {name} is damaged (its hash differs)")
                found[name] = data
            named = "pack" in manifest
            number, of = (int(manifest[n]) for n in ("archive", "archives")) if named else (0, 1)
            if not 0 <= number < of:
                raise ValueError(f"archive {number} of {of}")
            return _Archive(
                path=path,
                experiment=str(manifest["experiment"]),
                job=str(manifest.get("job", "")),  # without names, all given are of one job
                pack=str(manifest["pack"]) if named else "",
                number=number,
                of=of,
                files=found,
            )
    except (
        *(OSError, zipfile.BadZipFile, zlib.error),
        *(KeyError, TypeError, ValueError, RecursionError),
    ) as error:
        if isinstance(error, ExperimentError):
            raise
        raise ExperimentError(f"{path}: not an archive of an experiment ({error})") from error


def _member(archive: zipfile.ZipFile, name: str, *, limit: int) -> bytes:
    """A member's content; one that is longer than announced is refused, not expanded."""
    with archive.open(name) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ExperimentError(f"{archive.filename}: {name} is longer than its manifest says")
    return data


def _check_name(path: Path, name: str) -> None:
    parts = PurePosixPath(name).parts
    strange = name.startswith("/") or "\\" in name or "\0" in name or not parts
    if strange or not {"..", UNPACKING}.isdisjoint(parts):
        raise ExperimentError(f"{path}: refuses to write to {name!r}")


def _parse(name: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ExperimentError(f"{name} is damaged ({error}), here or in the archive") from error
    if not isinstance(found, dict):
        raise ExperimentError(f"{name} is damaged (no mapping), here or in the archive")
    return found


def _compare(content: dict[str, bytes], seen: dict[str, bytes], out: Path) -> None:
    """Refuse to mix experiments or software: ``seen`` is what is there, or came before."""
    _parse("states.json", content["states.json"])
    there = _experiment(content["experiment.json"])
    if "experiment.json" in seen:
        here = _experiment(seen["experiment.json"])
        same = here["name"] == there["name"] and here["explosion"] == there["explosion"]
        if not same or differences(here["runs"], there["runs"]):
            raise ExperimentError(f"{out} holds another experiment or another version of it")
    for name in sorted(content):
        if not name.startswith("reference/"):
            continue
        theirs = _fingerprint(name, content[name])
        if name in seen and not alike(_fingerprint(name, seen[name]), theirs):
            raise ExperimentError(
                f"{name} differs: the runs were made with other weights, batches, software or "
                f"device than those in {out}; unpack them into a directory of their own"
            )


def _experiment(data: bytes) -> dict[str, Any]:
    found = _parse("experiment.json", data)
    if not isinstance(found.get("runs"), dict) or not found.keys() >= {"name", "explosion"}:
        raise ExperimentError("experiment.json is damaged (no experiment), here or in the archive")
    return found


def _fingerprint(name: str, data: bytes) -> dict[str, Any]:
    found = _parse(name, data)
    try:
        comparable(found)
    except ExperimentError as error:
        raise ExperimentError(f"{name} is damaged ({error}), here or in the archive") from None
    return found


def _merge(content: dict[str, bytes], out: Path) -> Iterator[str]:
    new = not (out / "experiment.json").exists()
    theirs = _parse("states.json", content["states.json"])
    here = out / "states.json"
    states = read_json(here) if here.exists() else {}
    taken = []
    for run in sorted(_runs_of(content)):
        ours, others = read_rows(out / "runs" / run / "metrics.csv"), _rows_of(content, run)
        had, has = _last_step(ours), _last_step(others)
        same = had == has and begins_with(ours, others)
        mine, other = ((_ended(found, run), last) for found, last in ((states, had), (theirs, has)))
        if ours and (same or mine >= other):
            yield f"{run}: kept what is here (step {had:,}; the archive has {has:,})"
            if others and not begins_with(ours, others):
                beside = _write_beside(content, run, out)
                yield f"{run}: the archive's is another attempt at it, kept as {beside.name}"
            continue
        taken.append(run)
        _draft(content, run, out)
    # Without a state until its records are in place: this call again finds one of the two missing.
    write_json(here, {run: state for run, state in states.items() if run not in taken})
    _write_others(content, out, set(taken), new=new)
    for run in taken:
        if (out / "runs" / run).exists():
            set_aside(out / "runs" / run)
        _place(out / "runs" / run, run)
        if ".replaced_" not in run:
            states[run] = theirs.get(run, states.get(run, {}))
        yield f"{run}: taken, to step {_last_step(_rows_of(content, run)):,}"
    for run, state in theirs.items():
        states.setdefault(run, state)
    write_json(here, states)
    if new:  # last: what is not finished is new again the next time
        # A job of its own: with that of the archives, two directories made of them would take each
        # other's archives and results in one folder for their own, and remove them.
        fixed = _parse("experiment.json", content["experiment.json"])
        write_json(out / "experiment.json", fixed | {"job": secrets.token_hex(4)})
    else:
        _add_runs(content, out)


def _ended(states: dict[str, Any], run: str) -> bool:
    """Whether a run came to its end: that attempt counts before one that was cut, if longer."""
    return states.get(run, {}).get("state") in ENDED


def _write_others(content: dict[str, bytes], out: Path, taken: set[str], *, new: bool) -> None:
    """What is of no run's directory: references, logs of the runs taken; all there is, if new."""
    runs = _runs_of(content)
    for name, data in content.items():
        parts = PurePosixPath(name).parts
        if name in SHARED or (parts[0] == "runs" and parts[1] in runs):
            continue
        wanted = new or parts[0] == "reference"
        if parts[0] == "logs":
            wanted = PurePosixPath(name).stem in taken
        if wanted and not (parts[0] == "reference" and (out / name).exists()):
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, data)


def _draft(content: dict[str, bytes], run: str, out: Path) -> None:
    """Write a run's files, to the disk, where nobody looks for a run."""
    folder = out / "runs" / UNPACKING / run
    for name, data in content.items():
        parts = PurePosixPath(name).parts
        if parts[:2] == ("runs", run):
            path = folder.joinpath(*parts[2:])
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
    for inside, _, _ in os.walk(folder):
        sync_directory(Path(inside))


def _place(target: Path, run: str) -> None:
    """Make the draft of ``run`` the run directory ``target``."""
    os.rename(target.parent / UNPACKING / run, target)
    sync_directory(target.parent)


def _add_runs(content: dict[str, bytes], out: Path) -> None:
    """Runs that the archive's protocol has and ours has not."""
    file = out / "experiment.json"
    here = read_json(file)
    here["runs"] = _parse(file.name, content[file.name])["runs"] | here["runs"]
    write_json(file, here)


def _write_beside(content: dict[str, bytes], run: str, out: Path) -> Path:
    """Keep an archive's attempt at a run that went less far: every attempt is reported."""
    mine = content[f"runs/{run}/metrics.csv"]
    for known in sorted((out / "runs").glob(f"{run}.replaced_*")):
        if (known / "metrics.csv").is_file() and (known / "metrics.csv").read_bytes() == mine:
            return known  # the same archive again
    target = out / "runs" / run
    number = 1
    while (beside := target.with_name(f"{run}.replaced_{number}")).exists():
        number += 1
    _draft(content, run, out)
    _place(beside, run)
    return beside


def _last_step(rows: list[Row]) -> int:
    return int(rows[-1]["step"]) if rows else 0


def _rows_of(content: dict[str, bytes], run: str) -> list[Row]:
    data = content.get(f"runs/{run}/metrics.csv")
    return [] if data is None else parse_rows(io.StringIO(data.decode("utf-8", "replace")))
