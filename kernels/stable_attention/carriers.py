"""Our delta for the backward passes of other people's attention: `cure` and `cured`.

A backward pass reads O for delta = rowsum(dO o O) alone, so a tensor that stands in for O decides
its delta: a carrier (`triton.carrier`). Which tensor is handed in is all that changes; forward,
backward and LSE stay theirs.

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):  # [b, h, s, d], bfloat16
            sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=True)
            return stable_attention.cured(sdpa, q, k, v, layout="bhsd", causal=True)

Shape legend: as in `api`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from stable_attention import ops
from stable_attention.api import attend
from stable_attention.chunks import chunk_delta
from stable_attention.describe import DTYPES, check_rank, describe
from stable_attention.dispatch import on_device
from stable_attention.eager import check_memory, eager
from stable_attention.layouts import LAYOUTS, MAX_HEAD_DIM, readable, row_shape
from stable_attention.once import refused_twice
from stable_attention.problem import Options, choose, require, show
from stable_attention.reference import reference_attention
from stable_attention.reference.carrier import carrier as reference_carrier
from stable_attention.triton.carrier import carrier as launch_carrier

# From rows as delta has them, [b, h, s] or [h, t], to those of a layout.
_ROWS = {"bshd": (0, 2, 1), "sbhd": (2, 0, 1), "bhsd": (0, 1, 2), "thd": (1, 0)}


class Carrier(NamedTuple):
    """A stand-in for O."""

    out: torch.Tensor
    """dO's shape and dtype, at most three non-zero numbers a row."""
    lacking: torch.Tensor
    """Bool, on the device, of the call: a row has no exact carrier, and the gradients are not what
    they should be. Rows whose dO has one or two non-zero numbers get delta to 16 bits, which is
    what O itself gives; FP16 out of range becomes infinite."""


@eager
def carrier(dout: torch.Tensor, delta: torch.Tensor, *, layout: str = "bshd") -> Carrier:
    """The carrier of a delta, for those who have one (or O in float32): rowsum(dO * carrier).

    Args:
        dout: gradient of O, bfloat16 or float16, in ``layout``.
        delta: float32 [b, h, sq], or [h, tq] for thd: rowsum(dO * O), less dLSE where the backward
            has no argument for that.

    Raises:
        AttentionArgumentError: a wrong dtype, shape or layout.
    """
    choose("layout", layout, LAYOUTS)
    check_rank("dout", dout, layout)
    allowed = "torch.bfloat16 or torch.float16"
    require(dout.dtype in DTYPES, "dout.dtype", dout.dtype, allowed, "float32 needs no carrier.")
    dv = dout.shape[-1]
    wide = dv % 8 == 0 and 0 < dv <= MAX_HEAD_DIM
    require(wide, "dout's head dim", dv, f"multiples of 8 up to {MAX_HEAD_DIM}", "Pad dO with 0.")
    rows = row_shape(layout, dout)
    ok = isinstance(delta, torch.Tensor) and delta.dtype == torch.float32 and delta.shape == rows
    ok = ok and delta.device == dout.device
    allowed = f"a float32 tensor of shape {rows} on {dout.device}"
    require(ok, "delta", show(delta), allowed, "One number a row.")
    if not _by_kernels(dout):
        out, lacking = reference_carrier(dout, delta.permute(_ROWS[layout]))
        return Carrier(out, lacking.any())
    dout = readable(dout, layout)
    out = torch.empty_like(dout)
    ends = on_device(launch_carrier)(
        dout, delta.resolve_neg().contiguous(), layout=layout, into=out
    )
    return Carrier(out, ends[0, 1] > 0)


@eager
def cure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    layout: str = "bshd",
    **mask: Any,
) -> Carrier:
    """What to hand a backward pass of one's own in place of O, to give it our delta.

    Costs one forward pass of ours: O in 16 bits, which is all that others keep, has lost what delta
    needs. Whoever runs `stable_attention` in the forward pass saves that (``backward=``). On a CPU
    it is plain PyTorch.

    Args:
        q, k, v, dout: in ``layout``, bfloat16 or float16.
        **mask: causal, window, scale, softcap, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k of `stable_attention`: what the attention is that is to be cured. Dropout
            is not served, since everyone draws it in their own way.

    Raises:
        AttentionArgumentError: as `stable_attention`.
        TypeError: other keywords.
    """
    options = _options(layout, mask)
    for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout)):
        check_rank(name, x, layout)
    shape = (*q.shape[:-1], v.shape[-1])
    ok = dout.shape == shape and dout.device == q.device
    require(ok, "dout", show(dout), f"a tensor of shape {shape} on {q.device}", "O has its shape.")
    with torch.no_grad():
        if _by_kernels(q):
            given = {x: mask[x] for x in _TENSORS if x in mask}
            out, low = attend(q, k, v, options, return_o_lo=True, **given)
            rows = dout.new_empty(row_shape(layout, out), dtype=torch.float32)
            delta, _ = chunk_delta(dout, out, rows, layout=layout, low=low)
        else:
            known = {x: y for x, y in mask.items() if not x.startswith("max_")}
            wide = (x.float() for x in (q, k, v))
            exact = reference_attention(*wide, layout=layout, **known)
            assert isinstance(exact, torch.Tensor)
            delta = (dout.float() * exact).sum(-1)
            delta = delta.permute(_back(_ROWS[layout]))
        return carrier(dout, delta, layout=layout)


_OPTIONS = ("causal", "window", "scale", "softcap")
_TENSORS = ("sinks", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _options(layout: str, mask: dict[str, Any]) -> Options:
    unknown = sorted(set(mask) - set(_OPTIONS) - set(_TENSORS))
    if unknown:
        raise TypeError(f"cure() and cured() take no {', '.join(unknown)}")
    return Options.of(layout=layout, **{x: mask[x] for x in _OPTIONS if x in mask})


def _back(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(len(order)))


def _by_kernels(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" or ops.interpreting()


@eager
def cured(
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bshd",
    **mask: Any,
) -> torch.Tensor:
    """``attention(q, k, v)``, whose backward pass gets our delta.

    For any attention whose autograd rule saves its output for its backward, as those of PyTorch,
    FlashAttention and Transformer Engine do: when the backward pass asks for what was saved, the
    output is replaced by the carrier of `cure`. The backward costs one forward pass of ours more.

    Args:
        attention: returns O with q's rows, [..., dv] or [..., h * dv]; any kernel, no dropout.
        q, k, v: in ``layout``.
        **mask: as in `cure`; it must say what ``attention`` computes.

    Returns:
        What ``attention`` returned.

    Raises:
        ValueError: it saves no tensor in the memory of its output, or that is not in 16 bits, or
            not O alone; a keyword is none that `cure` serves.
        TypeError: other keywords.
        RuntimeError: from the backward pass, where what it reads was changed in place since or a
            hook of ``out.grad_fn`` runs after ours, and from second derivatives.
        NotImplementedError: inside transforms and traces of torch (`eager`).
    """
    options = _options(layout, mask)  # refused here, not in the backward pass
    saved: set[int] = set()
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
        raise ValueError(f"q, k and v are {show((q, k, v))}; allowed: tensors")
    grads: list[torch.Tensor] = []
    place: list[torch.Tensor] = []
    read = [(x, x._version) for x in (q, k, v, *mask.values()) if _versioned(x)]

    def pack(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        saved.add(x.data_ptr())
        return x, x._version

    def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        x = packed[0]
        if not grads or x.data_ptr() != place[0].data_ptr() or x.dtype != place[0].dtype:
            _check_unchanged([packed])
            return x
        _check_unchanged(read)
        dout, out = grads.pop(), place[0]
        like = out.dtype  # as autocast did
        shaped = dout.resolve_neg().reshape(rows)
        with torch.autocast(out.device.type, enabled=False):  # the forward pass's, not this one's
            found = cure(q.to(like), k.to(like), v.to(like), shaped, layout=layout, **mask).out
        # As O lies in memory, whatever view of it was returned.
        stand_in = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        stand_in.as_strided(out.shape, out.stride()).copy_(found.reshape(out.shape))
        return stand_in

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = attention(q, k, v)
    if not isinstance(out, torch.Tensor):
        raise ValueError(
            f"{attention!r} returned {show(out)}; allowed: O alone. Wrap it: lambda q, k, v: "
            "attention(q, k, v)[0]"
        )
    if not (out.requires_grad and out.numel()):
        return out
    rows = (*q.shape[:-1], v.shape[-1])
    _check_served(out, (q, k, v), rows, options, mask)
    if out.data_ptr() not in saved:
        raise ValueError(
            f"{attention!r} saves no tensor in the memory of its output for its backward pass; "
            "allowed: attentions whose backward reads O. Use stable_attention itself, or give "
            "your backward the carrier of stable_attention.cure"
        )
    place.append(out.detach())
    index = out.output_nr

    def note(douts: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        hooks = ours.hooks_dict_ref()
        if hooks is None or next(reversed(hooks)) != ours.id:
            raise RuntimeError(
                "a hook of out.grad_fn (register_prehook) runs between cured() and its attention, "
                "and may change dO; allowed: none after cured(). Use out.register_hook"
            )
        check_memory("the backward pass of cured", *douts)
        grads[:] = [dout for dout in douts[index : index + 1] if dout is not None]
        if not (torch.is_grad_enabled() and grads):
            return None
        # A carrier has O's sums with this dO, and none of O's derivatives.
        return (*douts[:index], *refused_twice(tuple(grads), *grads, q, k, v), *douts[index + 1 :])

    # Before the backward of `attention` runs, and unpacks; after hooks of O that change dO.
    assert out.grad_fn is not None
    ours = out.grad_fn.register_prehook(note)
    return out


def _check_served(
    out: torch.Tensor,
    qkv: tuple[torch.Tensor, ...],
    rows: tuple[int, ...],
    options: Options,
    mask: dict[str, Any],
) -> None:
    """`AttentionArgumentError` for what `cure` would refuse in the backward pass."""
    allowed = "torch.bfloat16 or torch.float16"
    require(out.dtype in DTYPES, "O's dtype", out.dtype, allowed, "float32 needs no carrier.")
    require(out.numel() == math.prod(rows), "O", show(out), f"{rows}, or flat heads", "Return O.")
    if _by_kernels(out):
        q, k, v = (x.detach().to(out.dtype) for x in qkv)
        describe(q, k, v, options, **{x: mask[x] for x in _TENSORS if x in mask})


def _versioned(x: object) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_inference()


def _check_unchanged(tensors: list[tuple[torch.Tensor, int]]) -> None:
    """Raise as autograd does, which looks at no tensor that hooks have packed."""
    for x, version in tensors:
        if x._version != version:
            raise RuntimeError(
                f"{show(x)}, which the backward pass of cured() reads, has been modified by an "
                f"inplace operation: version {x._version}; allowed: {version}, that of the "
                "forward pass. Change a clone of it."
            )
