"""Samples of the long scripts: faults in real runs, random SIGKILLs, payloads in the launcher."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

SAMPLE = (
    "kill -9 while shards are written",
    "kill -9 manifest written, directory not renamed",
    "SIGTERM to one rank",
    "a rank loops for ever",
    "run directory vanishes",
    "newest checkpoint: one bit flipped",
    "two jobs in one run directory",
    "other torch version on resume",
    "NaN in one rank's gradient",
)


def script(name: str, *words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """One of the scripts, in a process of its own (it forks, and must not inherit threads)."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = f"{ROOT}:{ROOT / 'kernels'}"
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *words],
        env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FAULT_LAB_SLACK": "10"},
        capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip


@pytest.mark.multiprocess
def test_a_sample_of_the_fault_table(tmp_path: Path) -> None:
    only = [word for name in SAMPLE for word in ("--only", name)]
    answer = script("fault_table.py", "--state", str(tmp_path), *only, timeout=3000)
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-3000:]
    rows = [json.loads(f.read_text()) for f in (tmp_path / "rows").glob("*.json")]
    assert {r["name"] for r in rows} == set(SAMPLE)


@pytest.mark.multiprocess
def test_a_sample_of_the_kills(tmp_path: Path) -> None:
    """Two ranks, a few kills; the seed differs from that of the long run."""
    answer = script(
        "soak.py", "--state", str(tmp_path), "--kills", "6", "--minutes", "5",
        "--ranks", "2", "--seed", "7", "--out", str(tmp_path), timeout=3000,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-3000:]
    found = json.loads((tmp_path / "soak.json").read_text())["2 ranks"]
    assert found["kills"] >= 6 and found["episodes_bitwise_equal"] == found["episodes"] >= 1


# ---------------------------------------------------------------------------------------- payloads


@pytest.fixture(scope="module")
def payloads() -> Any:
    import security_table

    security_table.load("launch_shims", security_table.TESTS / "conftest.py")
    security_table.load("security_cases", security_table.TESTS / "test_security.py")
    return security_table


def test_payloads_outside_the_configuration(payloads: Any) -> None:
    """Environment and files; those of the configuration are in tests/launch."""
    cases = [c for c in payloads.injections() if c.place.startswith(("env", "file", "rank"))]
    assert len(cases) > 40
    with tempfile.TemporaryDirectory() as name:
        rows = [payloads.inject(n, c, Path(name)) for n, c in enumerate(cases[::3])]
    assert [r for r in rows if r["executed"]] == []


def test_without_the_check_of_numbers_a_payload_runs(
    payloads: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    """What `require_numbers` of launch/lib.sh is there for."""
    from megatron_patch.launcher import render

    scripts = tmp_path / "launch"
    scripts.mkdir()
    for name in (render.SCRIPT, *render.PARTS):
        text = (ROOT / "launch" / name).read_text()
        (scripts / name).write_text(text.replace("  require_numbers SLURM", "  : SLURM"))
    monkeypatch.setattr(render, "scripts", lambda: scripts)
    place = "environment SLURM_RESTART_COUNT"
    case = next(c for c in payloads.injections() if c.place == place)
    assert payloads.inject(0, case, tmp_path)["executed"]


def test_secrets_are_refused_without_being_repeated(payloads: Any) -> None:
    rows = payloads.refused_values()
    assert len(rows) == 3 and all(r["refused"] and not r["hits"] for r in rows)


def test_a_secret_that_is_there_is_found(payloads: Any, tmp_path: Path) -> None:
    """As written, and in base64 at any alignment; the user's own file is left out."""
    secret = payloads.canary(3)
    own = tmp_path / "own"
    own.write_text(secret)
    (tmp_path / "plain").write_text(f"key={secret}\n")
    for shift in range(3):
        text = base64.b64encode(b"x" * shift + secret.encode() + b"tail").decode()
        (tmp_path / f"encoded{shift}").write_text(text)
    (tmp_path / "innocent").write_text(payloads.canary(4))
    found = payloads.hunt(tmp_path, {"here": secret}, (own,))
    assert sorted(found["here"]) == ["encoded0", "encoded1", "encoded2", "plain"]
