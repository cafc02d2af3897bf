"""Weights, gradients and optimizer state of one rank, to the byte.

Megatron-Core's DistributedDataParallel lays parameters out in one gradient buffer per kind (dense,
expert) and chunk, last parameter first. With the distributed optimizer (Rajbhandari et al. 2020,
arXiv:1910.02054, stage 1) parameters live in a buffer of the same layout, every parameter starts at
a multiple of 64 elements, buckets end at a multiple of lcm(data-parallel size, 128), and each of
the data-parallel ranks owns an equal slice of each bucket. Without it nothing is padded or sliced.

Muon's layer-wise optimizer shards its state alone: whole parameters, in order of size, are dealt to
the data-parallel ranks, there and back. Matrices but the tables have one momentum, 4 bytes, in the
place of Adam's moments.

Bytes an element: BF16 weight 2, FP32 gradient 4, FP32 main weight 4, both Adam moments 8; in FP32
runs weights are their own main weights: 4 + 4 + 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_patch.planner.layout import Layout
from megatron_patch.planner.parameters import Parameter, chunk_parameters, chunks_of
from megatron_patch.schema.run import RunConfig

START = 64
"""Elements a parameter's start is aligned to."""
END = 128
"""Elements a bucket's end is aligned to, besides the data-parallel size."""
BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Smallest bucket under overlap_grad_reduce, in elements: the larger of the two (x DP size)."""
GRADIENT, MAIN, MOMENTS, MOMENTUM = 4, 4, 8, 4


@dataclass(frozen=True, slots=True)
class Buffer:
    """One contiguous buffer: where each parameter starts and ends, and the ends of the buckets."""

    spans: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    def owned(self, rank: int, ranks: int) -> int:
        """Parameter elements (no padding) in the slices of data-parallel rank ``rank``."""
        total = 0
        for begin, end in self.buckets:
            size = (end - begin) // ranks
            low = begin + rank * size
            total += sum(max(0, min(e, low + size) - max(b, low)) for b, e in self.spans)
        return total


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one rank, and the elements behind them."""

    parameters: int
    """Elements on this rank, padding left out."""
    weights: int
    gradients: int
    optimizer: int
    """Main weights (none of their own in FP32 runs) and both moments."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def buffer_of(
    parameters: list[Parameter], ranks: int, *, sharded: bool, bucket: int | None
) -> Buffer:
    """The layout of one buffer.

    Args:
        parameters: in the order of ``named_parameters()``.
        ranks: data-parallel ranks (with context parallel ones) that reduce it.
        sharded: distributed optimizer.
        bucket: elements after which a bucket is closed; None: one bucket.
    """
    spans, buckets = [], []
    begin = at = 0
    filled = False

    def close(end: int) -> int:
        stop = _up(end, math.lcm(ranks, END)) if sharded else end
        buckets.append((begin, stop))
        return stop

    for parameter in reversed(parameters):
        at = _up(at, START) if sharded else at
        alone = sharded and parameter.tied
        if alone and filled:
            begin = at = close(at)
        end = at + parameter.numel
        spans.append((at, end))
        filled = True
        if alone or (bucket is not None and end - begin >= bucket):
            begin = at = close(end)
            filled = False
        else:
            at = end
    if filled:
        close(at)
    return Buffer(tuple(spans), tuple(buckets))


def _up(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor


def buffers_of(run: RunConfig, layout: Layout, stage: int, vocab: int) -> list[tuple[Buffer, int]]:
    """Every buffer of pipeline rank ``stage`` with the ranks that share it, in order of chunks."""
    p = run.parallel
    found = []
    for index, chunk in enumerate(chunks_of(run, stage)):
        every = chunk_parameters(run, chunk, vocab)
        bucket = max(BUCKET, BUCKET_PER_RANK * layout.dp)
        # As training.optimizer: later chunks are not divided, unless parameters are gathered early.
        whole = index > 0 and not p.overlap_param_gather
        divided = p.overlap_grad_reduce and stage == 0 and not whole
        for expert, ranks in ((False, layout.dp * layout.cp), (True, layout.edp)):
            mine = [x for x in every if x.expert == expert]
            if mine:
                limit = bucket if divided else None
                sharded = p.use_distributed_optimizer and run.optimizer.name != "muon"
                buffer = buffer_of(mine, ranks, sharded=sharded, bucket=limit)
                found.append((buffer, ranks))
    return found


def states_of(
    run: RunConfig, layout: Layout, stage: int, vocab: int, *, dp_rank: int | None = None
) -> States:
    """Bytes of one rank of pipeline stage ``stage``.

    Args:
        run, layout: see `layout_of`.
        stage: pipeline rank.
        vocab: V, padded.
        dp_rank: position in the data-parallel groups; None: the largest share any rank can have.
    """
    sharded = run.parallel.use_distributed_optimizer
    bf16 = run.training.precision == "bf16"
    parameters = padded = owned = 0
    for buffer, ranks in buffers_of(run, layout, stage, vocab):
        mine = sum(end - begin for begin, end in buffer.spans)
        parameters += mine
        padded += buffer.numel
        if not sharded:
            owned += mine
        elif dp_rank is None:
            owned += -(-buffer.numel // ranks)
        else:
            owned += buffer.owned(dp_rank % ranks, ranks)
    optimizer = ((MAIN if bf16 else 0) + MOMENTS) * owned
    if run.optimizer.name == "muon":
        every = [p for c in chunks_of(run, stage) for p in chunk_parameters(run, c, vocab)]
        optimizer = _muon_bytes(run, every, layout, dp_rank=dp_rank)
    return States(
        parameters=parameters,
        weights=(2 if bf16 else 4) * padded,
        gradients=GRADIENT * padded,
        optimizer=optimizer,
    )


def _is_muons(p: Parameter) -> bool:
    table = p.name.startswith("embedding.") or p.name == "output_layer.weight"
    return len(p.shape) == 2 and not table


def _muon_bytes(
    run: RunConfig, parameters: list[Parameter], layout: Layout, *, dp_rank: int | None
) -> int:
    """Main weights and moments of one rank."""
    main = MAIN if run.training.precision == "bf16" else 0
    total = 0
    for expert, ranks in ((False, layout.dp * layout.cp), (True, layout.edp)):
        count = ranks if run.parallel.use_distributed_optimizer else 1
        turns = [*range(count), *reversed(range(count))]
        owned = [0] * count
        # (elements, bytes each): of one size, core has Muon's first.
        mine = sorted(
            (p.numel, main + (MOMENTUM if _is_muons(p) else MOMENTS))
            for p in parameters
            if p.expert == expert
        )
        for number, (numel, each) in enumerate(mine):
            owned[turns[number % len(turns)]] += each * numel
        total += max(owned) if dp_rank is None else owned[dp_rank % count]
    return total
