"""Compile the kernels of a problem for a GPU that is not there, and read what ptxas says.

    with capture("sm90") as launches:
        forward(problem, q, k, v, extras=Extras())      # tensors on the meta device
    for launch in launches:
        report = compile_launch(launch, "sm90")

Used by the tests (spills and serialised tensor-core code are bounded without a GPU) and by the tile
search (configurations that cannot run are dropped before a GPU is held).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from stable_attention import configs
from stable_attention.hopper import backward as hopper
from stable_attention.hopper import forward as hopper_forward
from stable_attention.hopper import key_gradients, query_gradient, rows
from stable_attention.int8 import backward as int8_backward
from stable_attention.int8 import forward as int8_forward
from stable_attention.int8 import quantise
from stable_attention.triton import backward, carrier, forward, preprocess
from stable_attention.triton.launches import anew

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNELS = (
    forward.forward_kernel,
    preprocess.preprocess_kernel,
    carrier.carrier_kernel,
    backward.dkdv_kernel,
    backward.dq_kernel,
    rows.rows_kernel,
    hopper.backward_kernel,
    key_gradients.key_gradients_kernel,
    query_gradient.query_kernel,
    hopper_forward.forward_kernel,
    rows.places_kernel,
    rows.sum_kernel,
    rows.saturated_kernel,
    quantise.mean_kernel,
    quantise.quantise_kernel,
    quantise.turn_kernel,
    int8_forward.forward_kernel,
    int8_backward.dq_kernel,
    int8_backward.dkdv_kernel,
)
# Bytes of shared memory one program may use.
SHARED_LIMIT = {"sm80": 166912, "sm89": 101376, "sm90": 232448, "sm100": 232448}
_OPTIONS = ("num_warps", "num_stages", "maxnreg")
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded kernel launch."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler says about one kernel."""

    name: str
    registers: int
    spill_bytes: int
    """Spill stores plus spill loads."""
    shared: int
    """Bytes of shared memory."""
    warnings: list[str] = field(default_factory=list)
    """ptxas C75xx lines: serialised wgmma, ignored setmaxnreg, ..."""
    ptx: str = ""


@contextlib.contextmanager
def capture(arch: str, kernels: tuple[Any, ...] = KERNELS) -> Iterator[list[Launch]]:
    """Record launches of ``kernels`` instead of running them, with the tiles of ``arch``."""
    launches: list[Launch] = []
    arch_of = configs.arch_of

    def recorder(kernel):
        def run(*args, grid, warmup, **kwargs):
            options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
            names = [p.name for p in kernel.params]
            launches.append(Launch(kernel, dict(zip(names, args, strict=False)) | kwargs, options))

        return run

    configs.arch_of = lambda device: arch
    try:
        for kernel in kernels:
            kernel.run = recorder(kernel)
        with anew():
            yield launches
    finally:
        configs.arch_of = arch_of
        for kernel in kernels:
            del kernel.run


def _source(launch: Launch) -> ASTSource:
    signature, constants, attrs = {}, {}, {}
    for i, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        if param.is_constexpr or value is None or _is_one(param, value):
            signature[param.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, (TensorDescriptor, GluonDescriptor)):
            dtype = _TYPES[value.base.dtype].removeprefix("*")
            layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
            signature[param.name] = f"tensordesc<{dtype}{list(value.block_shape)}{layout}>"
        elif isinstance(value, torch.Tensor):
            signature[param.name] = _TYPES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    return source(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attrs)


def _is_one(param: Any, value: object) -> bool:
    """Whether Triton would fold this integer 1 into the code."""
    return isinstance(value, int) and value == 1 and not param.do_not_specialize


def compile_launch(launch: Launch, arch: str) -> Report:
    """Compile a recorded launch for ``arch`` ("sm80", "sm89", "sm90", "sm100"); needs no GPU."""
    number = int(arch.removeprefix("sm"))
    compiled = triton.compile(
        _source(launch), target=GPUTarget("cuda", number, 32), options=launch.options
    )
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    tool = get_ptxas(number).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", f"--gpu-name={target[1]}", file.name, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    return Report(
        name=launch.kernel.fn.__name__,
        registers=int(registers[1]) if registers else 0,
        spill_bytes=sum(map(int, spills.groups())) if spills else 0,
        shared=compiled.metadata.shared,
        warnings=[line[:160] for line in log.splitlines() if re.search(r"C75\d\d", line)],
        ptx=ptx,
    )
