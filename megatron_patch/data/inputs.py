"""What the inputs of ``prepare-data`` name: every entry is found, none is passed over.

Directories are walked in the order of their names, linked ones too, and what is reached twice is
read once. An entry that holds no documents is refused, unless ``--skip-unknown`` leaves it out;
then it is listed and counted.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_patch.data.errors import DataError, unread
from megatron_patch.data.options import PrepareOptions

HIDDEN = ("_SUCCESS", "_metadata", "_common_metadata", "_temporary", "__MACOSX", "Thumbs.db")
"""What frameworks and systems leave beside documents, besides names that begin with a dot."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory, or one input."""

    path: Path
    name: str
    """Below the input it was found in: no directory of this machine."""
    unknown: str = ""
    """Why it cannot be read; empty for a regular file."""
    again: str = ""
    """What it was reached as before, and is read as."""


@dataclass(slots=True)
class Walk:
    """Goes through the inputs and remembers what it has reached."""

    options: PrepareOptions
    _reached: dict[tuple[int, int], tuple[str, str, int]] = field(default_factory=dict)
    """Device and inode to the name it was reached as, its absolute path and the input's number."""
    _ours: set[tuple[int, int]] = field(default_factory=set)
    _input: int = 0

    def __post_init__(self) -> None:
        out = self.options.out
        paths = [f"{out}{ending}" for ending in (".parts", ".bin", ".idx", ".manifest.json")]
        for path in filter(None, [*paths, self.options.tokenizer_path]):
            # What this command writes and reads itself is no input, wherever it lies.
            with contextlib.suppress(OSError):
                found = os.stat(path)
                self._ours.add((found.st_dev, found.st_ino))

    def entries(self, text: str) -> list[Entry]:
        """All entries of one input: a file, a directory or a glob.

        Raises DataError: it names nothing.
        """
        self._input += 1
        if os.path.lexists(text):
            path = Path(text)
            return list(self._below(path, "" if os.path.isdir(path) else path.name))
        matches = sorted(glob.glob(text, recursive=True))
        if not matches:
            raise DataError(f"{text}: no such file or directory, and no glob that matches any")
        root = Path(text)
        while glob.has_magic(str(root)):
            root = root.parent
        return list(self._matched(matches, root))

    def _matched(self, matches: list[str], root: Path) -> Iterator[Entry]:
        """What a glob names. It follows links, those that lead back until the path is too long:
        a folder that is reached by another way is logged once."""
        matches = [match.rstrip("/") or "/" for match in matches]
        opened = {os.path.dirname(match) for match in matches}
        folders: dict[str, str] = {}
        logged: set[str] = set()
        for match in matches:
            folder = os.path.dirname(match)
            real = os.path.realpath(folder)
            first = folders.setdefault(real, folder)
            if first != folder and real not in logged:
                logged.add(real)
                name, before = (os.path.relpath(path or ".", root) for path in (folder, first))
                again = "the whole input" if before == "." else before
                yield Entry(Path(folder), name, again=again)
            # A folder whose entries are named (`**`) is not walked: hidden ones are not named.
            if first == folder and match not in opened:
                yield from self._below(Path(match), os.path.relpath(match, root))

    def _below(self, path: Path, name: str) -> Iterator[Entry]:
        """The entry itself, which the user named, or what is in it, in the order of names."""
        waiting, named = [(path, name)], True
        while waiting:
            path, name = waiting.pop()
            first, named = named, False
            hidden = (path.name.startswith(".") or path.name in HIDDEN) and not first
            try:
                found = path.stat()
            except OSError as error:
                yield self._unreachable(path, name, error)
                continue
            if (found.st_dev, found.st_ino) in self._ours and not first:
                continue
            if hidden:
                what = "a hidden folder" if stat.S_ISDIR(found.st_mode) else "hidden"
                yield Entry(path, name, unknown=what)
                continue
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                yield Entry(path, name, unknown=_special(found.st_mode))
                continue
            now = (name, os.path.abspath(path), self._input)
            before = self._reached.setdefault((found.st_dev, found.st_ino), now)
            if before is not now:
                # A glob with ** names a directory and what is in it: no news.
                if before[1:] != now[1:]:
                    yield Entry(path, name, again=before[0] or "the whole input")
            elif stat.S_ISREG(found.st_mode):
                yield Entry(path, name)
            else:
                try:
                    inside = sorted(os.listdir(path), reverse=True)
                except OSError as error:
                    yield self._unreachable(path, name, error)
                    continue
                waiting += [(path / n, f"{name}/{n}" if name else n) for n in inside]

    def _unreachable(self, path: Path, name: str, error: OSError) -> Entry:
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            return Entry(path, name, unknown="a link to nothing")
        reason = unread("", error)
        if type(reason) is not str or isinstance(error, FileNotFoundError):
            raise DataError(unread(path, error)) from error
        return Entry(path, name, unknown=reason.removeprefix(": "))


def _special(mode: int) -> str:
    names = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a device",
             stat.S_IFCHR: "a device"}  # fmt: skip
    what = names.get(stat.S_IFMT(mode))
    return f"{what}: documents are read from files, which can be read again" if what else "no file"
