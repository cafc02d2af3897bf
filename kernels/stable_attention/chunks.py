"""Attention over chunks of a long sequence: the primitives of context parallelism.

Shape legend: as in `api`; q, k, v are chunks whose row 0 has a *global position*. A query sees a
key iff key position <= query position (``causal``) and within ``window``, however they were cut.
Zigzag order is two chunks a rank, so two calls (or four: query half x key half).

    out, lse = chunk_forward(q, k0, v0, q_position=..., k_position=...)
    part, part_lse = chunk_forward(q, k1, v1, ...)        # next hop of the ring
    merge_chunks(out, lse, part, part_lse)                # float32, in place
    out16, low = finish_chunks(out, lse, sinks=..., dtype=q.dtype)
    delta, dsinks = chunk_delta(dout, out16, lse, low=low, sinks=...)
    chunk_backward(dout, q, k0, v0, lse, delta, dq=dq, dk=dk0, dv=dv0, q_position=..., ...)

A projecting stabilizer keeps the row sums of dS beside dq: ``rows = projected_rows(q, lse, ...)``,
``chunk_backward(..., rows=rows)``, and at last ``project_chunks(dq, rows, lse, delta, ...)``.

Everything between the chunks is float32: partial O, LSE, and the accumulators dq, dk, dv. LSE is
that of *all* keys (and the sinks) once the last part is merged, and the backward of every chunk
uses that one. dq, dk, dv, out, lse and delta may be views (halves of a longer buffer). Autograd is
told what changes in place, and no more: gradients come from `chunk_backward` alone. What is written
shares no memory: neither its elements, nor dq, dk and dv. All refuse torch's transforms (`eager`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from stable_attention import dispatch
from stable_attention.api import check_device
from stable_attention.describe import DTYPES, OF_TENSORS, check_rank, check_token_stride, describe
from stable_attention.eager import eager
from stable_attention.extras import Position
from stable_attention.layouts import LAYOUTS, dims, overlaps, readable, row_shape
from stable_attention.problem import (
    AttentionArgumentError,
    Extras,
    Options,
    Problem,
    choose,
    constant,
    require,
    show,
)
from stable_attention.stabilizers import KNOWN, LOW_DTYPES, O_LO_FORMATS
from stable_attention.triton import merge


@dataclass(frozen=True, slots=True)
class ProjectedRows:
    """What rows of a projecting stabilizer keep from chunk to chunk; cut it as dq and LSE are cut.

    ``excess`` and ``top`` float32 like LSE: the sum of dS so far, and the largest P. ``key`` in q's
    dtype, like dq: the key of that P.
    """

    excess: torch.Tensor
    top: torch.Tensor
    key: torch.Tensor

    def cut(self, tokens: slice, heads: slice) -> ProjectedRows:
        """Those of some tokens (the first dimension of thd and sbhd) and query heads."""
        excess, top = (x[..., heads, tokens] for x in (self.excess, self.top))
        return ProjectedRows(excess, top, self.key[tokens][..., heads, :])


def _describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: tuple[Position, Position],
    named: dict,
) -> tuple[Problem, Extras]:
    """Problem and extras of a pair of chunks; ``named`` are the keywords of `chunk_forward`."""
    sinks, remedy = named.pop("sinks", None), "They join once, in finish_chunks."
    require(sinks is None, "sinks", "given", "None", remedy)
    given = {name: named.pop(name) for name in OF_TENSORS if name in named}
    options = Options.of(allow_broken=True, **named)
    allowed = "'auto' or 'own', which are the same here"
    whole = "Other libraries' backward passes take whole sequences."
    require(options.backward in ("auto", "own"), "backward", repr(options.backward), allowed, whole)
    if options.dropout_p > 0 and given.get("dropout_seed") is None:
        raise AttentionArgumentError(
            "dropout_seed", None, "an int or an int64 tensor", "All chunks must share one seed."
        )
    found = describe(q, k, v, options, positions=positions, **given)
    check_device(q)
    return found


@eager
@dispatch.on_device
def chunk_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bshd",
    q_position: Position = 0,
    k_position: Position = 0,
    return_max_logits: bool = False,
    **options,
) -> tuple[torch.Tensor, ...]:
    """Attention of a query chunk over one key/value chunk.

    Args:
        q, k, v: chunks in ``layout``; any strides with a contiguous last dimension.
        q_position, k_position: global position of row 0 of q and k: an int, or int32 [b] for thd.
            With a window, tensors of positions differ by at most 2**29.
        return_max_logits: also return the largest logits [h] of this pair of chunks.
        **options: causal, window, scale, softcap, dropout_p, dropout_seed (required with dropout),
            cu_seqlens_q/k, cu_seqlens_q/k_padded, max_seqlen_q/k, batch_offset, head_offset,
            stabilizer, beta, eps: as in `stable_attention`. No sinks: they join in
            `finish_chunks`.

    Returns:
        (out float32 in ``layout``, normalised over this chunk's keys; lse float32 [b, h, sq], or
        [h, tq] for thd; -inf and 0 for rows that see none of these keys[, max_logits]).

    Raises:
        AttentionArgumentError: as `stable_attention`, and for sinks. The other functions here raise
            it for tensors whose shapes, dtypes or devices do not belong together.
    """
    problem, extras = _describe(q, k, v, (q_position, k_position), options | {"layout": layout})
    kernels = dispatch.select(problem, q.device)
    result = kernels.forward(
        problem,
        q,
        k,
        v,
        extras=extras,
        out_dtype=torch.float32,
        with_max_logits=return_max_logits,
    )
    if return_max_logits:
        return result.out, result.lse, result.max_logits
    return result.out, result.lse


@eager
@dispatch.on_device
def merge_chunks(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    *,
    layout: str = "bshd",
) -> None:
    """Fold a partial result into (out, lse), float32, in place; any order, up to rounding."""
    _check_partial(out, lse, layout)
    _check_partial(part, part_lse, layout, name="part")
    _check_like("part", part, tuple(out.shape), out)
    _check_written(out=out, lse=lse)
    merge.merge(out, lse, part, part_lse, layout=layout)
    increment_version((out, lse))


def _check_like(name: str, x: object, size: tuple[int, ...], like: torch.Tensor) -> None:
    """`AttentionArgumentError` unless x is a tensor of a size on a device: kernels trust both."""
    if not isinstance(x, torch.Tensor) or x.shape != size or x.device != like.device:
        allowed = f"a tensor of shape {tuple(size)} on {like.device}"
        raise AttentionArgumentError(name, show(x), allowed, "Pass what belongs to the same chunk.")
    # What autograd hands over may be such a view, and is read as its values.
    if name not in ("dout", "dlse", "sinks") and x.is_neg():
        remedy = f"Pass {name}.resolve_neg()."
        raise AttentionArgumentError(name, "a negative view", "values as memory has them", remedy)


def _check_written(**tensors: torch.Tensor) -> None:
    """`AttentionArgumentError` unless every element has memory of its own: kernels add to it."""
    for name, x in tensors.items():
        if overlaps(x):
            value = f"of shape {tuple(x.shape)} with strides {x.stride()}"
            own = "memory of its own for each element"
            raise AttentionArgumentError(name, value, own, "It is written: pass a clone().")


def _check_rows(name: str, x: torch.Tensor, layout: str, like: torch.Tensor) -> None:
    """The same for LSE and delta: float32, a number for each head and row of ``like``."""
    _check_like(name, x, row_shape(layout, like), like)
    require(x.dtype == torch.float32, name, x.dtype, "torch.float32", "Do not round it.")


def _check_sinks(sinks: torch.Tensor | None, layout: str, like: torch.Tensor) -> None:
    if sinks is not None:
        _check_like("sinks", sinks, (dims(like, layout)[2],), like)
        ok = sinks.is_floating_point()
        require(ok, "sinks.dtype", sinks.dtype, "a floating dtype", "A logit per query head.")


def _check_partial(out: torch.Tensor, lse: torch.Tensor, layout: str, *, name: str = "out") -> None:
    """`AttentionArgumentError` unless the kernels can read (and write) a partial result."""
    choose("layout", layout, LAYOUTS)
    check_rank(name, out, layout)
    rows = "lse" if name == "out" else f"{name}_lse"
    _check_like(rows, lse, row_shape(layout, out), out)
    for label, x in ((name, out), (rows, lse)):
        if x.dtype != torch.float32 or (x.stride(-1) != 1 and x.shape[-1] > 1):
            raise AttentionArgumentError(
                label,
                f"{x.dtype} with stride {x.stride(-1)}",
                "torch.float32 with a contiguous last dimension",
                "Partials stay float32: 16 bits would lose what the chunks exist to keep.",
            )
    check_token_stride(name, out, layout)


@eager
@dispatch.on_device
def finish_chunks(
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dtype: torch.dtype,
    layout: str = "bshd",
    sinks: torch.Tensor | None = None,
    stabilizer: str = "compensated",
    o_lo: str = "bf16",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O in ``dtype``, its low-order part) of a merged float32 output.

    ``sinks`` [h] (natural-log logits) take their share here, once, and are added to ``lse`` in
    place. The low-order part is empty for stabilizers that keep none.
    """
    choose("o_lo", o_lo, O_LO_FORMATS)
    choose("stabilizer", stabilizer, KNOWN)
    allowed = (*DTYPES, torch.float32)
    require(dtype in allowed, "dtype", dtype, ", ".join(map(str, allowed)), "Pass q's dtype.")
    _check_partial(out, lse, layout)
    _check_sinks(sinks, layout, out)
    low_dtype = LOW_DTYPES[o_lo] if KNOWN[stabilizer].keeps_o_lo else None
    if sinks is not None:
        _check_written(lse=lse)
        sinks = sinks.resolve_neg().contiguous()
    found = merge.finish(out, lse, sinks, layout=layout, dtype=dtype, low_dtype=low_dtype)
    if sinks is not None:
        increment_version(lse)
    return found


@eager
@dispatch.on_device
def chunk_delta(
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    layout: str = "bshd",
    low: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(D' = rowsum(dO * O) - dLSE like ``lse``, dSinks float32 [h] or None), once per query chunk.

    ``out`` and ``low`` are what `finish_chunks` returned; ``lse`` includes every key and the sinks.
    """
    choose("layout", layout, LAYOUTS)
    check_rank("out", out, layout)
    _check_like("dout", dout, tuple(out.shape), out)
    for name, x in (("out", out), ("dout", dout)):
        kinds = (*DTYPES, torch.float32)
        require(x.dtype in kinds, f"{name}.dtype", x.dtype, ", ".join(map(str, kinds)), "Cast it.")
    _check_rows("lse", lse, layout, out)
    if low is not None and low.numel():
        _check_like("low", low, tuple(out.shape), out)
        stored = ", ".join(map(str, LOW_DTYPES.values()))
        ok = low.dtype in LOW_DTYPES.values()
        require(ok, "low.dtype", low.dtype, stored, "Pass what finish_chunks returned.")
    if dlse is not None:
        _check_rows("dlse", dlse, layout, out)
    _check_sinks(sinks, layout, out)
    dout, out = readable(dout, layout), readable(out, layout)
    if low is not None and low.numel() and low.stride() != out.stride():
        out, low = out.contiguous(), low.contiguous()  # the kernel reads both with O's strides
    batch, s, heads, dv = dims(out, layout)
    # Packed tokens that belong to no sequence have LSE -inf and O 0, so rows need no offsets here.
    dense, lse3 = layout, lse
    if layout == "thd":
        dense, lse3 = "bshd", lse[None]
        dout, out = dout[None], out[None]
        low = low[None] if low is not None and low.numel() else None
        dlse = None if dlse is None else dlse[None]
    problem = Problem(
        layout=dense,
        dtype=out.dtype,
        batch=batch,
        sq=s,
        sk=s,
        heads=heads,
        kv_heads=heads,
        d=dv,
        dv=dv,
        tq=s,
        tk=s,
        scale=1.0,
        has_sinks=sinks is not None,
        chunked=True,
    )
    kernels = dispatch.select(problem, out.device)
    delta, dsinks = kernels.preprocess(
        problem,
        dout,
        out,
        low=low,
        lse=lse3.contiguous(),
        dlse=None if dlse is None else dlse.resolve_neg().contiguous(),
        extras=Extras(sinks=None if sinks is None else sinks.resolve_neg().contiguous()),
    )
    return (delta[0] if layout == "thd" else delta), dsinks


@eager
@dispatch.on_device
def chunk_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    rows: ProjectedRows | None = None,
    layout: str = "bshd",
    q_position: Position = 0,
    k_position: Position = 0,
    **options,
) -> None:
    """Add one pair of chunks' gradients to the float32 accumulators dq, dk, dv.

    Args:
        lse, delta: of the query chunk over *all* keys; views with a contiguous last dimension.
        dq, dk, dv: float32, laid out like q, k, v; views allowed.
        rows: what `projected_rows` made, with a projecting stabilizer: `project_chunks` ends it.
        **options: the same as in the `chunk_forward` of this pair.
    """
    problem, extras = _describe(q, k, v, (q_position, k_position), options | {"layout": layout})
    _check_like("dout", dout, (*q.shape[:-1], v.shape[-1]), q)
    require(dout.dtype == q.dtype, "dout.dtype", dout.dtype, f"q's {q.dtype}", "Cast it.")
    _check_rows("lse", lse, layout, q)
    _check_rows("delta", delta, layout, q)
    for name, x, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        _check_like(name, x, tuple(like.shape), q)
        if x.dtype != torch.float32 or x.stride(-1) != 1:
            raise AttentionArgumentError(
                name,
                f"{x.dtype} with stride {x.stride(-1)}",
                "torch.float32 with a contiguous last dimension",
                "16-bit gradient accumulators lose what later chunks add.",
            )
        check_token_stride(name, x, layout)
    _check_written(dq=dq, dk=dk, dv=dv)
    places = [x.data_ptr() for x in (dq, dk, dv) if x.numel()]
    apart = len({*places}) == len(places)
    require(apart, "dq, dk, dv", "one tensor twice", "three tensors", "Make one for each.")
    if lse.stride() != delta.stride() or lse.stride(-1) != 1:
        lse, delta = lse.contiguous(), delta.contiguous()
    kept = _kept(problem, rows, lse, dq)
    kernels = dispatch.select(problem, q.device)
    kernels.backward(
        problem,
        readable(dout, layout),
        q,
        k,
        v,
        lse=lse,
        delta=delta,
        extras=extras,
        accumulators=(dq, dk, dv),
        **({} if kept is None else {"kept": kept}),
    )
    increment_version((dq, dk, dv, *(kept or ())))


def _kept(
    problem: Problem, rows: ProjectedRows | None, lse: torch.Tensor, dq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The tensors of ``rows`` for the kernel, which reads them with the strides of LSE and dQ."""
    projects = bool(KNOWN[problem.stabilizer].projection)
    if rows is None or not projects:
        allowed = f"{'projected_rows(...)' if projects else 'None'} with {problem.stabilizer!r}"
        remedy = "Rows keep their sums from chunk to chunk under a projecting stabilizer alone."
        require((rows is not None) is projects, "rows", show(rows), allowed, remedy)
        return None
    made = "what projected_rows made"
    require(isinstance(rows, ProjectedRows), "rows", lambda: show(rows), made, "Cut its parts.")
    pairs = (("excess", rows.excess, lse), ("top", rows.top, lse), ("key", rows.key, dq))
    for name, x, like in pairs:
        _check_like(f"rows.{name}", x, tuple(like.shape), like)
        kind = problem.dtype if name == "key" else torch.float32
        require(x.dtype == kind, f"rows.{name}.dtype", x.dtype, str(kind), "Do not round it.")
        steps, wanted = (
            tuple(step for step, n in zip(y.stride(), y.shape, strict=True) if n > 1)
            for y in (x, like)
        )
        same = "Cut the rows as LSE and dq are cut."
        require(steps == wanted, f"strides of rows.{name}", steps, f"{wanted}", same)
        _check_written(**{f"rows.{name}": x})
    return rows.excess, rows.top, rows.key


def projected_rows(q: torch.Tensor, lse: torch.Tensor, *, stabilizer: str) -> ProjectedRows | None:
    """What `chunk_backward` needs between chunks, for a query chunk; None if nothing is projected.

    q and dq must be contiguous, and LSE that of all keys, as `finish_chunks` leaves it.
    """
    choose("stabilizer", stabilizer, KNOWN)
    if not KNOWN[stabilizer].projection:
        return None
    key = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    return ProjectedRows(torch.zeros_like(lse), torch.zeros_like(lse), key)


@eager
def project_chunks(
    dq: torch.Tensor,
    rows: ProjectedRows,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    scale: float | None = None,
    layout: str = "bshd",
    sinks: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> None:
    """Take what rows of dS sum to too much out of dq, in place, once all chunks are in.

    A row sums to dLSE + P_sink D' over the keys; arguments as in `chunk_delta` and its D'.
    """
    choose("layout", layout, LAYOUTS)
    check_rank("dq", dq, layout)
    require(dq.dtype == torch.float32, "dq.dtype", dq.dtype, "torch.float32", "Round it after.")
    _check_written(dq=dq)
    found = Options.of(scale=scale).scale
    made = "what projected_rows made of a projecting stabilizer"
    require(
        isinstance(rows, ProjectedRows), "rows", lambda: show(rows), made, "Without, skip this."
    )
    given = {"rows.excess": rows.excess, "lse": lse, "delta": delta, "dlse": dlse}
    for name, x in given.items():
        if x is not None:
            _check_rows(name, x, layout, dq)
    _check_like("rows.key", rows.key, tuple(dq.shape), dq)
    _check_sinks(sinks, layout, dq)
    excess = rows.excess
    if sinks is not None:
        share = torch.exp(sinks.float()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
        excess = excess - share * delta
    if dlse is not None:
        excess = excess - dlse.masked_fill(lse == -torch.inf, 0.0)
    order = {"bshd": (0, 2, 1), "sbhd": (2, 0, 1), "bhsd": (0, 1, 2), "thd": (1, 0)}[layout]
    found = constant(dq.shape[-1] ** -0.5) if found is None else found
    dq.addcmul_(excess.permute(order)[..., None], rows.key, value=-found)
