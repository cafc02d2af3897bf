"""Schedules against their closed forms, update by update."""

import math
from typing import Any

import pytest
from run_config import run_config

from megatron_patch.training.schedule import build_schedule

pytestmark = pytest.mark.usefixtures("cpu")
STEPS, WARMUP, PEAK, LEAST = 20, 4, 1e-3, 1e-4


class Groups:
    """The part of an optimizer the scheduler touches."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]


def rates(**keys: Any) -> list[float]:
    """Learning rate of updates 1 .. STEPS."""
    base = {"lr": PEAK, "min_lr": LEAST, "warmup_steps": WARMUP, "weight_decay": 0.1}
    groups = Groups()
    schedule = build_schedule(run_config(optimizer=base | keys), groups)
    found = []
    for _ in range(STEPS):
        schedule.step(increment=1)
        found.append(groups.param_groups[0]["lr"])
    assert [g["weight_decay"] for g in groups.param_groups] == [0.1, 0.0]
    return found


def expected(shape: Any, start: int, end: int) -> list[float]:
    """Linear warm-up, then LEAST + shape(progress) (PEAK - LEAST) between start and end."""
    out = []
    for n in range(1, STEPS + 1):
        if n <= WARMUP:
            out.append(PEAK * n / WARMUP)
        else:
            share = min(max((n - start) / (end - start), 0.0), 1.0)
            out.append(LEAST + shape(share) * (PEAK - LEAST))
    return out


def cosine(x: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * x))


def test_cosine() -> None:
    assert rates(schedule="cosine") == pytest.approx(expected(cosine, WARMUP, STEPS))


def test_linear_with_early_end() -> None:
    found = rates(schedule="linear", decay_steps=12)
    assert found == pytest.approx(expected(lambda x: 1 - x, WARMUP, 12))
    assert found[11:] == [LEAST] * 9


def test_constant() -> None:
    assert rates(schedule="constant") == pytest.approx(expected(lambda x: 1.0, WARMUP, STEPS))


@pytest.mark.parametrize(
    ("style", "shape"),
    [
        ("linear", lambda x: 1 - x),
        ("cosine", cosine),
        ("exponential", lambda x: 2 * 0.5**x - 1),
        ("minus_sqrt", lambda x: 1 - math.sqrt(x)),
    ],
)
def test_wsd(style: str, shape: Any) -> None:
    found = rates(schedule="wsd", wsd_decay_steps=6, wsd_decay_style=style)
    assert found == pytest.approx(expected(shape, STEPS - 6, STEPS))
    assert found[WARMUP - 1 : STEPS - 6] == [PEAK] * (STEPS - 6 - WARMUP + 1)


def test_first_update_is_not_spent_at_zero_and_last_reaches_the_minimum() -> None:
    """Stepping the schedule after the update (Megatron-LM's order) gives 0 at update 1."""
    found = rates(schedule="cosine")
    assert found[0] == PEAK / WARMUP and found[-1] == pytest.approx(LEAST)


def test_resumed_schedule_continues() -> None:
    run = run_config(optimizer={"lr": PEAK, "warmup_steps": WARMUP})
    whole, part, rest = Groups(), Groups(), Groups()
    a, b, c = (build_schedule(run, g) for g in (whole, part, rest))
    for _ in range(7):
        b.step(increment=1)
    c.load_state_dict(b.state_dict())
    for _ in range(7):
        a.step(increment=1)
    assert rest.param_groups[0]["lr"] == whole.param_groups[0]["lr"]
    a.step(increment=1)
    c.step(increment=1)
    assert rest.param_groups[0]["lr"] == whole.param_groups[0]["lr"]


def test_configuration_wins_over_the_checkpoint() -> None:
    long = build_schedule(run_config(training={"train_steps": 40}), Groups())
    short = build_schedule(run_config(), Groups())
    short.step(increment=5)
    long.load_state_dict(short.state_dict())
    assert (long.lr_decay_steps, long.num_steps) == (40, 5)
