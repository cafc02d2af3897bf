"""The shapes of one rank that every formula of the planner is made of.

Shape legend: T tokens of a micro-batch on this context-parallel rank; S = T / tp under sequence
parallelism, else T; h hidden; q, g query and key/value heads; d, dv head dims; f MLP width; V
padded vocabulary; N tokens a rank's experts are given; w bytes an element (2 in BF16, 4 in FP32).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patch.schema.model import attention_head_dim, query_groups
from megatron_patch.schema.run import RunConfig

FLOAT, INT64 = 4, 8


@dataclass(frozen=True, slots=True)
class RankShapes:
    """The numbers every formula is made of, for one rank."""

    w: int
    T: int
    S: int
    s: int
    """Tokens of one sequence on this rank."""
    b: int
    h: int
    q: int
    """Query heads of this tensor-parallel rank."""
    g: int
    """Key/value heads of this rank: at least one, which several ranks hold where they outnumber
    them."""
    d: int
    dv: int
    tp: int
    sp: bool
    vocab: int
    """V / tp."""
    residual: int
    """Bytes an element of the residual stream."""
    shared: int = 1
    """Ranks that hold the same key/value head."""

    @property
    def columns(self) -> int:
        """Columns of this rank's part of the qkv projection."""
        return self.q * self.d + self.g * (self.d + self.dv) // self.shared

    @property
    def mixed(self) -> int:
        """Columns of what q, k and v are slices of.

        Core gives ranks that share a head the whole projection, by an all-gather over tp.
        """
        return self.columns * (self.tp if self.shared > 1 else 1)

    @property
    def hidden(self) -> int:
        """Bytes of one [S, h] tensor."""
        return self.w * self.S * self.h

    @property
    def stream(self) -> int:
        """Bytes of one [S, h] tensor of the residual stream."""
        return self.residual * self.S * self.h

    @property
    def gathered(self) -> int:
        """Bytes of [T, h] gathered along the sequence for a matrix product; 0 without SP."""
        return self.w * self.T * self.h if self.sp else 0


def rank_shapes(run: RunConfig, vocab: int) -> RankShapes:
    """The shapes of one rank; ``vocab`` is padded."""
    model, p = run.model, run.parallel
    tp, b = p.tensor_model_parallel_size, run.training.micro_batch_size
    s = model.seq_length // p.context_parallel_size
    q = model.num_attention_heads
    d = dv = attention_head_dim(model)
    groups = query_groups(model)
    if model.mla is not None:
        groups, dv = q, model.mla.v_head_dim
        d = model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim
    w = 2 if run.training.precision == "bf16" else 4
    return RankShapes(
        w=w, T=s * b, S=s * b // (tp if p.sequence_parallel else 1), s=s, b=b,
        h=model.hidden_size, q=q // tp, g=max(1, groups // tp), d=d, dv=dv, tp=tp,
        sp=p.sequence_parallel, vocab=vocab // tp, shared=max(1, tp // groups),
        residual=4 if model.fp32_residual_connection else w,
    )  # fmt: skip
