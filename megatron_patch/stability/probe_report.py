"""What ``megatron-patch probe`` prints and writes: a table a capture, JSON, a plot."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_patch.runtime import environment
from megatron_patch.stability import capture as captures
from megatron_patch.stability import probe
from megatron_patch.stability.probe import ProbeError, Runner

SAVED_BY = "they are what stability.capture_* saves"


def run(paths: list[Path], *, backends: str, device: str, skip_rows: int, out: Path | None) -> int:
    """Probe every capture that can be read; stderr names the others.

    Args:
        paths: capture files, or run directories.
        backends: ``all``, or names with commas.
        device: ``auto``, ``cpu`` or ``cuda``.
        skip_rows: first rows of every sequence that are left out.
        out: folder of probe.json, probe.md and probe.png; None: only print.

    Returns:
        0 if each has a figure of at least one backend; 1 if one has none; 2 if one was left out.

    Raises ProbeError: no capture, none that can be read, an unknown backend, ``out`` that cannot be
    written.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ProbeError("--device cuda, but PyTorch sees no GPU here; use --device cpu")
    runners = probe.choose(backends, torch.device(device))
    files = probe.files_of(paths)
    if out is not None:
        _make_folder(out)  # before the captures are probed, which takes long
    found, left_out = _probe(files, runners, torch.device(device), skip_rows=skip_rows)
    if out is not None:
        facts = {"device": device, "environment": environment.report()}
        write({"captures": found, "left_out": left_out, **facts}, out)
        print(f"{out / 'probe.json'}, probe.md, probe.png")
    unjudged = [one for one in found if not any(map(judged, one["backends"].values()))]
    for one in unjudged:
        _print_error(
            f"{one['file']}: no finite figure of any backend ({', '.join(one['backends'])})"
        )
    if left_out:
        _print_error(f"{len(left_out)} of {len(files)} captures left out; {SAVED_BY}")
        return 2
    return 1 if unjudged else 0


def _probe(
    files: list[Path], runners: dict[str, Runner], device: torch.device, *, skip_rows: int
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """(what every capture gave, those that gave nothing and why); prints both as they come.

    Raises ProbeError: none gave anything.
    """
    found: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    for path in files:
        try:
            one = probe.probe_capture(
                captures.CaptureFile.load(path), runners, device=device, skip_rows=skip_rows
            )
        except (captures.CaptureError, ProbeError, OSError) as error:
            # One damaged file must not take the figures of the others with it.
            text = str(error) if path.name in str(error) else f"{path}: {error}"
            left_out.append({"file": path.name, "error": text})
            if len(files) == 1:
                raise ProbeError(f"{text}; captures are what stability.capture_* saves") from None
            _print_error(text)
            continue
        one["file"] = path.name
        found.append(one)
        print(markdown(one), flush=True)
    if not found:
        raise ProbeError(f"none of the {len(files)} captures can be probed; {SAVED_BY}")
    return found, left_out


def _print_error(text: str) -> None:
    print(f"megatron-patch: {text}", file=sys.stderr, flush=True)


def judged(cell: dict[str, Any]) -> bool:
    """Whether a backend's entry has a figure of its error; not every backend has a delta."""
    return any(cell.get(name) is not None for name in ("rms", "dq_error", "dk_error"))


def _make_folder(out: Path) -> None:
    """Create ``--out``.

    Raises ProbeError: it cannot be made, or not written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Only trying tells: what the mode bits allow, a file system may refuse.
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> ProbeError:
    where, why = error.filename, error.strerror or error
    inside = f"{where} " if where is not None and Path(where).parent == out else ""
    text = f"--out {out}: {inside}cannot be written ({why}); name a directory that you can write"
    return ProbeError(text)


def write(result: dict[str, Any], out: Path) -> None:
    """probe.json, probe.md and probe.png into a folder.

    Raises ProbeError: they cannot be written there.
    """
    text = json.dumps(result, indent=1, sort_keys=True, allow_nan=False)
    parts = [markdown(one) for one in result["captures"]]
    parts += [f"Left out: {one['error']}\n" for one in result["left_out"]]
    try:
        (out / "probe.json").write_text(text + "\n")
        (out / "probe.md").write_text("\n".join(parts))
        draw(result, out / "probe.png")
    except OSError as error:
        raise _unwritable(out, error) from None


COLUMNS = {
    "mean": ("delta bias (mean)", "{:+.1e}"),
    "standard_error": ("SE", "{:.1e}"),
    "t": ("t", "{:.1f}"),
    "rms": ("RMS", "{:.1e}"),
    "coherence": ("coherence", "{:.2f}"),
    "dq_error": ("dQ error", "{:.2g}"),
    "dq_bias": ("dQ error that repeats", "{:.2g}"),
    "dk_error": ("dK error", "{:.2g}"),
}
"""Figures of a backend: the head of their column, and how the table writes them."""
NOT_FINITE = "not finite"


def markdown(one: dict[str, Any]) -> str:
    """The table of one capture. Errors of delta relative to RMS(delta)."""
    facts, inputs = one["capture"], one["inputs"]
    title = f"step {facts['step']:,}, {facts['layer_name']} (layer {facts['layer']})"
    lines = [f"### {facts['run_name']}: {title}", ""]
    shape = facts["shape"]
    changed = f", variant {facts['variant']}" if "variant" in facts else ""
    lines.append(
        f"{shape[1]} sequence(s) of {shape[0]} tokens, {shape[2]} heads of {shape[3]}; captured "
        f"under {facts['backend']}/{facts['stabilizer']}{changed}; rows "
        f"{facts['skipped_rows']} and later."
    )
    if inputs:
        kappa, repeated, ones, dead, top = (
            figure(inputs, n, f) for n, f in probe.INPUT_FORMS.items()
        )
        lines.append(
            f"kappa {kappa}; repeated maximum in {repeated} of rows, two P that round to 1 in "
            f"{ones}; dead zone {dead} of elements; mean largest P {top}."
        )
    norms = [f"W_{n[1].upper()} {figure(facts, f'{n}_norm_max', '{:.3g}')}" for n in ("wq", "wk")
             if f"{n}_norm_max" in facts]  # fmt: skip
    if norms:
        # Captures of earlier versions, and results of them, hold what power iteration had found.
        bound = "" if facts.get("norms_exact") else " (from below: a few power iterations)"
        lines.append(f"Largest spectral norm over heads{bound}: {', '.join(norms)}.")
    lines += _why_not_finite(one)
    heads, forms = zip(*COLUMNS.values(), strict=True)
    rows = [("backend", *heads), ("---", *["---:"] * len(heads))]
    errors = [""]
    for name, cell in one["backends"].items():
        if "error" in cell:
            errors.append(f"{name}: not measured, {cell['error']}")
        else:
            rows.append((name, *(figure(cell, n, f) for n, f in zip(COLUMNS, forms, strict=True))))
    lines += ["", *(f"| {' | '.join(row)} |" for row in rows), *errors]
    return "\n".join(lines) + "\n"


def figure(figures: dict[str, Any], name: str, form: str) -> str:
    """One figure for people: ``-`` if it was not measured, ``not finite`` if it is null."""
    if name not in figures:
        return "-"
    return NOT_FINITE if figures[name] is None else form.format(figures[name])


def _why_not_finite(one: dict[str, Any]) -> list[str]:
    """A line about figures that are not finite, where there are any."""
    odd = one["capture"].get("not_finite", {})
    if odd:
        names = ", ".join(f"{count:,} of {name}" for name, count in odd.items())
        return [f"Values that are not finite in the capture: {names}. What depends on them is "
                f"{NOT_FINITE!r} here and null in probe.json."]  # fmt: skip
    cells = {"the inputs": one["inputs"]} | one["backends"]
    names = ", ".join(name for name, cell in cells.items() if None in cell.values())
    if names:
        return [f"Figures of {names} are not finite, though the capture is; null in probe.json."]
    return []


_PANELS = (
    ("rms", "RMS of the delta error / RMS(delta)"),
    ("mean", "|mean| of the delta error / RMS(delta)"),
    ("dq_error", "relative error of dQ"),
)


def shown(backends: dict[str, Any]) -> list[str]:
    """Backends worth a place in a summary: an emulation only where its kernel was not measured."""
    return [
        name
        for name in backends
        if "error" in backends.get(f"stable_flash {name.removeprefix('emulated ')}", {"error": ""})
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Three panels, captures side by side, a marker a backend; logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    captures = result["captures"]
    names = list(dict.fromkeys(n for one in captures for n in shown(one["backends"])))
    canvas, axes = plt.subplots(len(_PANELS), 1, figsize=(10, 12), sharex=True)
    markers = "osD^v<>PX*hd8p"
    for axis, (figure_name, title) in zip(axes, _PANELS, strict=True):
        for index, name in enumerate(names):
            # Beside one another: many backends err by the same. On a logarithmic axis nothing is 0,
            # and nothing is not finite (None).
            side = 0.5 * (index / len(names) - 0.5)
            cells = [one["backends"].get(name, {}).get(figure_name) for one in captures]
            points = {i + side: abs(value) for i, value in enumerate(cells) if value}
            if points:
                style = {"marker": markers[index % len(markers)], "color": f"C{index % 10}"}
                axis.plot([*points], [*points.values()], linestyle="", label=name, **style)
        axis.set_yscale("log")
        axis.set_ylabel(title, fontsize="small")
        axis.grid(alpha=0.3)
    labels = [f"{one['capture']['step']}\nlayer {one['capture']['layer']}" for one in captures]
    axes[-1].set_xticks(range(len(captures)), labels, fontsize="small")
    axes[-1].set_xlabel("captured step")
    drawn = {line.get_label(): line for axis in axes for line in axis.get_lines()}
    entries = {name: drawn[name] for name in names if name in drawn}
    canvas.legend(entries.values(), entries, fontsize="small", ncols=4, loc="upper center")
    canvas.tight_layout(rect=(0, 0, 1, 0.92))
    canvas.savefig(path, dpi=110)
    plt.close(canvas)
