"""The crash ledger: ``<run_dir>/crashes.jsonl``, one line a rank that ended with an error.

A rank appends its line before it dies; the batch script adds one for ranks that were killed. Who
wants to start the run again can ask `repeated` whether that has any hope: the same step crashing
again and again is a fault of the run, not of the machines. Where ``MEGATRON_PATCH_SAME_STEP_LIMIT``
is set, in-job restarts are counted here, since the batch script hears nothing of them. The attempts
it starts itself it counts itself: what succeeded between two crashes leaves no line here.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_patch.runtime.heartbeat import PULSE
from megatron_patch.runtime.lifeline import ATTEMPT_DIR
from megatron_patch.runtime.records import append_line
from megatron_patch.schema.problem import ConfigError

FILE = "crashes.jsonl"
LIMIT = "MEGATRON_PATCH_SAME_STEP_LIMIT"
MAX_TRACEBACK = 6000  # characters kept, from the end


class SameStepError(RuntimeError):
    """The same step crashed too often; a person has to look."""

    exit_code = 8


def job() -> str:
    """The job of the scheduler; ``-`` outside one."""
    return os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID") or "-"


def attempt() -> str:
    """``FOLDER.RESTART``, alike on all ranks: the launcher's directory, the agent's restarts."""
    folder = Path(os.environ.get(ATTEMPT_DIR, "")).name or os.environ.get("MASTER_PORT", "")
    return f"{folder}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def node() -> str:
    """Slurm's name of this node, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def record(run_dir: Path, *, rank: int, exit_code: int, error: str, trace: str = "") -> None:
    """Append this rank's line. Never raises: the crash it tells of is the news.

    Args:
        run_dir: of the run; nothing is written when it does not exist.
        rank: of this process.
        exit_code: with which it is about to end.
        error: one line.
        trace: traceback or stacks; its end is kept.
    """
    now, first = PULSE.now, error.splitlines()[0][:500] if error else ""
    entry = {
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "job": job(),
        "attempt": attempt(), "step": now.step, "phase": now.phase, "rank": rank, "host": node(),
        "exit_code": exit_code, "error": first, "traceback": trace[-MAX_TRACEBACK:],
    }  # fmt: skip
    with suppress(OSError):
        append_line(run_dir / FILE, json.dumps(entry))


def record_error(run_dir: Path, rank: int, error: BaseException) -> None:
    """`record` for an exception that ends the training.

    Graceful ends leave no line, and errors of configuration or data neither: they are no crash,
    and the directory they name may be another run's.
    """
    if isinstance(error, (KeyboardInterrupt, GeneratorExit, ConfigError)):
        return
    code = getattr(error, "exit_code", None)
    if not isinstance(code, int):
        ours = type(error).__module__.partition(".")[0] in ("megatron_patch", "stable_attention")
        code = 2 if ours and isinstance(error, ValueError) else 1
    if code == 2:
        return
    text = "".join(traceback.format_exception(error))
    record(run_dir, rank=rank, exit_code=code, error=f"{type(error).__name__}: {error}", trace=text)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Every whole line, oldest first; lines that a crash tore are left out."""
    try:
        lines = (run_dir / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            found.append(entry | {"step": int(entry["step"]), "attempt": str(entry["attempt"])})
    return found


def repeated(entries: list[dict[str, Any]], *, limit: int, job_id: str, folder: str) -> str | None:
    """A report when the last ``limit`` restarts of one attempt all crashed at one step, else None.

    Ranks of one attempt can be a step apart: its step is the largest.
    """
    steps: dict[str, int] = {}
    mine = [e for e in entries if e.get("job") == job_id and _folder(e["attempt"]) == folder]
    for entry in mine:
        steps[entry["attempt"]] = max(steps.get(entry["attempt"], -1), entry["step"])
    last = dict(list(steps.items())[-limit:])
    if len(last) < limit or len(set(last.values())) != 1:
        return None
    step = next(iter(last.values()))
    lines = [f"step {step} crashed {limit} times in a row; the run stops here:"]
    lines += [
        f"  {e.get('utc')} attempt {e['attempt']} rank {e.get('rank')} on {e.get('host')}, "
        f"{e.get('phase')}, exit code {e.get('exit_code')}: {e.get('error')}"
        for e in mine
        if e["attempt"] in last
    ]
    return "\n".join(lines)


def check(run_dir: Path) -> str | None:
    """The report of `repeated`, when the launcher wants to know and the limit is reached."""
    text = os.environ.get(LIMIT, "")
    if not text.isdigit() or int(text) < 1:
        return None
    return repeated(read(run_dir), limit=int(text), job_id=job(), folder=_folder(attempt()))


def _folder(attempt_id: str) -> str:
    """What the restarts of one attempt have in common."""
    return attempt_id.rpartition(".")[0]
