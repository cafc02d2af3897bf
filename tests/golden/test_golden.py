"""The tree does, bit for bit, what the commit that the golden set was recorded from does.

A stored result is compared where it holds: same versions, same processor features. Elsewhere, and
where it differs, the commit itself is run here and decides. A result that changes on purpose is
recorded again with record.py, in a commit of its own.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden import record


@pytest.mark.parametrize("part", record.PARTS)
def test_same_as_recorded(part, tmp_path):
    stored = json.loads((record.STORED / f"{part}.json").read_text())
    found = record.PARTS[part](record.ROOT, new(tmp_path / "tree"))
    here = record.holds_for(part)
    if found == stored["found"] and here == stored["holds_for"]:
        return
    text = "\n".join(list(differences(stored["found"], found))[:20])
    text = f"{part} as recorded from {stored['commit'][:12]} -> as found:\n{text}"
    if part == "configs":  # depends on nothing but the tree
        pytest.fail(text)
    base = checkout(stored["commit"], new(tmp_path / "base"))
    if base is None and here == stored["holds_for"]:
        pytest.fail(text)
    if base is None:
        pytest.skip(
            f"recorded for {stored['holds_for']}, here is {here}, and git has no commit "
            f"{stored['commit']} to record from"
        )
    expected = record.PARTS[part](base, new(tmp_path / "work"))
    text = "\n".join(list(differences(expected, found))[:20])
    assert found == expected, f"{part} of {stored['commit'][:12]} run here -> as found:\n{text}"
    if here == stored["holds_for"]:
        warnings.warn(f"{part}: the stored result does not hold here either", stacklevel=1)


def test_every_difference_is_told():
    old = {"metrics": {"1": {"loss": "5.1"}, "2": {"loss": "4.0"}}, "lines": ["a", "b"]}
    new = {"metrics": {"1": {"loss": "5.2"}}, "lines": ["a", "c", "d"]}
    assert list(differences(old, old)) == []
    assert list(differences(old, new)) == [
        "metrics.1.loss: '5.1' -> '5.2'",
        "metrics.2: {'loss': '4.0'} -> nothing",
        "lines.1: 'b' -> 'c'",
        "lines.2: nothing -> 'd'",
    ]


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def checkout(commit: str, folder: Path) -> Path | None:
    """The packages and configurations of a commit in ``folder``; None if git does not have it."""
    paths = ["megatron_patch", "kernels", "configs", "pyproject.toml"]
    command = ["git", "-C", str(record.ROOT), "archive", commit, *paths]
    try:
        done = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        return None
    if done.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """A line for every value that is not the same."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield f"{path}: {old!r} -> {new!r}"
        return
    for key in dict.fromkeys([*old, *new]):
        below = f"{path}.{key}" if path else str(key)
        if key not in new:
            yield f"{below}: {old[key]!r} -> nothing"
        elif key not in old:
            yield f"{below}: nothing -> {new[key]!r}"
        else:
            yield from differences(old[key], new[key], below)
