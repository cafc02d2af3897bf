"""``data.document_attention``: a pack of documents trains what each trains by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron_cpu import MLA, SEQ, VOCAB, layout, reseed, single_rank, tiny_run

from megatron_patch.config import checks
from megatron_patch.data.loader import pack
from megatron_patch.model.build import build_model
from megatron_patch.schema.data import DataConfig
from megatron_patch.schema.model import MoEConfig, MTPConfig
from megatron_patch.schema.training import RecomputeConfig
from megatron_patch.stability import observe
from megatron_patch.stability.sampling import Geometry, measure, sample
from megatron_patch.training.step import _of_one_length, forward_step
from stable_attention.reference import reference_attention

EOD = VOCAB - 1
DOCUMENTS = [(5, 1, 3, 7), (16,)]
"""Lengths of the documents of each row, ends included; the last of a row are cut by its end."""


def rows() -> torch.Tensor:
    """Two rows [2, SEQ + 1] of random tokens."""
    x = torch.randint(0, EOD, (2, SEQ + 1), generator=torch.Generator().manual_seed(5))
    for row, lengths in zip(x, DOCUMENTS, strict=True):
        for end in torch.tensor(lengths).cumsum(0)[:-1]:
            row[end - 1] = EOD
    return x


def documented(model: dict[str, Any] | None = None, **training: Any) -> Any:
    run = tiny_run(model, training=training)
    return dataclasses.replace(run, data=DataConfig(document_attention=True))


def gradients(chunk: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    chunk.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in chunk.named_parameters() if p.grad is not None}


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learned": ({"position_embedding": "learned_absolute"}, {}),
    "rope": ({"num_query_groups": 2, "window": [4, 0], "softmax_type": "learnable"}, {}),
    "recomputed": ({}, {"recompute": RecomputeConfig(granularity="full")}),
    "latent": ({"mla": MLA}, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_documents_alone(name):
    model, training = MODELS[name]
    x = rows()
    with single_rank():
        reseed()
        (chunk,) = build_model(documented(model, **training), vocab_size=VOCAB).chunks
        batch = pack(x, EOD, layout(), multiple=1)
        output, loss_of = forward_step(layout())(iter([batch]), chunk)
        total, tokens, _ = loss_of(output)
        packed = gradients(chunk, total)
        alone = torch.zeros(())
        count = 0
        for row, lengths in zip(x, DOCUMENTS, strict=True):
            at = 0
            for length in lengths:
                document, after = row[at : at + length], row[at + 1 : at + length + 1]
                at += length
                losses = chunk(
                    document[None], torch.arange(length)[None], None, labels=after[None].clone()
                )
                keep = (document != EOD)[None]
                alone, count = alone + losses[keep].sum(), count + int(keep.sum())
        expected = gradients(chunk, alone)
    assert int(tokens) == count
    torch.testing.assert_close(total, alone, rtol=1e-6, atol=0)
    for parameter, gradient in expected.items():
        torch.testing.assert_close(packed[parameter], gradient, rtol=1e-5, atol=1e-6)


def _tokens(packs: list[Any], names: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Those with loss, of all ranks."""
    columns = (torch.cat([p[n][p["loss_mask"] > 0] for p in packs]).tolist() for n in names)
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_every_token_is_on_one_context_parallel_rank(size):
    x = rows()
    whole = pack(x, EOD, layout(), multiple=1)
    parts = [pack(x, EOD, layout(cp_rank=r, cp_size=size), multiple=8) for r in range(size)]
    assert {part["tokens"].shape[1] % 8 for part in parts} == {0}
    assert sum(part["loss_mask"].sum() for part in parts) == whole["loss_mask"].sum()
    names = ("tokens", "labels", "position_ids")
    found, expected = (sorted(_tokens(ps, names)) for ps in (parts, [whole]))
    assert found == expected


def test_packs_of_a_step_get_one_length():
    x = rows()
    packs = [pack(row[None], EOD, layout(cp_size=2), multiple=4) for row in x]
    sizes = [p["tokens"].shape[1] for p in packs]
    longer, length = _of_one_length(list(packs))
    assert sizes[0] != sizes[1] and length == max(sizes)
    assert {p["labels"].shape[1] for p in longer if p is not None} == {length}


@pytest.mark.parametrize(
    ("model", "training", "parallel", "complaint"),
    [
        ({"mtp": MTPConfig(num_layers=1)}, {}, {}, "model.mtp"),
        ({"moe": MoEConfig(num_experts=4)}, {}, {"context_parallel_size": 2}, "padding"),
        ({"moe": MoEConfig(num_experts=4, load_balancing="seq_aux_loss")}, {}, {}, "as one"),
    ],
)
def test_refused(model, training, parallel, complaint):
    run = tiny_run(model, training=training, parallel=parallel)
    run = dataclasses.replace(run, data=DataConfig(document_attention=True))
    found = [p.message for p in checks.data_problems(run) if p.path == "data.document_attention"]
    assert any(complaint in text for text in found)


@pytest.mark.parametrize("backend", ["mcore_local", "sdpa_cudnn", "sdpa_flash"])
def test_backends_without_packed_input_are_refused(backend):
    run = tiny_run(attention={"backend": backend}, training={"precision": "bf16"})
    run = dataclasses.replace(run, data=DataConfig(document_attention=True))
    found = [p.message for p in checks.attention.problems(run)]
    assert any("data.document_attention" in text for text in found)


def test_the_telemetry_sees_the_documents():
    """Float32 attention of sampled rows of a pack is that of the packed backend."""
    cu = torch.tensor([0, 9, 10, 33, 48], dtype=torch.int32)
    q, k, v = (torch.randn(48, heads, 8) for heads in (4, 2, 2))
    expected = reference_attention(q, k, v, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu,
                                   window=(-1, 0))  # fmt: skip
    geometry = Geometry(scale=8**-0.5, causal=True, starts=observe._starts(cu, 48))
    rows = torch.tensor([0, 9, 10, 20, 33, 47])
    sampled = sample(rows, tokens=48, geometry=geometry)
    one = [x.unsqueeze(1) for x in (q[rows], k, v, torch.randn(len(rows), 4, 8))]
    facts = measure(*one, sampled=sampled, geometry=geometry)
    torch.testing.assert_close(facts.out[0].transpose(0, 1), expected[rows], rtol=1e-5, atol=1e-6)
