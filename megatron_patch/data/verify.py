"""Every dataset of a run against its manifest, before the first token is used.

Megatron-Core checks neither the size nor the content of ``.bin``, and takes the dtype from one byte
of ``.idx``: truncated files, flipped bits, another corpus of the same size and a wrong dtype all
train silently on wrong data. Here they are refused. ``data.verify: full`` reads every byte;
``sampled`` reads the first, the last and 254 evenly spaced pages of 64 KiB of each ``.bin`` (all of
a file up to 16 MiB): it finds truncation, extension and exchanged files, and misses any damage
that touches no sampled page. ``.idx`` and the manifest are always read whole.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_patch.data import tokenizers
from megatron_patch.data.errors import DataError, unread
from megatron_patch.data.indexed import DTYPES, index_problems, open_index
from megatron_patch.data.manifest import REMEDY, FileRecord, Manifest, read_manifest, sample_hash
from megatron_patch.data.progress import Progress, human
from megatron_patch.parallel.first_rank import of_all
from megatron_patch.runtime.heartbeat import PULSE
from megatron_patch.schema.run import RunConfig

_ROUND_SECONDS = 20.0
"""Ranks that have nothing to hash hear from the others this often: below every group timeout."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a file and the hash it must have."""

    path: Path
    offset: int
    size: int
    sha256: str

    def check(self) -> str | None:
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(self.offset)
                digest = hashlib.sha256()
                left = self.size
                while left and (data := stream.read(min(left, 1 << 20))):
                    digest.update(data)
                    left -= len(data)
        except OSError as error:
            return unread(self.path, error, REMEDY)
        if digest.hexdigest() == self.sha256:
            return None
        end = self.offset + self.size
        return (
            f"{self.path}: the bytes {self.offset:,} to {end:,} are not what its manifest "
            f"recorded (sha256 differs); {REMEDY}"
        )


@dataclass(slots=True)
class Findings:
    """What one process knows of a dataset after the quick checks."""

    problems: list[str] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    """Whose hashes are still to be checked."""
    manifest: Manifest | None = None


def verify_datasets(run: RunConfig, *, show: bool = True) -> list[str]:
    """Refuse every dataset of the blend that differs from its manifest. Call it on all ranks.

    Where a process group exists, the ranks of a node share the hashing, and all ranks raise the
    same error when any of them found a problem; without one, the ranks that torchrun started on a
    node share it too, and a rank that finds a problem ends the job. ``show``: progress on
    standard error (first rank only).

    Returns one line a dataset for the start-up log.

    Raises DataError: all problems found, each with file, difference and remedy.
    """
    began = time.monotonic()
    problems: list[str] = []
    try:
        tokenizer: tokenizers.Tokenizer | None = tokenizers.build(run.data.tokenizer)
    except DataError as error:
        tokenizer, problems = None, error.problems
    found = {p: check_quickly(p, tokenizer, mode=run.data.verify) for p in run.data.paths}
    problems = problems + [problem for item in found.values() for problem in item.problems]
    manifests = {path: item.manifest for path, item in found.items() if item.manifest}
    verdicts = of_all((problems, {path: m.sha256 for path, m in manifests.items()}))
    _raise_if_any(verdicts)
    pieces = [piece for item in found.values() for piece in item.pieces]
    rank, size = _local_place()
    first = os.environ.get("RANK", "0") == "0"
    _check_pieces(pieces[rank::size], size, show=show and first)
    seconds = time.monotonic() - began
    return [_line(run, path, manifest, seconds) for path, manifest in manifests.items()]


def check_quickly(
    prefix: str | Path,
    tokenizer: tokenizers.Tokenizer | None,
    *,
    mode: Literal["full", "sampled"] = "full",
) -> Findings:
    """Everything but the piecewise hashes, which are returned as ``pieces`` still to be checked."""
    findings = Findings()
    try:
        manifest = findings.manifest = read_manifest(prefix)
    except DataError as error:
        findings.problems += error.problems
        return findings
    findings.problems += _contradictions(prefix, manifest, tokenizer)
    if manifest.dtype not in DTYPES:
        return findings
    for ending, record in ((".bin", manifest.bin), (".idx", manifest.idx)):
        path = Path(f"{prefix}{ending}")
        try:
            findings.problems += _file_problems(path, record, manifest, mode)
        except FileNotFoundError:
            findings.problems.append(f"{path}: missing, though its manifest is there; {REMEDY}")
        except OSError as error:
            findings.problems.append(unread(path, error, REMEDY))
        except ValueError as error:
            findings.problems.append(f"{path}: {error}; {REMEDY}")
        if ending == ".idx" or mode == "full":
            findings.pieces += _pieces(path, record)
    return findings


def _contradictions(
    prefix: str | Path, manifest: Manifest, tokenizer: tokenizers.Tokenizer | None
) -> Iterator[str]:
    """What is wrong with a manifest by itself, or beside the configured tokenizer."""
    made, largest = manifest.tokenizer, manifest.max_token_id
    if manifest.dtype not in DTYPES:
        yield f"{prefix}: dtype {manifest.dtype!r}; token files use {' or '.join(DTYPES)}"
        return
    if manifest.tokens * DTYPES[manifest.dtype][1].itemsize != manifest.bin.size:
        yield f"{prefix}: {manifest.tokens:,} tokens do not take {manifest.bin.size:,} bytes"
    if largest >= made.vocab_size:
        yield (
            f"{prefix}: holds token id {largest}, but its tokenizer has {made.vocab_size} ids; "
            f"{REMEDY}"
        )
    if tokenizer is None:
        return
    if made.sha256 != tokenizer.sha256:
        yield (
            f"{prefix}: prepared with another tokenizer ({made.kind}, {made.vocab_size} ids, "
            f"{made.sha256[:12]}) than data.tokenizer ({tokenizer.kind}, {tokenizer.vocab_size} "
            f"ids, {tokenizer.sha256[:12]}); configure the tokenizer it was prepared with, or "
            "prepare it again"
        )
    if largest >= tokenizer.vocab_size:
        yield (
            f"{prefix}: holds token id {largest}, but data.tokenizer has only "
            f"{tokenizer.vocab_size} ids (0 to {tokenizer.vocab_size - 1})"
        )


def _file_problems(path: Path, record: FileRecord, manifest: Manifest, mode: str) -> Iterator[str]:
    """Size of a file, sampled pages of a ``.bin``, content of an ``.idx``."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
    if size != record.size:
        how = "truncated" if size < record.size else "longer than it was"
        yield f"{path}: {size:,} bytes, its manifest says {record.size:,} ({how}); {REMEDY}"
    elif path.suffix == ".bin":
        if mode == "sampled" and sample_hash(path, size) != record.sample:
            yield f"{path}: sampled pages differ from its manifest; {REMEDY}"
    else:
        index = open_index(path)
        for what, found, stated in (
            ("dtype", index.dtype, manifest.dtype),
            ("sequences", len(index.lengths), manifest.sequences),
            ("documents", len(index.boundaries) - 1, manifest.documents),
        ):
            if found != stated:
                yield f"{path}: {what} {found}, its manifest says {stated}; {REMEDY}"
        for problem in index_problems(index, manifest.bin.size):
            yield f"{path}: {problem}; {REMEDY}"


def _pieces(path: Path, record: FileRecord) -> list[_Piece]:
    step = record.chunk_bytes
    return [
        _Piece(path, at, min(step, record.size - at), digest)
        for at, digest in zip(range(0, record.size, step), record.chunks, strict=True)
    ]


def _check_pieces(pieces: list[_Piece], local_size: int, *, show: bool) -> None:
    """Hash this rank's pieces, in rounds after which all ranks hear what was found."""
    todo, done = deque(pieces), 0
    threads = max(1, min(8, (os.cpu_count() or 1) // local_size))
    with (
        ThreadPoolExecutor(threads, "verify") as pool,
        Progress("verify data", sum(p.size for p in pieces), show=show) as progress,
    ):
        while True:
            found: list[str] = []
            until = time.monotonic() + _ROUND_SECONDS
            while todo:
                batch = [todo.popleft() for _ in range(min(len(todo), 4 * threads))]
                for piece, problem in zip(batch, pool.map(_Piece.check, batch), strict=True):
                    done += piece.size
                    found += [problem] if problem else []
                    progress.set(done)
                if time.monotonic() >= until:
                    break
            PULSE.refresh()  # a long check that goes on is no hang
            verdicts = of_all((found, len(todo)))
            _raise_if_any([(problems, {}) for problems, _ in verdicts])
            if not any(left for _, left in verdicts):
                return


def _raise_if_any(verdicts: list[tuple[list[str], dict[str, str]]]) -> None:
    """One error from what all ranks found; every problem once."""
    problems = list(dict.fromkeys(p for found, _ in verdicts for p in found))
    for path in verdicts[0][1]:
        seen = {identity.get(path) for _, identity in verdicts}
        if len(seen) > 1 and not problems:
            problems.append(
                f"{path}: the ranks see {len(seen)} different datasets under this name; copy the "
                "same files to every node, or use a shared directory"
            )
    if problems:
        raise DataError(problems)


def _line(run: RunConfig, path: str, manifest: Manifest, seconds: float) -> str:
    how = "every byte" if run.data.verify == "full" else "a sample of pages (not every byte)"
    return (
        f"data {path}: {human(manifest.tokens)} tokens, {manifest.documents:,} documents, "
        f"{manifest.dtype}, {manifest.tokenizer.kind} tokenizer; {how} of "
        f"{human(manifest.bin.size, 'B')} matches the manifest ({seconds:.1f} s)"
    )


def _local_place() -> tuple[int, int]:
    """(rank, ranks) on this node, by torchrun's variables, else (0, 1): each checks everything."""
    try:
        rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, size) if 0 <= rank < size else (0, 1)
