"""The figures of research/report.md, drawn from research/results into research/figures.

    python research/analysis/figures.py

baselines: loss and gradient norm from step 0 (docs/assets/stability.png); heads: heads that run
away; bias: what repeats in the errors of their gradients; rescue: switches to `compensated`.
"""

from __future__ import annotations

import csv
import sys
from typing import Any

import matplotlib as mpl
import report_tables as tables
import shared

mpl.use("Agg")
import matplotlib.pyplot as plt

OUT = shared.RESULTS.parent / "figures"
ASSET = shared.RESULTS.parents[1] / "docs" / "assets" / "stability.png"
SHOWN = ("none", "sdpa_flash", "sdpa_cudnn", "paper_bf16", "fp32_attention", "compensated")


def panels(columns: int, rows: int = 1, height: float = 3.2) -> tuple[Any, Any]:
    """A figure with so many panels side by side."""
    return plt.subplots(rows, columns, figsize=(4.2 * columns, height * rows), squeeze=False)


def save(figure: Any, name: str) -> None:
    OUT.mkdir(exist_ok=True)
    figure.tight_layout()
    target = ASSET if name == ASSET.stem else OUT / f"{name}.png"
    figure.savefig(target, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw(axis: Any, points: dict[int, float], **style: Any) -> None:
    axis.plot([step / 1000 for step in points], list(points.values()), lw=1, **style)
    axis.set_xlabel("thousand steps")


def baselines() -> None:
    figure, axes = panels(3, 2, 2.6)
    for i, figure_of in enumerate(("loss", "grad_norm")):
        for seed in (1, 2, 3):
            axis = axes[i][seed - 1]
            for j, cell in enumerate(SHOWN):
                points = tables.windows(figure_of).get(("baselines", f"{cell}-s{seed}"))
                if points:
                    late = {s: v for s, v in points.items() if s >= 1000}
                    dashed = "--" if cell == SHOWN[-1] else "-"  # it lies on FP32 attention
                    draw(axis, late, color=f"C{j}", label=cell, ls=dashed)
            axis.set(title=f"seed {seed}" if i == 0 else "")
            axis.set_yscale("log" if i else "linear")
    axes[0][0].set_ylabel("loss, 50 steps")
    axes[1][0].set_ylabel("gradient norm")
    axes[0][0].legend(fontsize=6)
    save(figure, ASSET.stem)


def heads() -> None:
    shown = {
        "3": ("guard-s1", "sdpa_flash-s1", "fp32_attention-s1"),
        "8": ("none-s2", "sdpa_cudnn-s2", "sdpa_flash-s2", "consistent_sum-s2", "compensated-s2"),
        "9": ("none-s3", "compensated-s3"),
    }
    with (shared.RESULTS / "heads.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = panels(3)
    for i, (axis, (head, runs)) in enumerate(zip(axes[0], shown.items(), strict=True)):
        for run in runs:
            of = [r for r in rows if (r["run"], r["layer"], r["head"]) == (run, "1", head)]
            points = {int(r["step"]): float(r["max_logit"]) for r in of if r["max_logit"]}
            draw(axis, points, marker=".", ms=3, label=run)
        axis.set(title=f"seed {i + 1}, head {head}", yscale="log", ylim=(0.5, 1e7))
        axis.legend(fontsize=6)
    axes[0][0].set_ylabel("largest logit")
    save(figure, "heads")


def bias() -> None:
    runs = shared.read("gradient_drift")["failing"]["runs"]
    kinds = ("none", "sdpa_flash", "sdpa_cudnn", "consistent_sum", "low_order_o", "compensated")
    figure, axes = panels(len(runs))
    for axis, facts in zip(axes[0], runs.values(), strict=True):
        for i, kind in enumerate(kinds):
            of = facts["q"][kind]
            places = [h["head"] + (i - 2.5) / 8 for h in of]
            axis.bar(places, [h["coherence"] for h in of], 0.125, label=kind)
        axis.set(title=f"step {facts['step']:,}", xlabel="head of layer 1", xticks=range(12))
    axes[0][0].set_ylabel("coherence of errors, W_Q")
    axes[0][-1].legend(fontsize=6)
    save(figure, "bias")


def rescue() -> None:
    figure, axes = panels(3)
    shown = (("rescue", "s2"), ("rescue", "s1"), (tables.LATE, "s1"))
    for axis, (protocol, seed) in zip(axes[0], shown, strict=True):
        draw(axis, tables.counted(f"compensated-{seed}"), color="black", label="compensated")
        for (of, run), points in tables.windows().items():
            if of == protocol and run.endswith(seed):
                draw(axis, points, label=run.removesuffix(f"-{seed}"))
        axis.set(title=f"{protocol}, seed {seed[1]}", xlim=(5, 12), ylim=(3, 8))
        axis.legend(fontsize=6)
    axes[0][0].set_ylabel("loss, 50 steps")
    save(figure, "rescue")


def main() -> int:
    for make in (baselines, heads, bias, rescue):
        make()
    return 0


if __name__ == "__main__":
    sys.exit(main())
