"""Disks that are full while a test says so: a tmpfs that something else fills, or a file limit."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

KINDS = ("tmpfs", "limit")
ROOM = 1 << 20


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """``folder`` as a tmpfs of ``size`` bytes; False where that cannot be mounted (no limit)."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.run(mount, capture_output=True).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes: what needs no root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@dataclass(frozen=True)
class Disk:
    """``folder`` lies on it."""

    folder: Path
    mounted: bool

    @contextmanager
    def full(self) -> Iterator[None]:
        """No file grows; on a tmpfs not beyond its last page, so that a record is torn there."""
        if not self.mounted:
            with file_size_limit(1):
                yield
            return
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as out:
            try:
                while True:
                    out.write(b"x" * 4096)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        try:
            yield
        finally:
            filler.unlink()


@contextmanager
def disk(folder: Path, kind: str) -> Iterator[Disk]:
    """A `Disk` of this kind; the test is skipped where no tmpfs can be mounted."""
    if kind == "limit":
        folder.mkdir()
        yield Disk(folder, mounted=False)
        return
    with small_disk(folder, ROOM) as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        yield Disk(folder, mounted=True)


@contextmanager
def room_for(path: Path, more: int) -> Iterator[None]:
    """No file grows beyond the size of this one and so many bytes: a write is torn there."""
    with file_size_limit(path.stat().st_size + more):
        yield
