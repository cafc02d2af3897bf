"""When a run counts as exploded: on the curves of known runs, and on awkward ones."""

from __future__ import annotations

import math

import results
import telemetry_records
from protocol import ExplosionConfig
from verdict import judge

from megatron_patch.stability.names import HEAD_METRICS

RULE = ExplosionConfig(window=50, from_step=2000, grad_norm=1.0, loss=4.5)


def rows(points: dict[int, tuple[float, float]], last: int) -> list[dict[str, float]]:
    """One row a step; the figures of ``points`` hold from their step on."""
    found, now = [], (9.0, 5.0)
    for step in range(1, last + 1):
        now = points.get(step, now)
        found.append({"step": float(step), "loss": now[0], "grad_norm": now[1]})
    return found


def test_a_stable_run():
    verdict = judge(rows({1: (9, 5), 1000: (4.4, 0.4), 2001: (3.5, 0.3)}, 5000), RULE)
    assert verdict.exploded_at is None and verdict.first_large_gradient is None
    assert verdict.steps == 5000 and verdict.final_loss == 3.5
    assert verdict.largest_grad_norm == verdict.largest_single_grad_norm == 0.4


def test_an_explosion_is_named_by_the_window_it_shows_in():
    curve = {1: (9, 5), 1000: (3.5, 0.3), 4001: (3.5, 1.2), 5201: (7.0, 1e5)}
    verdict = judge(rows(curve, 6000), RULE)
    assert verdict.first_large_gradient == 4050 and verdict.exploded_at == 5250


def test_large_figures_of_the_start_do_not_count():
    """Neither a loss that never was below the limit, nor gradients of the warm-up."""
    assert judge(rows({1: (9, 5)}, 1900), RULE).exploded_at is None
    verdict = judge(rows({1: (9, 5)}, 4000), RULE)
    assert verdict.exploded_at is None and verdict.first_large_gradient == 2000
    spike = rows({1: (9, 5), 500: (4.0, 0.4), 900: (6.0, 3), 950: (4.0, 0.4)}, 3000)
    assert judge(spike, RULE).exploded_at is None


def test_one_bad_step_is_not_an_explosion_but_is_seen():
    curve = {1: (4.0, 0.3), 3001: (20.0, 40.0), 3002: (4.0, 0.3)}
    verdict = judge(rows(curve, 4000), RULE)
    assert verdict.exploded_at is None and verdict.first_large_gradient == 3050
    assert verdict.largest_single_grad_norm == 40.0
    assert judge(rows({1: (4.0, 0.3), 3001: (60.0, 1.0), 3002: (4.0, 0.3)}, 4000), RULE).exploded_at


def test_not_a_number_is_an_explosion():
    verdict = judge(rows({1: (4.0, 0.3), 2501: (math.nan, math.nan)}, 2600), RULE)
    assert verdict.exploded_at == verdict.first_large_gradient == 2550
    assert math.isnan(verdict.largest_grad_norm or 0)


def test_a_window_that_is_not_over_is_no_verdict():
    """A run that is looked at, or cut off, two steps into a window: a spike is no mean."""
    rule = ExplosionConfig(window=50, from_step=50, grad_norm=1.0, loss=4.5)
    rows = [{"step": float(i), "loss": 3.0, "grad_norm": 0.3} for i in range(1, 101)]
    rows += [{"step": 101.0, "loss": 6.0, "grad_norm": 40.0}]
    found = judge(rows, rule)
    assert found.first_large_gradient is None and found.exploded_at is None
    rows += [{"step": float(i), "loss": 3.0, "grad_norm": 0.3} for i in range(102, 151)]
    assert judge(rows, rule).first_large_gradient == 150
    ended = [*rows[:100], {"step": 101.0, "loss": float("nan"), "grad_norm": 1.0}]
    assert judge(ended, rule).exploded_at == 101


def test_runs_that_were_not_made_alike_are_named():
    made: dict = {name: ["1"] for name in results.MADE_WITH}
    runs: list[dict] = [made | {"run": f"a-s{n}", "seed": n, "data": f"{n}"} for n in (1, 2)]
    assert results.unlike(runs) == []
    runs.append(made | {"run": "b-s1", "seed": 1, "data": "9", "torch": ["1", "2"]})
    assert results.unlike(runs) == [
        "torch: 1 (a-s1, a-s2, b-s1); 2 (b-s1)",
        "data: runs of seed 1 were not trained on the same batches",
    ]


def test_final_losses_are_of_runs_that_came_to_their_last_step():
    """Not of those that ended around an event of their own, nor of what continues them."""
    run = {"cell": "a", "state": "finished", "reason": "", "origin": None}
    runs = [run | {"final_loss": 3.0}, run | {"final_loss": 3.5}]
    runs += [run | {"final_loss": 7.0, "reason": "100 steps after the event"}]
    runs += [run | {"final_loss": 7.0, "origin": {"step": 5}}, run | {"final_loss": "nan"}]
    assert results.seed_spread(runs).endswith("| a | 2 | 3.2500 | 0.5000 |")
    assert results.seed_spread(runs[2:]) == ""


def test_instruments_of_a_run_stand_beside_its_figures(tmp_path):
    assert results._instruments(tmp_path) == dict.fromkeys(
        ("switched_at", "largest_logit", "warned_at")
    )
    writer = telemetry_records.write(tmp_path, [10, 20])
    telemetry_records.add(writer, 30, value=7e4)
    telemetry_records.add(writer, 40)
    writer.close()
    found, first = results._instruments(tmp_path), list(HEAD_METRICS).index("max_logit")
    assert found["largest_logit"] == {"peak": [30, 70030 + first], "last": [40, 40 + first]}
    assert found["switched_at"] is None
    (level, step), *_ = found["warned_at"].items()
    assert level != "ok" and step <= 40
