"""The stability panel: readable by itself, and of the steps that matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
from report_pages import FLAT, checked, make_run, said, write_records

from megatron_patch.report import report
from megatron_patch.report.collect import collect
from megatron_patch.stability import record


def test_the_page_says_what_its_figures_mean(tmp_path):
    run = make_run(tmp_path / "run", losses=FLAT, telemetry=True)
    text = said(run)
    for definition in (
        "RMS(delta) / RMS_P(dP - delta)",  # kappa
        "1 / sqrt(rows): they err independently",  # coherence
        "from 0.1: watch, once confirmed: danger, but not where",  # error over signal
        "from 0.005: watch",  # the coherent part
        "logits / that derivative",  # growth noise
        "largest scaled, masked logit",
        "that part over the head's largest logit, at most 1 in size",
        "entropy of a row of P in nats",
        "weight of the first token in P",
        "delta is the sum of dO x O over the features",
    ):
        assert definition in text, definition
    assert "what to do: docs/stability.md, What to do" in text
    assert "Attention: stable_flash, none." in text
    # Nothing is explained that is not drawn.
    assert "growth over the median head's" not in text
    long = make_run(tmp_path / "long", losses=FLAT)
    write_records(long, list(range(50, 2001, 50)), _one_head_grows)
    assert "growth over the median head's" in said(long)


def _one_head_grows(step: int, scalars: dict[str, float], heads: dict[str, np.ndarray]) -> None:
    heads["wq_norm"][:] = 1
    heads["max_logit"][0, 0] = 200
    heads["wq_norm"][0, 0] = step


def test_the_heads_of_the_first_danger_are_drawn_too(tmp_path):
    """Of random figures most are errors beyond any threshold."""
    run = make_run(tmp_path / "run", losses=FLAT, telemetry=True)
    found = record.read(run).verdicts()
    step = next(step for step, verdict in found if verdict.level == "danger")
    assert 10 < step < 300
    page = checked(report.render(collect(run)))
    text = " ".join(page.text)
    assert f"Heads at the first danger, step {step}" in text
    assert f"Largest attention logit, step {step}" in text
    assert "Heads in the last record, step 300" in text
    # Its figures are of that record, in words and in the table.
    index = [s for s, _ in found].index(step)
    values = record.read(run).heads["max_logit"][index]
    layer, head = np.unravel_index(values.argmax(), values.shape)
    said_of = [v for _, k, v in page.attributes if k == "alt" and f"step {step}: " in v]
    assert f"largest is at layer {layer}, head {head}" in said_of[0]
    first = text.partition("Heads at the first danger")[2].partition("Heads in the last")[0]
    assert f"{layer}, {head}" in first and f"{values.max():.4g}" in first
    assert f"How much of the largest logit all keys share, step {step}" in first


@pytest.mark.parametrize(("dangers", "watches", "heading"), [
    ([], [500, 700], "Heads at the first watch, step 500"),
    ([600], [500, 700], "Heads at the first danger, step 600"),
    ([1000], [], None),  # the last record itself
    ([], [], None),
])  # fmt: skip
def test_whose_heads_are_drawn(tmp_path, dangers, watches, heading):
    def change(step: int, scalars: dict[str, float], heads: dict[str, np.ndarray]) -> None:
        scalars["loss_mean"] = math.nan if step in dangers else 3.0
        heads["max_logit"][0, 0] = 2000 if step in watches else 1

    run = make_run(tmp_path / "run", losses=FLAT)
    write_records(run, list(range(50, 1001, 50)), change)
    text = said(run)
    assert "Heads in the last record, step 1,000" in text
    assert text.count("Heads at the first") == (heading is not None)
    assert heading is None or heading in text
