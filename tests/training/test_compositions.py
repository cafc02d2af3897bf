"""Features times layouts: loss, gradient norm and every gradient are those of one bare model.

The sequences of the batch carry very different numbers of tokens with loss (`compositions.rows`),
so that a mean of means, a count of one rank and a sum over copies all show. Megatron-LM #7452 and
ROCm Transformer Engine #715 list such faults of Megatron-Core; FAULTS plants them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compositions
import pytest
import torch
from compositions import CASES, FAULTS, FEATURES, FOUR, ROWS, TWO, TWO_MORE
from megatron_cpu import SEQ, layout, single_rank
from training_ranks import run_script

from megatron_patch.context_parallel.layout import shard
from megatron_patch.schema.data import DataConfig
from megatron_patch.training import auxiliary

pytestmark = pytest.mark.multiprocess
FIGURES, GRADIENTS = 2e-6, 1e-5  # relative: FP32 sums in another order; measured 4e-7 and 3e-6


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, float]]:
    """Figures of the references; their weights and gradients are on the disk."""
    with single_rank():
        found = {name: compositions.reference(features) for name, features in FEATURES.items()}
    torch.save(found, folder / "reference.pt")
    return {name: one["figures"] for name, one in found.items()}


def run_cases(folder: Path, ranks: int, names: Any) -> list[dict[str, Any]]:
    """What every rank saw of each case; one start."""
    run_script(Path(compositions.__file__), [json.dumps(list(names))], folder, ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def errors(seen: list[dict[str, Any]], expected: dict[str, Any], name: str) -> dict[str, float]:
    """Largest relative error of a figure and of a gradient on any rank."""
    figures = expected[CASES[name].features]
    worst: dict[str, float] = {}
    for rank in seen:
        for key, value in rank[name]["figures"].items():
            worst[key] = max(worst.get(key, 0.0), abs(value - figures[key]) / figures[key])
        parameter, error = rank[name]["worst"]
        key = f"gradient of {parameter}"
        worst[key] = max(worst.get(key, 0.0), error)
    return worst


def wrong(seen: list[dict[str, Any]], expected: dict[str, Any], name: str) -> dict[str, float]:
    found = errors(seen, expected, name)
    return {k: e for k, e in found.items() if e > (GRADIENTS if "gradient" in k else FIGURES)}


def test_a_batch_without_a_token_of_loss_changes_nothing(folder, expected, monkeypatch):
    found = torch.load(folder / "reference.pt", weights_only=True)["mtp moe"]
    batch = compositions.rows()
    batch["loss_mask"].zero_()
    monkeypatch.setattr(compositions, "rows", lambda: batch)
    with single_rank():
        seen = compositions.step(CASES["mtp moe dp2"].run, found)
    figures = seen["figures"]
    assert {figures[name] for name in ("loss", "eval", "mtp", "norm", "layers")} == {0.0}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("cp", "depths"), [(1, 0), (1, 3), (2, 1), (2, 7), (4, 2), (8, 5)])
def test_tokens_of_every_depth(cp, depths, masked):
    """Ranks with any part of the sequences count each token of a depth once."""
    run = compositions.run_of(FEATURES["dense"], {})
    run = dataclasses.replace(run, data=DataConfig(eod_mask_loss=masked))
    mask = compositions.rows()["loss_mask"] if masked else torch.ones(ROWS, SEQ)
    total = torch.zeros(1 + depths)
    with single_rank():
        for rank in range(cp if masked else 1):
            where = layout(cp_rank=rank, cp_size=cp)
            batches = [{"loss_mask": shard(m[None], rank=rank, size=cp, dim=1)} for m in mask]
            session: Any = SimpleNamespace(run=run, layout=where, sequences=ROWS)
            total += auxiliary._tokens(session, batches, depths)
    assert total.tolist() == [mask[:, depth:].sum().item() for depth in range(1 + depths)]


@pytest.fixture(scope="module")
def two(folder: Path, expected: Any) -> list[dict[str, Any]]:
    return run_cases(folder, 2, TWO | FAULTS)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two, expected, name):
    assert wrong(two, expected, name) == {}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows(two, expected, name):
    assert "norm" in wrong(two, expected, name)


@pytest.mark.slow
def test_more_on_two_ranks(folder, expected):
    seen = run_cases(folder, 2, TWO_MORE)
    assert {name: wrong(seen, expected, name) for name in TWO_MORE} == {n: {} for n in TWO_MORE}


@pytest.mark.slow
def test_four_ranks(folder, expected):
    seen = run_cases(folder, 4, FOUR)
    assert {name: wrong(seen, expected, name) for name in FOUR} == {name: {} for name in FOUR}
