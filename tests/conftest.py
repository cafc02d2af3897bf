"""What every test shares: the GPU marker, the Triton interpreter on machines without one, seeds.

Nothing here imports torch or Triton while tests are collected.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Helpers of the tests are plain modules beside them (importmode=importlib adds no path).
sys.path += [
    str(Path(__file__).resolve().parent / room)
    for room in ("", "context_parallel", "faults", "fuzz", "kernels", "planner", "slurm")
]

import interpreter_shim
from cuda_devices import cuda_devices

from megatron_patch.runtime import environment

NO_GPU = "needs a CUDA device; none here"
# Files that take minutes, longest first: a worker that begins one of them last works alone.
_LONG = """
    golden/test_golden.py kernels/test_planted_bugs.py stability/test_runs.py
    faults/test_injected.py training/test_layouts.py training/test_context_parallel.py
    kernels/test_aot.py kernels/test_error_rule.py training/test_chain_of_runs.py
    training/test_compositions.py faults/test_hang_runs.py faults/test_hopeless_errors.py
    checkpoint/test_resume.py training/test_stops.py faults/test_spike_runs.py
    training/test_gate_ranks.py stability/test_guard_resumes.py
    stability/test_pinned_checkpoints.py stability/test_used_errors.py faults/test_hang.py
    planner/test_activations.py kernels/test_ops_torch.py kernels/test_side_by_side.py
    context_parallel/test_gloo.py context_parallel/test_failure.py
"""
LONG = tuple(_LONG.split())


if cuda_devices() == 0:
    # Test modules import Megatron-Core before CPU mode is there to hide what computes on GPUs only.
    environment.hide_gpu_packages()
    # Triton reads this when a kernel is decorated, hence before any test module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter_shim.install_on_import()


if importlib.util.find_spec("hypothesis") is not None:  # GPU tests do without
    from hypothesis import settings

    # The default, 200 ms an example, is a test of how busy the machine is.
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")


def pytest_report_header(config: pytest.Config) -> str:
    how = "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "compiled"
    return f"cuda devices: {cuda_devices()}, triton kernels: {how}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = Path(__file__).resolve().parent
    rank = {tests / name: position for position, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))
    if cuda_devices() > 0:
        return
    skip = pytest.mark.skip(reason=NO_GPU)
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Python's and torch's generators (torch only where the test's module has imported it)."""
    import random

    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="module")
def rank() -> Iterator[None]:
    """One Megatron-Core rank on the CPU."""
    from megatron_cpu import single_rank

    with single_rank():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of a module are, which its tests look at."""
    return tmp_path_factory.mktemp("folder")


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[None]:
    """One Megatron-Core rank on the first GPU."""
    from megatron_cpu import single_gpu

    with single_gpu():
        yield


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """A gloo group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
