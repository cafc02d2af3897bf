"""Writing a job into its run directory and handing it to Slurm. Argument lists, never a shell.

Before that the planner says whether the job fits its GPUs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_patch.data.errors import DataError
from megatron_patch.data.manifest import read_manifest
from megatron_patch.launcher import render
from megatron_patch.launcher.rank import SecretsError, read_secrets
from megatron_patch.launcher.render import Job
from megatron_patch.runtime.files import write_whole
from megatron_patch.schema.run import Loaded

JOB_ID = re.compile(r"([0-9]+)(;[A-Za-z0-9._-]+)?")
TIMEOUT = 120  # seconds Slurm's controller may take to answer


class LaunchError(ValueError):
    """The job cannot be submitted; the text says what to do."""

    exit_code = 2


def build_job(loaded: Loaded, nodes: int, *, work_dir: Path | None = None) -> Job:
    """The job of a configuration, checked.

    Raises:
        ConfigError: what does not fit this number of nodes, or cannot stand in a script.
        LaunchError: the run directory is no place on the disk.
    """
    here = (work_dir or Path.cwd()).resolve()
    run_dir = here / loaded.config.directory
    try:
        run_dir = run_dir.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise LaunchError(
            f"run_dir {run_dir}: cannot be followed ({error}); remove the link, or choose another "
            "run_dir"
        ) from None
    job = Job(run=loaded.config, nodes=nodes, work_dir=here, run_dir=run_dir)
    render.check(job)
    return job


def write(job: Job, loaded: Loaded) -> Path:
    """Render ``job`` into its run directory; returns the batch script.

    The scripts it sources are copied beside it, so that a requeue next week runs what was
    submitted today.
    """
    job.launch_dir.mkdir(parents=True, exist_ok=True)
    # Without it the job would die with JobLaunchFailure and write nothing.
    (job.run_dir / "logs").mkdir(exist_ok=True)
    source = render.scripts()
    for part in render.PARTS:
        write_whole(job.launch_dir / part, (source / part).read_text(encoding="utf-8"))
    write_whole(job.config_file, loaded.dump_yaml())
    script, text = job.launch_dir / "job.sbatch", render.render(job)
    if script.exists() and script.read_bytes() != text.encode():  # what is there may be no text
        os.replace(script, script.with_suffix(f".{int(script.stat().st_mtime)}.sbatch"))
    write_whole(script, text)
    return script


def submit(job: Job, loaded: Loaded) -> str:
    """Write, test and submit ``job``; returns the job id.

    Raises LaunchError: a job has the run directory already, it cannot be written, or Slurm refuses
    the script.
    """
    for tool in ("sbatch", "squeue"):
        if shutil.which(tool) is None:
            raise LaunchError(f"{tool} is not on PATH: launch on a login node of the cluster")
    try:
        refuse_second(job)
        script = write(job, loaded)
    except OSError as error:
        raise LaunchError(
            f"run_dir {job.run_dir}: cannot be used ({error.strerror}: {error.filename}); move "
            "away what is in the way, make it writable, or choose another run_dir"
        ) from error
    tested = _call(["sbatch", "--test-only", str(script)], job.work_dir)
    if tested.returncode != 0:
        raise LaunchError(
            f"sbatch --test-only refuses {script}: {_text(tested)}; nothing was submitted"
        )
    answer = _call(["sbatch", "--parsable", str(script)], job.work_dir)
    match = JOB_ID.fullmatch(answer.stdout.strip())
    if answer.returncode != 0 or match is None:
        raise LaunchError(f"sbatch refuses {script}: {_text(answer)}")
    with (job.launch_dir / "submitted").open("a", encoding="utf-8") as out:
        out.write(f"{match[1]} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
    return match[1]


def unseen(job: Job) -> Iterator[str]:
    """What this machine sees too little of for the ranks to start, a line each.

    Said and not refused: nodes may have a disk that a login node has not.
    """
    data, secrets = job.run.data, job.absolute(job.run.cluster.secrets_file)
    for path in data.paths:
        try:
            read_manifest(job.absolute(path))
        except DataError as error:
            yield from error.problems
    tokenizer = job.absolute(data.tokenizer.path)
    # tiktoken's may be a name
    if data.tokenizer.kind in ("huggingface", "sentencepiece") and not Path(tokenizer).is_file():
        yield f"data.tokenizer.path: there is no file {tokenizer}"
    if secrets:
        try:
            read_secrets(secrets)
        except SecretsError as error:
            yield str(error)


def refuse_second(job: Job) -> None:
    """Refuse when a job of this run directory is waiting or running.

    Raises LaunchError: it is, or Slurm does not say.
    """
    file = job.launch_dir / "submitted"
    if not file.is_file():
        return
    lines = [line.split() for line in file.read_text("utf-8", errors="replace").splitlines()]
    ids = [words[0] for words in lines if words and words[0].isdigit()]
    if not ids:
        return
    answer = _call(["squeue", "--noheader", f"--jobs={ids[-1]}", "--format=%T"], job.work_dir)
    if answer.returncode == 0 and answer.stdout.strip():
        raise LaunchError(
            f"job {ids[-1]} ({answer.stdout.split()[0].lower()}) has {job.run_dir} already; "
            f"cancel it first (scancel {ids[-1]}), or choose another name or run_dir"
        )
    if answer.returncode != 0 and "Invalid job id" not in answer.stderr:
        raise LaunchError(f"squeue does not answer for job {ids[-1]}: {_text(answer)}")


def _call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not answer within {TIMEOUT} s") from None


def _text(answer: subprocess.CompletedProcess[str]) -> str:
    return " ".join((answer.stderr + answer.stdout).split()) or f"exit code {answer.returncode}"


def check_fit(job: Job) -> str | None:
    """One line about the memory of the fullest GPU; None for a run that uses none.

    Without ``cluster.gpu`` the largest GPU that the planner knows is taken: what does not fit that
    one fits nowhere, and less is not refused.

    Raises:
        LaunchError: it does not fit; the text names layouts that would.
        ConfigError: the layout is impossible, memory aside.
    """
    run = job.run
    if run.training.device != "cuda":
        return None
    from megatron_patch.planner import report, search
    from megatron_patch.planner.hardware import GIB, GPUS, gpu_named
    from megatron_patch.planner.plan import Machine, make_plan, vocabulary_of

    largest = max(GPUS.values(), key=lambda gpu: gpu.memory)
    gpu = largest if run.cluster.gpu is None else gpu_named(run.cluster.gpu)
    vocabulary = vocabulary_of(run, None)
    machine = Machine(gpu, job.nodes, run.cluster.ranks)
    plan = make_plan(run, machine, vocabulary)
    if not plan.fits:
        found = search.alternatives(run, machine, vocabulary)
        elsewhere = [] if found else search.more_nodes(run, machine, vocabulary)
        raise LaunchError(
            f"{report.refusal(plan, found, elsewhere)}\n"
            "(launch --no-plan submits it all the same; docs/planning.md says how well this is "
            "known)"
        )
    known = run.cluster.gpu is not None
    note = "" if known else "; cluster.gpu is not set, so the largest known GPU was assumed"
    return (
        f"plan: {plan.worst.total / GIB:.1f} of {gpu.memory:g} GiB on the fullest {gpu.name}, "
        f"estimated{note}"
    )
