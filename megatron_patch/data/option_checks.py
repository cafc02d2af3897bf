"""Options of ``prepare-data`` against each other and against what the inputs hold.

An option has an effect, or it is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_patch.data.errors import DataError
from megatron_patch.data.options import PrepareOptions
from megatron_patch.data.sources import Source

MAX_WORKERS = 4096
"""Processes: more than any machine has cores, and fewer than a semaphore counts."""
MAX_BATCH_BYTES = 1 << 30
"""Two batches a worker are in memory, and a part has a document's length in tokens as an int32."""
_FLAGS = {
    "tokenizer.path": "--tokenizer-path",
    "tokenizer.vocab_size": "--vocab-size",
    "tokenizer.eod_id": "--eod-id",
}


def as_options(problem: str) -> str:
    """A problem of the tokenizer, with the keys of a configuration as options."""
    for key, flag in _FLAGS.items():
        problem = problem.replace(key, flag)
    return problem


def check_options(options: PrepareOptions) -> None:
    """Refuse options that contradict each other, before a file is looked at.

    Raises DataError: all of them.
    """
    if options.out.endswith("/") or Path(options.out).is_dir():
        raise DataError(
            f"--out {options.out}: names a directory, where the beginning of file names is wanted "
            "(.bin, .idx and .manifest.json are appended): write e.g. "
            f"{options.out.rstrip('/')}/books"
        )
    problems = [*_input_problems(options), *_value_problems(options), *_tokenizer_problems(options)]
    if problems:
        raise DataError(problems)


def check_effects(options: PrepareOptions, sources: list[Source]) -> None:
    """Refuse options that nothing in the inputs can answer to.

    Raises DataError: all of them.
    """
    kinds = {file.content.kind for source in sources for file in source.files}
    problems = []
    if options.json_key != "text" and not kinds & {"jsonl", "parquet"}:
        text = f"--json-key {options.json_key!r}: no input is JSONL or parquet; leave it out"
        problems.append(text)
    if options.document_separator is not None and "separated" not in kinds:
        problems.append(
            "--document-separator: no input is plain text, and JSONL and parquet have a document a "
            "line or row; leave it out"
        )
    if problems:
        raise DataError(problems)


def _input_problems(options: PrepareOptions) -> Iterator[str]:
    cut = {"--document-separator": options.document_separator is not None,
           "--json-key": options.json_key != "text"}  # fmt: skip
    given, why = dict[str, bool](), ""
    if options.corpus is not None:
        if options.inputs:
            yield f"--corpus {options.corpus} and inputs {options.inputs}: choose one"
        given = cut | {
            "--format": options.format not in ("auto", "text"),
            "--invalid-text": options.invalid_text == "replace",
            "--skip-unknown": options.skip_unknown,
        }
        why = f"--corpus {options.corpus} is text files, a document each, without those that are "
        why += "not UTF-8"
    elif not options.inputs:
        yield "no inputs: name files, directories or globs, or use --corpus"
    elif options.token_files:
        given = cut | {
            "--invalid-text": options.invalid_text != "error",
            "--train-bpe": options.train_bpe is not None,
        }
        why = f"--format {options.format} reads token ids, which hold no text and are cut at the "
        why += "end-of-document id"
    yield from (f"{flag}: {why}; leave the option out" for flag, found in given.items() if found)


def _value_problems(options: PrepareOptions) -> Iterator[str]:
    if not 1 <= options.workers <= MAX_WORKERS:
        yield f"--workers {options.workers}: use 1 to {MAX_WORKERS:,}, at most one a core"
    if not 4 <= options.batch_bytes <= MAX_BATCH_BYTES:
        yield f"--batch-bytes {options.batch_bytes}: use 4 to {MAX_BATCH_BYTES:,} (default 8 MiB)"
    separator = options.document_separator
    if separator == "":
        yield "--document-separator is empty; leave it out for one document a file"
    for flag, text in (("--document-separator", separator), ("--json-key", options.json_key)):
        if text is not None and any("\ud800" <= c <= "\udfff" for c in text):
            yield f"{flag} {text!a}: is not UTF-8, and only UTF-8 text is searched for it"


def _tokenizer_problems(options: PrepareOptions) -> Iterator[str]:
    for problem in options.tokenizer_config().problems("tokenizer"):
        yield as_options(f"{problem.path}: {problem.message}")
    if options.tokenizer == "none":
        if options.eod_id is None:
            yield "--eod-id: documents end at an id; tokenizer none needs to be told which"
        if not options.token_files:
            yield (
                "--tokenizer none has no text: choose another tokenizer, or name the format of "
                "token files (--format uint16 or int32)"
            )
    if options.train_bpe is not None and (
        options.tokenizer != "huggingface" or options.tokenizer_path is None
    ):
        yield "--train-bpe needs --tokenizer huggingface and --tokenizer-path to write to"
