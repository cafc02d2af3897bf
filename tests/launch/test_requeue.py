"""What can keep a run from its next job: late ranks, a silent controller, chains, preflights."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

CRASH = "step 7; leave 1 1; exit 143"  # rank 0 was killed
STOPPED = "step 9; leave 0 0; leave 1 0"
LATE = """\
trap 'touch "$SHIM/told"' USR1
step 5; touch "$SHIM/ready"
for _ in {1..90}; do sleep 1 >/dev/null 2>&1; done"""
SAVES_LATE = """\
save() {
  trap "" USR1; touch "$SHIM/told"; sleep 5
  step 9; leave 0 0; leave 1 0; touch "$SHIM/saved"; exit 0
}
trap save USR1
step 5; touch "$SHIM/ready"
for _ in {1..90}; do sleep 1 >/dev/null 2>&1; done"""
CHAIN = {"SLURM_ARRAY_JOB_ID": "1230", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "4"}
PREFLIGHT = "  preflight: {enabled: true}\n"
RANKS = 512
REASON = (
    "hang at step 5123, see /lustre/project/team/users/someone/runs/llama_70b/hangs/summary.txt"
)


def many(shims, code: int) -> None:
    """Three attempts of 64 nodes x 8 ranks that all end with ``code``."""
    script = shims.render()
    text = script.read_text()
    assert text.count("RANKS_PER_NODE=1\n") == 1
    script.write_text(text.replace("RANKS_PER_NODE=1\n", "RANKS_PER_NODE=8\n"))
    shims.render = lambda _: script
    folder = shims.folder / "exits"
    folder.mkdir()
    for rank in range(RANKS):
        (folder / f"{rank:05d}").write_text(f"{code} 1763800000.{rank:03d} {REASON * 2}\n")
    for n in range(3):
        (shims.shim / f"scenario.{n}").write_text(
            f'step 512{n}; cp {folder}/* "$ATTEMPT_DIR/exit/"; exit 1'
        )


def test_reports_of_many_ranks_do_not_end_the_job(shims):
    """What 512 ranks say is more than a pipe holds."""
    many(shims, 6)
    code, output = shims.drive(SLURM_NNODES="64")
    assert code == 0 and shims.requeues() == 1 and len(shims.calls("srun")) == 3, output[-2000:]
    assert output.count("1763800000.007 00007 6 hang at step") == 3
    assert "00008 6 hang" not in output


def test_the_end_of_many_ranks_is_reported(shims):
    many(shims, 3)
    code, output = shims.drive(SLURM_NNODES="64")
    assert code == 3 and shims.requeues() == 0, output[-2000:]
    report = (shims.run / "launch" / "report.txt").read_text()
    assert "1763800000.000 00000 3 " in report and "continues from the newest" in report


def test_a_report_that_cannot_be_made_does_not_end_the_job(shims):
    """As on a full disk: the crash ledger is no file here."""
    (shims.run / "crashes.jsonl").mkdir()
    code, output = shims.drive(CRASH, "finish")
    assert code == 0 and "warning: could not write into the crash ledger" in output


GONE = 'rm -f "$RUN/launch/events.log"; ln -s nowhere/x "$RUN/launch/events.log"; '


@pytest.mark.parametrize(
    ("step", "code"),
    [("finish", 0), ("leave 0 3; leave 1 3; exit 1", 3), (STOPPED, 1), (CRASH, 1)],
)
def test_events_that_cannot_be_written_end_only_what_they_limit(shims, step, code):
    """As on a full disk: finished is finished, but nothing goes on that no budget counts."""
    found, output = shims.drive(GONE + step, cluster="  max_restarts: 0\n")
    assert found == code and shims.requeues() == 0, output
    assert "warning: " in output and "is missing in it" in output
    assert ("which limits how often the job goes on" in output) == (code == 1)
    assert not (shims.run / "launch" / "lock").exists()


SAVES = """\
trap 'step 9; leave 0 0; leave 1 0; exit 0' USR1
step 5; kill -USR1 "$PPID"
for _ in {1..90}; do sleep 1 >/dev/null 2>&1; done"""


@pytest.mark.parametrize(("step", "goes_on"), [(SAVES, True), ("finish", False)])
def test_a_log_on_a_full_disk_ends_nothing(shims, step, goes_on):
    """Least of all the job that asks its ranks to save."""
    script = shims.render()
    (shims.shim / "scenario.0").write_text(step)
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            ["bash", script], env=shims.environment, cwd=shims.folder, stdout=full, stderr=full
        )
    assert process.wait(300) == 0 and shims.requeues() == goes_on


def late(shims, step: str, state: str, first: signal.Signals, cluster: str = "") -> tuple[str, int]:
    """USR1 or TERM, then TERM with Slurm's state of the job; output and exit code."""
    script = shims.render(cluster)
    (part,) = shims.folder.rglob("lib.sh")
    text = part.read_text()
    assert text.count("TERM_SECONDS=10\n") == 1  # less than SAVES_LATE sleeps
    part.write_text(text.replace("TERM_SECONDS=10\n", "TERM_SECONDS=3\n"))
    shims.render = lambda _: script
    process = shims.start(step, cluster=cluster)
    shims.signal_when(process, "ready", first)
    end = time.monotonic() + 300
    while not (shims.shim / "told").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    (shims.shim / "state").write_text(state)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    return output, process.returncode


def test_ranks_that_outlast_the_lead_are_killed_for_the_requeue(shims):
    """Slurm kills the batch shell 30 s after TERM; it would end as TIMEOUT."""
    output, code = late(shims, LATE, "COMPLETING Reason=TimeLimit", signal.SIGUSR1)
    assert code == 0 and shims.requeues() == 1, output
    assert "after TERM and are killed" in output and "stop_lead_seconds must cover" in output
    assert (shims.run / "launch" / "events.log").read_text().splitlines()[-1].endswith(
        "requeue=stop")  # fmt: skip


@pytest.mark.parametrize(
    ("state", "first"),
    [("CANCELLED", signal.SIGUSR1), ("COMPLETING", signal.SIGTERM), ("RUNNING", signal.SIGTERM)],
)
def test_only_the_time_limit_hurries_the_ranks(shims, state, first):
    """A cancelled job's ranks have all of KillWait to save, and it stays away."""
    output, code = late(shims, SAVES_LATE, state, first)
    assert (shims.shim / "saved").exists() and "and are killed" not in output
    requeued = state == "RUNNING"  # somebody asked it to stop with TERM
    assert shims.requeues() == requeued and code == (not requeued), output


@pytest.fixture
def no_sleep(shims):
    """Pauses take no time."""
    (shims.bin / "sleep").write_text("#!/bin/sh\n")
    (shims.bin / "sleep").chmod(0o755)


def controller(shims, requeue: str) -> None:
    """A scontrol whose n-th requeue (from 1) does ``requeue``."""
    path = shims.bin / "scontrol"
    text = path.read_text()
    old = 'requeue) exit "$(cat "$SHIM/requeue")";;'
    assert old in text
    count = '"$(grep -lx requeue "$SHIM"/scontrol.* | wc -l)"'
    path.write_text(text.replace(old, f"requeue) n={count}; {requeue};;"))


def test_a_requeue_is_asked_for_until_the_controller_answers(shims, no_sleep):
    controller(shims, "((n > 3)) || { echo unable to contact slurm controller >&2; exit 1; }")
    code, output = shims.drive(STOPPED)
    assert code == 0 and shims.requeues() == 4, output
    assert "scontrol requeue failed (try 3 of 60, one every 5 s): unable to contact" in output
    events = (shims.run / "launch" / "events.log").read_text()
    assert events.count("requeue=stop") == 1 and "requeue-failed" not in events


def test_what_slurm_forbids_is_not_asked_for_again(shims, no_sleep):
    controller(shims, "echo Requested operation is presently disabled >&2; exit 1")
    code, output = shims.drive(STOPPED)
    assert code == 1 and shims.requeues() == 1 and "submit again with" in output


def test_a_job_that_is_cancelled_meanwhile_is_not_requeued(shims, no_sleep):
    """Slurm would bring it back."""
    controller(shims, 'echo CANCELLED >"$SHIM/state"; exit 1')
    code, output = shims.drive(STOPPED)
    assert code == 1 and shims.requeues() == 1 and "not asked again" in output


def test_a_chain_leaves_bad_nodes_to_no_later_task(shims):
    failing = 'echo n2 >"$ATTEMPT_DIR/bad_nodes"; exit 1'
    cluster = "  continuation: chain\n  exclude_nodes: n9\n" + PREFLIGHT
    code, output = shims.drive(":", failing, cluster=cluster, **CHAIN)
    assert code == 0 and shims.calls("scancel") == [], output
    updates = [call for call in shims.calls("scontrol") if call[0] == "update"]
    assert updates == [["update", f"JobId=1230_{n}", "ExcNodeList=n9,n2"] for n in (3, 4)]


@pytest.mark.parametrize(
    ("lines", "excluded"),
    [
        ("n2\n\n \nn1\n", "n9,n1,n2"),
        ("\tn2 \r\n", "n9,n2"),
        ("n2", "n9,n2"),
        ("n2 bad disk\nn1\n", "n9,n1"),
        ("", "n9"),
        (None, None),
    ],
)
def test_excluded_nodes_are_read_as_people_edit_them(shims, lines, excluded):
    """A name that is none would make Slurm refuse the list; a deleted line admits its node."""
    script = shims.render("  exclude_nodes: n9\n")
    file = shims.run / "launch" / "excluded_nodes"
    file.write_text("n1\nn5\n")
    shims.render("  exclude_nodes: n9\n")  # submitted while the file had them
    assert "--exclude=n9,n1,n5" in script.read_text()
    shims.render = lambda _: script
    file.unlink() if lines is None else file.write_bytes(lines.encode())
    code, output = shims.drive(STOPPED)
    assert code == 0, output
    updates = [call for call in shims.calls("scontrol") if call[0] == "update"]
    wanted = [] if excluded is None else [["update", "JobId=1234", f"ExcNodeList={excluded}"]]
    assert updates == wanted, output
    assert ("'n2 bad disk' names no node" in output) == (lines == "n2 bad disk\nn1\n")


def test_a_bad_node_is_no_part_of_a_last_line_without_an_end(shims):
    (shims.run / "launch").mkdir()
    (shims.run / "launch" / "excluded_nodes").write_text("n7")
    failing = 'echo n2 >"$ATTEMPT_DIR/bad_nodes"; exit 1'
    assert shims.drive(":", failing, cluster=PREFLIGHT)[0] == 0
    assert ["update", "JobId=1234", "ExcNodeList=n2,n7"] in shims.calls("scontrol")


def test_the_last_task_of_a_chain_excludes_nothing(shims):
    failing = 'echo n2 >"$ATTEMPT_DIR/bad_nodes"; exit 1'
    cluster = "  continuation: chain\n" + PREFLIGHT
    code, output = shims.drive(
        ":", failing, cluster=cluster, **CHAIN | {"SLURM_ARRAY_TASK_ID": "4"}
    )
    assert code == 1 and "no task of the chain is left to exclude" in output
    assert not [call for call in shims.calls("scontrol") if call[0] == "update"]


@pytest.mark.parametrize("step", [STOPPED, CRASH])
@pytest.mark.parametrize(("task", "left"), [("3", True), ("4", False)])
def test_the_last_task_of_a_chain_does_not_promise_another(shims, step, task, left):
    """And does not end well when the run is not finished."""
    cluster = "  continuation: chain\n  max_restarts: 0\n"
    code, output = shims.drive(step, cluster=cluster, **CHAIN | {"SLURM_ARRAY_TASK_ID": task})
    assert ("the next task of the array goes on" in output) == left and code == (not left), output
    assert ("no task of the chain is left: 'megatron-patch launch'" in output) != left
    assert not (shims.run / "launch" / "lock").exists()


@pytest.mark.parametrize("where", ["training", "preflight"])
def test_a_chain_has_a_budget_of_crashes(shims, where):
    """And what is left of the chain is cancelled."""
    cluster = "  continuation: chain\n  max_restarts: 0\n  max_crash_requeues: 2\n"
    steps = (CRASH,)
    if where == "preflight":
        cluster += PREFLIGHT
        steps = (":", 'echo n2 >"$ATTEMPT_DIR/bad_nodes"; exit 1')
    (shims.run / "launch").mkdir()
    line = "2026-01-01T00:00:00Z job=1230 restart=0 attempt=1 step={} chain=crash\n"
    ledger = shims.run / "launch" / "events.log"
    ledger.write_text(line.format(1))
    assert shims.drive(*steps, cluster=cluster, **CHAIN)[0] == 0 and not shims.calls("scancel")
    for path in shims.shim.glob("srun.*"):
        path.unlink()
    code, output = shims.drive(*steps, cluster=cluster, **CHAIN)
    assert code == 1 and "retry budget used up (2 requeues" in output
    assert shims.calls("scancel") == [["1230_3", "1230_4"]]


def ports(shims) -> list[str]:
    """``MASTER_PORT`` of every srun."""
    found = []
    for n in range(len(shims.calls("srun"))):
        lines = (shims.shim / f"env.srun.{n}").read_text().splitlines()
        found += [x.partition("=")[2] for x in lines if x.startswith("MASTER_PORT=")]
    return found


def test_a_preflight_that_fails_on_no_node_is_repeated(shims):
    code, output = shims.drive(":", "exit 1", ":", ":", "finish", cluster=PREFLIGHT)
    assert code == 0 and shims.requeues() == 0, output
    assert ports(shims) == ["27340", "27340", "27341", "27341", "27342"]
    assert "once more, on another port" in output


def test_a_preflight_that_fails_on_no_node_twice_is_a_crash(shims):
    steps = (":", "exit 1", ":", "exit 1")
    cluster = PREFLIGHT + "  max_crash_requeues: 1\n"
    code, output = shims.drive(*steps, cluster=cluster)
    assert code == 0 and shims.requeues() == 1 and len(shims.calls("srun")) == 4, output
    assert "requeue=crash" in (shims.run / "launch" / "events.log").read_text()
    for path in shims.shim.glob("srun.*"):
        path.unlink()
    code, output = shims.drive(*steps, cluster=cluster)
    assert code == 1 and shims.requeues() == 1, output
    assert "(1 requeues after crashes); the preflight failed twice on no node" in output


def test_what_no_node_meets_stops_for_good_at_once(shims):
    failing = 'touch "$ATTEMPT_DIR/every_node_failed"; exit 1'
    code, output = shims.drive(":", failing, cluster=PREFLIGHT)
    assert code == 1 and shims.requeues() == 0 and len(shims.calls("srun")) == 2
    assert "stopped for good: every node failed the preflight" in output


def test_slow_nodes_may_report(shims):
    """Importing a container takes longer on one node than on another; ranks end together."""
    assert shims.drive(":", ":", "finish", cluster=PREFLIGHT)[0] == 0
    waits = [[a for a in call if a.startswith("--wait=")] for call in shims.calls("srun")]
    assert waits == [["--wait=900"], ["--wait=60"], ["--wait=60"]]


@pytest.mark.parametrize("text", ["X=$NOBODY_SET_THIS", "set +eu", "shopt -s nullglob; true"])
def test_a_setup_script_may_be_one_of_modules_or_conda(shims, text):
    """They read variables that are not set, and leave options behind."""
    (shims.folder / "setup.sh").write_text(f"{text}\nexport PATH=$PATH:/from/setup\n")
    cluster = "  setup_script: setup.sh\n"
    code, output = shims.drive("finish", cluster=cluster)
    assert code == 0, output
    assert ":/from/setup\n" in (shims.shim / "env.srun.0").read_text()


@pytest.mark.parametrize(
    ("text", "found"),
    [("true\n[[ -d /nowhere ]] && X=1", "exit code 1"), ("no-such-command", "exit code 127"),
     ("exit 0", "exit code 0"), (None, "exit code 1")],
)  # fmt: skip
def test_a_setup_script_that_fails_is_named(shims, text, found):
    """And is never the good end of a job."""
    if text is not None:
        (shims.folder / "setup.sh").write_text(text + "\n")
    code, output = shims.drive("finish", cluster="  setup_script: setup.sh\n")
    assert code not in (0, 2) and not shims.calls("srun"), output
    assert f"cluster.setup_script {shims.folder}/setup.sh ended this job ({found}, at:" in output
