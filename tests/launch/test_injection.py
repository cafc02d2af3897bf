"""Text that the batch script reads while it runs is data: environment, run directory, ranks' files.

Every payload would create a file. (Payloads in the configuration: test_security.py.)
"""

from __future__ import annotations

import itertools

import pytest

from megatron_patch.launcher import render

ARITHMETIC = ["PATH[$(touch {mark})]", "HOME[$(touch {mark})0]+1"]
"""bash runs these where it calculates with a variable that it did not check."""
SHELL = ["$(touch {mark})", "; touch {mark} #"]
VARIABLES = ["SLURM_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_ARRAY_TASK_ID",
             "SLURM_ARRAY_TASK_MAX", "SLURM_JOB_NODELIST", "SLURM_CPUS_PER_TASK"]  # fmt: skip
FILES = ["launch/lock", "launch/events.log", "launch/excluded_nodes", "FINISHED"]
RANK_FILES = ["step", "exit/00000", "exit/00001"]


def sampled(places: list[str]) -> pytest.MarkDecorator:
    """Every place with every payload; two of three are left to the long version."""
    cases = list(itertools.product(places, ARITHMETIC + SHELL))
    return pytest.mark.parametrize(
        ("place", "payload"),
        [pytest.param(*c, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, c in enumerate(cases)],
    )


@pytest.fixture
def mark(shims):
    return shims.folder / "pwned"


def executed(shims):
    return bool(list(shims.folder.rglob("pwned")))


@sampled(VARIABLES)
def test_a_variable_that_the_script_reads(shims, mark, place, payload):
    shims.drive("finish", **{place: payload.format(mark=mark)})
    assert not executed(shims)


@sampled(FILES)
def test_a_file_of_the_run_directory(shims, mark, place, payload):
    """After a crash, so that it is read."""
    file = shims.run / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(payload.format(mark=mark) + "\n")
    shims.drive("step 7; leave 1 1; leave 0 143; exit 143", "finish")
    assert not executed(shims)


@sampled(RANK_FILES)
def test_a_file_that_a_rank_leaves(shims, mark, place, payload):
    (shims.shim / "payload").write_text(payload.format(mark=mark) + "\n")
    shims.drive(f'step 7; leave 1 1; cp "$SHIM/payload" "$ATTEMPT_DIR/{place}"; exit 1', "finish")
    assert not executed(shims)


def test_without_the_check_of_numbers_a_payload_runs(shims, mark, tmp_path, monkeypatch):
    """What `require_numbers` of launch/lib.sh is there for; the tests above can fail."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in (render.SCRIPT, *render.PARTS):
        text = (render.scripts() / name).read_text()
        (scripts / name).write_text(text.replace("  require_numbers SLURM", "  : SLURM"))
    monkeypatch.setattr(render, "scripts", lambda: scripts)
    shims.drive("finish", SLURM_RESTART_COUNT=ARITHMETIC[0].format(mark=mark))
    assert executed(shims)
