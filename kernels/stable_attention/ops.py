"""The torch operators ``stable_attention::forward`` and ``stable_attention::backward``.

Both have fake implementations and the forward has an autograd rule, so torch.compile with
fullgraph=True, activation checkpointing, CUDA graphs and torch.library.opcheck work. Nothing here
reads a device value. `attention` is the only caller of the forward operator.

They are registered key by key: ``torch.library.custom_op`` walks the schema in Python on every
call, which costs 140 us with 25 arguments where this costs 25 (and short sequences take as long).
Where nothing would see the operators (`_unseen`), the dispatcher is left out: two trips through it
a pass, each with all arguments, are a good part of this library's own time for a call
(docs/kernels.md).

Shape legend: as in `api`. Saved for the backward: q, k, v, O, an LSE (of the rounded P where O is
divided by their sum), O's low-order part, and the small tensors of the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from stable_attention import dispatch, flops
from stable_attention.pieces import joined
from stable_attention.problem import Problem, dims, readable
from stable_attention.triton.forward import allocate, forward_kernel
from stable_attention.triton.options import Extras
from stable_attention.triton.results import new_gradients

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


def _forward(
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
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(O, LSE, O's low-order part, largest logit of each head, LSE of the rounded P).

    See `api.stable_attention` and `triton.results`: of the two LSE one may be empty.
    """
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
        problem, q, k, v, extras=extras, with_max_logits=with_max_logits, with_lse=with_lse
    )
    return result.out, result.lse, result.low, result.max_logits, result.row_lse


def _forward_fake(
    q, k, v, sinks, cu_q, cu_k, start_q, start_k, seed, layout, max_seqlen_q, max_seqlen_k,
    scale, window_left, window_right, softcap, dropout_p, batch_offset, head_offset,
    stabilizer, residual, beta, eps, deterministic, with_max_logits, with_lse,
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
    result = allocate(
        problem, q.device, out_dtype=q.dtype, with_max_logits=with_max_logits, with_lse=with_lse
    )
    return result.out, result.lse, result.low, result.max_logits, result.row_lse


def _backward(
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
    together: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV, dSinks); dSinks is empty without sinks.

    With ``together`` the first is the buffer of all three, side by side along the head dim, and
    the next two are empty; q, k and v then have the same tokens and heads.
    """
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
    whole, gradients = new_gradients(problem, q, k, v, together=together)
    dq, dk, dv = kernels.backward(
        problem, dout, q, k, v, lse=lse, delta=delta, extras=extras, gradients=gradients
    )
    if whole is not None:
        dq, dk, dv = whole, q.new_empty(0), q.new_empty(0)
    if sinks is None or dsinks is None:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, dsinks.to(sinks.dtype)


def _backward_fake(dout, dlse, q, k, v, out, lse, low, sinks, *rest):
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    if rest[-1]:  # together
        whole = q.new_empty((*q.shape[:-1], q.shape[-1] + k.shape[-1] + v.shape[-1]))
        return whole, q.new_empty(0), q.new_empty(0), dsinks
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, dsinks


# Kept alive: the registrations go with the object.
_LIBRARY = torch.library.Library("stable_attention", "DEF")


def _define(
    name: str, launch: Callable[..., object], fake: Callable[..., object]
) -> torch._ops.OpOverload:
    """Register an operator with the signature of ``launch`` for GPUs and the CPU interpreter."""
    schema = torch.library.infer_schema(launch, mutates_args=())
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl(name, dispatch.on_device(launch), key)
    torch.library.register_fake(f"stable_attention::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.stable_attention, name).default


forward_op = _define("forward", _forward, _forward_fake)
backward_op = _define("backward", _backward, _backward_fake)
flops.register(forward_op, backward_op)
_forward_here, _backward_here = dispatch.on_device(_forward), dispatch.on_device(_backward)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _unseen(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether calling the kernels and calling the operator are the same to everybody.

    They are not to whoever traces, transforms or records operators, or brings tensors of its own.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.autograd.profiler._is_profiler_enabled
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        # What is batched (also by autograd itself, for several dO at once) has no storage.
        and all(x is None or (type(x) in _PLAIN and torch._C._has_storage(x)) for x in tensors)
    )


# Positions in the forward operator's argument list.
_TENSORS = 9
_SCALARS = slice(9, 21)
_DETERMINISTIC = 23
_ARGUMENTS = 26
_OPTIONS = tuple(inspect.signature(_forward).parameters)[_TENSORS + 1 :]


class _Attention(torch.autograd.Function):
    """The autograd rule of the forward operator; differentiable once."""

    @staticmethod
    def forward(ctx, *inputs):
        if _unseen(inputs[:_TENSORS]):
            out, lse, low, max_logits, row_lse = _forward_here(*inputs)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse, low, max_logits, row_lse = forward_op(*inputs)
        # By the shape, so that a call without rows is told, too: of (0,) one has one dimension.
        own_rows = row_lse.dim() > 1
        ctx.save_for_backward(*inputs[:_TENSORS], out, row_lse if own_rows else lse, low)
        ctx.scalars = (*inputs[_SCALARS], inputs[_DETERMINISTIC])
        ctx.mark_non_differentiable(low, max_logits, row_lse)
        ctx.set_materialize_grads(False)
        return out, lse, low, max_logits, row_lse

    @staticmethod
    def backward(ctx, dout, dlse, _dlow, _dmax, _drows):
        q, k, v, sinks, *rest, out, lse, low = ctx.saved_tensors
        if dlse is not None:
            # An LSE that nobody asked for is (0,), and so is its gradient: no rows to read.
            dlse = dlse.contiguous() if dlse.dim() > 1 else None
        if dout is None and dlse is None:
            return (None,) * _ARGUMENTS
        if dout is None:
            dout = torch.zeros_like(out)
        dout = readable(dout, ctx.scalars[0])
        together = q.numel() > 0 and joined((q, k, v)) is not None
        tensors = (dout, dlse, q, k, v, out, lse, low, sinks, *rest)
        # With gradients of gradients the operator has something to say (`_Once`).
        direct = not torch.is_grad_enabled() and _unseen(tensors)
        run: Callable[..., tuple[torch.Tensor, ...]] = _backward_here if direct else backward_op
        dq, dk, dv, dsinks = run(*tensors, *ctx.scalars, together)
        if together:
            dq, dk, dv = dq.split_with_sizes([x.shape[-1] for x in (q, k, v)], -1)
        unused = (None,) * (_ARGUMENTS - 4)
        return (dq, dk, dv, None if sinks is None else dsinks, *unused)


class _Once(torch.autograd.Function):
    """The backward operator inside a graph of its own gradients: refused when used."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return backward_op(*inputs)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(_refusal("second derivatives (create_graph=True)"))


def _refusal(what: str) -> str:
    return (
        f"stable_attention is differentiable once, in reverse mode: {what} need another "
        "attention, such as torch's unfused scaled_dot_product_attention"
    )


def _refuse_tangents(arguments: tuple[object, ...]) -> None:
    """Raise where forward-mode AD came along: below it a tangent would be a silent zero."""
    for x in arguments:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(_refusal("Jacobian-vector products (torch.func.jvp, dual numbers)"))


def _with_rule(
    operator: Callable[..., object], rule: type[torch.autograd.Function], inputs: slice
) -> Callable[..., Any]:
    """What the Autograd key runs: ``rule`` where one of the tensors ``inputs`` wants a gradient."""

    def call(*arguments):
        if forward_ad._current_level >= 0:
            _refuse_tangents(arguments[inputs])
        wanted = (x is not None and x.requires_grad for x in arguments[inputs])
        if torch.is_grad_enabled() and any(wanted):
            return rule.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return call


def under_autocast(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v in autocast's dtype, as torch casts those of scaled_dot_product_attention."""
    kind = qkv[0].device.type if isinstance(qkv[0], torch.Tensor) else ""
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return qkv
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in qkv
    )


def _autocast(key: torch._C.DispatchKey) -> Callable[..., Any]:
    """What an Autocast key runs: the forward operator on the cast q, k and v."""

    def call(q, k, v, *rest):
        cast = under_autocast(q, k, v)  # before the guard, which turns autocast off
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return forward_op(*cast, *rest)

    return call


for _key in (torch._C.DispatchKey.AutocastCUDA, torch._C.DispatchKey.AutocastCPU):
    _LIBRARY.impl("forward", _autocast(_key), _key.name)
_LIBRARY.impl("forward", _with_rule(forward_op, _Attention, slice(4)), "Autograd")
_unseen_forward = _with_rule(_forward_here, _Attention, slice(4))
# All that is differentiable: with sinks alone only O, LSE and the sinks want a gradient.
_LIBRARY.impl("backward", _with_rule(backward_op, _Once, slice(9)), "Autograd")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *small: torch.Tensor | None,
    layout: str,
    **options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`forward_op` with keywords; ``small`` is cu_q, cu_k, start_q, start_k, seed."""
    assert len(options) == len(_OPTIONS), options.keys()
    arguments = (q, k, v, sinks, *small, layout, *map(options.__getitem__, _OPTIONS))
    run = _unseen_forward if _unseen(arguments[:_TENSORS]) else forward_op
    return run(*arguments)


__all__ = ["attention", "backward_op", "forward_op", "interpreting"]
