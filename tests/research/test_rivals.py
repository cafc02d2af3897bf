"""The published monitors against dense algebra, over a resume, and when one of them fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rivals
import torch

from megatron_patch.runtime.watcher import ResumePoint, StepResult

HEADS, DIM, HIDDEN = 2, 3, 8


def test_the_entropy_is_that_of_the_dense_change():
    torch.manual_seed(0)
    q, k, dq, dk = torch.randn(4, HEADS, DIM, HIDDEN, dtype=torch.float64).unbind()
    dq *= 1e-3
    first, second = rivals._gram(dq, q).numpy(), rivals._gram(k, dk).numpy()
    entropy, change = rivals.delta2(first, second)
    dense = dq.mT @ k + q.mT @ dk
    p = torch.linalg.svdvals(dense).square()
    p = p / p.sum(-1, keepdim=True)
    wanted = -(p * p.clamp_min(1e-300).log()).sum(-1)
    np.testing.assert_allclose(entropy, wanted.numpy(), rtol=1e-9)
    size = dense.norm(dim=(1, 2)) / (q.mT @ k).norm(dim=(1, 2))
    np.testing.assert_allclose(change, size.numpy(), rtol=1e-9)


def test_the_vector_is_the_principal_one():
    torch.manual_seed(0)
    w = torch.randn(3, 20, HIDDEN)
    found = rivals.principal(w, None)
    for _ in range(20):
        found = rivals.principal(w, found)
    wanted = torch.linalg.svd(w)[2][:, 0]
    torch.testing.assert_close((found * wanted).sum(1).abs(), torch.ones(3))


class Attention(torch.nn.Module):
    """A layer's projections, as Megatron-Core names them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = torch.nn.Linear(HIDDEN, 3 * HEADS * DIM, bias=False)
        self.linear_proj = torch.nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.num_attention_heads_per_partition = self.num_query_groups_per_partition = HEADS
        self.hidden_size_per_attention_head = DIM


def start(folder: Path, said: list[str]) -> tuple[Any, list[rivals.Rival]]:
    layer = SimpleNamespace(self_attention=Attention(), mlp=SimpleNamespace())
    site: Any = SimpleNamespace(attention=layer.self_attention, layer=0, name="layer 0")
    both = [
        kind({_Key(site): layer}, interval=4, phase=2, folder=folder / "rivals", say=said.append)
        for kind in (rivals.Entropy, rivals.Alignment)
    ]
    return layer, both


class _Key(SimpleNamespace):
    """A site: compared by identity."""

    def __init__(self, site: Any) -> None:
        super().__init__(**vars(site))

    __hash__ = object.__hash__


def train(layer: Any, both: list[rivals.Rival], first: int, last: int) -> None:
    at = ResumePoint(first - 1, 0, {}, has_saved=False)
    for rival in both:
        rival.load_state(at)
    for step in range(first, last + 1):
        for rival in both:
            rival.before_step(step)
        for _ in range(2):  # micro-batches
            layer.self_attention.linear_qkv(torch.randn(5, 2, HIDDEN))
            layer.self_attention.linear_proj(torch.randn(5, 2, HEADS * DIM))
        with torch.no_grad():
            layer.self_attention.linear_qkv.weight.add_(0.1 * torch.randn(3 * HEADS * DIM, HIDDEN))
        for rival in both:
            rival.after_step(step, StepResult(None, 0.0, 0.0))
    for rival in both:
        rival.close()


def steps(rival: rivals.Rival) -> list[int]:
    lines = rival.file.read_text().splitlines()[1:]
    return sorted({int(line.partition(",")[0]) for line in lines})


def test_a_resume_repeats_no_line(tmp_path):
    torch.manual_seed(0)
    tmp_path.joinpath("rivals").mkdir()
    said: list[str] = []
    train(*start(tmp_path, said), 1, 12)
    layer, both = start(tmp_path, said)
    train(layer, both, 9, 16)
    assert said == []
    # The first after a resume has no weights to compare with.
    assert [steps(rival) for rival in both] == [[6, 14], [2, 6, 10, 14]]
    last = both[1].file.read_text().splitlines()[-1].split(",")
    shares = [float(x) for x in last[3:11:2]]
    assert last[:3] == ["14", "0", "-1"] and all(0 <= x <= 1 for x in shares)


@pytest.mark.parametrize("where", ["look", "rows"])
def test_a_failure_ends_the_rival_alone(tmp_path, monkeypatch, where):
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rivals.Entropy, where, fail)
    said: list[str] = []
    layer, both = start(tmp_path, said)
    train(layer, both, 1, 12)
    assert len(said) == 1 and "rival entropy has failed" in said[0] and "out of memory" in said[0]
    assert [steps(rival) for rival in both] == [[], [2, 6, 10]]
