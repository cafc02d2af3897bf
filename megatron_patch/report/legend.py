"""What the figures of the stability panel mean: the page is read where the docs are not."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from megatron_patch.report.charts import number
from megatron_patch.report.markup import Child, table, tag

if TYPE_CHECKING:
    from megatron_patch.stability.warning import Rule

DELTA = (
    "For every query row the backward pass of attention subtracts one number: "
    "dS = P (dP - delta), where P are the attention weights and delta is the sum of dO x O over "
    "the features. What O loses in 16 bits is an error of delta. The figures are of single heads, "
    "over query rows that were sampled in the step of the record. More about them: "
    "docs/telemetry.md; about the mechanism: docs/numerics.md."
)


Row = tuple[set[str], str, str, str]
"""(names, figure, meaning, when to worry), as docs/telemetry.md has them."""

ERRORS: tuple[Row, ...] = (
    (
        {"max_logit"},
        "largest logit",
        "largest scaled, masked logit; of all rows, not of the sampled ones alone",
        "it grows for thousands of steps; how sharp attention is, the entropy tells: what all keys "
        "share makes logits and no attention",
    ),
    (
        {"common_logit"},
        "part of the logits that all keys share",
        "scaled q . mean of K over the sequence, mean over rows; a softmax without sink logits "
        "does not see it, and the loss has no derivative by it",
        "it grows, to either side: it is most of a logit that runs away",
    ),
    (
        {"common_share"},
        "how much of the largest logit all keys share",
        "that part over the head's largest logit, at most 1 in size",
        "above 0.5 in single heads whose logits are small, without QK-norm: in one run those ran "
        "away, 1,300 steps later and more; in two with it none did",
    ),
    (
        {"delta_error_rms"},
        "RMS error of delta",
        "RMS(e) / RMS(delta); e: what a plain 16-bit O gets wrong in delta, whatever the run "
        "builds its delta from",
        "see error over signal",
    ),
    (
        {"coherence"},
        "coherence",
        "size of the mean of e / RMS(e). 1: all rows of a head err alike, and nothing averages "
        "out; 1 / sqrt(rows): they err independently",
        "see coherent part over signal",
    ),
    (
        {"kappa"},
        "kappa",
        "RMS(delta) / RMS_P(dP - delta), the RMS weighted by P: by how much a relative error of "
        "delta is amplified",
        "above 10; a saturated sink has about 200",
    ),
)
HEADS: tuple[Row, ...] = (
    (
        {"growth_noise"},
        "noise in the growth of the logits",
        "what the error of the delta in use adds to the derivative by a factor on the head's "
        "logits / that derivative; both in RMS over rows",
        "near 1: the error decides whether the logits grow; not judged by the early warning",
    ),
    (
        {"entropy"},
        "entropy",
        "entropy of a row of P in nats, mean over rows",
        "it collapses to 0 in many heads",
    ),
    (
        {"first_token_mass"},
        "attention on the first token",
        "weight of the first token in P, mean over rows: the mass of the usual sink",
        "not by itself, sinks are normal; with a high kappa they are where plain kernels fail",
    ),
    (
        {"wq_norm", "wk_norm"},
        "spectral norms",
        "largest singular values of the head's parts of W_Q and W_K, by power iteration, from "
        "below",
        "one head leaves the others behind",
    ),
)


def build(rule: Rule, measured: Collection[str]) -> list[Child]:
    """Definitions of the figures that are on the page.

    Args:
        rule: of the run; the thresholds that its early warning goes by.
        measured: names of what is drawn, as in `panel`.
    """
    judged, growth = _judged(rule)
    known = (*ERRORS, *judged, *HEADS, growth)
    rows = [row for names, *row in known if not names.isdisjoint(measured)]
    head = ("figure", "meaning", "worry when")
    return [table(head, rows, caption="What the figures mean"), tag("p", DELTA)]


def _judged(rule: Rule) -> tuple[list[Row], Row]:
    """What the rule has thresholds for: errors over their signal; growth of heads."""
    limit = rule.danger_error
    never = "never by itself, by the rule of this run"
    confirmed = "once confirmed: danger"
    errors: list[Row] = [
        (
            {"error_to_signal"},
            "error over signal",
            "RMS of the error of the delta in use / RMS(delta), x kappa: that error over the "
            "signal RMS_P(dP - delta), which it disturbs",
            never
            if limit is None
            else f"from {number(limit)}: watch, {confirmed}, but not where the numerics are "
            "compensated",
        ),
        (
            {"bias_to_signal"},
            "coherent part over signal",
            "the same with the size of the mean of that error in place of its RMS",
            f"from {number(rule.head_signal)}: watch",
        ),
    ]
    growth = (
        {"head_growth"},
        "growth over the median head's",
        f"of W_Q or W_K in {rule.head_steps:,} steps; heads with logits from "
        f"{number(rule.head_logit)} count",
        f"from {number(rule.watch_head_growth)}: watch; from "
        f"{number(rule.danger_head_growth)}, {confirmed}",
    )
    return errors, growth
