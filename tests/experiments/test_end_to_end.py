"""Cells through the real trainer on the CPU: in two invocations, refused, continuing another."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megatron_patch.cli import app

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "configs" / "stability" / "smoke.yaml"


@pytest.mark.multiprocess
def test_smoke_protocol(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    # A commit made elsewhere during the test would make its runs incomparable.
    monkeypatch.setenv("SOURCE_COMMIT", "test")
    out = tmp_path / "out"
    command = ["experiment", "stability", "--config", str(SMOKE), "--out", str(out)]
    command += ["--set", f"data.blend.0.path={corpus}"]
    assert app.run([*command, "--steps", "5", "--only", "reference"]) == 0
    assert "| reference | 1 | paused | 0 | 5 |" in capsys.readouterr().out
    assert app.run(command) == 0
    said = capsys.readouterr().out
    assert "| reference | 1 | finished | 0 | 12 |" in said
    assert "| k_centered | 1 | finished |" in said
    assert app.run(command) == 0
    assert "start" not in capsys.readouterr().out
    result = json.loads((out / "results" / "verdicts.json").read_text())
    curves = {}
    for run in result["runs"]:
        folder = out / "runs" / run["run"]
        steps = [5, 12] if run["cell"] == "reference" else [12]
        assert [a["to_step"] for a in run["attempts"]] == steps
        assert (folder / "FINISHED").exists()
        facts = json.loads((folder / "experiment.json").read_text())
        assert facts["variant"] == run["variant"]
        curves[run["cell"]] = (facts["weights_sha256"], facts["batches_sha256"], run["final_loss"])
    # The same weights and batches; nearly the same losses, because the variant changes rounding.
    assert curves["reference"][:2] == curves["k_centered"][:2]
    assert curves["reference"][2] == pytest.approx(curves["k_centered"][2], abs=2e-3)
    assert (out / "results" / "curves.png").stat().st_size > 10_000
    assert (out / "results" / "curves.csv").read_text().startswith("run,cell,seed,step,loss")
    _refused(out, corpus, capsys)


def _refused(out: Path, corpus: Path, capsys: pytest.CaptureFixture) -> None:
    """Other initial weights than those of the seed: no step is made."""
    config = SMOKE.parent / "base" / "tiny_cpu.yaml"
    run_dir = out.parent / "other"
    keys = (f"data.blend.0.path={corpus}", "model.init_std=0.03", "training.seed=1")
    command = ["experiment", "cell", "--config", str(config), "--checked-steps", "3"]
    command += ["--reference", str(out / "reference" / "seed_1.json")]
    for key in (*keys, f"run_dir={run_dir}"):
        command += ["--set", key]
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "megatron_patch", *command], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "initial weights differ: " in done.stderr and "another --out" in done.stderr
    assert not (run_dir / "metrics.csv").exists()


CONTINUED = """\
cells:
  - {name: base, set: [checkpoint.interval=4, checkpoint.keep_last=null]}
  - {name: control, from_cell: base, before: 4, follow: 8}
  - {name: k_centered, from_cell: base, before: 4, follow: 8, variant: k_centered}
  - {name: weight_decay, from_cell: base, before: 4, follow: 8, set: [optimizer.weight_decay=0.1]}
"""


@pytest.mark.multiprocess
def test_one_thing_is_changed_in_a_run_that_another_continues(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A variant, or a key of the optimizer, is in force from the checkpoint on; nothing else."""
    monkeypatch.setenv("SOURCE_COMMIT", "test")
    head = (SMOKE.parent / "smoke_rescue.yaml").read_text().split("cells:")[0]
    head = head.replace("base/tiny_cpu.yaml", str(SMOKE.parent / "base" / "tiny_cpu.yaml"))
    protocol, out = tmp_path / "continued.yaml", tmp_path / "out"
    protocol.write_text(head.replace("steps: 40", "steps: 24") + CONTINUED)
    command = ["experiment", "stability", "--config", str(protocol), "--out", str(out)]
    assert app.run([*command, "--gpus", "2", "--set", f"data.blend.0.path={corpus}"]) == 0
    assert capsys.readouterr().out.count("from step 8 of base-s1 (event at 12)") == 3
    losses = {cell: _losses(out / "runs" / f"{cell}-s1") for cell in ("base", *CHANGED)}
    later = {step: loss for step, loss in losses["base"].items() if 8 < step <= 20}
    assert losses["control"] == later and sorted(later) == [*range(9, 21)]
    for cell, change in CHANGED.items():
        facts = json.loads((out / "runs" / f"{cell}-s1" / "experiment.json").read_text())
        assert facts["variant"] == (cell if cell == "k_centered" else "plain")
        apart = [abs(losses[cell][step] - later[step]) for step in later]
        assert (max(apart) > 0) is (change > 0) and max(apart) <= change
    assert losses["weight_decay"][9] == later[9]  # the first loss is that of the base's weights


CHANGED = {"control": 0.0, "k_centered": 2e-3, "weight_decay": 2e-2}
"""Cells that continue ``base``, and by how much their losses may leave it: rounding, and decay."""


def _losses(run_dir: Path) -> dict[int, float]:
    with (run_dir / "metrics.csv").open(newline="") as lines:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(lines)}


def test_user_errors(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["experiment", "stability", "--config", str(SMOKE)]
    command += ["--set", f"data.blend.0.path={corpus}"]
    assert app.run([*command, "--only", "nothing", "--dry-run"]) == 2
    assert "has no such cell, run or seed" in capsys.readouterr().err
    assert app.run([*command, "--steps", "99", "--dry-run"]) == 2
    assert "more than the protocol's 12" in capsys.readouterr().err
    assert app.run([*command, "--set", "no.key=1", "--dry-run"]) == 2
    assert app.run([*command, "--dry-run"]) == 0
    assert "2 runs of 12 steps" in capsys.readouterr().out
    many = ROOT / "configs" / "stability" / "baselines.yaml"
    arguments = ["experiment", "stability", "--config", str(many), "--gpus", "1", "--dry-run"]
    assert app.run([*arguments, "--gpus-per-run", "2"]) == 2
    assert "1 GPU(s) for runs of 2" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert app.run([*arguments[:-2], "8", "--out", str(tmp_path / "x")]) == 2
    assert "--gpus 8: this process may use 4 (" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()  # nothing is begun on a GPU of somebody else


def test_a_machine_without_a_gpu_is_told_so_and_not_about_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    many = ROOT / "configs" / "stability" / "baselines.yaml"
    command = ["experiment", "stability", "--config", str(many), "--out", str(tmp_path / "x")]
    assert app.run(command) == 2
    said = capsys.readouterr().err
    assert "sees no GPU" in said and "--gpus 1" not in said
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["stability", "results"])
def test_a_size_of_archives_that_nobody_wants_is_not_ignored(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = str(ROOT / "configs" / "stability" / "smoke.yaml")
    arguments = ["experiment", command, "--config", config, "--out", str(tmp_path / "x")]
    assert app.run([*arguments, "--results-dir", str(tmp_path / "r"), "--mib", "3"]) == 2
    assert "--mib 3 needs --archives" in capsys.readouterr().err
    assert not (tmp_path / "x").exists() and not (tmp_path / "r").exists()
