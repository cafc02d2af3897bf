"""The torch operators ``stable_attention::forward`` and ``stable_attention::backward``.

Both have fake implementations and the forward has an autograd rule, so torch.compile with
fullgraph=True, activation checkpointing, CUDA graphs and torch.library.opcheck work. Nothing here
reads a device value. `attention` is the only caller of the forward operator.

Both take tensors, the two lengths (symbolic under torch.compile) and ``spec``, the text of all
options (`Problem.encode`).

They are registered key by key: ``torch.library.custom_op`` walks the schema in Python on every
call, which takes several times as long (and short sequences take as long as a call of either).
Where nothing would see the operators (`_unseen`), the dispatcher is left out: two trips through it
a pass, each with all arguments, are a good part of this library's own time for a call
(docs/kernels.md).

Shape legend: as in `api`. Saved for the backward: q, k, v, O, an LSE (of the rounded P where O is
divided by their sum), O's low-order part, and the small tensors of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from stable_attention import dispatch, flops, vendors
from stable_attention.layouts import readable
from stable_attention.pieces import PLAIN, joined
from stable_attention.problem import Extras, Problem, options_of
from stable_attention.triton.forward import allocate, forward_kernel
from stable_attention.triton.preprocess import sink_gradient
from stable_attention.triton.results import ForwardResult, new_gradients

# Decided when the kernels are decorated, that is at import.
_INTERPRETING = type(forward_kernel).__name__ == "InterpretedFunction"


def interpreting() -> bool:
    """Whether Triton's CPU interpreter runs the kernels (TRITON_INTERPRET=1 at import)."""
    return _INTERPRETING


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
    sq: int,
    sk: int,
    spec: str,
    with_max_logits: bool,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(O, LSE, O's low-order part, largest logit of each head, LSE of the rounded P).

    See `api.stable_attention` and `triton.results`: of the two LSE one may be empty.
    """
    problem = Problem.decode(spec, q, k, v, sq=sq, sk=sk, sinks=sinks, cu_q=cu_q)
    extras = Extras(sinks, cu_q, cu_k, start_q, start_k, seed)
    result = _launch(q, k, v, problem, extras, with_max_logits=with_max_logits, with_lse=with_lse)
    return result.out, result.lse, result.low, result.max_logits, result.row_lse


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    extras: Extras,
    *,
    with_max_logits: bool = False,
    with_lse: bool = False,
) -> ForwardResult:
    vendors.select(problem, q.device)  # refuses what the backward would have to
    return dispatch.select(problem, q.device).forward(
        problem, q, k, v, extras=extras, with_max_logits=with_max_logits, with_lse=with_lse
    )


def _forward_fake(
    q, k, v, sinks, cu_q, cu_k, start_q, start_k, seed, sq, sk, spec, with_max_logits, with_lse
):
    problem = Problem.decode(spec, q, k, v, sq=sq, sk=sk, sinks=sinks, cu_q=cu_q)
    result = allocate(
        problem, q.device, out_dtype=q.dtype, with_max_logits=with_max_logits, with_lse=with_lse
    )
    return result.out, result.lse, result.low, result.max_logits, result.row_lse


def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    low: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    start_q: torch.Tensor | None,
    start_k: torch.Tensor | None,
    seed: torch.Tensor | None,
    sq: int,
    sk: int,
    spec: str,
    together: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV, dSinks); dSinks is empty without sinks.

    With ``together`` the first is the buffer of all three, side by side along the head dim, and
    the next two are empty; q, k and v then have the same tokens and heads.
    """
    problem = Problem.decode(spec, q, k, v, sq=sq, sk=sk, sinks=sinks, cu_q=cu_q)
    extras = Extras(sinks, cu_q, cu_k, start_q, start_k, seed)
    kernels = dispatch.select(problem, q.device)
    delta, dsinks = kernels.preprocess(
        problem, dout, out, low=low, lse=lse, dlse=dlse, extras=extras
    )
    vendor = vendors.select(problem, q.device) if q.numel() and k.numel() else None
    if vendor is not None and (dlse is None or vendor.takes_dlse):
        dq, dk, dv = vendor.backward(problem, dout, q, k, v, lse=lse, delta=delta, extras=extras)
        whole = torch.cat((dq, dk, dv), -1) if together else None
    else:
        whole, gradients = new_gradients(problem, q, k, v, together=together)
        dq, dk, dv = kernels.backward(
            problem, dout, q, k, v, lse=lse, delta=delta, extras=extras, gradients=gradients
        )
    if sinks is not None and problem.planes > 1:
        dsinks = sink_gradient(problem, delta)
    if whole is not None:
        dq, dk, dv = whole, q.new_empty(0), q.new_empty(0)
    if sinks is None or dsinks is None:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, dsinks.to(sinks.dtype)


def _backward_fake(
    dout, dlse, out, lse, low, q, k, v, sinks, cu_q, cu_k, start_q, start_k, seed, sq, sk, spec,
    together,
):  # fmt: skip
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    if together:
        whole = q.new_empty((*q.shape[:-1], q.shape[-1] + k.shape[-1] + v.shape[-1]))
        return whole, q.new_empty(0), q.new_empty(0), dsinks
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, dsinks


# Of the package as it was imported: copies of several versions may live in one process.
NAMESPACE = __name__.partition(".")[0]
# Kept alive: the registrations go with the object.
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _define(
    name: str, launch: Callable[..., object], fake: Callable[..., object]
) -> torch._ops.OpOverload:
    """Register an operator with the signature of ``launch`` for GPUs and the CPU interpreter."""
    schema = torch.library.infer_schema(launch, mutates_args=())
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl(name, dispatch.on_device(launch), key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


forward_op = _define("forward", _forward, _forward_fake)
backward_op = _define("backward", _backward, _backward_fake)
flops.register(forward_op, backward_op)
_forward_here, _backward_here = dispatch.on_device(_forward), dispatch.on_device(_backward)
_launch_here = dispatch.on_device(_launch)


def _unseen(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether calling the kernels and calling the operator are the same to everybody.

    They are not to whoever traces, transforms or records operators, or brings tensors of its own.
    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.autograd.profiler._is_profiler_enabled
        or torch._C._len_torch_dispatch_stack() != 0
        or torch._C._len_torch_function_stack() != 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return False
    for x in tensors:  # a plain loop: every call comes past twice
        # What is batched (also by autograd itself, for several dO at once) has no storage.
        if x is not None and (type(x) not in PLAIN or not torch._C._has_storage(x)):
            return False
    return True


def _text(spec: str | Problem) -> str:
    """What an operator takes: calls that nobody sees hand on the `Problem` itself."""
    return spec if isinstance(spec, str) else spec.encode()


class _Attention(torch.autograd.Function):
    """The autograd rule of the forward operator; differentiable once."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_q, cu_k, start_q, start_k, seed, sq, sk, spec, *wanted):
        tensors = (q, k, v, sinks, cu_q, cu_k, start_q, start_k, seed)
        if _unseen(tensors):
            out, lse, low, max_logits, row_lse = _forward_here(*tensors, sq, sk, spec, *wanted)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse, low, max_logits, row_lse = forward_op(
                    *tensors, sq, sk, _text(spec), *wanted
                )
        # By the shape, so that a call without rows is told, too: of (0,) one has one dimension.
        own_rows = row_lse.dim() > 1
        ctx.save_for_backward(out, row_lse if own_rows else lse, low, *tensors)
        ctx.lengths, ctx.spec = (sq, sk), spec
        ctx.mark_non_differentiable(low, max_logits, row_lse)
        ctx.set_materialize_grads(False)
        return out, lse, low, max_logits, row_lse

    @staticmethod
    def backward(ctx, dout, dlse, _dlow, _dmax, _drows):
        out, lse, low, q, k, v, sinks, *small = ctx.saved_tensors
        # cu_q, cu_k, start_q, start_k, seed; sq, sk, spec, with_max_logits, with_lse
        others = (None,) * 10
        if dlse is not None:
            # An LSE that nobody asked for is (0,), and so is its gradient: no rows to read.
            dlse = dlse.contiguous() if dlse.dim() > 1 else None
        if dout is None and dlse is None:
            return None, None, None, None, *others
        if dout is None:
            dout = torch.zeros_like(out)
        spec = ctx.spec
        options = options_of(spec) if isinstance(spec, str) else spec
        dout = readable(dout, options.layout)
        together = q.numel() > 0 and joined((q, k, v)) is not None
        tensors = (dout, dlse, out, lse, low, q, k, v, sinks, *small)
        # With gradients of gradients the operator has something to say (`_Once`).
        direct = not torch.is_grad_enabled() and _unseen(tensors)
        run: Callable[..., tuple[torch.Tensor, ...]] = _backward_here if direct else backward_op
        spec = spec if direct else _text(spec)
        dq, dk, dv, dsinks = run(*tensors, *ctx.lengths, spec, together)
        if together:
            dq, dk, dv = dq.split_with_sizes([x.shape[-1] for x in (q, k, v)], -1)
        return dq, dk, dv, None if sinks is None else dsinks, *others


class _Alone(torch.autograd.Function):
    """The rule of a call that wants O alone and that nobody sees: one output, and few arguments."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, problem, extras):
        found = _launch_here(q, k, v, problem, extras)
        lse = found.row_lse if found.row_lse.dim() > 1 else found.lse
        ctx.save_for_backward(found.out, lse, found.low, q, k, v, *extras[:6])
        ctx.lengths, ctx.spec = (problem.sq, problem.sk), problem
        ctx.set_materialize_grads(False)
        return found.out

    @staticmethod
    def backward(ctx, dout):
        return (*_Attention.backward(ctx, dout, None, None, None, None)[:4], None, None)


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
    operator: Callable[..., object], rule: type[torch.autograd.Function]
) -> Callable[..., Any]:
    """What the Autograd key runs: ``rule`` where one of the arguments wants a gradient."""

    def call(*arguments):
        if forward_ad._current_level >= 0:
            _refuse_tangents(arguments)
        wanted = (isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)
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
_LIBRARY.impl("forward", _with_rule(forward_op, _Attention), "Autograd")
_unseen_forward = _with_rule(_forward_here, _Attention)
_LIBRARY.impl("backward", _with_rule(backward_op, _Once), "Autograd")


def attention(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    *,
    with_max_logits: bool,
    with_lse: bool,
    with_low: bool,
) -> tuple[torch.Tensor, ...]:
    """`forward_op` of a call that `describe.describe` has seen; O alone where that is all."""
    if problem.backward not in ("auto", "own") and not torch.is_grad_enabled():
        # Nobody's backward runs, so nothing of it is refused (one query beside cached keys).
        problem = replace(problem, backward="own")
    tensors = (
        q, k, v, extras.sinks, extras.cu_q, extras.cu_k, extras.start_q, extras.start_k,
        extras.seed,
    )  # fmt: skip
    if not _unseen(tensors):
        spec = problem.encode()
        return forward_op(*tensors, problem.sq, problem.sk, spec, with_max_logits, with_lse)
    if with_max_logits or with_lse or with_low:
        return _unseen_forward(*tensors, problem.sq, problem.sk, problem, with_max_logits, with_lse)
    sinks = extras.sinks
    needs = q.requires_grad or k.requires_grad or v.requires_grad
    if torch.is_grad_enabled() and (needs or (sinks is not None and sinks.requires_grad)):
        return (_Alone.apply(q, k, v, sinks, problem, extras),)
    return (_launch_here(q, k, v, problem, extras).out,)


__all__ = ["attention", "backward_op", "forward_op", "interpreting"]
