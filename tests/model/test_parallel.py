"""The model over two gloo ranks: norms under sequence parallelism, pipeline stages, experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_ranks import run_script

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run_script(Path(__file__).with_name("two_ranks.py"), [], folder, 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def worst(one, other) -> float:
    return max(
        (torch.tensor(value) - torch.tensor(other[name])).abs().max().item()
        for name, value in one.items()
    )


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp", "tp2 sp compiled loss"])
def test_norm_gradients_are_those_of_one_rank(seen, layout):
    """Without the mark on our norms, each rank would keep the sum over its part of the sequence."""
    plain = seen[0]["dp2"]
    assert len(plain["grads"]) == 2 * 8 + 2  # weight and bias of 4 norms a layer, and the last
    for rank in seen:
        assert rank[layout]["loss"] == pytest.approx(plain["loss"], rel=1e-6)
        assert worst(plain["grads"], rank[layout]["grads"]) < 1e-6
    wrong = [worst(plain["grads"], rank["tp2 sp unmarked"]["grads"]) for rank in seen]
    assert min(wrong) > 1e-4


def test_latent_attention_sums_the_rotary_key_over_ranks(seen):
    """Megatron-Core's own module keeps each rank's heads to itself: input_layernorm shows it."""
    plain = seen[0]["mla dp2"]["grads"]
    name = "decoder.layers.0.input_layernorm.weight"
    scale = torch.tensor(plain[name]).abs().max().item()
    for layout in ("mla tp2", "mla tp2 sp"):
        assert worst({name: plain[name]}, seen[0][layout]["grads"]) < 1e-5 * scale
    assert worst({name: plain[name]}, seen[0]["mla tp2 stock"]["grads"]) > 1e-3 * scale
    # Why checks.py asks for sequence parallelism with a query latent and its norm.
    query = "decoder.layers.0.self_attention.q_layernorm.weight"
    doubled = {query: [2 * x for x in plain[query]]}
    assert worst(doubled, seen[0]["mla tp2"]["grads"]) < 1e-5
    assert worst({query: plain[query]}, seen[0]["mla tp2 sp"]["grads"]) < 1e-5


def test_pipeline_stages_hold_their_layers(seen):
    assert [rank["pp2"] for rank in seen] == [[[[1], False]], [[[2], False]]]
    assert seen[0]["pp2 vp2"] == [[[1], False], [[3], False]]
    assert seen[1]["pp2 vp2"] == [[[2], False], [[4], True]]


def test_experts_are_spread(seen):
    for layout in ("ep2", "tp2 sp moe"):
        assert seen[0][layout][0] == pytest.approx(seen[1][layout][0], rel=1e-6)
        assert [rank[layout][1] for rank in seen] == [2, 2]
