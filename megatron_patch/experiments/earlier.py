"""Runs that a folder of results has, and this machine has not or not as far: they are kept.

Records stay on the machine that made them unless somebody unpacks them. Results that are published
from another machine must not turn a finished run into one that was never started.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.store import ENDED
from megatron_patch.experiments.verdict import Row, Window, windows

Entry = dict[str, Any]
OnGpu = Callable[[str, str], str | None]
FIGURES = ("loss", "grad_norm", "loss_max", "grad_norm_max")
SHOWN = {"first_large_gradient", "exploded_at", "largest_grad_norm", "final_loss", "eval_loss"}
"""Of a row, in the verdict table."""
DIGITS = ".6g"
"""Of a figure in the file of curves."""
DEFINITION = ("cell", "seed", "variant", "set")
"""What must be the same of a run for its earlier figures to stand in its row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """The results of a folder, as `publish` left them there."""

    file: Path
    result: dict[str, Any]
    curves: dict[str, list[Window]]


def read(folder: Path, name: str) -> Earlier | None:
    """Results of experiment ``name`` in ``folder``; None where there are none.

    Raises:
        ExperimentError: there are some, and they cannot be read: they would be overwritten.
    """
    file = folder / f"{name}.json"
    if not file.exists():
        return None
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if strange := _strange(result):
            raise ValueError(strange)
        curves = _of_rows(result["runs"], _curves(file.with_suffix(".csv")))
        return Earlier(file=file, result=result, curves=curves)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ExperimentError(
            f"{file} cannot be read as results of an experiment ({type(error).__name__}: {error}), "
            "and would be overwritten; move it away or name another --results-dir"
        ) from error


def _strange(result: Any) -> str:
    """What keeps something from being results as this version reads them; "" if nothing does."""
    if not isinstance(result, dict) or not isinstance(result["runs"], list):
        return "no list of runs"
    if missing := sorted({"name", "explosion", "environment"} - result.keys()):
        return f"no {', '.join(missing)}"
    for name in ("explosion", "environment", "fingerprints"):
        if not isinstance(result.get(name, {}), dict):
            return f"{name} is no mapping"
    for row in result["runs"]:
        kinds = {"run": str, "cell": str, "state": str, "seed": int, "steps": int}
        if not isinstance(row, dict) or any(type(row[n]) is not kinds[n] for n in kinds):
            return f"a run that is none: {row!r:.60}"
        if missing := sorted(SHOWN - row.keys()):
            return f"{row['run']} has no {', '.join(missing)}"
    return ""


def _of_rows(rows: list[Entry], curves: dict[str, list[Window]]) -> dict[str, list[Window]]:
    """Curves by run as its row has it. Rows and curves are two files: a writer that was killed in
    between, or a copy made then, leaves those of two times, and an attempt that has come to count
    meanwhile has the name of another one there. A row's own curve ends where the row does; a row
    without one says so (``curve_lost``)."""
    found = {}
    for row in rows:
        run = row.get("repeat_of", row["run"])
        names = [row["run"], *(name for name in curves if name.partition(".attempt_")[0] == run)]
        ends = (curves[n] for n in names if curves.get(n) and curves[n][-1].step == row["steps"])
        found[row["run"]] = next(ends, [])
        row.pop("curve_lost", None)
        if row["steps"] and not found[row["run"]]:
            row["curve_lost"] = True
    return found


def join(
    result: dict[str, Any],
    earlier: Earlier | None,
    *,
    rows: dict[str, list[Row]],
    curves: dict[str, list[Window]],
    on_gpu: OnGpu,
) -> None:
    """Put what ``earlier`` has and this machine has not into a result (`results.collect`).

    Of several attempts at a run one that came to its end counts before one that was cut, then the
    longer, then the present one; the others are ``repeated``. What is the beginning of an attempt
    that is here is no attempt of its own, and neither is what this job wrote of a run that it has
    begun again: its records are here.

    Args:
        rows: of every attempt that is here, by the name of its entry.
        curves: their windows; those of earlier attempts are added.
        on_gpu: the fingerprint that a seed of this experiment would have on another GPU.

    Raises:
        ExperimentError: the earlier results are of another experiment, or of other weights, batches
            or software, or have runs that this one has not.
    """
    if earlier is None:
        return
    old = earlier.result
    _check_runs(result, earlier)
    joined = []
    for run in [entry["run"] for entry in result["runs"] if "repeat_of" not in entry]:
        here = _attempts_at(run, result)
        there = [
            row
            for row in _attempts_at(run, old)
            if row["steps"] and not _is_here(row, here, rows=rows, result=result, earlier=earlier)
        ]
        for row in there:
            _compare(here[0], row, result=result, earlier=earlier, on_gpu=on_gpu)
        kept = [_kept(row, result, earlier) for row in there]
        written = {row["run"]: earlier.curves.get(row["run"], []) for row in there}
        # Not the names of rows whose records are here: an attempt has the same name each time.
        taken = {entry["run"] for entry in [*here, *there]}
        joined += _in_order(run, here, kept, curves=curves, written=written, taken=taken)
    result["runs"] = joined
    if any("kept" in entry for entry in joined) and not result["environment"]:
        result["environment"] = old["environment"]
    for seed, digest in old.get("fingerprints", {}).items():
        result["fingerprints"].setdefault(seed, digest)


def _check_runs(result: dict[str, Any], earlier: Earlier) -> None:
    """Refuse results with runs of which this protocol has nothing to say."""
    known = {entry["run"] for entry in result["runs"]}
    named = {row.get("repeat_of", row["run"]) for row in earlier.result["runs"] if row["steps"]}
    if gone := sorted(named - known):
        raise ExperimentError(
            f"{earlier.file} has runs that this protocol has not ({', '.join(gone)}), and would be "
            "overwritten; move it away or name another --results-dir"
        )


def _attempts_at(run: str, result: dict[str, Any]) -> list[Entry]:
    """The run's own entry, then its repeats."""
    found = [row for row in result["runs"] if run in (row["run"], row.get("repeat_of"))]
    return sorted(found, key=lambda row: "repeat_of" in row)


def _is_here(
    row: Entry,
    here: list[Entry],
    *,
    rows: dict[str, list[Row]],
    result: dict[str, Any],
    earlier: Earlier,
) -> bool:
    """Whether the records of an earlier attempt are on this machine, perhaps further by now."""
    old = earlier.result
    # What was kept itself is of the job that its own row names, if any.
    job = row.get("job") if "kept" in row else old.get("job")
    begun = [entry for entry in here if entry["steps"]]
    reached = max((entry["steps"] for entry in begun), default=0)
    if job is not None and job == result["job"] and reached >= row["steps"]:
        return True
    curve, size = earlier.curves.get(row["run"], []), result["explosion"]["window"]
    return any(
        _same(windows((r for r in rows[entry["run"]] if r["step"] <= row["steps"]), size), curve)
        for entry in begun
        if curve
    )


def _same(curve: list[Window], written: list[Window]) -> bool:
    """Equal up to the digits that curves are written with; NaN is equal to itself here."""
    return [w.step for w in curve] == [w.step for w in written] and all(
        f"{getattr(w, name):{DIGITS}}" == f"{getattr(o, name):{DIGITS}}"
        for w, o in zip(curve, written, strict=True)
        for name in FIGURES
    )


def _in_order(
    run: str,
    here: list[Entry],
    there: list[Entry],
    *,
    curves: dict[str, list[Window]],
    written: dict[str, list[Window]],
    taken: set[str],
) -> list[Entry]:
    """All attempts at a run, the one that counts first and under the run's own name."""
    found = [(entry, curves.get(entry["run"], [])) for entry in here]
    found += [(row, written[row["run"]]) for row in there]
    counts = max(
        (item for item in found if "repeat_of" not in item[0]),
        key=lambda item: (_came_to_its_end(item[0]), item[0]["steps"]),
    )
    why = "came to its end" if _came_to_its_end(counts[0]) else "went further"
    ordered = [counts]
    for entry, curve in found:
        if entry is counts[0] or not entry["steps"]:
            continue
        if "repeat_of" not in entry:
            again = {"repeat_of": run, "state": "repeated"}
            reason = f"another attempt at the same run {why}"
            entry = {**entry, **again, "run": _free(run, taken), "reason": reason}
        elif entry["run"] in (other["run"] for other, _ in ordered):
            entry = {**entry, "run": _free(run, taken)}
        ordered.append((entry, curve))
    curves |= {entry["run"]: curve for entry, curve in ordered}
    return [entry for entry, _ in ordered]


def _free(run: str, taken: set[str]) -> str:
    """A name for another attempt at a run that no attempt has."""
    number = 1
    while (name := f"{run}.attempt_{number}") in taken:
        number += 1
    taken.add(name)
    return name


def _kept(row: Entry, result: dict[str, Any], earlier: Earlier) -> Entry:
    """An earlier entry with what tells where it is from, once it stands in another result."""
    old, seed = earlier.result, str(row["seed"])
    made = {"kept": _origin(old), "job": old.get("job")} if "kept" not in row else {}
    digest = row.get("fingerprint", old.get("fingerprints", {}).get(seed))
    if digest != result["fingerprints"].get(seed, digest):
        made["fingerprint"] = digest
    return {**row, **made}


def _came_to_its_end(entry: Entry) -> bool:
    return bool(entry["steps"]) and entry["state"] in ENDED and not entry.get("incomplete")


def note(result: dict[str, Any]) -> str:
    """Which rows are earlier results, and where their origin differs; "" where none is."""
    kept = [run for run in result["runs"] if "kept" in run]
    if not kept:
        return ""
    present = _origin(result)
    text = []
    for run in kept:
        other = {k: v for k, v in run["kept"].items() if present.get(k) != v}
        made = ", ".join(f"{name} {value}" for name, value in sorted(other.items()))
        text.append(f"{run['run']} ({made})" if made else run["run"])
    said = f"Kept from earlier results, their records are not here: {', '.join(text)}."
    if lost := [run["run"] for run in kept if run.get("curve_lost")]:
        said += f" Their curves are lost, their file is gone or of another time: {', '.join(lost)}."
    return said


def _origin(result: dict[str, Any]) -> dict[str, Any]:
    """Software and device of a result; every run names its own commit."""
    return {k: v for k, v in result["environment"].items() if k != "commit"}


def _compare(
    entry: Entry, had: Entry, *, result: dict[str, Any], earlier: Earlier, on_gpu: OnGpu
) -> None:
    """Refuse to put the earlier attempt at a run beside runs it cannot be compared with.

    Another model of GPU changes neither weights nor batches; the table names it.
    """
    old, seed = earlier.result, str(entry["seed"])
    differ = [name for name in DEFINITION if name in had and entry.get(name) != had[name]]
    differ += [name for name in ("name", "explosion") if result[name] != old[name]]
    mine = result["fingerprints"].get(seed)
    theirs = had.get("fingerprint", old.get("fingerprints", {}).get(seed))
    if None not in (mine, theirs) and mine != theirs:
        gpu = had.get("kept", old["environment"]).get("gpu")
        if gpu is None or on_gpu(seed, gpu) != theirs:
            model = "unless the first run of it had another model there"
            differ.append(f"weights, batches or software of seed {seed} ({model})")
    if differ:
        raise ExperimentError(
            f"{earlier.file} has {had['steps']:,} steps of {entry['run']}, but with another "
            f"{', another '.join(differ)}; move it away or name another --results-dir"
        )


def _curves(path: Path) -> dict[str, list[Window]]:
    """Window means by run; empty without a file."""
    found: dict[str, list[Window]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                figures = {name: float(row[name]) for name in FIGURES}
                window = Window(step=int(row["step"]), **figures)
                found.setdefault(row["run"], []).append(window)
    return found
