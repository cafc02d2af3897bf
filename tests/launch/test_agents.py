"""What starts the ranks of a node, what it restarts, and what the crash ledger says in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_config import run_config

from megatron_patch.faults import ledger
from megatron_patch.launcher import preflight, rank

ROOT = Path(__file__).resolve().parents[2]
CRASH = "step 7; leave 1 1; exit 143"  # rank 0 was killed


def start_node(tmp_path: Path, agent: str) -> list[str]:
    """Run node.sh with a Python that writes its arguments down."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/called\n')
    python.chmod(0o755)
    (tmp_path / "attempt").mkdir()
    environment = {
        "PATH": os.environ["PATH"], "PYTHON": str(python), "DEVICE": "cpu", "RANK_AGENT": agent,
        "LOCAL_DIR": str(tmp_path), "ATTEMPT_DIR": str(tmp_path / "attempt"), "CONFIG": "c.yaml",
        "SLURM_JOB_ID": "1234", "SLURM_NODEID": "1", "SLURM_NNODES": "4", "RANKS_PER_NODE": "8",
        "MASTER_ADDR": "n1", "MASTER_PORT": "27340", "MAX_RESTARTS": "2",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", ROOT / "launch" / "node.sh", "train", "megatron_patch", "train"],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return (tmp_path / "called").read_text().split()


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


@pytest.mark.parametrize(("code", "text"), [(7, "max_rewinds are used up"), (8, "the same step")])
def test_what_a_retry_meets_again_is_not_retried(shims, code, text):
    found, output = shims.drive(f"step 7; leave 0 {code}; leave 1 {code}; exit {code}")
    assert found == code and shims.requeues() == 0 and text in output


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
    assert rank._settled(tmp_path / "exit") is None
    (tmp_path / "exit").mkdir()
    (tmp_path / "exit" / "00000").write_text("6 100.0 hang at step 7\n")
    assert rank._settled(tmp_path / "exit") is None
    (tmp_path / "exit" / "00001").write_text("2 100.0 data.blend: missing\n")
    assert rank._settled(tmp_path / "exit") == (2, "data.blend: missing")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert rank._settled(tmp_path / "exit") is None


def test_shell_and_python_agree_on_what_is_fatal():
    text = (ROOT / "launch" / "lib.sh").read_text()
    codes = {int(word.split("=")[1]) for word in text.split() if word.startswith("EXIT_")
             and "=" in word}  # fmt: skip
    assert codes == set(rank.FATAL)


def test_preflight_refuses_nvrx_that_is_not_installed():
    run = run_config(cluster={"agent": "nvrx"})
    nodes = [{"node": "n1", "versions": {"nvidia-resiliency-ext": "0.4.1"}},
             {"node": "n2", "versions": {"nvidia-resiliency-ext": None}}]  # fmt: skip
    good, bad = preflight._check_agent(run, nodes)
    assert good.passed and not bad.passed and bad.node == "n2"
    assert "pip install nvidia-resiliency-ext" in bad.text
    assert list(preflight._check_agent(run_config(), nodes)) == []


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
