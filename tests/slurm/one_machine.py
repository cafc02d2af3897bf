"""A real Slurm of three nodes on this machine, in a private folder, for the length of a ``with``.

Needs root (mount namespace, slurmd) and Debian's ``slurm-wlm`` and ``munge``
(scripts/install_slurm.sh). Nothing of the machine's own configuration is read or changed: munge has
its own key and socket, the daemons their own hosts file in which the node names resolve.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from free_port import free_port

NODES = ("pn1", "pn2", "pn3")
DAEMONS = ("slurmctld", "slurmd", "munged")
PATIENCE = 600.0
"""Seconds until a test gives up waiting. Only a failure takes that long; a busy machine may."""

# One setting per line; slurmd expands %n to the node name. Everything a container-less test machine
# lacks (cgroups, systemd, slurmdbd, GPUs) is left out or faked.
SLURM_CONF = """\
ClusterName=onemachine
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,batch_sched_delay=0,requeue_delay=1
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=3600
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=120
SlurmdTimeout=600
UnkillableStepTimeout=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
JobCompType=jobcomp/filetxt
JobCompLoc={dir}/jobcomp.log
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmdLogFile={dir}/slurmd.%n.log
SlurmdSpoolDir={dir}/spool.%n
StateSaveLocation={dir}/state
{nodes}
PartitionName=main Nodes=pn[1-3] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=pn[1-3] MaxTime=INFINITE State=UP PriorityTier=10
"""
# A plugin is named because slurmd, left to look for one, ends where no cgroups or both versions are
# mounted, and version 2 wants systemd. Nothing above uses cgroups, so version 1's touches none.
CGROUP_CONF = "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n"
# In a mount namespace of its own, so that the machine's hosts file is not touched.
IN_NAMESPACE = 'mount --make-rprivate / && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def missing() -> str | None:
    """Why no Slurm can be started here; None when it can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (scripts/install_slurm.sh)"
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        return "needs mount namespaces (unshare --mount)"
    return None


class OneMachine:
    """The cluster; ``start`` and ``stop``, or a ``with`` block."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/usr/bin",
        }

    def __enter__(self) -> OneMachine:
        try:
            self.start()
        except BaseException:
            self._end_daemons()  # __exit__ is only called after __enter__ has returned
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the daemons and wait until every node is idle."""
        self._write()
        socket_ = self.dir / "munge.socket"
        self._spawn(
            ["munged", "--foreground", "--force", f"--key-file={self.dir}/munge.key",
             f"--socket={socket_}", f"--pid-file={self.dir}/munged.pid",
             f"--log-file={self.dir}/munged.log", f"--seed-file={self.dir}/munged.seed"],
            name="munged",
        )  # fmt: skip
        self.wait_for(lambda: self._all_run() and socket_.exists(), PATIENCE, "munge's socket")
        hosts = str(self.dir / "hosts")
        space = ["unshare", "--mount", "bash", "-c", IN_NAMESPACE, "_", hosts]
        self._spawn([*space, "slurmctld", "-D", "-c"], name="slurmctld")
        for node in NODES:
            self._spawn([*space, "slurmd", "-D", "-N", node], name=f"slurmd.{node}")
        idle = ["idle"] * len(NODES)
        self.wait_for(
            lambda: self._all_run() and self.node_states() == idle, PATIENCE, "idle nodes"
        )

    def stop(self) -> None:
        """Cancel every job, stop the daemons in reverse order; nothing of them is left."""
        self.run("scancel", "--user=root", check=False)
        self.run("scancel", "--signal=KILL", "--full", "--user=root", check=False)
        with contextlib.suppress(AssertionError, subprocess.CalledProcessError):
            # What is left after this, the daemons take with them.
            self.wait_for(lambda: not self.run("squeue", "--noheader").stdout.strip(), 30, "end")
        self._end_daemons()

    def _all_run(self) -> bool:
        """True; AssertionError with its last words when a daemon has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                words = (self.dir / f"{name}.out").read_text(errors="replace")[-2000:]
                raise AssertionError(f"{name} ended with {process.returncode}:\n{words}")
        return True

    def _end_daemons(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in reversed(self.processes.values()):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _write(self) -> None:
        for name in ("dev", "state", *(f"spool.{node}" for node in NODES)):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        for index in range(8):
            (self.dir / "dev" / f"gpu{index}").touch()
        host, ports = socket.gethostname().split(".")[0], _ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 "
            "RealMemory=4000 Gres=gpu:8 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        conf = SLURM_CONF.format(dir=self.dir, host=host, port=ports[0], nodes=nodes)
        (self.dir / "slurm.conf").write_text(conf)
        # A bare Count=8 leaves the node INVAL.
        gres = f"NodeName=pn[1-3] Name=gpu File={self.dir}/dev/gpu[0-7]\n"
        (self.dir / "gres.conf").write_text(gres)
        (self.dir / "cgroup.conf").write_text(CGROUP_CONF)
        (self.dir / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
        key = self.dir / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _spawn(self, command: list[str], *, name: str) -> None:
        log = (self.dir / f"{name}.out").open("wb")
        self.processes[name] = subprocess.Popen(
            command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        log.close()

    # --- commands --------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A Slurm command against this cluster."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=check, timeout=300
        )

    def node_states(self) -> list[str]:
        """State of every node, in order; empty while the controller does not answer."""
        answer = self.run("sinfo", "--noheader", "-N", "-p", "main", "-o", "%T", check=False)
        return answer.stdout.split()

    def state(self, job: str) -> str:
        """``JobState`` of a job."""
        return self.fact(job, "JobState")

    def fact(self, job: str, key: str) -> str:
        """One field of ``scontrol show job``."""
        text = self.run("scontrol", "show", "job", "--oneliner", job).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)[key]

    def start_now(self, job: str) -> None:
        """Let a requeued job start before its two minutes (Reason=BeginTime) are over."""
        # Before the nodes have cleaned up the launch would fail.
        self.wait_for(
            lambda: not {"completing", "allocated", "mixed"} & set(self.node_states()),
            PATIENCE,
            "nodes that have cleaned up",
        )
        time.sleep(2)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    def wait_for_state(self, job: str, *states: str, seconds: float = PATIENCE) -> None:
        """Wait until the job is in one of ``states``."""
        self.wait_for(
            lambda: self.state(job) in states, seconds, f"job {job} {' or '.join(states)}"
        )

    def wait_for(self, condition, seconds: float, what: str) -> None:
        """Poll ``condition``; AssertionError after ``seconds``."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited {seconds} s for {what}\n{self.status()}")
            time.sleep(0.3)

    def status(self) -> str:
        """Queue, nodes and the controller's last words, for a failure's message."""
        queue = self.run("squeue", "--format=%i %P %j %T %r %N", check=False).stdout
        nodes = self.run("sinfo", "-N", "--format=%N %P %T %E", check=False).stdout
        log = self.dir / "slurmctld.log"
        words = log.read_text().splitlines()[-25:] if log.exists() else []
        return "\n".join([queue, nodes, *words])


def _ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return sorted(found)
