"""``prepare-data``: text, JSONL or token files to a Megatron indexed dataset with a manifest.

The inputs are cut into batches (``sources``), workers turn each into a part file (``encode``), and
the parts are joined in input order. ``OUT.parts`` holds the plan and the parts until the manifest,
written last, makes the dataset real. An interrupted run continues with the parts that are there;
the result is the same bytes for any number of workers and interruptions.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from megatron_patch.data import tokenizers
from megatron_patch.data.encode import (
    Encoder,
    PartHeader,
    part_path,
    read_part,
    start_worker,
    texts,
    work,
)
from megatron_patch.data.errors import DataError
from megatron_patch.data.indexed import dtype_for, write_index
from megatron_patch.data.manifest import (
    MAX_LISTED,
    Manifest,
    SourceRecord,
    TokenizerRecord,
    manifest_path,
    read_manifest,
    record_file,
    render,
    write_file,
)
from megatron_patch.data.option_checks import as_options, check_effects, check_options
from megatron_patch.data.options import PrepareOptions
from megatron_patch.data.progress import Progress, human
from megatron_patch.data.sources import Batch, Source, describe, find_sources, read_batches
from megatron_patch.runtime.files import replacing, sync_directory

__all__ = ["PrepareOptions", "prepare"]

OURS = re.compile(r"(lock|committing|plan\.json|part-[0-9]{8}|joined\.(bin|idx))(\..+)?")
"""What an attempt writes into ``OUT.parts``."""


def prepare(options: PrepareOptions) -> Manifest:
    """Prepare a dataset, or finish an interrupted preparation of the same one.

    Returns the manifest, as written to ``<out>.manifest.json``.

    Raises DataError: the options contradict each other, inputs or tokenizer are unusable, the
    output exists, or an interrupted attempt with other options is in the way.
    """
    check_options(options)
    if options.corpus is not None:
        options = replace(options, invalid_text="skip", format="text")
    sources = find_sources(options)
    check_effects(options, sources)
    if options.train_bpe is not None:
        _train_tokenizer(options, sources)
    tokenizer = _tokenizer(options)
    plan = _plan(options, tokenizer, sources)
    parts = Path(f"{options.out}.parts")
    _refuse_another_directory(parts)
    finished = _refuse_to_overwrite(options, parts, plan)
    if finished is not None:
        return finished
    _log(describe(sources, quiet=options.quiet or options.corpus is not None))
    if options.restart and not (parts / "plan.json").exists():
        _log([f"--restart: no interrupted attempt is at {parts}, this is the first"])
    with _errors_of_disk(options.out), _locked(parts):
        # Another process may have finished one since.
        finished = _refuse_to_overwrite(options, parts, plan)
        if finished is not None:
            return finished
        _continue_or_begin(parts, plan, restart=options.restart)
        headers = _encode_all(options, sources, parts)
        dtype = dtype_for(tokenizer.vocab_size)
        records = _join(headers, sources, parts, dtype)
        documents = sum(record.documents for record in records)
        manifest = Manifest(
            dtype=dtype,
            documents=documents,
            sequences=documents,
            tokens=sum(record.tokens for record in records),
            max_token_id=max(header.max_token_id for header in headers),
            tokenizer=_tokenizer_record(tokenizer),
            bin=record_file(parts / "joined.bin"),
            idx=record_file(parts / "joined.idx"),
            sources=records,
            options=plan["options"],
            software=plan["software"],
        )
        _commit(options.out, parts, manifest)
    _clear(parts)
    if options.document_separator is not None and not any(source.cuts for source in sources):
        _log([f"--document-separator {options.document_separator!r} is in no file: each text file "
               "became one document"])  # fmt: skip
    if not options.quiet:
        print(_summary(options.out, manifest))
    return manifest


def _log(lines: Iterable[str]) -> None:
    """To standard error, also with --quiet: what the reader might not expect."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _summary(out: str, manifest: Manifest) -> str:
    skipped, invalid, replaced, entries = (
        sum(getattr(source, name) for source in manifest.sources)
        for name in ("skipped", "invalid", "replaced", "left_out")
    )
    counts = f"{skipped:,} left out: {skipped - invalid:,} empty, {invalid:,} not text"
    counts += f"; {replaced:,} with replaced characters" if replaced else ""
    counts += f"; entries of the inputs not read: {entries:,}" if entries else ""
    return (
        f"{out}: {human(manifest.tokens)} tokens in {manifest.documents:,} documents ({counts}), "
        f"{manifest.dtype}, {human(manifest.bin.size, 'B')}"
    )


def _tokenizer(options: PrepareOptions) -> tokenizers.Tokenizer:
    try:
        return tokenizers.build(options.tokenizer_config())
    except DataError as error:
        raise DataError([as_options(problem) for problem in error.problems]) from error


def _train_tokenizer(options: PrepareOptions, sources: list[Source]) -> None:
    """Write the tokenizer file of ``--train-bpe``, or check the one an earlier run left."""
    size, path = options.train_bpe, options.tokenizer_path
    assert size is not None and path is not None, "checked when preparing starts"
    there = Path(path).exists()
    if there:
        _log([] if options.quiet else [f"--train-bpe: {path} is there already and used as it is"])
    else:
        batches = read_batches(sources, options)
        documents = (text for batch in batches for text in texts(batch, options, Counter()))
        with _errors_of_disk(path):
            tokenizers.train_bpe(documents, size, path)
    found = _tokenizer(options).vocab_size
    if found != size:
        if not there:
            Path(path).unlink()  # the next attempt would take it for an earlier run's
        raise DataError(
            f"{path}: has {found} ids, --train-bpe asks for {size}: the text is too small for "
            "more, or the file is another tokenizer's; choose another size or path"
        )


def _plan(options: PrepareOptions, tokenizer: tokenizers.Tokenizer, sources: list[Source]) -> dict:
    """Everything the output depends on except the content of the inputs, as plain JSON."""
    names = ("format", "json_key", "document_separator", "invalid_text", "corpus")
    plan = {
        "options": {name: getattr(options, name) for name in names},
        "tokenizer": asdict(_tokenizer_record(tokenizer)),
        "sources": [[s.name, len(s.files), s.bytes] for s in sources],
        "software": _software(),
    }
    return json.loads(json.dumps(plan))


def _refuse_another_directory(parts: Path) -> None:
    """Raise when ``OUT.parts`` is somebody's own, as of the inputs: it is deleted in the end."""
    names = os.listdir(parts) if parts.is_dir() else ()
    found = [parts / name for name in names if not name.startswith(".nfs")]
    strange = sorted(p.name for p in found if not OURS.fullmatch(p.name) or p.is_dir())
    if found and not any(path.name in ("lock", "plan.json") for path in found):
        strange = strange or [found[0].name]  # its names are ours by chance
    if strange:
        raise DataError(
            f"{parts}: holds {strange[0]!r}, which no prepare-data wrote, and is the directory of "
            "an unfinished dataset, deleted in the end; choose another --out, or rename it"
        )


def _clear(parts: Path) -> None:
    """Delete what an attempt has written, what tells whose it is last, and nothing else."""
    names = [path.name for path in parts.iterdir() if OURS.fullmatch(path.name)]
    for name in sorted(names, key=lambda name: (name == "lock", name == "plan.json")):
        (parts / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a link, or not empty: somebody's own
        parts.rmdir()


def _refuse_to_overwrite(options: PrepareOptions, parts: Path, plan: dict) -> Manifest | None:
    """Raise when the output exists; its manifest when only the clean-up was interrupted."""
    out = options.out
    if manifest_path(out).exists():
        # Not by the plan that lies with the parts: it may be among what was deleted first.
        if parts.is_dir() and _plan_of(manifest := read_manifest(out)) == plan:
            _clear(parts)
            return manifest
        raise DataError(
            f"{out}: a finished dataset is there already and is never overwritten; remove its "
            ".bin, .idx and .manifest.json, or choose another --out"
        )
    for ending in (".bin", ".idx"):
        if Path(out + ending).exists() and not (parts / "committing").exists():
            raise DataError(
                f"{out}{ending} exists and was not written by an interrupted prepare-data; remove "
                "it, or choose another --out"
            )
    return None


def _plan_of(manifest: Manifest) -> dict:
    """The plan that a finished dataset was made by."""
    return {
        "options": manifest.options,
        "tokenizer": asdict(manifest.tokenizer),
        "sources": [[s.name, s.files, s.bytes] for s in manifest.sources],
        "software": manifest.software,
    }


def _read_plan(parts: Path) -> dict | None:
    try:
        return json.loads((parts / "plan.json").read_bytes())
    except (OSError, ValueError):
        return None


def _continue_or_begin(parts: Path, plan: dict, *, restart: bool) -> None:
    """Write the plan, or compare it with that of the interrupted attempt."""
    # Parts without a plan are what a killed clean-up left: nobody knows their options.
    if restart or not (parts / "plan.json").exists():
        for path in parts.iterdir():
            if OURS.fullmatch(path.name) and path.name not in ("lock", "committing"):
                path.unlink()
    if not (parts / "plan.json").exists():
        write_file(parts / "plan.json", json.dumps(plan).encode())
        return
    before = _read_plan(parts) or {}
    differing = [key for key in plan if before.get(key) != plan[key]]
    if differing and not any(parts.glob("part-*")) and not (parts / "committing").exists():
        write_file(parts / "plan.json", json.dumps(plan).encode())  # nothing came of it
    elif differing:
        raise DataError(
            f"{parts}: an interrupted attempt with other {' and '.join(differing)} is there; run "
            "it again as it was to finish it, or throw it away with --restart"
        )


@contextlib.contextmanager
def _errors_of_disk(out: str) -> Iterator[None]:
    """Full, read-only and failing disks end in a ``DataError``; reading reports its own."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{out}: cannot be written ({error.strerror or error}); put it right and run the same "
            "command again: finished parts are kept"
        ) from error


@contextlib.contextmanager
def _locked(parts: Path) -> Iterator[None]:
    parts.mkdir(parents=True, exist_ok=True)
    with (parts / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"{parts}: another prepare-data is working on it") from None
        yield


def _encode_all(options: PrepareOptions, sources: list[Source], parts: Path) -> list[PartHeader]:
    """Make every part that is not there yet; the headers of all, in order."""
    headers: list[PartHeader] = []
    pending: deque[tuple[PartHeader | Callable[[], PartHeader], int]] = deque()
    ahead = 2 * options.workers if options.workers > 1 else 1
    tokens, total = 0, sum(source.bytes for source in sources)
    with (
        _workers(options, parts) as submit,
        Progress("prepare", total, show=not options.quiet) as progress,
    ):

        def take() -> None:
            nonlocal tokens
            result, position = pending.popleft()
            headers.append(result() if callable(result) else result)
            tokens += headers[-1].tokens
            progress.set(position, f"{human(tokens)} tokens")

        try:
            for number, batch in enumerate(read_batches(sources, options)):
                found = read_part(parts, number)
                if found is not None and found[0].raw_sha256 == batch.sha256:
                    pending.append((found[0], batch.position))
                else:
                    pending.append((submit(number, batch), batch.position))
                if len(pending) >= ahead:
                    take()
            while pending:
                take()
        except BrokenProcessPool:
            raise DataError(
                "a worker process was killed, most likely for want of memory: run the same command "
                "again with fewer --workers or smaller --batch-bytes; finished parts are kept"
            ) from None
    return headers


@contextlib.contextmanager
def _workers(
    options: PrepareOptions, parts: Path
) -> Iterator[Callable[[int, Batch], Callable[[], PartHeader]]]:
    """What turns a batch into a part: a pool of processes, or this process for one worker."""
    if options.workers == 1:
        encoder = Encoder(options, parts)
        yield lambda number, batch: partial(encoder.write, number, batch)
        return
    # spawn: a fork would copy threads' locks (tokenizers, torch) in whatever state.
    pool = ProcessPoolExecutor(
        options.workers,
        mp_context=get_context("spawn"),
        initializer=start_worker,
        initargs=(options, parts),
    )
    try:
        yield lambda number, batch: pool.submit(work, number, batch).result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _join(
    headers: list[PartHeader], sources: list[Source], parts: Path, dtype: str
) -> list[SourceRecord]:
    """Write ``joined.bin`` and ``joined.idx`` from the parts, in order; what each source gave."""
    if not any(header.tokens for header in headers):
        _clear(parts)  # or the corrected command would be told to finish this one
        raise DataError("the inputs hold no documents (all are empty or were left out)")
    counts = np.zeros((len(sources), 5), dtype=np.int64)  # in the order of _record
    pieces: list[np.ndarray] = []
    open_end = False
    with replacing(parts / "joined.bin", "wb") as stream:
        for number, header in enumerate(headers):
            part = read_part(parts, number)
            if part is None or part[0] != header:
                raise DataError(
                    f"{part_path(parts, number)}: damaged since it was written; run the same "
                    "command again to make it again"
                )
            split = 4 * header.documents
            lengths = np.frombuffer(part[1][:split], dtype="<i4").astype(np.int64)
            stream.write(part[1][split:])
            if open_end and len(lengths):
                pieces[-1][-1] += lengths[0]
                lengths = lengths[1:]
            if len(lengths):
                pieces.append(lengths)
            open_end = header.open_end if header.documents else open_end
            counts[header.source] += (
                len(lengths), header.tokens, header.skipped, header.invalid, header.replaced
            )  # fmt: skip
    lengths = np.concatenate(pieces)
    if lengths.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"a document of {int(lengths.max()):,} tokens does not fit an index, whose lengths are "
            "32-bit; cut it (text: --document-separator), or check the id it ends at (--eod-id)"
        )
    with replacing(parts / "joined.idx", "wb") as stream:
        write_index(stream, lengths, dtype)
    return [_record(source, *map(int, row)) for source, row in zip(sources, counts, strict=True)]


def _record(
    source: Source, documents: int, tokens: int, skipped: int, invalid: int, replaced: int
) -> SourceRecord:
    return SourceRecord(
        name=source.name,
        files=len(source.files),
        bytes=source.bytes,
        documents=documents,
        tokens=tokens,
        skipped=skipped,
        invalid=invalid,
        replaced=replaced,
        left_out=len(source.left_out),
        left_out_entries=source.left_out[:MAX_LISTED],
    )


def _commit(out: str, parts: Path, manifest: Manifest) -> None:
    """Move the files to their names and write the manifest, in this order, durably."""
    write_file(parts / "committing", b"")
    (parts / "joined.bin").replace(f"{out}.bin")
    (parts / "joined.idx").replace(f"{out}.idx")
    sync_directory(Path(out).resolve().parent)
    write_file(manifest_path(out), render(manifest))


def _tokenizer_record(tokenizer: tokenizers.Tokenizer) -> TokenizerRecord:
    return TokenizerRecord(tokenizer.kind, tokenizer.sha256, tokenizer.vocab_size, tokenizer.eod_id)


def _software() -> dict[str, str]:
    """Versions that decide what the tokens are."""
    packages = ("megatron-patch-stable", "numpy", "tokenizers", "sentencepiece", "tiktoken")
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found
