"""Tables of docs/ on what `megatron-patch probe` found on captured tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from table_text import (
    Tables,
    by_capture,
    captures_kept,
    origin,
    run_origin,
    table,
    three_digits,
)

ROOT = Path(__file__).resolve().parent.parent


def probes(result: dict[str, Any]) -> str:
    """One line a captured layer and backend."""
    from megatron_patch.experiments import probe_report

    rows = []
    for one in result["captures"]:
        facts = one["capture"]
        where = f"{facts['step']:,}, layer {facts['layer']}"
        for name in probe_report.shown(one["backends"]):
            cell = one["backends"][name]
            if "error" in cell:
                rows.append([where, name, "not measured", *["-"] * 4])
                continue
            forms = {"mean": "{:+.1e}", "t": "{:.1f}", "rms": "{:.1e}", "coherence": "{:.2f}",
                     "dq_error": "{:.2g}"}  # fmt: skip
            found = [probe_report.figure(cell, n, f) for n, f in forms.items()]
            rows.append([where, name, *found])
    head = ["captured at step", "backend", "delta bias", "t", "RMS", "coherence", "dQ error"]
    lines = [run_origin(result["environment"]), "", table(head, rows)]
    if (ROOT / "docs" / "results" / "stability_probe.png").exists():
        lines += ["", "![Errors of every backend on captured tensors](results/stability_probe.png)"]
    return "\n".join(lines)


PROBED = {
    "FP32 attention": "reference",
    "cuDNN": "sdpa_cudnn",
    "FlashAttention-2": "sdpa_flash",
    "`none`": "stable_flash none",
    "`dynamic_max`": "stable_flash dynamic_max",
    "low-order O alone": "stable_flash low_order_o",
    "rounded sum alone": "stable_flash consistent_sum",
    "`compensated`": "stable_flash compensated",
}
EMULATED = {
    "FP32 attention": "reference",
    "`none`": "emulated none",
    "`dynamic_max`": "emulated dynamic_max",
    "`dynamic_max` as published": "emulated dynamic_max as published",
    "low-order O alone": "emulated low_order_o",
    "rounded sum alone": "emulated consistent_sum",
    "`compensated`": "emulated compensated",
    "`paper_bf16`": "emulated paper_bf16",
}


def probed_dq(kernels: dict[str, str]) -> Callable[[dict[str, Any]], str]:
    """Relative error of dQ, a line a capture, ``kernels`` (by heading) side by side."""

    def render(result: dict[str, Any]) -> str:
        from megatron_patch.experiments import probe_report

        rows = []
        for one in sorted(result["captures"], key=lambda c: (c["capture"]["run_name"], _at(c))):
            facts, cells = one["capture"], one["backends"]
            where = f"{facts['run_name']}, {facts['step']:,}, layer {facts['layer']}"
            found = [probe_report.figure(cells[n], "dq_error", "{:.2g}") for n in kernels.values()]
            rows.append([where, *found])
        head = ["captured in, at step", *kernels]
        return "\n".join([run_origin(result["environment"]), "", table(head, rows)])

    return render


SOURCES = {"plain": "none", "`compensated`": "compensated", "FP32 attention": "float32"}


def gradient_sizes(result: dict[str, Any]) -> str:
    """A line a capture: gradients of its heads by q and k, and their errors, all heads together."""
    rows = []
    for (run, step, layer), heads in by_capture(result["heads"]):
        row = [f"{run}, {step:,}, layer {layer}"]
        row.append(f"{max(one['largest_logit'] for one in heads):,.0f}")
        for of in ("dq", "dk"):
            row.append(three_digits(_together(one["true"][of] for one in heads)))
            for name in SOURCES.values():
                row.append(three_digits(_together(one["errors"][name][of] for one in heads)))
        rows.append(row)
    head = ["captured in, at step", "largest logit"]
    for of in ("dQ", "dK"):
        head += [f"{of}, true", *(f"its error, {name}" for name in SOURCES)]
    words = "Frobenius norms over rows and captured heads; plain and `compensated` emulated."
    words += captures_kept(result["heads"])
    return "\n".join([f"{origin(result)} {words}", "", table(head, rows)])


def _together(norms: Iterable[float]) -> float:
    return math.hypot(*norms)


def _at(capture: dict[str, Any]) -> tuple[int, int]:
    return capture["capture"]["step"], capture["capture"]["layer"]


def tables() -> Tables:
    """Markers of that page, as `render_tables.TABLES` has them."""
    command = "megatron-patch probe RUN ... --out probe"
    return {
        "stability-probe": (
            "stability_probe",
            probes,
            "megatron-patch probe runs/stability_baselines/runs/none-s2 --out probe",
        ),
        "stability-probe-vendor": ("stability_probe_vendor", probed_dq(PROBED), command),
        "stability-probe-guard": ("stability_probe_guard", probed_dq(EMULATED), command),
        "stability-probe-flash": ("stability_probe_flash", probed_dq(EMULATED), command),
        "stability-probe-third": ("stability_probe_third", probed_dq(EMULATED), command),
        "stability-probe-bf16": ("stability_probe_bf16", probed_dq(EMULATED), command),
        "stability-probe-cudnn": ("stability_probe_cudnn", probed_dq(EMULATED), command),
        "stability-probe-s2": ("stability_probe_s2", probed_dq(EMULATED), command),
        "stability-probe-fp32": ("stability_probe_fp32", probed_dq(EMULATED), command),
        "gradient-sizes": ("gradient_sizes", gradient_sizes, "gradient_sizes.py CAPTURE ..."),
        "stability-probe-qk-norm": ("stability_probe_qk_norm", probed_dq(EMULATED), command),
    }
