"""The register of Megatron-Core patches: what this project changes in core, and why.

A patch is applied in one of three ways: for the rest of the process (it has ``install`` and
``undo``); for the time of a block or to one object (`replace.patched`, or a method set on it); or
by a subclass or function that a layer spec or the configuration names in the place of core's.

``megatron-patch doctor`` prints the register. ``tests/core_patches/test_needed.py`` fails when the
unpatched core no longer has the fault, or has learned what it lacked.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_patch.core_patches import cpu_mode, quiet
from megatron_patch.core_patches.optimizer import norm_and_clipping
from megatron_patch.core_patches.rope import own_rope, packed_rope
from megatron_patch.core_patches.split import qkv_split
from megatron_patch.core_patches.weight_gradient import weight_gradient


@dataclass(frozen=True, slots=True)
class Patch:
    """One change of Megatron-Core."""

    name: str
    target: str
    """What changes, below ``megatron.core``."""
    why: str
    """What core does or lacks."""
    install: Callable[[], Any] | None = None
    undo: Callable[[], Any] | None = None
    versions: str = ">=0.19,<0.20"
    """Releases of megatron-core for which the patch is known to be right."""
    upstream_issue: str | None = None
    """Address of an issue or a proposed change; None: we know of none and have filed none."""

    def fits(self, version: str) -> bool:
        """Whether a release of megatron-core is one of ``versions``."""
        return SpecifierSet(self.versions).contains(Version(version).base_version)

    def selftest(self) -> None:
        """Look the target up in the installed core.

        Raises:
            ImportError, AttributeError: it is not there.
        """
        pkgutil.resolve_name(f"megatron.core.{self.target}")


_UPSTREAM = "https://github.com/NVIDIA/Megatron-LM"
_DISTRIBUTED = "optimizer.distrib_optimizer.DistributedOptimizer"

PATCHES = (
    # For the rest of the process
    Patch("CPU mode", "tensor_parallel.random",
        "tensors, streams, random states and memory are those of a GPU everywhere",
        cpu_mode.install, cpu_mode.uninstall),
    Patch("quiet", "models.gpt.gpt_model.logger",
        "every rank warns of packages it does without and of core's own deprecations",
        quiet.install, quiet.undo),
    Patch("QKV split", "transformer.attention.SplitAlongDim",
        "without Transformer Engine, dQ, dK and dV are copied into one tensor",
        qkv_split.install, qkv_split.undo),
    Patch("packed rotary", "models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd",
        "without Transformer Engine, rotary positions of packed documents wait for the device",
        packed_rope.install, packed_rope.undo),
    Patch("norm and clipping", "optimizer.clip_grads.l2_norm_impl",
        "without Transformer Engine and Apex, the norm of every gradient waits for the device",
        norm_and_clipping.install, norm_and_clipping.undo),
    Patch("rotary positions",
        "models.common.embeddings.rope_utils._apply_rotary_pos_emb_bshd",
        "cosines and sines are rounded to 16 bits, and so are products and sums, in four kernels",
        own_rope.install, own_rope.undo),
    Patch("weight gradients", "tensor_parallel.layers._grad_accum_fusion_available",
        "without Apex, weight gradients are rounded to 16 bits and added in another kernel",
        weight_gradient.install, weight_gradient.undo),
    # The model: subclasses and functions that stand for core's
    Patch("norms", "transformer.torch_norm.WrappedTorchNorm",
        "the norms of local layers refuse sequence parallelism",
        upstream_issue=f"{_UPSTREAM}/issues/1448"),
    Patch("residual stream", "fusions.fused_bias_dropout.get_bias_dropout_add",
        "local layers add to the residual stream in one kernel and normalize it in another"),
    Patch("cross entropy", "models.gpt.gpt_model.GPTModel.compute_language_model_loss",
        "the loss keeps a float32 softmax of 16-bit logits"),
    Patch("squared ReLU", "activations.squared_relu",
        "it is compiled even where the configuration does not ask for it"),
    Patch("latent attention",
        "transformer.multi_latent_attention.MLASelfAttention._qkv_down_projection",
        "under tensor parallelism, local layers miss other ranks' gradient of the rotary key",
        upstream_issue=f"{_UPSTREAM}/issues/1699"),
    Patch("grouped experts", "transformer.moe.experts.SequentialMLP",
        "without Transformer Engine, every expert is an MLP of its own kernels"),
    Patch("recomputed biases", "transformer.transformer_layer.TransformerLayer._forward_mlp",
        "a recomputed MLP returns its bias itself, and the backward pass never ends"),
    Patch("biases of experts", "tensor_parallel.RowParallelLinear.__init__",
        "experts whole on tensor-parallel ranks have their biases' gradients summed twice"),
    Patch("extra depths", "transformer.multi_token_prediction.process_mtp_loss",
        "extra losses are weighted by the token counts of one rank's part of one micro-batch",
        upstream_issue=f"{_UPSTREAM}/issues/7452"),
    Patch("sinks", "transformer.dot_product_attention.DotProductAttention.__init__",
        "the norm of the gradient leaves out learnable sinks of all tensor-parallel ranks but one",
        upstream_issue=f"{_UPSTREAM}/pull/7530"),
    Patch("gathered logits", "models.gpt.gpt_model.GPTModel.compute_language_model_loss",
        "logits of the whole vocabulary on every tensor-parallel rank are taken for its parts",
        upstream_issue=f"{_UPSTREAM}/issues/7452"),
    Patch("tied output layer", "models.gpt.gpt_model.GPTModel.__init__",
        "a last stage with tied embeddings and extra depths allocates a weight nothing uses"),
    # The optimizer: core_patches.optimizer, training.finite
    Patch("optimizer kernel", "optimizer.Adam",
        "the kernel of Adam is what is installed, whatever the configuration asks for"),
    Patch("fused AdamW", "optimizer.get_megatron_optimizer",
        "PyTorch's AdamW is built without its fused kernel, and no option asks for it"),
    Patch("weight copy", f"{_DISTRIBUTED}._copy_main_params_to_model_params",
        "updated weights are copied into the model one parameter at a time"),
    Patch("agreed norm", "optimizer.optimizer.ChainedOptimizer.get_grad_norm",
        "nothing can judge the norm on all ranks between its reduction and the update"),
    Patch("Muon's matrices", "optimizer.emerging_optimizers._is_nonlinear_or_embedding",
        "tables of positions count as matrices, which Muon updates"),
    Patch("Muon's gather",
        "optimizer.layer_wise_optimizer.LayerWiseDistributedOptimizer.allgather_params",
        "updated matrices of unequal sizes are gathered at once, which gloo cannot do"),
    Patch("Muon's experts",
        "optimizer.layer_wise_optimizer.LayerWiseDistributedOptimizer.shard_params",
        "experts with copies on tensor-parallel ranks alone are updated and saved by each of them"),
    Patch("QK clip", "optimizer.qk_clip.clip_qk",
        "it fails on layers without attention and on sharded weights, and leaves biases unscaled",
        upstream_issue=f"{_UPSTREAM}/pull/7382"),
    # Checkpoints: checkpoint.{reshardable, optimizer_state, safe_reader, writer}
    Patch("resharding", f"{_DISTRIBUTED}.sharded_param_state_fully_reshardable",
        "every rank collects whole parameters, of wrong elements with several buckets"),
    Patch("empty parts", f"{_DISTRIBUTED}.state_dict",
        "a part of the optimizer that owns no parameters on a rank cannot give its settings"),
    Patch("own step", f"{_DISTRIBUTED}._set_main_param_and_optimizer_states",
        "a load asks for a step of each parameter that fully_reshardable never saves"),
    Patch("safe loading", "dist_checkpointing.strategies.torch._get_filesystem_reader",
        "a load runs what pickles in a checkpoint tell it to"),
    Patch("results queue", "dist_checkpointing.strategies.filesystem_async._results_queue",
        "a save starts a helper process for a queue that is not used"),
    # Other trainers and images: attention.patch, runtime.environment
    Patch("core attention", "models.backends.LocalSpecProvider.core_attention",
        "launchers that build their specs out of reach cannot name another core attention"),
    Patch("old nvrx", "dist_checkpointing.strategies.nvrx.is_nvrx_min_version",
        "the import of core fails beside an nvidia-resiliency-ext older than 0.6",
        upstream_issue=f"{_UPSTREAM}/pull/5605"),
)  # fmt: skip
