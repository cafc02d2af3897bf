"""Write the measured tables of docs/ between their markers, from docs/results/*.json.

    python benchmarks/render_tables.py [--check]

A page marks a place with ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; NAME is a key of
``TABLES``. A result that was not measured yet renders as the command that measures it. ``--check``
changes nothing and fails where a page differs from what its results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import cp_accuracy_tables
import cp_tables
import fault_tables
import kernel_tables
import plan_tables
import run_tables
import stability_tables
import telemetry_tables
from table_text import Tables, origin, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = (
    "README.md",
    "docs/architecture.md",
    "docs/captured_tensors.md",
    "docs/checkpoints.md",
    "docs/context_parallelism.md",
    "docs/data.md",
    "docs/early_warning.md",
    "docs/experiments.md",
    "docs/explosions.md",
    "docs/kernels.md",
    "docs/numerics.md",
    "docs/planning.md",
    "docs/predictions_kernels.md",
    "docs/predictions_remedies.md",
    "docs/predictions_seeds.md",
    "docs/reliability.md",
    "docs/rescue.md",
    "docs/stability.md",
    "docs/telemetry.md",
    "docs/training.md",
    "docs/which_heads_go.md",
)
BACKENDS = (
    "compensated",
    "compensated, int8",
    "compensated, fp32",
    "none",
    "dynamic_max",
    "paper_bf16",
    "SDPA-flash",
    "SDPA-cuDNN",
    "FlexAttention",
    "float32 O",
)

ORDER = ("tie2s", "tie2", "tie3", "near2", "near8w", "one", "diffuse", "kbias", "gauss")
WHICH_COLUMNS = ("lse", "dq", "dk", "dv")


def _cells(result: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> str:
    """Rows regime x length, a column a backend that was measured at all."""
    cells = result["cells"]
    present = {name for by_n in cells.values() for cell in by_n.values() for name in cell}
    names = [name for name in BACKENDS if name in present] + sorted(present - set(BACKENDS))
    rows = []
    for regime, by_n in cells.items():
        for n in sorted(by_n, key=int):
            found = [by_n[n].get(name, {}) for name in names]
            rows.append([f"{regime}, {n}", *(show(c) if "rms" in c else "-" for c in found)])
    rows.sort(key=lambda row: (ORDER.index(row[0].split(",")[0].split("/")[0]), "/" in row[0]))
    return table(["regime, n", *names], rows)


def delta_rms(result: dict[str, Any]) -> str:
    """RMS of the delta error."""
    return _cells(result, lambda c: f"{c['rms']:.1e}")


def delta_mean(result: dict[str, Any]) -> str:
    """Mean of the delta error with its t value, and coherence."""
    return _cells(result, lambda c: f"{c['mean']:+.1e} ({c['t']:.0f}, {c['coherence']:.2f})")


def delta_dq(result: dict[str, Any]) -> str:
    """Relative error of dQ."""
    return _cells(result, lambda c: f"{c['dq_error']:.2g}" if "dq_error" in c else "-")


def delta_sums(result: dict[str, Any]) -> str:
    """``compensated`` beside a float32 O where a sink is, from the shortest sequences."""
    rows = []
    for regime in (r for r in ORDER if r in result["cells"]):
        n = min(result["cells"][regime], key=int)
        cells = result["cells"][regime][n]
        shown = [f"{cells[name]['mean']:+.1e}" for name in ("compensated", "float32 O")]
        shown += [f"{cells[name]['dq_error']:.2g}" for name in ("compensated", "float32 O")]
        rows.append([f"{regime}, {n}", *shown])
    head = ["regime, n", "mean", "mean, float32 O", "dQ error", "dQ error, float32 O"]
    return "\n".join([kernel_tables.state(result), "", table(head, rows)])


def delta_inputs(result: dict[str, Any]) -> str:
    """What the regimes are, measured."""
    rows = []
    for regime, by_n in result["cells"].items():
        n = min(by_n, key=int)
        cell = next(c for c in by_n[n].values() if "kappa" in c)
        rows.append(
            [
                regime,
                f"{cell['kappa']:.2g}",
                f"{cell['top_probability']:.2f}",
                f"{cell['repeated_max']:.2f}",
                f"{cell['two_round_to_one']:.2f}",
                f"{cell['dead_zone']:.2f}",
            ]
        )
    head = ["regime", "kappa", "largest P", "repeated max", "two P round to 1", "dead zone"]
    return table(head, rows)


def delta_gates(result: dict[str, Any]) -> str:
    """How many gates hold, and those that do not."""
    gates = result["gates"]
    failed = [g for g in gates if not g["ok"]]
    lines = [f"{len(gates) - len(failed)} of {len(gates)} gates hold."]
    lines += [
        f"Not met: {g['regime']} at n = {g['n']}: {g['what']} {g['value']:.2e} > {g['limit']:.2e}."
        for g in failed
    ]
    if not result["complete"]:
        lines.append("The run was stopped before its end.")
    return "\n".join([kernel_tables.state(result), "", *lines])


def split_keys(result: dict[str, Any]) -> str:
    """RMS error of O with one running maximum and with one a piece of the keys."""
    rows = [
        [str(r["d"]), str(r["keys"]), f"{r['one_maximum']:.3e}", f"{r['pieces']:.3e}",
         f"{r['one_maximum'] / r['pieces']:.3f}"]
        for r in result["rows"]
    ]  # fmt: skip
    head = ["d", "keys", "one running maximum", "a maximum per 64 keys", "ratio"]
    return "\n".join([origin(result), "", table(head, rows)])


def which_sum(result: dict[str, Any]) -> str:
    """LSE and gradients by the sum behind LSE: "float32 / rounded"."""
    rows = [
        [regime, *(f"{cell['float32'][x]:.2g} / {cell['rounded'][x]:.2g}" for x in WHICH_COLUMNS)]
        for regime, cell in sorted(result["cells"].items(), key=lambda x: ORDER.index(x[0]))
    ]
    head = ["regime", "largest LSE error", "dQ error", "dK error", "dV error"]
    return table(head, rows)


def saved_bytes(_: dict[str, Any]) -> str:
    """Bytes each stabilizer keeps for the backward, from the table the kernels read."""
    sys.path.insert(0, str(ROOT / "kernels"))
    from stable_attention.stabilizers import STABILIZERS

    rows = []
    for s in STABILIZERS.values():
        for residual in ("bf16", "int8") if s.keeps_residual else ("bf16",):
            name = f"`{s.name}`" + (f", {residual}" if s.keeps_residual else "")
            own = s.saved_bytes(128, residual) - (2 * 128 + 4)
            per = "0" if own == 0 else f"{own // 128} x d_v"
            rows.append([name, per, str(own), str(s.saved_bytes(128, residual))])
    head = ["stabilizer", "extra bytes per token and head", "at d_v = 128", "with O and LSE"]
    return table(head, rows)


CONTEXT = "torchrun --nproc-per-node {} benchmarks/context_parallel.py"
# Marker -> (result file or "", renderer, command that measures it).
TABLES: Tables = {
    "delta-gates": ("delta_regimes", delta_gates, "delta_regimes.py"),
    "delta-float32-sums": ("delta_regimes_float32_sums", delta_sums, "delta_regimes.py"),
    "delta-inputs": ("delta_regimes", delta_inputs, "delta_regimes.py"),
    "delta-rms": ("delta_regimes", delta_rms, "delta_regimes.py"),
    "delta-mean": ("delta_regimes", delta_mean, "delta_regimes.py"),
    "delta-dq": ("delta_regimes", delta_dq, "delta_regimes.py"),
    "which-sum": ("which_sum", which_sum, "which_sum.py"),
    "split-keys": ("split_keys", split_keys, "split_keys.py"),
    "saved-bytes": ("", saved_bytes, ""),
    "step-profile": ("step_profile", run_tables.step_profile, "step_profile.py ..."),
    "step-profile-gate": ("step_profile_gate", run_tables.step_profile, "step_profile.py ..."),
    "throughput-1": ("gpt2_124m_throughput_1gpu", run_tables.throughput, "gpt2_throughput.py"),
    "throughput-2": ("gpt2_124m_throughput_2gpu", run_tables.throughput, "gpt2_throughput.py"),
    "layouts": ("layouts_cuda_4", run_tables.layouts, "layouts.py"),
    "first-steps": ("first_steps", run_tables.first_steps, "first_steps.py"),
    "cp-speed": ("context_parallel_8", cp_tables.speed, CONTEXT.format(8)),
    "cp-cost": ("context_parallel_8", cp_tables.cost, CONTEXT.format(8)),
    "long-context": ("long_context_8gpu", cp_tables.long_context, "long_context.py"),
    **cp_accuracy_tables.tables(),
    **fault_tables.tables(),
    **kernel_tables.tables(),
    **plan_tables.tables(),
    **stability_tables.tables(),
    **telemetry_tables.tables(),
}


def content(name: str, results: Path) -> str:
    """The text that belongs between a marker's lines."""
    file, render, command = TABLES[name]
    path = results / f"{file}.json"
    if file and not path.exists():
        if not command.startswith(("torchrun", "megatron-patch")):
            command = f"PYTHONPATH=kernels python benchmarks/{command}"
        where = "" if name in fault_tables.tables() else " on a GPU"
        return f"Not measured yet: `{command}`{where}."
    return render(json.loads(path.read_text()) if file else {})


def fill(text: str, results: Path = RESULTS) -> str:
    """``text`` with every known marker's content renewed; ValueError for a marker without end."""
    for name in TABLES:
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin not in text:
            continue
        before, rest = text.split(begin, 1)
        if end not in rest:
            raise ValueError(f"marker {begin!r} has no {end!r} after it")
        text = f"{before}{begin}\n{content(name, results)}\n{end}{rest.split(end, 1)[1]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        path = ROOT / page
        old = path.read_text()
        new = fill(old)
        if new != old:
            stale.append(page)
            if not args.check:
                path.write_text(new)
    print(*(f"{'differs' if args.check else 'wrote'}: {page}" for page in stale), sep="\n")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
