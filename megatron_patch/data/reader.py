"""Batches read ahead by threads, at the time that suits whoever takes them.

Threads, not processes: reading waits in pread and copies in torch, both without the interpreter
lock; nothing is forked under CUDA, and no orphan survives a killed rank. But between two preads a
thread holds the lock, which whoever launches kernels needs for each of them. So a reader begins a
batch when it is told to (`ahead`), which the training loop does when it is about to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Batch = dict[str, torch.Tensor]


class Reader(Iterator[Batch]):
    """``read(0)``, ``read(1)``, ...: endless until closed, each in the order of its number.

    Args:
        read: the batch of a number; called by the threads, in order of the numbers.
        workers: threads; 0 reads in `__next__`.
        name: prefix of the threads' names.
        device: CUDA device the threads pin memory for; None: none.
    """

    def __init__(
        self, read: Callable[[int], Batch], *, workers: int, name: str, device: int | None
    ) -> None:
        self._read, self._workers, self._at = read, workers, 0
        self._pending: deque[Future[Batch]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

        def start_thread() -> None:
            # Device choice is per thread, and pinning creates a context: without this, every
            # rank of a node would hold memory on the first GPU.
            if device is not None:
                torch.cuda.set_device(device)

        if workers:
            self._pool = ThreadPoolExecutor(workers, name, start_thread)

    def ahead(self) -> None:
        """Begin as many batches as are read ahead, two a thread. Does not wait.

        Raises RuntimeError: the machine has no thread left; those that began have ended.
        """
        try:
            while self._pool is not None and len(self._pending) < 2 * self._workers:
                self._pending.append(self._pool.submit(self._read, self._at))
                self._at += 1
        except BaseException:
            self.close()
            raise

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        try:
            if self._pool is None:
                self._at += 1
                return self._read(self._at - 1)
            if len(self._pending) <= self._workers:  # nobody calls `ahead`, or too seldom
                self.ahead()
            return self._pending.popleft().result()
        except BaseException:
            self.close()  # never go on behind a batch that is missing
            raise

    def close(self) -> None:
        """End the threads; what was read ahead is dropped."""
        self._end(wait=True)

    def _end(self, *, wait: bool) -> None:
        self._closed = True
        pool, self._pool = self._pool, None
        self._pending.clear()
        if pool is not None:
            pool.shutdown(wait=wait, cancel_futures=True)

    def __del__(self) -> None:
        self._end(wait=False)  # the collector may run in one of the threads
