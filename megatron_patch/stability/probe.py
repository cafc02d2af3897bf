"""``megatron-patch probe``: every attention backend on captured tensors, judged against float64.

The mathematics is `stable_attention.probes`; this file knows which backends there are and how to
call them on a capture. `probe_report` is the command. "emulated ..." backends imitate an
implementation rounding by rounding in PyTorch and run anywhere; the others are the kernels
themselves.

Shape legend: s tokens, b sequences, h query heads, d and dv head dims. Captured tensors are sbhd;
inside, everything is bhsd with one key/value head per query head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stable_attention import ops
from stable_attention.probes import BackendResult, ProbeReport, probe_results
from stable_attention.reference import emulators

if TYPE_CHECKING:
    from megatron_patch.stability.capture import CaptureFile


class ProbeError(ValueError):
    """A probe that cannot be made as asked; the text names what stands against it."""

    exit_code = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Tensors:
    """A capture made ready: bhsd on one device, with what the attention call was."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    scale: float
    causal: bool
    window: tuple[int, int] | None

    @classmethod
    def of(cls, capture: CaptureFile, device: torch.device) -> Tensors:
        """Raises ProbeError for layers whose attention the float64 truth does not cover."""
        if capture.sinks is not None:
            raise ProbeError(
                f"step {capture.step}, layer {capture.layer}: the layer has attention sinks "
                "(model.softmax_type), which probes do not model; capture a vanilla layer"
            )
        index = torch.as_tensor(capture.head_to_kv)
        q, k, v, dout = (
            x.to(device).permute(1, 2, 0, 3).contiguous()
            for x in (capture.q, capture.k[:, :, index], capture.v[:, :, index], capture.dout)
        )
        window = None if capture.window is None else (capture.window[0], capture.window[1])
        return cls(q, k, v, dout, capture.scale, capture.causal, window)

    def leaves(self) -> list[torch.Tensor]:
        """q, k, v that gradients can be asked of."""
        return [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]

    def call(self) -> dict[str, Any]:
        """The keywords that `stable_attention` and its reference have in common."""
        return {"layout": "bhsd", "causal": self.causal, "window": self.window, "scale": self.scale}

    def result(
        self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, **kept: Any
    ) -> BackendResult:
        """What a backend returned, with its gradients of q and k in the dtype of the capture."""
        dq, dk = torch.autograd.grad(out, (q, k), self.dout.to(out.dtype))
        dtype = self.q.dtype
        return BackendResult(out=out, dq=dq.to(dtype), dk=dk.to(dtype), **kept)


Runner = Callable[[Tensors], BackendResult]


def stable_flash(stabilizer: str, o_lo: str = "bf16", backward: str = "own") -> Runner:
    """``stable_flash`` with a stabilizer (or half of one) and a backward."""

    def run(x: Tensors) -> BackendResult:
        from stable_attention import stable_attention

        q, k, v = x.leaves()
        found = stable_attention(
            q, k, v, **x.call(), stabilizer=stabilizer, o_lo=o_lo, backward=backward,
            deterministic=True, allow_broken=stabilizer == "paper_bf16", return_lse=True,
            return_o_lo=True,
        )  # fmt: skip
        assert isinstance(found, tuple)
        return x.result(found[0], q, k, lse=found[1], low=found[2])

    return run


def sdpa(name: str) -> Runner:
    """One kernel of PyTorch's scaled_dot_product_attention, by its `SDPBackend` name."""

    def run(x: Tensors) -> BackendResult:
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if x.window is not None:
            raise ProbeError("scaled_dot_product_attention has no sliding window")
        q, k, v = x.leaves()
        with sdpa_kernel([getattr(SDPBackend, name)]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=x.causal, scale=x.scale)
            return x.result(out, q, k)

    return run


def reference(x: Tensors) -> BackendResult:
    """``reference``: float32 throughout, gradients rounded as the trainer's would be."""
    from stable_attention.reference import reference_attention

    q, k, v = (t.float() for t in x.leaves())
    found = reference_attention(q, k, v, **x.call(), return_lse=True)
    assert isinstance(found, tuple)
    return x.result(found[0], q, k, lse=found[1])


def transformer_engine(x: Tensors) -> BackendResult:
    """``te``: whichever kernel Transformer Engine picks for this call."""
    return _transformer_engine(x, passes=1)


def transformer_engine_fp8(x: Tensors) -> BackendResult:
    """``te fp8``: attention in FP8 as ``attention.fp8`` trains on Hopper, with settled scales."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    recipe = DelayedScaling(
        amax_history_len=1, amax_compute_algo="most_recent", reduce_amax=False, fp8_dpa=True
    )
    # Each pass takes its scales from the maxima of the one before. Those of the backward pass are
    # renewed by linear layers, of which there are none here.
    renew = partial(FP8GlobalStateManager.reduce_and_update_fp8_tensors, forward=False)
    return _transformer_engine(x, passes=3, inside=partial(te.autocast, recipe=recipe), after=renew)


def _transformer_engine(
    x: Tensors,
    *,
    passes: int,
    inside: Callable[[], Any] = nullcontext,
    after: Callable[[], None] = lambda: None,
) -> BackendResult:
    """The last of ``passes`` passes: forward inside ``inside()``, backward, ``after()``."""
    from transformer_engine.pytorch import DotProductAttention

    if not x.causal or x.window is not None:
        raise ProbeError("is probed on causal attention without a window only")
    heads, d, dv = x.q.shape[1], x.q.shape[3], x.v.shape[3]
    module = DotProductAttention(
        heads, (d, dv), attn_mask_type="causal", qkv_format="sbhd", softmax_scale=x.scale
    )
    for _ in range(passes):
        q, k, v = x.leaves()
        with inside():
            flat = module(*(t.permute(2, 0, 1, 3).contiguous() for t in (q, k, v)))
        out = flat.view(*flat.shape[:2], heads, dv).permute(1, 2, 0, 3)
        found = x.result(out, q, k)
        after()
    return found


def sage_int8(*, kernels: bool, **settings: Any) -> Runner:
    """``sage_int8`` with settings: the kernels, or their oracle in PyTorch."""

    def run(x: Tensors) -> BackendResult:
        from stable_attention.int8.settings import Settings
        from stable_attention.reference.int8 import int8_reference

        attention: Callable[..., torch.Tensor] = int8_reference
        if kernels:
            from stable_attention.int8.launch import int8_attention as attention
        q, k, v = x.leaves()
        return x.result(attention(q, k, v, Settings(**settings), **x.call()), q, k)

    return run


def emulated(rounding: emulators.Rounding) -> Runner:
    """An implementation imitated rounding by rounding, one head at a time."""

    def run(x: Tensors) -> BackendResult:
        from stable_attention.reference.geometry import allowed, bounds

        i = torch.arange(x.q.shape[2], device=x.q.device)
        mask = allowed(i, i, shift=0, reach=bounds(x.causal, x.window))
        wanted = dataclasses.replace(rounding, dtype=x.q.dtype)
        parts = []
        for h in range(x.q.shape[1]):
            one = (t[:, h : h + 1] for t in (x.q, x.k, x.v, x.dout))
            parts.append(emulators.emulate(*one, rounding=wanted, scale=x.scale, mask=mask))
        names = ("out", "lse", "low", "dq", "dk")
        return BackendResult(**{n: torch.cat([getattr(p, n) for p in parts], 1) for n in names})

    return run


NO_DELTA = ("sdpa_math",)
"""Unfused attention differentiates the softmax itself: there is no delta to judge, only dQ, dK."""


STABILIZERS = {
    "compensated": ("compensated",),
    "compensated int8": ("compensated", "int8"),
    "compensated_projected": ("compensated_projected",),
    "projected": ("projected",),
    "projected own_x2": ("projected", "bf16", "own_x2"),
    "compensated_projected own_x2": ("compensated_projected", "bf16", "own_x2"),
    "none": ("none",),
    "low_order_o": ("low_order_o",),
    "consistent_sum": ("consistent_sum",),
    "fp32 O": ("low_order_o", "fp32"),
    "dynamic_max": ("dynamic_max",),
    "paper_bf16": ("paper_bf16",),
}
ROUNDINGS = {
    "compensated": emulators.COMPENSATED,
    "compensated_projected": emulators.COMPENSATED_PROJECTED,
    "projected": emulators.PROJECTED,
    "none": emulators.FLASH2,
    "low_order_o": dataclasses.replace(emulators.FLASH2, o_lo="bf16"),
    "consistent_sum": dataclasses.replace(emulators.COMPENSATED, o_lo=None),
    "fp32 O": dataclasses.replace(emulators.FLASH2, o_lo="float32"),
    "dynamic_max": emulators.DYNAMIC_MAX,
    "dynamic_max as published": emulators.DYNAMIC_MAX_PUBLISHED,
    "lagging maximum": emulators.FLASH4,
    "paper_bf16": emulators.PAPER,
}


PAPER_INT8 = {"scales": "tile", "normalizer": "paper", "projection": False}
INT8 = {"sage_int8": {}, "sage_int8 as published": PAPER_INT8}


def backends(device: torch.device) -> dict[str, Runner]:
    """Every backend that can be tried on ``device``, in the order of the tables."""
    table: dict[str, Runner] = {}
    if device.type == "cuda" or ops.interpreting():
        table |= {f"stable_flash {name}": stable_flash(*kind) for name, kind in STABILIZERS.items()}
        table |= {name: sage_int8(kernels=True, **kind) for name, kind in INT8.items()}
    if device.type == "cuda":
        table |= {"sdpa_flash": sdpa("FLASH_ATTENTION"), "sdpa_cudnn": sdpa("CUDNN_ATTENTION")}
        table |= {"te": transformer_engine, "te fp8": transformer_engine_fp8}
    table |= {"sdpa_math": sdpa("MATH"), "reference": reference}
    table |= {f"emulated {name}": emulated(kind) for name, kind in ROUNDINGS.items()}
    return table | {
        f"emulated {name}": sage_int8(kernels=False, **kind) for name, kind in INT8.items()
    }


def choose(wanted: str, device: torch.device) -> dict[str, Runner]:
    """The backends of ``--backends``: ``all``, or names (or first words of names) with commas.

    Raises ProbeError: a name that is none of them here.
    """
    table = backends(device)
    if wanted == "all":
        return table
    chosen: dict[str, Runner] = {}
    for name in (part.strip() for part in wanted.split(",")):
        found = {n: r for n, r in table.items() if n == name or n.split(" ")[0] == name}
        if not found:
            raise ProbeError(
                f"backend {name!r} cannot be probed on {device.type}; there are: {', '.join(table)}"
            )
        chosen |= found
    return chosen


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Capture files named directly, or all of a run directory or folder, in order of their names.

    Raises ProbeError: nothing there.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ProbeError(f"{path}: no such file")
        folder = path / "captures" if (path / "captures").is_dir() else path
        inside = sorted(folder.glob("*.pt")) if path.is_dir() else [path]
        if not inside:
            raise ProbeError(
                f"{path} holds no captures (set stability.capture_steps or capture_at)"
            )
        found += inside
    return found


INPUT_FORMS = {
    "kappa": "{:.3g}",
    "repeated_max": "{:.2%}",
    "two_round_to_one": "{:.2%}",
    "dead_zone": "{:.2%}",
    "top_probability": "{:.3f}",
}
"""Figures of the inputs, and how the table writes them."""
INPUT_FIGURES = (*INPUT_FORMS, "rms_delta", "rows", "heads")


def probe_capture(
    capture: CaptureFile, runners: Mapping[str, Runner], *, device: torch.device, skip_rows: int
) -> dict[str, Any]:
    """One capture, all backends: facts of the capture and the inputs, figures by backend.

    A backend that raises gets an ``error`` entry; the others are measured all the same. A figure
    that is not finite is None, and ``not_finite`` of the capture counts such values in it.
    """
    x = Tensors.of(capture, device)
    results: dict[str, BackendResult] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name, runner in runners.items():
        try:
            results[name] = runner(x)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            figures[name] = {"error": f"{type(error).__name__}: {first[:200]}"}
    rows = min(skip_rows, x.q.shape[2] // 2)
    reports = probe_results(x.q, x.k, x.v, x.dout, results=results, **x.call(), skip_rows=rows)
    for name, report in reports.items():
        figures[name] = _figures(report, results[name], delta=name not in NO_DELTA)
    inputs = next((r.as_dict() for r in reports.values()), {})
    return {
        "capture": _facts(capture) | {"skipped_rows": rows},
        "inputs": {n: _round(inputs[n]) for n in INPUT_FIGURES if n in inputs},
        "backends": {name: figures[name] for name in runners},
    }


def _figures(
    report: ProbeReport, result: BackendResult, *, delta: bool
) -> dict[str, float | int | None]:
    """What was measured of the backend; None where it is not finite, which JSON cannot say."""
    names: list[str] = []
    if delta:
        names += ["mean", "rms", "coherence"]
        if report.heads > 1:
            names += ["standard_error", "t"]
        if result.lse is not None:
            names += ["dscore_row_sum_mean", "dscore_row_sum_rms", "lse_error"]
    if result.dq is not None:
        names += ["dq_error", "dq_bias"]
    if result.dk is not None:
        names.append("dk_error")
    return {name: _round(getattr(report, name)) for name in names}


def _round(x: float | int) -> float | int | None:
    """Six digits; None for what is not finite."""
    if not isinstance(x, float):
        return x
    return float(f"{x:.6g}") if math.isfinite(x) else None


def _facts(capture: CaptureFile) -> dict[str, Any]:
    """What the capture says of itself."""
    names = ("step", "trigger", "layer", "layer_name", "micro_batch", "backend", "stabilizer")
    facts = {name: getattr(capture, name) for name in (*names, "precision", "run_name")}
    if capture.variant:
        facts["variant"] = capture.variant
    facts["heads"] = list(capture.heads)
    facts["shape"] = list(capture.q.shape)
    odd = {n: int((~getattr(capture, n).isfinite()).sum()) for n in ("q", "k", "v", "dout")}
    if any(odd.values()):
        facts["not_finite"] = {name: count for name, count in odd.items() if count}
    for name in ("wq_norm", "wk_norm"):
        norms = getattr(capture, name)
        if norms is not None:
            facts[f"{name}_max"] = _round(float(norms.max()))
            facts["norms_exact"] = capture.norms_exact
    return facts
