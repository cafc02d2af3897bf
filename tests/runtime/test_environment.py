"""The environment report: complete, JSON, and silent about who and where."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch.runtime import environment


def test_report_is_json_and_names_what_matters():
    report = json.loads(json.dumps(environment.report()))
    for key in ("python", "torch", "triton", "megatron-core", "transformer-engine", "apex", "cuda",
                "cudnn", "nccl", "gpu", "driver", "commit"):  # fmt: skip
        assert key in report
    import torch

    assert report["torch"] == torch.__version__
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))


def test_report_tells_no_names():
    text = json.dumps(environment.report())
    values = {socket.gethostname(), str(Path.home())}
    user = getpass.getuser()
    if len(user) > 4:
        values.add(user)
    assert not [value for value in values if len(value) > 3 and value in text]


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    return subprocess.run(
        ["git", *identity, *args], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_commit_of_a_tree_and_its_changes(tmp_path, monkeypatch):
    monkeypatch.delenv("SOURCE_COMMIT", raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert environment.commit(tmp_path.resolve()) == head
    (tmp_path / "untracked").write_text("1")
    assert environment.commit(tmp_path.resolve()) == head
    (tmp_path / "a").write_text("2")
    assert environment.commit(tmp_path.resolve()) == head + "+changes"
    monkeypatch.setenv("SOURCE_COMMIT", "given")
    assert environment.commit(tmp_path) == "given"


def test_an_installed_package_has_no_commit(tmp_path, monkeypatch):
    """A virtual environment inside someone's repository must not report that repository."""
    monkeypatch.delenv("SOURCE_COMMIT", raising=False)
    git(tmp_path, "init", "-q")
    inside = tmp_path / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert environment.commit(inside.resolve()) == "unknown"


def test_other_copies_are_found(tmp_path, monkeypatch):
    other = tmp_path / "megatron_patch"
    other.mkdir()
    (other / "__init__.py").write_text("")
    assert str(other) not in environment.other_copies()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(other.resolve()) in environment.other_copies()


@pytest.mark.parametrize(("release", "hidden"), [
    ("0.4.1", True), pytest.param("0.6.0", False, marks=pytest.mark.slow)
])  # fmt: skip
def test_core_can_be_imported_beside_an_old_nvidia_resiliency_ext(tmp_path, release, hidden):
    """A package of that name without ``__version__``: alone, Megatron-Core fails on it."""
    folder = tmp_path / "nvidia_resiliency_ext" / "checkpointing" / "async_ckpt"
    folder.mkdir(parents=True)
    for name in ("core", "cached_metadata_filesystem_reader", "filesystem_async",
                 "state_dict_saver"):  # fmt: skip
        (folder / f"{name}.py").touch()
    info = tmp_path / f"nvidia_resiliency_ext-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: nvidia-resiliency-ext\nVersion: {release}\n")
    text = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from megatron_patch.runtime import environment\n"
        "print('hidden', environment.hide_old_nvrx())\n"
        "import megatron.core.dist_checkpointing\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.stdout.split()[:2] == ["hidden", release if hidden else "None"], done.stderr
    # What is not hidden shows that this stand-in does break it.
    assert (done.returncode == 0) == hidden, done.stderr
    assert hidden or "no attribute '__version__'" in done.stderr
