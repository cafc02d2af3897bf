"""The error rule: our error against float64 is judged by what PyTorch makes in the same dtype.

For O, dQ, dK, dV:    max|ours - f64| <= 2 max|pytorch - f64| + floor
                      RMS(ours - f64) <= 1.25 RMS(pytorch - f64) + floor_rms
PyTorch in the same dtype is ``oracle_attention(compute=dtype)``: 16-bit matrix products with
float32 accumulation, 16-bit scores and probabilities, autograd. The floors cover the cases where
that happens to be exact (one key: P = 1) and no more:

    half an ulp of the output dtype at max|f64|, for storing the result;
    2^-19 of the largest sum of absolute terms behind a gradient element (float32 cancellation);
    half an ulp of the absolute terms |dS| |K| themselves (dS is rounded to 16 bits), times
    min(1, sqrt(256 / n)): a maximum or mean over few errors is partly luck. n counts the rows (for
    the maximum: the elements of a row share their dS) or elements (RMS) that have any terms, not
    those of fully masked rows. RMS: half of it, and for the specification half an ulp of the RMS
    of the result.

Where PyTorch's error is below 1/64 of half an ulp of those terms, its roundings cancelled by
symmetry (one visible key, or equal ones: sum_j dS_ij K_j = 0 without any error). That is no
yardstick for a sum in another order, so the factor min(...) is 1 there.

"none" is plain FlashAttention-2: where its own numerics (delta from a 16-bit O) are worse than
PyTorch's, it is held to them.

LSE, max logits and dSink are float32 outputs and are judged by float32: 2^-19 of their own terms.
PyTorch's 16-bit scores and probabilities make a lax yardstick, so "compensated" and "none" are also
held against the emulation of what they are specified to do (``reference.emulators``):

                      RMS(ours - f64) <= 1.15 RMS(specified - f64) + floor_rms

which a kernel that rounds once more than it says does not pass.
Nothing is compared with an absolute tolerance: all-zero gradients would pass one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_cases import DEVICE, Case, Inputs, forward_path, make_inputs
from memory_poison import PoisonedMemory

MAX_RATIO = 2.0
RMS_RATIO = 1.25
SPECIFIED_RATIO = 1.15
FLOAT32_NOISE = 2.0**-19
CANCELLED = 2.0**-6
HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@dataclass
class Results:
    """What one implementation returned for a case."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None = None
    terms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums of absolute terms (|dS| |K| and |dS|^T |Q|) behind dq and dk."""

    def named(self) -> dict[str, torch.Tensor]:
        every = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: x for name, x in every.items() if isinstance(x, torch.Tensor)}


@dataclass
class Report:
    case: Case
    problems: list[str] = field(default_factory=list)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Per tensor: our error over PyTorch's, (max, RMS)."""

    def table(self) -> str:
        lines = [f"{name:18s} max {a:8.3f}x  rms {b:8.3f}x" for name, (a, b) in self.ratios.items()]
        return "\n".join([*lines, *self.problems, "FAILED" if self.problems else "ok"])

    def raise_if_bad(self) -> None:
        if self.problems:
            raise AssertionError("\n".join([*self.problems, self.case.repro()]))


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x


def run_oracle(case: Case, given: Inputs, compute: torch.dtype) -> Results:
    """Forward and backward of the oracle with every operation in ``compute``."""
    from oracle import gradients, oracle_attention

    q, k, v = (_leaf(x.to(compute)) for x in (given.q, given.k, given.v))
    learned = isinstance(given.sinks, torch.Tensor)
    sinks = _leaf(given.sinks.to(compute)) if learned else given.sinks
    named = given.arguments(case) | {"sinks": sinks}
    result = oracle_attention(q, k, v, compute=compute, **named)
    outputs: tuple[torch.Tensor, ...] = (result.out,)
    cotangents: tuple[torch.Tensor, ...] = (given.dout.to(compute),)
    if given.dlse is not None:
        outputs += (result.lse,)
        cotangents += (given.dlse.to(compute),)
    grads = gradients(outputs, (q, k, v, sinks) if learned else (q, k, v), cotangents)
    return Results(result.out.detach(), result.lse.detach(), result.max_logits.detach(), *grads)


def run_specified(case: Case, given: Inputs) -> Results | None:
    """What the stabilizer is specified to compute; None for those without an error gate."""
    from stable_attention.reference import emulators
    from stable_attention.reference.geometry import from_bhsd, sequences, to_bhsd

    base = {
        "compensated": emulators.COMPENSATED,
        "none": emulators.FLASH2,
        "projected": emulators.PROJECTED,
        "compensated_projected": emulators.COMPENSATED_PROJECTED,
    }.get(case.stabilizer)
    if base is None:
        return None
    o_lo = case.o_lo if base.o_lo else None
    rounding = dataclasses.replace(base, dtype=given.q.dtype, o_lo=o_lo)
    q, k, v, dout = (to_bhsd(x, case.layout) for x in (given.q, given.k, given.v, given.dout))
    group = case.hq // case.hk
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    out = torch.zeros_like(dout)
    dq, dk, dv, q_terms, k_terms = (torch.zeros(x.shape, device=x.device) for x in (q, k, v, q, k))
    starts = (given.starts_q, given.starts_k) if case.gaps else (None, None)
    lengths = (q.shape[2], k.shape[2], given.cu_q, given.cu_k, *starts)
    for batch, rows, keys in sequences(*lengths):
        if rows.stop == rows.start or keys.stop == keys.start:
            continue
        part = (q[:, :, rows], wide_k[:, :, keys], wide_v[:, :, keys], dout[:, :, rows])
        e = _emulate(case, given, part, rounding, batch=batch, rows=rows)
        out[:, :, rows], dq[:, :, rows] = e.out, e.dq
        # Key heads collect their group in float32 before the one rounding.
        dk[:, :, keys] = e.dk.unflatten(1, (case.hk, group)).sum(2)
        dv[:, :, keys] = e.dv.unflatten(1, (case.hk, group)).sum(2)
        size = e.ds.abs() * (case.scale or case.d**-0.5)
        q_terms[:, :, rows] = size @ part[1].abs().float()
        columns = size.mT @ part[0].abs().float()
        k_terms[:, :, keys] = columns.unflatten(1, (case.hk, group)).sum(2)
    kind = given.q.dtype
    back = [from_bhsd(x.to(kind), case.layout) for x in (out, dq, dk, dv)]
    terms = {"dq": from_bhsd(q_terms, case.layout), "dk": from_bhsd(k_terms, case.layout)}
    return Results(back[0], torch.empty(0), torch.empty(0), *back[1:], terms=terms)


def _emulate(
    case: Case,
    given: Inputs,
    part: tuple[torch.Tensor, ...],
    rounding: Any,
    *,
    batch: int,
    rows: slice,
) -> Any:
    """One dense [b, h, s, d] problem through the emulator."""
    from stable_attention.reference.dropout import keep_mask
    from stable_attention.reference.emulators import emulate
    from stable_attention.reference.geometry import allowed, bounds

    q, k = part[:2]
    sq, sk, device = q.shape[2], k.shape[2], q.device
    i, j = torch.arange(sq, device=device), torch.arange(sk, device=device)
    named = given.arguments(case)
    mask = allowed(i, j, shift=sk - sq, reach=bounds(named["causal"], named["window"]))
    keep = None
    if case.dropout:
        keep = keep_mask(
            named["dropout_seed"],
            case.dropout,
            batches=torch.arange(q.shape[0], device=device) + batch,
            heads=torch.arange(case.hq, device=device),
            rows=i,
            columns=j,
        )
    sink = given.sinks
    if isinstance(sink, str):
        sink = torch.zeros(case.hq, device=device)
    dlse = given.dlse
    if dlse is not None:
        dlse = dlse[:, rows].unsqueeze(0) if case.layout == "thd" else dlse
    return emulate(
        *part,
        rounding=rounding,
        scale=case.scale or None,
        mask=mask,
        sink=sink,
        softcap=case.softcap,
        keep=keep,
        dropout_p=case.dropout,
        dlse=dlse,
        wide_gradients=True,
    )


def run_ours(case: Case, given: Inputs, *, poison: bool = True, return_lse: bool = True) -> Results:
    """Forward and backward of ``stable_attention``; outputs NaN-filled, inside guard bands.

    Without ``return_lse``, as in training, ``lse`` is empty.
    """
    from stable_attention import stable_attention

    q, k, v = (_leaf(x) for x in (given.q, given.k, given.v))
    sinks = _leaf(given.sinks)
    memory = PoisonedMemory()
    if poison:
        memory.__enter__()
    try:
        named = given.arguments(case) | {"sinks": sinks}
        if case.layout == "thd":
            named["max_seqlen_q"], named["max_seqlen_k"] = (max(n) for n in case.lengths)
        with forward_path(case.path):
            out, *lse, top = stable_attention(
                q,
                k,
                v,
                stabilizer=case.stabilizer,
                o_lo=case.o_lo,
                deterministic=bool(case.deterministic),
                allow_broken=case.stabilizer == "paper_bf16",
                return_lse=return_lse,
                return_max_logits=True,
                **named,
            )
            outputs, cotangents = [out], [given.dout]
            if given.dlse is not None and return_lse:
                outputs += lse
                cotangents.append(given.dlse)
            leaves = [q, k, v] + ([sinks] if isinstance(sinks, torch.Tensor) else [])
            grads = torch.autograd.grad(outputs, leaves, cotangents)
    finally:
        if poison:
            memory.__exit__(None, None, None)
    memory.check()
    shown = lse[0].detach() if lse else out.new_empty(0)
    return Results(out.detach(), shown, top.detach(), *grads)


def changed_without_lse(case: Case, given: Inputs, asked: Results) -> list[str]:
    """Tensors with other bits where LSE is not asked for, as in training; LSE itself aside."""
    if given.dlse is not None:
        return []
    plain = run_ours(case, given, return_lse=False).named()
    same = {name: torch.equal(x, plain[name]) for name, x in asked.named().items() if name != "lse"}
    return [name for name, equal in same.items() if not equal]


def _terms(case: Case, given: Inputs) -> dict[str, float]:
    """Sizes that float32 rounding is measured by: largest sums of absolute terms."""
    scale = case.scale or case.d**-0.5
    q, k, v, dout = (x.detach().double().abs() for x in (given.q, given.k, given.v, given.dout))
    if 0 in (q.numel(), k.numel()):
        return dict.fromkeys(("score", "dscore", "dq", "dk"), 0.0)
    norm = lambda x: float(x.pow(2).sum(-1).max().sqrt())  # noqa: E731
    score = scale * norm(q) * norm(k) + case.softcap
    # |dP| and |delta| are both at most |dO| |V|; dropout scales them up.
    dscore = 2 * norm(dout) * norm(v) / (1 - case.dropout)
    if given.dlse is not None:
        dscore += float(given.dlse.abs().max())
    # sum_j P_ij = 1 bounds dQ; a column sum of P is at most the number of rows that see it.
    rows = q.numel() // q.shape[-1] // max(1, case.hk)
    return {
        "score": score,
        "dscore": dscore,
        "dq": scale * dscore * float(k.max()),
        "dk": scale * dscore * float(q.max()) * math.sqrt(rows),
    }


def _rms(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt()) if x.numel() else 0.0


def _top(x: torch.Tensor) -> float:
    return float(x.double().abs().max()) if x.numel() else 0.0


@dataclass
class Yardsticks:
    """What one 16-bit tensor is held against."""

    truth: torch.Tensor
    pytorch: torch.Tensor
    specified: torch.Tensor | None = None
    terms: torch.Tensor | None = None
    noise: float = 0.0
    """Absolute float32 floor."""
    specified_instead: bool = False
    """Hold to the specification where that is itself worse than PyTorch ("none")."""


def _few(
    theirs: torch.Tensor, truth: torch.Tensor, terms: torch.Tensor, ulp: float
) -> tuple[float, float]:
    """The factors min(1, sqrt(256 / n)) of the floors, for RMS and for the maximum."""
    if _top(theirs) <= CANCELLED * ulp * _top(terms):
        return 1.0, 1.0
    elements = int(((terms != 0) | (truth != 0)).sum())
    rows = elements / max(1, truth.shape[-1])
    few, few_rows = (min(1.0, math.sqrt(256 / max(1.0, n))) for n in (elements, rows))
    return few, few_rows


def judge(report: Report, name: str, ours: torch.Tensor, by: Yardsticks) -> None:
    """Apply the rules to one 16-bit tensor."""
    truth = by.truth
    if ours.shape != truth.shape:
        report.problems.append(f"{name}: shape {tuple(ours.shape)}, not {tuple(truth.shape)}")
        return
    if not bool(torch.isfinite(ours).all()):
        bad = int((~torch.isfinite(ours)).sum())
        report.problems.append(f"{name}: {bad} of {ours.numel()} elements are not finite")
        return
    truth = truth.double()
    mine, theirs = ours.double() - truth, by.pytorch.double() - truth
    ulp = HALF_ULP[ours.dtype]
    terms = truth if by.terms is None else by.terms
    few, few_rows = _few(theirs, truth, terms, ulp)
    floor = by.noise + few_rows * ulp * _top(terms) + ulp * _top(truth)
    floor_rms = few * (by.noise + 0.5 * ulp * _rms(terms))
    top, rms, best_top, best = _top(mine), _rms(mine), 0.0, math.inf
    if by.specified is not None:
        gap = by.specified.double() - truth
        best_top, best = _top(gap), _rms(gap)
        report.ratios[name + " vs specified"] = (top / (best_top or 1e-300), rms / (best or 1e-300))
    top_limit = MAX_RATIO * _top(theirs) + floor
    rms_limit = RMS_RATIO * _rms(theirs) + floor_rms
    if by.specified_instead:
        top_limit = max(top_limit, MAX_RATIO * best_top)
        rms_limit = max(rms_limit, SPECIFIED_RATIO * best)
    report.ratios[name] = (top / max(_top(theirs), 1e-300), rms / max(_rms(theirs), 1e-300))
    if top > top_limit:
        report.problems.append(
            f"{name}: max error {top:.3e} > {top_limit:.3e} (PyTorch {_top(theirs):.3e})"
        )
    if rms > rms_limit:
        report.problems.append(
            f"{name}: RMS error {rms:.3e} > {rms_limit:.3e} (PyTorch {_rms(theirs):.3e})"
        )
    if rms > SPECIFIED_RATIO * best + few * (by.noise + 0.5 * ulp * _rms(truth)):
        report.problems.append(
            f"{name}: RMS error {rms:.3e}, {rms / max(best, 1e-300):.3f}x what is specified"
        )


def judge_float32(
    report: Report, name: str, ours: torch.Tensor, truth: torch.Tensor, *, noise: float
) -> None:
    """A float32 output: same infinities as the truth, finite values within ``noise``."""
    if ours.shape != truth.shape:
        report.problems.append(f"{name}: shape {tuple(ours.shape)}, not {tuple(truth.shape)}")
        return
    finite = torch.isfinite(truth)
    if not torch.equal(ours[~finite].double(), truth[~finite].double()):
        report.problems.append(f"{name}: rows without keys are not {truth[~finite].flatten()[0]}")
    if not bool(torch.isfinite(ours[finite]).all()):
        report.problems.append(f"{name}: not finite where it should be")
        return
    error = _top(ours[finite].double() - truth[finite].double())
    report.ratios[name] = (error / max(noise, 1e-300),) * 2
    if error > noise:
        report.problems.append(f"{name}: error {error:.3e} > {noise:.3e}")


def compare(case: Case, given: Inputs, ours: Results) -> Report:
    """Judge every output of ``ours``."""
    truth = run_oracle(case, given, torch.float64)
    yardstick = run_oracle(case, given, given.q.dtype)
    specified = run_specified(case, given)
    report = Report(case)
    terms = _terms(case, given)
    noise = {
        "out": 0.0,
        "dv": 0.0,
        "dq": FLOAT32_NOISE * terms["dq"],
        "dk": FLOAT32_NOISE * terms["dk"],
    }
    for name, floor in noise.items():
        by = Yardsticks(
            truth=getattr(truth, name),
            pytorch=getattr(yardstick, name),
            specified=None if specified is None else getattr(specified, name),
            terms=None if specified is None else specified.terms.get(name),
            noise=floor,
            specified_instead=case.stabilizer == "none",
        )
        judge(report, name, getattr(ours, name), by)
    float_noise = FLOAT32_NOISE * (1 + terms["score"])
    judge_float32(report, "lse", ours.lse, truth.lse, noise=float_noise)
    judge_float32(report, "max_logits", ours.max_logits, truth.max_logits, noise=float_noise)
    if truth.dsink is not None and ours.dsink is not None:
        judge_float32(
            report, "dsink", ours.dsink, truth.dsink, noise=_sink_noise(case, given, truth)
        )
    return report


def _sink_noise(case: Case, given: Inputs, truth: Results) -> float:
    """dSink sums P_sink * (delta - dLSE) over rows.

    "compensated" knows delta to float32 (int8: to 2^-16 of O), the others to half an ulp of O.
    """
    from stable_attention.reference.geometry import to_bhsd

    do4 = to_bhsd(given.dout.double(), case.layout)
    o4 = to_bhsd(truth.out, case.layout)
    absolute = (do4 * o4).abs().sum(-1)
    lse = truth.lse if case.layout != "thd" else truth.lse.unsqueeze(0)
    if given.dlse is not None:
        dlse = given.dlse.double().abs()
        absolute = absolute + (dlse if case.layout != "thd" else dlse.unsqueeze(0))
    assert isinstance(given.sinks, torch.Tensor)
    weight = torch.exp(given.sinks.double().view(1, -1, 1) - lse)
    weight = weight.masked_fill(~torch.isfinite(lse), 0.0)
    size = float((weight * absolute).sum((0, 2)).max()) if weight.numel() else 0.0
    # The rounded P that makes O differs from P by half an ulp, at random, in every weight.
    rounding = HALF_ULP[given.q.dtype] * float(
        (weight * absolute).pow(2).sum((0, 2)).max().sqrt() if weight.numel() else 0.0
    )
    return 2.0**-17 * size + 4 * rounding


def check_case(
    case: Case, device: str = DEVICE, *, poison: bool = True, again: bool | None = None
) -> Report:
    """Run a case and judge it; exceptions of the run become problems of the report.

    ``again``: also without LSE, as in training; by default a third of the seeds.
    """
    given = make_inputs(case, device)
    try:
        ours = run_ours(case, given, poison=poison)
        report = compare(case, given, ours)
        if not report.problems and (case.seed % 3 == 0 if again is None else again):
            changed = changed_without_lse(case, given, ours)
            report.problems = [f"{name}: other bits where LSE is not asked for" for name in changed]
    except Exception as error:
        return Report(case, [f"{type(error).__name__}: {error}"])
    return report
