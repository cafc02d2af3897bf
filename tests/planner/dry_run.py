"""One rank of any layout, built and stepped in one process without memory or time to speak of.

Every collective goes to PyTorch's "fake" process group; with ``fake=True`` tensors have shapes and
storages but no data, so that an 8B layer at 8k tokens takes a second. A dispatch mode adds up the
storages that are alive: the peak is what the caching allocator of a GPU would hand out, but for its
rounding and for kernels' workspaces. Norms are replaced by stand-ins that save what PyTorch's fused
CUDA kernels save, because on the CPU RMSNorm is a chain of float32 operations.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron_cpu import reseed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_patch.core_patches import cpu_mode, norms
from megatron_patch.schema.run import RunConfig
from stable_attention import chunks, ops
from stable_attention.stabilizers import STABILIZERS

CHUNKS = ("chunk_forward", "merge_chunks", "finish_chunks", "chunk_delta", "chunk_backward")


@dataclass(frozen=True)
class Figures:
    """What one rank held, in bytes."""

    static: int
    """Alive after model, buffers and main weights were built."""
    peak: int
    """Largest sum during forward and backward of one step, ``static`` included."""
    live: Counter[tuple[str, tuple[int, ...], str]]
    """What was alive at the peak, by operation, shape and dtype."""

    @property
    def activations(self) -> int:
        return self.peak - self.static

    def show(self, most: int = 40) -> str:
        """The largest entries, one a line."""
        return "\n".join(
            f"{size / 2**20:10.2f} MiB {key}" for key, size in self.live.most_common(most)
        )


class Storages(TorchDispatchMode):
    """Sum of the storages alive, and its maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, tuple[str, tuple[int, ...], str]]] = {}
        self.now = self.peak = 0
        self.at_peak: list[tuple[int, tuple[str, tuple[int, ...], str]]] = []

    def __enter__(self):
        # CheckpointWithoutOutput empties and refills storages in place.
        self.plain = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resize(storage, size)
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.plain
        return super().__exit__(*error)

    def _resize(self, storage, size):
        out = self.plain(storage, size)
        if storage._cdata in self.alive:
            old, name = self.alive[storage._cdata]
            self.alive[storage._cdata] = (size, name)
            self.now += size - old
        return out

    def begin(self) -> None:
        self.peak, self.at_peak = self.now, list(self.alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = self._shapes_only(func, args) or func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, str(func))
        return out

    @staticmethod
    def _shapes_only(func, args):
        """Zeros of the right shapes where attention's kernels would run (in the interpreter)."""
        fakes = {
            torch.ops.stable_attention.forward.default: ops._forward_fake,
            torch.ops.stable_attention.backward.default: ops._backward_fake,
        }
        if func not in fakes:
            return None
        return tuple(x.zero_() for x in fakes[func](*args))

    def _see(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.alive or size == 0:
            return
        self.alive[key] = (size, (name, tuple(tensor.shape), str(tensor.dtype)[6:]))
        self.now += size
        weakref.finalize(storage, self._gone, key)
        if self.now > self.peak:
            self.begin()

    def _gone(self, key: int) -> None:
        entry = self.alive.pop(key, None)
        if entry is not None:
            self.now -= entry[0]


class FusedNorm(torch.autograd.Function):
    """Saves what ``_fused_rms_norm`` saves on CUDA: input, weight, 1 / rms in float32."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _, weight, _ = ctx.saved_tensors
        return grad.clone(), torch.zeros_like(weight)


def _norm_forward(self, x: torch.Tensor) -> torch.Tensor:
    if x.dtype == self.weight.dtype:
        return FusedNorm.apply(x, self.weight)
    return FusedNorm.apply(x.float(), self.weight.float()).to(self.weight.dtype)


class Chunks:
    """`stable_attention.chunks` without kernels: its tensors, layout sbhd, no values."""

    @staticmethod
    def chunk_forward(q, k, v, *, return_max_logits=False, **_):
        sq, b, h, _ = q.shape
        out = torch.zeros(sq, b, h, v.shape[-1], dtype=torch.float32)
        lse = torch.zeros(b, h, sq, dtype=torch.float32)
        return (out, lse, torch.zeros(h)) if return_max_logits else (out, lse)

    @staticmethod
    def merge_chunks(*_, **__):
        return None

    @staticmethod
    def finish_chunks(out, lse, *, dtype, o_lo="bf16", stabilizer="compensated", **_):
        low = torch.int8 if o_lo == "int8" else dtype
        empty = not STABILIZERS[stabilizer].keeps_o_lo
        return out.to(dtype), torch.zeros((0,) if empty else out.shape, dtype=low)

    @staticmethod
    def chunk_delta(dout, out, lse, **_):
        return torch.zeros_like(lse), None

    @staticmethod
    def chunk_backward(*_, **__):
        return None


@contextlib.contextmanager
def rank_of(run: RunConfig, rank: int, world: int) -> Iterator[None]:
    """CPU mode and Megatron's groups as rank ``rank`` of ``world`` sees them; undone at the end."""
    cpu_mode.install()
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    p = run.parallel
    kept = {
        **{(chunks, name): getattr(chunks, name) for name in CHUNKS},
        # A fake scale left behind would make the gradients of the process's next model fake.
        **{
            (owner, "main_loss_backward_scale"): owner.main_loss_backward_scale
            for owner in (MoEAuxLossAutoScaler, MTPLossAutoScaler)
        },
        (torch.nn.Module, "_apply"): torch.nn.Module._apply,
        (dist, "all_gather_object"): dist.all_gather_object,
        (CudaRNGStatesTracker, "fork"): CudaRNGStatesTracker.fork,
        (norms.RMSNorm, "forward"): norms.RMSNorm.forward,
        (ps, "get_data_parallel_group_gloo"): ps.get_data_parallel_group_gloo,
        (ps, "get_expert_data_parallel_group_gloo"): ps.get_expert_data_parallel_group_gloo,
    }
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        ps.initialize_model_parallel(
            p.tensor_model_parallel_size,
            p.pipeline_model_parallel_size,
            p.virtual_pipeline_model_parallel_size,
            context_parallel_size=p.context_parallel_size,
            hierarchical_context_parallel_sizes=p.hierarchical_context_parallel_sizes,
            expert_model_parallel_size=p.expert_model_parallel_size,
            expert_tensor_parallel_size=p.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        reseed()
        # Core shapes these once a process, by the first model of it.
        _forget()
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        torch.nn.Module._apply = _convert
        for name in CHUNKS:
            setattr(chunks, name, getattr(Chunks, name))
        dist.all_gather_object = _gather_own
        # It compares random states, which fake tensors have not.
        CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
        norms.RMSNorm.forward = _norm_forward
        ps.get_data_parallel_group_gloo = ps.get_data_parallel_group
        ps.get_expert_data_parallel_group_gloo = ps.get_expert_data_parallel_group
        yield
    finally:
        _forget()  # fake tensors, which the next test's model would add to
        for (owner, name), value in kept.items():
            setattr(owner, name, value)
        ps.destroy_model_parallel()
        dist.destroy_process_group()
        cpu_mode.uninstall()


def _forget() -> None:
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()


def _convert(self, function, recurse: bool = True):
    """`.bfloat16()` and `.to()`: PyTorch would swap tensors, which our weakrefs forbid."""
    for parameter in self.parameters():
        parameter.data = function(parameter.data)
    return self


def _gather_own(out: list[Any], mine: Any, group: Any = None) -> None:
    out[:] = [mine] * len(out)


def step(
    run: RunConfig, *, rank: int = 0, world: int = 1, vocab: int = 60, fake: bool = True
) -> Figures:
    """Build this rank's model, buffers and main weights, and run one forward and backward pass."""
    with contextlib.ExitStack() as stack:
        # stable_flash on a CPU: only its shapes matter here.
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
        stack.enter_context(rank_of(run, rank, world))
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        storages = stack.enter_context(Storages())
        return _step(run, rank, world, vocab=vocab, storages=storages)


def _step(run: RunConfig, rank: int, world: int, *, vocab: int, storages: Storages) -> Figures:
    from megatron_patch.model.build import build_model
    from megatron_patch.parallel import setup
    from megatron_patch.training import optimizer
    from megatron_patch.training.session import Session
    from megatron_patch.training.step import run_schedule

    built = build_model(run, vocab_size=vocab)
    chunks = optimizer.wrap_chunks(run, built.chunks)
    adam, _ = optimizer.build_optimizer(run, chunks)
    config = optimizer.connect(run, chunks, adam, finalize=lambda *_, **__: None)
    layout = setup._layout(rank, world, 0, device=torch.device("cpu"))
    accumulate = run.training.global_batch_size // (run.training.micro_batch_size * layout.dp_size)
    session = Session(
        run=run,
        layout=layout,
        chunks=chunks,
        config=config,
        optimizer=adam,
        schedule=None,
        guard=None,  # type: ignore[arg-type]
        micro_batches=accumulate,
        reads_data=True,
        hooks_enabled=False,
    )
    batches = [_batch(run, vocab) for _ in range(accumulate)]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    static = storages.now
    storages.begin()
    run_schedule(session, batches, forward_only=False)
    live: Counter[Any] = Counter()
    for size, key in storages.at_peak:
        live[key] += size
    return Figures(static, storages.peak, live)


def _batch(run: RunConfig, vocab: int) -> dict[str, torch.Tensor]:
    b = run.training.micro_batch_size
    s = run.model.seq_length // run.parallel.context_parallel_size  # the loader cuts sequences
    tokens = (torch.arange(b * s) % vocab).view(b, s)  # different, so that experts share them
    return {
        "tokens": tokens,
        "labels": torch.zeros(b, s, dtype=torch.long),
        "loss_mask": torch.ones(b, s),
        "position_ids": torch.arange(s).repeat(b, 1),
    }
