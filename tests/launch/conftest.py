"""Slurm's commands as shims first on PATH: the shipped script runs without Slurm in an instant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from launch_cases import MODEL

# Every shim notes its arguments, one a line, a call a file. srun then runs the n-th snippet of the
# scenario, in which `leave RANK CODE`, `step N` and `finish` write what ranks would.
NOTE = """\
#!/usr/bin/env bash
n=$(find "$SHIM" -maxdepth 1 -name '{name}.*' | wc -l)
printf '%s\\n' "$@" >"$SHIM/{name}.$n"
env >"$SHIM/env.{name}.$n"
"""
SRUN = """\
leave() { echo "$2 100.$1 reason of rank $1" >"$ATTEMPT_DIR/exit/0000$1"; }
asked() { mkdir -p "$ATTEMPT_DIR/asked"; echo 99 >"$ATTEMPT_DIR/asked/0000$1"; }
step() { echo "$1" >"$ATTEMPT_DIR/step"; }
finish() { step 100; leave 0 0; leave 1 0; echo '{"step": 100}' >"$RUN/FINISHED"; }
source "$SHIM/scenario.$n"
"""
SHIMS = {
    "srun": SRUN,
    "scontrol": 'case $1 in\nshow) [[ $2 == hostnames ]] && printf "%s\\n" n1 n2 || '
    'echo "JobState=$(cat "$SHIM/state")";;\nrequeue) exit "$(cat "$SHIM/requeue")";;\nesac\n',
    "scancel": "",
    "squeue": 'cat "$SHIM/queue"; exit "$(cat "$SHIM/queue_rc")"\n',
    "sbatch": 'case $1 in --test-only) exit "$(cat "$SHIM/test_only")";; esac; echo 4711\n',
}


class Shims:
    """A run directory, the rendered script and the recorded calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shim, self.run = folder, folder / "shim", folder / "runs" / "demo"
        self.bin = folder / "bin"
        for path in (self.shim, self.bin, self.run):
            path.mkdir(parents=True)
        for name, body in SHIMS.items():
            (self.bin / name).write_text(NOTE.format(name=name) + body)
            (self.bin / name).chmod(0o755)
        for name, text in {"state": "RUNNING", "requeue": "0", "queue": "", "queue_rc": "0",
                           "test_only": "0"}.items():  # fmt: skip
            (self.shim / name).write_text(text)
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin", "SHIM": str(self.shim), "RUN": str(self.run),
            "HOME": str(folder), "SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": "2",
        }  # fmt: skip

    def render(self, cluster: str = "") -> Path:
        """The batch script of a CPU run on 2 nodes x 1 rank, written as launch does."""
        from megatron_patch import config
        from megatron_patch.launcher import submit

        path = self.folder / "run.yaml"
        base = "cluster:\n  gpus_per_node: 0\n  ranks_per_node: 1\n  restart_pause_seconds: 0\n"
        off = "" if "preflight" in cluster else "  preflight: {enabled: false}\n"
        path.write_text(MODEL.format(name="demo", device="cpu") + base + off + cluster)
        loaded = config.load(path)
        return submit.write(submit.build_job(loaded, 2, work_dir=self.folder), loaded)

    def start(self, *steps: str, cluster: str = "", **environment: str) -> subprocess.Popen[str]:
        """Start the script; ``steps`` are what the srun calls do, in order."""
        script = self.render(cluster)
        for number, step in enumerate(steps):
            (self.shim / f"scenario.{number}").write_text(step)
        return subprocess.Popen(
            ["bash", script], env=self.environment | environment, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def drive(self, *steps: str, cluster: str = "", **environment: str) -> tuple[int, str]:
        """Run the script to its end; exit code and output."""
        process = self.start(*steps, cluster=cluster, **environment)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output

    def calls(self, name: str) -> list[list[str]]:
        """Arguments of every call of a shim."""
        files = sorted(self.shim.glob(f"{name}.*"), key=lambda p: int(p.suffix[1:]))
        return [file.read_text().splitlines() for file in files]

    def requeues(self) -> int:
        """How often the script asked for a requeue."""
        return sum(call[0] == "requeue" for call in self.calls("scontrol"))

    def signal_when(
        self, process: subprocess.Popen[str], file: str, number: signal.Signals
    ) -> None:
        """Send a signal to the batch shell once a shim has left ``file``."""
        end = time.monotonic() + 600
        while not (self.shim / file).exists():
            assert time.monotonic() < end, file
            time.sleep(0.01)
        os.kill(process.pid, number)


@pytest.fixture
def shims(tmp_path):
    """Slurm's commands as shims."""
    return Shims(tmp_path)
