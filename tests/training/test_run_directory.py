"""The run directory: what is written, what is refused, what is never lost."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from minimal_config import TINY

from megatron_patch.checkpoint import last_checkpoint
from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.training import resume_rules, run_directory


def start(loaded, *, trained: bool = True):
    """One attempt: opens, leaves a trace of training, closes; returns (directory, problems)."""
    directory, problems = open_run(loaded, {"torch": "2"})
    if directory is not None:
        if trained:
            (directory.path / "metrics.csv").touch()
            directory.settle()
        directory.close()
    return directory, problems


def open_run(loaded, report):
    """(directory, no problems), or (None, what stands against it)."""
    try:
        return run_directory.open_run(loaded, report), []
    except ConfigError as error:
        return None, error.problems


def test_a_new_run_says_what_it_is(tiny):
    directory, problems = start(tiny("optimizer.lr=0.01"))
    assert not problems and not directory.finished
    saved = yaml.safe_load((directory.path / "config.yaml").read_text())
    assert saved["optimizer"]["lr"] == 0.01 and saved["training"]["train_steps"] == 20
    assert "optimizer.lr" in (directory.path / "origins.yaml").read_text()
    (attempt,) = json.loads((directory.path / "environment.json").read_text())["attempts"]
    assert attempt["torch"] == "2" and attempt["utc"].endswith("Z")


def test_every_attempt_is_recorded(tiny):
    start(tiny())
    directory, problems = start(tiny())
    assert not problems
    assert len(json.loads((directory.path / "environment.json").read_text())["attempts"]) == 2


def test_changes_that_do_not_alter_the_training_are_allowed_and_said(tiny):
    start(tiny())
    directory, problems = start(tiny("training.train_steps=40", "logging.interval=1"))
    assert not problems
    notes = "\n".join(directory.notes)
    assert "training.train_steps: 20 -> 40" in notes and "logging.interval: 10 -> 1" in notes
    before = yaml.safe_load((directory.path / "config.attempt_1.yaml").read_text())
    assert before["training"]["train_steps"] == 20


def test_what_is_refused_later_leaves_no_record(tiny):
    """By the data or the checkpoint: the command of before goes on as before."""
    first, _ = start(tiny())
    records = [first.path / "config.yaml", first.path / "origins.yaml"]
    before = [path.read_text() for path in records]
    directory, problems = open_run(tiny("data.split=[0.5,0.5,0.0]"), {})
    assert not problems and [path.read_text() for path in records] != before
    directory.close()
    assert [path.read_text() for path in records] == before
    last_checkpoint.remember(first.path, first.path / "x", step=3)
    assert resume_rules.keep_recorded(tiny()).dump_yaml() == before[0]
    start(tiny("training.train_steps=40"))
    assert "train_steps: 40" in records[0].read_text()
    assert "  split: [0.99, 0.01, 0.0]\n" in records[0].read_text()


def test_another_configuration_is_refused_and_nothing_is_touched(tiny):
    first, _ = start(tiny())
    before = {p.name: p.read_bytes() for p in first.path.iterdir() if p.is_file()}
    changed = ("model.num_layers=4", "optimizer.beta2=0.5", "run_dir=runs/tiny")
    directory, problems = start(tiny(*changed))
    assert directory is None
    assert [p.path for p in problems] == ["model.num_layers", "optimizer.beta2"]
    assert "started with 2" in problems[0].message and "run_dir" in problems[0].message
    assert before == {p.name: p.read_bytes() for p in first.path.iterdir() if p.is_file()}


def test_a_directory_in_which_nothing_was_trained_may_be_taken_over(tiny):
    start(tiny(), trained=False)
    _, problems = start(tiny("model.num_layers=4"))
    assert not problems


def test_resume_never_refuses_an_existing_run(tiny):
    start(tiny())
    directory, problems = start(tiny("checkpoint.resume=never"))
    assert directory is None and problems[0].path == "checkpoint.resume"


def test_two_processes_cannot_share_a_directory(tiny):
    """Without the lock both would append to metrics.csv and race for checkpoint names."""
    first, _ = open_run(tiny(), {})
    second, problems = open_run(tiny(), {})
    assert second is None and "another process" in problems[0].message
    first.close()
    third, problems = open_run(tiny(), {})
    assert not problems
    third.close()


def test_a_launched_run_waits_for_the_lock_of_a_lost_node(tiny, monkeypatch, caplog):
    monkeypatch.setenv("MEGATRON_PATCH_ATTEMPT_DIR", "logs/1")
    monkeypatch.setattr(run_directory, "LOCK_POLL_SECONDS", 0.01)
    first, _ = open_run(tiny(), {})
    with monkeypatch.context() as patch:
        patch.setattr(
            run_directory.time, "sleep", lambda seconds: first.close()
        )  # the lease has run out
        second, problems = open_run(tiny(), {})
    assert not problems and "waiting for the lock" in caplog.text
    monkeypatch.setattr(run_directory, "LOCK_PATIENCE_SECONDS", 0.05)
    third, problems = open_run(tiny(), {})
    second.close()
    assert third is None and ConfigError(problems).exit_code == 1  # tried again, within the budget


@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, 2), (errno.ESTALE, 1)])
def test_a_file_system_that_does_not_answer_is_worth_a_retry(tiny, monkeypatch, number, code):
    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number), "run/.lock")

    monkeypatch.setattr(run_directory.RunDirectory, "lock", refuse)
    directory, problems = open_run(tiny(), {})
    assert directory is None and problems[0].path == "run_dir"
    assert f"cannot be used ({os.strerror(number)}: run/.lock)" in problems[0].message
    assert ConfigError(problems).exit_code == code
    assert ConfigError([*problems, Problem("name", "wrong, too")]).exit_code == 2
    assert ConfigError([]).exit_code == 2


def test_finished_is_final_until_the_run_is_made_longer(tiny):
    directory, _ = start(tiny())
    run_directory.mark_finished(directory.path, step=20, consumed_tokens=1)
    again, _ = start(tiny())
    assert again.finished
    longer, problems = start(tiny("training.train_steps=30"))
    assert not problems and not longer.finished
    assert not (longer.path / run_directory.FINISHED).exists()
    assert (longer.path / "FINISHED.step_20").exists()


@pytest.mark.parametrize("data", [b"", b"\n", b"\0" * 40, b'{"st', b'{"step": 20, "consu', b"{"])
def test_a_torn_marker_is_none(tiny, data):
    """The checkpoint tells how far the run is; the marker is kept aside."""
    directory, _ = start(tiny())
    (directory.path / run_directory.FINISHED).write_bytes(data)
    again, problems = start(tiny())
    assert not problems and not again.finished and (again.path / "FINISHED.step_0").exists()


@pytest.mark.parametrize(
    "text",
    ["stop\n", "20", '{"step": "20"}', '{"step": -1}', '{"step": 2.5}', '{"steps": 20}', "[]",
     "{step: 20}", '{"step": true}', "step_00000020.attempt-1", '{"step": 20} # done'],
)  # fmt: skip
def test_an_edited_marker_is_for_a_person(tiny, text):
    """Taken for a torn one, the run that somebody meant to end would train on."""
    directory, _ = start(tiny())
    marker = directory.path / run_directory.FINISHED
    marker.write_text(text)
    for _ in range(2):
        again, (problem,) = start(tiny())
        assert again is None and problem.path == "run_dir" and not problem.may_pass
        assert f"holds {text.strip()!r}" in problem.message and "delete the file" in problem.message
    assert marker.read_text() == text


def test_a_damaged_environment_file_is_kept_aside(tiny):
    directory, _ = start(tiny())
    (directory.path / "environment.json").write_text("{")
    directory, problems = start(tiny())
    assert not problems
    assert list(directory.path.glob("environment.unreadable_*.json"))


def test_a_run_directory_that_cannot_be_made_is_a_configuration_problem(tiny, tmp_path):
    (tmp_path / "file").touch()
    directory, problems = start(tiny("run_dir=file/run"))
    assert directory is None and problems[0].path == "run_dir"


@pytest.mark.parametrize("content", [b"\x00\xff: [{", b"", b" \n# nothing\n", b"{}", b"- a", b"x"])
def test_a_damaged_record_of_the_settings_is_refused_by_name(tiny, content):
    directory, _ = start(tiny())
    (directory.path / "config.yaml").write_bytes(content)
    again, (problem,) = start(tiny())
    assert again is None and "config.yaml says what the run was started with" in problem.message
    assert "is damaged" in problem.message and "or delete it if you are sure" in problem.message


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train.log", "directory"),
        ("metrics.csv", "directory"),
        ("data.sha256", "directory"),
        ("skipped_batches.json", "directory"),
        ("switched.json", "directory"),
        ("stability", "file"),
        ("tensorboard", "file"),
        ("stability/records.bin", "directory"),
        ("stability/meta.json", "directory"),
    ],
)
def test_what_is_opened_later_is_looked_at_first(tiny, name, kind):
    """A person has to act: code 2, and not a fault in the middle, which is tried again."""
    directory, _ = start(tiny())
    place = directory.path / name
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    place.mkdir() if kind == "directory" else place.touch()
    before = sorted(p.name for p in directory.path.iterdir())
    again, (problem,) = start(tiny())
    assert again is None and ConfigError([problem]).exit_code == 2
    expected = "Is a directory" if kind == "directory" else "Not a directory"
    assert problem.message == f"runs/tiny: cannot be used ({expected}: runs/tiny/{name})"
    assert sorted(p.name for p in directory.path.iterdir()) == before


def test_a_table_that_may_not_be_written_is_refused(tiny, monkeypatch):
    start(tiny())
    real = os.open

    def refuse(path, flags, *args, **options):
        if Path(path).name == "metrics.csv" and flags & os.O_WRONLY:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), os.fspath(path))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    again, (problem,) = start(tiny(), trained=False)
    assert again is None and "Operation not permitted: runs/tiny/metrics.csv" in problem.message


def test_what_a_finished_run_does_not_open_is_not_looked_at(tiny):
    directory, _ = start(tiny())
    run_directory.mark_finished(directory.path, step=20, consumed_tokens=1)
    (directory.path / "data.sha256").mkdir()
    again, problems = start(tiny())
    assert not problems and again.finished


def test_other_software_is_said(tiny):
    start(tiny())
    directory, _ = open_run(tiny(), {"torch": "2.0.1"})
    directory.close()
    (note,) = [n for n in directory.notes if n.startswith("software changed")]
    assert "torch: 2 -> 2.0.1" in note
    directory, _ = open_run(tiny(), {"torch": "2.0.1"})
    directory.close()
    assert not [n for n in directory.notes if n.startswith("software changed")]


def test_a_key_that_came_with_an_update_does_not_end_a_run(tiny):
    """Its default is what the run did before; set by hand it is a change like any other."""
    for overrides, refused in (
        ([], []),
        (["optimizer.weight_decay=0.2"], ["optimizer.weight_decay"]),
    ):
        directory, problems = start(tiny())
        assert not problems
        saved = directory.path / "config.yaml"
        lines = saved.read_text().splitlines()
        saved.write_text("\n".join(x for x in lines if not x.strip().startswith("weight_decay:")))
        _, problems = start(tiny(*overrides))
        assert [p.path for p in problems] == refused


RANK = """
import sys

import torch
import torch.distributed as dist

from megatron_patch.config import load
from megatron_patch.parallel.setup import Layout
from megatron_patch.schema.problem import ConfigError
from megatron_patch.training import resume_rules, run_directory

run_directory.PATIENCE_S = float(sys.argv[4])
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
layout = Layout(rank, 2, 0, torch.device("cpu"), *(0, 1) * 5)
try:
    loaded = load("tiny.yaml", ("run_dir=" + sys.argv[3]).split())
    directory = run_directory.take(loaded, layout)
    print("taken" if directory._locks else "given")
except ConfigError as error:
    print(error)
"""


def play(folder: Path, *directories: str, patience: float) -> list[str]:
    """What each of two nodes says, by the run directory it sees."""
    (folder / "tiny.yaml").write_text(TINY)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder / "store"), path, str(patience)],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate(directories)
    ]
    return [rank.communicate(timeout=300)[0] for rank in ranks]


@pytest.mark.multiprocess
def test_one_directory_is_taken(tmp_path):
    assert play(tmp_path, "run", "run", patience=120) == ["taken\n", "given\n"]
    assert not list((tmp_path / "run").glob(run_directory.TOKEN + "*"))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("run_dir", "run", "other"),
        ("checkpoint.directory", "run checkpoint.directory=a", "run checkpoint.directory=other"),
    ],
)
def test_two_directories_are_refused_on_both_nodes(tmp_path, key, one, other):
    """Also where a node lacks the file system of the checkpoints, and has that of the run."""
    (tmp_path / "other").mkdir()
    said = play(tmp_path, one, other, patience=0.5)
    assert said[0] == said[1] and f"{key}: is not one directory on all nodes" in said[0]
    assert "(rank 1): " + str(tmp_path / "other") in said[0]
    assert not list(tmp_path.glob("*/" + run_directory.TOKEN + "*"))


def test_a_file_that_comes_late_is_seen(tmp_path, monkeypatch):
    path = tmp_path / "run"
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            path.mkdir()
            (path / run_directory.TOKEN).touch()

    monkeypatch.setattr(run_directory.time, "sleep", nap)
    assert run_directory.sees_token(path, run_directory.TOKEN) and len(naps) == 3
