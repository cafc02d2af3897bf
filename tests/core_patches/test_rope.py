"""Rotary positions in Megatron-Core by our kernel; its angles far from the start."""

from types import SimpleNamespace

import pytest
import torch
from megatron_cpu import MLA, VOCAB, loss_and_grads, reseed, tiny_run

from megatron_patch.core_patches.rope import exact_angles, own_rope
from megatron_patch.model.build import build_model

pytestmark = pytest.mark.usefixtures("rank")


@pytest.fixture
def installed():
    yield own_rope.install
    own_rope.undo()


@pytest.mark.parametrize("shape", [{"rotary_percent": 0.5, "num_query_groups": 2}, {"mla": MLA}])
def test_loss_and_gradients_are_cores(installed, shape):
    """In FP32, where core rounds nothing either."""
    found = []
    for own in (False, True):
        reseed()
        (chunk,) = build_model(tiny_run(shape), vocab_size=VOCAB).chunks
        assert own_rope.install() if own else True
        found.append(loss_and_grads(chunk))
    (loss, grads), (ours, our_grads) = found
    assert ours == pytest.approx(loss, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=1e-4, atol=1e-7)


def test_packed_tokens_are_turned_as_core_turns_them(installed):
    from megatron.core.models.common.embeddings import rope_utils

    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    x = torch.randn(10, 2, 8)
    for rows in (6, 10):  # of the longest sequence, or of the whole pack
        freqs = torch.rand(rows, 1, 1, 4).repeat(1, 1, 1, 2)
        core = rope_utils._apply_rotary_pos_emb_thd(x, cu, freqs, cp_group=group)
        installed()
        ours = rope_utils._apply_rotary_pos_emb_thd(x, cu, freqs, cp_group=group)
        own_rope.undo()
        torch.testing.assert_close(ours, core)


def test_padding_after_the_last_document_reads_no_angle_past_the_table(installed):
    from megatron.core.models.common.embeddings import rope_utils

    cu, group = torch.tensor([0, 4]), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    memory = torch.full((10, 1, 1, 8), torch.nan)
    freqs = memory[:4].zero_()
    assert installed()
    ours = rope_utils._apply_rotary_pos_emb_thd(torch.ones(9, 2, 8), cu, freqs, cp_group=group)
    assert torch.equal(ours, torch.ones(9, 2, 8))


def test_angles_far_from_the_start_are_exact():
    """Of float64 within a rounding of pi; core's are off by more than BF16's cosines."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rope = RotaryEmbedding(128, 1.0, rotary_base=500000, use_cpu_initialization=True)
    first, rows = 131000, 72
    true = torch.outer(torch.arange(first, first + rows).double(), rope.inv_freq.double())
    ours, cores = exact_angles(rope, rows, first), rope.get_freqs_non_repeated(rows, first)
    for f in (torch.sin, torch.cos):
        mine, theirs = ((f(x.double()) - f(true)).abs().max() for x in (ours, cores))
        assert mine < 2.0**-22 and theirs > 2.0**-9
    assert ours.abs().max() <= 3.1416
