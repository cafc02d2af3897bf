"""Arguments that name no usable place, or no number: one line with value and remedy, code 2."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from minimal_config import MINIMAL

from megatron_patch.cli import app

CPU = ["--set", "cluster.gpus_per_node=0", "--set", "cluster.ranks_per_node=1"]
METRICS = "step,loss,grad_norm,tokens_per_s,elapsed_seconds,extra\n1,5.0,1.0,100,1.0,\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a configuration, a run, a file, a directory and a loop of links."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(MINIMAL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text(METRICS)
    (tmp_path / "file").write_bytes(b"\x80\x04\xff")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    assert app.run(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nope", "loop"])
@pytest.mark.parametrize("mode", [[], ["--node"], ["--compare"]])
def test_preflight_out(
    place: Path, capsys: pytest.CaptureFixture[str], out: str, mode: list[str]
) -> None:
    argv = ["preflight", "--config", "run.yaml", "--out", out, *mode, *CPU]
    line = refusal(argv, capsys)
    assert f"--out {out}: cannot be written" in line and "name a directory" in line


def test_preflight_compare_makes_its_directory(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["preflight", "--config", "run.yaml", "--out", "new", "--compare", "--expect", "n1"]
    assert app.run([*argv, *CPU]) == 1
    assert "wrote no report" in capsys.readouterr().out
    assert (place / "new" / "bad_nodes").read_text() == "n1\n"


@pytest.mark.parametrize("out", ["file/x.png", "/proc/x.png", "x.nosuch", "loop/x.png", "folder"])
def test_plot_out(place: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    line = refusal(["plot", "run", "--out", out], capsys)
    assert f"{out}: " in line and "name a PNG file" in line
    assert not Path("folder.png").exists()


@pytest.mark.parametrize("out", ["file/x.html", "/proc/x.html", "loop/x.html", "folder"])
def test_report_out(place: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    line = refusal(["report", "run", "--out", out], capsys)
    assert f"{out}: " in line and "name an HTML file" in line
    assert not list(Path().glob("*.tmp"))


@pytest.mark.parametrize("run_dir", ["loop", "loop/x"])
def test_launch_into_a_loop_of_links(
    place: Path, capsys: pytest.CaptureFixture[str], run_dir: str
) -> None:
    argv = ["launch", "--config", "run.yaml", "--nodes", "1", "--dry-run", *CPU]
    line = refusal([*argv, "--set", f"run_dir={run_dir}"], capsys)
    assert os.fspath(place / run_dir) in line and "choose another run_dir" in line


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1"])
@pytest.mark.parametrize(
    "argv",
    [
        ["experiment", "pack", "run", "--to", "p", "--mib"],
        ["experiment", "stability", "--config", "run.yaml", "--results-dir", "r", "--mib"],
        ["experiment", "results", "--config", "run.yaml", "--results-dir", "r", "--mib"],
        ["experiment", "stability", "--config", "run.yaml", "--dry-run", "--minutes"],
    ],
)
def test_amounts(
    place: Path, capsys: pytest.CaptureFixture[str], argv: list[str], value: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        app.run([*argv[:-1], f"{argv[-1]}={value}"])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {argv[-1]}: {value}: must be a number above 0" in last


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--variant", "nope", "--reference", "new"], "variant 'nope' is not known; there are"),
        (["--reference", "file"], "--reference file: is no fingerprint of a seed"),
        (["--reference", "run.yaml"], "--reference run.yaml: is no fingerprint of a seed"),
        (["--reference", "folder"], "--reference folder: is no fingerprint of a seed"),
    ],
)
def test_experiment_cell(
    place: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    """Before anything is built: no run directory, no process group."""
    importlib.import_module("megatron.core.optimizer")  # warns, once a process, where no GPU is
    capsys.readouterr()
    argv = ["experiment", "cell", "--config", "run.yaml", *more]
    assert message in refusal([*argv, "--set", "attention.backend=reference"], capsys)
    assert not Path("runs").exists()
