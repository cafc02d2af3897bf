"""The split of the QKV projection: its gradient is not copied where it need not be."""

import pytest
import torch
from megatron.core.transformer import attention
from megatron_cpu import loss_and_grads, tiny_run
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patch.core_patches import split
from megatron_patch.model.build import build_model

pytestmark = pytest.mark.usefixtures("rank")


class Concatenations(TorchDispatchMode):
    """Counts how often three tensors of four dimensions become one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.cat.default and [x.dim() for x in args[0]] == [4] * 3:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_gradients_are_those_of_torch():
    x = torch.randn(3, 2, 4, 24, dtype=torch.float64, requires_grad=True)
    sizes = [16, 4, 4]
    ours, theirs = split.split(x, 3, sizes), torch.split(x, sizes, dim=3)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for weights in ([1.0, 2.0, 3.0], [1.0, None, 3.0]):  # a piece that nobody used
        pairs = [(a, b, w) for a, b, w in zip(ours, theirs, weights, strict=True) if w]
        (got,) = torch.autograd.grad(
            sum((a * w).sin().sum() for a, _, w in pairs), x, retain_graph=True
        )
        (want,) = torch.autograd.grad(
            sum((b * w).sin().sum() for _, b, w in pairs), x, retain_graph=True
        )
        assert torch.equal(got, want)


GPT2 = {"position_embedding": "learned_absolute", "normalization": "LayerNorm"}


@pytest.mark.parametrize(
    ("model", "copies"),
    [(GPT2, 0), (GPT2 | {"num_query_groups": 2}, 1), ({"position_embedding": "rope"}, 1)],
)
def test_a_model_copies_only_what_is_apart(model, copies, monkeypatch):
    """And trains to the same bits as with PyTorch's split."""
    run = tiny_run(
        model | {"num_layers": 2},
        training={"precision": "bf16"},
        attention={"backend": "stable_flash"},
    )
    split.qkv_split.undo()
    with monkeypatch.context() as patch:
        patch.setattr(split.qkv_split, "install", lambda: False)
        assert attention.SplitAlongDim is None
        (plain,) = build_model(run, vocab_size=96).chunks
        loss, grads = loss_and_grads(plain)
    (chunk,) = build_model(run, vocab_size=96).chunks
    chunk.load_state_dict(plain.state_dict())
    for x in chunk.parameters():
        x.grad = None
    with Concatenations() as seen:
        found, ours = loss_and_grads(chunk)
    assert found == loss
    assert ours.keys() == grads.keys()
    assert all(torch.equal(ours[name], grads[name]) for name in grads)
    assert seen.count == copies * 2
