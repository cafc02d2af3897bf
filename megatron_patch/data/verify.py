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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_patch.data import tokenizers
from megatron_patch.data.errors import DataError, unread
from megatron_patch.data.indexed import DTYPES, index_problems, open_index
from megatron_patch.data.manifest import FileRecord, Manifest, read_manifest, sample_hash
from megatron_patch.data.progress import Progress, human
from megatron_patch.runtime.heartbeat import PULSE

if TYPE_CHECKING:
    from megatron_patch.schema.run import RunConfig

REMEDY = "prepare the dataset again, or copy its three files again from a good place"
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
class _Findings:
    """What one rank knows after the quick checks."""

    problems: list[str] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    manifests: dict[str, Manifest] = field(default_factory=dict)


def verify_datasets(run: RunConfig, *, show: bool = True) -> list[str]:
    """Refuse every dataset of the blend that differs from its manifest.

    Call it on all ranks. Where a process group exists, the ranks of a node share the hashing, and
    all ranks raise the same error when any of them found a problem; without one, the ranks that
    torchrun started on a node share it too, and a rank that finds a problem ends the job.

    Args:
        run: The configuration; ``data`` is read.
        show: Progress on standard error (first rank only).

    Returns:
        One line a dataset for the start-up log.

    Raises:
        DataError: all problems found, each with file, difference and remedy.
    """
    began = time.monotonic()
    paths = dataset_paths(run)
    findings = _Findings()
    try:
        tokenizer: tokenizers.Tokenizer | None = tokenizers.build(run.data.tokenizer)
    except DataError as error:
        tokenizer = None
        findings.problems += error.problems
    for path in paths:
        quick = check_quickly(path, tokenizer, mode=run.data.verify)
        findings.problems += quick.problems
        findings.pieces += quick.pieces
        findings.manifests |= quick.manifests
    identity = {path: manifest.sha256 for path, manifest in findings.manifests.items()}
    verdicts = _gather((findings.problems, identity))
    _raise_if_any(verdicts)
    local_rank, local_size = _local_place()
    mine = findings.pieces[local_rank::local_size]
    _check_pieces(mine, show=show and _rank() == 0)
    seconds = time.monotonic() - began
    return [_line(run, path, findings.manifests[path], seconds) for path in paths]


def dataset_paths(run: RunConfig) -> list[str]:
    """Prefixes of all datasets of the run, each once, in the order they are named."""
    data = run.data
    every = [*data.blend, *data.train, *data.valid, *data.test]
    return list(dict.fromkeys(dataset.path for dataset in every))


def check_dataset(
    prefix: str | Path,
    tokenizer: tokenizers.Tokenizer | None = None,
    *,
    mode: Literal["full", "sampled"] = "full",
) -> list[str]:
    """All problems of one dataset, hashes included, on this process alone."""
    findings = check_quickly(prefix, tokenizer, mode=mode)
    if not findings.problems:
        findings.problems += [p for piece in findings.pieces if (p := piece.check())]
    return findings.problems


def check_quickly(
    prefix: str | Path,
    tokenizer: tokenizers.Tokenizer | None,
    *,
    mode: Literal["full", "sampled"] = "full",
) -> _Findings:
    """Everything but the piecewise hashes, which are returned as ``pieces`` still to be checked."""
    findings = _Findings()
    try:
        manifest = read_manifest(prefix)
    except DataError as error:
        findings.problems += error.problems
        return findings
    findings.manifests[str(prefix)] = manifest
    say = findings.problems.append
    if manifest.dtype not in DTYPES:
        say(f"{prefix}: dtype {manifest.dtype!r}; token files use {' or '.join(DTYPES)}")
        return findings
    if tokenizer is not None:
        findings.problems += _tokenizer_problems(str(prefix), manifest, tokenizer)
    if manifest.max_token_id >= manifest.tokenizer.vocab_size:
        say(
            f"{prefix}: holds token id {manifest.max_token_id}, but its tokenizer has "
            f"{manifest.tokenizer.vocab_size} ids; {REMEDY}"
        )
    files = {".bin": manifest.bin, ".idx": manifest.idx}
    sizes_agree = True
    for ending, record in files.items():
        path = Path(f"{prefix}{ending}")
        problem = _size_problem(path, record)
        if problem:
            say(problem)
            sizes_agree = False
        elif ending == ".bin" and mode == "sampled":
            try:
                if sample_hash(path, record.size) != record.sample:
                    say(f"{path}: sampled pages differ from its manifest; {REMEDY}")
            except OSError as error:
                say(unread(path, error, REMEDY))
        else:
            findings.pieces += _pieces(path, record)
    if sizes_agree:
        findings.problems += _index_problems(Path(f"{prefix}.idx"), manifest)
    return findings


def _tokenizer_problems(
    prefix: str, manifest: Manifest, tokenizer: tokenizers.Tokenizer
) -> Iterable[str]:
    made = manifest.tokenizer
    if made.sha256 != tokenizer.sha256:
        yield (
            f"{prefix}: prepared with another tokenizer ({made.kind}, {made.vocab_size} ids, "
            f"{made.sha256[:12]}) than data.tokenizer ({tokenizer.kind}, {tokenizer.vocab_size} "
            f"ids, {tokenizer.sha256[:12]}); configure the tokenizer it was prepared with, or "
            "prepare it again"
        )
    if manifest.max_token_id >= tokenizer.vocab_size:
        yield (
            f"{prefix}: holds token id {manifest.max_token_id}, but data.tokenizer has only "
            f"{tokenizer.vocab_size} ids (0 to {tokenizer.vocab_size - 1})"
        )


def _size_problem(path: Path, record: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except FileNotFoundError:
        return f"{path}: missing, though its manifest is there; {REMEDY}"
    except OSError as error:
        return unread(path, error, REMEDY)
    if size != record.size:
        how = "truncated" if size < record.size else "longer than it was"
        return f"{path}: {size:,} bytes, its manifest says {record.size:,} ({how}); {REMEDY}"
    return None


def _index_problems(path: Path, manifest: Manifest) -> Iterable[str]:
    try:
        index = open_index(path)
    except ValueError as error:
        yield f"{path}: {error}; {REMEDY}"
        return
    except OSError as error:
        yield unread(path, error, REMEDY)
        return
    for what, found, stated in (
        ("dtype", index.dtype, manifest.dtype),
        ("sequences", len(index.lengths), manifest.sequences),
        ("documents", len(index.boundaries) - 1, manifest.documents),
    ):
        if found != stated:
            yield f"{path}: {what} {found}, its manifest says {stated}; {REMEDY}"
    for problem in index_problems(index, manifest.bin.size):
        yield f"{path}: {problem}; {REMEDY}"
    if manifest.tokens * DTYPES[manifest.dtype][1].itemsize != manifest.bin.size:
        yield f"{path}: {manifest.tokens:,} tokens do not take {manifest.bin.size:,} bytes"


def _pieces(path: Path, record: FileRecord) -> list[_Piece]:
    step = record.chunk_bytes
    return [
        _Piece(path, at, min(step, record.size - at), digest)
        for at, digest in zip(range(0, record.size, step), record.chunks, strict=True)
    ]


def _check_pieces(pieces: list[_Piece], *, show: bool) -> None:
    """Hash this rank's pieces, in rounds after which all ranks hear what was found."""
    todo, done = deque(pieces), 0
    threads = max(1, min(8, (os.cpu_count() or 1) // _local_place()[1]))
    with (
        ThreadPoolExecutor(threads, "verify") as pool,
        Progress("verify data", sum(p.size for p in pieces), show=show) as progress,
    ):
        while True:
            found: list[str] = []
            until = time.monotonic() + _ROUND_SECONDS
            while todo:
                batch = list(islice(todo, 4 * threads))
                for piece, problem in zip(batch, pool.map(_Piece.check, batch), strict=True):
                    todo.popleft()
                    done += piece.size
                    if problem:
                        found.append(problem)
                    progress.set(done)
                if time.monotonic() >= until:
                    break
            PULSE.refresh()  # a long check that goes on is no hang
            verdicts = _gather((found, len(todo)))
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
    """(rank, ranks) on this node as torchrun tells it, else (0, 1): each rank checks everything."""
    try:
        rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, size) if 0 <= rank < size else (0, 1)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _gather[T](value: T) -> list[T]:
    """Every rank's value, or just ours where there is no process group."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
