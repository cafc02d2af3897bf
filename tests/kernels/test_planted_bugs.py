"""Every planted bug is caught by a member of the suite, whose members the shipped kernels pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted_bugs import BUGS
from planting import PACKAGE
from suite import MEMBERS

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """One run of all bugs: imports happen once, children are forked."""
    target = tmp_path_factory.mktemp("bugs") / "verdicts.json"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(PACKAGE.parent)
    command = [sys.executable, str(HERE / "planted_bugs.py"), "--jobs", "2", "--json", str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert target.exists(), done.stdout + done.stderr
    return json.loads(target.read_text())


def test_there_are_enough_bugs_and_each_names_a_member_of_the_suite() -> None:
    assert len(BUGS) >= 30
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert {bug.caught_by for bug in BUGS} <= set(MEMBERS)


def test_patches_apply_to_the_shipped_text() -> None:
    for bug in BUGS:
        text = (PACKAGE / bug.file).read_text()
        assert bug.apply(text) != text, bug.name


def test_unchanged_kernels_pass(verdicts: dict[str, dict]) -> None:
    assert not verdicts["control"]["caught"], verdicts["control"]


@pytest.mark.parametrize("name", [bug.name for bug in BUGS])
def test_bug_is_caught(verdicts: dict[str, dict], name: str) -> None:
    assert verdicts[name]["caught"], verdicts[name]["how"] or "the suite did not notice"
