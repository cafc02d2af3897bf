"""The ``training:`` and ``optimizer:`` sections: the loop, its batch and its update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.config.problem import Problem
    from megatron_patch.config.root import RunConfig


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


@dataclass(kw_only=True, frozen=True, slots=True)
class TrainingConfig:
    """The loop: how long, how much at a time, on what, and how carefully."""

    train_steps: int
    """Optimizer steps of the whole run."""
    global_batch_size: int
    """Sequences of one optimizer step, over all ranks."""
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
    """Steps between evaluations on the validation split; none: only at the end."""
    eval_steps: int = 10
    """Global batches of one evaluation."""
    exit_after_minutes: float | None = None
    """Save and stop gracefully after this long; the run can be resumed."""
    exit_at_step: int | None = None
    """Save and stop gracefully after this step; the run can be resumed."""
    check_finite: bool = True
    """Stop before the update when loss or gradients are not finite; names step, rank, parameter."""

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Everything about this section that can be checked without a GPU."""
        yield from ()


@dataclass(kw_only=True, frozen=True, slots=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule."""

    lr: float
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay after the warm-up; wsd holds the peak and decays over the last wsd_decay_steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    decay_steps: int | None = None
    """Step at which min_lr is reached; default: training.train_steps."""
    wsd_decay_steps: int | None = None
    """Length of the final decay under ``wsd``."""
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "minus_sqrt"
    """Shape of the final decay under ``wsd``."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms, biases and sinks are never decayed."""
    beta1: float = 0.9
    """Adam's first-moment decay."""
    beta2: float = 0.95
    """Adam's second-moment decay."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Global gradient-norm clip; 0 disables clipping."""
    implementation: Literal["auto", "apex", "te", "torch"] = "auto"
    """AdamW kernel; auto: Transformer Engine's, else Apex's, else PyTorch's; the log says which."""

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Everything about this section that can be checked without a GPU."""
        yield from ()
