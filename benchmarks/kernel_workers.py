"""Processes that share one GPU and judge attention cases; survive crashes and hangs.

The parent hands out one group of cases at a time over a pipe of each worker's own, so that a worker
that dies takes no lock and no other worker with it. What it was doing when it died, or when it did
not answer in time, becomes a failed record with its reproduction; the rest of its group goes on in
a fresh process.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

Group = tuple[str, list[Any]]
Record = dict[str, Any]
RESTARTS = 30
# A case compiles up to four kernels, each in up to 40 s on a loaded machine.
PATIENCE_S = 300.0


def judge(part: str, case: Any, device: str) -> Record:
    """One record: problems, our error over PyTorch's, and RMS errors of the vendors' kernels."""
    from attention_cases import make_inputs
    from error_rule import Report, compare, run_ours
    from kernel_peers import compare_peers

    record: Record = {"part": part, "case": str(case)}
    try:
        given = make_inputs(case, device)
        ours = run_ours(case, given)
        report = compare(case, given, ours)
        record["peers"] = compare_peers(case, given, ours) if device == "cuda" else {}
    except Exception as error:
        report = Report(case, [f"{type(error).__name__}: {str(error)[:300]}"])
    return record | {"problems": report.problems, "ratios": report.ratios}


def work(pipe: Any, device: str, stop: float) -> None:
    """Body of a worker process: groups in, ("start" | "record" | "idle", value) out."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        import interpreter_shim

        interpreter_shim.install_on_import()
    import torch

    torch.set_num_threads(1)
    while True:
        task = pipe.recv()
        if task is None:
            return
        part, group = task
        for case in group:
            if time.monotonic() > stop:
                break
            pipe.send(("start", str(case)))
            record = judge(part, case, device)
            pipe.send(("record", record))
            if "CUDA error" in str(record["problems"]):
                os._exit(3)  # the context is lost; the parent starts a new worker
        pipe.send(("idle", ""))


@dataclass
class Worker:
    """A process, its end of the pipe, and what it is busy with."""

    process: Any
    pipe: Any
    part: str = ""
    left: list[Any] = field(default_factory=list)
    running: str = ""
    since: float = 0.0

    def give(self, task: Group) -> None:
        self.part, self.left = task[0], list(task[1])
        self.pipe.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Pool:
    """Runs groups on ``workers`` processes until they are done or ``stop`` (monotonic) passes.

    ``on_record`` gets every record; ``tick`` is called about once a second.
    """

    context: Any
    device: str
    stop: float
    on_record: Callable[[Record], None]
    tick: Callable[[], None] = lambda: None
    patience: float = PATIENCE_S
    body: Callable[[Any, str, float], None] = work
    crashes: int = 0
    _queue: collections.deque[Group] = field(default_factory=collections.deque)
    _workers: list[Worker] = field(default_factory=list)

    def run(self, groups: list[Group], workers: int) -> None:
        self._queue.extend(groups)
        for _ in range(min(workers, len(groups))):
            self._start()
        try:
            while self._workers and time.monotonic() < self.stop + 20:
                busy = {w.pipe: w for w in self._workers}
                for pipe in connection.wait(list(busy), timeout=1.0):
                    self._answer(busy[pipe])
                self._impatient()
                self.tick()
        finally:
            for worker in self._workers:
                worker.end()
            self._workers.clear()

    def _start(self) -> None:
        ours, theirs = self.context.Pipe()
        arguments = (theirs, self.device, self.stop)
        process = self.context.Process(target=self.body, args=arguments, daemon=True)
        process.start()
        theirs.close()
        worker = Worker(process, ours)
        self._workers.append(worker)
        self._next(worker)

    def _next(self, worker: Worker) -> None:
        worker.left, worker.running = [], ""
        if self._queue and time.monotonic() < self.stop:
            worker.give(self._queue.popleft())
        else:
            self._workers.remove(worker)
            worker.end()

    def _answer(self, worker: Worker) -> None:
        try:
            what, value = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            self._lost(worker, f"the worker died with exit code {worker.process.exitcode}")
            return
        if what == "idle":
            self._next(worker)
        elif what == "start":
            worker.running, worker.since = value, time.monotonic()
        else:
            worker.running = ""
            worker.left = worker.left[1:]
            self.on_record(value)

    def _impatient(self) -> None:
        for worker in list(self._workers):
            if worker.running and time.monotonic() - worker.since > self.patience:
                self._lost(worker, f"no answer in {self.patience:.0f} s")

    def _lost(self, worker: Worker, why: str) -> None:
        self._workers.remove(worker)
        worker.end()
        self.crashes += 1
        if worker.running:
            record = {"part": worker.part, "case": worker.running, "ratios": {}, "peers": {}}
            self.on_record(record | {"problems": [why]})
            worker.left = worker.left[1:]
        if worker.left:
            self._queue.appendleft((worker.part, worker.left))
        if self._queue and self.crashes <= RESTARTS and time.monotonic() < self.stop:
            self._start()
