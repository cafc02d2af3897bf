"""Every benchmark starts, results are stored by part, and pages show what their results say."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import benchmark_scripts
import pytest

ROOT = Path(__file__).resolve().parents[2]
machine = benchmark_scripts.load("machine")
tables = benchmark_scripts.load("tables")
SCRIPTS = (
    "attention", "accuracy", "context_parallel", "training", "step_profile", "telemetry_cost",
    "layouts", "plan", "search_tiles", "compare_trees", "sanitizer", "machine", "tables",
)  # fmt: skip
HEAD = {
    "machine": {"cpu": "x86_64", "gpu": "NVIDIA H100 80GB HBM3"},
    "versions": {"torch": "2", "triton": "3"},
    "commit": "0123456789abcdef+changes",
    "utc": "2026-01-02T03:04:05Z",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_does(name, monkeypatch, capsys):
    script = benchmark_scripts.load(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out


SOURCES = [
    path for folder in ("benchmarks", "research") for path in sorted((ROOT / folder).rglob("*.py"))
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_what_a_script_imports_of_the_packages_is_there(path):
    """Also inside functions, which only a GPU or a checkpoint would reach."""
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if module is None or module.split(".")[0] not in ("megatron_patch", "stable_attention"):
            continue
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        text = Path(spec.origin).read_text() if spec and spec.origin else ""
        for name in (alias.name for alias in node.names):
            defined = rf"^(def|class) {name}\b|^{name}\b.*=|import .*\b{name}\b|^ +{name},$"
            there = re.search(defined, text, re.MULTILINE)
            if not (there or (spec and importlib.util.find_spec(f"{module}.{name}"))):
                missing.append(f"{module}.{name}")
    assert missing == []


def test_pages_agree_with_their_results(capsys):
    assert tables.main(["--check"]) == 0, f"{capsys.readouterr().out}run: make docs"


def test_performance_has_no_other_markers():
    text = (ROOT / "docs" / "performance.md").read_text()
    assert set(re.findall(r"<!-- ([a-z0-9-]+):begin -->", text)) <= {"versions", *tables.TABLES}
    assert "Not measured yet" not in text


def test_every_stored_result_says_where_it_comes_from():
    files = {file for file, _, _ in tables.TABLES.values()}
    for path in (ROOT / "docs" / "assets").glob("*.json"):
        assert path.stem in files, "rendered by no table"
        for part, result in json.loads(path.read_text()).items():
            assert {"machine", "versions", "commit", "utc"} <= result.keys(), (path, part)


def page(name: str) -> str:
    return f"a\n<!-- {name}:begin -->\nold\n<!-- {name}:end -->\nb\n"


def test_markers(tmp_path):
    text = tables.fill(page("kernel-speed"), tmp_path)
    assert text.startswith("a\n") and text.endswith("b\n") and "attention.py" in text
    assert tables.fill(page("evidence"), tmp_path) == page("evidence")  # somebody else's
    with pytest.raises(ValueError, match="has no"):
        tables.fill("<!-- cost:begin -->", tmp_path)


def render(name: str, parts: machine.Parts) -> str:
    return machine.markdown(parts.values(), tables.TABLES[name][2](parts))


def test_results_are_stored_by_part(tmp_path):
    for part, value in (("a", 1), ("b", 2), ("a", 3)):
        machine.write_result("x", {"value": value}, tmp_path, part=part, head=HEAD)
    parts = json.loads((tmp_path / "x.json").read_text())
    assert {name: result["value"] for name, result in parts.items()} == {"a": 3, "b": 2}
    assert machine.earlier("x", "b", HEAD, (None, tmp_path))["value"] == 2
    other = HEAD | {"kernels": "other"}
    assert machine.earlier("x", "b", other, (tmp_path,)) is None
    assert machine.earlier("x", "c", HEAD, (tmp_path,)) is None


def cell(forward: float, backward: float, host: float = 0.1) -> dict[str, float]:
    return {"forward": forward, "backward": backward, "host": host}


def attention(**more: Any) -> dict[str, Any]:
    peers = {"SDPA-cuDNN": cell(1.0, 3.0), "SDPA-flash": cell(2.0, 5.0), "none": cell(1.0, 3.0)}
    peers["compensated"] = cell(1.25, 3.0)
    shape = {"grid": "hidden 2048", "b": 4, "s": 4096, "h": 16, "kv_heads": 16, "d": 128,
             "dv": 128, "causal": True}  # fmt: skip
    result = HEAD | {"rows": [shape | {"peers": peers}], "queued_ms": 1.2, "complete": True}
    return {"speed": result | {"functions": machine.functions_digest()} | more}


def test_borrowed_backwards():
    def row(n: int, **dq: float) -> dict[str, Any]:
        return {"n": n, "dq": {"own": 0.01, "sdpa_cudnn": 0.01, "sdpa_flash": 0.011} | dq}

    errors = [row(n, fa4=fa4) for n in (512, 2048, 8192, 32768) for fa4 in (0.01, n * 1e-5)]
    times = [{"own": cell(1, 2), "sdpa_cudnn": cell(1, x), "sdpa_flash": cell(1, 4),
              "fa4": cell(1, 2)} for x in (3, 5)]  # fmt: skip
    rows = {"errors": errors, "captures": [row(9, fa4=0.02)], "speed": times}
    text = render("borrowed", {part: HEAD | {"rows": x} for part, x in rows.items()})
    assert "| `sdpa_cudnn` | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 | 1.50–2.50 |" in text
    assert "| `fa4` | 1.000 | 2.048 | 8.192 | 32.768 | 2.000 | 1.00 |" in text


def test_speeds_of_kernels():
    text = render("kernel-speed", attention())
    assert "| d 128 | 1 | 0.80, 1.00 | 1.60, 1.67 | - | 1.25, 1.00 |" in text
    assert "Measured: H100, 2026-01-02, 0123456789ab+changes." in text and "changed" not in text
    assert "have changed since" in render("kernel-speed", attention(functions="other"))
    assert "4 of 4 intervals" in render("kernel-speed", attention(queued_ms=0.05))
    assert "stopped before its end" in render("kernel-speed", attention(complete=False))
    cost = render("cost", attention())
    assert "| `stable_flash`, `compensated` | 1.25 | 3.00 | 2 |" in cost
    assert "| cuDNN (SDPA) | 1.00 | 3.00 | 0 |" in cost


def test_speeds_of_context_parallelism():
    alone = machine.same_work(131072, 8, 64)

    def one(system: str, ranks: int, tokens: int, **figures: Any) -> dict[str, Any]:
        return {"system": system, "ranks": ranks, "tokens": tokens, "causal": True} | figures

    cells = [
        one("kernel", 1, alone, total_ms=100.0),
        one("p2p", 8, 131072, total_ms=110.0, peak_mib=1234.5),
        one("torch, allgather", 8, 8192, total_ms=1.0, error_out=0.5),
    ]
    result = HEAD | {"problem": {"heads": 32, "kv_heads": 8, "d": 128}, "block": 64}
    result |= {"cells": {str(i): c for i, c in enumerate(cells)}, "sources": "x"}
    text = render("context-speed", {"speed": result})
    rate = 3.5 * 2 * 32 * 128 * alone**2 / 0.1 / 1e12
    mine = 3.5 * 2 * 32 * 128 * 131072**2 / 8 / 0.11 / 1e12
    assert f"| 128k, 8 GPUs | {rate:.0f} | {mine:.0f} |" in text
    assert "| MiB, 128k, 8 GPUs |  | 1,234 |" in text
    assert "wrong output (relative error of O): torch, allgather (0.50)." in text


def test_a_plan_is_shown_by_its_worst_rank():
    rank = {"planned": 2**30, "allocated": 2**30, "stage": 0, "ratio": 1.0}
    bad = rank | {"allocated": 2 * 2**30, "ratio": 0.5}
    cases = [
        {"model": "m", "layout": "DP2", "ranks": 2, "by_rank": [rank, bad]},
        {"model": "m", "layout": "DP4", "ranks": 4, "by_rank": [rank]},
        {"model": "m", "layout": "TP2 CP2", "ranks": 4, "error": "no"},
    ]
    result = HEAD | {"cases": cases, "off": ["m DP2", "m TP2 CP2"], "tolerance": 0.1}
    text = render("planned-memory", {"memory": result})
    assert "| 1 GPU | data | tensor | context |" in text
    assert "| m | - | 0.500 (2) | - | inf (1) |" in text
    assert "1 of 3 cases within 10%" in text


def test_the_plot(tmp_path):
    stored = json.loads((ROOT / "docs" / "assets" / "attention.json").read_text())["speed"]
    benchmark_scripts.load("attention").plot(stored, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
