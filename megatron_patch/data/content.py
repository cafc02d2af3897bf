"""What a file holds: by its content, and never by its name alone.

The first 64 KiB (decompressed) decide between text, JSON lines and parquet, and recognise what is
none of them. Where a name says something else, the file is refused or the difference is logged.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_patch.data import parquet
from megatron_patch.data.compression import PACKINGS, Packing, opened, packing_of
from megatron_patch.data.errors import DataError
from megatron_patch.data.options import PrepareOptions

Kind = Literal["file", "separated", "jsonl", "tokens", "parquet"]
"""One document a file; documents between separators; a document a line; token ids; one a row."""
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst", ".py")
JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")
TABLE_ENDINGS = (".csv", ".tsv")
HEAD = 1 << 16
_LINES = 50
_NAMES = {"gz": "gzip data", "zst": "zstd data", "xz": "xz data", "bz2": "bzip2 data"}
_SIGNS = (
    (b"%PDF-", "a PDF document"),
    (b"PK\3\4", "a zip archive"),
    (b"PK\5\6", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (b"\x04\x22\x4d\x18", "lz4 data, which is not read here: decompress it"),
    (b"\x7fELF", "a program"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array: write its ids alone (array.tofile)"),
    (b"ARROW1\0\0", "an Arrow file: write it as parquet"),
    (b"Obj\x01", "an Avro file: write it as parquet or JSONL"),
    (b"MMIDIDX\0\0", "the index of a Megatron dataset: name its .bin, with --format"),
    (b"PARE", "an encrypted parquet file"),
)
"""First bytes of what holds no documents; four at least, for token ids can begin with any three."""
_TEXT_SIGNS = (
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\xff\xff\xff\xff", "an Arrow stream, or other binary data: write it as parquet"),
    (b"WARC/", "a WARC archive: extract its text to JSONL"),
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer: run git lfs pull"),
)
_BOMS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_BINARY = "binary data of no known kind (token ids need --format uint16 or int32)"
# Bell, backspace, escape and DOS's end of file occur in text; most of the others only in data.
_CONTROL = bytes(set(range(9)) - {7, 8} | set(range(14, 32)) - {26, 27} | {127})


@dataclass(frozen=True, slots=True)
class Content:
    """How a file is read."""

    kind: Kind
    packing: Packing = ""
    note: str = ""
    """Where the name says something else."""


class NoDocuments(Exception):
    """A file that holds no documents we know how to read; the text says what it holds."""


def content_of(path: Path, options: PrepareOptions) -> Content:
    """How a regular file is read.

    Raises:
        NoDocuments: it is of no kind that is read; it can be left out when that is asked for.
        DataError: it is damaged or cut off, or its column of text is not there.
    """
    with opened(path, "") as (stream, _):
        head = stream.read(HEAD)
    if not head:
        raise NoDocuments("empty")
    name, claimed = plain_name(path)
    packing = packing_of(head)
    if packing and options.token_files and not claimed and not _decompresses(path, packing):
        packing = ""  # token ids that happen to begin like it
    if claimed and not packing and not head.startswith(parquet.MAGIC):
        raise DataError(
            f"{path}: its name says {_NAMES[claimed]}, and it does not begin like it: it is "
            "damaged or cut off, or not compressed (then rename it)"
        )
    if packing:
        with opened(path, packing) as (stream, _):
            head = stream.read(HEAD)
        if not head:
            raise NoDocuments("empty, when decompressed")
        if packing_of(head) and not options.token_files:
            raise NoDocuments("compressed twice: decompress it once")
    notes = [f"it is {_NAMES[packing]}, whatever its name says"] if packing != claimed else []
    kind = _kind(path, name, head, packing, options)
    if kind == "jsonl" and options.format == "auto" and not name.endswith(JSONL_ENDINGS):
        notes.append("its lines are JSON records")
    if kind == "parquet" and not name.endswith(".parquet"):
        notes.append("it is parquet, whatever its name says")
    if kind in ("file", "separated") and name.endswith(JSONL_ENDINGS):
        notes.append("it is read as text, as --format says")
    return Content(kind, packing, "; ".join(notes))


def text_kind(options: PrepareOptions) -> Kind:
    """How plain text is cut into documents."""
    return "file" if options.document_separator is None else "separated"


def plain_name(path: Path) -> tuple[str, Packing]:
    """The name in lower case without the ending of a compression, and which one it claims."""
    name = path.name.lower()
    for ending, packing in PACKINGS.items():
        if name.endswith(ending):
            return name.removesuffix(ending), packing
    return name, ""


def _kind(path: Path, name: str, head: bytes, packing: Packing, options: PrepareOptions) -> Kind:
    _refuse_signs(head, _SIGNS)
    if head.startswith(parquet.MAGIC):
        return _parquet(path, packing, options)
    if options.token_files:
        _refuse_text(head)
        return "tokens"
    if name.endswith(".parquet"):
        raise DataError(f"{path}: its name says parquet, and it does not begin like it")
    _refuse_signs(head, _TEXT_SIGNS)
    _refuse_no_text(head, whole=len(head) < HEAD)
    return text_kind(options) if options.format == "text" else _text_or_lines(name, head, options)


def _text_or_lines(name: str, head: bytes, options: PrepareOptions) -> Kind:
    """JSON lines or text, by the shape of the content and what was said about it."""
    shape = _shape(head, whole=len(head) < HEAD)
    says_lines = options.format == "jsonl" or name.endswith(JSONL_ENDINGS)
    if shape == "lines":
        if says_lines or not name.endswith(TEXT_ENDINGS):
            return "jsonl"
        raise NoDocuments(
            "its name says text and its lines are JSON records: say --format jsonl, or --format "
            "text to keep them as text"
        )
    if shape == "blank":
        return "jsonl" if says_lines else text_kind(options)
    if says_lines and shape == "document":
        raise NoDocuments(
            "not JSON lines but one JSON value: make lines of it (jq -c), or say --format text to "
            "keep it as text"
        )
    if says_lines:
        begin = head.decode("utf-8-sig", errors="replace").lstrip()[:40]
        raise NoDocuments(
            f"not JSON lines: {begin!a} is no record; name it as what it is, or say --format text"
        )
    if name.endswith(TEXT_ENDINGS):
        return text_kind(options)
    if shape != "text":
        raise NoDocuments(
            "it looks like JSON, but not like one record a line: make lines of it (jq -c), or say "
            "--format text to keep it as text"
        )
    if name.endswith(TABLE_ENDINGS):
        raise NoDocuments(
            "a table by its name: write it as JSONL or parquet, or say --format text to keep it "
            "as text"
        )
    return text_kind(options)


def _refuse_signs(head: bytes, signs: tuple[tuple[bytes, str], ...]) -> None:
    for sign, what in signs:
        if head.startswith(sign):
            raise NoDocuments(what)
    if head[257:262] == b"ustar":
        raise NoDocuments("a tar archive: unpack it")


def _parquet(path: Path, packing: Packing, options: PrepareOptions) -> Kind:
    if packing:
        raise NoDocuments(f"parquet inside {_NAMES[packing]}: decompress it")
    if options.format != "auto":
        raise NoDocuments(f"parquet, and --format says {options.format}; leave --format out")
    with opened(path, "") as (stream, _):
        stream.seek(-4, 2)
        if stream.read(4) != parquet.MAGIC or stream.tell() < 12:
            raise DataError(f"{path}: the parquet data is damaged or cut off (no footer)")
    parquet.check(path, options.json_key)
    return "parquet"


def _refuse_text(head: bytes) -> None:
    """A file of words or records where token ids are expected."""
    printable = set(range(32, 127)) | {9, 10, 13}
    used = set(head)
    if len(head) >= 32 and len(used) >= 10 and used <= printable and used & {32, 10}:
        raise NoDocuments("text, and --format says token ids")


def _refuse_no_text(head: bytes, *, whole: bool) -> None:
    """UTF-16, and data that is no text in any encoding; a few wrong bytes are text."""
    for bom, name in _BOMS:
        if head.startswith(bom):
            raise NoDocuments(_utf16(name))
    if not head.strip(b"\0"):
        raise NoDocuments("nothing but NUL bytes: never written, or damaged")
    half = len(head) // 2
    even, odd = head[: 2 * half : 2].count(0), head[1 : 2 * half : 2].count(0)
    if half >= 4 and max(even, odd) >= 0.4 * half and min(even, odd) <= 0.05 * half:
        order = "LE" if odd > even else "BE"
        text = head[: 2 * half].decode(f"utf-16-{order}", errors="replace")
        # Small token ids look the same, but for the control characters among them.
        if sum(c.isprintable() or c.isspace() for c in text) > 0.98 * len(text):
            raise NoDocuments(_utf16(f"UTF-16{order}"))
        raise NoDocuments(_BINARY)
    controls = len(head) - len(head.translate(None, delete=_CONTROL))
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
        most = 0.3
    except UnicodeDecodeError:
        # A record with a wrong byte and a NUL is short, and still a record.
        most = 0.3 if head.lstrip().startswith(b"{") else 0.02
    if controls > max(most * len(head), 4):
        raise NoDocuments(_BINARY)


def _utf16(name: str) -> str:
    return f"not UTF-8 text but {name}: convert it (iconv -f {name} -t UTF-8)"


def _shape(head: bytes, *, whole: bool) -> Literal["lines", "document", "blank", "records", "text"]:
    """Whether text is JSON records line by line, one JSON value, something like it, or neither."""
    text = head.decode("utf-8-sig", errors="replace").strip(None if whole else " \t\r\n")
    if not text:
        return "blank"
    parts = text.split("\n") if whole else text.split("\n")[:-1]
    found = [line for line in parts if line.strip()][:_LINES]
    if not found:  # one line, longer than the head
        if re.match(r'\{\s*("|\})', text):
            return "lines"
        return "document" if re.match(r'\[\s*[\[{"]', text) else "text"
    records = [_is_record(line) for line in found]
    if records[0] or 2 * sum(records) >= len(found):
        return "lines"
    if text[0] in "[{" and whole and _is_json(text):
        return "document"
    if re.match(r'\{\s*"[^"\n]*"\s*:|\[\s*\{', text):
        return "document" if len(found) > 1 else "records"
    braces = sum(line.strip()[0] == "{" and line.strip()[-1] == "}" for line in found)
    return "records" if 2 * braces >= len(found) else "text"


def _is_record(line: str) -> bool:
    return line.lstrip("\ufeff \t").startswith("{") and isinstance(
        _json(line.lstrip("\ufeff")), dict
    )


def _is_json(text: str) -> bool:
    value = _json(text)
    return isinstance(value, dict) or any(isinstance(item, dict | list | str) for item in value)


def _json(text: str) -> Any:
    """The value of a text that begins like an object or an array; () where it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ()


def _decompresses(path: Path, packing: Packing) -> bool:
    try:
        with opened(path, packing) as (stream, _):
            stream.read(HEAD)
    except DataError:
        return False
    return True
