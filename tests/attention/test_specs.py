"""Specs for other people's programs, and the example that uses one."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec, import_module

from megatron_patch.attention import specs
from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.core import CoreAttention
from megatron_patch.stability import record

ROOT = Path(__file__).resolve().parents[2]


def core_of(spec):
    return spec.submodules.self_attention.submodules.core_attention


@pytest.mark.parametrize("name", specs.SPECS)
def test_megatron_lm_finds_an_object_by_name(name):
    """Megatron-LM does vars(module)[name] and never calls the result."""
    found = import_module(["megatron_patch.attention.specs", name])
    assert isinstance(found, ModuleSpec)
    backend = next(b for b in BACKENDS if name.startswith(f"{b}_"))
    if backend not in ("mcore_local", "te"):
        assert core_of(found).params["backend"] == backend


def test_a_spec_function_keeps_its_signature_and_gets_the_backend():
    def default_layer_spec(config, vp_stage=None):
        return get_gpt_layer_local_spec(normalization=config)

    wrapped = specs.with_backend(default_layer_spec, "stable_flash", stabilizer="none")
    assert not isinstance(wrapped, ModuleSpec)
    assert list(inspect.signature(wrapped).parameters) == ["config", "vp_stage"]
    core = core_of(wrapped("RMSNorm"))
    assert core.module is CoreAttention
    assert core.params == {"backend": "stable_flash", "options": {"stabilizer": "none"}}
    assert core_of(default_layer_spec("RMSNorm")) is DotProductAttention


def plain_megatron(*options: str) -> subprocess.CompletedProcess[str]:
    """The example as its own program, without torchrun and without a GPU."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    } | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples/plain_megatron.py"), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT
    )


def test_plain_megatron_example_without_a_gpu_names_its_option():
    done = plain_megatron()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "PyTorch sees no GPU here; --cpu runs without one" in line


def test_plain_megatron_example_learns(tmp_path):
    """The script runs as its own program, without our trainer, watched, and its loss falls."""
    done = plain_megatron("--cpu", "--steps", "8", "--monitor", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([0-9.]+)$", done.stdout, re.M)]
    assert len(losses) == 8 and losses[-1] < 0.7 * losses[0]
    assert "core attention replaced in 1 layer spec by reference" in done.stdout
    assert "attention: ok" in done.stdout
    found = record.read(tmp_path)
    assert found.steps.tolist() == [2, 4, 6, 8] and found.heads["max_logit"].shape == (4, 2, 4)
    for values in (found.heads["wq_norm"], found.heads["kappa"], found.layers["grad_norm"]):
        assert (values > 0).all()
