"""A configuration as a batch script: ``launch/train.sbatch``, its two marked blocks filled in.

Everything outside the blocks is the shipped file, byte for byte. Texts are quoted by
``shlex.quote`` although ``cluster.problems`` has refused whatever would need it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.runtime.environment import ROOT
from megatron_patch.schema.cluster import HOSTS, PATH
from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.schema.run import RunConfig

SCRIPT, PARTS = "train.sbatch", ("requeue.sh", "lib.sh", "node.sh")
OPTIONS, SETTINGS = "sbatch options", "settings"
BASE_ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LD_LIBRARY_PATH")
MAX_NODES = 100_000


class ScriptsMissingError(ValueError):
    """The package is installed without its ``launch/`` directory."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be submitted, all paths absolute."""

    run: RunConfig
    nodes: int
    work_dir: Path
    """Where the job runs: relative paths of the configuration start here."""
    run_dir: Path
    program: tuple[str, ...] = ()
    """Module or .py file and arguments; default: the trainer on ``launch/config.yaml``."""

    @property
    def launch_dir(self) -> Path:
        """The rendered script, its parts and the state of the launcher."""
        return self.run_dir / "launch"

    @property
    def config_file(self) -> Path:
        """The resolved configuration the job reads."""
        return self.launch_dir / "config.yaml"

    def absolute(self, path: str | None) -> str:
        """A path of the configuration; empty for null."""
        return "" if path is None else str(self.work_dir / path)

    @property
    def world_size(self) -> int:
        return self.nodes * self.run.cluster.ranks


def scripts() -> Path:
    """The directory of the shipped scripts.

    Raises ScriptsMissingError: the package is installed without them.
    """
    for folder in (ROOT / "launch", Path(sys.prefix) / "share" / "megatron_patch" / "launch"):
        if (folder / SCRIPT).is_file():
            return folder
    raise ScriptsMissingError(
        f"launch/{SCRIPT} is not beside the package ({ROOT}): launch from a checkout of the "
        "repository, or copy its launch/ there"
    )


def job_problems(job: Job) -> Iterator[Problem]:
    """What stands against this job beyond the sections' own checks."""
    from megatron_patch.parallel.setup import world_size_problems

    run, c = job.run, job.run.cluster
    if not 1 <= job.nodes <= MAX_NODES:
        yield Problem("cluster", f"--nodes {job.nodes}: must be between 1 and {MAX_NODES}")
        return
    if c.ranks < 1:
        text = "is required where cluster.gpus_per_node is 0 (CPU runs)"
        yield Problem("cluster.ranks_per_node", text)
        return
    path = "cluster.gpus_per_node"
    if run.training.device == "cuda" and c.gpus_per_node == 0:
        yield Problem(path, "0, but training.device is cuda; ask for GPUs, or train on cpu")
    if run.training.device == "cpu" and c.gpus_per_node > 0:
        text = f"{c.gpus_per_node} GPUs would stand idle: training.device is cpu; set it to 0"
        yield Problem(path, text)
    if run.training.exit_at_step is not None and c.continuation != "none":
        yield Problem(
            "training.exit_at_step",
            f"{run.training.exit_at_step}: a job that stops there is continued "
            f"(cluster.continuation: {c.continuation}); set cluster.continuation: none",
        )
    if run.checkpoint.resume == "never" and (c.continuation != "none" or c.max_restarts):
        yield Problem(
            "checkpoint.resume",
            f"never, but the job goes on after a stop or a crash (cluster.continuation: "
            f"{c.continuation}, max_restarts: {c.max_restarts}) and would refuse its own run: use "
            "auto",
        )
    yield from world_size_problems(run, job.world_size)
    for path, folder in (("run_dir", job.run_dir), ("working directory", job.work_dir)):
        if not PATH.fullmatch(str(folder)):
            text = f"{str(folder)[:120]!r}: only letters, digits and . _ / + = @ - are taken"
            yield Problem(path, text)


def check(job: Job) -> None:
    """Refuse a job that cannot be right.

    Raises ConfigError: with every problem found.
    """
    problems = list(job_problems(job))
    if problems:
        raise ConfigError(problems)


def render(job: Job) -> str:
    """The batch script of ``job``; ``check`` must have passed."""
    text = (scripts() / SCRIPT).read_text(encoding="utf-8")
    text = _replace(text, OPTIONS, "".join(f"#SBATCH {option}\n" for option in options(job)))
    return _replace(text, SETTINGS, "".join(line + "\n" for line in settings(job)))


def _replace(text: str, block: str, content: str) -> str:
    begin, end = f"# >>> {block}\n", f"# <<< {block}\n"
    assert text.count(begin) == 1 and text.count(end) == 1, block
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return head + begin + content + end + tail


def options(job: Job) -> Iterator[str]:
    """The ``#SBATCH`` options, one a line."""
    c = job.run.cluster
    yield f"--job-name={job.run.name}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    if c.gpus_per_node:
        yield f"--gpus-per-node={c.gpus_per_node}"
    if c.cpus_per_node is not None:
        yield f"--cpus-per-task={c.cpus_per_node}"
    if c.memory is not None:
        yield f"--mem={c.memory}"
    if c.exclusive:
        yield "--exclusive"
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        value = getattr(c, name)
        if value is not None:
            yield f"--{name}={value}"
    excluded = excluded_nodes(job)
    if excluded:
        yield f"--exclude={excluded}"
    yield f"--time={c.time_limit}"
    # To the batch shell only: it tells the ranks.
    yield f"--signal=B:USR1@{c.stop_lead_seconds}"
    yield "--requeue" if c.continuation == "requeue" else "--no-requeue"
    if c.continuation == "chain":
        yield f"--array=1-{c.chain_length}%1"
    yield "--open-mode=append"
    yield f"--chdir={job.work_dir}"
    pattern = "%A_%a" if c.continuation == "chain" else "%j"
    yield f"--output={job.run_dir}/logs/slurm-{pattern}.log"
    yield f"--export={','.join([*BASE_ENVIRONMENT, *c.pass_environment])}"
    yield from c.sbatch


def excluded_nodes(job: Job) -> str:
    """``cluster.exclude_nodes`` and the nodes that failed an earlier preflight of this run."""
    names = [job.run.cluster.exclude_nodes] if job.run.cluster.exclude_nodes else []
    file = job.launch_dir / "excluded_nodes"
    if file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")  # other lines name nodes still
        found = {line.strip() for line in text.splitlines()}
        names += sorted(n for n in found if HOSTS.fullmatch(n) and n not in names)
    return ",".join(names)


def settings(job: Job) -> Iterator[str]:
    """The shell assignments, one a line."""
    run, c = job.run, job.run.cluster
    container = c.container.image is not None
    program = job.program or ("megatron_patch", "train", "--config", str(job.config_file))
    values: dict[str, str | int | tuple[str, ...]] = {
        "RUN_DIR": str(job.run_dir),
        "LAUNCH_DIR": str(job.launch_dir),
        "PROGRAM": program,
        "CONFIG": str(job.config_file),
        "TRAIN_STEPS": run.training.train_steps,
        "DEVICE": run.training.device,
        "RANKS_PER_NODE": c.ranks,
        "PYTHON": c.container.python if container else c.python,
        "SETUP_SCRIPT": job.absolute(c.setup_script),
        "LOCAL_DIR": job.absolute(c.local_dir),
        "CONTINUATION": c.continuation,
        "MAX_REQUEUES": c.max_requeues,
        "MAX_CRASH_REQUEUES": c.max_crash_requeues,
        "RANK_AGENT": c.agent,
        "MAX_RESTARTS": c.max_restarts,
        "SAME_STEP_LIMIT": c.same_step_limit,
        "RESTART_PAUSE": c.restart_pause_seconds,
        # Without those of the file: the job reads it, and its lines may be deleted meanwhile.
        "EXCLUDED_NODES": c.exclude_nodes or "",
        "PREFLIGHT": int(c.preflight.enabled),
        "PREFLIGHT_COMMUNICATION": int(c.preflight.communication),
        "CONTAINER_IMAGE": c.container.image or "",
        "CONTAINER_MOUNTS": ",".join(mounts(job)) if container else "",
        "PASS_ENVIRONMENT": tuple(c.pass_environment),
        "SECRETS_FILE": job.absolute(c.secrets_file),
    }
    for name, value in values.items():
        if isinstance(value, tuple):
            yield f"{name}=({shlex.join(value)})"
        else:
            yield f"{name}={shlex.quote(str(value))}"
    variables = c.variables()
    yield f"SETTINGS_ENVIRONMENT=({shlex.join(v.name for v in variables)})"
    for variable in variables:
        yield f"# {variable.reason}"
        yield f"export {variable.name}={_quoted(variable.value)}"


def _quoted(value: str) -> str:
    """In single quotes always: ``shlex.quote`` leaves ``=mlx5_0`` bare, which reads as ``==``."""
    return "'" + value.replace("'", "'\"'\"'") + "'"


def mounts(job: Job) -> list[str]:
    """Container mounts: the run and working directories, the node's disk, what was asked for."""
    c = job.run.cluster
    own = [str(job.work_dir), str(job.run_dir), job.absolute(c.local_dir)]
    if c.secrets_file:
        own.append(job.absolute(c.secrets_file))
    return [f"{path}:{path}" for path in dict.fromkeys(own)] + c.container.mounts


def rank_map(job: Job) -> str:
    """How many ranks of what: ``16 ranks = 2 nodes x 8; TP2 x PP1 x CP1 x DP8``."""
    p, world = job.run.parallel, job.world_size
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    cp, ep = p.context_parallel_size, p.expert_model_parallel_size
    text = (
        f"{world} ranks = {job.nodes} node(s) x {job.run.cluster.ranks}; TP{tp} x PP{pp} x CP{cp} "
        f"x DP{world // (tp * pp * cp)}"
    )
    if ep > 1:
        etp = p.expert_tensor_parallel_size or tp
        text += f"; experts: ETP{etp} x EP{ep} x PP{pp} x EDP{world // (etp * ep * pp)}"
    return text
