"""Tables of docs/ on heads in runs that continue another one with one thing changed, on what two of
those changes do to captured heads, and on the part of their logits that all keys share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from table_text import kept_from, origin, table, three_digits

AFTER = ("0", "250", "500", "750", "end")
HEAD = ("run", "from step", "head", "largest logit there", "+250", "+500", "+750", "at its end")


def rendered(result: dict[str, Any]) -> str:
    """A line a run and head; the verdicts are of the run, by the rule of the script."""
    rows = []
    every = [head for run in result["runs"].values() for head in run["heads"]]
    shared = any(part is not None for head in every for part in head.get("common", ()))
    in_order = sorted(result["runs"].items(), key=lambda run: (run[1]["seed"], run[1]["place"]))
    for name, run in in_order:
        for i, head in enumerate(run["heads"]):
            first = [name, f"{run['from_step']:,}"] if i == 0 else ["", ""]
            row = [*first, f"{head['layer']}.{head['head']}"]
            row += [three_digits(head["logit"].get(step)) for step in AFTER]
            counts = "" if head["verdict"] or head["growth"] is None else " (does not count)"
            row += [_times(head["growth"]) + counts, _times(head["control"])]
            row += [three_digits(head[key]) for key in ("growth_noise", "error_to_signal")]
            row.append(" to ".join(map(three_digits, head["wq_norm"])))
            row += [_from_to(head.get("common", []))] if shared else []
            row += _of_run(run) if i == 0 else ["", ""]
            rows.append(row)
    head = [*HEAD, "grew", "under `control`", "noise", "error", "W_Q"]
    head += ["common part", "gradient norm > 1"] if shared else ["gradient norm > 1"]
    where = (
        "Heads as layer.head, of the base: the first with logits above 1,000. Grew: to the last "
    )
    where += (
        "record before the event that the run and its control both have, by which it is judged. "
    )
    where += "Noise and error (of delta, over its signal): medians until there. "
    where += "Common part: of a row's logits, what all keys share." if shared else ""
    where += kept_from(in_order, "Read")
    return "\n".join([f"{origin(result)} {where}", "", table([*head, "verdict"], rows)])


def centered(result: dict[str, Any]) -> str:
    """A line a captured head: what centering K or V leaves of its logits and of its noise."""
    rows = []
    before = ""
    for one in sorted(result["heads"], key=lambda h: (h["run"], h["step"], h["layer"], h["head"])):
        place = f"{one['run']}, {one['step']:,}"
        row = [place if place != before else "", f"{one['layer']}.{one['head']}"]
        before = place
        row += [f"{100 * one['share']:.1f} %"]
        row += [three_digits(one[key]) for key in ("largest_logit", "common", "largest_centered")]
        row += [three_digits(one[f"noise{kind}"]) for kind in ("", "_k_centered", "_v_centered")]
        rows.append([*row, f"{one['moved']:.1g}"])
    where = "Heads as layer.head; noise by emulated plain numerics, - : no derivative left. Moved: "
    where += "logits, by rounding the centered K (RMS under P)."
    captures = {f"{one['run']}, {one['step']:,}": one for one in result["heads"]}
    where += kept_from([*captures.items()], "Computed")
    head = ["captured in, at step", "head", "one vector's share of K", "largest logit"]
    head += ["common part", "largest, K centered", "noise", "noise, K centered"]
    head += ["noise, V centered", "moved"]
    return "\n".join([f"{origin(result)} {where}", "", table(head, rows)])


def common_part(result: dict[str, Any]) -> str:
    """A line a run: the heads that go, the highest share elsewhere, and whom shares name first."""
    rows = []
    # Of an earlier result kept beside, only what the others have too.
    shares = sorted(set.intersection(*(set(run["named"]) for run in result["runs"].values())))
    for name, run in result["runs"].items():
        end = run["first_gone"] or run["until"]
        row = [name, f"{end:,}{'' if run['first_gone'] else ' (its end)'}"]
        went = (
            f"{_place(h)}: {h['share']:.2f} at {h['above_100']:,}, above 1,000 at "
            f"{h['above_1000']:,}"
            for h in run["went"]
        )
        row.append("; ".join(went) or "none")
        for where in ("same_layers", "other_layers"):
            head = run["others"][where]
            row.append(f"{head['share']:.2f}, {_place(head)}" if head else "-")
        for limit in shares:
            named = (
                f"{_place(h)} at {h['step']:,} ({h['largest_logit']:,.0f})"
                for h in run["named"][limit]
            )
            row.append(", ".join(named) or "none")
        rows.append(row)
    head = ["run", "until step", "heads that go: share at logits of 100"]
    head += ["highest share, other heads of the layer", "of other layers"]
    head += [f"first above {limit} (largest logit)" for limit in shares]
    where = "Heads as layer.head. Highest share: before the first head is above 1,000, of records "
    where += "with logits of 20 or more. First above: the median of five records, with logits of 5 "
    where += "or more, from step 1,000 on."
    where += kept_from([*result["runs"].items()], "Read")
    return "\n".join([f"{origin(result)} {where}", "", table(head, rows)])


def saturated(result: dict[str, Any]) -> str:
    """A line a run and step: the heads that have run away, and what is left of the run."""
    rows = []
    for name, run in result["runs"].items():
        for i, (step, at) in enumerate(sorted(run["at"].items(), key=_number)):
            row = [name if i == 0 else "", f"{int(step):,}", str(at["heads"])]
            layers = sorted(at["by_layer"].items(), key=_number)  # JSON's keys are words, in order
            row.append(", ".join(f"{layer}: {n}" for layer, n in layers) or "-")
            row += [three_digits(at[key]) for key in ("largest_logit", "largest_wq_norm")]
            row += [three_digits(at[f"median_{key}"]) for key in ("wq_norm", "entropy")]
            row.append(three_digits(at.get("median_common_share")))
            worst = at.get("largest_layer_grad_norm")
            row.append(
                "-" if worst is None else f"{three_digits(worst)}, layer {at['largest_layer']}"
            )
            row.append(three_digits(at.get("median_layer_grad_norm")))
            rows.append([*row, three_digits(at["loss_mean"]), three_digits(at["grad_norm_mean"])])
    head = ["run", "step", f"heads with logits above {result['above']:,.0f}", "by layer"]
    head += ["largest logit", "largest W_Q", "median W_Q", "median entropy", "common share"]
    where = "Layers counted from 0; W_Q: spectral norm; entropy of a row of P, nats; W_Q, entropy "
    where += "and share (of the largest logit, what all keys have in common) of those heads. "
    where += "Gradient norms of layers: of that step; loss and the model's gradient norm: means "
    where += "since the record before."
    where += kept_from([*result["runs"].items()], "Read")
    head += ["largest gradient norm of a layer", "median", "loss", "gradient norm"]
    return "\n".join([f"{origin(result)} {where}", "", table(head, rows)])


def _number(item: tuple[str, Any]) -> int:
    return int(item[0])


def _place(head: dict[str, Any]) -> str:
    return f"{head['layer']}.{head['head']}"


def _of_run(run: dict[str, Any]) -> list[str]:
    """Gradient norm and verdict."""
    above = run["first_large_gradient"]
    told = f"not by {run['until']:,}" if above is None else f"{above:,}"
    return [told, run["verdict"]]


def _from_to(values: Sequence[float | None]) -> str:
    """Earlier versions did not measure it."""
    told = [three_digits(value) for value in values if value is not None]
    return " to ".join(told) or "-"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{three_digits(value)}x"
