"""Memory of one GPU at the worst moment of a step, for every pipeline stage.

    allocated = weights + gradients + optimizer state
              + max over the schedule ( saved tensors of all passes in flight + the moment's extra )
              + workspaces                                   -> torch.cuda.max_memory_allocated
    total     = allocated + fragmentation + CUDA context + NCCL      -> what nvidia-smi shows

The first line is exact (`states`), the second follows the schedule pass by pass, the rest are
allowances: see `ALLOWANCES` and docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patch.planner.activations import Activations, BackwardStage, SavedTensor
from megatron_patch.planner.layout import Layout, micro_batches
from megatron_patch.planner.parameters import Chunk, chunks_of
from megatron_patch.planner.schedule import FORWARD, in_flight, passes
from megatron_patch.planner.states import States, buffers_of, states_of
from megatron_patch.schema.run import RunConfig

MIB, GIB = 2**20, 2**30
WORKSPACE = 64 * MIB
"""cuBLAS and cuBLASLt workspaces of PyTorch on Hopper (32 MiB each), part of allocated memory."""
FRAGMENTATION = 0.05
"""Share of the activations that the caching allocator reserves beyond what is allocated."""
CONTEXT = 1 * GIB
"""CUDA context, loaded kernels and libraries; not PyTorch's."""
NCCL_BASE, NCCL_GROUP = 256 * MIB, 256 * MIB
"""NCCL's buffers: proxies and scratch once, channel buffers for every group of several ranks."""

FILE = 12
"""Bytes a parameter of optimizer state in a checkpoint: FP32 main weight and both moments."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One rank of one pipeline stage, in bytes."""

    stage: int
    layers: tuple[int, ...]
    states: States
    activations: int
    """Saved tensors of all passes in flight at the peak, the attention backend's left out."""
    kernel: int
    """The attention backend's saved tensors then."""
    extra: int
    """Gradients, logits and gathered inputs alive at the peak."""
    moment: str
    """What happens at the peak."""
    in_flight: int
    """Forward passes (of chunks) waiting for their backward pass at most."""
    nccl: int

    @property
    def dynamic(self) -> int:
        """Everything that comes and goes within a step."""
        return self.activations + self.kernel + self.extra

    @property
    def allocated(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` should show."""
        return self.states.total + self.dynamic + WORKSPACE

    @property
    def reserved(self) -> int:
        """What ``torch.cuda.max_memory_reserved`` should show."""
        return self.allocated + int(FRAGMENTATION * self.dynamic)

    @property
    def total(self) -> int:
        """What the GPU must have."""
        return self.reserved + CONTEXT + self.nccl

    def stack(self) -> dict[str, int]:
        """The parts of `total`, in drawing order."""
        return {
            "weights": self.states.weights,
            "gradients": self.states.gradients,
            "optimizer": self.states.optimizer,
            "activations": self.activations,
            "attention kernel": self.kernel,
            "working memory": self.extra + WORKSPACE,
            "fragmentation": self.reserved - self.allocated,
            "CUDA context, NCCL": CONTEXT + self.nccl,
        }


def memory_of(run: RunConfig, layout: Layout, vocab: int) -> list[StageMemory]:
    """Memory of every pipeline stage; ``vocab`` is padded."""
    acts = Activations(run, vocab)
    return [_stage(run, layout, stage, vocab=vocab, acts=acts) for stage in range(layout.pp)]


def _stage(
    run: RunConfig, layout: Layout, stage: int, *, vocab: int, acts: Activations
) -> StageMemory:
    chunks = chunks_of(run, stage)
    stored = [_Passes(run, acts, chunk) for chunk in chunks]
    count = micro_batches(run, layout)
    # Beyond the warm-up the schedule repeats itself.
    shown = min(count, 4 * layout.pp)
    held = [0] * len(chunks)
    most, at = -1, (held, 0, "")
    for what, chunk in passes(stage, layout.pp, virtual=layout.vp, micro_batches=shown):
        if what == FORWARD:
            held[chunk] += 1
            continue
        one = stored[chunk]
        now = sum(n * s.saved for n, s in zip(held, stored, strict=True)) + one.extra
        if now > most:
            most, at = now, (list(held), one.extra, one.moment)
        held[chunk] -= 1
    held, extra, moment = at
    kernel = sum(n * s.kernel for n, s in zip(held, stored, strict=True))
    return StageMemory(
        stage=stage,
        layers=tuple(number for chunk in chunks for number in chunk.layers),
        states=states_of(run, layout, stage, vocab),
        activations=most - extra - kernel,
        kernel=kernel,
        extra=extra,
        moment=moment,
        in_flight=in_flight(stage, layout.pp, virtual=layout.vp, micro_batches=shown),
        nccl=nccl_bytes(layout),
    )


def save_bytes(run: RunConfig, layout: Layout, vocab: int) -> int:
    """Host memory a checkpoint takes on the node that holds most of it.

    Every rank brings the optimizer state it writes (12 bytes a parameter, divided over the data-
    parallel ranks), the first data-parallel rank the weights; a parameter that two ranks share is
    written by one of them, which is not counted.
    """
    width = 2 if run.training.precision == "bf16" else 4
    sharded = run.parallel.use_distributed_optimizer
    a_stage = layout.world // layout.pp
    held = [0] * layout.nodes
    for stage in range(layout.pp):
        for buffer, ranks in buffers_of(run, layout, stage, vocab):
            parameters = sum(end - begin for begin, end in buffer.spans)
            for place in range(a_stage):
                first = place // (a_stage // ranks) % ranks == 0
                size = FILE * parameters // ranks if sharded else FILE * parameters * first
                node = (stage * a_stage + place) // layout.gpus_per_node
                held[node] += size + width * parameters * first
    return max(held)


def nccl_bytes(layout: Layout) -> int:
    """Allowance for NCCL; none on a single GPU."""
    if layout.world == 1:
        return 0
    axes = ("tp", "cp", "dp_cp", "pp", "ep", "edp")
    groups = sum(layout.group(axis).size > 1 for axis in axes)
    return NCCL_BASE + groups * NCCL_GROUP


class _Passes:
    """What one forward pass of a chunk leaves behind, and what its backward pass adds, in bytes."""

    def __init__(self, run: RunConfig, acts: Activations, chunk: Chunk) -> None:
        self.run, self.acts, self.chunk, self.n = run, acts, chunk, acts.n
        recompute = run.training.recompute
        self.full = recompute.granularity == "full"
        self.block = recompute.method == "block"
        self.size = recompute.num_layers
        tensors = self.tensors()
        self.saved = sum(x.size for x in tensors)
        self.kernel = sum(x.size for x in tensors if x.kernel)
        self.extra, self.moment = self.worst()

    def groups(self) -> list[tuple[tuple[int, ...], bool]]:
        """(layers, whether they are recomputed together), first layer first."""
        layers = self.chunk.layers
        if not self.full:
            return [((number,), False) for number in layers]
        if self.block:
            return [((number,), i < self.size) for i, number in enumerate(layers)]
        step = self.size
        return [(layers[i : i + step], True) for i in range(0, len(layers), step)]

    def tensors(self) -> list[SavedTensor]:
        """Saved under the configured recompute."""
        found = self.acts.embedding() if self.chunk.first or self.chunk.last else []
        if self.run.parallel.virtual_pipeline_model_parallel_size and self.chunk.layers:
            found.append(SavedTensor("pipeline buffers", self.n.stream))
        if self.acts.rotary_table():
            found.append(SavedTensor("rotary angles, float32", self.acts.rotary_table()))
        for layers, again in self.groups():
            if again:
                found.append(SavedTensor("input of recomputed layers", self.n.stream))
            else:
                found += self.acts.layer(layers[0])
        if not self.chunk.last:
            # The output waits for its gradient: core keeps it (deallocate_pipeline_outputs off).
            found.append(SavedTensor("output of the stage", self.n.stream))
            return found
        found += self.acts.head()
        mtp = self.run.model.mtp
        for _ in range(0 if mtp is None else mtp.num_layers):
            found += self.acts.extra_depth(self.run.model.num_layers)
        return found

    def worst(self) -> tuple[int, str]:
        """(largest excess over what is saved, when) of the backward pass, head first."""
        freed, best = 0, (0, "between passes")
        for moment in self.moments():
            if moment.extra - freed > best[0]:
                best = (moment.extra - freed, moment.name)
            freed += moment.freed
        n = self.n
        embedding = n.w * n.vocab * n.h + n.stream + n.gathered if self.chunk.first else 0
        return max(best, (embedding - self.saved, "embedding: gradient"), key=lambda x: x[0])

    def moments(self) -> list[BackwardStage]:
        found: list[BackwardStage] = []
        if self.chunk.last:
            found += self.acts.head_moments()
        for layers, again in reversed(self.groups()):
            if again:
                found += self._recomputed(layers)
                continue
            (number,) = layers
            inside = self.acts.layer_moments(number)
            rest = sum(x.size for x in self.acts.layer(number)) - sum(m.freed for m in inside)
            found += [*inside, BackwardStage("layer done", 0, rest)]
        return found

    def _recomputed(self, layers: tuple[int, ...]) -> list[BackwardStage]:
        """The backward pass of layers that run forward again first: all they save comes back.

        Beside it lives the output of the repeated pass; its input was there before.
        """
        held = sum(x.size for number in layers for x in self.acts.layer(number))
        found = []
        for number in reversed(layers):
            left = held - sum(x.size for x in self.acts.layer(number))
            for moment in self.acts.layer_moments(number):
                found.append(BackwardStage(moment.name, moment.extra + held))
                held -= moment.freed
            held = left
        return [*found, BackwardStage("layers done", 0, self.n.stream)]
