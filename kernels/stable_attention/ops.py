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

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from stable_attention import dispatch, flops, vendors
from stable_attention.eager import has_tangent
from stable_attention.layouts import readable
from stable_attention.pieces import PLAIN, joined
from stable_attention.problem import KEPT, Extras, Problem, options_of
from stable_attention.triton.forward import allocate, forward_kernel
from stable_attention.triton.passes import repeated
from stable_attention.triton.preprocess import sink_gradient
from stable_attention.triton.results import new_gradients

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
    vendors.select(problem, q.device)  # refuses what the backward would have to
    extras = Extras(sinks, cu_q, cu_k, start_q, start_k, seed)
    return _run_forward(problem, q, k, v, extras=extras, wanted=(with_max_logits, with_lse))


def _run_forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    extras: Extras,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_forward`; ``wanted``: with_max_logits, with_lse."""
    result = dispatch.select(problem, q.device).forward(
        problem, q, k, v, extras=extras, with_max_logits=wanted[0], with_lse=wanted[1]
    )
    return result.out, result.lse, result.low, result.max_logits, result.row_lse


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
    found = _run_backward(
        problem, dout, q, k, v,
        dlse=dlse, out=out, lse=lse, low=low, extras=extras, together=together,
    )  # fmt: skip
    dq, dk, dv, dsinks = (q.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv, dsinks


def _run_backward(
    problem: Problem,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    low: torch.Tensor,
    extras: Extras,
    together: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """`_backward`, with None for what is empty."""
    kernels, sinks = dispatch.select(problem, q.device), extras.sinks
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
    dsinks = None if sinks is None or dsinks is None else dsinks.to(sinks.dtype)
    return (dq, dk, dv, dsinks) if whole is None else (whole, None, None, dsinks)


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


def _known(problem: Problem) -> tuple[object, ...]:
    """What, with the kinds of its tensors, decides which pass a call takes."""
    return id(problem), tuple(dispatch.allowed()), len(vendors.AUTO)


@dispatch.on_device
def _forward_pass(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *small: torch.Tensor | None,
    problem: Problem,
    alone: bool,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """`_run_forward`; ``alone``: O and what its backward reads, an LSE and the low-order part."""
    found = _run_forward(problem, q, k, v, extras=Extras(*small), wanted=wanted)
    return (found[0], _read_back(found), found[2]) if alone else found


def _read_back(found: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The LSE that P of the backward is made of."""
    # By the shape, so that a call without rows is told, too: of (0,) one has one dimension.
    return found[4] if found[4].dim() > 1 else found[1]


def _forward_unseen(
    problem: Problem,
    tensors: tuple[torch.Tensor | None, ...],
    *,
    alone: bool = False,
    wanted: tuple[bool, bool] = (False, False),
) -> tuple[Any, ...]:
    """`_forward_pass` of (q, k, v, sinks, ...), repeated where it is known."""
    run = functools.partial(_forward_pass, problem=problem, alone=alone, wanted=wanted)
    return repeated((*_known(problem), alone, wanted), problem, tensors, run)


@dispatch.on_device
def _backward_pass(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    low: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *small: torch.Tensor | None,
    problem: Problem,
    near: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`_run_backward`; ``near``: q, k and v may be pieces of one buffer."""
    return _run_backward(
        problem, readable(dout, problem.layout), q, k, v,
        dlse=dlse, out=out, lse=lse, low=low, extras=Extras(*small),
        together=near and _together(q, k, v),
    )  # fmt: skip


def _backward_unseen(
    problem: Problem, tensors: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """`_backward_pass` of (dO, dLSE, O, ...), repeated where it is known."""
    q, k, v = tensors[5:8]
    assert q is not None and k is not None and v is not None
    # Pieces of one buffer are; what is and is no such piece has its gradient there all the same.
    near = k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == problem.d * 2
    run = functools.partial(_backward_pass, problem=problem, near=near)
    return repeated((*_known(problem), near), problem, tensors, run)


def _together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return q.numel() > 0 and joined((q, k, v)) is not None


def _gradients(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """(dQ, dK, dV, dSinks) of a call that was saved in ``ctx``."""
    out, lse, low, q, k, v, *small = ctx.saved_tensors
    if not (out.is_contiguous() and lse.is_contiguous() and low.is_contiguous()):
        # They were made so: hooks of saved tensors have laid them, and q, k and v, out anew.
        out, lse, low, q, k, v = (x.contiguous() for x in (out, lse, low, q, k, v))
    if dlse is not None:
        # An LSE that nobody asked for is (0,), and so is its gradient: no rows to read.
        dlse = dlse.resolve_neg().contiguous() if dlse.dim() > 1 else None
    if dout is None and dlse is None:
        return None, None, None, None
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = (dout, dlse, out, lse, low, q, k, v, *small)
    (sq, sk), spec = ctx.lengths, ctx.spec
    # With gradients of gradients the operator has something to say (`_Once`).
    if not torch.is_grad_enabled() and _unseen(tensors):
        problem = Problem.decode(spec, q, k, v, sq=sq, sk=sk, sinks=small[0], cu_q=small[1])
        dq, dk, dv, dsinks = _backward_unseen(problem, tensors)
        together = dk is None
    else:
        options = options_of(spec) if isinstance(spec, str) else spec
        dout, together = readable(dout, options.layout), _together(q, k, v)
        spec = spec if isinstance(spec, str) else spec.encode()
        dq, dk, dv, dsinks = backward_op(dout, *tensors[1:], sq, sk, spec, together)
    if together:
        assert dq is not None
        dq, dk, dv = dq.split_with_sizes([x.shape[-1] for x in (q, k, v)], -1)
    return dq, dk, dv, None if small[0] is None else dsinks


class _Attention(torch.autograd.Function):
    """The autograd rule of the forward operator; differentiable once."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_q, cu_k, start_q, start_k, seed, sq, sk, spec, *wanted):
        tensors = (q, k, v, sinks, cu_q, cu_k, start_q, start_k, seed)
        if _unseen(tensors):
            problem = Problem.decode(spec, q, k, v, sq=sq, sk=sk, sinks=sinks, cu_q=cu_q)
            found = _forward_unseen(problem, tensors, wanted=wanted)
        else:
            spec = spec if isinstance(spec, str) else spec.encode()
            with torch._C._AutoDispatchBelowAutograd():
                found = forward_op(*tensors, sq, sk, spec, *wanted)
        out, lse, low, max_logits, row_lse = found
        ctx.save_for_backward(out, _read_back(found), low, *tensors)
        ctx.lengths, ctx.spec = (sq, sk), spec
        ctx.mark_non_differentiable(low, max_logits, row_lse)
        ctx.set_materialize_grads(False)
        return out, lse, low, max_logits, row_lse

    @staticmethod
    def backward(ctx, dout, dlse, _dlow, _dmax, _drows):
        # Without one for cu_q, cu_k, start_q, start_k, seed; sq, sk, spec, and what is wanted.
        return (*_gradients(ctx, dout, dlse), *(None,) * 10)


class _Alone(torch.autograd.Function):
    """The rule of a call that wants O alone and that nobody sees: one output, and few arguments."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, problem, tensors):
        out, lse, low = _forward_unseen(problem, tensors, alone=True)
        ctx.save_for_backward(out, lse, low, *tensors)
        ctx.lengths, ctx.spec = (problem.sq, problem.sk), problem
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dout):
        return (*_gradients(ctx, dout, None), None, None)


# `Function.apply` but for what it does for functorch, which would see the call.
_apply_alone = super(torch.autograd.Function, _Alone).apply


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


def _with_rule(
    operator: Callable[..., object], rule: type[torch.autograd.Function]
) -> Callable[..., Any]:
    """What the Autograd key runs: ``rule`` where one of the arguments wants a gradient."""

    def call(*arguments):
        if has_tangent(*arguments):
            raise RuntimeError(_refusal("Jacobian-vector products (torch.func.jvp, dual numbers)"))
        wanted = (isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)
        if torch.is_grad_enabled() and any(wanted):
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(_refusal("gradients inside transforms of torch.func"))
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
_LIBRARY.impl("backward", _with_rule(backward_op, _Once), "Autograd")


@functools.lru_cache(maxsize=KEPT)
def _own(problem: Problem) -> Problem:
    return replace(problem, backward="own")


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
        problem = _own(problem)
    tensors = (q, k, v, *extras[:6])
    wanted = with_max_logits, with_lse
    if not _unseen(tensors):
        return forward_op(*tensors, problem.sq, problem.sk, problem.encode(), *wanted)
    vendors.select(problem, q.device)  # refuses what the backward would have to
    sinks = extras.sinks
    needs = q.requires_grad or k.requires_grad or v.requires_grad
    if torch.is_grad_enabled() and (needs or (sinks is not None and sinks.requires_grad)):
        if with_max_logits or with_lse or with_low:
            return _Attention.apply(*tensors, problem.sq, problem.sk, problem, *wanted)
        return (_apply_alone(q, k, v, sinks, problem, tensors),)
    return _forward_unseen(problem, tensors, wanted=wanted)


__all__ = ["attention", "backward_op", "forward_op", "interpreting"]
