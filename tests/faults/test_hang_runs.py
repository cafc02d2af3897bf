"""Real trainers of two ranks: one gets stuck, one is slow."""

from __future__ import annotations

import json
import re
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import training_ranks
from training_ranks import run_ranks

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do what MP_STUCK and MP_SLOW say."""
    monkeypatch.setattr(training_ranks, "WORKER", Path(__file__).with_name("faulty_worker.py"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every rank end by itself: `run_ranks` kills the others when one has failed."""

    def wait(processes: list[BaseProcess], timeout: float) -> list[int | None]:
        end = time.monotonic() + timeout
        for p in processes:
            p.join(end - time.monotonic())
        return training_ranks.end_all(processes)

    monkeypatch.setattr(training_ranks, "_wait", wait)


def test_a_rank_that_gets_stuck_is_found_named_and_restarted_by_exit_code(
    tmp_path, corpus, patient, monkeypatch
):
    monkeypatch.setenv("MP_STUCK", "3:1")
    run: dict[str, Any] = {"set": ["name=stuck", "faults.hang_seconds=8"]}
    with pytest.raises(AssertionError, match=r"ranks ended with \[6, 6\]"):
        run_ranks(tmp_path, corpus, 2, [run], timeout=900)
    run_dir = tmp_path / "runs" / "stuck"
    (summary,) = (run_dir / "hangs").glob("*/summary.txt")
    text = summary.read_text()
    assert text.startswith("hang at step 3: rank 1 ("), text
    assert "step 3, phase reduction" in text.splitlines()[0]
    first = (summary.parent / "rank_00000.txt").read_text()
    assert json.loads(first.splitlines()[0])["collective"], "rank 0 waits in a collective"
    assert "finalize_model_grads" in first  # the stack of the main thread
    assert "before_reduction" in (summary.parent / "rank_00001.txt").read_text()
    entries = [json.loads(x) for x in (run_dir / "crashes.jsonl").read_text().splitlines()]
    assert {(e["rank"], e["exit_code"], e["step"]) for e in entries} == {(0, 6, 3), (1, 6, 3)}


@pytest.mark.slow
def test_a_pipeline_stage_that_waits_is_not_blamed(tmp_path, corpus, patient, monkeypatch):
    monkeypatch.setenv("MP_STUCK", "3:0:forward")
    keys = ["faults.hang_seconds=8", "parallel.pipeline_model_parallel_size=2"]
    run: dict[str, Any] = {"set": ["name=stuck", *keys]}
    with pytest.raises(AssertionError, match=r"ranks ended with \[6, 6\]"):
        run_ranks(tmp_path, corpus, 2, [run], timeout=900)
    run_dir = tmp_path / "runs" / "stuck"
    (summary,) = (run_dir / "hangs").glob("*/summary.txt")
    assert summary.read_text().startswith("hang at step 3: rank 0 ("), summary.read_text()
    waiting = json.loads((summary.parent / "rank_00001.txt").read_text().splitlines()[0])
    # Not "data", which would also make it a straggler there.
    assert waiting["phase"] == "forward" and waiting["collective"]


def test_a_slow_rank_is_named(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("MP_SLOW", "1:0.25")
    keys = ["training.train_steps=9", "training.global_batch_size=8"]
    keys += ["faults.straggler_interval=4", "logging.interval=3"]
    runs = [
        # A busy machine makes one rank of two slow now and then; not a thousand times.
        {"set": ["name=even", *keys, "faults.straggler_ratio=1000"]},
        {"set": ["name=slow", *keys]},
    ]
    results = run_ranks(tmp_path, corpus, 2, runs, timeout=900)
    assert [r["code"] for run in results for r in run] == [0, 0, 0, 0]
    log = (tmp_path / "runs" / "slow" / "train.log").read_text()
    for step in (4, 8):
        assert f"stragglers up to step {step}, compute a step: rank 1 (" in log
    # Four micro-batches of a step, each 250 ms late; the other rank may have lost time, too.
    line = r"compute a step: rank 1 \([^)]*\) ([\d.]+) ms; the median is ([\d.]+) ms"
    times = [(float(slow), float(median)) for slow, median in re.findall(line, log)]
    assert all(slow > max(990, median) for slow, median in times), times
    assert "stragglers" not in (tmp_path / "runs" / "even" / "train.log").read_text()
