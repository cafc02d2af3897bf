"""TensorBoard's event files."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_patch.monitor.metrics import StepMetrics
from megatron_patch.runtime.records import AppendOnlyFile

_NUMBERS = itertools.count()
"""Event files of one second and process need names of their own."""


class TensorBoardSink:
    """TensorBoard events; points beyond the resumed step are purged from the view.

    All numbers of a step are one event, written at once. TensorBoard's own writer keeps them in a
    thread that ends at the first error, and may leave a part of one, behind which nobody reads on.
    """

    def __init__(self, directory: Path, *, start_step: int) -> None:
        events = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if directory.exists():
            start = SessionLog(status=SessionLog.START)
            purge = Event(wall_time=time.time(), step=start_step + 1, session_log=start)
            events.append(purge)
        host, pid = socket.gethostname(), os.getpid()
        name = f"events.out.tfevents.{int(time.time()):010d}.{host}.{pid}.{next(_NUMBERS)}"
        self._file = AppendOnlyFile(
            directory / name,
            header=b"".join(map(_framed, events)),
            size=1,
            begin=lambda: directory.mkdir(parents=True, exist_ok=True),
        )
        self._file.begin()

    def log(self, metrics: StepMetrics) -> None:
        self.scalars(metrics.step, {f"train/{n}": v for n, v in metrics.scalars().items()})

    def scalars(self, step: int, values: dict[str, float]) -> None:
        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=found))
        self._file.append(_framed(event))

    def close(self) -> None:
        self._file.close()


def _framed(event: Event) -> bytes:
    """An event as it stands in a file: with its length, and the checksums of both."""
    out = io.BytesIO()
    RecordWriter(out).write(event.SerializeToString())
    return out.getvalue()
