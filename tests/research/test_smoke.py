"""Cells through the real trainer on the CPU: in two calls, refused, and continuing another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cell
import pytest

from megatron_patch.runtime.records import read_rows

ROOT = Path(__file__).resolve().parents[2]
RUN, PROTOCOLS = ROOT / "research" / "run.py", ROOT / "research" / "protocols"


def losses(run_dir: Path) -> dict[int, float]:
    rows = read_rows(run_dir / "metrics.csv")
    return {int(row["step"]): float(row["loss"]) for row in rows}


CONTINUED = """\
cells:
  - {name: base, set: [checkpoint.interval=4, checkpoint.keep_last=null]}
  - {name: control, from_cell: base, before: 4, follow: 8}
  - {name: k_centered, from_cell: base, before: 4, follow: 8, variant: k_centered}
"""


@pytest.mark.slow  # test_run.py has the runner's part, with a stand-in of the trainer
@pytest.mark.multiprocess
def test_an_interrupted_protocol_goes_on_and_changes_one_thing(corpus, tmp_path):
    """As a person and a batch system run it, with cells that continue another one.

    A variant is in force from the checkpoint on; the control repeats its base bit for bit.
    """
    head = (PROTOCOLS / "smoke_rescue.yaml").read_text().split("cells:")[0]
    head = head.replace("base/tiny_cpu.yaml", str(PROTOCOLS / "base" / "tiny_cpu.yaml"))
    protocol, out = tmp_path / "continued.yaml", tmp_path / "out"
    protocol.write_text(head.replace("steps: 40", "steps: 24") + CONTINUED)
    command = [sys.executable, str(RUN), str(protocol), "--out", str(out), "--gpus", "2"]
    command += ["--set", f"data.blend.0.path={corpus}"]
    environment = os.environ | {"SOURCE_COMMIT": "test"}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    table = out / "runs" / "base-s1" / "metrics.csv"
    while first.poll() is None and not (table.exists() and table.read_text().count("\n") > 1):
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate()
    # On a quick machine it may have been at its end.
    assert first.returncode == 0 and "stopping: running cells save first" in said
    cut = losses(out / "runs" / "base-s1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (said + done.stdout).count("from step 8 of base-s1 (event at 12)") == 2
    result = json.loads((out / "results" / "verdicts.json").read_text())
    base, control, _ = result["runs"]
    assert result["unlike"] == [] and base["data"] == control["data"] is not None
    assert base["commit"] == ["test"] and base["torch"] and base["platform"]
    assert sum(a["to_step"] - a["from_step"] for a in base["attempts"]) == 24
    whole = losses(out / "runs" / "base-s1")
    assert sorted(whole) == [*range(1, 25)] and cut.items() <= whole.items()
    later = {step: loss for step, loss in whole.items() if 8 < step <= 20}
    assert losses(out / "runs" / "control-s1") == later
    # The variant changes rounding, and nothing else.
    centered = losses(out / "runs" / "k_centered-s1")
    assert 0 < max(abs(centered[step] - later[step]) for step in later) < 2e-3


def test_a_cell_refuses_a_variant_that_does_not_fit(tmp_path, monkeypatch, capsys):
    """Before anything is built: no run directory."""
    command = ["cell.py", "--variant", "low_order_o", "--set", f"run_dir={tmp_path / 'run'}"]
    command += ["--config", str(PROTOCOLS / "base" / "tiny_cpu.yaml")]
    monkeypatch.setattr(sys, "argv", command)
    assert cell.main() == 2 and "it changes stable_flash" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
