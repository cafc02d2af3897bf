"""The tables of research/report.md, rendered from research/results between their markers.

    python research/analysis/report_tables.py [--check]
    python research/analysis/report_tables.py --add FOLDER PROTOCOL

``<!-- NAME:begin -->`` and ``<!-- NAME:end -->`` mark the place of `TABLES`[NAME]. ``--check``
changes nothing and fails where the page differs from its results. ``--add`` replaces the runs of a
protocol in runs.json and runs.csv that research/run.py has started, by its results in FOLDER.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import monitors
import shared
from shared import RESULTS, number, step, table

PAGE = RESULTS.parent / "report.md"
SETTLED, WINDOW, LAST = 2000, 50, 4
"""Losses are compared from this step on, in windows of so many steps; over the last so many."""
CONTINUED, LATE, RESCUED = "attribution_continued", "rescue_late", "rescue_projection"
ANSWERED = ("control", "projected", "compensated_projected", "cudnn")  # of RESCUED: no rescues
OF = {
    "BF16 stream": "baselines_bf16_residual",
    "BF16 stream, to 8,000": "projection_bf16_residual",
    "continued": CONTINUED,
    "late rescue": LATE,
    "of int8": "int8",
    "350M": "llama_350m",
}
"""Protocol of runs whose names say that they are set apart (`shared.run_name`)."""
PROBED = (
    *(("none_s2", "none-s2", 6452), ("vendor", "sdpa_cudnn-s2", 6352)),
    *(("vendor", "sdpa_flash-s2", 6152), ("guard", "guard-s1", 5502), ("guard", "guard-s1", 5652)),
    *(("flash", "sdpa_flash-s1", 5302), ("cudnn", "sdpa_cudnn-s1", 5152)),
    *(("cudnn", "sdpa_cudnn-s2", 5302), ("third", "none-s3", 6952), ("bf16", "none-s1", 6402)),
    *(("s2", "paper_bf16-s2", 2802), ("fp32", "fp32_attention-s1", 15000)),
)
"""Section of probes.json, run and step."""
FROM_ZERO = (
    "baselines", "baselines_bf16_residual", "attribution", "projection",
    "projection_bf16_residual", "llama_350m",
)  # fmt: skip


@functools.cache
def rows_of(protocol: str) -> list[dict[str, Any]]:
    """Runs of a protocol that count and were begun, as runs.json has them."""
    rows: list[dict[str, Any]] = shared.read("runs")[protocol]["runs"]
    return [run for run in rows if run["steps"] and run["state"] != "repeated"]


@functools.cache
def windows(figure: str = "loss") -> dict[tuple[str, str], dict[int, float]]:
    """(protocol, run) -> last step of a window -> its mean."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    with (RESULTS / "runs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["protocol"], row["run"])
            found.setdefault(key, {})[int(row["step"])] = float(row[figure])
    return found


def curve(name: str) -> dict[int, float]:
    """Loss of a run by the name that results read from its records have.

    There a later attempt at a run is *again*; in runs.csv the attempt that counts has the run's
    name, and others that were looked at are attempt_1.
    """
    plain, _, apart = name.partition(", ")
    if apart in OF:
        return windows()[OF[apart], plain]
    for protocol in ("baselines", "attribution", "rescue"):
        first = windows().get((protocol, f"{plain}.attempt_1"))
        if first and not apart:
            return first
        if (protocol, plain) in windows():
            return windows()[protocol, plain]
    return {}


def runs() -> str:
    """Every run from step 0 that counts."""
    rows = []
    for protocol in FROM_ZERO:
        for run in rows_of(protocol):
            if run.get("origin"):
                continue
            cut = "" if run["state"] in ("finished", "exploded") else " cut"
            cell = run["cell"].removesuffix("_from_0").replace("base", "none")
            cell += ", 350M" * (protocol == "llama_350m")
            bf16 = "bf16" in protocol or protocol == "llama_350m"
            row = [cell, str(run["seed"]), "BF16" if bf16 else "FP32"]
            row += [f"{run['steps']:,}{cut}", step(run["first_large_gradient"])]
            row += [step(run["exploded_at"]), number(run["largest_grad_norm"])]
            rows.append([*row, f"{run['final_loss']:.4f}"])
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: (order.index(row[0]), row[2] == "BF16", row[1]))
    head = ["numerics", "seed", "stream", "steps", "norm > 1", "loss > 4.5", "largest norm"]
    return table([*head, "final loss"], rows)


def losses() -> str:
    """Loss of runs less that of others on the same batches; none of them has an event."""
    pairs = [("compensated-s1", "fp32_attention-s1"), ("compensated-s2", "fp32_attention-s2")]
    pairs += itertools.combinations([f"compensated-s{n}" for n in (1, 2, 3)], 2)
    cells = ("low_order_o", "consistent_sum", "qk_norm", "weight_decay")
    own = [run["run"] for run in rows_of("attribution") if run["cell"] in cells]
    pairs += [(run, f"compensated-{run[-2:]}") for run in own]
    pairs += [(f"compensated-s{n}, BF16 stream, to 8,000", f"compensated-s{n}") for n in (1, 2)]
    to_8000 = [f"-s{n}, BF16 stream, to 8,000" for n in (1, 2)]
    pairs += [(f"compensated_projected{of}", f"compensated{of}") for of in ("-s1", *to_8000)]
    wide = ("compensated", "compensated_projected", "sdpa_cudnn")
    pairs += [(f"{cell}_4x-s1, 350M", "none_4x-s1, 350M") for cell in wide]
    controls = {"bf16": "bf16-s1", "no_qk_norm": "bf16_no_qk_norm-s1"}
    for run in rows_of("int8"):
        other = controls.get(run["cell"], f"bf16-s{run['seed']}") + ", of int8"
        if run["run"] in controls.values():
            continue
        pairs.append((f"{run['run']}, of int8", other))
    rows = []
    for one, other in pairs:
        a, b = counted(one), counted(other)
        steps = [s for s in sorted(a.keys() & b.keys()) if s > SETTLED and s % WINDOW == 0]
        apart = [a[s] - b[s] for s in steps]
        late = statistics.mean(apart[-math.ceil(len(apart) / 4) :])
        spread = f"{statistics.mean(apart):+.4f}", f"{statistics.stdev(apart):.4f}"
        rows.append([one, other, step(steps[-1]), *spread, f"{late:+.4f}"])
    return table(["run", "less", "to step", "mean", "scatter", "last quarter"], rows)


def counted(name: str) -> dict[int, float]:
    """Loss of the attempt that counts, by the run's name."""
    plain, _, apart = name.partition(", ")
    where = [OF[apart]] if apart else ["baselines", "attribution"]
    return next(windows()[p, plain] for p in where if (p, plain) in windows())


def place(head: Any) -> str:
    """layer.head"""
    return f"{head['layer']}.{head['head']}" if isinstance(head, dict) else f"{head[0]}.{head[1]}"


def heads() -> str:
    """By run: the heads that run away, and those that errors name thousands of steps before."""
    figures = shared.read("head_figures")
    errors, noise = figures["errors"]["runs"], figures["growth_noise"]["runs"]
    rows = []
    for run in noise:
        if run not in errors:  # cut too early
            continue
        spans = errors[run]["between"]
        early = next(span for span in spans if span["after"] == 500)
        late = next((span for span in spans if span["after"] == 3000), early)
        named = [", ".join(map(place, span["largest"])) for span in (early, late)]
        told = []
        for head in noise[run]["went"]:
            above = step(head["passed"]["step"]) if head["passed"] else "-"
            told.append(f"{place(head)} {head['step']:,} ({above})")
        median = f"{early['over_median'][0]:.0f}x, {late['over_median'][0]:.0f}x"
        end = f"none to {noise[run]['until']:,}"
        rows.append([run, *named, median, ", ".join(told) or end])
    head = ["run", "largest errors, 500 to 1,000", "3,000 to 4,000", "largest over median"]
    return table([*head, "above 1,000 at (noise > 1 from)"], rows)


def bias() -> str:
    """Coherence of the errors of W_Q's and W_K's gradients, weights held still."""
    kinds = ("none", "consistent_sum", "sdpa_flash", "sdpa_cudnn", "low_order_o", "compensated")
    rows = []
    for facts in shared.read("gradient_drift")["failing"]["runs"].values():
        for side in ("q", "k"):
            of = facts[side]
            for head in (1, 3):
                cells = [f"{of[kind][head]['coherence']:.2g}" for kind in kinds]
                rows.append([f"{facts['step']:,}", f"W_{side.upper()}", str(head), *cells])
            rest = [i for i in range(len(of["none"])) if i not in (1, 3)]
            cells = [f"{max(of[kind][i]['coherence'] for i in rest):.2g}" for kind in kinds]
            rows.append([f"{facts['step']:,}", f"W_{side.upper()}", "largest other", *cells])
    names = {"sdpa_flash": "FlashAttention-2", "sdpa_cudnn": "cuDNN"}
    return table(["step", "side", "head", *(names.get(k, k) for k in kinds)], rows)


def halves() -> str:
    """What each half leaves of the noise, by size of a head's logits; shared rounding errors."""
    found = shared.read("captured_heads")
    kinds = ("low_order_o", "consistent_sum", "compensated")
    whole = [h for h in found["growth"]["heads"] if all(h.get(k, {}).get("noise") for k in kinds)]
    rows = []
    for low, high in itertools.pairwise((0, 25, 100, 1000, math.inf)):
        both = (whole, found["shared"]["heads"])
        of, every = ([h for h in some if low <= h["largest_logit"] < high] for some in both)
        noise = [h["none"]["noise"] for h in of]
        row = [f"{low:,} to {high:,}" if high < math.inf else f"over {low:,}", str(len(of))]
        row.append(f"{min(noise):.2g} to {max(noise):.2g}")
        for kind in kinds:
            left = statistics.median(h[kind]["noise"] / h["none"]["noise"] for h in of)
            row.append(f"{left:.2f}")
        shared_error = [h["shared_error"] for h in every if h["shared_error"] is not None]
        rows.append([*row, f"{statistics.median(shared_error):.2g}"])
    head = ["largest logit", "heads", "noise, plain", "left by low-order O", "by rounded sum"]
    return table([*head, "by both", "shared rounding"], rows)


def probes() -> str:
    """Relative error of dQ in the layer whose heads run away, most before the norm is above 1."""
    names = ("reference", "none", "dynamic_max", "low_order_o", "consistent_sum", "compensated")
    rows = []
    for section, run, at in PROBED:
        one = next(
            found["backends"]
            for found in shared.read("probes")[section]["captures"]
            if [found["capture"][key] for key in ("run_name", "step", "layer")] == [run, at, 1]
        )
        kernel = "stable_flash none" in one
        prefix = "stable_flash " if kernel else "emulated "
        errors = [one[name if name == "reference" else prefix + name]["dq_error"] for name in names]
        where = f"{run}{', BF16 stream' * (section == 'bf16')}, {at:,}"
        rows.append([where, "GPU" if kernel else "emulated", *(number(x, 2) for x in errors)])
    head = ["captured in, at step", "by", "FP32 attention", "none", "dynamic_max", "low-order O"]
    return table([*head, "rounded sum", "compensated"], rows)


def continued() -> str:
    """Verdicts of the cells that continue a run on its way, and how often its heads grew."""
    rows, found = [], shared.read("continued_heads")
    for sections, more in ((["runs"], ""), (["projection", RESCUED], ", second base")):
        every = [run for name in sections for run in found[name]["runs"].values()]
        every = sorted((r for r in every if r["from_step"] < r["event"]), key=lambda r: r["place"])
        for cell in dict.fromkeys(run["cell"] for run in every):
            row = [cell + more]
            for run in sorted((r for r in every if r["cell"] == cell), key=lambda run: run["seed"]):
                grown = [h["growth"] for h in run["heads"] if h["growth"] is not None]
                row.append(", ".join(f"{x:.{0 if x >= 10 else 2}f}" for x in grown) or "cut")
                row.append(run["verdict"].replace("untold", "-"))
            rows.append(row + [""] * (5 - len(row)))
    return table(["changed", "seed 1: growth", "verdict", "seed 2: growth", "verdict"], rows)


def common() -> str:
    """The first heads of the model whose logits are mostly common to all keys."""
    rows = []
    for name, run in shared.read("head_figures")["common_part"]["runs"].items():
        passed = run["named"]["0.6"]
        named = [f"{place(h)} {h['step']:,} ({h['largest_logit']:.0f})" for h in passed]
        went = [f"{place(h)} {h['above_100']:,} ({h['share']:.2f})" for h in run["went"]]
        rows.append([name, ", ".join(named[:5]), ", ".join(went) or f"none to {run['until']:,}"])
    return table(["run", "share above 0.6 from (largest logit)", "above 100 at (share)"], rows)


def rescue() -> str:
    """Runs whose numerics were exchanged: when, whether that saved them, and what it cost.

    Saved: the last windows have norms and losses below the protocol's limits.
    """
    rows = []
    for protocol in ("rescue", LATE, RESCUED):
        limits = shared.read("runs")[protocol]["explosion"]
        bases = (run for run in rows_of(protocol) if run["cell"] == "base")
        events = {run["seed"]: run["first_large_gradient"] for run in bases}
        for run in rows_of(protocol):
            at = run.get("switched_at") or (run.get("origin") or {"step": None})["step"]
            if at is None or (protocol == RESCUED and run["cell"] in ANSWERED):
                continue
            key, since = (protocol, run["run"]), at - events[run["seed"]]
            own, peer = windows()[key], counted(f"compensated-s{run['seed']}")
            both = sorted(own.keys() & peer.keys())[-LAST:]
            behind = statistics.mean(own[s] - peer[s] for s in both)
            norms = [*windows("grad_norm")[key].values()][-LAST:]
            saved = max(norms) <= limits["grad_norm"] and run["final_loss"] <= limits["loss"]
            name = run["run"] + ", late" * (protocol == LATE)
            row = [name, f"{at:,}", f"{since:+,}", "yes" if saved else "no", f"{both[-1]:,}"]
            rows.append((since, [*row, f"{behind:+.3f}"]))
    head = ["run", "switched at", "after event", "saved", "to step", "above compensated"]
    return table(head, [row for _, row in sorted(rows)])


def warnings() -> list[tuple[str, int, int, int]]:
    """(run, `danger`, first 0.03 and 0.1 nats above `compensated`) of runs that were warned."""
    result = shared.read("early_warning")["runs"]
    found = []
    for run in (*result["choosing"], *result["held_out"]):
        own, peer = curve(run["run"]), counted(f"compensated-{run['run'].partition(', ')[0][-2:]}")
        steps = sorted(s for s in own.keys() & peer.keys() if s > SETTLED and s % WINDOW == 0)
        left = []
        for gap in (0.03, 0.1):
            above = [own[s] - peer[s] > gap for s in steps]
            pairs = zip(steps, above, above[1:], strict=False)
            left.append(next((s for s, a, b in pairs if a and b), None))
        if run["alarm"] is not None and left[0] is not None and left[0] >= run["alarm"]:
            found.append((run["run"], run["alarm"], left[0], left[1] or 0))
    return found


def warning() -> str:
    """How long before its loss left that of `compensated` on the same batches a run was warned."""
    rows = [[run, *map(step, (at, a, a - at, b - at))] for run, at, a, b in warnings()]
    return table(["run", "danger", "0.03 above at", "lead", "lead to 0.1"], rows)


_ALL = (runs, losses, heads, bias, halves, probes, continued, common, rescue, warning)
TABLES: dict[str, Callable[[], str]] = {make.__name__: make for make in _ALL}
TABLES["rivals"] = lambda: monitors.markdown(shared.read("rivals")["side_by_side"])


def fill(text: str, names: Iterable[str] = TABLES) -> str:
    """The page with every table renewed; ValueError for one without its markers."""
    for name in names:
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"{PAGE.name} has no {begin} and {end} after it")
        text = f"{before}{begin}\n{TABLES[name]()}\n{end}{after}"
    return text


def add(folder: Path, protocol: str) -> None:
    """Put a protocol's published runs in the place of those that are here."""
    here = shared.read("runs", RESULTS).get(protocol, {"runs": []})
    # Runs of before had their machine and data beside them, not in them.
    found = here | json.loads((folder / "verdicts.json").read_text())
    kept = {x["run"]: x for x in here["runs"]}
    found["runs"] = [run if run["steps"] else kept.get(run["run"], run) for run in found["runs"]]
    found["runs"] += [run for run in kept.values() if run["state"] == "repeated"]
    shared.write("runs", {protocol: found}, RESULTS)
    with (folder / "curves.csv").open(newline="") as file:
        new = [{"protocol": protocol} | row for row in csv.DictReader(file)]
    ended = {(protocol, row["run"]) for row in new}
    with (RESULTS / "runs.csv").open(newline="") as file:
        rows = [x for x in csv.DictReader(file) if (x["protocol"], x["run"]) not in ended] + new
    with (RESULTS / "runs.csv").open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    formatted = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatted)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", nargs=2, metavar=("FOLDER", "PROTOCOL"))
    args = parser.parse_args()
    if args.add:
        folder, protocol = Path(args.add[0]), args.add[1]
        for path in (folder / "verdicts.json", PAGE.parent / f"protocols/{protocol}.yaml"):
            if not path.is_file():
                parser.error(f"--add: no {path}; name RUNS/results of run.py and a protocol")
        add(folder, protocol)
        return 0
    new = fill(old := PAGE.read_text())
    if new != old and not args.check:
        PAGE.write_text(new)
    print("report.md:", "differs" if new != old and args.check else "as its results say")
    return int(args.check and new != old)


if __name__ == "__main__":
    sys.exit(main())
