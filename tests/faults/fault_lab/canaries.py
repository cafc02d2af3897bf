"""A run with secrets all around it crashes with a traceback and is continued.

Every process list is read meanwhile; then all that it left is searched, as written and in base64 at
any alignment. That the scripts around it hand none on: tests/launch/test_security.py.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from pathlib import Path

from fault_lab import hooks
from fault_lab.case import Case, Scene
from fault_lab.lab import Outcome, Running
from fault_lab.processes import in_rank
from megatron_patch.launcher import rank

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


def crash_among_secrets(scene: Scene) -> Outcome:
    """The traceback passes through a frame that holds the environment."""
    folder = scene.lab.folder
    values, shell = plant(folder)
    shell[rank.SECRETS_FILE] = str(folder / "secrets")
    commands: set[str] = set()

    def crash() -> None:
        hooks.injected("an exception")
        environment = dict(os.environ)
        assert values["secrets_file HF_TOKEN"] == environment["HF_TOKEN"]
        raise RuntimeError(f"a fault of the program ({len(environment)} variables)")

    def read_process_lists(attempt: Running) -> None:
        while not attempt.poll():
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    commands.add(file.read_bytes().decode(errors="replace"))
            time.sleep(0.02)

    key = f"checkpoint.hmac_key_file={folder / 'hmac.key'}"
    attempts = [
        scene.play(key, environment=shell, hook=hook, outside=read_process_lists)
        for hook in (in_rank(1, "forward", crash), None)
    ]
    assert "RuntimeError: a fault of the program" in attempts[0].output, attempts[0].output[-3000:]
    # The user's own files hold them.
    own = ("secrets", "hmac.key", ".netrc", "run.yaml")
    hits = hunt(folder, values, {folder / name for name in own})
    assert not hits, hits
    assert not [place for place, value in values.items() for c in commands if value in c]
    return attempts[1]


CASES = [
    Case(name="secrets reach no file and no process list", inject=crash_among_secrets, code=0,
         resumes=False),
]  # fmt: skip
