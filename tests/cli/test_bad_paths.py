"""Arguments that name no usable place, or no number: one line with value and remedy, code 2."""

from __future__ import annotations

import itertools
import os
import socket
import stat
import subprocess
import sys
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


PREFLIGHT = ["preflight", "--config", "run.yaml", *CPU]
NO_PLACE = {
    "name a directory": (
        [[*PREFLIGHT, *mode, "--out"] for mode in ([], ["--node"], ["--compare"])],
        ["file", "file/below", "/proc/nope", "loop"],
    ),
    "name a PNG file": (
        [["report", "run", "--png"]],
        ["file/x.png", "/proc/x.png", "x.nosuch", "loop/x.png", "folder"],
    ),
    # A directory that is not there is not made: a mistyped path would hide the page.
    "name an HTML file": (
        [["report", "run", "--out"]],
        ["file/x.html", "/proc/x.html", "loop/x.html", "folder", "file/below/x.html", "new/x.html",
         "new/deep/x.html"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("remedy", NO_PLACE)
def test_an_output_that_cannot_be_written(place, capsys, remedy):
    before = sorted(place.rglob("*"))
    commands, outs = NO_PLACE[remedy]
    for argv, out in itertools.product(commands, outs):
        line = refusal([*argv, out], capsys)
        assert f"{out}: " in line and remedy in line
        if out.startswith("new/"):
            assert f"there is no directory {Path(out).parent}; make it first" in line
        assert sorted(place.rglob("*")) == before, out


def test_preflight_compare_makes_its_directory(place, capsys):
    argv = ["preflight", "--config", "run.yaml", "--out", "new", "--compare", "--expect", "n1"]
    assert app.run([*argv, *CPU]) == 1
    assert "wrote no report" in capsys.readouterr().out
    assert (place / "new" / "bad_nodes").read_text() == "n1\n"


def test_report_into_a_directory_that_is_a_link(place):
    Path("there").symlink_to("folder")
    assert app.run(["report", "run", "--out", "there/x.html"]) == 0
    assert Path("folder/x.html").is_file()


@pytest.mark.parametrize("minor", [3, 7])
def test_report_into_a_device(place, capsys, minor):
    """A null device takes the page, a full one refuses it; both stay what they are."""
    try:
        os.mknod("node", stat.S_IFCHR | 0o666, os.makedev(1, minor))
        Path("node").open("wb").close()
    except PermissionError:
        pytest.skip("only root may make device nodes, and not on every file system")
    if minor == 3:
        assert app.run(["report", "run", "-o", "node"]) == 0
    else:
        line = refusal(["report", "run", "-o", "node"], capsys)
        assert "node: cannot be written (No space left on device)" in line
    assert stat.S_ISCHR(os.stat("node").st_mode)


def test_report_over_a_socket(place, capsys):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        line = refusal(["report", "run", "-o", "socket"], capsys)
    assert "socket: cannot be written (is a block device or a socket)" in line
    assert stat.S_ISSOCK(os.stat("socket").st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_report_through_a_link(place, capsys, there):
    Path("link").symlink_to("folder/page.html")
    if there:
        Path("folder/page.html").write_text("old")
    assert app.run(["report", "run", "-o", "link"]) == 0
    assert Path("link").is_symlink()
    assert Path("folder/page.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("mode", ["w", "a"])
def test_report_to_standard_output(place, mode):
    """The page and nothing else, behind what was there."""
    Path("log").write_text("kept\n")
    command = [sys.executable, "-m", "megatron_patch", "report", "run", "-o", "/proc/self/fd/1"]
    with Path("log").open(mode) as out:
        assert subprocess.run(command, stdout=out, check=False, timeout=120).returncode == 0
    text = Path("log").read_text()
    assert text.startswith("kept\n<!DOCTYPE" if mode == "a" else "<!DOCTYPE")
    assert text.endswith("</html>\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["report", "run", "--png"],
        ["plan", "--config", "run.yaml", "--gpus-per-node", "1", "--plot"],
    ],
)
@pytest.mark.parametrize("out", ["new", "folder"])
def test_pictures_have_an_ending(place, capsys, argv, out):
    """matplotlib adds one to a name without: a file that nobody named."""
    before = sorted(place.iterdir())
    assert app.run([*argv, out]) == 2
    assert f"e.g. {out}" in capsys.readouterr().err
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize("run_dir", ["loop", "loop/x"])
def test_launch_into_a_loop_of_links(place, capsys, run_dir):
    argv = ["launch", "--config", "run.yaml", "--nodes", "1", "--dry-run", *CPU]
    line = refusal([*argv, "--set", f"run_dir={run_dir}"], capsys)
    assert os.fspath(place / run_dir) in line and "choose another run_dir" in line


@pytest.mark.parametrize("value", ["-1", "x", "1.5"])
def test_probe_skips_a_number_of_rows(place, capsys, value):
    with pytest.raises(SystemExit) as caught:
        app.run(["probe", "run", f"--skip-rows={value}"])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument --skip-rows: {value}: must be a whole number of at least 0" in last


@pytest.mark.parametrize("more", [[], ["--help"], ["stability", "--config", "run.yaml"]])
def test_experiment_says_where_it_went(place, capsys, more):
    assert app.run(["experiment", *more]) == 2
    assert "python research/run.py FILE" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["folder", "file/below", "nowhere/page.md", "loop"])
def test_config_docs_write(place, capsys, out):
    assert app.run(["config", "docs", "--write", out]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"--write: {out}: cannot be written" in line and "name a file" in line
