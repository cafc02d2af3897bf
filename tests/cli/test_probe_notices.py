"""The probe's output: without what the libraries say at their import, with everything else."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from megatron_patch.cli.probe import known_notices_hidden
from megatron_patch.stability.capture import CaptureFile

LOG = "torch.utils.cpp_extension"
FALLING_BACK = "Transformer Engine and Apex are not installed. Falling back to Torch optimizers."


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


def test_the_command_says_nothing_of_parts_that_it_does_not_use(tmp_path: Path) -> None:
    """In a process of its own: what libraries say at their import they say once."""
    save_capture(tmp_path / "a.pt")
    command = [sys.executable, "-m", "megatron_patch", "probe", str(tmp_path / "a.pt")]
    command += ["--backends", "sdpa_math", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| sdpa_math |" in done.stdout
    assert "not installed" not in done.stderr and "No CUDA runtime" not in done.stderr


class Kept(logging.Handler):
    """Keeps messages; torch's loggers tell the root nothing in some states."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_known_notices_and_no_others_are_hidden() -> None:
    shown = {"category": UserWarning, "filename": "x.py", "lineno": 1}
    log, kept = logging.getLogger(LOG), Kept()
    level = log.level
    log.setLevel(logging.WARNING)  # a trainer that ran in this process leaves it at ERROR
    log.addHandler(kept)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with known_notices_hidden():
                warnings.warn_explicit(FALLING_BACK, module="megatron.core.optimizer", **shown)
                warnings.warn_explicit(FALLING_BACK, module="ours", **shown)
                warnings.warn_explicit("deprecated", module="megatron.core.optimizer", **shown)
                log.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local")
                log.warning("the compiler is too old")
            log.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "after it")
    finally:
        log.removeHandler(kept)
        log.setLevel(level)
    assert [str(one.message) for one in caught] == [FALLING_BACK, "deprecated"]
    assert kept.said == [
        "the compiler is too old",
        "No CUDA runtime is found, using CUDA_HOME='after it'",
    ]
