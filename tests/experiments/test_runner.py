"""The queue: seats, deadlines, explosions, exit codes, resuming; with stand-ins for the trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_patch.cli import app
from megatron_patch.experiments import results, runner
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.runner import Runner
from megatron_patch.experiments.store import Store

Go = Callable[..., tuple[Store, list[str]]]


def states(store: Store) -> dict[str, str]:
    return {name: state.state for name, state in store.states.items()}


def single_pass(protocol: Path) -> None:
    """Let a GPU take its whole share of a batch at once, so that any number of them fits."""
    protocol.write_text(protocol.read_text() + "single_pass: true\n")


def test_runs_share_the_gpus_and_end_finished(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    store, said = go(protocol, tmp_path / "out", devices=[0, 1])
    assert states(store) == {"a-s1": "finished", "b-s1": "finished", "a-s2": "finished"}
    devices = {r.id: (store.run_dir(r) / "device").read_text() for r in store.experiment.runs}
    assert {devices["a-s1"], devices["b-s1"]} == {"0\n", "1\n"}
    assert said[0].startswith("start a-s1") and said[1].startswith("start b-s1")
    # Nothing is left to do, and nothing is done.
    again, said = go(protocol, tmp_path / "out")
    assert said == [] and states(again) == states(store)


def test_seats_of_runs_with_several_gpus(protocol: Path, tmp_path: Path) -> None:
    """Different GPUs for one run; the emptiest first; none taken when they do not suffice."""
    protocol.write_text(
        protocol.read_text().replace("seeds: [1, 2]", "seeds: [1, 2]\nruns_per_gpu: 2")
    )
    store = Store(tmp_path / "out", read(protocol))
    one = Runner(store, [0, 0, 1, 1], None, 100)
    free = [0, 0, 1, 1]
    assert [one._seats(free, 1) for _ in range(5)] == [[0], [1], [0], [1], []]
    free = [0, 0, 1, 1, 2]
    assert one._seats(free, 2) == [0, 1] and free == [0, 1, 2]
    free = [1, 1]
    assert one._seats(free, 2) == [] and free == [1, 1]
    store.close()


def test_a_run_goes_on_with_gpus_that_have_become_idle(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch, go: Go
) -> None:
    """Stopped with a checkpoint and started on both GPUs: every step once, both attempts told."""
    monkeypatch.setattr(runner, "WORTH_SECONDS", 0.0)
    single_pass(protocol)
    quick |= {"pause": "0.03", "b-s1": "exit 3"}
    only = {"a-s1", "b-s1"}
    store, said = go(protocol, tmp_path / "out", devices=[0, 1], only=only, widen=True)
    assert states(store)["a-s1"] == "finished" and states(store)["b-s1"] == "non-finite"
    run = store.experiment.by_id("a-s1")
    assert (store.run_dir(run) / "device").read_text() == "0\n0,1\n"
    assert [a["gpus"] for a in store.states["a-s1"].attempts] == [1, 2]
    assert [int(r["step"]) for r in store.rows(run)] == list(range(1, 101))
    assert "a-s1 is stopped, to go on with 2 GPUs, not 1" in said


def test_a_run_that_fails_on_more_gpus_goes_on_with_its_own(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch, go: Go
) -> None:
    monkeypatch.setattr(runner, "WORTH_SECONDS", 0.0)
    single_pass(protocol)
    quick |= {"pause": "0.03", "a-s1": "alone", "b-s1": "exit 3"}
    only = {"a-s1", "b-s1"}
    store, said = go(protocol, tmp_path / "out", devices=[0, 1], only=only, widen=True)
    assert [a["gpus"] for a in store.states["a-s1"].attempts] == [1, 2, 1]
    assert states(store)["a-s1"] == "finished"
    assert "a-s1 goes on with 1 GPU(s), as it would have without --widen" in said


@pytest.mark.parametrize(("widen", "worth"), [(False, 0.0), (True, 1e6)])
def test_a_run_is_not_stopped_for_idle_gpus(
    protocol: Path,
    tmp_path: Path,
    quick: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    go: Go,
    widen: bool,
    worth: float,
) -> None:
    """Unless that was asked for and is worth it."""
    monkeypatch.setattr(runner, "WORTH_SECONDS", worth)
    single_pass(protocol)
    quick |= {"pause": "0.01", "b-s1": "exit 3"}
    only = {"a-s1", "b-s1"}
    store, _ = go(protocol, tmp_path / "out", devices=[0, 1], only=only, widen=widen)
    assert [a["gpus"] for a in store.states["a-s1"].attempts] == [1]


def test_waiting_runs_share_the_idle_gpus(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch, go: Go
) -> None:
    """Four GPUs, three runs of one: two have one each, and the last one what is left."""
    monkeypatch.setattr(runner, "WORTH_SECONDS", 1e6)
    single_pass(protocol)
    quick["pause"] = "0.02"
    store, _ = go(protocol, tmp_path / "out", devices=[0, 1, 2, 3], widen=True)
    gpus = {name: state.attempts[0]["gpus"] for name, state in store.states.items()}
    assert gpus == {"a-s1": 1, "b-s1": 1, "a-s2": 2}


def test_the_batch_is_cut_for_as_many_gpus_as_a_run_has(protocol: Path, tmp_path: Path) -> None:
    """By single_pass a GPU's whole share, else passes of the size configured."""
    run = read(protocol).runs[0]
    whole, size = run.batch, run.micro_batch
    assert size is not None and run.on(2) is run
    assert run.fits(whole // size) and not run.fits(whole // size + 1)
    single_pass(protocol)
    run = read(protocol).runs[0]
    assert run.micro_batch is None and run.fits(whole) and not run.fits(2 * whole)
    for gpus in (1, 2):
        (key,) = (t for t in run.on(gpus).overrides if t.startswith("training.micro_batch_size="))
        assert key == f"training.micro_batch_size={whole // gpus}"
    assert [run.widest(1, most) for most in (1, 2, 3)] == [1, 2, 2]
    chosen = read(protocol, ["training.micro_batch_size=1"]).runs[0]
    assert chosen.micro_batch == 1 and chosen.on(2) is chosen


def test_widening_is_refused_where_there_is_nothing_to_widen(
    protocol: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    command = ["experiment", "stability", "--config", str(protocol), "--widen", "--dry-run"]
    assert app.run([*command, "--out", str(tmp_path / "out")]) == 2
    assert "these run on the CPU: leave it out" in capsys.readouterr().err


def test_steps_end_an_invocation_early_and_the_next_goes_on(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    store, _ = go(protocol, tmp_path / "out", steps=30)
    assert set(states(store).values()) == {"paused"}
    assert store.states["a-s1"].reason == "reached --steps 30"
    _, said = go(protocol, tmp_path / "out", steps=30)
    assert said == []
    store, said = go(protocol, tmp_path / "out")
    assert "from its checkpoint (logged to step 30)" in said[0]
    assert set(states(store).values()) == {"finished"}
    steps = [int(r["step"]) for r in store.rows(store.experiment.runs[0])]
    assert steps == list(range(1, 101))
    assert [a["to_step"] for a in store.states["a-s1"].attempts] == [30, 100]


def test_a_deadline_stops_gracefully_and_starts_nothing_more(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    quick["pause"] = "0.1"  # 10 s a run, were there no limit
    store, said = go(protocol, tmp_path / "out", seconds=3.0)
    assert states(store) == {"a-s1": "paused", "b-s1": "waiting", "a-s2": "waiting"}
    assert any("out of time: 2 run(s)" in line for line in said)
    quick["pause"] = "0.001"
    store, _ = go(protocol, tmp_path / "out")
    assert set(states(store).values()) == {"finished"}


def test_records_that_are_shorter_than_the_run_was(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """What is left of them is no finished run that never had a large gradient."""
    store, _ = go(protocol, tmp_path / "out")
    table = store.run_dir(store.experiment.by_id("a-s1")) / "metrics.csv"
    rows = table.read_bytes().splitlines(keepends=True)
    table.write_bytes(b"".join(rows[:41]) + b"41,4.\xff")
    (store.run_dir(store.experiment.by_id("b-s1")) / "metrics.csv").write_bytes(b"")
    store, _ = go(protocol, tmp_path / "out", steps=1)
    found = results.collect(store, {r.id: store.rows(r) for r in store.experiment.runs})
    text = results.markdown(found)
    line = next(x for x in text.splitlines() if x.startswith("| a | 1 |"))
    assert line.startswith(
        "| a | 1 | finished, records incomplete | 0 | 40 | not by 40 | not by 40 |"
    )
    assert "| b | 1 | finished, records incomplete | - | - |" in text
    assert "figures are of what is left of them: a-s1 at 40 of 100, b-s1 at 0 of 100." in text
    assert "| a | 1 | 4.0000" in text, "the spread is that of the other seed"
    assert "incomplete" not in {r["run"]: r for r in found["runs"]}["a-s2"]


def test_a_run_saves_within_the_time_that_is_kept_for_it(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """By its own clock, which starts when its libraries are loaded, it would save too late."""
    protocol.write_text(protocol.read_text().replace("save_seconds: 0", "save_seconds: 7"))
    quick["pause"] = "0.2"  # 20 s a run
    store, said = go(protocol, tmp_path / "out", seconds=10.0, only={"a-s1"})
    state = store.states["a-s1"]
    assert (state.state, state.reason) == ("paused", "saved and stopped"), said
    assert state.attempts[0]["seconds"] < 9.0 and state.attempts[0]["to_step"] > 0


def test_a_save_is_given_the_time_that_is_kept_for_it(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch, go: Go
) -> None:
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.3)
    protocol.write_text(protocol.read_text().replace("save_seconds: 0", "save_seconds: 1.5"))
    quick |= {"pause": "0.1", "a-s1": "deaf"}
    _, said = go(protocol, tmp_path / "out", seconds=3.0, only={"a-s1"})
    assert "a-s1 did not stop in 1.5 s and is killed" in said


def test_a_process_that_does_not_listen_is_killed(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch, go: Go
) -> None:
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.3)
    quick |= {"pause": "0.1", "a-s1": "deaf"}
    store, _ = go(protocol, tmp_path / "out", seconds=2.0, only={"a"})
    assert states(store)["a-s1"] == "waiting"
    assert store.states["a-s1"].reason == "ended before it could save"
    store, said = go(protocol, tmp_path / "out", only={"a-s1"}, steps=1)
    assert "steps are repeated: there is no checkpoint" in said[0]


def test_a_run_that_is_killed_leaves_no_rank_behind(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch, go: Go
) -> None:
    """A signal to torchrun's group does not reach its ranks: they trained on for 6,000 steps."""
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.3)
    quick |= {"pause": "0.1", "a-s1": "deaf ranks"}
    store, said = go(protocol, tmp_path / "out", seconds=4.0, only={"a-s1"})
    assert any("did not stop in 0.3 s and is killed" in line for line in said)
    rank = int((store.run_dir(store.experiment.runs[0]) / "child").read_text())
    deadline = time.monotonic() + 20  # a killed process is a moment in dying; a living one sleeps
    while _lives(rank):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_exploded_run_is_stopped_is_final_and_is_reported(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch, go: Go
) -> None:
    """It does not waste the time of the others, and the table says when it was."""
    quick |= {"a-s1": "explode", "pause": "0.01"}
    store, _ = go(protocol, tmp_path / "out", only={"a-s1"})
    state = store.states["a-s1"]
    assert state.state == "exploded" and "loss above 5 from step 50" in state.reason
    last = int(store.rows(store.experiment.runs[0])[-1]["step"])
    assert 80 <= last < 10_000
    again, _ = go(protocol, tmp_path / "out", only={"a-s1"})
    assert len(again.states["a-s1"].attempts) == 1
    found = results.collect(again, {r.id: again.rows(r) for r in again.experiment.runs})
    by_run = {entry["run"]: entry for entry in found["runs"]}
    assert by_run["a-s1"]["exploded_at"] == by_run["a-s1"]["first_large_gradient"] == 50
    assert by_run["b-s1"]["state"] == "waiting"
    table = results.markdown(found)
    assert "| a | 1 | exploded |" in table and "Never started: b-s1, a-s2." in table


@pytest.mark.parametrize(
    ("code", "state"),
    [(1, "failed"), (2, "refused"), (3, "non-finite"), (5, "stopped by its guard")],
)
def test_exit_codes(
    protocol: Path, tmp_path: Path, quick: dict[str, str], code: int, state: str, go: Go
) -> None:
    quick["a-s1"] = f"exit {code}"
    store, _ = go(protocol, tmp_path / "out")
    assert states(store) == {"a-s1": state, "b-s1": "finished", "a-s2": "finished"}
    assert "Error: what went wrong" in store.states["a-s1"].reason
    assert store.states["a-s1"].attempts[0]["exit_code"] == code
    assert len(store.states["a-s1"].attempts) == (2 if state == "failed" else 1)


@pytest.mark.parametrize(("script", "code"), [("crash", -signal.SIGSEGV), ("full", 1)])
def test_a_run_that_failed_is_started_again_once(
    protocol: Path, tmp_path: Path, quick: dict[str, str], script: str, code: int, go: Go
) -> None:
    """Its GPU would be idle for the rest of the job; both attempts are on record."""
    quick["a-s1"] = script
    store, said = go(protocol, tmp_path / "out")
    assert states(store)["a-s1"] == "finished"
    assert [a["exit_code"] for a in store.states["a-s1"].attempts] == [code, 0]
    assert sum("is started again, once" in line for line in said) == 1


def test_a_run_that_could_not_be_started_again_has_failed(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch, go: Go
) -> None:
    """Another one had its GPU until the time was over: exit code 0 would hide the failure."""
    monkeypatch.setattr(runner, "AGAIN_SECONDS", 1.0)
    quick |= {"a-s1": "full", "pause": "0.2"}
    store, _ = go(protocol, tmp_path / "out", seconds=4.0, only={"a-s1", "b-s1"})
    state = store.states["a-s1"]
    assert (state.state, len(state.attempts)) == ("failed", 1)
    assert state.reason.startswith("exit code 1: torch.OutOfMemoryError")


def test_gpus_are_kept_for_a_run_that_is_started_again(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch, go: Go
) -> None:
    """Another's process had the memory for a moment, and its GPU was given away for half an hour.

    A run that waits for nothing but time does not wait longer because of that.
    """
    single_pass(protocol)
    monkeypatch.setattr(runner, "AGAIN_SECONDS", 1.0)
    monkeypatch.setattr(runner, "WORTH_SECONDS", 0.0)
    quick |= {"a-s1": "full", "pause": "0.03"}
    store, said = go(protocol, tmp_path / "out", devices=[0, 1], only={"a"}, widen=True)
    assert states(store)["a-s1"] == states(store)["a-s2"] == "finished"
    first = next(i for i, line in enumerate(said) if "is started again, once" in line)
    after = next(line for line in said[first + 1 :] if "is stopped" in line or "start a-s1" in line)
    assert after.startswith("start a-s1 on 0"), said


def test_what_an_earlier_attempt_said_is_no_reason(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """A process that is killed says nothing, and its log has the last words of the one before."""
    quick["a-s1"] = "exit 1"
    store, _ = go(protocol, tmp_path / "out", only={"a-s1"})
    assert store.states["a-s1"].reason == "exit code 1: Error: what went wrong"
    store.states["a-s1"].state = "waiting"
    store.save()
    quick["a-s1"] = "crash"
    _, said = go(protocol, tmp_path / "out", only={"a-s1"})
    assert "a-s1 is failed after step 0: exit code -11: " in said


def test_a_request_that_comes_while_a_run_leaves(protocol: Path, tmp_path: Path) -> None:
    """It had saved and given its handlers back: the signal killed it, and nothing was lost."""
    store = Store(tmp_path / "out", read(protocol))
    run = store.experiment.runs[0]
    folder = store.run_dir(run)
    (folder / "checkpoints" / "step_00000050.attempt-1").mkdir(parents=True)
    rows = "".join(f"{i},4.0,0.3\n" for i in range(1, 51))
    (folder / "metrics.csv").write_text("step,loss,grad_norm\n" + rows)
    one = Runner(store, [0], None, 100)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    item = runner.Active(run, process, [0], 0.0, 0, asked_to_stop=1.0)
    assert one._verdict(item, -signal.SIGUSR1) == ("paused", "saved and stopped")
    with (folder / "metrics.csv").open("a") as out:
        out.write("51,4.0,0.3\n")
    assert one._verdict(item, -signal.SIGUSR1) == ("paused", "ended before it could save")
    (folder / "FINISHED").touch()
    assert one._verdict(item, -signal.SIGUSR1) == ("finished", "")
    store.close()


def test_a_signal_lets_runs_save(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    quick["pause"] = "0.03"

    table = tmp_path / "out" / "runs" / "a-s1" / "metrics.csv"

    def interrupt() -> None:
        while not table.exists() or len(table.read_text().splitlines()) < 5:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    store, said = go(protocol, tmp_path / "out")
    assert states(store) == {"a-s1": "paused", "b-s1": "waiting", "a-s2": "waiting"}
    assert any(line.startswith("stopping") for line in said)
    assert json.loads((tmp_path / "out" / "states.json").read_text())["a-s1"]["state"] == "paused"


def test_a_run_that_cannot_be_started_or_recorded_ends_no_other(
    protocol: Path, tmp_path: Path, quick: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a system without room for a process."""
    store, said = Store(tmp_path / "out", read(protocol)), list[str]()
    (tmp_path / "out" / "logs" / "b-s1.txt").mkdir(parents=True)

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save", full)
    Runner(store, [0, 1], None, 100, set(), said.append).run()
    store.close()
    assert states(store) == {"a-s1": "finished", "b-s1": "waiting", "a-s2": "finished"}
    assert any(line.startswith("b-s1 is not started: [Errno 21]") for line in said)
    assert any("states.json cannot be written: No space left" in line for line in said)


def trains(out: Path) -> bool:
    """Whether a-s1 has made some steps, so that it saves when it is asked to stop."""
    table = out / "runs" / "a-s1" / "metrics.csv"
    return table.exists() and len(table.read_text().splitlines()) > 5


def test_a_request_that_is_sent_again_lets_runs_save_all_the_same(
    protocol: Path, tmp_path: Path, quick: dict[str, str]
) -> None:
    quick["pause"] = "0.03"
    store, said, sent = Store(tmp_path / "out", read(protocol)), list[str](), list[str]()

    def say(line: str) -> None:
        said.append(line)
        if trains(tmp_path / "out") and len(sent) < 2:
            sent.append(line)
            os.kill(os.getpid(), signal.SIGTERM)

    runner.Runner(store, [0], None, 100, {"a-s1"}, say).run()
    store.close()
    assert store.states["a-s1"].reason == "saved and stopped" and len(sent) == 2


def test_a_signal_may_come_while_a_line_is_written(
    protocol: Path, tmp_path: Path, quick: dict[str, str]
) -> None:
    """A stream cannot be written from a handler that interrupts its writing: runs were killed."""
    quick["pause"] = "0.03"
    store, said, sent = Store(tmp_path / "out", read(protocol)), list[str](), list[str]()
    lock = threading.Lock()

    def say(line: str) -> None:
        if not lock.acquire(blocking=False):
            raise RuntimeError("reentrant call")
        try:
            if trains(tmp_path / "out") and not sent:
                sent.append(line)
                os.kill(os.getpid(), signal.SIGTERM)
            said.append(line)
        finally:
            lock.release()

    runner.Runner(store, [0], None, 100, {"a-s1"}, say).run()
    store.close()
    assert states(store)["a-s1"] == "paused"
    assert sum(line.startswith("stopping") for line in said) == 1
