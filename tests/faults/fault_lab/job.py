"""The shipped sbatch script, node script and torchrun, with shims in place of Slurm's commands."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fault_lab.lab import ROOT, SLACK, Lab, Outcome, descendants, kill_all

CLUSTER = """
cluster:
  gpus_per_node: {gpus}
  ranks_per_node: {ranks}
  memory: null
  exclusive: false
  python: {python}
  local_dir: {local}
  restart_pause_seconds: 0
  preflight: {{enabled: false}}
  environment:
    - {{name: OMP_NUM_THREADS, value: "1", reason: the ranks share the machine}}
    - {{name: GLOO_SOCKET_IFNAME, value: lo, reason: the node is this machine}}
    - {{name: PYTHONPATH, value: "{path}", reason: an uninstalled checkout}}
"""
SHIMS = {
    "srun": """\
while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=0 SLURM_PROCID=0 SLURMD_NODENAME=n1
trap 'kill -USR1 "$child" 2>/dev/null' USR1
"$@" &
child=$!
while :; do
  wait "$child"
  status=$?
  kill -0 "$child" 2>/dev/null || exit "$status"
done
""",
    "scontrol": """\
case $1 in
  show) [[ $2 == hostnames ]] && echo localhost || echo JobState=RUNNING ;;
  requeue) echo requeued >>"$SHIM/requeues" ;;
esac
""",
    "squeue": "echo 'Invalid job id specified' >&2; exit 1\n",
    "scancel": "",
}
JOB_ID = 1234


class Job:
    """The script of one run and what Slurm would do with it.

    Args:
        lab: the run; as many ranks as it has, and on a GPU each where ``gpu``.
        fault: as in ``recorded``.
        sets: of the configuration.
    """

    def __init__(self, lab: Lab, fault: str, sets: tuple[str, ...], *, gpu: bool = False) -> None:
        from megatron_patch import config
        from megatron_patch.launcher import submit

        self.lab, self.sets = lab, sets
        self.shim = lab.folder / "shim"
        (self.shim / "bin").mkdir(parents=True, exist_ok=True)
        for name, body in SHIMS.items():
            (self.shim / "bin" / name).write_text("#!/usr/bin/env bash\n" + body)
            (self.shim / "bin" / name).chmod(0o755)
        given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        cluster = CLUSTER.format(
            python=sys.executable,
            local=lab.folder / "local",
            # Packages that lie beside this checkout and not in the interpreter's own folder.
            path=os.pathsep.join(dict.fromkeys([str(ROOT), str(ROOT / "kernels"), *given])),
            gpus=lab.ranks if gpu else 0,
            ranks=lab.ranks,
        )
        path = lab.folder / "job.yaml"
        path.write_text((lab.folder / "run.yaml").read_text() + cluster)
        (lab.folder / "local").mkdir(exist_ok=True)
        loaded = config.load(path, list(sets))
        job = submit.build_job(loaded, 1, work_dir=lab.folder)
        recorded = str(Path(__file__).with_name("recorded.py"))
        where = "gpu" if gpu else "cpu"
        program = (recorded, where, fault, "train", "--config", str(job.config_file))
        self.script = submit.write(dataclasses.replace(job, program=program), loaded)
        self.log = self.lab.folder / "job.log"
        self.restarts = 0
        self.environment: dict[str, str] = {}
        """Of the submitting shell, beyond what Slurm sets."""
        self.fault_at: float | None = None

    @property
    def port(self) -> int:
        """The port that the script takes first."""
        return 15000 + JOB_ID % 1500 * 10

    def start(self) -> subprocess.Popen[bytes]:
        """What slurmd does."""
        environment = {
            "PATH": f"{self.shim / 'bin'}:/usr/local/bin:/usr/bin:/bin", "SHIM": str(self.shim),
            "HOME": str(self.lab.folder), "SLURM_JOB_ID": str(JOB_ID), "SLURM_JOB_NODELIST": "n1",
            "SLURM_NNODES": "1", "SLURM_RESTART_COUNT": str(self.restarts), **self.environment,
        }  # fmt: skip
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["bash", str(self.script)], env=environment, cwd=self.lab.folder, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def step(self) -> int:
        """Step that rank 0 of the newest attempt has begun."""
        beats = sorted(self.lab.run_dir.glob("logs/*/step"), key=lambda p: p.stat().st_mtime)
        text = beats[-1].read_text().strip() if beats else ""
        return int(text) if text.isdigit() else 0

    def requeues(self) -> int:
        """How often the script asked for a requeue."""
        file = self.shim / "requeues"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def drive(
        self,
        act: Callable[[Job, int], None] | None,
        *,
        step: int,
        limit: float,
        watch: Callable[[], None] | None = None,
    ) -> Outcome:
        """Run to the end, with every requeue that the script asks for."""
        began, code = time.time(), -1
        end = began + SLACK * limit
        while time.time() < end:
            process = self.start()
            seen = self.requeues()
            while process.poll() is None and time.time() < end:
                if act is not None and self.step() >= step:
                    self.fault_at = time.time()
                    act(self, process.pid)
                    act = None
                if watch is not None:
                    watch()
                time.sleep(0.02)
            if process.poll() is None:
                kill_all()
            code = process.wait()
            if self.requeues() == seen:
                break
            self.restarts += 1
        timed_out = time.time() >= end
        grace = time.monotonic() + 3  # the log follower of node.sh looks once a second
        while (left := descendants()) and time.monotonic() < grace:
            time.sleep(0.05)
        kill_all()
        return self._outcome(code, began, timed_out, [name for _, name in left])

    def _outcome(self, code: int, began: float, timed_out: bool, orphans: list[str]) -> Outcome:
        ranks = {}
        for file in sorted(self.lab.run_dir.glob("logs/*/exit/[0-9]*")):
            with contextlib.suppress(ValueError, OSError):
                number, _, reason = file.read_text().strip().split(" ", 2)
                ranks[len(ranks)] = (int(number), reason)
        stamps = sorted(self.lab.run_dir.glob("logs/*/injected"))
        if stamps:
            self.fault_at = float(stamps[0].read_text().split()[0])
        text = self.log.read_text(errors="replace")
        text += "".join(
            f.read_text(errors="replace")
            for f in sorted(self.lab.run_dir.glob("logs/*/rank_*.log"))
        )
        ended = time.time()
        return Outcome(
            code=code, ranks=ranks, output=text.replace(f"{self.lab.folder}/", ""),
            seconds=ended - began,
            after_fault=ended - self.fault_at if self.fault_at else None,
            fault="", timed_out=timed_out, orphans=orphans,
            shm=sorted(os.listdir("/dev/shm")) if self.lab.mounts else [], done=0, began=None,
        )  # fmt: skip
