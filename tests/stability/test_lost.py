"""Whether a run goes on from after its loss was lost: what its start says and keeps of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from telemetry_records import H, L, meta

from megatron_patch.stability import lost
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer

EVERY = 50
GOOD = [5.0, 4.6, 4.2, 4.0, 3.9, *[3.6, 3.5, 3.4, 3.4, 3.4], *[3.4, 3.4, 3.3, 3.4, 3.4]]
LOST = [*GOOD, 7.0, 7.1, 6.9, 7.0, 7.2]
WHERE = lost.Standing(1000, 7.0, 3.4, 750)


def steps(losses: list[float], start: int = 0) -> list[int]:
    return [start + EVERY * (i + 1) for i in range(len(losses))]


def write(run: Path, losses: list[float], *, start: int = 0) -> Path:
    writer = Writer(run, meta("stable_flash/none"), start_step=start)
    heads = dict.fromkeys(HEAD_METRICS, np.zeros((L, H), np.float32))
    for step, loss in zip(steps(losses, start), losses, strict=True):
        scalars = {"loss_mean": loss, "grad_norm_mean": 0.3, "grad_norm_max": 0.5}
        writer.write(step, scalars=scalars, layers={}, heads=heads)
    writer.close()
    return run


def said(run: Path, step: int, *, source: Path | None = None, own: bool = True) -> list[str]:
    return list(lost.at_start(run, step, source=source, own=own))


def test_where_the_loss_stands_is_told_by_medians() -> None:
    assert lost.standing(steps(LOST), LOST) == WHERE and WHERE.lost
    # One spike is none, nor what is not finite, nor a loss that has come back.
    spike = [*GOOD, 3.4, 9.0, 3.4, float("nan"), 3.4, 3.4]
    for losses in (spike, [*LOST, *[3.5] * 5]):
        found = lost.standing(steps(losses), losses)
        assert found is not None and not found.lost
    assert lost.standing(steps(GOOD[:4]), GOOD[:4]) is None and lost.standing([], []) is None
    # Easy data for a while is no level that was reached.
    easy = [2.9] * 10 + [2.2] * 5 + [2.9] * 10
    found = lost.standing(steps(easy), easy)
    assert found == lost.Standing(1250, 2.9, 2.9, 500)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_single_steps_is_no_level(seed: int) -> None:
    """Records of every step: the smallest of many medians of five would lie far below the rest."""
    losses = np.random.default_rng(seed).normal(3.0, 0.4, 20_000)
    found = lost.standing(range(1, 20_001), losses.tolist())
    assert found is not None and found.lowest > 2.9 and not found.lost


def test_a_start_says_that_the_loss_was_lost(tmp_path: Path) -> None:
    """Of its own records, up to the checkpoint that it goes on from."""
    run = write(tmp_path / "run", LOST)
    (line,) = said(run, 1000)
    assert "stood at 7.00 around step 1,000, 3.60 above its lowest (3.40 around step 750)" in line
    assert "docs/stability.md" in line and "docs/checkpoints.md" in line
    assert not said(run, 750) and not said(run, 100)  # gone back to before it; too few records
    assert lost.read(run) is None


def test_weeks_of_records_are_looked_at_here_and_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost, "READ", 40)
    run = write(tmp_path / "run", [*[5.0] * 100, *[3.0] * 300, *[7.0] * 100])
    (line,) = said(run, 25_000)
    assert "7.00 around step 25,000, 4.00 above its lowest (3.00 around" in line


def test_a_run_that_begins_from_another_ones_checkpoint(tmp_path: Path) -> None:
    """Whatever its numerics are; it is kept, for the report and for later starts."""
    other = write(tmp_path / "other", LOST)
    checkpoint = other / "checkpoints" / "step_00001000.attempt-1"
    checkpoint.mkdir(parents=True)
    run = tmp_path / "run"
    Writer(run, meta("stable_flash/compensated"), start_step=1000).close()
    (line,) = said(run, 1000, source=checkpoint, own=False)
    assert "3.60 above its lowest" in line and lost.read(run) == WHERE
    # Later the other run may be gone; its own records say where the loss stands now.
    write(run, [6.5, 6.0, 5.5, 5.0, 4.5], start=1000)
    (line,) = said(run, 1250, source=tmp_path / "gone")
    assert "5.50 around step 1,250, 2.10 above its lowest (3.40 around step 750)" in line
    write(run, [3.6, 3.5, 3.4, 3.3, 3.3], start=1250)
    assert not said(run, 1500)


def test_a_run_that_begins_from_a_good_one_is_judged_by_itself(tmp_path: Path) -> None:
    """Other data may have a higher loss for good. So is one whose directory was used before."""
    lost_one, good = write(tmp_path / "lost", LOST), write(tmp_path / "good", GOOD)
    run = tmp_path / "run"
    Writer(run, meta("stable_flash/compensated"), start_step=750).close()
    assert said(run, 1000, source=lost_one, own=False) and lost.read(run) == WHERE
    # That attempt ended before its first checkpoint; this one begins elsewhere, or nowhere.
    assert not said(run, 750, source=good, own=False) and lost.read(run) is None
    assert said(run, 1000, source=lost_one, own=False)
    assert not said(run, 0, source=None, own=False) and lost.read(run) is None
    assert not said(run, 1000, source=tmp_path / "no_telemetry", own=False)
    write(run, [6.5] * 5, start=750)
    assert not said(run, 1000, source=good)


@pytest.mark.parametrize(("losses", "lines"), [(GOOD, 1), (LOST, 2)])
def test_a_switch_says_so_as_well(
    losses: list[float], lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_patch.stability import telemetry

    monkeypatch.setattr(telemetry.guard, "switch", lambda sites: None)
    points = [SimpleNamespace(step=s, loss=x) for s, x in zip(steps(losses), losses, strict=True)]
    told: list[str] = []
    run = SimpleNamespace(
        observer=SimpleNamespace(sites=[]),
        history=SimpleNamespace(points=points),
        rule=Rule(),
        monitor=SimpleNamespace(say=told.append),
    )
    telemetry.Stability._switch(run, 1001)  # type: ignore[arg-type]
    assert len(told) == lines and "switched attention to stable_flash" in told[0]
    assert ("the loss stood at" in told[-1]) == (losses is LOST)


@pytest.mark.parametrize("text", ["", "{}", '{"step": 1, "loss": "x"}', "[1]", "null", "[" * 10**5,
                                  '{"step": Infinity, "loss": 3.0, "lowest": 3.0, "at": 1}',
                                  '{"step": 1, "loss": NaN, "lowest": 3.0, "at": 1}'])  # fmt: skip
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    run = write(tmp_path / "run", LOST)
    (run / "stability" / lost.FILE).write_text(text)
    with pytest.raises(ValueError, match=r"(?s)continued.json is damaged \(.*\); delete it"):
        said(run, 1000)
    (run / "stability" / lost.FILE).unlink()
    assert said(run, 1000)
