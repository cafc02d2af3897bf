"""The interpreter's BF16 is exact, and poisoned memory catches what it is meant to catch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from memory_poison import GUARD, PoisonedMemory

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests the CPU interpreter"
)


@triton.jit
def _cast(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def _dot(a, b, c, n: tl.constexpr):
    i, j = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    tl.store(c + i * n + j, tl.dot(tl.load(a + i * n + j), tl.load(b + i * n + j)))


@triton.jit
def _multiply_add(x, y, z, n: tl.constexpr):
    i = tl.arange(0, n)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(z + i, tl.where(a > b, a * b, a - b))


def test_cast_rounds_to_nearest_even() -> None:
    n = 4096
    x = torch.randn(n) * torch.logspace(-30, 30, n)
    x[:4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38])
    x[4:8] = torch.tensor([1.00390625, 1.01171875, -1.00390625, 0.0])  # exact ties
    y = torch.empty(n, dtype=torch.bfloat16)
    _cast[(1,)](x, y, n)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_multiplies_values_and_accumulates_in_float32(dtype: torch.dtype) -> None:
    a, b = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype)
    c = torch.empty(32, 32)
    _dot[(1,)](a, b, c, 32)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-5)


def test_elementwise_bfloat16() -> None:
    x, y = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
    z = torch.empty_like(x)
    _multiply_add[(1,)](x, y, z, 256)
    assert torch.equal(z, torch.where(x > y, x * y, x - y))


@triton.jit
def _twice(x):
    return tl.sum(x) + tl.sum(x)


@triton.jit
def _sums(x, y, n: tl.constexpr):
    for i in range(n):
        tl.store(y + i, _twice(tl.load(x + tl.arange(0, n))))


def test_device_functions_find_the_language_patched(monkeypatch) -> None:
    """Patching it for each of their calls took most of the time; a launch restores it."""
    from triton.runtime import interpreter

    patched, builtin = [], interpreter._patch_builtin

    def counted(owner, *rest):
        patched.append(owner)
        builtin(owner, *rest)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    original, x, y = tl.load, torch.arange(16.0), torch.empty(16)
    for _ in range(2):
        patched.clear()
        _sums[(2,)](x, y, 16)
        assert 1 <= patched.count(tl) <= 2  # 96 device functions were called
        assert bool((y == 240).all()) and tl.load is original


def _allocate(namespace: dict, source: str) -> torch.Tensor:
    exec(source, namespace)
    return namespace["out"]


@pytest.mark.parametrize("source", ["out = torch.empty(3, 5)", "out = like.new_empty(3, 5)"])
def test_poison_serves_only_the_package(source: str) -> None:
    with PoisonedMemory() as memory:
        inside = {"__name__": "stable_attention.api", "torch": torch, "like": torch.ones(1)}
        out = _allocate(inside, source)
        assert out.shape == (3, 5) and bool(out.isnan().all()) and memory.allocations == 1
        memory.check()
        _allocate({"__name__": "elsewhere", "torch": torch, "like": torch.ones(1)}, source)
        assert memory.allocations == 1
    assert "allocate" not in repr(torch.empty)


@pytest.mark.parametrize("offset", [-1, 15, -GUARD])
def test_guard_bands_catch_writes_outside(offset: int) -> None:
    namespace = {"__name__": "stable_attention.ops", "torch": torch}
    with PoisonedMemory() as memory:
        out = _allocate(namespace, "out = torch.empty(15, dtype=torch.bfloat16)")
        out.as_strided((1,), (1,), out.storage_offset() + offset).fill_(0)
        with pytest.raises(AssertionError, match=r"stable_attention\.ops"):
            memory.check()


ALONE = """
import torch
from stable_attention import stable_attention

q, k, v = (torch.randn(1, 2, 32, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
o = stable_attention(q, k, v, layout="bhsd", causal=True, stabilizer="none")
o.backward(torch.ones_like(o))
grads = [x.grad for x in (q, k, v)]
inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
exact = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
exact.backward(torch.ones_like(exact))
print(max(float((a.double() - b).abs().max()) for a, b in
          zip([o, *grads], [exact, *(x.grad for x in inputs)], strict=True)))
"""


def test_the_library_alone_computes_bfloat16_in_the_interpreter() -> None:
    """As a user has it who follows the message for a CPU: without what conftest installs."""
    kernels = Path(__file__).resolve().parents[2] / "kernels"
    path = os.pathsep.join([str(kernels), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert float(done.stdout) < 0.1
