""".ci/run through shims: what it runs, and when it may do without Slurm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from script_shims import ROOT, ScriptShims

ALL = ["check", "test", "test-slurm"]
BANNER = "# THE SLURM SUITE (make test-slurm) DID NOT RUN"


class Checkout(ScriptShims):
    """A folder with .ci/run, a stand-in of the installer, and a make that notes its targets."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in (".ci", "scripts"):
            (folder / name).mkdir()
        shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
        self.add("make", '[[ $1 != "${BROKEN:-}" ]]')
        self.add("id", "echo 0")
        self.installer("echo here already")

    def installer(self, body: str) -> None:
        """What the installer does."""
        (self.folder / "scripts" / "install_slurm.sh").write_text(body + "\n")

    def ci(self, **environment: str) -> tuple[int, str]:
        """Run it."""
        return self.run(self.folder / ".ci" / "run", **environment)


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose tests pass, on a machine with Slurm."""
    return Checkout(tmp_path)


def test_runs_everything(checkout):
    code, output = checkout.ci()
    assert code == 0 and checkout.calls("make") == ALL
    assert BANNER not in output


@pytest.mark.parametrize("target", ALL)
def test_a_failed_target_is_red_and_the_last(checkout, target):
    code, output = checkout.ci(BROKEN=target)
    assert code != 0 and checkout.calls("make") == ALL[: ALL.index(target) + 1]
    assert BANNER not in output


def test_a_machine_that_cannot_have_slurm(checkout):
    checkout.installer("echo words; echo 'cannot have Slurm here: no network' >&2; exit 69")
    code, output = checkout.ci()
    assert code == 0 and checkout.calls("make") == ["check", "test"]
    edge, banner, reason, last = output.splitlines()[-4:]
    assert edge == last == "#" * 100 and banner.startswith(BANNER)
    assert reason == "# cannot have Slurm here: no network"


def test_the_installers_own_refusal_is_understood(checkout):
    shutil.copy(ROOT / "scripts" / "install_slurm.sh", checkout.folder / "scripts")
    checkout.add("unshare")
    code, output = checkout.ci()
    assert code == 0 and checkout.calls("make") == ["check", "test"]
    assert BANNER in output and "# cannot have Slurm here: no apt-get" in output


@pytest.mark.parametrize("status", [1, 2, 68, 100, 124, 127])
def test_a_failed_installation_is_red(checkout, status):
    checkout.installer(f"exit {status}")
    code, output = checkout.ci()
    assert code == status and checkout.calls("make") == ["check", "test"]
    assert BANNER not in output


def test_the_suite_is_run_as_root(checkout):
    checkout.add("id", "echo 1000")
    checkout.add("sudo", 'exec "${@:2}"')
    code, _ = checkout.ci(VENV="elsewhere")
    assert code == 0 and checkout.calls("make") == ALL
    assert checkout.calls("sudo") == [
        f"-n env PATH={checkout.bin} VENV=elsewhere make test-slurm"
    ]  # fmt: skip


def test_the_suite_is_told_that_slurm_is_a_must():
    recipe = (ROOT / "Makefile").read_text().partition("\ntest-slurm:")[2].splitlines()[1]
    assert recipe.startswith("\tREQUIRE_SLURM=1 ")
