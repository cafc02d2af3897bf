"""Tables of ``cp_accuracy.py``: errors by number of context-parallel ranks."""

from __future__ import annotations

from typing import Any

from table_text import Tables, origin, table

BF16_MERGES = "p2p, merged in BF16"
GOAL = 1.1
MODES = ("p2p", "all_gather", "a2a", "a2a+p2p", BF16_MERGES)


def _sizes(result: dict[str, Any]) -> list[int]:
    return sorted({cell["ranks"] for cell in result["cells"].values()})


def _cell(result: dict[str, Any], regime: str, ranks: int, mode: str) -> dict[str, Any] | None:
    # One rank is the ordinary kernel, whatever the mode.
    return result["cells"].get(f"{regime}, {ranks}, {'kernel' if ranks == 1 else mode}")


def delta(result: dict[str, Any]) -> str:
    """RMS and mean error of delta over RMS(delta), a row a regime and way to merge."""
    sizes, rows = _sizes(result), []
    for regime in dict.fromkeys(cell["regime"] for cell in result["cells"].values()):
        for mode in ("p2p", BF16_MERGES):
            row = [regime, mode]
            for ranks in sizes:
                cell = _cell(result, regime, ranks, mode)
                if cell is None or (ranks == 1 and mode == BF16_MERGES):
                    row.append("-")
                else:
                    row.append(f"{cell['delta']['rms']:.1e} ({cell['delta']['mean']:+.1e})")
            rows.append(row)
    head = ["regime", "merge", *(f"{n} rank{'s' if n > 1 else ''}" for n in sizes)]
    return "\n".join([origin(result), "", table(head, rows)])


def error(result: dict[str, Any]) -> str:
    """Largest ratio over regimes of the RMS error on n ranks to that on one, a row a mode."""
    sizes, rows = [n for n in _sizes(result) if n > 1], []
    regimes = list(dict.fromkeys(cell["regime"] for cell in result["cells"].values()))
    for mode in MODES:
        for ranks in sizes:
            if _cell(result, regimes[0], ranks, mode) is None:
                continue
            row = [mode, str(ranks)]
            for name in ("out", "dq", "dk", "dv"):
                ratios = []
                for regime in regimes:
                    many = _cell(result, regime, ranks, mode)
                    one = _cell(result, regime, 1, mode)
                    if many is not None and one is not None:
                        ratios.append(many[name]["rms"] / one[name]["rms"])
                row.append(f"{max(ratios):.3f}" if ratios else "-")
            rows.append(row)
    text = table(["mode", "ranks", "O", "dQ", "dK", "dV"], rows)
    return "\n".join([origin(result), "", text, "", _goal(rows)])


def _goal(rows: list[list[str]]) -> str:
    """The verdict for the largest number of ranks."""
    ours = [row for row in rows if row[0] != BF16_MERGES and "-" not in row[2:]]
    if not ours:
        return f"Goal {GOAL}: not measured."
    ranks = max(int(row[1]) for row in ours)
    worst = max(float(x) for row in ours if int(row[1]) == ranks for x in row[2:])
    verdict = "met" if worst <= GOAL else "not met"
    return f"Largest on {ranks} ranks: {worst:.3f}; goal {GOAL}, {verdict}."


def tables() -> Tables:
    """Entries of ``render_tables.TABLES``."""
    return {
        "cp-delta": ("cp_accuracy", delta, "cp_accuracy.py"),
        "cp-error": ("cp_accuracy", error, "cp_accuracy.py"),
    }
