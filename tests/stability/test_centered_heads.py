"""`benchmarks/centered_heads.py`: what centering K or V leaves of the error, on captured heads."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark_scripts
import pytest
import torch


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("centered_heads")


def head(script: Any, common: float) -> Any:
    """Keys that share a vector of that length, in 16 bits as a capture has them."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(200, 8, generator=gen) for _ in range(4))
    q[:, 0] += 2.0  # a shared vector of the keys is a logit only where queries see it
    k[:, 0] += common
    rounded = (x.bfloat16().double() for x in (q, k, v, dout))
    names = ("q", "k", "v", "dout")
    return script.captured.Head(place={}, scale=0.35, **dict(zip(names, rounded, strict=True)))


def test_a_vector_that_all_keys_share_is_no_part_of_the_centered_logits(script: Any) -> None:
    """It makes the logits, and the noise with them, and K minus its mean has neither."""
    small, large = (script.examine(head(script, common)) for common in (0.0, 64.0))
    assert small["share"] < 0.02 and large["share"] > 0.99
    assert large["largest_logit"] > 10 * small["largest_logit"]
    assert large["common"] == pytest.approx(64 * 2 * 0.35, rel=0.1) and abs(small["common"]) < 0.5
    assert large["largest_centered"] == pytest.approx(small["largest_centered"], rel=0.05)
    assert large["noise"] > 10 * small["noise"]
    assert large["noise_k_centered"] == pytest.approx(small["noise_k_centered"], rel=0.5)
    assert 0.3 < small["noise_k_centered"] / small["noise"] < 3  # nothing to take off


def test_a_vector_that_all_of_o_shares_is_no_part_of_what_is_rounded(script: Any) -> None:
    one = head(script, 0.0)
    one.v[:, 0] += 64.0
    found = script.examine(one)
    assert found["noise_v_centered"] < 0.1 * found["noise"]
    assert found["noise_k_centered"] > 0.3 * found["noise"]


def test_what_the_second_rounding_of_k_moves(script: Any) -> None:
    """Nothing where K minus its mean is exact; the common shift of a row's logits is left out."""
    one = head(script, 0.0)
    exact = replace(one, k=torch.cat([one.k, -one.k])[: len(one.k)].round())
    exact.k[-1] -= exact.k.sum(0)  # a mean of zero: every entry stays the integer it was
    assert exact.k.abs().max() < 256
    assert script.examine(exact)["moved"] == 0.0
    assert 0 < script.examine(one)["moved"] < 0.05


def test_the_heads_that_went_have_keys_that_are_one_vector(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shipped captures; and the table tells it."""
    monkeypatch.setattr(sys, "argv", ["centered_heads.py", "--out", str(tmp_path)])
    assert script.main() == 0
    result = json.loads((tmp_path / "centered_heads.json").read_text())
    heads = {(one["run"], one["step"], one["head"]): one for one in result["heads"]}
    assert len(heads) == 12
    went, not_yet = heads["none-s2", 6452, 8], heads["none-s2", 6452, 7]
    assert went["share"] > 0.99 > 0.8 > not_yet["share"]
    assert went["noise_k_centered"] < 0.2 * went["noise"]
    text = benchmark_scripts.load("continued_table").centered(result)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["none-s2, 6,452", "1.6"] in [row[:2] for row in rows]
    (row,) = [row for row in rows if row and row[:2] == ["", "1.8"] and row[3] == "2,094"]
    assert row[2] == "99.8 %" and float(row[4].replace(",", "")) == round(went["common"])
