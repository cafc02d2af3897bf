"""The torch operators ``stable_attention::forward`` and ``stable_attention::backward``.

Both have fake implementations and the forward has an autograd rule, so torch.compile with
fullgraph=True, activation checkpointing, CUDA graphs and torch.library.opcheck work. Nothing here
reads a device value. `attention` is the only caller of the forward operator.

Shape legend: as in `api`. Saved for the backward: q, k, v, O, LSE, O's low-order part, and the
small tensors of the call.
"""

from __future__ import annotations

import torch

from stable_attention import dispatch
from stable_attention.problem import Problem, dims
from stable_attention.triton.forward import allocate, forward_kernel
from stable_attention.triton.options import Extras

# Decided when the kernels are decorated, that is at import.
_INTERPRETING = type(forward_kernel).__name__ == "InterpretedFunction"


def interpreting() -> bool:
    """Whether Triton's CPU interpreter runs the kernels (TRITON_INTERPRET=1 at import)."""
    return _INTERPRETING


def _problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    *,
    layout: str,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: object,
) -> Problem:
    """The `Problem` of an operator call whose arguments `problem.describe` has already seen."""
    batch, lq, heads, d = dims(q, layout)
    _, lk, kv_heads, _ = dims(k, layout)
    packed = layout == "thd"
    assert not packed or cu_q is not None
    return Problem(
        layout=layout,
        dtype=q.dtype,
        batch=cu_q.shape[0] - 1 if packed and cu_q is not None else batch,
        sq=max_seqlen_q,
        sk=max_seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        d=d,
        dv=v.shape[-1],
        tq=lq if packed else batch * lq,
        tk=lk if packed else batch * lk,
        has_sinks=sinks is not None,
        **options,  # type: ignore[arg-type]
    )


@torch.library.custom_op("stable_attention::forward", mutates_args=())
def forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    start_q: torch.Tensor | None,
    start_k: torch.Tensor | None,
    seed: torch.Tensor | None,
    layout: str,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    batch_offset: int,
    head_offset: int,
    stabilizer: str,
    residual: str,
    beta: float,
    eps: float,
    deterministic: bool,
    with_max_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(O, LSE, O's low-order part, largest logit of each head); see `api.stable_attention`."""
    problem = _problem(
        q,
        k,
        v,
        sinks,
        cu_q,
        layout=layout,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        scale=scale,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        dropout_p=dropout_p,
        stabilizer=stabilizer,
        residual=residual,
        deterministic=deterministic,
    )
    extras = Extras(
        sinks=sinks,
        seed=seed,
        cu_q=cu_q,
        cu_k=cu_k,
        start_q=start_q,
        start_k=start_k,
        batch_offset=batch_offset,
        head_offset=head_offset,
        beta=beta,
        eps=eps,
    )
    result = dispatch.select(problem, q.device).forward(
        problem, q, k, v, extras=extras, with_max_logits=with_max_logits
    )
    return result.out, result.lse, result.low, result.max_logits


@forward_op.register_fake
def _forward_fake(
    q, k, v, sinks, cu_q, cu_k, start_q, start_k, seed, layout, max_seqlen_q, max_seqlen_k,
    scale, window_left, window_right, softcap, dropout_p, batch_offset, head_offset,
    stabilizer, residual, beta, eps, deterministic, with_max_logits,
):  # fmt: skip
    problem = _problem(
        q,
        k,
        v,
        sinks,
        cu_q,
        layout=layout,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        scale=scale,
        stabilizer=stabilizer,
        residual=residual,
    )
    result = allocate(problem, q.device, out_dtype=q.dtype, with_max_logits=with_max_logits)
    return result.out, result.lse, result.low, result.max_logits


@torch.library.custom_op("stable_attention::backward", mutates_args=())
def backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    low: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    start_q: torch.Tensor | None,
    start_k: torch.Tensor | None,
    seed: torch.Tensor | None,
    layout: str,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    batch_offset: int,
    head_offset: int,
    stabilizer: str,
    residual: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV, dSinks); dSinks is empty without sinks."""
    problem = _problem(
        q,
        k,
        v,
        sinks,
        cu_q,
        layout=layout,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        scale=scale,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        dropout_p=dropout_p,
        stabilizer=stabilizer,
        residual=residual,
        deterministic=deterministic,
    )
    extras = Extras(
        sinks=sinks,
        seed=seed,
        cu_q=cu_q,
        cu_k=cu_k,
        start_q=start_q,
        start_k=start_k,
        batch_offset=batch_offset,
        head_offset=head_offset,
    )
    kernels = dispatch.select(problem, q.device)
    delta, dsinks = kernels.preprocess(
        problem, dout, out, low=low, lse=lse, dlse=dlse, extras=extras
    )
    dq, dk, dv = kernels.backward(problem, dout, q, k, v, lse=lse, delta=delta, extras=extras)
    if sinks is None or dsinks is None:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, dsinks.to(sinks.dtype)


@backward_op.register_fake
def _backward_fake(dout, dlse, q, k, v, out, lse, low, sinks, *_):
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


# Positions in forward_op's argument list.
_TENSORS = 9
_SCALARS = slice(9, 21)
_DETERMINISTIC = 23


def _setup_context(ctx, inputs, output):
    out, lse, low, max_logits = output
    ctx.save_for_backward(*inputs[:_TENSORS], out, lse, low)
    ctx.scalars = (*inputs[_SCALARS], inputs[_DETERMINISTIC])
    ctx.mark_non_differentiable(low, max_logits)
    ctx.set_materialize_grads(False)


def _autograd(ctx, dout, dlse, _dlow, _dmax):
    q, k, v, sinks, *rest, out, lse, low = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 25
    if dout is None:
        dout = torch.zeros_like(out)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    dq, dk, dv, dsinks = backward_op(dout, dlse, q, k, v, out, lse, low, sinks, *rest, *ctx.scalars)
    return (dq, dk, dv, None if sinks is None else dsinks, *(None,) * 21)


forward_op.register_autograd(_autograd, setup_context=_setup_context)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *small: torch.Tensor | None,
    layout: str,
    **options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`forward_op` with keywords; ``small`` is cu_q, cu_k, start_q, start_k, seed."""
    return forward_op(q, k, v, sinks, *small, layout=layout, **options)


__all__ = ["attention", "backward_op", "forward_op", "interpreting"]
