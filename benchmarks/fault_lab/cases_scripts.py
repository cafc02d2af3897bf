"""The shipped sbatch script, node script and torchrun, with shims in place of Slurm's commands."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fault_lab.case import Case, Scene
from fault_lab.lab import ROOT, Lab, Outcome, descendants, kill_all

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
PORT = 15000 + 1234 % 1500 * 10


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


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
        cluster = CLUSTER.format(
            python=sys.executable,
            local=lab.folder / "local",
            # Packages that lie beside this checkout and not in the interpreter's own folder.
            path=os.pathsep.join(
                dict.fromkeys([str(ROOT), str(ROOT / "kernels"), *_python_path()])
            ),
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

    def start(self) -> subprocess.Popen[bytes]:
        """What slurmd does."""
        environment = {
            "PATH": f"{self.shim / 'bin'}:/usr/local/bin:/usr/bin:/bin", "SHIM": str(self.shim),
            "HOME": str(self.lab.folder), "SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "n1",
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
        end = began + limit
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


def job(
    fault: str = "none",
    act: Callable[[Job, int], None] | None = None,
    *,
    step: int = 4,
    sets: tuple[str, ...] = (),
    before: Callable[[Scene], None] | None = None,
    limit: float = 200,
) -> Callable[[Scene], Outcome]:
    """``Case.inject``: the whole job with one fault."""

    def inject(scene: Scene) -> Outcome:
        made = Job(scene.lab, fault, sets)
        if before is not None:
            before(scene)
        return made.drive(act, step=step, limit=limit)

    return inject


def to_shell(number: signal.Signals) -> Callable[[Job, int], None]:
    return lambda made, pid: os.kill(pid, number)


def to_torchrun(made: Job, pid: int) -> None:
    """SIGKILL to the agent below node.sh: the parent of the ranks."""
    attempts = sorted(made.lab.run_dir.glob("logs/*/pid.0"), key=lambda p: p.stat().st_mtime)
    status = Path(f"/proc/{attempts[-1].read_text()}/stat").read_text()
    os.kill(int(status[status.rindex(")") + 2 :].split()[1]), signal.SIGKILL)


def hold_the_port(scene: Scene) -> None:
    holder = scene.keep["socket"] = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("0.0.0.0", PORT))
    holder.listen()
    os.set_inheritable(holder.fileno(), False)


def hide_data(scene: Scene) -> None:
    (scene.lab.folder / "corpus.bin").rename(scene.lab.folder / "corpus.hidden")


def show_data(scene: Scene) -> None:
    (scene.lab.folder / "corpus.hidden").rename(scene.lab.folder / "corpus.bin")


SLOW = 200.0  # every start of a job imports torch in two processes of this machine
CASES = [
    Case(name="job: kill -9 of a rank", group="launch script", inject=job("forward:5:1:1"), code=0,
         says=r"\(they left no exit code; look here first\): 1$", after="same job", within=SLOW,
         note="restarted inside the allocation, on another port"),
    Case(name="job: kill -9 inside a save", group="launch script", code=0, after="same job",
         inject=job("save manifest:6:0:1"), says="restart 1 of 2 inside this allocation",
         within=SLOW),
    Case(name="job: kill -9 of torchrun", group="launch script", code=0, after="same job",
         inject=job(act=to_torchrun), says="No rank left an exit code", within=SLOW),
    Case(name="job: the same step crashes three times", group="launch script", code=1,
         inject=job("forward:5:1:3"), says="3 crashes in a row at step 5", within=SLOW,
         note="stops with report.txt; not requeued"),
    Case(name="job: SIGUSR1 to the batch shell (time limit)", group="launch script", code=0,
         inject=job(act=to_shell(signal.SIGUSR1)), says="got USR1: asking the ranks to save",
         after="same job", within=SLOW, note="saved at the next step, requeued, finished"),
    Case(name="job: SIGTERM to the batch shell (preemption)", group="launch script", code=0,
         inject=job(act=to_shell(signal.SIGTERM)), says="got TERM: asking the ranks to save",
         after="same job", within=SLOW, note="saved at the next step, requeued, finished"),
    Case(name="job: port in use", group="launch script", code=0, after="same job",
         inject=job(before=hold_the_port), says="EADDRINUSE", within=SLOW,
         note="the second attempt takes the next port"),
    Case(name="job: data error", group="launch script", code=2, rank_code=2, within=SLOW,
         inject=job(before=hide_data), repair=show_data, says="a retry meets it again",
         note="never requeued"),
]  # fmt: skip
