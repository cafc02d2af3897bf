"""The worker side of ``prepare-data``: a batch of raw documents to one committed part file.

A part is a JSON line (hashes and counts), the documents' lengths (int32) and their tokens (the
dataset's dtype). It appears under its name only when complete, so a killed worker leaves nothing
that could be mistaken for work.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path

import numpy as np

from megatron_patch.data import tokenizers
from megatron_patch.data.errors import DataError
from megatron_patch.data.indexed import DTYPES, dtype_for
from megatron_patch.data.options import PrepareOptions
from megatron_patch.data.sources import Batch
from megatron_patch.runtime.files import replacing

_SURROGATE = re.compile("[\ud800-\udfff]")
_GO_ON = "--invalid-text skip leaves such {0} out, replace puts U+FFFD there"
_CONVERT = f"convert the file (iconv -t UTF-8); {_GO_ON.format('documents')}"
_REMEDY = {"file": _CONVERT, "separated": _CONVERT, "jsonl": _GO_ON.format("lines"),
           "parquet": _GO_ON.format("rows")}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartHeader:
    """First line of a part file."""

    raw_sha256: str
    """Hash of the batch it was made from."""
    payload_sha256: str
    """Hash of everything after this line."""
    source: int
    documents: int
    tokens: int
    skipped: int
    """Documents left out, empty ones and ..."""
    invalid: int
    """... those that were not text."""
    replaced: int
    """Documents that are read with U+FFFD for what was not text."""
    max_token_id: int
    open_end: bool
    """The last document goes on in the next part (token files only)."""


class Encoder:
    """Turns batches into parts; one per process."""

    def __init__(self, options: PrepareOptions, parts: Path) -> None:
        self._options, self._parts = options, parts
        self._tokenizer = tokenizers.build(options.tokenizer_config())
        self._dtype = DTYPES[dtype_for(self._tokenizer.vocab_size)][1]

    def write(self, number: int, batch: Batch) -> PartHeader:
        """Encode a batch and commit it as part ``number``.

        Raises DataError: the first document that is no text, no JSON or out of the vocabulary.
        """
        count, open_end = Counter[str](), False
        if batch.kind == "tokens":
            lengths, tokens, open_end = self._cut(batch)
        else:
            lengths, tokens = self._encode(batch, count)
        payload = lengths.astype("<i4").tobytes() + tokens.tobytes()
        header = PartHeader(
            raw_sha256=batch.sha256,
            payload_sha256=hashlib.sha256(payload).hexdigest(),
            source=batch.source,
            documents=len(lengths),
            tokens=len(tokens),
            skipped=count["empty"] + count["invalid"],
            invalid=count["invalid"],
            replaced=count["replaced"],
            max_token_id=int(tokens.max()) if len(tokens) else -1,
            open_end=open_end,
        )
        path = part_path(self._parts, number)
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with replacing(path, "wb", draft=draft) as stream:
            stream.write(json.dumps(asdict(header)).encode() + b"\n")
            stream.write(payload)
        return header

    def _encode(self, batch: Batch, count: Counter[str]) -> tuple[np.ndarray, np.ndarray]:
        """Lengths and tokens of a batch's documents; ``count``s empty, invalid, replaced ones."""
        eod = self._tokenizer.eod_id
        assert eod is not None, "checked when preparing starts"
        encoded = self._tokenizer.encode_batch(list(texts(batch, self._options, count)))
        pieces = [np.append(np.asarray(ids, dtype=self._dtype), self._dtype.type(eod))
                  for ids in encoded]  # fmt: skip
        lengths = np.asarray([len(piece) for piece in pieces], dtype=np.int64)
        return lengths, np.concatenate([np.empty(0, dtype=self._dtype), *pieces])

    def _cut(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, bool]:
        """Lengths and tokens of documents that end at the end-of-document id; an open end."""
        raw, place = b"".join(batch.documents), batch.places[0]
        tokens = np.frombuffer(raw, dtype=DTYPES[self._options.format][1])
        vocab = self._tokenizer.vocab_size
        wrong = (tokens >= vocab) | (tokens < 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"{place}: token {at:,} from here is id {int(tokens[at])}, but the tokenizer has "
                f"{vocab} ids; name the tokenizer and the format (uint16, int32) it was made with"
            )
        ends = np.flatnonzero(tokens == self._tokenizer.eod_id) + 1
        open_end = len(tokens) > 0 and (len(ends) == 0 or ends[-1] != len(tokens))
        if open_end:
            ends = np.append(ends, len(tokens))
        return np.diff(ends, prepend=0), tokens.astype(self._dtype), bool(open_end)


def texts(batch: Batch, options: PrepareOptions, count: Counter[str]) -> Iterator[str]:
    """A batch's documents as text; ``count``s empty, invalid and replaced ones.

    Raises DataError: the first document that is no text or no JSON.
    """
    for raw, place in zip(batch.documents, batch.places, strict=True):
        if batch.kind == "jsonl" and not raw.strip():
            continue  # blank lines between records are no documents
        text, wrong = _text(raw, place, batch.kind, options)
        if text is None:
            count["invalid"] += 1
        elif text.strip():
            count["replaced"] += wrong
            yield text
        else:
            count["empty"] += 1


def _text(raw: bytes, place: str, kind: str, options: PrepareOptions) -> tuple[str | None, bool]:
    """The text of one raw document and whether anything in it was replaced; None: left out.

    Raises DataError: it is not text and ``invalid_text`` says error; a line is no record.
    """
    mode, wrong = options.invalid_text, False
    # A parquet value is the text itself; a byte order mark belongs to files and lines.
    encoding = "utf-8" if kind == "parquet" else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        if mode == "error":
            raise DataError(
                f"{place}: not UTF-8 text ({error.reason} at byte {error.start:,}); {_REMEDY[kind]}"
            ) from error
        if mode == "skip":
            return None, True
        text, wrong = raw.decode(encoding, errors="replace"), True
    if kind == "jsonl":
        try:
            text = _json_text(text, place, options.json_key)
        except DataError:
            if wrong:
                # The wrong bytes are in the key, or in what makes the line a record.
                return None, True
            raise
    half = _SURROGATE.search(text)
    if half is None:
        return text.strip("\n") if kind == "separated" else text, wrong
    if mode == "error":
        raise DataError(
            f"{place}: half a surrogate pair at character {half.start():,}, which is no text; "
            f"{_REMEDY[kind]}"
        )
    return (None if mode == "skip" else _SURROGATE.sub("\ufffd", text)), True


def _json_text(line: str, place: str, key: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = "; it holds a NUL byte, which JSON writes as \\u0000" if "\0" in line else ""
        raise DataError(f"{place}: not JSON ({error}){hint}") from error
    found = f"the line has {type(record).__name__}"
    if isinstance(record, dict):
        if isinstance(record.get(key), str):
            return record[key]
        found = f"the line has {sorted(record)}"
        found = f"it holds {json.dumps(record[key]):.40}" if key in record else found
    raise DataError(f"{place}: no text under --json-key {key!r}; {found:.220}")


def part_path(parts: Path, number: int) -> Path:
    return parts / f"part-{number:08d}"


def read_part(parts: Path, number: int) -> tuple[PartHeader, bytes] | None:
    """A committed part, or None where it is missing or damaged (it is then made again)."""
    try:
        line, _, payload = part_path(parts, number).read_bytes().partition(b"\n")
        header = PartHeader(**json.loads(line))
    except (OSError, ValueError, TypeError):
        return None
    if hashlib.sha256(payload).hexdigest() != header.payload_sha256:
        return None
    return header, payload


_encoder: Encoder | None = None


def start_worker(options: PrepareOptions, parts: Path) -> None:
    """Process initializer: one encoder per process, which ends when the parent does."""
    global _encoder
    # A worker waits for work on a pipe it holds both ends of: it would outlive a killed parent.
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel
    threading.Thread(target=lambda: (connection.wait([sentinel]), os._exit(1)), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(options, parts)


def work(number: int, batch: Batch) -> PartHeader:
    """One task of a worker process."""
    assert _encoder is not None
    return _encoder.write(number, batch)
