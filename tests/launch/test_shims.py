"""The shipped batch script driven through shims of Slurm's commands: every end a job can have."""

import json
import re
import signal

import pytest

CRASH = "step 7; leave 1 1; leave 0 143; exit 143"
STOPPED = "step 9; leave 0 0; leave 1 0"
WAITING = """\
trap 'kill $! 2>/dev/null; step 9; leave 0 0; leave 1 0; exit 0' USR1
step 5; touch "$SHIM/ready"; sleep 300 >/dev/null 2>&1 & wait $!"""


def test_success(shims):
    code, output = shims.drive("finish")
    assert code == 0 and shims.requeues() == 0, output
    (call,) = shims.calls("srun")
    assert "--ntasks-per-node=1" in call and "--kill-on-bad-exit=1" in call
    assert not [a for a in call if "container" in a]
    launch = shims.run / "launch"
    assert call[call.index("bash") :] == [
        "bash", f"{launch}/node.sh", "train", "megatron_patch", "train", "--config",
        f"{launch}/config.yaml",
    ]  # fmt: skip
    assert not (shims.run / "launch" / "lock").exists()


def test_finished_before(shims):
    (shims.run / "FINISHED").write_text('{"step": 100}')
    code, _ = shims.drive()
    assert code == 0 and shims.calls("srun") == [] and shims.requeues() == 0


@pytest.mark.parametrize("text", ['{"step": 50}', "", "done", '{"step": "100"}'])
def test_marker_of_a_shorter_run_does_not_count(shims, text):
    """Nor does one that says no step: the trainer says what it is."""
    (shims.run / "FINISHED").write_text(text)
    code, _ = shims.drive("finish")
    assert code == 0 and len(shims.calls("srun")) == 1


FIRST = "(they left no exit code; look here first): 1\n"
# (what the srun calls do, cluster section, exit code, requeues, what is said)
ENDS = {
    # A graceful stop looks like success to Slurm; only the marker tells.
    "exit code 0 without the marker": ([STOPPED], "", 0, 1, ""),
    "a bad exit code with the marker": (["finish; exit 143"], "", 0, 0, ""),
    "a crash, then success; the first rank that failed is named":
        ([CRASH, "finish"], "", 0, 0, "reason of rank 1"),
    "a crash before any rank spoke": (["exit 1", "finish"], "", 0, 0, "No rank left an exit code"),
    "a killed rank is named before those it took along":
        (["step 7; leave 0 1; exit 1", "finish"], "", 0, 0, FIRST),
    "where TERM reached all nobody is told apart":
        (["step 7; asked 0; asked 1; exit 1", "finish"], "", 0, 0, "No rank left an exit code"),
    "crashes at different steps are no pattern":
        ([CRASH, CRASH.replace("7", "8")] * 2 + ["finish"], "  max_restarts: 9\n", 0, 0, ""),
    # A program that ends with 0 at once would be requeued for ever.
    "a stop without a step": (["leave 0 0; leave 1 0"] * 3, "", 1, 0,
        "3 crashes in a row at step -1"),
    "continuation none": ([STOPPED], "  continuation: none\n", 1, 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_how_a_job_ends(shims, name):
    steps, cluster, expected, requeues, words = ENDS[name]
    code, output = shims.drive(*steps, cluster=cluster)
    assert (code, shims.requeues()) == (expected, requeues) and words in output, output


def test_crash_restarts_on_a_fresh_port_then_requeues(shims):
    code, output = shims.drive(*[CRASH.replace("7", n) for n in "345"])
    assert code == 0 and shims.requeues() == 1, output
    assert len(shims.calls("srun")) == 3
    ports = [
        re.search(r"^MASTER_PORT=(\d+)$", (shims.shim / f"env.srun.{n}").read_text(), re.M)[1]
        for n in range(3)
    ]
    assert ports == ["27340", "27341", "27342"]


def test_killed_rank_is_told_from_one_that_waited_for_it(shims):
    """With NCCL the others wait inside a collective until torchrun kills them, too."""
    code, output = shims.drive("step 7; asked 0; exit 1", "finish")
    assert code == 0 and FIRST in output
    assert "Ranks that waited for others until they were ended: 0\n" in output
    ledger = (shims.run / "crashes.jsonl").read_text().splitlines()
    assert [json.loads(line)["rank"] for line in ledger] == [1]


@pytest.mark.parametrize("code", [2, 3, 4, 7, 8])
def test_hopeless_ends_are_never_retried(shims, code):
    got, output = shims.drive(f"leave 0 143; leave 1 {code}; exit 143")
    assert got == code and shims.requeues() == 0 and len(shims.calls("srun")) == 1, output
    assert f"exit code {code}" in (shims.run / "launch" / "report.txt").read_text()


def test_same_step_three_times(shims):
    """Counted over requeues too."""
    events = "".join(
        f"2026-01-01T00:00:00Z job=1234 restart=0 attempt={n} step=7 {what}\n"
        for n in (1, 2)
        for what in ("start", "crash")
    )
    (shims.run / "launch").mkdir()
    (shims.run / "launch" / "events.log").write_text(events)
    code, output = shims.drive(CRASH, SLURM_RESTART_COUNT="1")
    assert code == 1 and shims.requeues() == 0
    assert "3 crashes in a row at step 7" in output


@pytest.mark.parametrize(
    ("done", "step", "cluster"),
    [("requeue=crash", CRASH, "  max_restarts: 0\n  max_crash_requeues: 2\n"),
     ("requeue=stop", STOPPED, "  max_requeues: 2\n")],
)  # fmt: skip
def test_retry_budget(shims, done, step, cluster):
    """Two requeues are in the ledger; those of another job do not count."""
    (shims.run / "launch").mkdir()
    line = "2026-01-01T00:00:00Z job={} restart=0 attempt=1 step=1 {}\n"
    ledger = shims.run / "launch" / "events.log"
    ledger.write_text(line.format(999, done) * 5 + line.format(1234, done))
    assert shims.drive(step, cluster=cluster)[0] == 0 and shims.requeues() == 1
    (shims.shim / "srun.0").unlink()
    code, output = shims.drive(step, cluster=cluster)
    assert code == 1 and shims.requeues() == 1
    assert "retry budget used up (2 requeues" in output


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_is_passed_on_and_the_job_requeued(shims, number):
    process = shims.start(WAITING)
    shims.signal_when(process, "ready", number)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and shims.requeues() == 1, output
    assert "asking the ranks to save and stop" in output


def test_signal_during_a_crash_is_no_crash(shims):
    """What dies after the signal, dies of the end of the job: no restart, no budget."""
    process = shims.start(WAITING.replace("leave 1 0; exit 0", "exit 137"))
    shims.signal_when(process, "ready", signal.SIGUSR1)
    process.communicate(timeout=600)
    assert shims.requeues() == 1 and len(shims.calls("srun")) == 1
    assert "requeue=stop" in (shims.run / "launch" / "events.log").read_text()


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING"])
def test_a_job_that_slurm_ends_itself_is_not_requeued(shims, state):
    (shims.shim / "state").write_text(state)
    code, output = shims.drive(STOPPED)
    assert code == 1 and shims.requeues() == 0, output


def test_time_limit_while_saving_is_requeued(shims):
    (shims.shim / "state").write_text("COMPLETING Reason=TimeLimit")
    assert shims.drive(STOPPED)[0] == 0 and shims.requeues() == 1


def test_refused_requeue_is_an_error(shims):
    (shims.shim / "requeue").write_text("1")
    (shims.bin / "sleep").write_text("#!/bin/sh\n")  # five minutes of asking again
    (shims.bin / "sleep").chmod(0o755)
    code, output = shims.drive(STOPPED)
    assert code == 1 and "scontrol requeue failed; submit again" in output
    assert shims.requeues() == 60


def test_chain_goes_on_in_the_next_task(shims):
    array = {"SLURM_ARRAY_JOB_ID": "1230", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "4"}
    chain = "  continuation: chain\n"
    assert shims.drive(STOPPED, "finish", cluster=chain, **array)[0] == 0
    assert shims.requeues() == 0 and shims.calls("scancel") == []
    assert shims.drive(cluster=chain, **array)[0] == 0
    assert shims.calls("scancel") == [["1230_3", "1230_4"]]


def test_container_arguments(shims):
    cluster = "  container: {image: /img/x.sqsh, mounts: ['/data:/data:ro']}\n"
    assert shims.drive("finish", cluster=cluster)[0] == 0
    (call,) = shims.calls("srun")
    assert "--container-image=/img/x.sqsh" in call and "--no-container-mount-home" in call
    (mounts,) = (a for a in call if a.startswith("--container-mounts="))
    assert mounts.endswith(",/data:/data:ro") and f"{shims.run}:{shims.run}" in mounts
    assert any(a.startswith("--container-env=NCCL_NVLS_ENABLE,") for a in call)


def test_bad_node_is_excluded_on_requeue(shims):
    failing = 'echo n2 >"$ATTEMPT_DIR/bad_nodes"; exit 1'
    code, output = shims.drive(":", failing, cluster="  preflight: {enabled: true}\n")
    assert code == 0 and shims.requeues() == 1, output
    assert ["update", "JobId=1234", "ExcNodeList=n2"] in shims.calls("scontrol")
    first, second = shims.calls("srun")
    assert first[-1] == "preflight"
    assert second[-5:] == ["compare", "--expect", "n1", "--expect", "n2"]


def test_preflight_then_training(shims):
    assert shims.drive(":", ":", "finish", cluster="  preflight: {enabled: true}\n")[0] == 0
    assert len(shims.calls("srun")) == 3
