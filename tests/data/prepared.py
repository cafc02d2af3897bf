"""What the tests of prepare-data write and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_patch.data.verify import check_quickly

ENDINGS = (".bin", ".idx", ".manifest.json")


def content(prefix: Path) -> dict[str, bytes]:
    return {ending: Path(f"{prefix}{ending}").read_bytes() for ending in ENDINGS}


def tokens_of(prefix: Path) -> list[bytes]:
    """Documents of a byte-level dataset, without their end."""
    stream = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    ends = np.flatnonzero(stream == 256)
    starts = np.concatenate([[0], ends[:-1] + 1])
    return [bytes(stream[a:b].astype(np.uint8)) for a, b in zip(starts, ends, strict=True)]


def lines(texts: list[str]) -> bytes:
    records = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts)]
    return "\n".join(records).encode() + b"\n"


def check_dataset(prefix: Path, *, mode: Literal["full", "sampled"] = "full") -> list[str]:
    """All problems of one dataset, hashes included."""
    findings = check_quickly(prefix, None, mode=mode)
    if not findings.problems:
        findings.problems += [p for piece in findings.pieces if (p := piece.check())]
    return findings.problems
