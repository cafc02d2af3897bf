"""Time of one step: matrix products, attention, memory traffic, exposed communication, bubble.

    step = (m + (pp - 1) / v) (t_forward + t_backward of the slowest stage) + p2p
         + data-parallel communication that nothing hides + optimizer update

An estimate, calibrated on one model (docs/planning.md says how far to trust it): rates are
data-sheet peaks times the shares in `hardware`, attention runs at the rate measured for this
project's kernels, and what lies between the matrix products moves a multiple of what it saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_patch.attention.registry import layer_window
from megatron_patch.monitor.flops import flops_per_token, mean_context
from megatron_patch.planner.activations import Activations
from megatron_patch.planner.communication import Traffic, traffic_of
from megatron_patch.planner.hardware import (
    GB,
    GEMM_SHARE,
    MEMORY_SHARE,
    NETWORK_SHARE,
    NVLINK_SHARE,
    Gpu,
)
from megatron_patch.planner.layout import NODE, Layout, micro_batches
from megatron_patch.planner.parameters import Chunk, chunks_of
from megatron_patch.planner.schedule import bubble
from megatron_patch.planner.states import states_of
from megatron_patch.schema.model import expert_ffn_hidden_size, ffn_hidden_size, is_moe_layer
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import RecomputeConfig

HALF_RATE_WIDTH = 256
"""Inner dimension at which a matrix product runs at half its best rate."""
ATTENTION_SHARE = {64: (0.30, 0.37), 128: (0.40, 0.43), 256: (0.26, 0.22)}
"""Forward and backward rate of `stable_flash` over the BF16 peak, by head dim, from 4k tokens on
(docs/assets/attention.json: H200, causal, `compensated`)."""
PROJECTING = {
    "compensated_projected": {"own": {64: 1.25, 128: 1.15}, "own_x2": {64: 2.01, 128: 1.85}},
    "projected": {"own": {64: 1.43, 128: 1.95}, "own_x2": {64: 2.06, 128: 3.08}},
}
"""Time of both passes over that of `none`, by stabilizer, backward and head dim
(docs/assets/projection.json: H200, geometric means of six shapes)."""
SHORT = 1024
"""Sequence length at which attention runs at half that rate (same table)."""
TRAFFIC, TRAFFIC_FUSED = 7.4, 5.8
"""Bytes moved per byte saved by the operations between matrix products, forward and backward,
eager and with ``training.compile_fusions``: fitted to GPT-2 124M (docs/assets/training.json)."""
LOGIT_BYTES, LOGIT_BYTES_FUSED = 52, 6
"""Bytes moved per logit by the cross entropy and its gradient, counted operation by operation."""
UPDATE_BYTES = 30
"""Bytes an AdamW update moves per element: reads gradient, main weight, moments; writes 3 of them
and the BF16 weight."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step of the slowest stage, and what they are made of."""

    matrix: float
    attention: float
    memory: float
    """Norms, activations, residuals, cross entropy."""
    tensor_parallel: float
    context_parallel: float
    """What the attention of the layer does not hide."""
    expert_parallel: float
    pipeline: float
    """Point-to-point transfers."""
    bubble: float
    data_parallel: float
    """What the backward pass does not hide."""
    update: float

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Speed:
    """What follows from the step time."""

    step: StepTime
    tokens_per_step: int
    tokens_per_second: float
    tflops_per_gpu: float
    """Model FLOPs (`monitor.flops`), recomputation not counted."""
    mfu: float

    def days(self, tokens: float) -> float:
        """Days to train on that many tokens, without interruptions."""
        return tokens / self.tokens_per_second / 86400


def speed_of(run: RunConfig, layout: Layout, gpu: Gpu, vocab: int) -> Speed:
    """The estimate for ``run``; ``vocab`` is padded."""
    steps = [_Clock(run, layout, gpu, vocab).step(stage) for stage in range(layout.pp)]
    slowest = max(steps, key=lambda s: s.total)
    tokens = run.training.global_batch_size * run.model.seq_length
    rate = tokens / slowest.total
    flops = rate * flops_per_token(run, vocab_size=vocab) / layout.world
    return Speed(slowest, tokens, rate, flops / 1e12, flops / gpu.peak)


def link_rate(gpu: Gpu, link: str) -> float:
    """Bytes per second one GPU sends over a link."""
    return GB * (gpu.nvlink * NVLINK_SHARE if link == NODE else gpu.network * NETWORK_SHARE)


class _Clock:
    """Times of the parts of one micro-batch on one rank."""

    def __init__(self, run: RunConfig, layout: Layout, gpu: Gpu, vocab: int) -> None:
        self.run, self.layout, self.gpu, self.vocab = run, layout, gpu, vocab
        self.model, self.acts = run.model, Activations(run, vocab)
        self.n, self.fused, self.selected = self.acts.n, self.acts.fused, self.acts.modules
        self.full = run.training.recompute.granularity == "full"
        self.bandwidth = gpu.hbm * GB * MEMORY_SHARE

    def product(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of [rows, inner] x [inner, columns]; the narrower side limits the rate."""
        width = min(inner, columns)
        rate = self.gpu.peak * GEMM_SHARE * width / (width + HALF_RATE_WIDTH)
        return 2 * rows * inner * columns / rate

    def mlp(self, rows: float, width: float) -> float:
        h, gated = self.n.h, 2 if self.model.activation == "swiglu" else 1
        return self.product(rows, h, gated * width) + self.product(rows, width, h)

    def projections(self) -> float:
        """Forward seconds of the matrices around attention."""
        n, mla = self.n, self.model.mla
        out = self.product(n.T, n.q * n.dv, n.h)
        if mla is None:
            return out + self.product(n.T, n.h, n.columns)
        latent = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        time = out + self.product(n.T, n.h, latent / n.tp)
        time += self.product(n.T, mla.kv_lora_rank, n.q * (mla.qk_head_dim + n.dv))
        rank = mla.q_lora_rank
        if rank is None:
            return time + self.product(n.T, n.h, n.q * n.d)
        return time + self.product(n.T, n.h, rank / n.tp) + self.product(n.T, rank, n.q * n.d)

    def attention(self, number: int) -> tuple[float, float]:
        """(forward, backward) seconds of the attention kernel of one layer."""
        n = self.n
        window = layer_window(self.run, number)
        keys = mean_context(self.model.seq_length, window)
        flops = 2 * n.T * n.q * (n.d + n.dv) * keys
        nearest = min(ATTENTION_SHARE, key=lambda d: abs(d - n.d))
        length = self.model.seq_length
        slow = length / (length + SHORT)
        rates = [share * slow * self.gpu.peak for share in ATTENTION_SHARE[nearest]]
        forward, backward = flops / rates[0], 2.5 * flops / rates[1]
        asked = self.run.attention
        if asked.backend == "stable_flash" and asked.stabilizer in PROJECTING:
            times = PROJECTING[asked.stabilizer]["own_x2" if asked.backward == "own_x2" else "own"]
            backward += (times[min(nearest, 128)] - 1) * (forward + backward)
        return forward, backward

    def feed_forward(self, number: int) -> float:
        """Forward seconds of the matrices of the MLP or the experts."""
        moe, model = self.model.moe, self.model
        if moe is None or not is_moe_layer(moe.layer_freq, number):
            return self.mlp(self.n.T, ffn_hidden_size(model) / self.n.tp)
        width = expert_ffn_hidden_size(model, moe) / self.acts.etp
        time = self.mlp(self.acts.expert_tokens(moe), width)
        if moe.shared_expert_ffn_hidden_size is not None:
            time += self.mlp(self.n.T, moe.shared_expert_ffn_hidden_size / self.n.tp)
        return time

    def layer(self, number: int, *, depth: int | None = None) -> tuple[float, float, float]:
        """(matrix, attention, memory) seconds of one layer, both passes and recomputation.

        ``depth``: of multi-token prediction, whose attention has the window of that layer.
        """
        feed = self.feed_forward(number)
        matrix = 3 * (self.projections() + feed)
        forward, backward = self.attention(number if depth is None else depth)
        attention = forward + backward
        saved = sum(x.size for x in Activations(_kept(self.run), self.vocab).layer(number))
        factor = TRAFFIC_FUSED if self.fused else TRAFFIC
        memory = factor * saved / self.bandwidth
        if self.full:
            return matrix * 4 / 3, attention + forward, memory * 4 / 3
        if "mlp" in self.selected or "moe" in self.selected:
            matrix, memory = matrix + feed, memory * 7 / 6
        if "core_attn" in self.selected:
            attention += forward
        return matrix, attention, memory

    def head(self) -> tuple[float, float]:
        """(matrix, memory) seconds of the output projection and the cross entropy."""
        n = self.n
        each = LOGIT_BYTES_FUSED if self.fused else LOGIT_BYTES
        bytes_moved = each * n.T * n.vocab
        depths = 1 + (0 if self.model.mtp is None else self.model.mtp.num_layers)
        seconds = bytes_moved / self.bandwidth
        return depths * 3 * self.product(n.T, n.h, n.vocab), depths * seconds

    def chunk(self, chunk: Chunk) -> tuple[float, float, float]:
        """(matrix, attention, memory) seconds of one chunk and micro-batch."""
        parts = [self.layer(number) for number in chunk.layers]
        if chunk.last and self.model.mtp is not None:
            depths = range(1, self.model.mtp.num_layers + 1)
            parts += [self.layer(self.model.num_layers, depth=depth) for depth in depths]
        matrix, attention, memory = (sum(p[i] for p in parts) for i in range(3))
        if chunk.last:
            extra = self.head()
            matrix, memory = matrix + extra[0], memory + extra[1]
        return matrix, attention, memory

    def step(self, stage: int) -> StepTime:
        """The step as the ranks of ``stage`` live it."""
        count = micro_batches(self.run, self.layout)
        parts = [self.chunk(chunk) for chunk in chunks_of(self.run, stage)]
        matrix, attention, memory = (count * sum(p[i] for p in parts) for i in range(3))
        sent = self._sent(traffic_of(self.run, self.layout, stage, self.vocab))
        # The ring and its kernels overlap; half a step of the ring at each end does not.
        hidden = attention if "p2p" in " ".join(self.run.parallel.cp_comm_types) else 0.0
        context = max(0.0, sent["cp"] - hidden) + sent["cp"] / (2 * self.layout.cp)
        busy = matrix + attention + memory + sent["tp"] + context + sent["ep"]
        idle = bubble(self.layout.pp, virtual=self.layout.vp, micro_batches=count) * busy
        owned = states_of(self.run, self.layout, stage, self.vocab).optimizer / 12
        return StepTime(
            matrix=matrix,
            attention=attention,
            memory=memory,
            tensor_parallel=sent["tp"],
            context_parallel=context,
            expert_parallel=sent["ep"],
            pipeline=sent["pp"],
            bubble=idle,
            data_parallel=self._exposed(stage, busy / count),
            update=owned * UPDATE_BYTES / self.bandwidth,
        )

    def _sent(self, traffic: list[Traffic]) -> dict[str, float]:
        seconds = dict.fromkeys(("tp", "cp", "ep", "pp", "dp"), 0.0)
        for item in traffic:
            seconds[item.axis] += item.sent / link_rate(self.gpu, item.link)
        return seconds

    def _exposed(self, stage: int, last: float) -> float:
        """Data-parallel seconds outside computation; ``last`` seconds has one micro-batch.

        Gradients travel during the backward pass of the last micro-batch (two thirds of its time),
        weights during the forward pass of the first (one third), where the overlap is on.
        """
        p, exposed = self.run.parallel, 0.0
        for item in traffic_of(self.run, self.layout, stage, self.vocab):
            if item.axis != "dp":
                continue
            gather = "all-gather" in item.what
            on = p.overlap_param_gather if gather else p.overlap_grad_reduce
            hidden = last * (1 / 3 if gather else 2 / 3) if on else 0.0
            exposed += max(0.0, item.sent / link_rate(self.gpu, item.link) - hidden)
        return exposed


def _kept(run: RunConfig) -> RunConfig:
    """The same run with nothing recomputed: what passes through memory is what would be saved."""
    return replace(run, training=replace(run.training, recompute=RecomputeConfig()))
