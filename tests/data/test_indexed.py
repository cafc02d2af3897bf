"""The .bin/.idx format, against Megatron-Core's own builder and reader."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patch.data import indexed


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_the_bytes_are_those_of_megatrons_builder(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 50, size=100)
    pieces = [rng.integers(0, 60_000, size=n).astype(dtype) for n in lengths]
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=getattr(np, dtype))
    for piece in pieces:
        builder.add_item(torch.from_numpy(piece.astype(np.int64)))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = io.BytesIO()
    indexed.write_index(ours, lengths, dtype)
    assert ours.getvalue() == (tmp_path / "theirs.idx").read_bytes()

    (tmp_path / "ours.idx").write_bytes(ours.getvalue())
    (tmp_path / "ours.bin").write_bytes(b"".join(piece.tobytes() for piece in pieces))
    read = IndexedDataset(str(tmp_path / "ours"))
    assert len(read) == 100
    for i, piece in enumerate(pieces):
        assert np.array_equal(read[i], piece)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 2**31 - 1), max_size=40), size=st.sampled_from([7, 1 << 20]))
def test_what_is_written_is_read_and_consistent(tmp_path_factory, lengths, size):
    """Checked slice by slice: a carry lost between slices would show in the pointers."""
    path = tmp_path_factory.mktemp("idx") / "x.idx"
    with path.open("wb") as stream:
        indexed.write_index(stream, np.array(lengths, dtype=np.int64), "uint16")
    index = indexed.open_index(path)
    assert index.lengths.tolist() == lengths and index.dtype == "uint16"
    starts = [index.document_start(number) for number in range(len(lengths) + 1)]
    assert starts == [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "_SLICE", size)
        assert list(indexed.index_problems(index, 2 * sum(lengths))) == []
        assert list(indexed.index_problems(index, 2 * sum(lengths) + 2))


def edited(lengths: list[int], at: int, form: str, value: int) -> bytes:
    stream = io.BytesIO()
    indexed.write_index(stream, np.array(lengths), "uint16")
    content = bytearray(stream.getvalue())
    struct.pack_into(form, content, at, value)
    return bytes(content)


@pytest.mark.parametrize(
    ("at", "form", "value", "reason"),
    [
        (0, "<B", 0, "does not start with MMIDIDX"),
        (9, "<Q", 2, "index version 2"),
        (17, "<B", 1, "dtype code 1"),
        (18, "<Q", 5, "4 sequences|5 sequences"),
        (34, "<i", -1, "negative length"),
        (34, "<i", 4, "pointer of sequence 1 does not follow"),
        (34 + 16 + 8, "<q", 0, "pointer of sequence 1 does not follow"),
        (34 + 48, "<q", 1, "do not run from 0"),
        (34 + 48 + 8, "<q", 3, "not in order"),
    ],
)
def test_every_field_is_checked(tmp_path, at, form, value, reason):
    path = tmp_path / "x.idx"
    path.write_bytes(edited([3, 1, 4, 1], at, form, value))
    with pytest.raises(ValueError, match=reason):
        raise ValueError("; ".join(indexed.index_problems(indexed.open_index(path), 18)))


def test_uint16_up_to_65535_ids():
    assert indexed.dtype_for(65_535) == "uint16"
    assert indexed.dtype_for(65_536) == "int32"
