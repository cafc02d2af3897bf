"""The trainer itself on a real Slurm, in CPU mode on 2 nodes x 2 ranks: what is lost is nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from one_machine import PATIENCE
from slurm_run import Run

from megatron_patch.runtime.records import read_rows

pytestmark = pytest.mark.slurm
STEPS = 600
SETS = ("checkpoint.interval=50",)


def prepare(folder):
    """A small corpus of bytes, the same every time."""
    lines = (
        json.dumps({"text": f"line {n}, which is long enough to learn from: {n * 7919}"})
        for n in range(2000)
    )
    (folder / "text.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-m", "megatron_patch", "prepare-data", "text.jsonl"]
    command += ["--tokenizer", "bytes", "--out", "corpus"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def losses(run: Run) -> dict[int, tuple[str, str]]:
    """Step -> loss and gradient norm, every digit."""
    rows = read_rows(run.dir / "metrics.csv")
    return {int(row["step"]): (row["loss"], row["grad_norm"]) for row in rows}


@pytest.fixture(scope="module")
def unbroken(slurm, tmp_path_factory):
    """A run that nothing happens to, with the preflight before it."""
    run = Run(slurm, tmp_path_factory.mktemp("trainer"), "unbroken")
    prepare(run.work)
    run.submit(steps=STEPS, sets=(*SETS, "cluster.preflight.enabled=true"))
    run.wait_for_end()
    return run


def test_preflight_table_is_in_the_log(unbroken):
    log = unbroken.log()
    assert log.index("no GPU: not measured") < log.index("rendezvous")
    assert re.search(r"ok +versions +2 nodes", log)
    assert not (unbroken.dir / "launch" / "excluded_nodes").exists()


def test_killed_rank_and_time_limit_lose_nothing(new_run, unbroken, slurm):
    """kill -9 of a rank, then the time limit: restarted, requeued, and every loss is the same.

    The limit comes when the test is ready for it: the ranks stand still (one of them is stopped)
    until Slurm, which looks every 30 s, has sent the signal.
    """
    prepare(new_run.work)
    sets = ("cluster.time_limit=01:00:00", "cluster.stop_lead_seconds=300")
    new_run.submit(steps=STEPS, sets=(*SETS, *sets, "faults.hang_seconds=null"))
    new_run.wait_for_step(60)
    os.kill(new_run.rank_pid(2), signal.SIGKILL)
    slurm.wait_for(lambda: len(new_run.attempts()) == 2, PATIENCE, "the second attempt")
    new_run.wait_for_step(100)
    stopped = new_run.rank_pid(0)
    os.kill(stopped, signal.SIGSTOP)
    try:
        shorten_time_limit(new_run, slurm)
        slurm.wait_for(lambda: "got USR1" in new_run.log(), PATIENCE, "the signal")
    finally:
        os.kill(stopped, signal.SIGCONT)
    slurm.wait_for(lambda: "requeue=stop" in " ".join(new_run.events()), PATIENCE, "the requeue")
    slurm.wait_for_state(new_run.job, "PENDING")
    slurm.run("scontrol", "update", f"JobId={new_run.job}", "TimeLimit=60")
    new_run.wait_for_end()
    events = [line.split()[-1] for line in new_run.events()]
    assert events == ["start", "crash", "start", "stopped", "requeue=stop", "start", "finished"]
    assert "got USR1: asking the ranks to save and stop" in new_run.log()
    assert losses(new_run) == losses(unbroken)
    assert len(losses(new_run)) == STEPS
    assert new_run.leftovers() == []


def shorten_time_limit(run: Run, slurm) -> None:
    """To the minutes that are over, and the five that the signal leads."""
    hours, minutes, _ = slurm.fact(run.job, "RunTime").split(":")
    limit = 60 * int(hours) + int(minutes) + 5
    slurm.run("scontrol", "update", f"JobId={run.job}", f"TimeLimit={limit}")


def test_configuration_error_ends_the_job_at_once(new_run, slurm):
    """A corpus that is not there: exit code 2 from every rank, no second start."""
    new_run.submit(steps=STEPS)
    new_run.wait_for_end("FAILED")
    assert slurm.fact(new_run.job, "ExitCode") == "2:0"
    assert slurm.fact(new_run.job, "Restarts") == "0"
    assert [line.split()[-1] for line in new_run.events()][:1] == ["start"]
    assert "exit code 2" in (new_run.dir / "launch" / "report.txt").read_text()
