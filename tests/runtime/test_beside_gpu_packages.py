"""Transformer Engine and Apex that are installed and of no use here, or of the wrong libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_patch.attention import registry
from megatron_patch.runtime import environment
from megatron_patch.schema.problem import ConfigError
from megatron_patch.training import process

TESTS = Path(__file__).resolve().parents[1]
START = """
import sys
sys.path.insert(0, sys.argv[1])
from megatron_cpu import VOCAB, loss_and_grads, single_rank, tiny_run
with single_rank():
    from megatron_patch.model.build import build_model
    from megatron_patch.training.optimizer import build_optimizer, wrap_chunks
    run = tiny_run()
    chunks = wrap_chunks(run, build_model(run, vocab_size=VOCAB).chunks)
    print(build_optimizer(run, chunks)[1], loss_and_grads(chunks[0])[0] > 0)
"""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> Path:
    """Packages that raise, as the real ones do where CUDA's libraries are missing."""
    folder = tmp_path_factory.mktemp("site")
    for name in environment.GPU_PACKAGES:
        (folder / f"{name}.py").write_text("raise RuntimeError('cudnn shared object not found.')")
    return folder


def test_cpu_mode_trains_beside_packages_that_need_a_gpu(stand_ins):
    paths = [str(stand_ins), *sys.path]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START, str(TESTS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "optimizer: PyTorch AdamW" in done.stdout and "True" in done.stdout, done.stderr


def test_hidden_packages_can_be_given_back(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", torch)  # stays: somebody uses it
    for name in environment.GPU_PACKAGES[:2]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    hidden = environment.hide_gpu_packages()
    assert hidden == list(environment.GPU_PACKAGES[:2]) and sys.modules["apex"] is torch
    with pytest.raises(ImportError):
        __import__("transformer_engine")


def test_the_backend_te_is_probed_where_it_computes(monkeypatch):
    """The package imports without its torch extension, too."""
    monkeypatch.setitem(sys.modules, "transformer_engine", torch)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    registry._import_error.cache_clear()
    machine = registry.probe()
    registry._import_error.cache_clear()
    assert "transformer_engine.pytorch" in machine.missing
    assert registry._here("te", machine) == "no transformer_engine.pytorch"


def test_two_cudnns_are_named_with_the_way_to_one(monkeypatch):
    def conflict():
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 19), found (9, 14)")

    assert environment.cudnn_conflict() is None
    monkeypatch.setattr(torch.backends.cudnn, "version", conflict)
    text = environment.cudnn_conflict()
    assert text is not None
    for piece in ("found (9, 14)", "CUDNN_HOME=", "LD_LIBRARY_PATH="):
        assert piece in text


@pytest.mark.parametrize(("recipe", "sm", "text"), [
    ("mxfp8", (9, 0), "sm_90, and scales of 32 values are applied by the tensor cores of sm_100"),
    ("blockwise", (8, 9), "needs sm_90"),
    ("current", (9, 0), ""),
    ("mxfp8", (10, 0), ""),
])  # fmt: skip
def test_a_recipe_is_refused_by_the_gpu_it_cannot_run_on(recipe, sm, text, monkeypatch):
    from megatron_cpu import tiny_run

    monkeypatch.delenv("NVTE_DPA_FP8_RECIPE", raising=False)
    run = tiny_run(training={"fp8": recipe}, attention={"fp8": True})
    if text:
        with pytest.raises(ConfigError, match=text):
            process._prepare_fp8(run, sm)
    else:
        process._prepare_fp8(run, sm)
        chosen = os.environ.pop("NVTE_DPA_FP8_RECIPE", None)
        assert chosen == ("DelayedScaling" if sm < (10, 0) else None)
