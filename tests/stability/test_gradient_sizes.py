"""`benchmarks/gradient_sizes.py`: sizes of gradients and of their errors, on captured heads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import benchmark_scripts
import pytest
import torch


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("gradient_sizes")


def head(script: Any, dtype: torch.dtype) -> Any:
    gen = torch.Generator().manual_seed(0)
    names = ("q", "k", "v", "dout")
    tensors = {n: torch.randn(96, 16, generator=gen).to(dtype).double() for n in names}
    return script.captured.Head(place={"run": "r"}, scale=0.25, **tensors)


def test_the_true_gradients_are_those_of_the_softmax(script: Any) -> None:
    one = head(script, torch.bfloat16)
    q, k = one.q.clone().requires_grad_(), one.k.clone().requires_grad_()
    scores = (q @ k.T * one.scale).masked_fill(one.scores().isinf(), -torch.inf)
    wanted = torch.autograd.grad(torch.softmax(scores, -1) @ one.v, (q, k), one.dout)
    for found, true in zip(script.exact(one), wanted, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_are_those_of_the_type_that_was_captured(script: Any, dtype: torch.dtype) -> None:
    found = script.examine(head(script, dtype))
    smallest = torch.finfo(dtype).eps / 16  # half an ulp, in the mean over elements
    for of in ("dq", "dk"):
        relative = found["errors"]["float32"][of] / found["true"][of]
        assert smallest < relative < torch.finfo(dtype).eps
        assert found["errors"]["float32"][of] < found["errors"]["none"][of]


def test_tensors_of_no_sixteen_bit_type_are_refused(script: Any) -> None:
    with pytest.raises(ValueError, match="in none of"):
        script.examine(head(script, torch.float32))


def test_heads_that_went(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shipped captures plain numerics get more of dQ wrong than there is; the table, too."""
    monkeypatch.setattr(sys, "argv", ["gradient_sizes.py", "--out", str(tmp_path)])
    assert script.main() == 0
    result = json.loads((tmp_path / "gradient_sizes.json").read_text())
    heads = {(one["run"], one["step"], one["head"]): one for one in result["heads"]}
    gone = heads["none-s2", 7502, 9]
    assert gone["errors"]["none"]["dq"] > gone["true"]["dq"]
    assert gone["errors"]["compensated"]["dq"] < 0.1 * gone["errors"]["none"]["dq"]
    one_hot = heads["none-s2", 7502, 8]  # its true dQ is nothing, and all make the same of it
    assert one_hot["errors"]["compensated"] == one_hot["errors"]["none"]
    lines = benchmark_scripts.load("probe_tables").gradient_sizes(result).splitlines()
    (row,) = [line for line in lines if line.startswith("| none-s2, 7,502, layer 1 |")]
    assert len(lines[2].split("|")) == len(row.split("|")) == 12
