"""What an experiment has come to: a row a run (JSON, CSV, Markdown), and curves (CSV).

Written after every invocation, complete or not. Runs that were never started are in the table, with
the state ``waiting``.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from directory import FINISHED, Directory
from protocol import ExplosionConfig, Run
from verdict import Row, windows

from megatron_patch.runtime.environment import short_commit
from megatron_patch.runtime.files import write_whole
from megatron_patch.stability import record

HEAD = (
    "cell",
    "seed",
    "state",
    "from",
    "steps",
    "gradient norm > {grad_norm:g} from",
    "loss > {loss:g} from",
    "largest gradient norm",
    "final loss",
    "validation loss",
)
MADE_WITH = ("gpu", "platform", "driver", "python", "torch", "triton", "megatron-core", "commit")
"""Of a run's environment.json: machine, versions, source."""
NESTED = ("attempts", "origin", "set", "largest_logit", "warned_at")
"""Of a run, what is in JSON alone."""
CURVES = ("loss", "grad_norm", "loss_max", "grad_norm_max")
SAVED_WINDOWS = 4
"""A run whose numerics were exchanged is saved if so many last windows have small gradients."""


def write(directory: Directory) -> str:
    """Write ``results/`` of the experiment; returns its tables as Markdown."""
    folder = directory.path / "results"
    folder.mkdir(exist_ok=True)
    result = collect(directory)
    text = markdown(result)
    write_whole(folder / "verdicts.json", json.dumps(result, indent=1, sort_keys=True) + "\n")
    write_whole(folder / "verdicts.md", text)
    write_whole(folder / "runs.csv", _csv(_flat(run) for run in result["runs"]))
    size = directory.rule.window
    points = (
        {"run": run.id, "cell": run.cell.name, "seed": run.seed, "step": w.step}
        | {name: f"{getattr(w, name):.6g}" for name in CURVES}
        for run in directory.experiment.runs
        for w in windows(directory.rows(run), size)
    )
    write_whole(folder / "curves.csv", _csv(points))
    return text


def collect(directory: Directory) -> dict[str, Any]:
    """Everything the tables need, JSON-ready (NaN and infinity as text)."""
    protocol = directory.experiment.protocol
    rule = {n: getattr(protocol.explosion, n) for n in ExplosionConfig.__dataclass_fields__}
    runs = [_run(directory, run) for run in directory.experiment.runs]
    return {
        "name": protocol.name,
        "description": protocol.description,
        "steps": protocol.steps,
        "explosion": rule,
        "runs": runs,
        "unlike": unlike(runs),
    }


def _run(directory: Directory, run: Run) -> dict[str, Any]:
    state, rows, folder = directory.states[run.id], directory.rows(run), directory.run_dir(run)
    made, instruments = _attempts(folder), _instruments(folder)
    changed = run.base is not None or instruments["switched_at"] is not None
    figures = directory.verdict(run).as_dict()
    return {
        "run": run.id,
        "cell": run.cell.name,
        "seed": run.seed,
        "asks": run.cell.asks,
        "variant": run.cell.variant,
        "set": list(run.cell.set),
        "state": state.state,
        "reason": state.reason,
        "attempts": state.attempts,
        "origin": state.origin,
        **instruments,
        "saved": _saved(rows, state.origin, directory.rule) if changed else None,
        "data": _text(folder / "data.sha256"),
        # A run may have been made by several machines or commits: all of them, in order.
        **{n: list(dict.fromkeys(str(a[n]) for a in made if a.get(n))) for n in MADE_WITH},
        **{name: _finite(value) for name, value in figures.items()},
    }


def _attempts(folder: Path) -> list[dict[str, Any]]:
    """Machine and versions of each attempt, as the trainer recorded them."""
    try:
        found = json.loads((folder / "environment.json").read_text())["attempts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [entry for entry in found if isinstance(entry, dict)]


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None


def _instruments(folder: Path) -> dict[str, Any]:
    """What the telemetry of a run says of it; None where there is none.

    ``switched_at``: the step after which the guard exchanged its numerics. ``largest_logit``: of
    all heads, in all records and in the last, after its step. ``warned_at``: first step of each
    level but "ok".
    """
    found: dict[str, Any] = dict.fromkeys(("switched_at", "largest_logit", "warned_at"))
    try:
        seen = record.read(folder)
    except (OSError, ValueError):  # not started, or without telemetry
        return found
    found["switched_at"] = seen.switched_at
    if len(seen.steps):
        tops = seen.heads["max_logit"].max((1, 2), initial=-math.inf)
        at = int(tops.argmax())
        pairs = {"peak": at, "last": len(tops) - 1}
        found["largest_logit"] = {
            name: [int(seen.steps[i]), _finite(float(tops[i]))] for name, i in pairs.items()
        }
    found["warned_at"] = {}
    for step, verdict in seen.verdicts():
        if verdict.level != "ok":
            found["warned_at"].setdefault(verdict.level, step)
    return found


def _saved(rows: list[Row], origin: dict[str, Any] | None, rule: ExplosionConfig) -> bool | None:
    """Whether the gradients became and stayed small; None if there are too few windows to say.

    Or if a continued run has not outlived the event of its base by as many: what goes on there may
    only be late.
    """
    last = windows(rows, rule.window)[-SAVED_WINDOWS:]
    if len(last) < SAVED_WINDOWS:
        return None
    small = all(w.grad_norm <= rule.grad_norm and w.loss <= rule.loss for w in last)
    if small and origin is not None:
        outlived = rows[-1]["step"] >= origin["event"] + SAVED_WINDOWS * rule.window
        return True if outlived else None
    return small


def unlike(runs: Sequence[dict[str, Any]]) -> list[str]:
    """In what runs are not comparable: data of one seed, machines, versions, commits.

    Two cells differ in what they set only if all of this is the same.
    """
    lines = []
    for name in MADE_WITH:
        found: dict[str, list[str]] = {}
        for run in runs:
            for value in run[name]:
                shown = short_commit(value) if name == "commit" else value
                found.setdefault(shown, []).append(run["run"])
        if len(found) > 1:
            lines.append(f"{name}: " + "; ".join(f"{v} ({', '.join(r)})" for v, r in found.items()))
    for seed in dict.fromkeys(run["seed"] for run in runs):
        if len({run["data"] for run in runs if run["seed"] == seed and run["data"]}) > 1:
            lines.append(f"data: runs of seed {seed} were not trained on the same batches")
    return lines


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    """A run as one row of CSV."""
    origin = run["origin"] or {}
    row = {k: v for k, v in run.items() if k not in NESTED}
    row |= {n: " ".join(run[n]) if n == "commit" else "; ".join(run[n]) for n in MADE_WITH}
    row |= {"set": " ".join(run["set"])}
    return row | {f"origin_{name}": origin.get(name) for name in ("base", "event", "step")}


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    listed = list(rows)
    out = io.StringIO(newline="")
    if listed:
        writer = csv.DictWriter(out, listed[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(listed)
    return out.getvalue()


def markdown(result: dict[str, Any]) -> str:
    """The verdict table, the spread over seeds, and what stands against them, as Markdown."""
    rule, runs = result["explosion"], result["runs"]
    begun = [r for r in runs if r["state"] != "waiting" or r["steps"]]
    lines = [table([text.format(**rule) for text in HEAD], map(_row, begun or runs))]
    if any(run["origin"] or run["switched_at"] for run in runs):
        lines += ["", _rescues(runs)]
        text = "is a rise from below it: a run that begins above it is `never` there."
        lines += ["", f"A loss > {rule['loss']:g} {text}"]
    lines += ["", f"Window means of {rule['window']} steps, from step {rule['from_step']:,} on."]
    if spread := seed_spread(runs):
        lines += ["", "Final loss over seeds (finished runs):", "", spread]
    cut = [f"{r['run']} at {r['steps']:,}" for r in runs if r["state"] == "paused"]
    if cut:
        lines += ["", f"Cut before their last step: {', '.join(cut)}."]
    missing = [r["run"] for r in runs if r["state"] == "waiting" and not r["steps"]]
    if missing:
        lines += ["", f"Never started: {', '.join(missing)}."]
    if result["unlike"]:
        lines += ["", "Runs were not made alike:", "", *(f"- {x}" for x in result["unlike"])]
    return "\n".join(lines) + "\n"


def _row(run: dict[str, Any]) -> list[str]:
    return [
        run["cell"],
        str(run["seed"]),
        "unfinished" if run["state"] == "waiting" and run["steps"] else run["state"],
        f"{run['origin']['step']:,}" if run["origin"] else "0" if run["steps"] else "-",
        f"{run['steps']:,}" if run["steps"] else "-",
        step_text(run["first_large_gradient"], run),
        step_text(run["exploded_at"], run),
        number(run["largest_grad_norm"], "{:.3g}"),
        number(run["final_loss"], "{:.4f}"),
        number(run["eval_loss"], "{:.4f}"),
    ]


def step_text(step: int | None, run: dict[str, Any]) -> str:
    """A step; ``never`` only for a run that came to its end, else how far it was looked at."""
    if step is not None:
        return f"{step:,}"
    if not run["steps"]:
        return "-"
    return "never" if run["state"] == FINISHED else f"not by {run['steps']:,}"


def _rescues(runs: Sequence[dict[str, Any]]) -> str:
    """Of runs that continue another one, or that their guard switched: from where, and how it went.

    The event beside a guard's run is that of the run which the same seed's others continue.
    """
    events = {r["seed"]: r["origin"]["event"] for r in runs if r["origin"]}
    rows = []
    for run in runs:
        begun, switched = run["origin"], run["switched_at"]
        if not begun and not switched:
            continue
        how, step = ("continued", begun["step"]) if begun else (f"guard, at {switched:,}", switched)
        event = begun["event"] if begun else events.get(run["seed"])
        saved = {True: "yes", False: "no", None: "too short to say"}[run["saved"]]
        if event is None:
            rows.append([run["cell"], str(run["seed"]), "-", how, "-", "no run to compare"])
            continue
        if not begun and run["steps"] < event:
            saved = "too short to say"
        apart = f"{abs(event - step):,} {'before' if event >= step else 'after'}"
        rows.append([run["cell"], str(run["seed"]), f"{event:,}", how, apart, saved])
    return table(["cell", "seed", "event of the base", "how", "steps", "saved"], rows)


def number(value: Any, form: str) -> str:
    """A figure, ``-`` where there is none, ``nan``/``inf`` as they are."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else form.format(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column left-aligned, the others right-aligned."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def seed_spread(runs: Sequence[dict[str, Any]]) -> str:
    """Mean and range of the final loss of every cell with finished runs; empty without any.

    A run that has a reason to be finished ended around its own event, at no step that seeds share.
    """
    cells: dict[str, list[float]] = {}
    for run in runs:
        whole = run["state"] == FINISHED and not run["origin"] and not run["reason"]
        if whole and isinstance(run["final_loss"], float):
            cells.setdefault(run["cell"], []).append(run["final_loss"])
    rows = [
        [name, str(len(v)), f"{statistics.mean(v):.4f}", f"{max(v) - min(v):.4f}"]
        for name, v in cells.items()
    ]
    return table(["cell", "seeds", "mean final loss", "largest - smallest"], rows) if rows else ""
