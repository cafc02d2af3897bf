"""Parquet files: one text column, read in record batches of bounded memory.

pyarrow is imported when the first parquet file is met: it takes a moment to start, and other inputs
do not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.data.errors import DataError, unread

if TYPE_CHECKING:
    import pyarrow

MAGIC = b"PAR1"
_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 256


def check(path: Path, column: str) -> None:
    """Refuse a file whose text column cannot be read.

    Raises DataError: pyarrow is absent, the footer is damaged, or ``column`` is missing or no text.
    """
    with _opened(path) as file:
        _check_column(path, file.schema_arrow, column)


def rows(path: Path, column: str) -> Iterator[tuple[bytes, float]]:
    """The bytes of ``column`` row by row (a null is empty), and the share of the file read so far.

    Raises DataError: as ``check``, or a page is damaged.
    """
    import pyarrow

    with _opened(path) as file:
        _check_column(path, file.schema_arrow, column)
        count, total = 0, file.metadata.num_rows
        step = max(1, min(_BATCH_ROWS, _BATCH_BYTES * total // max(1, _size(file, column))))
        for batch in file.iter_batches(step, columns=[column], use_threads=False):
            values = batch.column(batch.schema.get_field_index(column))
            if isinstance(values, pyarrow.DictionaryArray):
                values = values.dictionary_decode()
            # As bytes: the file says that they are UTF-8, and nothing has checked it yet.
            for value in values.cast(pyarrow.large_binary()).to_pylist():
                count += 1
                yield value or b"", count / total
        if count != total:
            raise DataError(f"{path}: {count:,} rows, its footer says {total:,}; it is damaged")


def _size(file: Any, column: str) -> int:
    """Bytes of a column, decompressed."""
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    at = [i for i in range(file.metadata.num_columns) if file.schema.column(i).path == column]
    return sum(group.column(i).total_uncompressed_size for group in groups for i in at)


def _check_column(path: Path, schema: pyarrow.Schema, column: str) -> None:
    import pyarrow

    at = schema.get_all_field_indices(column)
    if len(at) != 1:
        what = f"{len(at)} columns are" if at else "no column is"
        raise DataError(
            f"{path}: {what} named {column!r}; name the text's column with --json-key (it has "
            f"{', '.join(schema.names)[:200] or 'none'})"
        )
    found = schema.field(at[0]).type
    inner = found.value_type if pyarrow.types.is_dictionary(found) else found
    # Null is what writers make of a column without any value.
    text = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null())
    if inner not in text:
        raise DataError(
            f"{path}: column {column!r} is {str(found)[:80]}, and text is a string column; name "
            "another with --json-key, or write it as string"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: parquet is read with pyarrow, which is not here ({error}); install it "
            "(pip install 'pyarrow>=17'), or convert the file to JSONL"
        ) from error
    try:
        # A buffer: else a whole column of a row group is read at once.
        with (
            path.open("rb") as raw,
            pyarrow.parquet.ParquetFile(
                raw, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
            ) as file,
        ):
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(unread(path, error)) from error
        raise DataError(f"{path}: the parquet data is damaged or cut off ({error})") from error
