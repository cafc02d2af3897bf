"""Hang detection: limits, who is named, and processes that really are stuck."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.faults import hang, stacks
from megatron_patch.faults.hang import HangWatcher, Limits, summarize
from megatron_patch.faults.stacks import Witness
from megatron_patch.runtime.heartbeat import Beat, Pulse

# One rank without torch: it works on step 7 and gets stuck in the way the fourth argument names.
# It starts to count when it is told all ranks' process ids, and says "ready" where it gets stuck.
RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
from megatron_patch.faults import hang, stacks
from megatron_patch.faults.hang import HangWatcher, Limits
from megatron_patch.runtime.heartbeat import PULSE

rank, world, folder, how = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
limit, hang.GRACE_SECONDS = map(float, sys.argv[5:])
def wait_for_the_others(): time.sleep(900)
def endless_loop():
    while True: pass
def works():
    def deep(n): return n and [deep(n - 1) for _ in range(2)]
    while True: deep(8)
def blocked_in_c(): ctypes.CDLL(None).sleep(900)
def holds_the_lock():  # over signals too: a second lock of a mutex waits for ever
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2): ctypes.PyDLL(None).pthread_mutex_lock(mutex)
def stops(): os.kill(os.getpid(), signal.SIGSTOP)
def loses_the_others():  # as a collective does, when they leave before this rank has
    while not list(folder.glob("alarm-*")): time.sleep(0.01)
    try:
        raise ConnectionError("closed by peer")
    except ConnectionError as error:
        watcher.await_report(error)
        watcher.stop()
        raise

PULSE.reset()
stacks.listen()
print("here", flush=True)
hosts, pids = (sys.stdin.readline().split() for _ in range(2))
watcher = HangWatcher(Limits(step=limit, startup=900, pause=900), folder, token="t", rank=rank,
                      hosts=hosts, pids=list(map(int, pids)))
watcher.start()
for step in (5, 6):
    PULSE.step(step); PULSE.stepped()
PULSE.step(7)
PULSE.enter("forward")
if how in ("wait_for_the_others", "stops"):
    PULSE.enter("optimizer")
print("ready", flush=True)
globals()[how]()
"""


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """Kill what a failed test leaves."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


STARTED: list[subprocess.Popen[str]] = []


def ranks(
    folder: Path, *how: str, limit: float = 2, grace: float = 60, hosts: str = ""
) -> list[subprocess.Popen[str]]:
    """Start one process a word, and wait until all are where they get stuck.

    Seconds: ``limit`` of the phase, ``grace`` for all to write (waited for only if one does not).
    ``hosts``: names of their nodes; a node for each, if empty.
    """
    started = []
    for rank, word in enumerate(how):
        words = [rank, len(how), folder / "hangs", word, limit, grace]
        with (folder / f"err.{rank}").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
        started.append(process)
        STARTED.append(process)
    assert [p.stdout.readline() for p in started if p.stdout] == ["here\n"] * len(started)
    for process in started:
        assert process.stdin is not None
        print(hosts or " ".join(f"node{r}" for r in range(len(how))), file=process.stdin)
        print(*[p.pid for p in started], file=process.stdin, flush=True)
    assert [p.stdout.readline() for p in started if p.stdout] == ["ready\n"] * len(started)
    return started


def ended(process: subprocess.Popen[str]) -> int:
    """Exit code."""
    return process.wait(600)


def errors(folder: Path, rank: int) -> str:
    """What a rank wrote to standard error so far."""
    return (folder / f"err.{rank}").read_text()


def summary(folder: Path) -> tuple[Path, str]:
    (file,) = (folder / "hangs").glob("*/summary.txt")
    return file.parent, file.read_text()


def witness(rank: int, **changes: Any) -> Witness:
    values = {"host": f"n{rank}", "pid": 1, "step": 7, "phase": "optimizer", "seconds": 50.0,
              "at": "a.py:1 f", "collective": ""}  # fmt: skip
    return Witness(rank=rank, **(values | changes))


# -------------------------------------------------------------------------------- real processes


@pytest.mark.parametrize("how", ["endless_loop", "blocked_in_c"])
def test_every_rank_writes_its_stacks_and_the_guilty_one_is_named(tmp_path, how):
    started = ranks(tmp_path, "wait_for_the_others", how, "wait_for_the_others")
    assert [ended(p) for p in started] == [hang.EXIT_CODE] * 3
    folder, text = summary(tmp_path)
    assert text.startswith("hang at step 7: rank 1 (node1) is behind: step 7, phase forward"), text
    for rank in range(3):
        found = (folder / f"rank_{rank:05d}.txt").read_text()
        assert (how if rank == 1 else "wait_for_the_others") in found
    assert sum("stacks of all ranks" in errors(tmp_path, rank) for rank in range(3)) == 1
    entries = [json.loads(x) for x in (tmp_path / "crashes.jsonl").read_text().splitlines()]
    assert sorted(e["rank"] for e in entries) == [0, 1, 2]
    assert {(e["step"], e["exit_code"]) for e in entries} == {(7, hang.EXIT_CODE)}


def test_a_rank_that_loses_the_others_to_a_hang_ends_as_they_do(tmp_path):
    started = ranks(tmp_path, "loses_the_others", "endless_loop")
    assert [ended(p) for p in started] == [hang.EXIT_CODE] * 2
    assert "ConnectionError: closed by peer" in errors(tmp_path, 0)
    entries = [json.loads(x) for x in (tmp_path / "crashes.jsonl").read_text().splitlines()]
    assert {(e["rank"], e["exit_code"]) for e in entries} == {(0, 6), (1, 6)}


def test_an_error_without_a_hang_is_left_to_the_caller(tmp_path, monkeypatch):
    watcher = HangWatcher(Limits(9, 9, 9), tmp_path / "hangs", token="t", rank=0, hosts=["n"],
                          pids=[1])  # fmt: skip
    watcher.start()
    with monkeypatch.context() as patched:
        patched.setattr(watcher._thread, "join", lambda *seconds: pytest.fail("it waits"))
        watcher.await_report(ConnectionError("closed by peer"))
    watcher.stop()


def test_a_stopped_process_is_named_as_missing(tmp_path):
    first, _ = ranks(tmp_path, "wait_for_the_others", "stops", grace=3)
    assert ended(first) == hang.EXIT_CODE
    _, text = summary(tmp_path)
    assert text.startswith("hang at step 7: rank 1 (node1) missing: no stacks within 3 s")
    assert "missing" in text.splitlines()[-1]


def test_a_thread_that_holds_the_interpreter_lock_is_shown_in_its_log(tmp_path):
    """It is named as missing; another rank of its node has it print its stacks."""
    first, _, other = ranks(
        tmp_path, "wait_for_the_others", "holds_the_lock", "wait_for_the_others",
        grace=3, hosts="a a b",
    )  # fmt: skip
    assert [ended(first), ended(other)] == [hang.EXIT_CODE] * 2
    end = time.monotonic() + 600
    while "holds_the_lock" not in (err := errors(tmp_path, 1)) and time.monotonic() < end:
        time.sleep(0.1)
    assert "Current thread 0x" in err
    assert "rank 1 (a) missing" in summary(tmp_path)[1]


def test_only_a_process_that_listens_is_called():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert not stacks.call(other.pid)
        assert other.poll() is None
        other.kill()
    assert not stacks.call(other.pid)  # it has ended


@pytest.mark.parametrize("how", ["wait_for_the_others", "works"])
def test_a_job_that_was_suspended_goes_on(tmp_path, how):
    """Stopped and continued as a whole, it is not a hang: the watcher did not run either.

    And nobody walks the stacks of its threads, which run again: that ended jobs by SIGSEGV.
    """
    (process,) = ranks(tmp_path, how, limit=4)
    time.sleep(1)  # the watcher looks every 0.4 s
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(8)  # longer than the limit
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(2)
    assert process.poll() is None and not (tmp_path / "hangs").exists()
    assert errors(tmp_path, 0) == ""


def test_an_unwritable_directory_still_ends_the_rank(tmp_path):
    (tmp_path / "hangs").write_text("a file in the way")
    (process,) = ranks(tmp_path, "wait_for_the_others")
    assert ended(process) == hang.EXIT_CODE
    err = errors(tmp_path, 0)
    assert "no report:" in err and "wait_for_the_others" in err


def test_a_log_that_cannot_be_written_either_still_ends_the_rank(tmp_path):
    """Both are on one disk, and that is full."""
    (tmp_path / "hangs").write_text("a file in the way")
    (tmp_path / "err.0").symlink_to("/dev/full")
    (process,) = ranks(tmp_path, "wait_for_the_others")
    assert process.wait(60) == hang.EXIT_CODE


# ----------------------------------------------------------------------------------------- rules


def test_limits():
    limits, pulse = Limits(step=45, startup=1800, pause=900), Pulse()
    assert limits.of(pulse) == 1800
    pulse.step(1)
    assert limits.of(pulse) == 1800  # the first step compiles
    pulse.stepped()
    pulse.step(2)
    assert limits.of(pulse) == 45
    pulse.longest = 100.0  # the first step: nothing else is known of this run's steps
    assert limits.of(pulse) == 400
    pulse.enter("save")
    assert limits.of(pulse) == 900
    pulse.enter("forward")
    pulse.longest = 30.0
    assert limits.of(pulse) == 120  # long steps raise the limit


def test_the_longest_step_leaves_saves_and_the_first_step_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pulse = Pulse()
    longest = []
    for step, (work, save) in enumerate([(100, 0), (2, 50), (3, 0), (1, 0)], 1):
        pulse.step(step)
        now[0] += work
        pulse.enter("save")
        now[0] += save
        pulse.stepped()
        longest.append(pulse.longest)
    assert longest == [100, 2, 3, 3]
    assert pulse.seconds["save"] == 50 and pulse.now.step == 4


WAITS = {"collective": "all_reduce", "seconds": 60.0}
SUMMARIES = {
    "the rank that came least far": (
        {0: {}, 1: {}, 2: {"phase": "data", "at": "loader.py:9 read"}},
        "hang at step 7: rank 2 (n2) is behind: step 7, phase data for 50 s, at loader.py:9 read"),
    "a rank that waits in no collective": (
        {0: WAITS, 1: {"seconds": 51.0}, 2: WAITS}, "rank 1 (n1) is behind"),
    # Pipeline stages are in different phases by design.
    "a working stage before one that waits for it": (
        {0: {"phase": "backward", "at": "attention.py:9 backward"},
         1: {"phase": "forward", "collective": "recv_forward"}}, "rank 0 (n0) is behind"),
    "all alike": (
        {r: {"seconds": 50.0 + r} for r in range(3)},
        "all ranks are at the same place, compare their stacks"),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMMARIES)
def test_whom_a_summary_names(name):
    ranks, words = SUMMARIES[name]
    found = {rank: witness(rank, **changes) for rank, changes in ranks.items()}
    first = summarize(found, [f"n{r}" for r in found], finder=found[0], limit=45).splitlines()[0]
    assert words in first and ("same place" in first) == (name == "all alike")


def test_summary_lists_at_most_sixteen_missing_ranks():
    text = summarize({0: witness(0)}, [f"n{r}" for r in range(100)], finder=witness(0), limit=45)
    assert "15 (n15), 16 (n16) and 83 more missing" in text.splitlines()[0]


def test_a_beat_is_excused_only_for_its_own_pause(tmp_path):
    pulse, left = Pulse(), []
    pulse.step(1)
    pulse.stepped()
    watcher = HangWatcher(Limits(5, 5, 5), tmp_path / "hangs", token="t", rank=0, hosts=["n"],
                          pids=[1], pulse=pulse, leave=left.append)  # fmt: skip
    now = pulse.now.since
    watcher._look(now + 100, gap=99.0)
    assert not left
    watcher._look(now + 103.5)
    assert not left
    pulse.now = Beat(2, "forward", now + 104)
    watcher._look(now + 110)
    assert left == [hang.EXIT_CODE]


def test_a_file_that_is_no_witness_is_ignored(tmp_path):
    (tmp_path / "rank_00000.txt").write_text("torn")
    assert stacks.read(tmp_path / "rank_00000.txt") is None
    assert stacks.read(tmp_path / "missing") is None


def test_recorder_names_are_set_unless_they_are(tmp_path, monkeypatch):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "mine")
    hang.record_collectives(tmp_path)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "mine"
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name)
