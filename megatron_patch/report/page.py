"""The page: one HTML file without script, without a request, for screen and paper."""

from __future__ import annotations

import json
import time
from pathlib import Path

from megatron_patch.report import panel
from megatron_patch.report.charts import Series, line_chart
from megatron_patch.report.collect import ReportError, RunFacts, collect
from megatron_patch.report.markup import Child, Markup, table, tag
from megatron_patch.report.style import STYLE
from megatron_patch.report.verdicts import answers
from megatron_patch.runtime.files import write_named

# Nothing may be fetched or run, whatever got into the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
CHARTS = (
    ("loss", "Loss", "nats per token", False),
    ("grad_norm", "Gradient norm before clipping", "norm", True),
    ("lr", "Learning rate", "rate", False),
    ("tokens_per_s", "Throughput", "tokens/s", False),
)
VERSIONS = (
    "utc",
    "commit",
    "megatron-patch-stable",
    "python",
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "apex",
    "cuda",
    "cudnn",
    "nccl",
    "driver",
    "gpu",
    "world_size",
)


def write(run_dir: Path, out: Path) -> Path:
    """Write the report of a run; returns its path.

    Raises:
        ReportError: ``run_dir`` is no run directory, or ``out`` cannot be written.
    """
    facts = collect(run_dir)  # first: where there is no run, there is no place for its report
    if out.is_dir():
        raise ReportError(f"{out}: is a directory; name an HTML file, e.g. {out / 'report.html'}")
    if _is_absent(out.parent):
        # A directory made for a mistyped path would hide the page where nobody looks for it.
        raise ReportError(
            f"{out}: there is no directory {out.parent}; make it first, or name an HTML file in a "
            "directory that is there, with --out"
        )
    text = render(facts)
    try:
        write_named(out, text)
    except OSError as error:
        raise ReportError(
            f"{out}: cannot be written ({error.strerror or error}); name an HTML file in a "
            "directory that you can write, with --out"
        ) from None
    return out


def _is_absent(folder: Path) -> bool:
    """Whether there is nothing of that name; what cannot be looked at is told when it is used."""
    try:
        folder.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def render(facts: RunFacts, *, now: str | None = None) -> str:
    """The page as text. ``now``: what it says about when it was made."""
    now = now or time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"Run {facts.name}"),
        tag("style", Markup(STYLE)),
    )
    main = tag(
        "main",
        tag("h1", "Run ", tag("code", facts.name)),
        tag("p", f"Report of {now}.", class_="when"),
        _section("verdicts", "Verdicts", _answers(facts)),
        _section("curves", "Curves", _curves(facts)),
        _section("stability", "Stability of attention", _stability(facts)),
        _section("events", "Events", _events(facts)),
        _section("software", "Software and devices", _versions(facts)),
        _section("configuration", "Configuration", _configuration(facts)),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, tag("body", main), lang="en") + "\n"


def _section(name: str, title: str, content: Child) -> Markup:
    heading = tag("h2", title, id=f"{name}-heading")
    return tag("section", heading, content, aria_labelledby=f"{name}-heading")


def _answers(facts: RunFacts) -> Child:
    found = list(answers(facts))
    rows = [(a.question, tag("span", a.grade, class_=f"grade {a.grade}"), a.text) for a in found]
    parts: list[Child] = [table(("question", "grade", "answer"), rows, caption="At a glance")]
    if facts.experiment:
        shown = {k: v for k, v in facts.experiment.items() if k != "environment"}
        text = json.dumps(shown, indent=1, sort_keys=True)
        parts.append(tag("p", "This run is a cell of an experiment:"))
        parts.append(tag("pre", text))
    parts += [tag("p", f"Note: {note}", class_="none") for note in facts.notes]
    return parts


def _curves(facts: RunFacts) -> Child:
    if not facts.steps:
        return tag("p", "metrics.csv has no rows yet.", class_="none")
    parts: list[Child] = []
    for name, title, unit, log in CHARTS:
        series = [Series("training" if name == "loss" else name, facts.steps, facts.column(name))]
        if name == "loss":
            series += _validation(facts)
        parts.append(line_chart(f"m-{name}", series, title=title, unit=unit, log=log))
    return [*parts, _last_rows(facts)]


def _validation(facts: RunFacts) -> list[Series]:
    """Validation losses as dots, where there are any."""
    found = zip(facts.steps, facts.column("eval_loss"), strict=True)
    at = [(step, loss) for step, loss in found if loss == loss]
    if not at:
        return []
    return [Series("validation", [s for s, _ in at], [v for _, v in at], dots=True)]


def _last_rows(facts: RunFacts) -> Markup:
    """The end of metrics.csv in figures."""
    names = ("step", "loss", "grad_norm", "lr", "tokens_per_s", "eval_loss")
    count = len(facts.steps)
    picked = sorted({round(i * (count - 1) / 19) for i in range(20)}) if count > 1 else [0]
    forms = {"step": ",.0f", "tokens_per_s": ",.0f", "lr": ".3g", "grad_norm": ".4g"}
    rows = []
    for i in picked:
        cells = [(name, facts.column(name)[i]) for name in names]
        rows.append([format(v, forms.get(n, ".4f")) if v == v else "-" for n, v in cells])
    figures = table(names, rows, caption=f"{len(rows)} of {count:,} recorded steps")
    return tag("details", tag("summary", "In figures"), figures)


def _stability(facts: RunFacts) -> Child:
    if facts.telemetry is None:
        return tag("p", facts.telemetry_problem, class_="none")
    return panel.build(facts.telemetry)


def _events(facts: RunFacts) -> Child:
    if not facts.events:
        return tag("p", "Nothing noteworthy was logged.", class_="none")
    rows = [(event.when, event.text) for event in facts.events]
    return table(("when", "what"), rows, caption=f"{len(rows)} line(s) of the log and event files")


def _versions(facts: RunFacts) -> Child:
    if not facts.attempts:
        return tag("p", "environment.json holds no attempt.", class_="none")
    shown = facts.attempts[-6:]
    rows = [
        (name, *("-" if a.get(name) is None else str(a[name]) for a in shown))
        for name in VERSIONS
        if any(a.get(name) is not None for a in shown)
    ]
    first = len(facts.attempts) - len(shown)
    head = ("", *(f"attempt {first + i + 1}" for i in range(len(shown))))
    return table(head, rows, caption=f"{len(facts.attempts)} attempt(s); the newest are shown")


def _configuration(facts: RunFacts) -> Child:
    if not facts.config:
        return tag("p", "There is no config.yaml.", class_="none")
    written = [row for row in facts.config if row[2] != "default"]
    parts: list[Child] = []
    if written:
        parts.append(table(("key", "value", "from"), written, caption="Values that were set"))
    rest = [row for row in facts.config if row[2] == "default"]
    if rest:
        inner = table(("key", "value", "from"), rest, caption="Defaults")
        parts.append(tag("details", tag("summary", f"{len(rest)} defaults"), inner))
    return parts
