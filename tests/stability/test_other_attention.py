"""The monitor on attention of other programs, on a CPU: under autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_cpu import single_rank

from megatron_patch.stability import AttentionMonitor, MonitorOptions, record
from megatron_patch.stability.adapters.torch_loop import watch

H, S, D = 2, 96, 16
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    """Megatron-Core's CPU mode: the monitor imports it."""
    with single_rank():
        yield


class Attend(torch.nn.Module):
    """PyTorch's; q, k, v [b, h, s, d]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Net(torch.nn.Module):
    """Layers of attention side by side, whose q, k and v go through ``form`` first."""

    def __init__(self, form: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.qkv, self.form = torch.nn.Linear(16, 3 * H * D, bias=False), form
        torch.nn.init.normal_(self.qkv.weight, std=2.0, generator=torch.Generator().manual_seed(0))
        self.layers = torch.nn.ModuleList(Attend() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.form(x) for x in self.qkv(x).unflatten(2, (3, H, D)).permute(2, 0, 3, 1, 4))
        return torch.stack([layer(q, k, v).float().square().mean() for layer in self.layers]).sum()


def heads_of(folder: Path, model: Net) -> dict[str, np.ndarray]:
    """What one observed step under autocast tells of every head."""
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    monitor = AttentionMonitor(watched, directory=folder, options=MonitorOptions(interval=1))
    monitor.before_step(1)
    x = torch.randn(2, S, 16, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x)
    loss.backward()
    monitor.grads_reduced()
    monitor.after_step(1, loss=loss)
    monitor.finish(1)
    monitor.close()
    return record.read(folder).heads


def test_inputs_that_autocast_rounds_are_no_error_of_attention(tmp_path):
    """After RoPE or a norm in float32, as Llama's in Hugging Face's `Trainer` with ``bf16``. The
    rounding of q and k counted as the kernel's own, ten times what that was: a false alarm."""
    wide = heads_of(tmp_path / "wide", Net(lambda x: x.float() * 1.1))
    narrow = heads_of(tmp_path / "narrow", Net(lambda x: (x.float() * 1.1).bfloat16()))
    for name, values in wide.items():
        assert np.array_equal(values, narrow[name], equal_nan=True), name
    assert (wide["dk_sum"] < 30).all() and (wide["used_error_rms"] > 0).all()
