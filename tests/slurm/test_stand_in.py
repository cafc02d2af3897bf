"""The shipped batch script on a real Slurm: 2 nodes x 2 ranks of a stand-in training program.

What only a real Slurm shows: which rank lands on which node, what signals reach whom when a job is
stopped, preempted or cancelled, and what requeueing does.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from one_machine import PATIENCE
from slurm_run import Run

pytestmark = pytest.mark.slurm
STEPS = 60


@pytest.fixture(scope="module")
def unbroken(slurm, tmp_path_factory):
    """A run that nothing happens to."""
    run = Run(slurm, tmp_path_factory.mktemp("unbroken"), "unbroken")
    run.stand_in(steps=STEPS)
    run.wait_for_end()
    return run


def signal_batch_shell(run: Run) -> None:
    """USR1 to the batch script's own process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text()
            if "slurm_script" in line and os.readlink(folder / "cwd") == str(run.work):
                os.kill(int(folder.name), signal.SIGUSR1)
        except OSError:
            continue


def test_ranks_follow_nodes_and_logs_have_their_places(unbroken):
    logs = sorted((unbroken.dir / "logs").glob("*/rank_*.log"))
    assert [p.name for p in logs] == [f"rank_{n:05d}.log" for n in range(4)]
    pattern = r"rank (\d) of 4 local (\d) on (pn\d) at (pn\d):(\d+)"
    found = [re.search(pattern, p.read_text()) for p in logs]
    nodes = [m.groups()[:3] for m in found]
    first, second = nodes[0][2], nodes[2][2]
    assert first < second
    assert nodes == [("0", "0", first), ("1", "1", first), ("2", "0", second), ("3", "1", second)]
    assert {m[4] for m in found} == {first}
    assert {int(m[5]) for m in found} == {15000 + int(unbroken.job) % 1500 * 10}
    # The job's log shows rank 0, once, and no other rank.
    assert unbroken.log().count("rank 0 of 4") == 1 and "rank 1 of 4" not in unbroken.log()
    assert unbroken.events() == [
        "restart=0 attempt=1 step=-1 start", f"restart=0 attempt=1 step={STEPS} finished",
    ]  # fmt: skip
    assert not (unbroken.dir / "launch" / "lock").exists()
    assert unbroken.leftovers() == []


def test_stop_signal_saves_requeues_and_resumes_bitwise(new_run, unbroken, slurm):
    """USR1 to the batch shell, as before a time limit; a node is drained and one is excluded."""
    new_run.stand_in(steps=STEPS, fault="hold:15")
    new_run.wait_for_step(15)
    (new_run.dir / "launch" / "excluded_nodes").write_text("pn1\n")
    slurm.run("scancel", "--signal=USR1", "--batch", new_run.job)
    new_run.wait_for_end()
    assert slurm.fact(new_run.job, "Restarts") == "1"
    assert slurm.fact(new_run.job, "ExcNodeList") == "pn1"
    assert slurm.fact(new_run.job, "NodeList") == "pn[2-3]"
    stop = next(line for line in new_run.events() if line.endswith(" stopped"))
    assert "step=15 " in stop
    assert "from step 15" in new_run.log()  # nothing was lost, nothing repeated
    rows = (new_run.dir / "losses").read_text().splitlines()
    assert [int(row.split()[0]) for row in rows] == list(range(1, STEPS + 1))
    assert new_run.losses() == unbroken.losses()
    # One file for the whole job, appended to.
    assert len(list((new_run.dir / "logs").glob("slurm-*.log"))) == 1
    assert [p.name.partition(".")[2] for p in new_run.attempts()] == ["0.1", "1.1"]


def test_preempted_by_a_higher_partition(new_run, unbroken, slurm):
    """The steps get TERM and the batch shell hears nothing; the run comes back by itself."""
    new_run.stand_in(steps=STEPS, fault="hold:15")
    new_run.wait_for_step(15)
    urgent = slurm.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive",
        f"--output={new_run.work}/urgent.log", "--wrap=true",
    ).stdout.strip()  # fmt: skip
    slurm.wait_for_state(urgent, "COMPLETED")
    new_run.wait_for_end()
    events = "\n".join(new_run.events())
    assert "stopped" in events and "requeue=stop" in events and "crash" not in events
    assert new_run.losses() == unbroken.losses()


def test_killed_rank_restarts_inside_the_allocation(new_run, unbroken, slurm):
    new_run.stand_in(steps=STEPS, fault="hold:15")
    new_run.wait_for_step(15)
    os.kill(new_run.rank_pid(3), signal.SIGKILL)
    new_run.go()
    new_run.wait_for_end()
    assert slurm.fact(new_run.job, "Restarts") == "0"
    assert [line.split()[-1] for line in new_run.events()] == [
        "start",
        "crash",
        "start",
        "finished",
    ]
    ports = re.findall(r"rendezvous pn\d:(\d+)", new_run.log())
    assert len(set(ports)) == 2
    assert "from step 10" in new_run.log()  # the last checkpoint
    assert new_run.losses() == unbroken.losses()
    assert new_run.leftovers() == []


def test_cancelled_job_saves_and_stays_away(new_run, slurm):
    new_run.stand_in(steps=STEPS, fault="hold:5")
    new_run.wait_for_step(5)
    slurm.run("scancel", new_run.job)
    new_run.wait_for_end("CANCELLED")
    slurm.wait_for(lambda: new_run.leftovers() == [], PATIENCE, "the job's processes to end")
    assert slurm.state(new_run.job) == "CANCELLED"
    assert slurm.fact(new_run.job, "Restarts") == "0"
    assert "so it is not requeued" in new_run.log()
    assert (new_run.dir / "checkpoint.json").exists()


def test_second_job_on_a_run_does_not_start(new_run, slurm):
    first = new_run.stand_in(steps=STEPS, fault="hold:1")
    new_run.wait_for_step(1)
    second = slurm.run("sbatch", "--parsable", str(new_run.dir / "launch" / "job.sbatch"))
    slurm.wait_for_state(second.stdout.strip(), "FAILED")
    assert f"job {first} (RUNNING) has this run directory" in new_run.log()
    slurm.run("scancel", first)


def test_chain_of_array_tasks(new_run, unbroken, slurm):
    """Where requeueing is forbidden: the next task of the array goes on, the rest is cancelled."""
    sets = ("cluster.continuation=chain", "cluster.chain_length=4")
    new_run.stand_in(steps=STEPS, sets=sets, fault="hold:15")
    new_run.wait_for_step(15)
    signal_batch_shell(new_run)  # scancel --batch hangs on array tasks (22.05)
    slurm.wait_for(lambda: (new_run.dir / "FINISHED").exists(), PATIENCE, "the second task")
    slurm.wait_for(lambda: not slurm.run("squeue", "--noheader").stdout, PATIENCE, "an empty queue")
    assert new_run.losses() == unbroken.losses()
    assert [line.split()[-1] for line in new_run.events()] == [
        "start", "stopped", "chain=stop", "start", "finished",
    ]  # fmt: skip


def test_drained_node_is_left(new_run, unbroken, slurm):
    new_run.stand_in(steps=STEPS, fault="hold:15")
    new_run.wait_for_step(15)
    node = slurm.fact(new_run.job, "BatchHost")
    slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    try:
        slurm.run("scancel", "--signal=USR1", "--batch", new_run.job)
        new_run.wait_for_end()
        assert (
            node
            not in slurm.run(
                "scontrol", "show", "hostnames", slurm.fact(new_run.job, "NodeList")
            ).stdout.split()
        )
    finally:
        slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert new_run.losses() == unbroken.losses()


def test_impossible_shapes_are_refused_before_submitting(new_run, slurm):
    sets = ("cluster.cpus_per_node=99",)
    with pytest.raises(Exception, match="non-zero exit status"):
        new_run.stand_in(steps=STEPS, sets=sets)
