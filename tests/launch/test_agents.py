"""What starts the ranks of a node, what it restarts, and what the crash ledger says in the end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_config import run_config

from megatron_patch.faults import ledger
from megatron_patch.launcher import rank, verdict

ROOT = Path(__file__).resolve().parents[2]
CRASH = "step 7; leave 1 1; exit 143"  # rank 0 was killed


def run_node(
    tmp_path: Path, agent: str, local: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run node.sh with a Python that writes its arguments down."""
    python = tmp_path / "python"
    own = tmp_path / f"megatron-patch-{os.getuid()}/job-1234"
    python.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/called\n'
        f"flock -n {own} true || >{tmp_path}/held\n"
    )
    python.chmod(0o755)
    (tmp_path / "attempt").mkdir()
    environment = {
        "PATH": os.environ["PATH"], "PYTHON": str(python), "DEVICE": "cpu", "RANK_AGENT": agent,
        "LOCAL_DIR": str(local or tmp_path), "ATTEMPT_DIR": str(tmp_path / "attempt"),
        "CONFIG": "c.yaml",
        "SLURM_JOB_ID": "1234", "SLURM_NODEID": "1", "SLURM_NNODES": "4", "RANKS_PER_NODE": "8",
        "MASTER_ADDR": "n1", "MASTER_PORT": "27340", "MAX_RESTARTS": "2",
    }  # fmt: skip
    return subprocess.run(
        ["bash", ROOT / "launch" / "node.sh", "train", "megatron_patch", "train"],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def start_node(tmp_path: Path, agent: str) -> list[str]:
    """The arguments that its Python got."""
    done = run_node(tmp_path, agent)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "called").read_text().split()


def test_a_local_directory_is_not_made(tmp_path):
    done = run_node(tmp_path, "torchrun", tmp_path / "unmounted")
    assert done.returncode == 1 and not (tmp_path / "unmounted").exists()
    (line,) = done.stderr.splitlines()
    assert f"cluster.local_dir {tmp_path / 'unmounted'} is missing or not writable" in line


def test_caches_of_last_week_go_but_not_those_of_a_job_that_trains(tmp_path):
    base = tmp_path / f"megatron-patch-{os.getuid()}"
    last_week = time.time() - 9 * 24 * 3600
    for name in ("job-7", "job-8"):
        (base / name / "triton").mkdir(parents=True)
        os.utime(base / name, (last_week, last_week))
    held = os.open(base / "job-8", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        done = run_node(tmp_path, "torchrun")
    finally:
        os.close(held)
    assert done.returncode == 0, done.stderr
    assert sorted(x.name for x in base.iterdir()) == ["job-1234", "job-8"]
    # What the ranks' agent saw of its own: nobody else may remove it.
    assert (tmp_path / "held").exists()


def test_torchrun_never_restarts(tmp_path):
    called = start_node(tmp_path, "torchrun")
    assert called[:2] == ["-m", "torch.distributed.run"]
    assert {"--max-restarts=0", "--rdzv-backend=static", "--node-rank=1"} <= set(called)
    assert called[-4:] == ["-m", "megatron_patch.launcher.rank", "megatron_patch", "train"]


def test_nvrx_restarts_ranks_itself(tmp_path):
    called = start_node(tmp_path, "nvrx")
    assert called[:2] == ["-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    assert {"--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:27340", "--nnodes=4",
            "--nproc-per-node=8", "--ft-workload-check-interval=5"} <= set(called)  # fmt: skip
    assert called[-4:] == ["-m", "megatron_patch.launcher.rank", "megatron_patch", "train"]


def test_with_nvrx_a_step_that_ends_has_used_its_restarts_up(shims):
    code, output = shims.drive(CRASH, cluster="  agent: nvrx\n")
    assert code == 0 and shims.requeues() == 1 and len(shims.calls("srun")) == 1, output
    text = (shims.shim / "env.srun.0").read_text()
    assert "RANK_AGENT=nvrx\n" in text and "MEGATRON_PATCH_SAME_STEP_LIMIT=3\n" in text


def test_a_hang_is_restarted(shims):
    code, output = shims.drive("step 7; leave 0 6; leave 1 6; exit 1", "finish")
    assert code == 0 and len(shims.calls("srun")) == 2, output


def test_killed_ranks_enter_the_ledger_and_the_report_shows_it(shims):
    code, output = shims.drive(CRASH, CRASH, CRASH)
    assert code == 1 and "3 crashes in a row at step 7" in output
    entries = ledger.read(shims.run)
    assert [(e["rank"], e["step"], e["exit_code"]) for e in entries] == [(0, 7, None)] * 3
    assert len({e["attempt"] for e in entries}) == 3
    report = (shims.run / "launch" / "report.txt").read_text()
    assert "Crash ledger (" in report and report.count("killed: it left no exit code") == 3
    assert '"traceback"' not in report


def test_a_fatal_end_is_not_started_again_by_an_agent(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert rank._ended_for_good(tmp_path / "exit") is None
    (tmp_path / "exit").mkdir()
    (tmp_path / "exit" / "00000").write_text("6 100.0 hang at step 7\n")
    assert rank._ended_for_good(tmp_path / "exit") is None
    (tmp_path / "exit" / "00001").write_text("2 100.0 data.blend: missing\n")
    assert rank._ended_for_good(tmp_path / "exit") == (2, "data.blend: missing")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert rank._ended_for_good(tmp_path / "exit") is None


def test_shell_and_python_agree_on_what_is_fatal():
    text = (ROOT / "launch" / "lib.sh").read_text()
    codes = {int(word.split("=")[1]) for word in text.split() if word.startswith("EXIT_")
             and "=" in word}  # fmt: skip
    assert codes == set(rank.FATAL)


def test_preflight_refuses_nvrx_that_is_not_installed():
    run = run_config(cluster={"agent": "nvrx"})
    nodes = [{"node": "n1", "versions": {"nvidia-resiliency-ext": "0.4.1"}},
             {"node": "n2", "versions": {"nvidia-resiliency-ext": None}}]  # fmt: skip
    good, bad = verdict._check_agent(run, nodes)
    assert good.passed and not bad.passed and bad.node == "n2"
    assert "pip install nvidia-resiliency-ext" in bad.text
    assert list(verdict._check_agent(run_config(), nodes)) == []


def test_the_ledger_line_of_the_shell_is_json(shims):
    shims.drive(CRASH, "finish")
    (line,) = (shims.run / "crashes.jsonl").read_text().splitlines()
    assert set(json.loads(line)) == {
        "utc", "job", "attempt", "step", "phase", "rank", "host", "exit_code", "error",
        "traceback"}  # fmt: skip


STUCK = """
import sys, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
sys.exit(2)
"""


def test_an_exit_code_does_not_wait_for_threads(tmp_path):
    """A reader that waits for a dead disk must not hold up what is known."""
    (tmp_path / "program.py").write_text(STUCK)
    environment = os.environ | {"RANK": "0", "MEGATRON_PATCH_ATTEMPT_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "megatron_patch.launcher.rank", str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environment, check=False, timeout=500)
    assert done.returncode == 2
    assert (tmp_path / "exit" / "00000").read_text().startswith("2 ")


LEAVES = """
import atexit, sys, time
from pathlib import Path

def slowly():
    Path(sys.argv[1]).touch()
    time.sleep(2)

atexit.register(slowly)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_that_comes_late_does_not_kill_a_rank_that_has_ended(tmp_path, number):
    """It reaches one node later than another, or is sent again, while an interpreter ends."""
    (tmp_path / "program.py").write_text(LEAVES)
    environment = os.environ | {"RANK": "0", "MEGATRON_PATCH_ATTEMPT_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "megatron_patch.launcher.rank", str(tmp_path / "program.py")]
    process = subprocess.Popen([*command, str(tmp_path / "leaving")], env=environment)
    try:
        wait_for((tmp_path / "leaving").exists)
        process.send_signal(number)
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert (tmp_path / "exit" / "00000").read_text().startswith("0 ")


WAITS = """
import ctypes, os, sys, time
from pathlib import Path
from megatron_patch.training.signals import StopFlags
StopFlags().install()
ready = Path(sys.argv[1])
if os.fork() == 0:
    ready.write_text(str(os.getpid()))  # what a fork does in the child is done
    time.sleep(60)
    os._exit(0)
while not ready.exists():
    time.sleep(0.01)
mutex = ctypes.create_string_buffer(128)
for _ in range(2):  # locked twice: never returns, and signals do not interrupt it
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@contextlib.contextmanager
def waiting_rank(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A rank that waits in C for ever, as in a collective of a dead peer, and its forked child."""
    (folder / "program.py").write_text(WAITS)
    environment = os.environ | {"RANK": "0", "MEGATRON_PATCH_ATTEMPT_DIR": str(folder)}
    command = [sys.executable, "-m", "megatron_patch.launcher.rank", str(folder / "program.py")]
    process = subprocess.Popen([*command, str(folder / "ready")], env=environment)
    child = 0
    try:
        wait_for(lambda: (folder / "ready").exists() and (folder / "ready").read_text())
        child = int((folder / "ready").read_text())
        yield process, child
    finally:
        for pid in filter(None, (child, process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_rank_that_cannot_answer_leaves_word_of_term(tmp_path):
    """torchrun sends TERM to the others when a rank dies: they are not the ones that died."""
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "00000").write_text("99\n")  # the rank before it, in the same attempt
    with waiting_rank(tmp_path) as (process, _):
        assert not (tmp_path / "asked" / "00000").exists()
        process.send_signal(signal.SIGTERM)
        wait_for((tmp_path / "asked" / "00000").exists)
        assert process.poll() is None and not (tmp_path / "exit").exists()


def test_term_of_a_forked_reader_is_not_the_ranks(tmp_path):
    with waiting_rank(tmp_path) as (process, child):
        os.kill(child, signal.SIGTERM)
        time.sleep(1.0)
        assert not (tmp_path / "asked").exists() and process.poll() is None


def test_a_rank_killed_in_the_middle_of_its_line_does_not_swallow_the_next(shims):
    (shims.run / "crashes.jsonl").write_text('{"step": 7, "attem')
    shims.drive(CRASH, "finish")
    (entry,) = ledger.read(shims.run)
    assert entry["rank"] == 0 and entry["error"] == "killed: it left no exit code"
