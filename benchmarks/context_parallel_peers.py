"""Context-parallel attention to compare ours with: written over PyTorch's own attention kernels.

`AllGather` gathers keys and values and runs SDPA's cuDNN kernel on the blocks a rank's queries see;
`torch_ring` is PyTorch's prototype, ``torch.distributed.tensor.experimental.context_parallel``.
Both hold the zigzag shard that ours holds.

Shape legend: b batch, h query heads, g key/value heads, s tokens of the whole sequence, c = s / 2n
tokens of a chunk, n ranks, d head dim. Tensors are [b, heads, tokens, d].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_patch.context_parallel.layout import chunks_of, shard, unshard

aten = torch.ops.aten
Piece = tuple[torch.Tensor, torch.Tensor, Any]  # out, LSE, what the backward needs beside them


class CudnnKernel:
    """SDPA's cuDNN kernel, forward and backward as separate operations."""

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Piece:
        """out [b, h, sq, d], natural-log LSE [b, h, sq(, 1)] in float32."""
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        return found[0], found[1], found[2:8]

    @staticmethod
    def backward(
        dout: torch.Tensor, qkv: tuple[torch.Tensor, ...], piece: Piece, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv of one block, given the merged out and LSE of the rows."""
        out, lse, (cum_q, cum_k, max_q, max_k, seed, offset) = piece
        rest = (seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal)
        return aten._scaled_dot_product_cudnn_attention_backward(dout, *qkv, out, lse, *rest)


class Repeated:
    """A kernel for ungrouped heads, with key/value heads repeated first."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Piece:
        return self.kernel.forward(q, repeat_heads(k, q), repeat_heads(v, q), causal)

    def backward(
        self, dout: torch.Tensor, qkv: tuple[torch.Tensor, ...], piece: Piece, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        q, k, v = qkv
        wide = (q, repeat_heads(k, q), repeat_heads(v, q))
        dq, dk, dv = self.kernel.backward(dout, wide, piece, causal)
        return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))


@functools.cache
def cudnn_kernel(device: torch.device, d: int) -> Any:
    """`CudnnKernel`; with repeated heads where grouped ones are refused: tried once."""
    q, k = (torch.zeros(1, h, 128, d, dtype=torch.bfloat16, device=device) for h in (4, 2))
    try:
        piece = CudnnKernel.forward(q, k, k, True)
        CudnnKernel.backward(q, (q, k, k), piece, True)
    except RuntimeError as error:
        print(f"cuDNN takes no grouped heads ({str(error).splitlines()[0]}): repeated", flush=True)
        return Repeated(CudnnKernel)
    return CudnnKernel


class CpuKernel:
    """SDPA's flash kernel for the CPU, which proves the code around the kernels without a GPU."""

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Piece:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse, None

    @staticmethod
    def backward(
        dout: torch.Tensor, qkv: tuple[torch.Tensor, ...], piece: Piece, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        run = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return run(dout.contiguous(), *qkv, piece[0], piece[1], 0.0, causal)


def repeat_heads(kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Every key/value head as often as query heads share it."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def merge(pieces: list[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) of rows whose keys were taken in one block or two, in float32."""
    if len(pieces) == 1:
        return pieces[0][:2]
    a, b = pieces
    la, lb = (x[1].reshape(x[0].shape[:3]).unsqueeze(-1) for x in (a, b))
    lse = torch.logaddexp(la, lb)
    out = a[0].float() * (la - lse).exp() + b[0].float() * (lb - lse).exp()
    return out.to(b[0].dtype), lse.reshape(b[1].shape)


class AllGather(torch.autograd.Function):
    """Causal attention of a rank's zigzag shard over gathered keys and values.

    Keys and values travel in their own type, and so do the summed gradients on their way back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: dist.ProcessGroup,
        kernel: Any,
    ) -> torch.Tensor:
        n, rank = group.size(), group.rank()
        mine = torch.stack([k, v])
        parts = mine.new_empty(n, *mine.shape)
        dist.all_gather_into_tensor(parts.view(-1, *mine.shape[1:]), mine, group=group)
        keys, values = unshard(list(parts), dim=3)
        results = []
        for rows, blocks in _plan(q.shape[2], rank, n):
            pieces = [
                kernel.forward(q[:, :, rows], keys[:, :, columns], values[:, :, columns], diagonal)
                for columns, diagonal in blocks
            ]
            results.append((*merge(pieces), [piece[2] for piece in pieces]))
        ctx.save_for_backward(q, keys, values)
        ctx.results, ctx.settings = results, (group, kernel)
        return torch.cat([out for out, _, _ in results], dim=2)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, keys, values = ctx.saved_tensors
        group, kernel = ctx.settings
        n, rank = group.size(), group.rank()
        dq = torch.zeros_like(q, dtype=torch.float32)
        dkv = torch.zeros(2, *keys.shape, dtype=torch.float32, device=q.device)
        plan = _plan(q.shape[2], rank, n)
        for (out, lse, rests), (rows, blocks) in zip(ctx.results, plan, strict=True):
            for (columns, diagonal), rest in zip(blocks, rests, strict=True):
                sides = (q[:, :, rows], keys[:, :, columns], values[:, :, columns])
                piece = (out, lse, rest)
                grads = kernel.backward(dout[:, :, rows], sides, piece, diagonal)
                dq[:, :, rows] += grads[0]
                dkv[0, :, :, columns] += grads[1]
                dkv[1, :, :, columns] += grads[2]
        everyone = torch.stack(
            [shard(dkv, rank=other, size=n, dim=3).to(q.dtype) for other in range(n)]
        )
        dk, dv = _reduce_scatter(everyone, group)
        return dq.to(q.dtype), dk, dv, None, None


def _plan(local: int, rank: int, n: int) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """(rows of the local queries, [(columns of the gathered keys, causal?)]) of every kernel."""
    c = local // 2
    for half, chunk in enumerate(chunks_of(rank, n)):
        before = [(slice(0, chunk * c), False)] if chunk else []
        diagonal = (slice(chunk * c, (chunk + 1) * c), True)
        yield slice(half * c, (half + 1) * c), [*before, diagonal]


def _reduce_scatter(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over ranks of ``parts[rank]``."""
    if parts.is_cuda:
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=group)
        return mine
    dist.all_reduce(parts, group=group)
    return parts[group.rank()]


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def torch_ring(
    group: dist.ProcessGroup, tokens: int, *, grouped: bool, backend: str
) -> Iterator[Attention]:
    """PyTorch's context parallelism as causal attention over zigzag shards; valid in the block.

    Args:
        group: the ranks.
        tokens: s.
        grouped: hand over g key/value heads; False repeats them to h, for kernels that want it.
        backend: ``cudnn`` or ``flash``, of SDPA.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    kernel = SDPBackend.FLASH_ATTENTION
    if cuda and backend == "cudnn":
        kernel = SDPBackend.CUDNN_ATTENTION
    # It cuts the tensors named here; ours are cut already, so it gets one that nobody reads.
    unread = torch.zeros(1, tokens, device=device)
    mesh = DeviceMesh.from_group(group, device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not grouped:
            k, v = (repeat_heads(x, q) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    options = {"buffers": [unread], "buffer_seq_dims": [1], "no_restore_buffers": {unread}}
    failed: Exception | None = None
    with context_parallel(mesh, **options), sdpa_kernel(kernel):
        try:
            yield run
        except Exception as error:
            failed = error  # torch 2.11 restores SDPA on the ordinary way out only
    if failed is not None:
        raise failed


def transformer_engine(
    group: dist.ProcessGroup, *, heads: int, kv_heads: int, d: int, dtype: torch.dtype
) -> Attention:
    """Transformer Engine's causal p2p attention over zigzag shards [s, b, heads, d]."""
    from transformer_engine.pytorch import DotProductAttention

    attention = DotProductAttention(
        heads, d, num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal",
    )  # fmt: skip
    ranks = dist.get_process_group_ranks(group)
    attention.set_context_parallel_group(group, ranks, torch.cuda.Stream(), "p2p")

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v).view(q.shape)

    return run


@dataclass(frozen=True)
class Step:
    """Attention and its backward pass over one rank's inputs."""

    attend: Attention
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    dout: torch.Tensor

    def forward(self) -> torch.Tensor:
        return self.attend(*self.qkv)

    def both(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.qkv, self.dout)

    def results(self) -> list[torch.Tensor]:
        """Output, dq, dk, dv."""
        out = self.forward()
        return [out.detach(), *torch.autograd.grad(out, self.qkv, self.dout)]


def heads_first(attend: Attention) -> Attention:
    """Attention over [s, b, heads, d] by one over [b, heads, s, d]."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return attend(q, k, v).permute(2, 0, 1, 3)

    return run
