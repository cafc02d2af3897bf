"""`benchmarks/logit_growth.py`: what errors of delta do to the growth of logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import benchmark_scripts
import pytest
import torch

CAPTURE = "step_00006452.layer_001.tp_0.watch.pt"


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("logit_growth")


def test_it_is_the_derivative_with_respect_to_a_factor_on_the_logits(script: Any) -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(12, 4, generator=gen, dtype=torch.float64) for _ in range(4))
    one = script.captured.Head(place={}, q=q, k=k, v=v, dout=dout, scale=0.7)
    factor = torch.ones(12, 1, dtype=torch.float64, requires_grad=True)
    logits = (q @ k.T * one.scale * factor).masked_fill(one.scores().isinf(), -torch.inf)
    (torch.softmax(logits, -1) @ v * dout).sum().backward()
    assert factor.grad is not None
    torch.testing.assert_close(script.growth(one, script.true_ds(one)), factor.grad[:, 0])


def test_in_the_head_that_ran_away_the_error_decides(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Plain numerics, and only there: not in the other heads, and not with `compensated`."""
    file = script.captured.CAPTURES / CAPTURE
    monkeypatch.setattr(sys, "argv", ["logit_growth.py", str(file), "--out", str(tmp_path)])
    assert script.main() == 0
    heads = json.loads((tmp_path / "logit_growth.json").read_text())["heads"]
    noise = {one["head"]: one["none"]["noise"] for one in heads}
    assert sorted(noise) == [6, 7, 8, 9] and noise.pop(8) > 30 > 0.5 > max(noise.values())
    assert all(one["compensated"]["noise"] < 0.5 * one["none"]["noise"] for one in heads)
    kept = ["--keep", str(tmp_path / "logit_growth.json")]
    other = str(script.captured.CAPTURES / "step_00006152.layer_001.tp_0.danger.pt")
    for files, count in ([other], 8), ([other, str(file)], 8):  # computed again: replaced
        arguments = ["logit_growth.py", *files, *kept, "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", arguments)
        assert script.main() == 0
        both = json.loads((tmp_path / "logit_growth.json").read_text())["heads"]
        assert len(both) == count
        assert ["commit" in one for one in both] == [len(files) == 1] * 4 + [False] * 4
    monkeypatch.setattr(sys, "argv", ["logit_growth.py", str(tmp_path / "nothing.pt")])
    with pytest.raises(SystemExit):
        script.main()
    assert "nothing.pt" in capsys.readouterr().err


def test_heads_are_of_the_run_whose_directory_has_the_capture(script: Any, tmp_path: Path) -> None:
    """A second attempt is named by a link; its captures know the run's own name only."""
    run = tmp_path / "runs" / "none-s2"
    (run / "captures").mkdir(parents=True)
    (run / "config.yaml").touch()
    (tmp_path / "none-s2, again").symlink_to(run)
    names = [
        script.captured._run_of(folder / "captures" / CAPTURE)
        for folder in (run, tmp_path / "none-s2, again", tmp_path / "nowhere")
    ]
    assert names == ["none-s2", "none-s2, again", ""]


def test_a_head_without_a_derivative_is_error_only(script: Any) -> None:
    """Rows that are saturated to the last bit of float64."""
    q, k = torch.eye(80, dtype=torch.float64) * 1e4, torch.eye(80, dtype=torch.float64)
    v = torch.randn(80, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = script.captured.Head(place={}, q=q, k=k, v=v, dout=v.flip(0), scale=1.0)
    noise = script.examine(one)["none"]["noise"]
    assert noise is None
    tables = benchmark_scripts.load("stability_tables")
    assert tables._noise([noise]) == "error only" and tables._noise([]) == "-"
    assert tables._noise([None, 0.25]) == "0.25 to error only"


def test_what_the_halves_leave_is_told_by_size_of_the_logits(script: Any) -> None:
    tables = benchmark_scripts.load("stability_tables")
    place = {"run": "a-s1", "step": 5, "layer": 1}

    def head(number: int, logit: float, *noise: float | None) -> dict[str, Any]:
        kinds = dict(zip(script.KINDS, ({"noise": x, "side": 0.0} for x in noise), strict=False))
        return place | {"head": number, "largest_logit": logit} | kinds

    rows = [
        head(0, 30, 0.1, 0.05, 0.1, 0.02),
        head(1, 40, 0.2, 0.02, 0.22, 0.04),
        head(2, 5000, None, None, None, None),  # saturated: nothing to compare with
        head(3, 50, 0.3),  # an earlier result, without the halves
    ]
    text = tables.halves(
        {"heads": rows, "versions": {}, "machine": {"cpu": ""}, "commit": "", "utc": ""}
    )
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    found = {line[0]: line[1:] for line in lines if line}
    assert found["25 to 100"] == [
        *("2", "0.1 to 0.2", "0.30 (0.1 to 0.5)", "1.05 (1 to 1.1)", "0.20 (0.2)"),
    ]
    assert found["over 1,000"] == ["0", "-", "-", "-", "-"]
    assert "of 1 captures" in text
    assert list(script.KINDS) == ["none", *tables.HALVES]
