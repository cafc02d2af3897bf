"""Whether a run goes on from after its loss was lost. No torch.

A switch of the numerics stops heads that run away and gives nothing back: runs that were switched
700 steps and more after their loss was lost did not come back (research/report.md), while losses
that fall again from there look well by themselves. So a start says how far below them the loss has
been, in the run itself or in the one whose checkpoint it starts from, and the report judges by it.

continued.json    in ``<run_dir>/stability``, of a run that began from another one's checkpoint
                  where the loss was lost: {"step", "loss", "lowest", "at"} of that other run
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_patch.runtime.files import write_whole
from megatron_patch.stability import record
from megatron_patch.stability.lookback import directory_of
from megatron_patch.stability.warning import SMOOTH

FILE = "continued.json"
RISE = 0.5
"""nats: losses this far above the lowest before them are lost, until they come back."""
SPAN = 200
"""Steps whose median is compared, at least, and `SMOOTH` records: the noise of single steps would
set a lowest that no later loss reaches."""
READ = 2000
"""Records looked at, evenly, and the last ones: all of a run of weeks are gigabytes."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the loss stood, as medians; what is not finite is left out."""

    step: int
    loss: float
    lowest: float
    at: int
    """The last step of the lowest."""

    @property
    def lost(self) -> bool:
        """Whether it stood high above what it had been."""
        return self.loss > self.lowest + RISE

    def line(self) -> str:
        """What is said of a run that goes on from there."""
        return (
            f"the loss stood at {self.loss:.2f} around step {self.step:,}, "
            f"{self.loss - self.lowest:.2f} above its lowest ({self.lowest:.2f} around step "
            f"{self.at:,}). If attention did that, runs whose numerics were switched 700 steps "
            "later and more did not come back (docs/stability.md): a checkpoint from before the "
            "first danger is the better start (docs/checkpoints.md, going back)"
        )


def standing(steps: Sequence[int], losses: Sequence[float]) -> Standing | None:
    """Of records in order; None of fewer than one median needs.

    The lowest is one that two medians in a row keep to: easy data for a while is none.
    """
    at, values = np.asarray(steps, np.int64), np.asarray(losses, np.float64)
    finite = np.isfinite(values)
    at, values = at[finite], values[finite]
    if len(at) < SMOOTH:
        return None
    apart = max(1.0, float(np.median(np.diff(at[-READ // 2 :]))))
    size = max(SMOOTH, math.ceil(SPAN / apart))
    count = len(at) // size
    if not count:
        return None
    first = len(at) - count * size  # the last one ends at the last record
    medians = np.median(values[first:].reshape(count, size), axis=1)
    kept = np.maximum(medians[:-1], medians[1:]) if count > 1 else medians
    lowest = int(kept.argmin())
    end = first + (lowest + min(2, count)) * size - 1
    return Standing(int(at[-1]), float(medians[-1]), float(kept[lowest]), int(at[end]))


def at_start(run_dir: Path, step: int, *, source: Path | None, own: bool) -> Iterator[str]:
    """What is to be said of the loss when a run goes on after ``step``; first rank only.

    Args:
        run_dir: of the run; its `Writer` exists.
        step: steps done.
        source: what it loads from, if that is another run's checkpoint with its optimizer.
        own: whether the run has checkpoints of its own. Else the source is read, up to ``step``,
            and `FILE` is written, or taken away where that run was well.

    Raises:
        OSError, ValueError: something cannot be read or written; what could be said was.
    """
    now = _standing(run_dir, step)
    before = None
    if own:
        before = read(run_dir)
    elif source is not None and step:
        with contextlib.suppress(FileNotFoundError):  # no telemetry there: others say so
            before = _standing(directory_of(source), step)
        before = before if before is not None and before.lost else None
    found = [one for one in (before, now) if one is not None]
    if found:
        lowest = min(found, key=lambda one: one.lowest)
        told = Standing(found[-1].step, found[-1].loss, lowest.lowest, lowest.at)
        if told.lost:
            yield told.line()
    if own:
        return
    if before is None:
        (run_dir / record.FOLDER / FILE).unlink(missing_ok=True)
    else:
        write_whole(run_dir / record.FOLDER / FILE, json.dumps(asdict(before)) + "\n")


def read(run_dir: Path) -> Standing | None:
    """What `FILE` of a run says; None where it has none.

    Raises:
        ValueError: it is not what this program writes.
    """
    file = run_dir / record.FOLDER / FILE
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text())
        told = Standing(int(found["step"]), float(found["loss"]), float(found["lowest"]),
                        int(found["at"]))  # fmt: skip
        if not math.isfinite(told.loss + told.lowest):
            raise ValueError("not finite")
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error!r:.80}); delete it") from None
    return told


def _standing(run_dir: Path, step: int) -> Standing | None:
    """Of the records up to a step, `READ` of them."""
    try:
        found = record.read(run_dir)
    except FileNotFoundError:
        return None
    end = record.up_to(found.records, step)
    last = min(end, READ // 2)
    older = np.unique(np.linspace(0, end - last - 1, min(end - last, READ - last)).astype(int))
    chosen = np.concatenate([older, np.arange(end - last, end)]).astype(int)
    column = found.meta["scalars"].index("loss_mean")
    steps = [int(found.records[i]["step"]) for i in chosen]
    return standing(steps, [float(found.records[i]["scalars"][column]) for i in chosen])
