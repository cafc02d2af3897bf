"""Injection payloads and secret canaries against the launcher and a real run; figures for the docs.

    python benchmarks/security_table.py [--out DIR]

Injections: every payload would create a file. It is put where a user or a machine can put text
(YAML, --set, paths, environment, files of the run directory); what is not refused is rendered, and
the script runs to its end with shims in place of Slurm's commands. Then the file must not exist.

Canaries: a job with secrets in many places crashes once with a traceback, restarts, finishes;
meanwhile every process list is read. Then all it left behind is searched, as written and in base64.
The payloads of the configuration are those of tests/launch/test_security.py.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "launch"


def load(name: str, path: Path) -> ModuleType:
    """A module of the tests, by its file."""
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------- injection


@dataclass(frozen=True)
class Injection:
    """One payload in one place."""

    place: str
    payload: str
    """With ``{mark}`` for the file it would create."""
    play: Callable[[Any, str], str]
    """(shims, text) -> how it was refused; empty: it went through and the script ran."""


def run_script(shims: Any, script: Path, run_dir: Path, **environment: str) -> str:
    """The rendered script with a srun that finishes the run."""
    (shims.shim / "scenario.0").write_text(f'RUN="{run_dir}"; finish')
    subprocess.run(
        ["bash", script], env=shims.environment | environment, cwd=shims.folder, check=False,
        capture_output=True, timeout=60,
    )  # fmt: skip
    return ""


def in_yaml(place: str) -> Callable[[Any, str], str]:
    def play(shims: Any, text: str) -> str:
        from megatron_patch import config
        from megatron_patch.launcher import submit

        tests = sys.modules["security_cases"]
        path = shims.folder / "run.yaml"
        path.write_text(tests.tree(place, text))
        try:
            loaded = config.load(path)
            job = submit.build_job(loaded, 2, work_dir=shims.folder)
        except ValueError as error:
            return str(error)
        return run_script(shims, submit.write(job, loaded), job.run_dir)

    return play


def in_override(key: str) -> Callable[[Any, str], str]:
    def play(shims: Any, text: str) -> str:
        answer = subprocess.run(
            [sys.executable, "-m", "megatron_patch", "launch", "--config", "run.yaml", "--nodes",
             "2", "--set", f"{key}={text}"],
            env=os.environ | shims.environment, cwd=shims.folder, capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip
        assert answer.returncode != 0, answer.stdout
        return answer.stderr

    return play


def in_work_dir(shims: Any, text: str) -> str:
    """The directory the job is submitted from."""
    from megatron_patch import config
    from megatron_patch.launcher import submit

    folder = shims.folder / text.replace("/", "_")
    folder.mkdir()
    try:
        submit.build_job(config.load(shims.folder / "run.yaml"), 2, work_dir=folder)
    except ValueError as error:
        return str(error)
    raise AssertionError("a working directory of such a name was accepted")


def in_environment(name: str) -> Callable[[Any, str], str]:
    """A variable the script reads, or one that bash itself might."""

    def play(shims: Any, text: str) -> str:
        return run_script(shims, shims.render(), shims.run, **{name: text})

    return play


def in_file(name: str) -> Callable[[Any, str], str]:
    """Content of a file the script reads in the run directory; then a crash, so that it is read."""

    def play(shims: Any, text: str) -> str:
        script = shims.render()
        file = shims.run / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        (shims.shim / "scenario.0").write_text("step 7; leave 1 1; leave 0 143; exit 143")
        (shims.shim / "scenario.1").write_text("finish")
        subprocess.run(["bash", script], env=shims.environment, cwd=shims.folder, check=False,
                       capture_output=True, timeout=60)  # fmt: skip
        return ""

    return play


def by_a_rank(name: str) -> Callable[[Any, str], str]:
    """What a rank leaves for the script: its exit file, its step."""

    def play(shims: Any, text: str) -> str:
        (shims.shim / "payload").write_text(text + "\n")
        (shims.shim / "scenario.0").write_text(
            f'step 7; leave 1 1; cp "$SHIM/payload" "$ATTEMPT_DIR/{name}"; exit 1'
        )
        (shims.shim / "scenario.1").write_text("finish")
        subprocess.run(["bash", shims.render()], env=shims.environment, cwd=shims.folder,
                       check=False, capture_output=True, timeout=60)  # fmt: skip
        return ""

    return play


ARITHMETIC = ("PATH[$(touch {mark})]", "HOME[$(touch {mark})0]+1")
"""bash runs these where it calculates with a variable it did not check."""
SHELL = ("$(touch {mark})", "; touch {mark} #", "`touch {mark}`")


def injections() -> Iterator[Injection]:
    """All of them: the configuration's sixty first."""
    tests = sys.modules["security_cases"]
    for place, payload in tests.CASES:
        yield Injection(f"YAML {place}", payload, in_yaml(place))
    for key in ("cluster.partition", "run_dir"):
        for payload in SHELL:
            yield Injection(f"--set {key}", payload, in_override(key))
    for payload in SHELL:
        yield Injection("working directory", payload, in_work_dir)
    for name in ("SLURM_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_ARRAY_TASK_ID",
                 "SLURM_ARRAY_TASK_MAX", "SLURM_JOB_NODELIST", "SLURM_CPUS_PER_TASK"):  # fmt: skip
        for payload in (*ARITHMETIC, SHELL[0]):
            yield Injection(f"environment {name}", payload, in_environment(name))
    for name in ("launch/lock", "launch/events.log", "launch/excluded_nodes", "FINISHED"):
        for payload in (*ARITHMETIC, *SHELL[:2]):
            yield Injection(f"file {name}", payload, in_file(name))
    for name in ("step", "exit/00000", "exit/00001"):
        for payload in (*ARITHMETIC, *SHELL[:2]):
            yield Injection(f"rank's file {name}", payload, by_a_rank(name))


def inject(number: int, case: Injection, folder: Path) -> dict[str, Any]:
    """Play one; the row."""
    home = folder / f"i{number}"
    home.mkdir(parents=True)
    shims = sys.modules["launch_shims"].Shims(home)
    shims.render()
    mark = home / "pwned"
    refused = case.play(shims, case.payload.format(mark=mark))
    executed = bool(list(home.rglob("pwned")))
    shutil.rmtree(home)
    return {"place": case.place, "payload": case.payload, "executed": executed,
            "outcome": "refused" if refused else "harmless"}  # fmt: skip


# ----------------------------------------------------------------------------------------- canaries


def canary(number: int) -> str:
    """A value that occurs nowhere else."""
    return f"cnry{number:02d}x{number * 7919 + 104729:07d}q"


def places(folder: Path) -> dict[str, str]:
    """Where a secret is put -> its value. Files are made here."""
    tests = sys.modules["security_cases"]
    found = {f"environment {n}": canary(i) for i, n in enumerate(tests.CANARIES[:12])}
    named = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSPHRASE")
    found |= {f"secrets_file {n}": canary(20 + i) for i, n in enumerate(named)}
    lines = [f"{n}={found[f'secrets_file {n}']}" for n in named]
    secret = folder / "secrets"
    secret.write_text("# keys\n" + "\n".join(lines) + "\n")
    key = folder / "hmac.key"
    found["checkpoint.hmac_key_file"] = canary(30)
    key.write_text(found["checkpoint.hmac_key_file"] * 4)
    found["comment in the YAML"] = canary(31)
    found["pass_environment DB_TOKEN"] = canary(32)
    for path in (secret, key):
        path.chmod(0o600)
    found["environment, in a frame of the traceback"] = canary(33)
    found["~/.netrc"] = canary(34)
    (folder / ".netrc").write_text(f"machine x password {canary(34)}\n")
    return found


def refused_values() -> list[dict[str, Any]]:
    """Secrets in places that are refused: the refusal must not repeat them."""
    tests = sys.modules["security_cases"]
    from megatron_patch import config

    rows = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "run.yaml"
        base = tests.MODEL.format(name="demo", device="cpu")
        entry = "cluster: {environment: [{name: %s, value: %s, reason: x}]}\n"
        for place, text in {
            "YAML cluster.environment": entry % ("HF_TOKEN", "CNRY"),
            "YAML cluster.environment, malformed": entry % ("HF_TOKEN", "'CNRY $x'"),
            "YAML cluster.environment, by value": entry % ("OK", "hf_CNRY" + 8 * "CNRY"),
        }.items():  # fmt: skip
            path.write_text(base + text)
            said = ""
            try:
                config.load(path)
            except ValueError as error:
                said = str(error)
            rows.append(
                {"place": place, "refused": bool(said), "hits": ["refusal"] * ("CNRY" in said)}
            )
    return rows


def process_lists(seen: set[str]) -> None:
    """Add every command line there is."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            seen.add(file.read_bytes().decode(errors="replace"))
        except OSError:
            continue


def encodings(value: bytes) -> list[bytes]:
    """The value, and what of it stays recognizable in base64 at each of the three alignments."""
    shifted = [
        base64.b64encode(bytes(n) + value)[-(-8 * n // 6) : 8 * (n + len(value)) // 6]
        for n in range(3)
    ]
    return [value, *shifted]


def hunt(folder: Path, values: dict[str, str], skip: tuple[Path, ...]) -> dict[str, list[str]]:
    """Place -> files of ``folder`` that hold its value."""
    forms = {place: encodings(v.encode()) for place, v in values.items()}
    hits: dict[str, list[str]] = {place: [] for place in values}
    for path in folder.rglob("*"):
        if path.is_file() and path not in skip:
            data = path.read_bytes()
            for place, wanted in forms.items():
                if any(form in data for form in wanted):
                    hits[place].append(str(path.relative_to(folder)))
    return hits


def canaries(folder: Path) -> list[dict[str, Any]]:
    """A job that crashes with a traceback and finishes, with secrets all around it."""
    from fault_lab import cases_scripts, lab
    from fault_lab.case import Case, Scene

    lab.preimport()
    mounts = lab.isolate()
    scene = Scene(Case(name="canaries", group="", inject=lambda s: s.play()),
                  lab.Lab(folder, mounts=mounts), {})  # fmt: skip
    values = places(folder)
    comment = f"\n# the key is {values['comment in the YAML']}\n"
    with (folder / "run.yaml").open("a") as out:
        out.write(comment)
    sets = (f"cluster.secrets_file={folder / 'secrets'}", "cluster.pass_environment=[DB_TOKEN]",
            f"checkpoint.hmac_key_file={folder / 'hmac.key'}")  # fmt: skip
    job = cases_scripts.Job(scene.lab, "exception:5:1:1", sets)
    job.environment = {
        p.removeprefix("environment "): v for p, v in values.items() if p.startswith("environment ")
    } | {"DB_TOKEN": values["pass_environment DB_TOKEN"],
         "CANARY_OF_AN_EXCEPTION": values["environment, in a frame of the traceback"]}  # fmt: skip
    lists: set[str] = set()
    outcome = job.drive(None, step=0, limit=240, watch=lambda: process_lists(lists))
    assert outcome.code == 0, outcome.output[-3000:]
    assert "Traceback" in outcome.output and "restart 1 of 2" in outcome.output
    skip = tuple(folder / name for name in ("secrets", "hmac.key", ".netrc", "run.yaml"))
    skip += (folder / "job.yaml",)  # the user's own file, with the comment
    hits = hunt(folder, values, skip)
    for place, value in values.items():
        if any(value in line for line in lists):
            hits[place].append("a process list")
    return [{"place": p, "hits": sorted(h), "refused": False} for p, h in hits.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    parser.add_argument("--only", choices=["injections", "canaries"])
    options = parser.parse_args()
    load("launch_shims", TESTS / "conftest.py")
    load("security_cases", TESTS / "test_security.py")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="security-") as name:
        folder = Path(name).resolve()
        if options.only != "canaries":
            rows, began = [], time.time()
            todo = list(injections())
            for number, case in enumerate(todo, 1):
                rows.append(inject(number, case, folder))
                left = (time.time() - began) / number * (len(todo) - number)
                if rows[-1]["executed"] or number % 20 == 0:
                    state = "EXECUTED" if rows[-1]["executed"] else "ok"
                    print(f"[{number}/{len(todo)}, left {left:.0f} s] {state} {case.place} "
                          f"{case.payload!r}", flush=True)  # fmt: skip
            figures["injections"] = rows
        if options.only != "injections":
            figures["canaries"] = [*canaries(folder / "job"), *refused_values()]
            print(*(json.dumps(row) for row in figures["canaries"]), sep="\n")
    bad = [r for r in figures.get("injections", []) if r["executed"]]
    bad += [r for r in figures.get("canaries", []) if r["hits"]]
    print(f"{len(figures.get('injections', []))} injections, {len(figures.get('canaries', []))} "
          f"canaries, {len(bad)} got through")  # fmt: skip
    if options.only is None:
        from machine import write_result

        print(f"wrote {write_result('security_table', figures, options.out).name}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
