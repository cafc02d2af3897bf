"""A job with secrets all around it crashes with a traceback, restarts and finishes.

Every process list is read meanwhile; then all that the job left is searched, as written and in
base64 at any alignment.
"""

from __future__ import annotations

import base64
from pathlib import Path

from fault_lab.case import Case, Scene
from fault_lab.job import Job
from fault_lab.lab import Outcome

SHELL = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN",
         "DB_PASSWORD", "GOOGLE_CREDENTIALS", "SSH_PASSPHRASE", "SESSION_COOKIE")  # fmt: skip
FILE = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSPHRASE")


def canary(number: int) -> str:
    """A value that occurs nowhere else."""
    return f"cnry{number:02d}x{number * 7919 + 104729:07d}q"


def plant(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Write the user's own files: (place of a secret -> its value, environment of the shell)."""
    shell = {name: canary(n) for n, name in enumerate(SHELL)}
    shell |= {"DB_TOKEN": canary(32), "CANARY_OF_AN_EXCEPTION": canary(33)}
    file = {name: canary(20 + n) for n, name in enumerate(FILE)}
    places = {f"environment {name}": value for name, value in shell.items()}
    places |= {f"secrets_file {name}": value for name, value in file.items()}
    places |= {"hmac key": canary(30), "comment in the YAML": canary(31), "~/.netrc": canary(34)}
    lines = "".join(f"{name}={value}\n" for name, value in file.items())
    (folder / "secrets").write_text(f"# keys\n{lines}")
    (folder / "hmac.key").write_text(places["hmac key"] * 4)
    (folder / ".netrc").write_text(f"machine x password {places['~/.netrc']}\n")
    for name in ("secrets", "hmac.key"):
        (folder / name).chmod(0o600)
    with (folder / "run.yaml").open("a") as out:
        out.write(f"\n# the key is {places['comment in the YAML']}\n")
    return places, shell


def encodings(value: bytes) -> list[bytes]:
    """The value, and what of it stays recognizable in base64 at each of the three alignments."""
    shifted = [
        base64.b64encode(bytes(n) + value)[-(-8 * n // 6) : 8 * (n + len(value)) // 6]
        for n in range(3)
    ]
    return [value, *shifted]


def hunt(folder: Path, values: dict[str, str], skip: set[Path]) -> dict[str, list[str]]:
    """Place -> files of ``folder`` that hold its value, where there are any."""
    forms = {place: encodings(v.encode()) for place, v in values.items()}
    hits: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in skip:
            data = path.read_bytes()
            for place, wanted in forms.items():
                if any(form in data for form in wanted):
                    hits.setdefault(place, []).append(str(path.relative_to(folder)))
    return hits


def job_among_secrets(scene: Scene) -> Outcome:
    folder = scene.lab.folder
    values, shell = plant(folder)
    sets = (f"cluster.secrets_file={folder / 'secrets'}", "cluster.pass_environment=[DB_TOKEN]",
            f"checkpoint.hmac_key_file={folder / 'hmac.key'}")  # fmt: skip
    job = Job(scene.lab, "exception:5:1:1", sets)
    job.environment = shell
    commands: set[str] = set()

    def read_process_lists() -> None:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                commands.add(file.read_bytes().decode(errors="replace"))
            except OSError:
                continue

    outcome = job.drive(None, step=0, limit=240, watch=read_process_lists)
    assert "Traceback" in outcome.output, outcome.output[-3000:]
    # The user's own files hold them.
    own = ("secrets", "hmac.key", ".netrc", "run.yaml", "job.yaml")
    hits = hunt(folder, values, {folder / name for name in own})
    assert not hits, hits
    assert not [place for place, value in values.items() for c in commands if value in c]
    return outcome


CASES = [
    Case(name="job: secrets reach no file and no process list", inject=job_among_secrets, code=0,
         says="restart 1 of 2 inside this allocation", resumes=False, within=200.0),
]  # fmt: skip
