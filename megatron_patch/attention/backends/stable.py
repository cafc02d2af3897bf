"""``stable_flash``: the project's own kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatron_patch.attention.backends.reference import draw_seed
from megatron_patch.attention.backends.row import Backend, LayerRequirements, Shapes

if TYPE_CHECKING:
    from megatron_patch.attention.backends.call import AttentionCall, Result
    from megatron_patch.schema.run import RunConfig


def run(call: AttentionCall) -> Result:
    """Attention by `stable_attention`."""
    from stable_attention.api import attend

    watched = call.observed is not None
    out = attend(
        call.q,
        call.k,
        call.v,
        call.options,
        # Parameters are BF16; the softmax they join is float32.
        sinks=None if call.sinks is None else call.sinks.float(),
        dropout_seed=draw_seed(call.q.device) if call.options.dropout_p > 0 else None,
        return_max_logits=call.want_max_logits or watched,
        return_o_lo=watched,
        **call.packed,
    )
    return call.result(out)


def saved_bytes(n: Shapes, keys: int, stabilizer: str, o_lo: str) -> int:
    """O, LSE and the low-order part of O where the stabilizer keeps it."""
    from stable_attention.stabilizers import STABILIZERS

    return n.T * n.q * STABILIZERS[stabilizer].saved_bytes(n.dv, o_lo)


def warm(run: RunConfig, kinds: Iterable[LayerRequirements]) -> None:
    """One forward and backward of every kind of attention layer on the run's device."""
    import torch

    from stable_attention import stable_attention

    a, length = run.attention, min(run.model.seq_length, 4096)
    options: dict[str, Any] = {
        "stabilizer": a.stabilizer,
        "backward": a.backward,
        "allow_broken": a.allow_broken,
    }
    if a.o_lo != "default":
        options["o_lo"] = a.o_lo
    for facts in kinds:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[facts.dtype]
        place: dict[str, Any] = {"device": run.training.device, "requires_grad": True}
        sizes = (facts.heads, facts.head_dim), (facts.kv_heads, facts.head_dim)
        q, k, v = (
            torch.randn(length, 1, n, d, dtype=dtype, **place)
            for n, d in (*sizes, (facts.kv_heads, facts.v_head_dim))
        )
        out = stable_attention(
            q, k, v, layout="sbhd", causal=True, window=facts.window,
            sinks=torch.zeros(facts.heads, **place) if facts.sinks else None,
            dropout_p=run.model.attention_dropout, deterministic=facts.deterministic, **options,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)  # no LSE was asked for
        out.sum().backward()
        print(
            f"warm-up: stable_flash, {facts.kind}: {facts.heads} heads, {facts.kv_heads} KV heads, "
            f"head dimensions {facts.head_dim} and {facts.v_head_dim}"
        )
    if run.training.device == "cuda":
        torch.cuda.synchronize()


BACKEND = Backend(
    name="stable_flash",
    kernel="stable_attention (Triton)",
    reason="compensated numerics at flash speed",
    min_sm=(8, 0),
    softcap=True,
    cp=True,
    stabilizers=(
        "compensated",
        "compensated_projected",
        "projected",
        "dynamic_max",
        "none",
        "paper_bf16",
    ),
    borrows=True,
    package="stable_attention.api",
    notes=("on a CPU only under Triton's interpreter (TRITON_INTERPRET=1)",),
    run=run,
    interpreted=True,
    chunk_primitives="stable_attention.chunks",
    switchable=True,
    saved_bytes=saved_bytes,
    summed_head_dims=(64, 128),
    warm=warm,
)
