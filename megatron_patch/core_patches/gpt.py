"""`GPTModel`: Megatron-Core's, with our losses.

Shape legend: b micro-batch, s tokens of this context-parallel rank, v part of the vocabulary on
this tensor-parallel rank.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from megatron.core.models.gpt import gpt_model as core_model

from megatron_patch.core_patches.cross_entropy import cross_entropy, is_compiled
from megatron_patch.core_patches.mtp import process_mtp_loss


def _rebound(function: Any, **names: Any) -> Any:
    """``function`` with some of the global names it uses bound to other objects."""
    missing = set(names) - set(function.__code__.co_names)
    assert not missing, f"{function.__qualname__} does not use {missing}: Megatron-Core changed"
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class GPTModel(core_model.GPTModel):
    """Megatron-Core's model with our compiled cross entropy and multi-token-prediction loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As Megatron-Core's; the last stage of a pipeline has no weight that nothing uses."""
        super().__init__(*args, **kwargs)
        # With tied embeddings and extra depths the last stage multiplies by its copy of the
        # embedding. Core 0.19.2 allocates an output projection as well: it gets no gradient, on
        # which overlap_grad_reduce fails, and core's own sharding of the state forbids it.
        tied = self.share_embeddings_and_output_weights and self.mtp_process
        if tied and self.post_process and not self.pre_process:
            self.output_layer.weight = None

    # The method is 150 lines, of which one call changes; overriding it would copy the rest.
    _postprocess = _rebound(core_model.GPTModel._postprocess, process_mtp_loss=process_mtp_loss)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """[b, s] token losses in nats of ``labels`` [b, s] under ``logits`` [s, b, v].

        Raises ValueError: logits of the whole vocabulary on every tensor-parallel rank, which would
        be taken for parts of a larger one.
        """
        parts = self.pg_collection.tp.size()
        if logits.shape[-1] * parts != self.vocab_size:
            raise ValueError(
                f"logits of {logits.shape[-1]} values on each of {parts} tensor-parallel ranks, "
                f"for a vocabulary of {self.vocab_size}: a loss needs each rank's "
                f"{self.vocab_size // parts}. Leave parallel_output True and "
                "runtime_gather_output out, or call the model without labels"
            )
        if not is_compiled(self.config):
            return super().compute_language_model_loss(labels, logits)
        losses = cross_entropy(logits, labels.transpose(0, 1).contiguous(), self.pg_collection.tp)
        return losses.transpose(0, 1).contiguous()
