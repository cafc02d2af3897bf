"""Tables of whole training runs (throughput, layouts, first steps) and of damage that was tried.

Each function takes the JSON object its benchmark wrote and returns Markdown; ``render_tables.py``
puts it between the markers of a page.
"""

from __future__ import annotations

from typing import Any

from table_text import origin, table


def step_profile(result: dict[str, Any]) -> str:
    """Milliseconds of a step by kind of kernel, a column a profile."""
    profiles = result["profiles"]
    parts = sorted({k for p in profiles for k in p["parts_ms"]}, key=lambda k: -_most(profiles, k))
    rows = [[k, *(f"{p['parts_ms'].get(k, 0.0):.1f}" for p in profiles)] for k in parts]
    rows.append(["**no kernel runs**", *(f"{p['step_ms'] - p['busy_ms']:.1f}" for p in profiles)])
    rows.append(["**step**, not profiled", *(f"{p['step_ms']:.1f}" for p in profiles)])
    told = [f"{p['label']}: {origin(p)}" for p in profiles]
    return "\n".join([*told, "", table(["ms a step", *(p["label"] for p in profiles)], rows)])


def _most(profiles: list[dict[str, Any]], part: str) -> float:
    return max(p["parts_ms"].get(part, 0.0) for p in profiles)


def throughput(result: dict[str, Any]) -> str:
    """Tokens/s and MFU of GPT-2 124M, plain PyTorch beside the trainer."""
    best = max(r["tokens_per_s"] for r in result["runs"])
    rows = [
        [
            r["system"],
            f"{r['tokens_per_s']:,.0f}",
            f"{100 * r['mfu']:.1f} %",
            f"{r['tokens_per_s'] / best:.2f}",
        ]
        for r in result["runs"]
    ]
    shape = (
        f"GPUs: {result['runs'][0]['gpus']}; {result['global_batch']} sequences a step in "
        f"micro-batches of {result['micro_batch']}; medians of runs of {result['steps']} steps."
    )
    head = ["in the order they ran", "tokens/s", "MFU", "of the fastest"]
    return "\n".join([f"{origin(result)} {shape}", "", table(head, rows)])


def layouts(result: dict[str, Any]) -> str:
    """Largest relative difference to one process, and the bitwise resumes."""
    rows = [
        [
            f"{x['model']}, {x['layout']}",
            str(x["ranks"]),
            f"{x['loss']:.1e}",
            f"{x['grad_norm']:.1e}",
            f"{x['tolerance']:.0e}",
            "yes" if x["agrees"] else "**no**",
        ]
        for x in result["layouts"]
    ]
    head = ["model, layout", "GPUs", "loss", "gradient norm", "tolerance", "agrees"]
    same = [r for r in result["resume"] if r["bitwise"]]
    keys = "; ".join(
        f"{r['ranks']} GPU{'s' if r['ranks'] > 1 else ''}"
        + "".join(f", {k.split('.')[-1]} {v}" for k, v in r["keys"].items())
        for r in result["resume"]
    )
    note = (
        f"Resumes that repeated every bit of an unbroken run of {result['resume'][0]['steps']} "
        f"steps: {len(same)} of {len(result['resume'])} ({keys})."
    )
    note += f" Attention backend `{result['backend']}`."
    return "\n".join([origin(result), "", table(head, rows), "", note])


def first_steps(result: dict[str, Any]) -> str:
    """Distance of the loss curves to `sdpa_cudnn`, beside that of two runs of `sdpa_cudnn`."""
    rows = []
    for gpus in ("1_gpu", "2_gpu"):
        for name, distance in result.get(gpus, {}).get("distance_to_sdpa_cudnn", {}).items():
            rows.append(
                [
                    f"{gpus[0]} GPU{'s' if gpus[0] != '1' else ''}, {name}",
                    f"{distance['mean']:.4f}",
                    f"{distance['max']:.4f}",
                    f"{distance['last_quarter_signed']:+.4f}",
                ]
            )
    head = ["run", "mean |difference|", "largest", "mean difference of the last quarter"]
    return "\n".join([f"{origin(result)} {result['steps']} steps.", "", table(head, rows)])
