"""LSE from the unrounded P is made where somebody asks for it, and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE

from stable_attention import stable_attention
from stable_attention.triton.forward import forward_kernel


def saved(stabilizer: str, **options: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """O, and the float32 tensors that its backward keeps."""
    q, k, v = (
        torch.randn(1, 24, 2, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    result = stable_attention(q, k, v, stabilizer=stabilizer, **options)
    out = result[0] if isinstance(result, tuple) else result
    kept = [x for x in out.grad_fn.saved_tensors if x is not None and x.dtype == torch.float32]
    return out, kept


@pytest.mark.parametrize("stabilizer", ["compensated", "none"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_backward_keeps_one_number_a_row(stabilizer: str, return_lse: bool) -> None:
    _, kept = saved(stabilizer, return_lse=return_lse)
    assert [tuple(x.shape) for x in kept] == [(1, 2, 24)]


def test_training_leaves_the_unrounded_sum_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the four calls only plain numerics need it without being asked."""
    seen = []
    launch = type(forward_kernel).__getitem__

    def spy(kernel: object, grid: object) -> object:
        run = launch(kernel, grid)
        return lambda *args, **named: seen.append(named["SUM"]) or run(*args, **named)

    monkeypatch.setattr(type(forward_kernel), "__getitem__", spy)
    for stabilizer in ("compensated", "none"):
        for return_lse in (False, True):
            seen.clear()
            q = torch.randn(1, 8, 1, 32, device=DEVICE, dtype=torch.bfloat16)
            stable_attention(q, q, q, stabilizer=stabilizer, return_lse=return_lse)
            assert seen == [return_lse or stabilizer == "none"], (stabilizer, return_lse)
