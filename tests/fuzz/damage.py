"""What disks and transfers do to a file; ``rng`` chooses where."""

from __future__ import annotations

import os
import random
from pathlib import Path

PAGE = 4096


def flip_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def zero_page(path: Path, rng: random.Random) -> None:
    """A hole, as a lost write leaves it."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(0, len(data), PAGE)
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    path.write_bytes(data)


def swap_pages(path: Path, rng: random.Random) -> None:
    """Two pages in each other's place: same bytes, same sum, same size."""
    data = bytearray(path.read_bytes())
    if len(data) < 2 * PAGE:
        flip_bit(path, rng)
        return
    a, b = (PAGE * page for page in rng.sample(range(len(data) // PAGE), 2))
    data[a : a + PAGE], data[b : b + PAGE] = data[b : b + PAGE], data[a : a + PAGE]
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    size = path.stat().st_size
    os.truncate(path, rng.choice([0, rng.randrange(size), size - 1]))


def extend(path: Path, rng: random.Random) -> None:
    with path.open("ab") as stream:
        stream.write(rng.choice([b"\0", b"\n", os.urandom(rng.randint(1, 9999))]))


def missing(path: Path, rng: random.Random) -> None:
    path.unlink()
