"""CPU mode: every workaround Megatron-Core needs to run on CPU tensors and gloo, in one place.

Megatron-Core takes a GPU for granted: it writes ``device="cuda"``, asks for the current device and
stream, pins memory, keeps one CUDA random stream per parallel group and compiles small functions.
`install` answers each of those calls with its CPU equivalent, so that the trainer, its optimizer,
its pipeline schedules, dropout with recompute and ``dist_checkpointing`` run unchanged on a machine
without a GPU. Nothing of Megatron-Core's code is replaced; only what it asks torch for.

    from megatron_patch.core_patches import cpu_mode
    cpu_mode.install()        # once per process, before anything of Megatron is built

One difference to a GPU remains and is stated here: there the default CPU generator and the CUDA
generator are two streams, here they are the same one. Code that draws from the default CPU
generator during training therefore moves the dropout pattern; the trainer draws from its own.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_patch.core_patches.replace import patched
from megatron_patch.runtime import environment

log = logging.getLogger(__name__)

ANNOUNCEMENT = (
    "CPU mode: Megatron-Core runs on CPU tensors and gloo; its CUDA assumptions are answered by "
    "megatron_patch.core_patches.cpu_mode (slow, exact, for tests and small runs)"
)

_CPU = torch.device("cpu")
_exit = contextlib.ExitStack()
_hidden: list[str] = []
_installed = False


def install() -> None:
    """Make Megatron-Core usable on CPU and gloo, and say so in one log line. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    _hidden.extend(environment.hide_gpu_packages())
    if os.environ.get("RANK", "0") == "0":
        log.warning(ANNOUNCEMENT)
    # Dynamo inspects torch.cuda's functions when it first wraps one (core does while it is
    # imported, torch when an optimizer is built) and fails on replaced ones. Making this list
    # imports both, so that it sees the originals.
    _exit.enter_context(patched(*_core_replacements(), *_replacements()))
    _exit.enter_context(_CudaIsCpu())
    # Core wraps about thirty small functions (activations, routing, losses) in torch.compile. On a
    # CPU the first step would call a C++ compiler, which a machine need not have, and the fused
    # loops round differently. So everything stays eager.
    torch.compiler.set_stance("force_eager")
    # The tracker compares the CPU stream before and after a fork and warns when they differ: here
    # the forked stream IS the CPU stream. Without the filter every dropout prints that warning.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_drop_rng_warning)


def uninstall() -> None:
    """Undo `install` (for test suites that also need the real ``torch.cuda``)."""
    global _installed
    if not _installed:
        return
    _installed = False
    torch.compiler.set_stance("default")
    while _hidden:
        sys.modules.pop(_hidden.pop(), None)
    _exit.close()
    logging.getLogger("megatron.core.tensor_parallel.random").removeFilter(_drop_rng_warning)


def _drop_rng_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


class _CudaIsCpu(TorchFunctionMode):
    """Rewrites what Megatron-Core asks torch for; everything else passes through untouched."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # `device="cuda"` is written out in the optimizer, schedules, masks, data broadcast and the
        # loading side of dist_checkpointing. Without this: "Torch not compiled with CUDA enabled".
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        # Pinning needs a CUDA context (rotary slices under CP, checkpoint staging buffers).
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        # Optimizers sort parameters by the string "torch.cuda.BFloat16Tensor" and raise on others.
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _NullStream:
    """Stands in for a CUDA stream: everything runs in program order, there is nothing to wait for.

    DDP, the all-to-all token dispatcher and shared experts create streams even without overlap.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def __eq__(self, other: object) -> bool:
        # There is one program order: core asks `current_stream() != side_stream` before copying.
        return isinstance(other, _NullStream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: _NullEvent | None = None) -> _NullEvent:
        return event or _NullEvent()

    def query(self) -> bool:
        return True


class _NullEvent:
    """Stands in for a CUDA event: recorded means done. It has no elapsed_time: it measures none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _nothing() -> Callable[..., None]:
    """A new do-nothing function: dynamo refuses one object under two names."""
    return lambda *args, **kwargs: None


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _null_stream(*args: Any, **kwargs: Any) -> _NullStream:
    return _NullStream()


def _all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False):
    """``all_reduce`` that knows AVG, which gloo does not: the sum, divided by the group's size."""
    dist = torch.distributed
    op = dist.ReduceOp.SUM if op is None else op
    if op != dist.ReduceOp.AVG:
        return _original_all_reduce(tensor, op=op, group=group, async_op=async_op)
    if async_op:
        raise ValueError(
            "CPU mode: an asynchronous all_reduce with op=AVG is not available on gloo; use SUM "
            "and divide (in Megatron-Core: average_in_collective=False)"
        )
    _original_all_reduce(tensor, group=group)
    tensor.div_(dist.get_world_size(group))
    return None


def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    **options: Any,
) -> Any:
    """``all_to_all_single`` that takes split sizes as tensors."""
    outgoing, incoming = (
        sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
        for sizes in (input_split_sizes, output_split_sizes)
    )
    return _original_all_to_all_single(
        output, input, output_split_sizes=incoming, input_split_sizes=outgoing, **options
    )


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """The backward pass with CPU mode on: torch calls ``backward`` itself with its mode off."""
    with _CudaIsCpu():
        return _original_run_backward(*args, **kwargs)


_original_run_backward: Callable[..., Any] = vars(torch.autograd)["_engine_run_backward"]
_original_all_reduce = torch.distributed.all_reduce
_original_all_to_all_single = torch.distributed.all_to_all_single


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, CPU equivalent), each with what fails without it."""
    cuda: Any = torch.cuda
    # On a machine that has a GPU everybody must still agree that this run uses none: memory
    # queries, checkpoint staging and the backend table ask.
    yield cuda, "is_available", lambda: False
    yield cuda, "device_count", lambda: 0
    # Buffers of TP/PP communication, rotary tables, embeddings: "Torch not compiled with CUDA".
    yield cuda, "current_device", lambda: _CPU
    yield cuda, "set_device", _nothing()  # launchers pin a rank to a GPU
    # Timers, pipeline send/recv and checkpoint staging wait for the device.
    yield cuda, "synchronize", _nothing()
    yield cuda, "empty_cache", _nothing()
    yield cuda, "reset_peak_memory_stats", _nothing()  # the other queries already answer 0
    # Streams and events: DDP, dispatcher of MoE, shared experts, delayed weight gradients.
    yield cuda, "Stream", _NullStream
    yield cuda, "Event", _NullEvent
    yield cuda, "current_stream", _null_stream
    yield cuda, "default_stream", _null_stream
    yield cuda, "set_stream", _nothing()
    yield cuda, "stream", lambda stream: contextlib.nullcontext(stream)
    yield cuda, "is_current_stream_capturing", lambda: False
    yield torch.Tensor, "record_stream", _nothing()  # takes no stand-in for a stream
    yield cuda.nvtx, "range_push", _nothing()  # "NVTX functions not installed"
    yield cuda.nvtx, "range_pop", _nothing()
    # The model-parallel tracker keeps one CUDA stream per parallel group and switches between them;
    # on CPU it switches the default generator instead, so that dropout differs between TP ranks and
    # recompute replays it exactly as on a GPU.
    yield cuda, "manual_seed", torch.default_generator.manual_seed
    yield cuda, "get_rng_state", _get_rng_state
    yield cuda, "set_rng_state", _set_rng_state
    yield cuda.random, "get_rng_state", _get_rng_state
    yield cuda.random, "set_rng_state", _set_rng_state
    # Recompute runs forward code inside the backward pass, where unfused attention makes a mask
    # with device="cuda": "Torch not compiled with CUDA enabled".
    yield torch.autograd, "_engine_run_backward", _run_backward
    # Averages of MoE and MTP losses: "Cannot use ReduceOp.AVG with Gloo".
    yield torch.distributed, "all_reduce", _all_reduce
    # The MoE dispatcher turns split sizes into Python numbers only where they live on a GPU: under
    # expert parallelism "incompatible function arguments".
    yield torch.distributed, "all_to_all_single", _all_to_all_single


def _core_replacements() -> Iterator[tuple[Any, str, Any]]:
    """The same for Megatron-Core's own helpers that bypass torch's public functions."""
    importlib.import_module("torch._dynamo")
    from megatron.core.tensor_parallel import random as tracker

    # Core's copies of torch.cuda's functions go to the CUDA generators directly.
    yield tracker, "_get_cuda_rng_state", _get_rng_state
    yield tracker, "_set_cuda_rng_state", _set_rng_state
    # Recompute without kept output (mla_up_proj) compiles a C++ extension to share memory.
    yield tracker, "_get_share_storage", lambda: _share_storage


def _share_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Give ``dst`` the contents of ``src`` below autograd, for all views of ``dst`` at once."""
    storage = src.untyped_storage()
    dst.untyped_storage().resize_(storage.nbytes())
    dst.untyped_storage().copy_(storage)
