"""The ``training:`` and ``optimizer:`` sections: the loop, its batch and its update."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from megatron_patch.schema.problem import Problem, at_least

LARGEST = 1e18
"""Of a rate, a decay or a clip: the product of two fits float32, in which the update is computed,
and so does one divided by 1 - beta."""
SMALLEST_EPS = 1e-37
"""float32 may make zero of less: 0 / 0 where no gradient came yet."""
LARGEST_BETA = 1 - 2**-24
"""The largest below 1 of float32."""
FITS = "the update is computed in float32"


@dataclass(kw_only=True, frozen=True, slots=True)
class RecomputeConfig:
    """Which activations are recomputed in the backward pass instead of kept."""

    granularity: Literal["none", "selective", "full"] = "none"
    """Nothing, the modules named below, or whole layers."""
    modules: list[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj"]] = (
        field(default_factory=lambda: ["mlp"])
    )
    """Modules recomputed under ``selective``; core_attn gains nothing with a flash kernel."""
    method: Literal["uniform", "block"] = "uniform"
    """``full``: recompute every group of ``num_layers`` layers, or the first ``num_layers``."""
    num_layers: int = 1
    """Layers per group (uniform) or layers recomputed per pipeline stage (block)."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Size and first sample of every global batch of a run, counted from 0."""

    levels: tuple[tuple[int, int, int], ...]
    """(first batch, first sample, size) of every size."""

    def _level(self, batch: int) -> tuple[int, int, int]:
        return self.levels[bisect_right(self.levels, batch, key=lambda level: level[0]) - 1]

    def size(self, batch: int) -> int:
        """Sequences of a global batch."""
        return self._level(batch)[2]

    def first_sample(self, batch: int) -> int:
        """Sequences of all batches before it."""
        begin, sample, size = self._level(batch)
        return sample + (batch - begin) * size


@lru_cache
def batch_sizes(full: int, rampup: tuple[int, ...] = ()) -> BatchSizes:
    """Of ``training.batch_size_rampup``, by Megatron-Core's rule; empty: all are ``full``.

    The size is first + increment x floor(samples before / (samples / increments)), exactly.
    """
    if not rampup:
        return BatchSizes(((0, 0, full),))
    size, increment, samples = rampup
    count, batch, sample = (full - size) // increment, 0, 0
    levels = []
    for level in range(count):
        end = -(-samples * (level + 1) // count)
        batches = max(0, -(-(end - sample) // size))
        if batches:
            levels.append((batch, sample, size))
        batch, sample, size = batch + batches, sample + batches * size, size + increment
    return BatchSizes((*levels, (batch, sample, full)))


@dataclass(kw_only=True, frozen=True, slots=True)
class TrainingConfig:
    """The loop: how long, how much at a time, on what, and how carefully."""

    train_steps: int
    """Optimizer steps of the whole run."""
    global_batch_size: int
    """Sequences of one optimizer step, over all ranks."""
    batch_size_rampup: list[int] | None = None
    """[first size, increment, samples], as Megatron's rampup_batch_size; null: no growth."""
    micro_batch_size: int
    """Sequences of one forward pass on one data-parallel rank."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu runs the whole trainer on gloo and PyTorch's CPU kernels: slow, exact, for tests."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: BF16 compute with FP32 main weights, gradients and optimizer state."""
    seed: int = 1234
    """Seed of initial weights, dropout and (by default) sample order."""
    deterministic: bool = False
    """Refuse anything that is not bitwise repeatable on the same layout and software."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """Activation recompute."""
    eval_interval: int | None = None
    """Steps between evaluations on the validation split; null: only at the end."""
    eval_steps: int = 10
    """Global batches of one evaluation."""
    eval_test: bool = False
    """Evaluate on the test split when the run is finished."""
    exit_after_minutes: float | None = None
    """Save and stop gracefully after this long; the run can be resumed."""
    exit_at_step: int | None = None
    """Save and stop gracefully after this step."""
    check_finite: bool = True
    """Stop before the update when loss or gradients are not finite; names step, rank, parameter."""
    compile_fusions: bool | None = None
    """Compile norms with the additions before them, activation, cross entropy; null: on a GPU."""
    gradient_accumulation_fusion: bool | None = None
    """Matrix products add weight gradients to the FP32 buffer; null: on a GPU."""
    grouped_experts: bool | None = None
    """Multiply a rank's experts together; null: where they have no biases."""
    fp8: Literal["none", "current", "blockwise", "mxfp8"] = "none"
    """FP8 recipe of the linears of te layers; mxfp8 needs Blackwell."""

    @property
    def accumulates_in_products(self) -> bool:
        """``gradient_accumulation_fusion``, or what its null stands for."""
        given = self.gradient_accumulation_fusion
        return self.device == "cuda" if given is None else given

    @property
    def compiles_fusions(self) -> bool:
        """``compile_fusions``, or what its null stands for."""
        given = self.compile_fusions
        return self.device == "cuda" if given is None else given

    @property
    def batch_sizes(self) -> BatchSizes:
        """Of every step, batches that a run leaves out counted in."""
        return batch_sizes(self.global_batch_size, tuple(self.batch_size_rampup or ()))

    def _rampup(self) -> Iterator[Problem]:
        given, path = self.batch_size_rampup, "training.batch_size_rampup"
        if given is None or self.micro_batch_size < 1:
            return
        if len(given) != 3 or min(given) < 1:
            yield Problem(
                path, f"{given}: [first size, increment, samples] are needed, all above 0"
            )
        elif given[0] >= self.global_batch_size or (self.global_batch_size - given[0]) % given[1]:
            yield Problem(
                path,
                f"{given}: {given[0]} + n x {given[1]} must reach training.global_batch_size "
                f"({self.global_batch_size})",
            )
        elif given[0] % self.micro_batch_size or given[1] % self.micro_batch_size:
            text = f"{given}: the first two must be multiples of training.micro_batch_size"
            yield Problem(path, f"{text} ({self.micro_batch_size})")

    def problems(self) -> Iterator[Problem]:
        yield from self._rampup()
        least = {"train_steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "eval_steps": 1,
                 "eval_interval": 1, "exit_at_step": 1, "seed": 0}  # fmt: skip
        yield from at_least("training", self, least)
        yield from at_least("training.recompute", self.recompute, {"num_layers": 1})
        if self.exit_after_minutes is not None and not self.exit_after_minutes > 0:
            text = f"{self.exit_after_minutes}: must be more than 0"
            yield Problem("training.exit_after_minutes", text)
        if self.micro_batch_size > 0 and self.global_batch_size % self.micro_batch_size:
            yield Problem(
                "training.global_batch_size",
                f"{self.global_batch_size} is not a multiple of training.micro_batch_size "
                f"({self.micro_batch_size})",
            )
        if self.compile_fusions and self.device == "cpu":
            text = "true: CPU mode runs eagerly; set it to false"
            yield Problem("training.compile_fusions", text)
        if self.gradient_accumulation_fusion and self.device == "cpu":
            text = "true: no CPU kernel multiplies BF16 into FP32; leave it out, or set it to false"
            yield Problem("training.gradient_accumulation_fusion", text)
        if self.recompute.granularity == "selective" and not self.recompute.modules:
            text = "[] recomputes nothing: name at least one module"
            yield Problem("training.recompute.modules", text)


@dataclass(kw_only=True, frozen=True, slots=True)
class OptimizerConfig:
    """The update and the learning-rate schedule."""

    lr: float
    """Peak learning rate."""
    name: Literal["adamw", "muon"] = "adamw"
    """muon: Megatron-Core's for matrices, AdamW for tables, norms and biases."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay after the warm-up; wsd: over the last wsd_decay_steps only."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    begin_step: int = 0
    """Step after which warm-up and decay begin; to warm up again, the loaded checkpoint's."""
    decay_steps: int | None = None
    """Step at which min_lr is reached; default: training.train_steps."""
    schedule_from: Literal["start", "now"] = "start"
    """Schedule of a resumed run: the one it began with, or this one."""
    wsd_decay_steps: int | None = None
    """Length of the final decay under ``wsd``."""
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "minus_sqrt"
    """Shape of that decay."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; never of norms, biases and sinks."""
    beta1: float = 0.9
    """Adam's first-moment decay."""
    beta2: float = 0.95
    """Adam's second-moment decay."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Global gradient-norm clip; 0 disables clipping."""
    muon_momentum: float = 0.95
    """Muon's momentum."""
    qk_clip: float | None = None
    """Scale W_Q and W_K of heads whose largest logit of a step is above this."""
    implementation: Literal["auto", "apex", "te", "torch"] = "auto"
    """AdamW kernel; auto: Transformer Engine's, else Apex's, else PyTorch's."""

    def problems(self) -> Iterator[Problem]:
        yield from self._rates()
        yield from self._adam()
        yield from at_least(
            "optimizer", self, {"warmup_steps": 0, "begin_step": 0, "decay_steps": 1}
        )

    def _rates(self) -> Iterator[Problem]:
        if not 0 < self.lr <= LARGEST:
            text = f"{self.lr}: must be more than 0 and at most {LARGEST:g}; {FITS}"
            yield Problem("optimizer.lr", text)
        if not 0 <= self.min_lr <= self.lr:
            text = f"{self.min_lr}: must be between 0 and optimizer.lr ({self.lr})"
            yield Problem("optimizer.min_lr", text)

    def _adam(self) -> Iterator[Problem]:
        if self.qk_clip is not None and not 0 < self.qk_clip <= LARGEST:
            text = f"{self.qk_clip}: must be more than 0, as 100, or null"
            yield Problem("optimizer.qk_clip", text)
        for name in ("beta1", "beta2", "muon_momentum"):
            value = getattr(self, name)
            if not 0 <= value <= LARGEST_BETA:
                text = f"{value}: must be 0 or more, and below 1 in float32: at most {LARGEST_BETA}"
                yield Problem(f"optimizer.{name}", text)
        if not SMALLEST_EPS <= self.eps <= LARGEST:
            text = f"{self.eps}: must be between {SMALLEST_EPS:g} and {LARGEST:g}; {FITS}"
            yield Problem("optimizer.eps", text)
        for name in ("weight_decay", "clip_grad"):
            value = getattr(self, name)
            if not 0 <= value <= LARGEST:
                text = f"{value}: must be between 0 and {LARGEST:g}; {FITS}"
                yield Problem(f"optimizer.{name}", text)
