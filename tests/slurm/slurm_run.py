"""One run on the cluster of the slurm tests: rendering, submitting, waiting, reading its traces."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import one_machine
from one_machine import PATIENCE

HERE = Path(__file__).resolve().parent
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

CONFIG = """\
name: {name}
model: {{num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32}}
training: {{train_steps: {steps}, global_batch_size: 4, micro_batch_size: 1, device: cpu,
           precision: fp32, deterministic: true}}
optimizer: {{lr: 1e-3}}
data: {{blend: [{{path: corpus}}], tokenizer: {{kind: bytes}}, num_workers: 0}}
attention: {{backend: reference}}
logging: {{interval: 1, tensorboard: false}}
cluster:
  gpus_per_node: 0
  ranks_per_node: 2
  cpus_per_node: 2
  memory: null
  exclusive: false
  python: {python}
  local_dir: {local}
  time_limit: "00:10:00"
  stop_lead_seconds: 30
  restart_pause_seconds: 0
  preflight: {{enabled: false}}
  environment:
    - {{name: OMP_NUM_THREADS, value: "1", reason: two cores run four ranks}}
    - {{name: GLOO_SOCKET_IFNAME, value: lo, reason: every node is this machine}}
"""


class Run:
    """A run directory and the job on it."""

    def __init__(self, slurm: one_machine.OneMachine, folder: Path, name: str) -> None:
        self.slurm, self.work, self.name = slurm, folder, name
        self.dir = folder / "runs" / name
        self.job = ""

    def submit(
        self, *, steps: int, sets: tuple[str, ...] = (), program: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        """Render and submit on two nodes; ``options`` go to sbatch. Returns the job id."""
        from megatron_patch import config
        from megatron_patch.launcher import submit

        path = self.work / f"{self.name}.yaml"
        local = self.work / "local"
        local.mkdir(exist_ok=True)
        path.write_text(
            CONFIG.format(name=self.name, steps=steps, python=sys.executable, local=local)
        )
        loaded = config.load(path, list(sets))
        job = submit.build_job(loaded, 2, work_dir=self.work)
        if program:
            job = dataclasses.replace(job, program=program)
        script = submit.write(job, loaded)
        self.slurm.run("sbatch", "--test-only", *options, str(script))
        answer = self.slurm.run("sbatch", "--parsable", *options, str(script))
        self.job = answer.stdout.strip()
        return self.job

    def stand_in(
        self, *, steps: int, fault: str = "", sets: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        """Submit the stand-in training program; ``fault`` as its docstring says."""
        program = (str(HERE / "stand_in.py"), str(self.dir), str(steps))
        program += (fault,) if fault else ()
        return self.submit(steps=steps, sets=sets, program=program, options=options)

    def log(self) -> str:
        """The job's log."""
        return "".join(p.read_text() for p in sorted((self.dir / "logs").glob("slurm-*.log")))

    def events(self) -> list[str]:
        """What happened, without times: ``restart=0 attempt=1 step=4 crash``."""
        file = self.dir / "launch" / "events.log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.split(" ", 2)[2] for line in lines]

    def step(self) -> int:
        """The step the newest attempt has begun, 0 before its first."""
        attempts = self.attempts() if (self.dir / "logs").exists() else []
        beat = attempts[-1] / "step" if attempts else None
        text = beat.read_text().strip() if beat is not None and beat.exists() else ""
        return int(text) if text.isdigit() else 0

    def go(self) -> None:
        """Let a stand-in go on that was told to hold."""
        (self.dir / "go").touch()

    def wait_for_step(self, step: int, seconds: float = PATIENCE) -> None:
        """Wait until ``step`` has begun."""

        def begun() -> bool:
            state = self.slurm.state(self.job) if self.job else ""
            assert state not in FINAL, f"{state} before step {step}\n{self.log()}"
            return self.step() >= step

        self.slurm.wait_for(begun, seconds, f"step {step}")

    def wait_for_end(self, *states: str, seconds: float = PATIENCE) -> None:
        """Wait for a final state of the job; releases it whenever it was requeued."""
        states = states or ("COMPLETED",)

        def ended() -> bool:
            state = self.slurm.state(self.job)
            if state == "PENDING" and self.slurm.fact(self.job, "Reason") == "BeginTime":
                self.slurm.start_now(self.job)
            assert state in states or state not in FINAL, f"{state}\n{self.log()}"
            return state in states

        self.slurm.wait_for(ended, seconds, f"{states}")

    def rank_pid(self, rank: int) -> int:
        """Process of one rank of the newest attempt."""
        wanted = {f"RANK={rank}", f"MEGATRON_PATCH_HEARTBEAT={self.attempts()[-1]}/step"}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = set((folder / "environ").read_text().split("\0"))
            except OSError:
                continue
            if wanted <= variables:
                return int(folder.name)
        raise AssertionError(f"no process of rank {rank}")

    def attempts(self) -> list[Path]:
        """Directories of the attempts, the newest last."""
        folders = [p for p in (self.dir / "logs").iterdir() if p.is_dir()]
        return sorted(folders, key=lambda p: tuple(map(int, p.name.split(".")[:3])))

    def leftovers(self) -> list[str]:
        """Processes that still belong to the run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if str(self.dir) in line and "pytest" not in line:
                found.append(line)
        return found

    def losses(self) -> dict[int, str]:
        """Step -> what the stand-in computed, in hexadecimal; the last attempt's word counts."""
        rows = [line.split() for line in (self.dir / "losses").read_text().splitlines()]
        return {int(step): value for step, value in rows}
