"""The ``cluster:`` section: how the run is started on a Slurm cluster.

Everything here ends in a batch script, so every text is held to a character set that neither a
shell nor Slurm's option parser can read as anything but a name. Values are quoted all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron_patch.schema.paths import PathOrName, PathText
from megatron_patch.schema.problem import Problem, at_least

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(,[A-Za-z0-9][A-Za-z0-9._-]*)*")
HOSTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]*")
FEATURES = re.compile(r"[A-Za-z0-9\[(][A-Za-z0-9._&|*\[\]()-]*")
MEMORY = re.compile(r"[0-9]+[KMGT]?")
TIME = re.compile(
    r"(?:(?P<days>[0-9]+)-)?(?P<first>[0-9]+)(?::(?P<second>[0-9]{1,2}))?(?::(?P<third>[0-9]{1,2}))?"
)
PATH = re.compile(r"[A-Za-z0-9._/][A-Za-z0-9._/+=@~-]*")
MOUNT = re.compile(r"/[A-Za-z0-9._/+=@-]*:/[A-Za-z0-9._/+=@-]*(:[a-z+]+)?")
IMAGE = re.compile(r"[A-Za-z0-9/.][A-Za-z0-9._/:@+#-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
VALUE = re.compile(r"[A-Za-z0-9 ._/:,=@%+^-]*")
SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|"
    r"AUTH|COOKIE|PAT|APIKEY)(_|$)",
    re.IGNORECASE,
)
# What keys of well-known services look like, whatever the variable is called.
TOKEN = re.compile(
    r"hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}|sk-[\w-]{20,}|"
    r"nvapi-[\w-]{20,}|xox[abprs]-[\w-]{10,}|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
)
# They change what every later command of the job means.
SHELL_VARIABLES = (
    "PATH", "BASH_ENV", "ENV", "IFS", "SHELLOPTS", "BASHOPTS", "PS4", "PROMPT_COMMAND",
    "LD_PRELOAD", "LD_AUDIT", "CDPATH", "GLOBIGNORE", "PYTHONSTARTUP",
)  # fmt: skip
SBATCH = re.compile(r"--([a-z][a-z-]*)(=[A-Za-z0-9._:/+,@%*=-]{1,200})?")
SBATCH_MANAGED = frozenset(
    ("job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem",
     "exclusive", "partition", "account", "qos", "constraint", "reservation", "exclude", "time",
     "signal", "requeue", "no-requeue", "array", "open-mode", "chdir", "output", "input", "export",
     "export-file", "wrap", "parsable", "get-user-env", "test-only", "wait", "uid", "gid")
)  # fmt: skip
"""What launch sets by keys of its own, and what would change who runs what."""
MANAGED_PREFIXES = ("SLURM", "SBATCH", "MEGATRON_PATCH_", "BASH_FUNC")
MANAGED = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip


GPUS = ("a100-40gb", "a100", "a800", "h100", "h800", "h20", "h200", "b200", "l40s")
"""Names that `planner.hardware` knows the figures of."""
TOLERANCE = 0.01, 0.9
"""Below, noise fails nodes; from 1 on, no speed would be too low."""


def seconds(time_limit: str) -> int | None:
    """Slurm's time (``minutes``, ``H:M:S``, ``D-H:M:S`` ...) in seconds; None when it is none."""
    match = TIME.fullmatch(time_limit)
    if match is None:
        return None
    days = match["days"]
    parts = [int(p) for p in (match["first"], match["second"], match["third"]) if p]
    if days is not None:
        hours, minutes, rest = (parts + [0, 0])[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + rest
    if len(parts) == 3:
        return parts[0] * 3600 + parts[1] * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


@dataclass(kw_only=True, frozen=True, slots=True)
class EnvironmentVariable:
    """One variable of every rank, and why it is set."""

    name: str
    """Name of the variable."""
    value: str
    """Its value. Never a secret: it stands in the rendered script."""
    reason: str
    """Why; becomes a comment in the rendered script."""


NCCL_DEFAULTS = tuple(
    EnvironmentVariable(name=name, value=value, reason=reason)
    for name, value, reason in (
        ("NCCL_NVLS_ENABLE", "0",
         "NVLink multicast needs a healthy fabric manager and is forbidden on some clusters"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1",
         "a failed collective ends the rank instead of leaving it waiting"),
        ("TORCH_FR_BUFFER_SIZE", "2000",
         "flight recorder: the last collectives of every rank"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1",
         "write the flight recorder into the attempt's directory when a collective times out"),
        ("NCCL_DEBUG", "WARN", "NCCL says what failed, not what it does"),
    )
)  # fmt: skip
"""Set unless ``cluster.environment`` has an entry of the same name."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ContainerConfig:
    """pyxis/enroot; the image has this package installed."""

    image: PathOrName | None = None
    """Image: a .sqsh file, or a registry URI as pyxis reads it; null: bare metal."""
    mounts: list[PathText] = field(default_factory=list)
    """SOURCE:TARGET[:FLAGS] each; the working and run directories are mounted by themselves."""
    python: str = "python"
    """Interpreter inside the image; not expanded."""


@dataclass(kw_only=True, frozen=True, slots=True)
class PreflightConfig:
    """What every node must pass before training starts."""

    enabled: bool = True
    """Run the preflight at the start of every job."""
    min_free_gb: float = 5.0
    """Free space needed in local_dir and in the run directory, in gigabytes."""
    max_clock_skew_seconds: float = 5.0
    """Largest difference between the clocks of nodes and the shared file system."""
    tolerance: float = 0.15
    """A GPU or node slower than the median by more than this share fails (GEMM and bandwidth);
    0.01 to 0.9."""
    communication: bool = True
    """Measure all-reduce inside nodes and over all of them, with one process per GPU, as well."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ClusterConfig:
    """Slurm, container, restarts, environment of a job."""

    partition: str | None = None
    """Partition, or several with commas."""
    account: str | None = None
    """Account."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features."""
    reservation: str | None = None
    """Reservation."""
    exclude_nodes: str | None = None
    """Nodes never to use, as a Slurm host list; those that fail the preflight are added."""
    time_limit: str = "04:00:00"
    """Time limit of one job, as Slurm writes it; the run goes on in the next one."""
    gpus_per_node: int = 8
    """GPUs asked for on every node; 0: a CPU run."""
    gpu: str | None = None
    """Kind of GPU, as h100: launch refuses what does not fit it; null: what fits none."""
    ranks_per_node: int | None = None
    """Ranks on every node; default: gpus_per_node."""
    cpus_per_node: int | None = None
    """CPU cores asked for on every node; default: the cluster's."""
    memory: str | None = "0"
    """Memory a node, e.g. 512G; 0: all of it; null: the cluster's default."""
    exclusive: bool = True
    """Take whole nodes."""
    sbatch: list[str] = field(default_factory=list)
    """Further options, e.g. --mail-type=END."""
    python: PathOrName = "python3"
    """Interpreter of the environment this package is installed in (bare metal)."""
    setup_script: PathText | None = None
    """Shell file sourced at the start of the job, e.g. for module load."""
    local_dir: PathText = "/tmp"
    """Directory on every node's own disk, for compile caches."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """pyxis/enroot container."""
    continuation: Literal["requeue", "chain", "none"] = "requeue"
    """How a run outlives its job: requeued, as an array of jobs one after the other, or not."""
    chain_length: int = 8
    """Jobs of a chain."""
    stop_lead_seconds: int = 300
    """Seconds before the time limit at which ranks save; must cover a step and all that is due."""
    max_requeues: int = 100
    """Requeues of one job for any reason."""
    max_crash_requeues: int = 3
    """Requeues of one job after a crash."""
    agent: Literal["torchrun", "nvrx"] = "torchrun"
    """What starts a node's ranks; nvrx: nvidia-resiliency-ext, which restarts crashed ranks."""
    max_restarts: int = 2
    """Restarts after a crash inside one allocation, before it is requeued."""
    same_step_limit: int = 3
    """Crashes at one and the same step after which the run stops with a report."""
    restart_pause_seconds: int = 10
    """Wait before a restart inside the allocation, for ports and GPUs to come free."""
    environment: list[EnvironmentVariable] = field(default_factory=list)
    """Variables set for every rank, over the built-in NCCL settings."""
    pass_environment: list[str] = field(default_factory=list)
    """Names of variables taken from the submitting shell; nothing else is."""
    secrets_file: PathText | None = None
    """File (mode 0600) of NAME=VALUE lines read by each rank itself; never part of the script."""
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    """Checks of every node before training."""

    @property
    def ranks(self) -> int:
        return self.gpus_per_node if self.ranks_per_node is None else self.ranks_per_node

    def variables(self) -> list[EnvironmentVariable]:
        """The built-in settings under those of ``environment``, in order."""
        own = {item.name: item for item in self.environment}
        defaults = [own.pop(item.name, item) for item in NCCL_DEFAULTS]
        return defaults + list(own.values())

    def problems(self) -> Iterator[Problem]:
        if self.gpu is not None and self.gpu.lower() not in GPUS:
            yield Problem("cluster.gpu", f"{self.gpu!r} is not one of {', '.join(GPUS)}")
        yield from self._texts()
        yield from self._sbatch()
        yield from self._numbers()
        yield from self._environment()
        limit = seconds(self.time_limit)
        if limit is not None and limit <= self.stop_lead_seconds:
            yield Problem(
                "cluster.stop_lead_seconds",
                f"{self.stop_lead_seconds}: must be less than cluster.time_limit "
                f"({self.time_limit} = {limit} s)",
            )

    def _texts(self) -> Iterator[Problem]:
        c, path = self.container, (PATH, "a path of letters, digits and . _ / + = @ -")
        checks: list[tuple[str, str | None, re.Pattern[str], str]] = [
            ("partition", self.partition, NAMES, "names of letters, digits, . _ -"),
            ("account", self.account, NAME, "a name of letters, digits, . _ -"),
            ("qos", self.qos, NAME, "a name of letters, digits, . _ -"),
            ("constraint", self.constraint, FEATURES, "feature names joined by & or |"),
            ("reservation", self.reservation, NAME, "a name of letters, digits, . _ -"),
            ("exclude_nodes", self.exclude_nodes, HOSTS, "a host list such as node[1-4],node7"),
            ("time_limit", self.time_limit, TIME, "minutes, H:M:S or D-H:M:S"),
            ("memory", self.memory, MEMORY, "a number with K, M, G or T"),
            ("python", self.python, *path),
            ("setup_script", self.setup_script, *path),
            ("local_dir", self.local_dir, *path),
            ("secrets_file", self.secrets_file, *path),
            ("container.image", c.image, IMAGE, "a path or image URI"),
            ("container.python", c.python, PATH, f"{path[1]} inside the image, written out"),
            *(
                (f"container.mounts.{n}", m, MOUNT, "/source:/target[:flags]")
                for n, m in enumerate(c.mounts)
            ),
        ]
        for key, value, pattern, wanted in checks:
            if value is not None and not pattern.fullmatch(value):
                yield Problem(
                    f"cluster.{key}", f"{value[:80]!r} is not {wanted}; write or name it so"
                )

    def _sbatch(self) -> Iterator[Problem]:
        names = []
        for n, option in enumerate(self.sbatch):
            path, match = f"cluster.sbatch.{n}", SBATCH.fullmatch(option)
            if match is None:
                yield Problem(
                    path,
                    f"{option[:80]!r} is not --name or --name=value with a value of letters, "
                    "digits and . _ : / + , @ % * = -",
                )
            elif match[1] in SBATCH_MANAGED:
                text = f"{option[:80]!r}: launch sets it, or needs it as it is: use the keys of "
                yield Problem(path, f"{text}cluster, or leave it out")
            elif match[1] in names:
                yield Problem(path, f"--{match[1]} is given twice")
            names.append(match[1] if match else "")

    def _numbers(self) -> Iterator[Problem]:
        least = {"gpus_per_node": 0, "cpus_per_node": 1, "ranks_per_node": 1, "chain_length": 1,
                 "stop_lead_seconds": 1, "max_requeues": 0, "max_crash_requeues": 0,
                 "max_restarts": 0, "same_step_limit": 1, "restart_pause_seconds": 0}  # fmt: skip
        yield from at_least("cluster", self, least)
        if self.ranks > self.gpus_per_node > 0:
            yield Problem(
                "cluster.ranks_per_node",
                f"{self.ranks}: every rank needs a GPU of its own; a node has {self.gpus_per_node} "
                "(cluster.gpus_per_node)",
            )
        p = self.preflight
        for name in ("min_free_gb", "max_clock_skew_seconds"):
            if (number := getattr(p, name)) < 0:
                yield Problem(f"cluster.preflight.{name}", f"{number}: must be 0 or more")
        low, high = TOLERANCE
        if not low <= p.tolerance <= high:
            text = f"{p.tolerance}: must be from {low} to {high}; it is a share, 0.15 is 15 %"
            yield Problem("cluster.preflight.tolerance", text)

    def _environment(self) -> Iterator[Problem]:
        for n, item in enumerate(self.environment):
            path = f"cluster.environment.{n}"
            yield from self._name(f"{path}.name", item.name)
            if SECRET.search(item.name) or TOKEN.search(item.value):
                yield Problem(
                    f"{path}.name",
                    f"{item.name[:80]!r} looks like a secret and its value would stand in the "
                    "rendered script; put it into cluster.secrets_file, or take it from your shell "
                    "with cluster.pass_environment",
                )
            elif not VALUE.fullmatch(item.value) or len(item.value) > 1000:
                yield Problem(
                    f"{path}.value",
                    f"{item.value[:80]!r}: only letters, digits, spaces and . _ / : , = @ % + ^ - "
                    "are taken",
                )
            if not item.reason.strip() or not item.reason.isprintable():
                yield Problem(f"{path}.reason", "say on one line why the variable is set")
        for n, name in enumerate(self.pass_environment):
            yield from self._name(f"cluster.pass_environment.{n}", name)

    def _name(self, path: str, name: str) -> Iterator[Problem]:
        if not VARIABLE.fullmatch(name):
            yield Problem(path, f"{name[:80]!r} is not a variable name (letters, digits, _)")
        elif name in SHELL_VARIABLES or name in MANAGED or name.startswith(MANAGED_PREFIXES):
            text = f"{name} is set by Slurm, the shell or the launcher; it cannot be set here"
            yield Problem(path, text)
