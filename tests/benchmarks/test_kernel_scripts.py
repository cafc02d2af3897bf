# ruff: noqa: E402  (the cases lie in a folder that joins the path first)
"""`compare_trees.py`, `sanitizer.py` and the digests of kernel sources, where there is no GPU."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import benchmark_scripts
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "kernels"))

from attention_cases import Case
from planting import copy_package

machine = benchmark_scripts.load("machine")
sanitizer = benchmark_scripts.load("sanitizer")


def run_script(name: str, *arguments: str, library: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_digest_of_compiled_functions(tmp_path):
    """Jitted functions, constants and tiles count; what launches them does not."""
    folder = tmp_path / "kernels" / "stable_attention"
    (folder / "triton").mkdir(parents=True)
    file, tiles = folder / "triton" / "forward.py", folder / "configs.json"
    tiles.write_text("{}")
    plain = "WIDE = tl.constexpr(3)\n\n@triton.jit(do_not_specialize=N)\ndef k(x):\n    y = x + 1\n"
    host = "\n\ndef launch(x):\n    return k[1](x)\n"

    def digest(text: str) -> str:
        file.write_text(text)
        return machine.functions_digest(tmp_path)

    found = digest(plain + host)
    assert digest(plain.replace("k(x):", 'k(x):\n    """Doc."""') + "LIMIT = 4\n") == found
    (folder / "int8").mkdir()
    (folder / "int8" / "launch.py").write_text("TILES = {64: 2}\n" + host)
    assert digest(plain) != found
    (folder / "int8" / "launch.py").unlink()
    for old, new in (("x + 1", "x + 2"), ("(3)", "(4)"), ("=N", "=M")):
        assert digest(plain.replace(old, new) + host) != found
    assert digest(plain) == found
    tiles.write_text("[1]")
    assert digest(plain) != found


def test_code_said_to_be_the_same_is_that_of_this_tree():
    """Of an older pair nobody knows any more."""
    assert set(machine.SAME_CODE.values()) <= {machine.functions_digest()}


FAKE_TOOL = """#!/bin/sh
[ "$1" = --version ] && echo "Version 2025.3" && exit 0
case "$*" in
*--planted*) echo "========= Invalid write"; echo "========= ERROR SUMMARY: {planted} errors" ;;
*) echo "case done: a"; echo "case done: b"; echo "========= ERROR SUMMARY: {errors} errors" ;;
esac
"""


@pytest.mark.parametrize(
    ("planted", "errors", "clean"), [(1, 0, True), (1, 2, False), (0, 0, False)]
)
def test_sanitizer_verdict(tmp_path, monkeypatch, planted, errors, clean):
    """Clean means: the planted error was found and the set gave none."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE_TOOL.format(planted=planted, errors=errors))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("COMPUTE_SANITIZER", str(tool))
    arguments = ["sanitizer.py", "--no-compile", "--limit", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert sanitizer.main() == (0 if clean else 1)
    result = json.loads((tmp_path / "sanitizer.json").read_text())
    assert result["clean"] is clean and result["checkers"]["memcheck"]["errors"] == errors


def test_sanitizer_that_cannot_run_says_so(tmp_path, monkeypatch):
    late = sanitizer.judge("case done: x\n", late=True, seconds=1.0)
    assert late["errors"] is None and late["timed_out"]
    refused = "Error: Device not supported\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.judge(refused, late=False, seconds=1.0)["unusable"]
    for line in sanitizer.CASES:
        assert Case.parse(line) and len(line) < 100
    monkeypatch.setattr(sanitizer, "find_tool", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sanitizer.py", "--out", str(tmp_path)])
    assert sanitizer.main() == 1
    assert not json.loads((tmp_path / "sanitizer.json").read_text())["available"]


ONE_MORE = """

def _one_more(problem, q, *a, **k):
    result = dispatch.select(problem, q.device).forward(*a, **k)
    result.out.add_(1.0)
    return result
"""


@pytest.mark.slow
def test_trees_take_turns_in_one_process(tmp_path):
    """Other tiles, and a changed copy; a broken version is a line, not an end."""
    right = "result = dispatch.select(problem, q.device).forward(\n        "
    for name, wrong in (
        ("biased", "result = _one_more(problem, q, "),
        ("broken", "result = as_planted("),
    ):
        copy_package(tmp_path / name / "kernels", None)
        file = tmp_path / name / "kernels" / "stable_attention" / "ops.py"
        assert right in file.read_text()
        file.write_text(file.read_text().replace(right, wrong, 1) + ONE_MORE)
    versions = [f"tiles={ROOT}@forward/16=32,32,4,1,32,8,0,0,1@dq/16=32,32,4,1"]
    versions += [f"{name}={tmp_path / name}" for name in ("biased", "broken")]
    options = ["--device=cpu", "--out", str(tmp_path)]
    done = run_script("benchmarks/compare_trees.py", *versions, *options, library=ROOT / "kernels")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "compare_trees.json").read_text())["speed"]
    assert result["complete"] and len(result["rows"]) == 2
    for row in result["rows"]:
        cells = row["peers"]
        for name in ("tiles compensated", "tiles none"):
            assert cells[name]["difference"] < 0.05 and cells[name]["forward"] > 0, cells
        assert cells["biased none"]["difference"] > 0.5
        assert "as_planted" in cells["broken none"]["error"]
    means = result["speed over SDPA-math"]
    assert means["SDPA-math"] == {"forward": 1.0, "backward": 1.0} and "broken none" not in means
    compared = result["compared"]
    assert compared["tiles"]["kernels"] == machine.sources_digest()
    assert compared["biased"]["kernels"] != compared["tiles"]["kernels"]
    # Where a version lies on this machine is nobody's business.
    assert str(tmp_path) not in json.dumps(result)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("tree", "is not NAME=FOLDER"),
        ("a-b=.", "is not NAME=FOLDER"),
        ("tree=/nonexistent", "name a checkout"),
        (f"tree={ROOT}@forward=1,2", "is not PASS/HEAD_DIM=FIELDS"),
        (f"tree={ROOT}@forward/64=64,64", "is not PASS/HEAD_DIM=FIELDS"),
    ],
)
def test_versions_that_cannot_be_compared_are_refused(version, says, capsys):
    assert benchmark_scripts.load("compare_trees").main([version, "--device=cpu"]) == 2
    assert says in capsys.readouterr().err
