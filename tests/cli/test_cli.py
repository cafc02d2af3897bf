"""Commands, their help, their exit codes and who prints what."""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest
from minimal_config import MINIMAL

from megatron_patch import config
from megatron_patch.cli import app

COMMANDS = [
    "train", "launch", "plan", "config", "prepare-data", "checkpoint", "report", "doctor", "probe",
    "preflight",
]  # fmt: skip
MOVED = ["plot", "backends", "experiment"]


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Every parser of the tree."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                found += leaves(inner)
    return found


def test_every_command_exists():
    action = next(
        a for a in app.build_parser()._actions if isinstance(a, argparse._SubParsersAction)
    )
    assert sorted(action.choices) == sorted(COMMANDS + MOVED)
    listed = {choice.dest for choice in action._choices_actions}
    assert listed == set(COMMANDS)


def test_help_is_complete():
    """Every command says what it does, every option what it means."""
    for parser in leaves(app.build_parser()):
        assert parser.description, parser.prog
        assert parser.format_help()
        for action in parser._actions:
            if not isinstance(action, argparse._SubParsersAction):
                assert action.help, (parser.prog, action.dest)


@pytest.mark.parametrize("argv", [[], ["trian"], ["train"], ["train", "--conf", "x"], ["config"]])
def test_wrong_usage_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        app.run(argv)
    assert caught.value.code == 2
    assert "usage: megatron-patch" in capsys.readouterr().err


def test_config_check(run_yaml, capsys):
    assert app.run(["config", "check", str(run_yaml)]) == 0
    first, run_dir, *_ = capsys.readouterr().out.splitlines()
    assert (first, run_dir) == (f"{run_yaml}: ok", f"  run_dir: {Path.cwd()}/runs/demo")
    bad = run_yaml.with_name("bad.yaml")
    bad.write_text(MINIMAL + "modle: {}\n")
    assert app.run(["config", "check", str(bad), str(run_yaml)]) == 2
    captured = capsys.readouterr()
    assert f"{bad}:6:1: modle: unknown key" in captured.err
    assert captured.out.startswith(f"{run_yaml}: ok\n")
    assert app.run(["config", "check", "--config", str(run_yaml), "--set", "optimizer.lr=x"]) == 2


def test_config_show_prints_yaml_that_loads(run_yaml, capsys, tmp_path):
    assert app.run(["config", "show", str(run_yaml), "--set", "optimizer.lr=3e-4"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"lr: 0.0003 +# --set optimizer.lr=3e-4", shown)
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert config.load(again).config == config.load(run_yaml, ["optimizer.lr=3e-4"]).config
    assert app.run(["config", "show", "--no-origins", str(run_yaml)]) == 0
    assert "#" not in capsys.readouterr().out


def test_config_help_and_docs(capsys, tmp_path):
    assert app.run(["config", "help", "optimizer.lr"]) == 0
    assert "Peak learning rate" in capsys.readouterr().out
    assert app.run(["config", "help", "optimizer.lrr"]) == 2
    assert "did you mean" in capsys.readouterr().err
    page = tmp_path / "page.md"
    assert app.run(["config", "docs", "--write", str(page)]) == 0
    assert app.run(["config", "docs"]) == 0
    assert capsys.readouterr().out == page.read_text()


def fake_loop(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> list[object]:
    """Replace the training loop by one that ends in ``outcome``; what it was called with."""
    calls: list[object] = []

    def train(loaded: object) -> int:
        calls.append(loaded)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    import megatron_patch.training as room

    module = types.ModuleType("megatron_patch.training.trainer")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_patch.training.trainer", module)
    monkeypatch.setattr(room, "trainer", module, raising=False)
    return calls


class OurError(ValueError):
    """An error of a room."""


OurError.__module__ = "megatron_patch.somewhere"


class Lost(RuntimeError):
    """An error that names its own exit code."""

    exit_code = 4


Lost.__module__ = "megatron_patch.somewhere"


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(0, 0), (3, 3), (OurError("bad data"), 2), (Lost("gone"), 4), (KeyboardInterrupt(), 130)],
)
def test_exit_codes_of_train(run_yaml, monkeypatch, capsys, outcome, code):
    calls = fake_loop(monkeypatch, outcome)
    assert app.run(["train", "--config", str(run_yaml), "--set", "name=other"]) == code
    (loaded,) = calls
    assert isinstance(loaded, config.Loaded)
    assert loaded.config.name == "other"
    err = capsys.readouterr().err
    if isinstance(outcome, Exception):
        assert err == f"megatron-patch: {outcome}\n"


@pytest.mark.parametrize(
    "fault", [ValueError("theirs"), ZeroDivisionError(), OSError("disk"), BrokenPipeError()]
)
def test_faults_keep_their_traceback(run_yaml, monkeypatch, fault):
    """Only errors written for the user are shortened; a fault of ours or torch's is shown whole."""
    fake_loop(monkeypatch, fault)
    with pytest.raises(type(fault)):
        app.run(["train", "--config", str(run_yaml)])


def test_nothing_starts_for_a_bad_configuration(run_yaml, monkeypatch):
    calls = fake_loop(monkeypatch, 0)
    assert app.run(["train", "--config", str(run_yaml), "--set", "optimizer.lr=x"]) == 2
    assert calls == []


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 2), ("1", 0), ("7", 0)])
def test_one_process_a_node_tells_a_configuration_error(
    run_yaml, monkeypatch, capsys, local_rank, lines
):
    """Under torchrun every process finds the same problems; all exit 2, one of a node prints."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("RANK", "9")
    assert app.run(["train", "--config", str(run_yaml), "--set", "optimizer.lr=x"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_other_processes_tell_later_errors_in_one_line(run_yaml, monkeypatch, capsys):
    """A dataset that is damaged for one process only must not end the job without a word."""
    fake_loop(monkeypatch, OurError("first line\nsecond line"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "9")
    assert app.run(["train", "--config", str(run_yaml)]) == 2
    assert capsys.readouterr().err == "[rank 9] first line\n"


def test_config_errors_come_fast_and_without_traceback(run_yaml):
    """The whole program, on a file with a mistake."""
    run_yaml.write_text(MINIMAL + "seed: 3\n")
    command = [sys.executable, "-m", "megatron_patch", "train", "--config", str(run_yaml)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 10  # of this processor, however busy it is
    assert done.returncode == 2
    assert "training.seed is such a key" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_without_the_letters_gets_escapes(run_yaml):
    command = [sys.executable, "-m", "megatron_patch", "config", "show", str(run_yaml)]
    command += ["--set", "run_dir=é"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'run_dir: "\\xe9"' in done.stdout


def test_a_closed_pipe_ends_quietly(run_yaml):
    command = f"{sys.executable} -m megatron_patch config help | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("Sections")


PRINTS = {
    "config docs": 0,
    "doctor --json": 0,
    "checkpoint verify x": 4,
    "checkpoint prune x --keep-last 1": 4,
}
"""Commands that only print, and their exit code where x has no good checkpoint."""


@pytest.mark.parametrize("words", PRINTS)
def test_what_cannot_be_printed_leaves_no_traceback(words, tmp_path):
    """To a reader that has gone, or into a file on a full disk."""
    (tmp_path / "x" / "step_00000001.attempt-1").mkdir(parents=True)
    command = [sys.executable, "-m", "megatron_patch", *words.split()]
    come, go = os.pipe()
    os.close(come)
    with open(go, "w") as gone, open("/dev/full", "w") as full:
        for out, code, said in (
            (None, PRINTS[words], ""),
            (gone, 141, ""),
            (full, 1, "megatron-patch: standard output: No space left on device"),
        ):
            target = subprocess.DEVNULL if out is None else out
            done = subprocess.run(
                command, stdout=target, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False
            )
            assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
            assert said in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("rank", [None, "1"])
def test_an_error_that_cannot_be_printed_keeps_its_exit_code(rank, tmp_path):
    """The log is on the disk that is full, and a launcher goes by the code."""
    command = [sys.executable, "-m", "megatron_patch", "checkpoint", "list", str(tmp_path / "none")]
    ranked = {} if rank is None else {"LOCAL_RANK": rank}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stderr=full, env=os.environ | ranked, check=False)
    assert done.returncode == 2


def test_plot_is_report_png_and_names_it(tmp_path, monkeypatch, capsys):
    from megatron_patch.report import charts

    calls: list[tuple[list[Path], Path]] = []
    monkeypatch.setattr(charts, "draw_png", lambda runs, out: calls.append((runs, out)))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "demo"
    run.mkdir()
    assert app.run(["report", str(run), str(tmp_path), "--png", "y.png"]) == 0
    assert capsys.readouterr() == ("y.png\n", "")
    assert app.run(["plot", str(run)]) == 0
    assert app.run(["plot", str(run), str(tmp_path)]) == 0
    assert app.run(["plot", str(run), "--out", "x.png"]) == 0
    outputs = [out for _, out in calls]
    assert outputs == [Path("y.png"), run / "demo.png", Path("runs.png"), Path("x.png")]
    assert calls[0][0] == calls[2][0] == [run, tmp_path]
    out, err = capsys.readouterr()
    assert out.splitlines() == [str(out) for out in outputs[1:]]
    (line, *others) = err.splitlines()
    assert "'plot' is now 'report RUN... --png FILE'" in line and others == [line, line]


def test_one_page_is_about_one_run(tmp_path, capsys):
    for argv in (["a", "b"], ["a", "--out", "x.html", "--png", "x.png"]):
        with pytest.raises(SystemExit) as caught:
            app.run(["report", *argv])
        assert caught.value.code == 2
        assert "--png" in capsys.readouterr().err.splitlines()[-1]


def test_doctor_prints_the_backends_and_the_old_name_says_so(capsys):
    from megatron_patch.runtime import doctor

    (finding,) = doctor.backends()
    assert app.run(["backends", "list"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [err.rstrip()] and "'backends list' is now 'doctor'" in err
    for name in ("stable_flash", "sdpa_cudnn", "sdpa_flash", "te", "mcore_local", "reference"):
        assert name in out
    for line in filter(None, out.splitlines()):
        assert f"\n    {line}" in finding.text


def test_prepare_data_on_a_small_text(tmp_path, capsys):
    source = tmp_path / "a.txt"
    source.write_text("hello world\n" * 20)
    out = tmp_path / "out" / "a"
    argv = ["prepare-data", str(source), "--out", str(out), "--workers", "1", "--quiet"]
    assert app.run(argv) == 0
    assert {path.suffix for path in out.parent.iterdir()} >= {".bin", ".idx", ".json"}
    assert app.run(["prepare-data", str(tmp_path / "gone.txt"), "--out", str(out) + "2"]) == 2
    assert "gone.txt" in capsys.readouterr().err
