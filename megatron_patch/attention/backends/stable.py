"""``stable_flash``: the project's own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.attention.backends.reference import draw_seed
from megatron_patch.attention.backends.row import Backend, Shapes
from megatron_patch.schema.model import attention_head_dim, query_groups

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
        return_residual=watched,
        **call.packed,
    )
    return call.result(out)


def saved_bytes(n: Shapes, keys: int, stabilizer: str, residual: str) -> int:
    """O, LSE and the low-order part of O where the stabilizer keeps it."""
    from stable_attention.stabilizers import STABILIZERS

    return n.T * n.q * STABILIZERS[stabilizer].saved_bytes(n.dv, residual)


def warm(run: RunConfig) -> None:
    """One forward and backward of the configured head dimensions on the current GPU."""
    import torch

    from stable_attention import stable_attention

    m = run.model
    heads = m.num_attention_heads // run.parallel.tensor_model_parallel_size
    groups = query_groups(m) // run.parallel.tensor_model_parallel_size
    head_dim, length = attention_head_dim(m), min(m.seq_length, 4096)
    q, k, v = (
        torch.randn(1, n, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, max(groups, 1), max(groups, 1))
    )
    a = run.attention
    out = stable_attention(
        q, k, v, layout="bhsd", causal=True, stabilizer=a.stabilizer, backward=a.backward
    )
    assert isinstance(out, torch.Tensor)  # no LSE was asked for
    out.sum().backward()
    torch.cuda.synchronize()
    print(f"warm-up: stable_flash, {heads} heads, {groups} KV heads, head dimension {head_dim}")


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
