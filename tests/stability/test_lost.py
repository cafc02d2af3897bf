"""Whether a run goes on from after its loss was lost: what its start says and keeps of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from telemetry_records import H, L, meta

from megatron_patch.stability import lost
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.writer import Writer

GOOD = [5.0, 4.0, 3.6, 3.5, 3.4, 3.4, 3.5, 3.3]
LOST = [*GOOD, 7.0, 7.1, 6.9, 7.0, 7.2]


def write(run: Path, losses: list[float], *, start: int = 0) -> Path:
    """A record every 10 steps."""
    writer = Writer(run, meta("stable_flash/none"), start_step=start)
    heads = dict.fromkeys(HEAD_METRICS, np.zeros((L, H), np.float32))
    for i, loss in enumerate(losses, start=1):
        scalars = {"loss_mean": loss, "grad_norm_mean": 0.3, "grad_norm_max": 0.5}
        writer.write(start + 10 * i, scalars=scalars, layers={}, heads=heads)
    writer.close()
    return run


def test_where_the_loss_stands_is_told_by_medians() -> None:
    steps = range(10, 10 * len(LOST) + 1, 10)
    found = lost.standing(list(zip(steps, LOST, strict=True)))
    assert found == lost.Standing(130, 7.0, 3.4, 80) and found.lost
    # One spike is none, nor is a loss that is not finite, nor one that has come back.
    spike = [(10, 3.4), (20, 3.4), (30, 3.4), (40, 9.0), (50, 3.4), (60, float("nan"))]
    found = lost.standing(spike)
    assert found == lost.Standing(50, 3.4, 3.4, 50) and not found.lost
    assert lost.standing(spike[:4]) is None and lost.standing([]) is None
    back = [*zip(steps, LOST, strict=True), *((s, 3.5) for s in range(140, 190, 10))]
    found = lost.standing(back)
    assert found is not None and not found.lost


def test_a_start_says_that_the_loss_was_lost(tmp_path: Path) -> None:
    """Of its own records, up to the checkpoint that it goes on from."""
    run = write(tmp_path / "run", LOST)
    (line,) = lost.at_start(run, 130, source=None)
    assert "lost before: 7.00 around step 130, 3.60 above its lowest (3.40 around step 80)" in line
    assert "docs/rescue.md" in line and "docs/checkpoints.md" in line
    assert not list(lost.at_start(run, 80, source=None))  # gone back to before it
    assert not list(lost.at_start(run, 30, source=None))  # too few records
    assert lost.read(run) is None


def test_a_run_that_begins_from_another_ones_checkpoint(tmp_path: Path) -> None:
    """Whatever its numerics are; it is kept, for the report and for later starts."""
    other = write(tmp_path / "other", LOST)
    checkpoint = other / "checkpoints" / "step_00000130.attempt-1"
    checkpoint.mkdir(parents=True)
    run = tmp_path / "run"
    Writer(run, meta("stable_flash/compensated"), start_step=130).close()
    (line,) = lost.at_start(run, 130, source=checkpoint)
    assert "3.60 above its lowest" in line
    assert lost.read(run) == lost.Standing(130, 7.0, 3.4, 80)
    # Later the other run may be gone; its own records say where the loss stands now.
    write(run, [6.5, 6.0, 5.5, 5.0, 4.5], start=130)
    (line,) = lost.at_start(run, 180, source=tmp_path / "gone")
    assert "5.50 around step 180, 2.10 above its lowest (3.40 around step 80)" in line
    write(run, [3.6, 3.5, 3.4, 3.3, 3.3], start=180)
    assert not list(lost.at_start(run, 230, source=None))


def test_a_run_that_begins_from_a_good_one_says_nothing(tmp_path: Path) -> None:
    other = write(tmp_path / "other", LOST)
    run = tmp_path / "run"
    Writer(run, meta("stable_flash/compensated"), start_step=80).close()
    assert not list(lost.at_start(run, 80, source=other))
    assert lost.read(run) == lost.Standing(80, 3.4, 3.4, 80)
    unknown = tmp_path / "unknown"
    Writer(unknown, meta("stable_flash/compensated"), start_step=80).close()
    assert not list(lost.at_start(unknown, 80, source=tmp_path / "no_telemetry"))
    assert lost.read(unknown) is None


@pytest.mark.parametrize("text", ["", "{}", '{"step": 1, "loss": "x"}', "[1]", "null",
                                  '{"step": 1, "loss": NaN, "lowest": 3.0, "at": 1}'])  # fmt: skip
def test_a_damaged_file_stops_no_run_and_is_named_where_it_is_shown(
    text: str, tmp_path: Path
) -> None:
    run = write(tmp_path / "run", LOST)
    (run / "stability" / lost.FILE).write_text(text)
    assert not list(lost.at_start(run, 130, source=None))
    with pytest.raises(ValueError, match=r"continued.json is damaged \(.*\); delete it"):
        lost.read(run)
