"""What one rank can say about itself when the job hangs: stacks of all threads, NCCL's recorder.

Everything here runs in the watcher's thread while the main thread is stuck, so nothing waits for
it, for other ranks, or for the device longer than a stated time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_patch.runtime.files import replacing

RECORDER_SECONDS = 5.0
RECORDER_PREFIX = "nccl_trace_rank_"
"""As torch's own analyzer (``torchfrtrace``) wants the files named."""
COMMUNICATION = ("/torch/distributed/", "/megatron/core/pipeline_parallel/p2p_communication.py")
"""Who waits in these files waits for other ranks."""
SIGNAL = signal.SIGRTMIN + 7
"""Nothing else in a training process uses it; without a handler it would end the process."""


@dataclass(frozen=True, slots=True)
class Witness:
    """One rank's state, the first line of its file."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    seconds: float
    """Since the phase began."""
    at: str
    """Where its main thread is: file:line function."""
    collective: str
    """The torch.distributed or pipeline function its main thread waits in; empty: in none."""


def main_thread() -> tuple[str, str]:
    """(innermost Python frame, communication function around it or "") of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "?", ""
    at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
    collective = ""
    walk = frame
    while walk is not None:
        name = walk.f_code.co_filename.replace(os.sep, "/")
        if not any(place in name for place in COMMUNICATION):
            break
        collective = walk.f_code.co_name  # the outermost one of torch's frames wins
        walk = walk.f_back  # type: ignore[assignment]
    return at, "" if collective in ("<module>", "main", "run") else collective


def write(folder: Path, witness: Witness) -> Path:
    """``rank_00003.txt``: the witness as JSON, then the stacks of every thread.

    Returns the file; it appears complete or not at all.
    """
    result = file_of(folder, witness.rank)
    with replacing(result, durable=False) as out:
        out.write(json.dumps(asdict(witness)) + "\n\n")
        out.flush()
        faulthandler.dump_traceback(file=out, all_threads=True)
        out.write(f"\nflight recorder: {dump_recorder(folder, witness.rank)}\n")
    return result


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return folder / f"rank_{rank:05d}.txt"


def listen() -> None:
    """From now on `call` makes this process print its stacks; in the main thread.

    Also while a thread holds the interpreter lock: faulthandler's handler does not take it. Walking
    the stacks of threads that run is not safe, so nobody asks before the job is found to hang.
    """
    faulthandler.register(SIGNAL, file=2, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])


def call(pid: int) -> bool:
    """Have a process of this node print its stacks to its standard error; whether it listens."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        if not int(caught, 16) >> (SIGNAL - 1) & 1:  # another program has that process id now
            return False
        os.kill(pid, SIGNAL)
    except (OSError, ValueError):
        return False
    return True


def read(path: Path) -> Witness | None:
    """The witness of a file that `write` left; None when it is not one."""
    try:
        with path.open() as lines:
            return Witness(**json.loads(lines.readline()))
    except (OSError, ValueError, TypeError):
        return None


def dump_recorder(folder: Path, rank: int) -> str:
    """NCCL's last collectives into ``nccl_trace_rank_<rank>``; says what became of it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return "no NCCL in this process"
    result = [f"gave no answer in {RECORDER_SECONDS:g} s"]

    def work() -> None:
        try:
            from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
                _dump_nccl_trace,
            )

            data = _dump_nccl_trace()
            path = folder / f"{RECORDER_PREFIX}{rank}"
            path.write_bytes(data)
            result[0] = f"{path.name}, {len(data)} bytes"
        except Exception as error:
            result[0] = f"{type(error).__name__}: {error}"

    # In a thread: it takes a lock that a stuck thread of NCCL may hold.
    thread = threading.Thread(target=work, daemon=True, name="flight-recorder")
    thread.start()
    thread.join(RECORDER_SECONDS)
    return result[0]


def utc() -> str:
    """Now, fit for a directory name."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
