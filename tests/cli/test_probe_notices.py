"""The probe's output: without what the libraries say at their import, with everything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_patch.stability.capture import CaptureFile


def save_capture(path: Path) -> None:
    """Two heads of random tensors."""
    q, k, v, dout = torch.randn(4, 96, 1, 2, 8, generator=torch.Generator().manual_seed(0)).to(
        torch.bfloat16
    )
    CaptureFile(
        step=4000, layer=1, layer_name="decoder.layers.1", micro_batch=0, dp_rank=0,
        heads=[0, 1], kv_heads=[0, 1], head_to_kv=[0, 1], q=q, k=k, v=v, out=torch.zeros_like(v),
        dout=dout, sinks=None, wq_norm=torch.ones(2), wk_norm=None, norms_exact=True, scale=0.125,
        causal=True, window=None, dropout_p=0.0, backend="stable_flash", stabilizer="none",
        precision="bf16", run_name="synthetic", trigger="step",
    ).save(path)  # fmt: skip


@pytest.mark.slow
def test_the_command_says_nothing_of_parts_that_it_does_not_use(tmp_path):
    """In a process of its own: what libraries say at their import they say once."""
    save_capture(tmp_path / "a.pt")
    command = [sys.executable, "-m", "megatron_patch", "probe", str(tmp_path / "a.pt")]
    command += ["--backends", "sdpa_math", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| sdpa_math |" in done.stdout
    assert "not installed" not in done.stderr and "No CUDA runtime" not in done.stderr
