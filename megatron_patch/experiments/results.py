"""What an experiment has come to: verdict table (JSON, Markdown), curves (CSV), plot.

Written after every invocation, complete or not: runs that were never started are in the table, with
the state ``waiting``. The JSON is what docs/stability.md is generated from.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_patch.experiments import earlier
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.files import damaged, read_json
from megatron_patch.experiments.preconditions import comparable
from megatron_patch.experiments.protocol import ExplosionConfig, Run
from megatron_patch.experiments.store import FINISHED, State, Store, job_of
from megatron_patch.experiments.verdict import Row, Window, begins_with, judge, read_rows, windows
from megatron_patch.runtime.environment import short_commit
from megatron_patch.runtime.files import replacing, write_whole
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


SAVED_WINDOWS = 4
"""A run whose numerics were exchanged is saved if its last windows, so many, have small gradients.
"""


def write(store: Store, before: earlier.Earlier | None = None) -> dict[str, Any]:
    """Write ``results/`` of the experiment; returns what verdicts.json holds.

    ``before``: results whose runs are kept where they went further than those here.

    Raises:
        ExperimentError: ``before`` cannot stand beside this experiment.
    """
    folder = store.path / "results"
    folder.mkdir(exist_ok=True)
    rows = {run.id: store.rows(run) for run in store.experiment.runs}
    size = store.experiment.protocol.explosion.window
    result = collect(store, rows)
    for run in store.experiment.runs:
        rows |= {path.name: found for path, found in _replaced(store, run, rows[run.id])}
    curves = {name: windows(found, size) for name, found in rows.items()}
    on_gpu = functools.partial(_fingerprint, store)
    earlier.join(result, before, rows=rows, curves=curves, on_gpu=on_gpu)
    write_whole(folder / "verdicts.json", json.dumps(result, indent=1, sort_keys=True) + "\n")
    write_whole(folder / "verdicts.md", markdown(result))
    _write_curves(folder / "curves.csv", result["runs"], curves)
    if any(curves.values()):
        draw(folder / "curves.png", store, result["runs"], curves=curves)
    return result


def collect(store: Store, rows: dict[str, list[Row]]) -> dict[str, Any]:
    """Everything the tables need, JSON-ready (NaN and infinity as text)."""
    protocol = store.experiment.protocol
    runs = []
    for run in store.experiment.runs:
        state = store.states[run.id]
        switched_at = _switched_at(store, run)
        runs.append(
            {
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
                "commit": _commit(store.run_dir(run)),
                "switched_at": switched_at,
                "saved": (
                    _saved(rows[run.id], state.origin, protocol.explosion)
                    if run.base is not None or switched_at is not None
                    else None
                ),
                **_figures(rows[run.id], protocol.explosion),
                **_incomplete(state, rows[run.id]),
            }
        )
        runs += _repeats(store, run, rows[run.id])
    return {
        "name": protocol.name,
        "job": job_of(read_json(store.path / "experiment.json")),
        "description": protocol.description,
        "steps": protocol.steps,
        "explosion": {
            name: getattr(protocol.explosion, name)
            for name in ("window", "from_step", "grad_norm", "loss", "stop_after")
        },
        "environment": _environment(store),
        "fingerprints": _fingerprints(store),
        "runs": runs,
    }


def _figures(rows: list[Row], rule: ExplosionConfig) -> dict[str, Any]:
    return {name: _finite(value) for name, value in judge(rows, rule).as_dict().items()}


def _incomplete(state: State, rows: list[Row]) -> dict[str, str]:
    """``incomplete``, of a run that was once further than its records are now."""
    went = state.attempts[-1]["to_step"] if state.attempts else 0
    last = int(rows[-1]["step"]) if rows else 0
    return {"incomplete": f"at {last:,} of {went:,}"} if last < went else {}


def _saved(rows: list[Row], origin: dict[str, Any] | None, rule: ExplosionConfig) -> bool | None:
    """Whether the gradients became and stayed small; None if there are too few windows to say.

    Or if a continued run has not outlived the event of its base by as many: what goes on there may
    only be late.
    """
    last = windows(rows, rule.window)[-SAVED_WINDOWS:]
    if len(last) < SAVED_WINDOWS:
        return None
    small = all(w.grad_norm <= rule.grad_norm and w.loss <= rule.loss for w in last)
    return None if small and origin is not None and not _outlived(rows, origin, rule) else small


def _outlived(rows: list[Row], origin: dict[str, Any], rule: ExplosionConfig) -> bool:
    return bool(rows[-1]["step"] >= origin["event"] + SAVED_WINDOWS * rule.window)


def _switched_at(store: Store, run: Run) -> int | None:
    """The step after which the guard of a run exchanged its numerics, by its telemetry."""
    try:
        return record.read(store.run_dir(run)).switched_at
    except (OSError, ValueError):  # not started, or its records are not here
        return None


def _replaced(store: Store, run: Run, rows: list[Row]) -> Iterator[tuple[Path, list[Row]]]:
    """Directory and rows of every attempt at a run that another one has taken the place of.

    The beginning of what is there now is no attempt of its own.
    """
    for folder in sorted((store.path / "runs").glob(f"{run.id}.replaced_*")):
        before = read_rows(folder / "metrics.csv")
        if before and not begins_with(rows, before):
            yield folder, before


def _repeats(store: Store, run: Run, rows: list[Row]) -> list[dict[str, Any]]:
    """Attempts at a run that do not count: reported like any."""
    reached = rows[-1]["step"] if rows else 0
    return [
        {
            "run": folder.name,
            "cell": run.cell.name,
            "seed": run.seed,
            "repeat_of": run.id,
            "state": "repeated",
            "reason": "another attempt at the same run "
            + ("went further" if before[-1]["step"] < reached else "has taken its place"),
            "commit": _commit(folder),
            **_figures(before, store.experiment.protocol.explosion),
        }
        for folder, before in _replaced(store, run, rows)
    ]


def _commit(run_dir: Path) -> str | None:
    """Commit of the source a run was made with; None before its first step."""
    try:
        facts = read_json(run_dir / "experiment.json")
    except FileNotFoundError:
        return None
    found = facts.get("environment", {}).get("commit")
    return None if found is None else str(found)


def _environment(store: Store) -> dict[str, Any]:
    """Software and device that all runs shared; empty before the first run."""
    for file in sorted((store.path / "reference").glob("seed_*.json")):
        return dict(_reference(file)["environment"])
    return {}


def _reference(file: Path) -> dict[str, Any]:
    """What the first run of a seed found (`preconditions`)."""
    found = read_json(file)
    try:
        comparable(found)
    except ExperimentError as error:
        raise damaged(file, str(error)) from None
    return found


def _fingerprints(store: Store) -> dict[str, str]:
    """By seed: a digest of what its runs shared (weights, batches, software, device)."""
    files = sorted((store.path / "reference").glob("seed_*.json"))
    seeds = [file.stem.removeprefix("seed_") for file in files]
    return {seed: digest for seed in seeds if (digest := _fingerprint(store, seed)) is not None}


def _fingerprint(store: Store, seed: str, gpu: str | None = None) -> str | None:
    """The digest of a seed, or what it would be on another GPU; None before its first run."""
    file = store.path / "reference" / f"seed_{seed}.json"
    if not file.exists():
        return None
    shared = comparable(_reference(file))
    if gpu is not None:
        shared["environment"] |= {"gpu": gpu}
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def markdown(result: dict[str, Any]) -> str:
    """The verdict table, the spread over seeds, and what is missing, as Markdown."""
    rule = result["explosion"]
    begun = [r for r in result["runs"] if r["state"] != "waiting" or r["steps"]]
    lines = [verdict_table(begun or result["runs"], rule)]  # the others are named below
    if any(run.get("origin") or run.get("switched_at") for run in result["runs"]):
        lines += ["", _rescues(result)]
        if any(run.get("origin") for run in result["runs"]):
            text = "is a rise from below it: a run that begins above it is `never` there, and "
            lines += ["", f"A loss > {rule['loss']:g} {text}its final loss tells."]
    lines += ["", f"Window means of {rule['window']} steps, from step {rule['from_step']:,} on."]
    spread = seed_spread(result)
    if spread:
        lines += ["", "Final loss over seeds (finished runs):", "", spread]
    cut = [f"{r['run']} at {r['steps']:,}" for r in result["runs"] if r["state"] == "paused"]
    if cut:
        lines += ["", f"Cut before their last step: {', '.join(cut)}."]
    waiting = [r for r in result["runs"] if r["state"] == "waiting"]
    lost = [f"{r['run']} at {r['steps']:,}" for r in waiting if r["steps"]]
    if lost:
        text = "Records end while they ran, to be started again"
        lines += ["", f"{text}: {', '.join(lost)}."]
    torn = [f"{r['run']} {r['incomplete']}" for r in result["runs"] if r.get("incomplete")]
    if torn:
        text = "Records are incomplete, and figures are of what is left of them"
        lines += ["", f"{text}: {', '.join(torn)}."]
    missing = [r["run"] for r in waiting if not r["steps"]]
    if missing:
        lines += ["", f"Never started: {', '.join(missing)}."]
    if kept := earlier.note(result):
        lines += ["", kept]
    commits = sorted({short_commit(r["commit"]) for r in result["runs"] if r.get("commit")})
    if len(commits) > 1:
        lines += ["", f"Runs were made with commits {', '.join(commits)}; each has its own."]
    return "\n".join(lines) + "\n"


def verdict_table(runs: Sequence[dict[str, Any]], rule: dict[str, Any]) -> str:
    """A line a run, judged by ``rule`` (the protocol's ``explosion``)."""
    return table([text.format(**rule) for text in HEAD], [_row(run) for run in runs])


def _row(run: dict[str, Any]) -> list[str]:
    return [
        run["cell"],
        str(run["seed"]),
        _state(run),
        f"{run['origin']['step']:,}" if run.get("origin") else "0" if run["steps"] else "-",
        f"{run['steps']:,}" if run["steps"] else "-",
        step_text(run["first_large_gradient"], run),
        step_text(run["exploded_at"], run),
        number(run["largest_grad_norm"], "{:.3g}"),
        number(run["final_loss"], "{:.4f}"),
        number(run["eval_loss"], "{:.4f}"),
    ]


def _state(run: dict[str, Any]) -> str:
    if run.get("incomplete"):
        return f"{run['state']}, records incomplete"
    return "unfinished" if run["state"] == "waiting" and run["steps"] else str(run["state"])


def step_text(step: int | None, run: dict[str, Any]) -> str:
    """A step; ``never`` only for a run that came to its end, else how far it was looked at."""
    if step is not None:
        return f"{step:,}"
    if not run["steps"]:
        return "-"
    whole = run["state"] == FINISHED and not run.get("incomplete")
    return "never" if whole else f"not by {run['steps']:,}"


def _rescues(result: dict[str, Any]) -> str:
    """Of runs that continue another one, or that their guard switched: from where, and how it went.

    The event beside a guard's run is that of the run which the same seed's others continue.
    """
    events = {r["seed"]: r["origin"]["event"] for r in result["runs"] if r.get("origin")}
    rows = []
    for run in result["runs"]:
        begun, switched = run.get("origin"), run.get("switched_at")
        if not begun and not switched:
            continue
        how, step = ("continued", begun["step"]) if begun else (f"guard, at {switched:,}", switched)
        # Attempts on two machines may continue different ones of the base: each has its own event.
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


def seed_spread(result: dict[str, Any]) -> str:
    """Mean and range of the final loss of every cell with finished runs; empty without any.

    A run that has a reason to be finished ended around its own event, at no step that seeds share.
    """
    cells: dict[str, list[float]] = {}
    for run in result["runs"]:
        partial = any(run.get(key) for key in ("origin", "incomplete", "reason"))
        whole = run["state"] == FINISHED and not partial
        if whole and isinstance(run["final_loss"], float):
            cells.setdefault(run["cell"], []).append(run["final_loss"])
    if not cells:
        return ""
    rows = [
        [name, str(len(v)), f"{statistics.mean(v):.4f}", f"{max(v) - min(v):.4f}"]
        for name, v in cells.items()
    ]
    return table(["cell", "seeds", "mean final loss", "largest - smallest"], rows)


def _write_curves(
    path: Path, runs: Sequence[dict[str, Any]], curves: dict[str, list[Window]]
) -> None:
    """One line a window of every attempt at every run."""
    with replacing(path, newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["run", "cell", "seed", "step", *earlier.FIGURES])
        for run in runs:
            for w in curves.get(run["run"], []):
                figures = [f"{getattr(w, name):{earlier.DIGITS}}" for name in earlier.FIGURES]
                writer.writerow([run["run"], run["cell"], run["seed"], w.step, *figures])


_LINES = ("-", "--", ":", "-.")


def _drawn(curves: dict[str, list[Window]], size: int) -> dict[str, list[Window]]:
    """Whole windows: the mean of the one step of a run that failed at its start is no curve, and
    stretches the axis for all. Where no run has come so far, what there is."""
    whole = {run: [w for w in found if w.step % size == 0] for run, found in curves.items()}
    return whole if any(whole.values()) else curves


def draw(
    path: Path, store: Store, runs: Sequence[dict[str, Any]], *, curves: dict[str, list[Window]]
) -> None:
    """Loss and gradient norm: a color a cell, a line style a seed; repeated attempts are faint."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    protocol = store.experiment.protocol
    cells = [cell.name for cell in protocol.cells]
    seeds = list(dict.fromkeys(run.seed for run in store.experiment.runs))
    figure, axes = plt.subplots(2, 1, figsize=(10, 9), sharex=True)
    curves = _drawn(curves, protocol.explosion.window)
    for run in runs:
        found = curves.get(run["run"])
        if not found:
            continue
        again = "repeat_of" in run
        style = {
            "color": f"C{cells.index(run['cell']) % 10}",
            "linestyle": _LINES[seeds.index(run["seed"]) % len(_LINES)],
            "linewidth": 1.1,
            "alpha": 0.4 if again else 1.0,
            "marker": "o" if len(found) < 3 else None,
        }
        label = f"{run['cell']}, seed {run['seed']}{', another attempt' if again else ''}"
        steps = [w.step for w in found]
        axes[0].plot(steps, [w.loss for w in found], label=label, **style)
        axes[1].plot(steps, [w.grad_norm for w in found], **style)
    axes[0].set_ylabel(f"training loss ({protocol.explosion.window}-step mean)")
    axes[1].set_ylabel(f"gradient norm ({protocol.explosion.window}-step mean)")
    axes[1].set_yscale("log")
    axes[1].axhline(protocol.explosion.grad_norm, color="gray", linewidth=0.8, linestyle=":")
    axes[0].axhline(protocol.explosion.loss, color="gray", linewidth=0.8, linestyle=":")
    axes[1].set_xlabel("step")
    axes[0].legend(fontsize="x-small", ncols=2)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
