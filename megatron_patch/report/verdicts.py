"""Short answers at the top of the page: what went well, what did not, in figures of the run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_patch.report.charts import number
from megatron_patch.report.collect import RunFacts

RISE = 0.5
"""nats above the lowest loss before, from which a loss has risen."""
WINDOW = 50
GOOD, FAIR, BAD, NONE = "good", "watch", "bad", "none"
_STATES = {
    "finished": GOOD,
    "running": GOOD,
    "stopped": FAIR,
    "interrupted": FAIR,
    "guarded": BAD,  # in danger, and the same command would stop again
    "failed": BAD,
    "non-finite": BAD,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One line: a question, a grade that color and word both show, and the answer."""

    question: str
    grade: str
    text: str


def answers(facts: RunFacts) -> Iterator[Answer]:
    """Everything that can be said from the files of the run."""
    yield Answer("State", _STATES[facts.state], facts.why)
    yield from _loss(facts)
    yield from _gradients(facts)
    yield from _counts(facts)
    yield from _warning(facts)
    yield from _speed(facts)


def windows(steps: list[float], values: list[float]) -> list[tuple[float, float]]:
    """(last step, mean) of windows of ``WINDOW`` steps; NaN where a value in it is NaN."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for step, value in zip(steps, values, strict=True):
        groups.setdefault(int((step - 1) // WINDOW), []).append((step, value))
    return [
        (group[-1][0], sum(v for _, v in group) / len(group)) for _, group in sorted(groups.items())
    ]


def _loss(facts: RunFacts) -> Iterator[Answer]:
    found = windows(facts.steps, facts.column("loss"))
    if facts.state == "non-finite":
        # The step that ended the run was never recorded: the rows before it say nothing of it.
        before = f"; {found[-1][1]:.4f} before" if found else ""
        yield Answer("Loss", BAD, f"{facts.why}{before}")
    elif found:
        yield _trend(facts, found)
    else:
        yield Answer("Loss", NONE, "nothing was recorded yet")
    evaluated = [v for v in facts.column("eval_loss") if math.isfinite(v)]
    if len(evaluated) == 1:
        yield Answer("Validation loss", NONE, f"{evaluated[0]:.4f}, evaluated once")
    elif evaluated:
        grade = GOOD if evaluated[-1] <= min(evaluated) + RISE else BAD
        yield Answer("Validation loss", grade, f"{evaluated[-1]:.4f}, lowest {min(evaluated):.4f}")


def _trend(facts: RunFacts, found: list[tuple[float, float]]) -> Answer:
    """The answer about the recorded losses, of which there are some; ``found``: their windows."""
    for step, value in zip(facts.steps, facts.column("loss"), strict=True):
        if not math.isfinite(value):
            return Answer("Loss", BAD, f"not finite at step {step:,.0f}")
    last = found[-1][1]
    lowest = worst = found[0][1]
    at = rise = 0.0
    for step, value in found:
        if value - lowest > rise:
            rise, at, worst = value - lowest, step, value
        lowest = min(lowest, value)
    if rise <= RISE:
        return Answer(
            "Loss", GOOD, f"{last:.4f} at the end; never more than {rise:.2f} above its lowest"
        )
    back = last <= lowest + RISE
    text = f"rose by {rise:.2f} above the lowest before it, to {worst:.2f} around step {at:,.0f}"
    text += f"; it came back, to {last:.4f}" if back else f"; it ended at {last:.4f}"
    return Answer("Loss", FAIR if back else BAD, text)


def _gradients(facts: RunFacts) -> Iterator[Answer]:
    try:
        warmup = float(facts.value("optimizer.warmup_steps", "0"))
    except ValueError:
        warmup = 0.0
    late = [w for w in windows(facts.steps, facts.column("grad_norm")) if w[0] > warmup]
    values = [v for _, v in late if math.isfinite(v)]
    if not values:
        yield Answer("Gradient norm", NONE, "nothing was recorded after the warm-up")
        return
    usual = statistics.median(values)
    step, largest = max(((s, v) for s, v in late if math.isfinite(v)), key=lambda w: w[1])
    grade = GOOD if largest < 5 * usual else FAIR if largest < 50 * usual else BAD
    yield Answer(
        "Gradient norm",
        grade,
        f"median {number(usual)} after the warm-up, largest mean of {WINDOW} steps "
        f"{number(largest)} around step {step:,.0f}",
    )


def _counts(facts: RunFacts) -> Iterator[Answer]:
    for name, question in (("nonfinite", "Steps not finite"), ("skipped", "Updates skipped")):
        values = [v for v in facts.column(name) if math.isfinite(v)]
        if name == "nonfinite" and facts.state == "non-finite":
            # The step that ended the run is in no row.
            count = max(values, default=0) + 1
            yield Answer(question, BAD, f"{count:.0f}, the last one ended the run: {facts.why}")
        elif values:
            yield Answer(question, GOOD if max(values) == 0 else BAD, f"{max(values):.0f}")


def _warning(facts: RunFacts) -> Iterator[Answer]:
    if facts.telemetry is None:
        yield Answer("Early warning", NONE, facts.telemetry_problem)
        return
    found = facts.telemetry.verdicts()
    step, last = found[-1]
    grade = (GOOD, FAIR, BAD)[last.code]
    text = f"{last.level} at step {step:,}: {last.reason}"
    first = next(((s, v) for s, v in found if v.level == "danger"), None)
    if first is not None:
        text += f"; first danger at step {first[0]:,}: {first[1].reason}"
        text += "; what to do: docs/stability.md, advice"
        grade = BAD if last.code == 2 else FAIR
    switched = facts.telemetry.switched_at
    if switched is not None:
        text += f"; the guard switched the stabilizer after step {switched:,}"
    yield Answer("Early warning", grade, text)


def _speed(facts: RunFacts) -> Iterator[Answer]:
    rates = [v for v in facts.column("tokens_per_s") if math.isfinite(v)]
    if not rates:
        return
    text = f"median {statistics.median(rates):,.0f} tokens/s"
    mfu = [v for v in facts.column("mfu") if math.isfinite(v)]
    if mfu:
        text += f", MFU {100 * statistics.median(mfu):.1f} %"
    memory = [v for v in facts.column("memory_gib") if math.isfinite(v)]
    if memory:
        text += f", up to {max(memory):.1f} GiB"
    yield Answer("Speed", GOOD, text)
