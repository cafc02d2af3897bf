"""The stability panel: readable by itself, and of the steps that matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from report_pages import FLAT, make_run, said, write_records

from megatron_patch.report import panel
from megatron_patch.stability import record


def test_the_page_says_what_its_figures_mean(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", losses=FLAT, telemetry=True)
    text = said(run)
    for definition in (
        "RMS(delta) / RMS_P(dP - delta)",  # kappa
        "1 / sqrt(rows): they err independently",  # coherence
        "from 0.1, once confirmed: danger",  # error over signal
        "from 0.005: watch",  # the coherent part
        "logits / that derivative",  # growth noise
        "largest scaled, masked logit",
        "entropy of a row of P in nats",
        "weight of the first token in P",
        "delta is the sum of dO x O over the features",
    ):
        assert definition in text, definition
    assert "docs/telemetry.md" in text and "docs/stability.md" not in text
    # Nothing is explained that is not drawn.
    assert "growth over the median head's" not in text
    write_records(tmp_path / "long", list(range(50, 2001, 50)), _one_head_grows)
    drawn = panel.build(record.read(tmp_path / "long"))
    assert "growth over the median head&#x27;s" in "".join(str(part) for part in drawn)


def _one_head_grows(step: int, scalars: dict[str, float], heads: dict[str, np.ndarray]) -> None:
    heads["wq_norm"][:] = 1
    heads["max_logit"][0, 0] = 200
    heads["wq_norm"][0, 0] = step
