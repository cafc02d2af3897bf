"""The cluster of the slurm tests: started once, skipped with a reason where it cannot be."""

import os
import re
import tempfile
from pathlib import Path

import one_machine
import pytest
from slurm_run import Run


@pytest.fixture(scope="session")
def slurm():
    """A running cluster."""
    reason = one_machine.missing()
    if reason is not None:
        if os.environ.get("REQUIRE_SLURM"):
            pytest.fail(f"REQUIRE_SLURM is set, but this machine {reason}")
        pytest.skip(f"no Slurm here: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        one_machine.OneMachine(Path(folder)) as cluster,
    ):
        yield cluster


@pytest.fixture
def new_run(slurm, tmp_path, request):
    """A run named after the test."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", request.node.name).strip("_")
    run = Run(slurm, tmp_path, name)
    yield run
    if run.job:
        slurm.run("scancel", run.job, check=False)
