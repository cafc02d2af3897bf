"""Tables and plot of ``context_parallel.py``, and its arithmetic that needs no GPU."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from table_text import origin, table

Span = tuple[float, float]
SYSTEMS = (
    "p2p",
    "all_gather",
    "a2a",
    "a2a+p2p",
    "all-gather + SDPA",
    "torch, allgather",
    "torch, alltoall",
    "torch, allgather, heads repeated",
    "torch, allgather, flash",
)
GOAL = 0.90
WRONG = 0.05
"""Relative RMS error from which an output is not that of attention."""
IN_STEP = "kernels_ms"
"""A cell that has this profiled a pass which all ranks began together."""


def union(spans: list[Span]) -> list[Span]:
    """The same set of times as disjoint spans in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def exposed(transfers: list[Span], work: list[Span]) -> tuple[float, float]:
    """(time in which a transfer ran, the part of it in which no work ran), in the spans' unit."""
    length = lambda spans: sum(end - begin for begin, end in spans)  # noqa: E731
    together = length(union(transfers + work))
    return length(union(transfers)), together - length(union(work))


def flops(problem: dict[str, Any], tokens: int, causal: bool) -> float:
    """Operations of forward and backward over a whole sequence."""
    full = 3.5 * 4.0 * problem["heads"] * tokens * tokens * problem["d"]
    return full / 2 if causal else full


def sources() -> str:
    """Digest of the code that is measured."""
    joined = hashlib.sha256()
    for folder in ("kernels/stable_attention", "megatron_patch/context_parallel"):
        for path in sorted((Path(__file__).resolve().parent.parent / folder).rglob("*.py")):
            joined.update(path.name.encode() + path.read_bytes())
    return joined.hexdigest()[:16]


def same_work(tokens: int, ranks: int, block: int) -> int:
    """Length whose attention on one GPU is a rank's share of ``tokens`` over ``ranks``."""
    return max(block, round(tokens / math.sqrt(ranks) / block) * block)


class Speeds:
    """TFLOP/s per GPU of the cells of one result."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.problem, self.block = result["problem"], result["block"]
        self.cells = {
            (c["system"], c["ranks"], c["tokens"], c["causal"]): c for c in result["cells"].values()
        }

    def cell(self, system: str, ranks: int, tokens: int, causal: bool = True) -> dict[str, Any]:
        return self.cells.get((system, ranks, tokens, causal), {})

    def speed(self, system: str, ranks: int, tokens: int, causal: bool = True) -> float | None:
        """TFLOP/s per GPU of forward and backward, None where it was not measured."""
        ms = self.cell(system, ranks, tokens, causal).get("total_ms")
        shared = 1 if system == "kernel, every GPU" else ranks
        return None if ms is None else flops(self.problem, tokens, causal) / shared / ms / 1e9

    def of_kernel(
        self, system: str, ranks: int, tokens: int, causal: bool = True, *, every: bool = False
    ) -> float | None:
        """Speed over that of the same kernel with the same work, on one GPU or on ``every``."""
        mine = self.speed(system, ranks, tokens, causal)
        kernel = ("kernel, every GPU", ranks) if every else ("kernel", 1)
        alone = self.speed(*kernel, same_work(tokens, ranks, self.block), causal)
        return None if mine is None or alone is None else mine / alone

    def places(self, causal: bool = True) -> list[tuple[int, int]]:
        """(ranks, tokens) at which anything parallel was measured, in order."""
        found = {(n, s) for x, n, s, c in self.cells if n > 1 and c == causal and x in SYSTEMS}
        return sorted(found, key=lambda p: (-p[0], p[1]))


def thousand(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _present(speeds: Speeds) -> list[str]:
    measured = {system for (system, *_), cell in speeds.cells.items() if "total_ms" in cell}
    return [system for system in SYSTEMS if system in measured]


def speed(result: dict[str, Any]) -> str:
    """TFLOP/s per GPU and the share of the one-GPU kernel, a row a length and number of GPUs."""
    speeds = Speeds(result)
    systems = _present(speeds)
    rows = []
    for ranks, tokens in speeds.places():
        one = speeds.speed("kernel", 1, same_work(tokens, ranks, speeds.block))
        every = speeds.speed("kernel, every GPU", ranks, same_work(tokens, ranks, speeds.block))
        row = [f"{thousand(tokens)}, {ranks} GPUs"]
        row += ["-" if rate is None else f"{rate:.0f}" for rate in (one, every)]
        for system in systems:
            rate, share = (f(system, ranks, tokens) for f in (speeds.speed, speeds.of_kernel))
            row.append("-" if rate is None else f"{rate:.0f}" + _in_brackets(share))
        rows.append(row)
    head = ["tokens", "one GPU", "every GPU", *systems]
    lines = [origin(result) + _changed(result), "", table(head, rows), "", _goal(speeds)]
    lines += [*_failures(result), *_wrong(result)]
    if not result["complete"]:
        lines.append("The run was stopped before its end.")
    return "\n".join(lines)


def _changed(result: dict[str, Any]) -> str:
    """Kernels and context parallelism are other ones now; a result that does not say is taken."""
    if result.get("sources") in (None, sources()):
        return ""
    return " **The code has changed since**: read these figures as those of the commit named."


def _failures(result: dict[str, Any]) -> list[str]:
    """Systems that could not be measured somewhere, with the reason each gave."""
    where: dict[tuple[str, str], list[str]] = {}
    for cell in result["cells"].values():
        if "error" in cell:
            place = f"{thousand(cell['tokens'])} on {cell['ranks']}"
            where.setdefault((cell["system"], cell["error"]), []).append(place)
    return [
        f"Not measured: {system} at {', '.join(sorted(places))}: {why}"
        for (system, why), places in sorted(where.items())
    ]


def _wrong(result: dict[str, Any]) -> list[str]:
    """Systems whose output is not that of attention over the whole sequence."""
    where: dict[str, list[str]] = {}
    for cell in result["cells"].values():
        if cell.get("error_out", 0.0) > WRONG:
            place = f"{cell['error_out']:.2f} on {cell['ranks']} GPUs"
            where.setdefault(cell["system"], []).append(place)
    return [
        f"Wrong where it was checked (relative RMS error of O): {system}, {', '.join(places)}."
        for system, places in sorted(where.items())
    ]


def _in_brackets(share: float | None) -> str:
    return "" if share is None else f" ({share:.2f})"


def _goal(speeds: Speeds) -> str:
    shares = {n: speeds.of_kernel("p2p", n, 131072) for n, _ in speeds.places()}
    known = {n: share for n, share in shares.items() if share is not None}
    if not known:
        return f"p2p at 128k on 8 GPUs, goal {GOAL:.2f} of the kernel: not measured."
    ranks = max(known)
    verdict = "met" if known[ranks] >= GOAL else "not met"
    text = f"p2p at 128k on {ranks} GPUs: {known[ranks]:.3f} of the kernel; goal {GOAL:.2f}"
    text = f"{text}, {verdict}." if ranks == 8 else f"{text} (set for 8 GPUs), {verdict} here."
    every = speeds.of_kernel("p2p", ranks, 131072, every=True)
    return text if every is None else f"{text} Of the kernel on every GPU at once: {every:.3f}."


def cost(result: dict[str, Any]) -> str:
    """Exposed transfers in ms and peak memory in MiB beyond the inputs."""
    speeds = Speeds(result)
    systems = _present(speeds)
    rows = []
    for ranks, tokens in speeds.places():
        row = [f"{thousand(tokens)}, {ranks} GPUs"]
        for system in systems:
            cell = speeds.cell(system, ranks, tokens)
            ms, mib = cell.get("exposed_ms"), cell.get("peak_mib")
            known = f"{ms:.2f}" if ms is not None and IN_STEP in cell else "-"
            row.append("-" if mib is None else f"{known}; {mib:,.0f}")
        rows.append(row)
    lines = [origin(result) + _changed(result), "", table(["tokens", *systems], rows)]
    if any("exposed_ms" in cell and IN_STEP not in cell for cell in result["cells"].values()):
        lines += [
            "",
            "-: the ranks did not begin the profiled pass together; to be measured again.",
        ]
    return "\n".join(lines)


def long_context(result: dict[str, Any]) -> str:
    """Tokens/s, MFU and memory of training at long context, a row a mode."""
    rows = []
    for run in result["runs"]:
        if "error" in run:
            rows.append([run["mode"], str(run["gpus"]), "failed", *"----"])
            continue
        mfu = "-" if run["mfu"] is None else f"{100 * run['mfu']:.1f} %"
        speed, expected = (f"{run[f'{x}tokens_per_s']:,.0f}" for x in ("", "planned_"))
        memory, room = (f"{run[f'{x}memory_gib']:.2f}" for x in ("", "planned_"))
        rows.append([run["mode"], str(run["gpus"]), speed, expected, mfu, memory, room])
    head = ["mode", "GPUs", "tokens/s", "planned", "MFU", "memory of a GPU, GiB", "planned"]
    shape = f"`{result['config']}`, {thousand(result['seq_length'])} tokens."
    return "\n".join([f"{origin(result)} {shape}", "", table(head, rows)])


def plot(result: dict[str, Any], path: Path) -> None:
    """TFLOP/s per GPU over sequence length, a panel for each number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    speeds = Speeds(result)
    sizes = sorted({ranks for ranks, _ in speeds.places()}) or [1]
    figure, axes = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 4), squeeze=False)
    for axis, ranks in zip(axes[0], sizes, strict=True):
        lengths = [tokens for n, tokens in speeds.places() if n == ranks]
        for system in ("kernel", *_present(speeds)):
            points = []
            for tokens in lengths:
                one = (1, same_work(tokens, ranks, speeds.block))
                rate = speeds.speed(system, *(one if system == "kernel" else (ranks, tokens)))
                if rate is not None:
                    points.append((tokens, rate))
            label = "kernel, one GPU, same work" if system == "kernel" else system
            if points:
                style = "k--" if system == "kernel" else "o-"
                axis.plot(*zip(*points, strict=True), style, label=label)
        axis.set(
            xscale="log",
            ylim=(0, None),
            title=f"{ranks} GPUs, causal",
            xlabel="tokens",
            ylabel="TFLOP/s per GPU, forward + backward",
        )
        axis.set_xticks(lengths, [thousand(t) for t in lengths], minor=False)
    handles, labels = axes[0][-1].get_legend_handles_labels()
    if handles:
        axes[0][-1].legend(handles, labels, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
