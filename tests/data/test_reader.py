"""When batches are read: in what order, and not before somebody asks for it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatron_patch.data.reader import Batch, Reader


class Source:
    """Batches with their number; remembers which were begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.broken_from: int | None = None

    def __call__(self, at: int) -> Batch:
        self.begun.append(at)
        if self.broken_from is not None and at >= self.broken_from:
            raise OSError(f"batch {at} is gone")
        return {"number": torch.tensor(at)}

    def reader(self, workers: int) -> Reader:
        return Reader(self, workers=workers, name="test-reader", device=None)


def threads() -> int:
    return sum(t.name.startswith("test-reader") for t in threading.enumerate())


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("asks", [False, True])
def test_the_order_is_that_of_the_numbers(workers, asks):
    reader = Source().reader(workers)
    found = []
    for _ in range(40):
        found.append(int(next(reader)["number"]))
        if asks:
            reader.ahead()
    assert found == list(range(40))
    reader.close()


def test_taking_a_batch_begins_none_where_enough_were_asked_for():
    """The thread that takes it is about to launch a step, and needs the interpreter lock."""
    source = Source()
    reader = source.reader(2)
    reader.ahead()
    for taken in range(1, 10):
        next(reader)
        deadline = time.monotonic() + 5.0
        while len(source.begun) < taken + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sorted(source.begun) == list(range(taken + 3))  # 4 ahead, before this one was taken
        reader.ahead()
    reader.close()


def test_close_ends_the_threads():
    before = threads()
    reader = Source().reader(2)
    next(reader)
    assert threads() > before
    reader.close()
    reader.close()
    reader.ahead()
    assert threads() == before and list(reader) == []


def test_a_thread_that_cannot_start_leaves_none_behind(monkeypatch):
    """The process would wait for them when it ends."""
    before, start = threads(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if threads() - before >= 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    reader = Source().reader(64)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        for _ in range(64):  # a pool starts a thread only where none is idle
            reader.ahead()
            next(reader)
    assert threads() == before and list(reader) == []


def test_dropping_a_reader_closes_it():
    before = threads()
    reader = Source().reader(2)
    next(reader)
    del reader
    deadline = time.monotonic() + 5.0
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_with_the_batch_it_belongs_to_and_none_behind_it(workers):
    source = Source()
    source.broken_from = 3
    reader = source.reader(workers)
    assert [int(next(reader)["number"]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="batch 3 is gone"):
        next(reader)
    source.broken_from = None
    assert list(reader) == []
