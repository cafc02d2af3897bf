"""The rules by themselves: spikes, stragglers, left-out batches, the crash ledger."""

from __future__ import annotations

import itertools
import json
import math
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from full_disk import room_for
from hypothesis import given
from hypothesis import strategies as st
from run_config import run_config

from megatron_patch.config import checks
from megatron_patch.faults import ledger, skips, straggler
from megatron_patch.faults.skips import Skips, merged
from megatron_patch.faults.spike import FILE, Detector, Spike, SpikePolicy, robust_score
from megatron_patch.runtime.heartbeat import PULSE
from megatron_patch.runtime.watcher import ResumePoint
from megatron_patch.schema.faults import FaultsConfig, SpikeConfig
from megatron_patch.schema.problem import ConfigError

# ----------------------------------------------------------------------------------------- spikes


def calm(options: SpikeConfig, steps: int) -> Detector:
    """A detector that has seen a slowly falling, noisy loss."""
    noise, detector = random.Random(7), Detector(options)
    for step in range(steps):
        loss = 4 - 0.002 * step + noise.gauss(0, 0.03)
        assert not detector.judge(loss, abs(noise.gauss(1, 0.15)))[0], step
    return detector


def test_noise_and_a_falling_loss_are_no_spikes():
    calm(SpikeConfig(), 3000)


@pytest.mark.parametrize(
    ("options", "loss", "norm", "spike"),
    [
        ({}, 5.5, 1.0, True),
        ({}, 3.0, 8.0, True),
        ({}, 1.0, 0.01, False),  # a drop
        ({"grad_norm_z": None}, 3.5, 1e6, False),  # only what is judged counts
    ],
)
def test_a_jump_of_either_is_a_spike(options, loss, norm, spike):
    spiked, loss_z, norm_z = calm(SpikeConfig(**options), 300).judge(loss, norm)
    assert spiked == spike and (not spike or max(loss_z, norm_z) > 8)


def test_nothing_is_judged_before_min_history():
    detector = calm(SpikeConfig(min_history=32), 31)
    assert not detector.judge(1e9, 1e9)[0]
    assert detector.judge(1e9, 1e9)[0]


def test_spikes_in_the_window_do_not_hide_the_next_one():
    detector = calm(SpikeConfig(window=64), 300)
    assert [detector.judge(9.0, 30.0)[0] for _ in range(20)] == [True] * 20


def test_a_new_level_is_accepted_after_half_a_window():
    detector = calm(SpikeConfig(window=64), 300)
    found = [detector.judge(9.0, 1.0)[0] for _ in range(64)]
    assert found[0] and not found[-1]


def test_a_constant_history_has_a_floor():
    assert robust_score(1.005, (1.0,) * 10) == pytest.approx(0.5)
    assert robust_score(5.0, (0.0,) * 10) == 0.0


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=40), st.floats(0.1, 100))
def test_the_score_has_no_unit(values, scale):
    x = values[0] * 2
    one = robust_score(x, tuple(values))
    other = robust_score(x * scale, tuple(v * scale for v in values))
    assert math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)


# ------------------------------------------------------------------------------- left-out batches

WINDOWS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=6)


@given(WINDOWS)
def test_steps_walk_over_the_batches_that_are_left_in_order(found):
    left = Skips(merged(found))
    out = {n for first, count in found for n in range(first, first + count)}
    expected = [n for n in range(200) if n not in out]
    assert [left.batch(step) for step in range(1, 101)] == expected[:100]


@given(WINDOWS)
def test_merged_windows_are_apart_and_say_the_same(found):
    once = merged(found)
    assert merged(once) == once
    assert all(a[0] + a[1] < b[0] for a, b in itertools.pairwise(once))
    assert Skips.from_dict(json.loads(json.dumps(Skips(once, 2).as_dict()))) == Skips(once, 2)


@pytest.mark.parametrize("bad", [
    [], {}, {"windows": [], "rewinds": -1}, {"windows": [[1]], "rewinds": 0},
    {"windows": [[1, "2"]], "rewinds": 0}, {"windows": 3, "rewinds": 0},
    {"windows": [[True, 1]], "rewinds": 0}, {"windows": [7], "rewinds": 0},
])  # fmt: skip
def test_a_damaged_list_is_refused(tmp_path, bad):
    (tmp_path / skips.FILE).write_text(json.dumps(bad))
    with pytest.raises(ConfigError, match="decides which data is trained on"):
        skips.read(tmp_path)


def test_a_list_survives_the_file(tmp_path):
    assert skips.read(tmp_path) is None
    left = Skips().add(10, 3).add(13, 2)
    skips.write(tmp_path, left)
    assert skips.read(tmp_path) == left == Skips(((10, 5),), 2)


# ------------------------------------------------------------------------------------ stragglers


def slow(seconds: list[float], **options: float) -> list[int]:
    o = FaultsConfig(**options)  # type: ignore[arg-type]
    return straggler.judge("compute", seconds, mads=o.straggler_mads, ratio=o.straggler_ratio).slow


def noisy(seed: int, deviation: float, **slower: float) -> list[float]:
    """64 ranks around 0.1 s, and how long ``rankN`` takes instead."""
    noise = random.Random(seed)
    seconds = [abs(noise.gauss(0.1, deviation)) for _ in range(64)]
    for name, value in slower.items():
        seconds[int(name.removeprefix("rank"))] = value
    return seconds


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ([0.1, 0.2], [1]),
        ([0.1, 0.105], []),
        (noisy(3, 0.002), []),
        (noisy(3, 0.002, rank5=0.15, rank40=0.3), [40, 5]),  # slowest first
        (noisy(3, 0.03), []),  # ranks that differ widely
        ([1e-5] * 7 + [5e-4], []),  # less than a millisecond
    ],
)
def test_stragglers(seconds, found):
    assert slow(seconds) == found


# ----------------------------------------------------------------------------------- crash ledger


def crash(
    run_dir: Path, step: int, *, attempt: str = "77.0.1", restart: int = 0, rank: int = 0
) -> None:
    PULSE.reset()
    PULSE.step(step)
    PULSE.enter("forward")
    try:
        raise RuntimeError(f"broken on rank {rank}")
    except RuntimeError as error:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEGATRON_PATCH_ATTEMPT_DIR", f"logs/{attempt}")
            patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
            patch.setenv("SLURM_JOB_ID", "77")
            ledger.record_error(run_dir, rank, error)


repeated = partial(ledger.repeated, limit=3, job_id="77", folder="77.0.1")


def test_a_crash_leaves_step_rank_host_code_and_traceback(tmp_path):
    crash(tmp_path, 12, rank=3)
    (entry,) = ledger.read(tmp_path)
    assert (entry["step"], entry["phase"], entry["rank"]) == (12, "forward", 3)
    assert (entry["exit_code"], entry["job"]) == (1, "77")
    assert entry["error"] == "RuntimeError: broken on rank 3" and entry["host"]
    assert "in crash" in entry["traceback"]


def test_a_refused_directory_gets_no_line(tmp_path):
    """The run in it may be somebody else's."""
    ledger.record_error(tmp_path, 0, ConfigError([]))
    ledger.record_error(tmp_path, 0, KeyboardInterrupt())
    assert not (tmp_path / ledger.FILE).exists()


def test_three_crashes_at_one_step_stop_the_run(tmp_path):
    for n in range(3):
        assert repeated(ledger.read(tmp_path)) is None
        for rank in (0, 1):
            crash(tmp_path, 12 - (rank == 1), restart=n, rank=rank)  # ranks are a step apart
    report = repeated(ledger.read(tmp_path))
    assert report is not None and report.startswith("step 12 crashed 3 times in a row")
    assert report.count("RuntimeError: broken on rank") == 6
    assert repeated(ledger.read(tmp_path), job_id="78") is None  # another job


def test_progress_between_crashes_is_hope(tmp_path):
    for n, step in enumerate((12, 12, 14, 12, 12)):
        crash(tmp_path, step, restart=n)
    assert repeated(ledger.read(tmp_path)) is None


def test_crashes_of_other_attempts_are_the_batch_script_s_to_count(tmp_path):
    """What went well between them leaves no line: days of training and a stop at a time limit."""
    for n in range(3):
        crash(tmp_path, 0, attempt=f"77.{n}.1")
    entries = ledger.read(tmp_path)
    assert len(entries) == 3
    for n in range(3):
        assert repeated(entries, folder=f"77.{n}.1") is None


def test_only_a_launcher_that_asks_is_answered(tmp_path, monkeypatch):
    for n in range(3):
        crash(tmp_path, 12, restart=n)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("MEGATRON_PATCH_ATTEMPT_DIR", "logs/77.0.1")
    assert ledger.check(tmp_path) is None
    monkeypatch.setenv(ledger.LIMIT, "3")
    assert ledger.check(tmp_path) is not None
    monkeypatch.setenv(ledger.LIMIT, "4")
    assert ledger.check(tmp_path) is None


def test_torn_lines_and_unwritable_directories_do_no_harm(tmp_path):
    crash(tmp_path, 1)
    with (tmp_path / ledger.FILE).open("a") as out:
        out.write('{"step": 3, "att')
    assert len(ledger.read(tmp_path)) == 1
    crash(tmp_path / "missing", 1)


# ---------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(("values", "path"), [
    ({"hang_seconds": 0.5}, "faults.hang_seconds"),
    ({"hang_pause_seconds": 10.0}, "faults.hang_pause_seconds"),
    ({"straggler_interval": 0}, "faults.straggler_interval"),
    ({"straggler_ratio": 0.9}, "faults.straggler_ratio"),
    ({"spike": SpikeConfig(window=4)}, "faults.spike.window"),
    ({"spike": SpikeConfig(min_history=500)}, "faults.spike.min_history"),
    ({"spike": SpikeConfig(loss_z=-1.0)}, "faults.spike.loss_z"),
    ({"spike": SpikeConfig(action="skip", loss_z=None, grad_norm_z=None)}, "faults.spike.action"),
    ({"spike": SpikeConfig(action="rewind", rewind_margin=5000)}, "faults.spike.rewind_margin"),
    ({"spike": SpikeConfig(max_rewinds=0)}, "faults.spike.max_rewinds"),
])  # fmt: skip
def test_problems(values, path):
    run = run_config(faults=values)
    assert path in [p.path for p in checks.problems(run, ["faults"])]


def test_rewind_needs_checkpoints_and_the_defaults_are_fine():
    run = run_config(faults={"spike": SpikeConfig(action="rewind")}, checkpoint={"interval": None})
    (problem,) = checks.problems(run, ["faults"])
    assert "set checkpoint.interval" in problem.message
    assert list(checks.problems(run_config(), ["faults"])) == []


def test_a_torn_line_of_the_ledger_swallows_no_other(tmp_path):
    """A rank that is killed while it writes, and the lines of the others after it."""
    file = tmp_path / ledger.FILE
    ledger.record(tmp_path, rank=0, exit_code=1, error="first")
    file.write_bytes(file.read_bytes()[:-40])
    for number in (1, 2):
        ledger.record(tmp_path, rank=number, exit_code=1, error=f"of {number}")
    assert [entry["error"] for entry in ledger.read(tmp_path)] == ["of 1", "of 2"]
    assert len(file.read_text().splitlines()) == 3


def test_a_torn_line_of_the_spikes_swallows_no_other(tmp_path):
    """And where the disk is full half a line is left to nobody."""
    file = tmp_path / FILE
    file.write_text('{"step": 3, "lo')
    layout: Any = SimpleNamespace(rank=0, print_rank=True, world_size=1)
    policy = SpikePolicy(
        SpikeConfig(), MagicMock(), layout, roots=[], run_dir=tmp_path, log=MagicMock(),
        samples=lambda batch: [],
    )  # fmt: skip
    policy._record(Spike(5, 4, 9.0, 9.0, 9.0, 9.0), "recorded", {})
    with room_for(file, 20):
        policy._record(Spike(6, 5, 9.0, 9.0, 9.0, 9.0), "recorded", {})
    policy._record(Spike(7, 6, 9.0, 9.0, 9.0, 9.0), "recorded", {})
    policy.close()
    torn, *lines = file.read_text().splitlines()
    assert torn == '{"step": 3, "lo' and [json.loads(line)["step"] for line in lines] == [5, 7]


@pytest.mark.parametrize(("own", "rewinds"), [(True, 2), (False, 0)])
def test_rewinds_of_the_run_before_are_not_counted(tmp_path, own, rewinds):
    """It had used them up, and the new one would end at its first spike; the windows stay."""
    layout: Any = SimpleNamespace(rank=0, print_rank=True, world_size=1)
    policy = SpikePolicy(
        SpikeConfig(action="rewind"), MagicMock(), layout, roots=[], run_dir=tmp_path,
        log=MagicMock(), samples=lambda batch: [],
    )  # fmt: skip
    saved = {"faults": {"history": [], "skips": Skips(((4, 3),), 2).as_dict()}}
    policy.load_state(ResumePoint(9, 0, saved, has_saved=own))
    assert policy.skips == Skips(((4, 3),), rewinds) == skips.read(tmp_path)


@pytest.mark.parametrize(
    ("windows", "listed", "good"),
    [
        ((), [[9, 5]], True),
        ((), [[8, 1]], False),
        ((), [[2, 1]], False),
        ((), [[2, 99]], False),
        (((4, 3),), [[4, 3], [12, 2]], True),
        (((4, 3),), [[4, 3], [11, 2]], False),
        (((4, 3),), [], False),
        (((9, 3),), [], True),
        (((4, 3),), [[4, 4]], False),
    ],
)
def test_a_list_that_changes_what_was_trained_is_refused(tmp_path, windows, listed, good):
    """Later batches would move: some never read, some read twice."""
    layout: Any = SimpleNamespace(rank=0, print_rank=True, world_size=1)
    policy = SpikePolicy(
        SpikeConfig(), MagicMock(), layout, roots=[], run_dir=tmp_path, log=MagicMock(),
        samples=lambda batch: [],
    )  # fmt: skip
    skips.write(tmp_path, Skips(merged([(a, b) for a, b in listed])))
    saved = {"faults": {"history": [], "skips": Skips(windows).as_dict()}}
    own = ResumePoint(9, 0, saved, has_saved=True)
    if good:
        policy.load_state(own)
    else:
        with pytest.raises(ConfigError, match=r"of the batches of steps 1-9, which were trained"):
            policy.load_state(own)
    policy.load_state(ResumePoint(9, 0, saved, has_saved=False))  # another run's checkpoint
    assert policy.skips.windows == merged([(a, b) for a, b in listed])
