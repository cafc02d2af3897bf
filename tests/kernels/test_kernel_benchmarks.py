# ruff: noqa: E402  (the scripts are plain modules of a folder that joins the path first)
"""The scripts that measure the kernels on a GPU, proven where there is none.

Plumbing only, with small problems in the interpreter: goals and verdicts follow from the figures.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attention_cases import Case
from planted_bugs import copy_package

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import attention
import kernel_goals
import kernel_sanitizer
import kernel_tables
import machine

HEAD = {
    "machine": {"cpu": "x86_64", "gpu": "a GPU"},
    "versions": {"torch": "2", "triton": "3"},
    "commit": "0123456789abcdef",
    "utc": "2026-01-02T03:04:05Z",
}


def run_script(name: str, *arguments: str, library: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def row(s: int = 4096, **times: tuple[float, float, float]) -> dict[str, Any]:
    """A shape with (forward, backward, peak) of peers; _ and __ stand for - and space."""
    shape = {"grid": "hidden 2048", "b": 16384 // s, "s": s, "h": 16, "kv_heads": 16}
    keys = ("forward", "backward", "peak_mib")
    peers = {
        n.replace("__", " ").replace("_", "-"): dict(zip(keys, t, strict=True))
        for n, t in times.items()
    }
    return shape | {"d": 128, "dv": 128, "causal": True, "peers": peers}


GOOD = {
    "SDPA_cuDNN": (1.0, 3.0, 386.0),
    "SDPA_flash": (2.0, 5.0, 386.0),
    "none": (1.0, 3.0, 259.0),
    "compensated": (1.02, 3.0, 323.0),
    "compensated__int8": (1.02, 3.0, 291.0),
}


def test_goals() -> None:
    rows = [row(4096, **GOOD), row(8192, **GOOD)]
    assert all(g["ok"] for g in kernel_goals.goals(rows, 2)), kernel_goals.goals(rows, 2)
    slower = GOOD | {"compensated": (2.5, 3.5, 324.0)}
    found = {g["what"]: g for g in kernel_goals.goals([rows[0], row(1024, **slower)], 3)}
    missed = {what for what, g in found.items() if not g["ok"]}
    assert missed == {
        "forward: compensated speed / SDPA-cuDNN",
        "forward: compensated time / none",
        "backward: compensated time / none",
        "forward: compensated faster than SDPA-flash everywhere",
        "peak memory: exactly none's plus the low-order part (MiB above it)",
        "shapes measured",
    }
    named = found["forward: compensated faster than SDPA-flash everywhere"]["misses"]
    assert named == ["hidden 2048, d 128, causal, 1024 keys: 0.80"]
    assert not any(g["ok"] for g in kernel_goals.goals([], 3))


def test_speed_page_says_what_the_file_does_not_vouch_for() -> None:
    assert len(list(attention.shapes())) == kernel_tables.SHAPES
    result = HEAD | {"rows": [row(4096, **GOOD)], "queued_ms": 1.2}
    old = kernel_tables.speed_table(result)
    assert "does not say which kernel sources" in old and "Launches were not queued" in old
    result["rows"][0]["peers"]["none"]["host"] = 0.2
    result["kernels"] = machine.sources_digest()
    text = kernel_tables.speed_table(result)
    assert "those of this tree" in text and "not queued" not in text
    assert "| forward, d 128 | 1 | 0.98 | 1.96 | - | 1.00 | 1.02 | 1.02 |" in text
    result["rows"][0]["peers"]["none"]["host"] = 2.0
    assert "Intervals that contain host time" in kernel_tables.speed_table(result)
    many = [{**result["rows"][0], "s": s} for s in range(1024, 1024 * 9, 1024)]
    text = kernel_tables.speed_table(result | {"rows": many})
    assert "A slow host: 8 of" in text and "up to 2.00 ms" in text and "time: none 8." in text
    assert "have changed since" in kernel_tables.speed_table(result | {"kernels": "x"})
    host = {"kernels": "x", "device": machine.device_digest()}
    assert "those of this tree; what checks" in kernel_tables.speed_table(result | host)
    own = {"kernels": "x", "device": "z", "functions": machine.functions_digest()}
    text = kernel_tables.speed_table(result | own)
    assert "those of this tree, with its tiles; the Python that launches" in text
    for other in ({"kernels": "x"}, own | {"functions": "w"}):
        assert "have changed since" in kernel_tables.speed_table(result | other)
    assert "| 386 | - | 259" not in kernel_tables.memory_table(result)
    assert "**missed**" in kernel_tables.goal_table(result)


def test_digest_is_of_the_code_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kernels" / "stable_attention"
    folder.mkdir(parents=True)
    file, tiles = folder / "a.py", folder / "configs.json"
    tiles.write_text("{}")

    def digest(text: str) -> str:
        file.write_text(text)
        return machine.sources_digest(tmp_path)

    plain = digest('"""Doc."""\n\ndef f():\n    """Doc."""\n    return 1\n')
    assert digest('def f():\n    """Other."""\n\n    return 1  # why\n') == plain
    assert digest("def f():\n    return 2\n") != plain
    before = machine.device_digest(tmp_path)
    tiles.write_text("[]")
    assert digest('def f():\n    """Other."""\n\n    return 1  # why\n') != plain
    kernels = machine.device_digest(tmp_path)
    assert kernels != before
    assert digest("def f():\n    return 3\n") and machine.device_digest(tmp_path) == kernels
    (folder / "triton").mkdir()
    (folder / "triton" / "forward.py").write_text("x = 1\n")
    assert machine.device_digest(tmp_path) != kernels


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
def test_sanitizer_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: int, errors: int, clean: bool
) -> None:
    """Clean means: the planted error was found and the set gave none."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE_TOOL.format(planted=planted, errors=errors))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("COMPUTE_SANITIZER", str(tool))
    arguments = ["kernel_sanitizer.py", "--no-compile", "--limit", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert kernel_sanitizer.main() == (0 if clean else 1)
    result = json.loads((tmp_path / "sanitizer.json").read_text())
    assert result["clean"] is clean and result["checkers"]["memcheck"]["errors"] == errors
    text = kernel_tables.sanitizer_line(result)
    assert f"memcheck: {errors} errors in 2 of 2 calls" in text
    assert ("not found" in text) == (planted == 0)


def test_sanitizer_that_cannot_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = kernel_sanitizer.judge("case done: x\n", late=True, seconds=1.0)
    assert late["errors"] is None and late["timed_out"]
    refused = "Error: Device not supported\n========= ERROR SUMMARY: 0 errors\n"
    assert kernel_sanitizer.judge(refused, late=False, seconds=1.0)["unusable"]
    for line in kernel_sanitizer.CASES:
        assert Case.parse(line) and len(line) < 100
    monkeypatch.setattr(kernel_sanitizer, "find_tool", lambda: None)
    monkeypatch.setattr(sys, "argv", ["kernel_sanitizer.py", "--out", str(tmp_path)])
    assert kernel_sanitizer.main() == 1
    text = kernel_tables.sanitizer_line(json.loads((tmp_path / "sanitizer.json").read_text()))
    assert "was not on that machine" in text


def test_digest_of_compiled_functions(tmp_path: Path) -> None:
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
    for old, new in (("x + 1", "x + 2"), ("(3)", "(4)"), ("=N", "=M")):
        assert digest(plain.replace(old, new) + host) != found
    assert digest(plain) == found
    tiles.write_text("[1]")
    assert digest(plain) != found


def test_host_time_of_versions(tmp_path: Path) -> None:
    versions = [f"old={ROOT}", f"new={ROOT}"]
    options = ["--device=cpu", "--without-launches", "--rounds", "1", "--calls", "1"]
    options += ["--out", str(tmp_path)]
    done = run_script("benchmarks/host_time.py", *versions, *options, library=ROOT / "kernels")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "host_time_python.json").read_text())
    assert str(tmp_path) not in json.dumps(result) and set(result["compared"]) == {"old", "new"}
    for name in ("old compensated", "old none", "new compensated", "new none"):
        cell = result["microseconds"][name]
        assert cell["forward_waited"] >= cell["forward"] > 0
        assert cell["both_waited"] >= cell["both"] > 0
    for wrong in (["old=."] * 2, ["tree"]):
        done = run_script("benchmarks/host_time.py", *wrong, *options, library=ROOT / "kernels")
        assert done.returncode == 2 and "error:" in done.stderr


def test_trees_take_turns_in_one_process(tmp_path: Path) -> None:
    """A changed copy and other tiles beside the tree; a broken version is a line, not an end."""
    for name, right, wrong in (
        ("biased", "return result.out, result.lse", "return result.out + 1.0, result.lse"),
        ("broken", "return result.out, result.lse", "return as_planted, result.lse"),
    ):
        copy_package(tmp_path / name / "kernels", None)
        file = tmp_path / name / "kernels" / "stable_attention" / "ops.py"
        assert right in file.read_text()
        file.write_text(file.read_text().replace(right, wrong, 1))
    versions = [f"tree={ROOT}", f"tiles={ROOT}@forward/16=32,32,4,1,32,8,0,0,1@dq/16=32,32,4,1"]
    versions += [f"{name}={tmp_path / name}" for name in ("biased", "broken")]
    options = ["--device=cpu", "--out", str(tmp_path)]
    done = run_script("benchmarks/compare_trees.py", *versions, *options, library=ROOT / "kernels")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "compare_trees.json").read_text())
    assert result["complete"] and len(result["rows"]) == 2
    for row in result["rows"]:
        cells = row["peers"]
        for name in ("tree compensated", "tree none", "tiles compensated", "tiles none"):
            assert cells[name]["difference"] < 0.05 and cells[name]["forward"] > 0, cells
        assert cells["biased none"]["difference"] > 0.5
        assert "as_planted" in cells["broken none"]["error"]
    means = result["speed over SDPA-math"]
    assert means["SDPA-math"] == {"forward": 1.0, "backward": 1.0} and "broken none" not in means
    compared = result["compared"]
    assert compared["tree"]["kernels"] == compared["tiles"]["kernels"] == machine.sources_digest()
    assert compared["biased"]["kernels"] != compared["tree"]["kernels"]
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
def test_versions_that_cannot_be_compared_are_refused(version: str, says: str) -> None:
    done = run_script("benchmarks/compare_trees.py", version, library=ROOT / "kernels")
    assert done.returncode == 2 and says in done.stderr, done.stderr
