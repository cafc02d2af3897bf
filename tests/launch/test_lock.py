"""Who has the run directory: jobs that start together, and locks of jobs that are gone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

LIB = Path(__file__).resolve().parents[2] / "launch" / "lib.sh"
# Jobs 900 to 999 are gone, others run; SLOW runs before the first answer.
TAKE = """\
set -euo pipefail
source "$LIB"
squeue() {
  eval "${SLOW:-}"; SLOW=
  [[ $* == *--jobs=9[0-9][0-9]\\ * ]] || { echo RUNNING; return 0; }
  echo "slurm_load_jobs error: Invalid job id specified"; return 1
}
take_lock
echo "job $JOB starts"
"""


class Jobs:
    """Jobs that take the lock of one run directory."""

    def __init__(self, folder: Path) -> None:
        self.state = folder

    def start(self, job: int, slow: str = "") -> subprocess.Popen[str]:
        """Start one; ``slow`` delays its squeue."""
        return subprocess.Popen(
            ["bash", "-c", TAKE],
            env={"PATH": "/usr/bin:/bin", "STATE_DIR": str(self.state), "JOB": str(job),
                 "LIB": str(LIB), "SLOW": slow},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, job: int) -> tuple[bool, str]:
        """Whether it starts, and its output."""
        process = self.start(job)
        output, _ = process.communicate(timeout=120)
        return process.returncode == 0 and f"job {job} starts" in output, output

    def write(self, name: str, text: str) -> None:
        """Leave a file beside the lock."""
        (self.state / name).write_text(text)

    def names(self) -> list[str]:
        """What lies there."""
        return sorted(p.name for p in self.state.iterdir())


@pytest.fixture
def jobs(tmp_path):
    """An empty state directory."""
    return Jobs(tmp_path)


def test_the_slower_of_two_does_not_remove_the_others_lock(jobs):
    """Both find that the owner is gone; one of them hears it when the other has the lock."""
    jobs.write("lock", "999\n")
    slow = jobs.start(
        102, 'touch "$STATE_DIR/asked"; until [[ -e $STATE_DIR/go ]]; do sleep 0.05; done'
    )
    while not (jobs.state / "asked").exists():
        assert slow.poll() is None
    started, output = jobs.run(101)
    assert started, output
    jobs.write("go", "")
    output, _ = slow.communicate(timeout=120)
    assert slow.returncode == 1 and "does not start" in output, output
    assert (jobs.state / "lock").read_text() == "101\n"
    assert jobs.names() == ["asked", "go", "lock"]


@pytest.mark.parametrize("before", [None, "999\n", ""])
def test_of_many_at_once_one_starts(jobs, before):
    if before is not None:
        jobs.write("lock", before)
    processes = [jobs.start(job) for job in range(101, 113)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    started = [n for n, process in zip(range(101, 113), processes, strict=True)
               if process.returncode == 0]  # fmt: skip
    assert len(started) == 1, outputs
    assert (jobs.state / "lock").read_text() == f"{started[0]}\n"
    assert jobs.names() == ["lock"]


@pytest.mark.parametrize("text", ["", "\n", "nobody", "1 2", "99x", "$(touch pwned)", "\0"])
def test_a_lock_that_names_no_job_is_left_behind(jobs, text):
    """squeue without a number lists every job of the cluster, and one of them always runs."""
    jobs.write("lock", text)
    started, output = jobs.run(101)
    assert started and "names no job" in output, output
    assert jobs.names() == ["lock"] and (jobs.state / "lock").read_text() == "101\n"


def test_a_successor_that_died_has_one_too(jobs):
    for name, owner in (("lock", 999), ("lock.after.999", 998), ("lock.after.998", 997)):
        jobs.write(name, f"{owner}\n")
    started, output = jobs.run(101)
    assert started, output
    assert jobs.names() == ["lock"] and (jobs.state / "lock").read_text() == "101\n"


def test_a_successor_that_lives_comes_first(jobs):
    jobs.write("lock", "999\n")
    jobs.write("lock.after.999", "101\n")
    started, output = jobs.run(102)
    assert not started and "job 101 (RUNNING) has this run directory" in output
    assert jobs.run(101)[0] and jobs.names() == ["lock"]


def test_the_lock_of_this_job_is_its_own(jobs):
    jobs.write("lock", "101\n")
    assert jobs.run(101)[0] and jobs.names() == ["lock"]


def test_a_directory_that_cannot_be_written_is_named(jobs):
    jobs.state /= "missing"
    started, output = jobs.run(101)
    assert not started and "cannot write into" in output
