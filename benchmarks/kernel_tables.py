"""The manual's tables of attention: speed, accuracy, projection, INT8, context parallelism; a plot.

A renderer takes the parts of a file of docs/assets; tables.py says which. Needs no torch.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from machine import (
    ROOT,
    SAME_CODE,
    Parts,
    Row,
    Table,
    cell,
    context_digest,
    context_flops,
    dims,
    functions_digest,
    same_work,
    span,
    speed,
    thousand,
)

GRIDS = ("hidden 2048", "MLA", "GQA 64/8")
PASSES = ("forward", "backward")
OURS = ("none", "compensated", "compensated int8")
PEERS = ("SDPA-cuDNN", "SDPA-flash", "FlexAttention")
DEFAULT = "compensated"
README_SHAPE = {"grid": GRIDS[0], "s": 4096, "d": 128, "causal": True}
REGIMES = ("tie2s", "near2", "one", "diffuse", "gauss")
BACKENDS = ("compensated", "none", "SDPA-cuDNN", "float32 O")
DQ_REGIMES = ("one", "kbias", "tie2s", "near2", "diffuse", "gauss")
DQ_BACKENDS = ("compensated", *PEERS, "float32 O")
SYSTEMS = (
    "p2p", "p2p, portable kernels", "all_gather", "a2a", "a2a+p2p", "all-gather + SDPA",
    "Transformer Engine, p2p",
    "torch, flash", "torch, cuDNN", "torch, allgather",
    "torch, alltoall", "torch, allgather, heads repeated", "torch, allgather, flash",
)  # fmt: skip
WRONG = 0.05
"""Relative RMS error from which an output is not that of attention."""
SHOWN_TOKENS = (8192, 524288, 131072)
"""Lengths of the table of context parallelism; the last one also on fewer GPUs than all."""
CHANGED = "**The {} changed since.**"


def _changed(result: dict[str, Any]) -> str:
    found = result.get("functions", "")
    same = SAME_CODE.get(found, found) == functions_digest()
    return "" if same else CHANGED.format("kernels have")


def _both(rows: list[Row], ours: str, peer: str) -> str:
    """Geometric means of ``peer``'s time over ``ours``, "forward, backward"."""
    found = [list(speed(rows, ours, peer, which).values()) for which in PASSES]
    return ", ".join(f"{statistics.geometric_mean(x):.2f}" for x in found) if all(found) else "-"


PROJECTED = (
    "none", "compensated", "compensated_projected", "projected",
    "compensated_projected, own_x2", "projected, own_x2", "SDPA-cuDNN",
)  # fmt: skip
SHOWN_CAPTURES = (("sdpa_flash-s2", 6152),)
"""Run and step of the captures whose dQ the manual shows."""
EXACT, STORED, GPROJ = "FP32 attention", "float64, rounded once", "GProj as published, emulated"
LAYERS_OF = {"compensated_4x-s1": "Llama-like 350M"}
"""Model of a run whose every layer was captured."""
VENDORS = ("SDPA-cuDNN", "SDPA-flash", "FA4")
COMPARED = (*PROJECTED[:-1], "vendors", GPROJ)
GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV"}


def _cells(parts: Parts, *keys: str) -> dict[Any, dict[str, list[Row]]]:
    """Rows of the only part by the values of some keys, then by backend."""
    (result,) = parts.values()
    found: dict[Any, dict[str, list[Row]]] = {}
    for row in result["rows"]:
        cell = found.setdefault(tuple(row[key] for key in keys), {})
        cell.setdefault(row["backend"], []).append(row)
    return found


def _vendors(cell: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """``cell`` with the largest error of three vendors' kernels, head by head, as one backend's."""
    rows = zip(*(cell[name] for name in VENDORS), strict=True)
    worst = [{x: max(r[x] or 0.0 for r in row) for x in GRADIENTS} for row in rows]
    return cell | {"vendors": worst}


def _over_bound(cells: Collection[dict[str, list[Row]]], names: Sequence[str]) -> list[list[str]]:
    """Largest ratios to 1.5 times FP32 attention's error plus that of rounding the result once."""
    body = []
    for what, label in GRADIENTS.items():
        line = [f"{label} / bound"]
        for name in names:
            rows = (
                found
                for cell in cells
                for found in zip(cell[name], cell[EXACT], cell[STORED], strict=True)
                if found[-1][what] is not None  # an exact gradient of 0 has no relative error
            )
            line.append(f"{max(x[what] / (1.5 * y[what] + z[what]) for x, y, z in rows):,.2f}")
        body.append(line)
    return body


def _compared(*names: str) -> list[str]:
    return ["GProj, emulated" if name == GPROJ else name for name in names]


def projection_errors(parts: Parts) -> Table:
    """Errors of dQ at one length, and the largest ratios to the bound at every length."""
    found = {key: _vendors(cell) for key, cell in _cells(parts, "n", "regime").items()}
    shown, names = ("tie3",), (*COMPARED, EXACT)
    body = [
        [f"dQ, {regime}", *(f"{cell[name][0]['dq']:.4f}" for name in names)]
        for (n, regime), cell in found.items()
        if n == 2048 and regime in shown
    ]
    body += _over_bound(found.values(), names)
    kept = f"{len(shown)} of {len(found)} cells; the bound in all."
    return ["2,048 keys, d 64, causal", *_compared(*names)], body, [kept]


def projection_logits(parts: Parts) -> Table:
    """Largest error of the three gradients by size of the logits, BF16."""
    names = (*COMPARED, EXACT)
    body = [
        [f"{size:.0e}"]
        + [f"{max(r[x] for r in _vendors(cell)[name] for x in GRADIENTS):.4f}" for name in names]
        for (size, dtype), cell in _cells(parts, "logits", "dtype").items()
        if dtype == "torch.bfloat16" and size == 1e6
    ]
    return ["logits", *_compared(*names)], body, []


def projection_captures(parts: Parts) -> Table:
    """Errors of the worst head of captured layers that have begun to diverge."""
    found, names = _cells(parts, "run", "step"), (*COMPARED, EXACT)
    cells = {(run.split()[0], at): _vendors(cell) for (run, at), cell in found.items()}
    body = [
        [f"dQ, {run}, {at:,}", *(f"{max(row['dq'] for row in cell[x]):.2g}" for x in names)]
        for (run, at), cell in cells.items()
        if (run, at) in SHOWN_CAPTURES
    ]
    body += _over_bound(cells.values(), names)
    rows = [row for cell in cells.values() for row in cell[STORED]]
    kept = f"{len(SHOWN_CAPTURES)} of {len(cells)} captures; the bound in all {len(rows)} heads"
    if zero := sum(row["dq"] is None for row in rows):
        kept += f", {zero} of them in dV only: its exact dQ and dK are 0"
    return ["worst head: run, step", *_compared(*names)], body, [f"{kept}."]


def projection_layers(parts: Parts) -> Table:
    """Error of dQ of the worst head of whole models."""
    names = ("SDPA-cuDNN", DEFAULT, "compensated_projected", EXACT)
    body = []
    for part, result in parts.items():
        ((_, cells),) = _cells({part: result}, "run").items()
        run, step = cells[EXACT][0]["run"].split()[0], cells[EXACT][0]["step"]
        model = f"{LAYERS_OF[run]}, step {step:,}" if run in LAYERS_OF else run
        label = f"{model}, {sum(row['heads'] for row in cells[EXACT])} heads"
        body.append([label, *(f"{max(row['dq'] for row in cells[x]):.4f}" for x in names)])
    return ["worst head", *names], body, []


def projection_time(parts: Parts) -> Table:
    """Forward plus backward over that of ``none``, geometric means over the shapes."""
    body = []
    for (d, kernels), peers in sorted(_cells(parts, "d", "kernels").items()):
        ms = {name: [row["both_ms"] for row in rows] for name, rows in peers.items()}
        ratios = (
            statistics.geometric_mean(a / b for a, b in zip(ms[x], ms["none"], strict=True))
            for x in PROJECTED
        )
        label = f"d {d}, {'portable' if kernels else 'sm_90'}"
        body.append([label, *(f"{x:.2f}" for x in ratios)])
    return ["kernels", *PROJECTED], body, []


INT8 = ("compensated", "as published", "ours without projection", "ours")
INT8_PEERS = ("sage_int8", "stable_flash compensated", "stable_flash none", "SDPA-cuDNN")


def int8_errors(parts: Parts) -> Table:
    """Errors of dQ in nine regimes, and the largest of dK and of delta's mean."""
    head = ["dQ", *(f"BF16 {x}" if x == DEFAULT else f"INT8 {x}" for x in INT8)]
    found = _cells(parts, "regime")
    body = [
        [regime, *(f"{cell[x][0]['dq']:.3f}" for x in INT8)] for (regime,), cell in found.items()
    ]
    for key, label, form in (("dk", "dK", "{:.3f}"), ("delta_mean", "delta", "{:.0e}")):
        largest = (max(abs(cell[x][0][key]) for cell in found.values()) for x in INT8)
        body.append([f"largest {label}", *(form.format(x) for x in largest)])
    return head, body, ["2,048 keys, d 64, causal, 8 heads."]


def int8_speed(parts: Parts) -> Table:
    """Milliseconds forward and backward, and bytes kept per element of O."""
    body = []
    for (b, s, h, d), peers in _cells(parts, "b", "s", "h", "d").items():
        found = [peers[name][0] for name in INT8_PEERS]
        times = [f"{x['forward_ms']:.2f} + {x['backward_ms']:.2f}" for x in found]
        body.append([f"{b} x {s} tokens, {h} heads, d {d}", *times])
    (result,) = parts.values()
    kept = {
        name: [r["kept"] for r in result["rows"] if r["backend"] == name] for name in INT8_PEERS
    }
    body.append(["bytes kept per element of O", *(span(x, "{:.1f}") for x in kept.values())])
    return ["causal, ms forward + backward", *INT8_PEERS], body, [_changed(result)]


def borrowed(parts: Parts) -> Table:
    """Borrowed backwards over our own: the largest error of dQ by length, and the times."""
    errors, captures = (parts[part]["rows"] for part in ("errors", "captures"))
    times = [r for part in parts if part.startswith("speed") for r in parts[part]["rows"]]
    sets = {f"{n:,} keys": [r for r in errors if r["n"] == n] for n in (512, 2048, 8192, 32768)}
    sets["captures"] = captures
    body = []
    for name in (x for x in ("sdpa_cudnn", "sdpa_flash", "fa4") if x in errors[0]["dq"]):
        dq = ([r["dq"][name] / r["dq"]["own"] for r in rows] for rows in sets.values())
        ms = [r[name]["backward"] / r["own"]["backward"] for r in times if name in r]
        body.append([f"`{name}`", *(f"{max(x):.3f}" for x in dq), span(ms, "{:.2f}")])
    head = ["largest error of dQ over our own", *sets, f"time, {len(times)} shapes"]
    return head, body, [_changed(parts["speed"])]


def kernel_speed(parts: Parts) -> Table:
    """Speed beside each peer and cost of the stabilizer, a row a head dim."""
    (result,) = parts.values()
    kinds: dict[str, list[Row]] = {}
    for row in sorted(result["rows"], key=lambda r: (r["grid"] != GRIDS[0], r["grid"], r["d"])):
        grid = "" if row["grid"] == GRIDS[0] else f"{row['grid']}, "
        kinds.setdefault(f"{grid}d {dims(row)}", []).append(row)
    kinds["all"] = result["rows"]
    also = any("FA4" in row["peers"] for row in result["rows"])
    peers = (*PEERS, *(["FA4"] if also else []))
    body = [
        [kind, str(len(rows)), *(_both(rows, DEFAULT, peer) for peer in peers)]
        + [_both(rows, "none", DEFAULT)]
        for kind, rows in kinds.items()
    ]
    head = ["forward, backward", "shapes", *(f"speed / {peer}" for peer in peers), "time / `none`"]
    # Calls that took the host longer than the idle work before them.
    host = [found.get("host", 0.0) for r in result["rows"] for found in r["peers"].values()]
    slow = sum(ms > result["queued_ms"] for ms in host)
    queued = f"{slow} of {len(host)} intervals may contain host time." if slow else ""
    stopped = "" if result["complete"] else "The run was stopped before its end."
    return head, body, [queued, _changed(result), stopped]


def readme_cost(parts: Parts) -> Table:
    """Time and memory of the stabilizer at one shape."""
    result = parts["speed"]
    (row,) = (r for r in result["rows"] if README_SHAPE.items() <= r.items())
    sys.path.append(str(ROOT / "kernels"))
    from stable_attention.stabilizers import STABILIZERS

    body = []
    for name in ("SDPA-cuDNN", DEFAULT):
        extra = STABILIZERS[name].saved_bytes(128) - 260 if name in OURS else 0
        label = f"`stable_flash`, `{name}`" if name in OURS else "cuDNN (SDPA)"
        times = [f"{row['peers'][name][which]:.2f}" for which in PASSES]
        body.append([label, *times, f"{extra / 128:g}"])
    head = [f"ms, {row['b']} x {row['s']} tokens, {row['h']} heads, d {row['d']}, causal", *PASSES]
    return [*head, "bytes per element of O, beyond O and LSE"], body, [_changed(result)]


def kernel_host(parts: Parts) -> Table:
    """Microseconds that the host needs to launch a call; of compared checkouts the newest."""
    result = parts["host"]
    body = [
        [name.removeprefix("new "), f"{found['forward']:,.0f}", f"{found['both']:,.0f}"]
        for name, found in result["microseconds"].items()
        if not name.startswith("old ")
    ]
    b, s, h, d = (result["shape"][x] for x in "bshd")
    head = [f"microseconds; b {b}, s {s}, {h} heads, d {d}", "forward", "forward and backward"]
    return head, body, []


def kernel_features(parts: Parts) -> Table:
    """Time of calls that the portable kernels serve on sm_90, over the same without a feature."""
    result = parts["features"]
    pairs = {
        row["feature"]: [row["peers"][x] for x in ("with", "without")]
        for row in result["rows"]
        if row["feature"] != "compensated_projected"  # served by now
    }
    body = [[name, *(f"{x[p] / y[p]:.2f}" for p in PASSES)] for name, (x, y) in pairs.items()]
    b, s, h, d = (result["shape"][x] for x in "bshd")
    return [f"time / without it; b {b}, s {s}, {h} heads, d {d}, causal", *PASSES], body, []


def kernel_float32(parts: Parts) -> Table:
    """What attention in float32 takes beside `compensated`."""
    result = parts["float32"]
    told = {"split": "float32, split products (research)", "torch": "float32, PyTorch"}
    b, s, h, d = result["shape"]
    rows = [[told.get(n, f"`{n}`"), f"{t['both_ms']:.2f}"] for n, t in result["times"].items()]
    return [f"b {b}, s {s}, {h} heads, d {d}", "forward and backward, ms"], rows, []


def _by_regime(
    result: dict[str, Any], n: str, *, regimes: Sequence[str], backends: Sequence[str], figure: str
) -> Iterator[tuple[str, list[float | None]]]:
    """Regimes measured at n keys, and a figure of each backend."""
    for regime in regimes:
        if found := result["cells"].get(regime, {}).get(n):
            yield regime, [found.get(backend, {}).get(figure) for backend in backends]


def accuracy_delta(parts: Parts, n: str = "2048") -> Table:
    """RMS error of delta over that of delta, a row a regime."""
    result = parts["delta"]
    found = _by_regime(result, n, regimes=REGIMES, backends=BACKENDS, figure="rms")
    rows = [[regime, *(cell(x, "{:.1e}") for x in figures)] for regime, figures in found]
    gates = result["gates"]
    held = f"{sum(g['ok'] for g in gates)} of {len(gates)} gates hold, at 512 to 32,768 keys."
    return [f"{int(n):,} keys, d 64", *BACKENDS], rows, [held, _changed(result)]


def accuracy_dq(parts: Parts, n: str = "2048") -> Table:
    """Relative error of dQ, a row a regime."""
    result = parts["delta"]
    found = _by_regime(result, n, regimes=DQ_REGIMES, backends=DQ_BACKENDS, figure="dq_error")
    rows = [[regime, *(cell(x, "{:.4f}") for x in figures)] for regime, figures in found]
    return [f"{int(n):,} keys, d 64", *DQ_BACKENDS], rows, [_changed(result)]


def accuracy_context(parts: Parts) -> Table:
    """Error on several ranks over that on one: the largest over regimes and numbers of ranks."""
    cells = parts["context_parallel"]["cells"].values()
    one = {c["regime"]: c for c in cells if c["ranks"] == 1}
    many: dict[str, list[dict[str, Any]]] = {}
    for found in (c for c in cells if c["ranks"] > 1):
        many.setdefault(found["mode"], []).append(found)
    names = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV", "delta": "delta"}
    rows: dict[tuple[str, ...], list[str]] = {}  # modes of equal figures are one row
    for mode, found in many.items():
        ratios = (max(c[x]["rms"] / one[c["regime"]][x]["rms"] for c in found) for x in names)
        rows.setdefault(tuple(f"{ratio:.3f}" for ratio in ratios), []).append(mode)
    body = [[", ".join(modes), *figures] for figures, modes in rows.items()]
    ranks = sorted({c["ranks"] for found in many.values() for c in found})
    return [f"{', '.join(map(str, ranks))} ranks over one", *names.values()], body, []


def context_speed(parts: Parts) -> Table:
    """TFLOP/s per GPU beside the kernel alone, on the most GPUs and fewer; peak memory."""
    result = parts["speed"]
    cells = {(c["system"], c["ranks"], c["tokens"]): c for c in result["cells"].values()}
    parallel = [c for c in cells.values() if c["ranks"] > 1 and c["system"] in SYSTEMS]
    wrong: dict[str, float] = {}
    for name, error in ((c["system"], c.get("error_out", 0.0)) for c in parallel):
        if error > WRONG:
            wrong[name] = max(wrong.get(name, 0.0), error)
    measured = {c["system"] for c in parallel if "total_ms" in c} - wrong.keys()
    systems = [system for system in SYSTEMS if system in measured]

    def rate(system: str, ranks: int, tokens: int) -> str:
        ms = cells.get((system, ranks, tokens), {}).get("total_ms")
        flops = context_flops(result["problem"], tokens) / ranks
        return "-" if ms is None else f"{flops / ms / 1e9:.0f}"

    most = max(c["ranks"] for c in parallel)
    rows = []
    for n, tokens in sorted({(-c["ranks"], c["tokens"]) for c in parallel}):
        if tokens in (SHOWN_TOKENS if -n == most else SHOWN_TOKENS[-1:]):
            alone = rate("kernel", 1, same_work(tokens, -n, result["block"]))
            rates = [rate(system, -n, tokens) for system in systems]
            rows.append([f"{thousand(tokens)}, {-n} GPUs", alone, *rates])
    named = SHOWN_TOKENS[-1]
    memory = [cells.get((x, most, named), {}).get("peak_mib") for x in systems]
    rows.append([f"MiB, {thousand(named)}, {most} GPUs", "", *(cell(x, "{:,.0f}") for x in memory)])
    note = "; ".join(f"{name} ({error:.2f})" for name, error in wrong.items())
    note = note and f"Left out, wrong output (relative error of O): {note}."
    since = "" if result["sources"] == context_digest() else CHANGED.format("code has")
    return ["TFLOP/s per GPU", "one GPU, same work", *systems], rows, [note, since]


def plot(result: dict[str, Any], path: Path) -> None:
    """TFLOP/s of attention by sequence length, causal: a panel a head dim and pass."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in result["rows"] if r["grid"] == GRIDS[0] and r["causal"]]
    rows.sort(key=lambda r: r["s"])
    dims = sorted({r["d"] for r in rows})
    size = (4.5 * len(dims), 7.0)
    figure, axes = pyplot.subplots(2, len(dims), figsize=size, squeeze=False)
    for axis, (i, d) in zip(axes.flat, itertools.product((0, 1), dims), strict=True):
        for name in (*PEERS, "none", DEFAULT):
            found = [
                (r["s"], (1.0, 2.5)[i] * 2 * r["b"] * r["h"] * r["s"] ** 2 * d / ms / 1e9)
                for r in rows
                if r["d"] == d and (ms := r["peers"].get(name, {}).get(PASSES[i]))
            ]
            axis.plot([x for x, _ in found], [y for _, y in found], "o-", label=name)
        axis.set(xscale="log", ylim=(0, None), title=f"d {d}, causal, {PASSES[i]}")
        axis.set(xlabel="tokens", ylabel="TFLOP/s per GPU")
        ticks = sorted({r["s"] for r in rows})[::2]
        axis.set_xticks(ticks, [thousand(x) for x in ticks], minor=False)
    axes.flat[-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
