"""Whether a run goes on from after its loss was lost. No torch.

A switch of the numerics stops heads that run away and gives nothing back: runs that were switched
700 steps and more after their loss was lost did not come back (docs/rescue.md), while losses that
fall again from there look well by themselves. So a start says how far below them the loss has been,
in the run itself or in the one whose checkpoint it starts from, and the report judges by that.

continued.json    in ``<run_dir>/stability``: what another run's loss was at the checkpoint that
                  this one began from, {"step", "loss", "lowest", "at"}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_patch.runtime.files import write_whole
from megatron_patch.stability import record
from megatron_patch.stability.lookback import directory_of
from megatron_patch.stability.warning import SMOOTH, smoothed

FILE = "continued.json"
RISE = 0.5
"""nats: losses this far above the lowest before them are lost, until they come back."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the loss stood, as medians of `SMOOTH` records: single spikes are no loss of it."""

    step: int
    loss: float
    lowest: float
    at: int
    """The step of the lowest."""

    @property
    def lost(self) -> bool:
        """Whether it stood high above what it had been."""
        return self.loss > self.lowest + RISE

    def line(self) -> str:
        """What is said of a run that goes on from there."""
        return (
            f"the loss was lost before: {self.loss:.2f} around step {self.step:,}, "
            f"{self.loss - self.lowest:.2f} above its lowest ({self.lowest:.2f} around step "
            f"{self.at:,}). Where attention did that, runs whose numerics were switched 700 steps "
            "later and more did not come back (docs/rescue.md): a checkpoint from before the first "
            "danger is the better start (docs/checkpoints.md, going back)"
        )


def standing(losses: Sequence[tuple[int, float]]) -> Standing | None:
    """Of (step, mean loss) of records in order; None of fewer than `SMOOTH` that are finite."""
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    medians = smoothed([loss for _, loss in finite])
    if not medians:
        return None
    steps = [step for step, _ in finite][SMOOTH - 1 :]
    lowest = min(range(len(medians)), key=medians.__getitem__)
    return Standing(steps[-1], medians[-1], medians[lowest], steps[lowest])


def at_start(run_dir: Path, step: int, *, source: Path | None) -> Iterator[str]:
    """What is to be said of the loss when a run goes on after ``step``; first rank only.

    Args:
        run_dir: of the run; its `Writer` exists.
        step: steps done.
        source: what it loads from, if that is another run's checkpoint with its optimizer. Read
            where this run has no records of its own, and kept in `FILE`.

    Records that cannot be read are no news of the loss: others say so.
    """
    try:
        own = standing(_losses(run_dir, step))
        before = read(run_dir)
        if own is None and before is None and source is not None:
            before = standing(_losses(directory_of(source), step))
            if before is not None:
                text = json.dumps(asdict(before)) + "\n"
                write_whole(run_dir / record.FOLDER / FILE, text)
    except (OSError, ValueError, KeyError, TypeError):
        return
    found = [one for one in (before, own) if one is not None]
    if not found:
        return
    lowest = min(found, key=lambda one: one.lowest)
    now = Standing(found[-1].step, found[-1].loss, lowest.lowest, lowest.at)
    if now.lost:
        yield now.line()


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
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error!r:.80}); delete it") from None
    if not math.isfinite(told.loss + told.lowest):
        raise ValueError(f"{file} is damaged (not finite); delete it")
    return told


def _losses(run_dir: Path, step: int) -> list[tuple[int, float]]:
    found = record.read(run_dir)
    losses = found.scalars["loss_mean"][: record.up_to(found.records, step)]
    return list(zip(found.steps.tolist(), losses.tolist(), strict=False))
