"""Schedules against their closed forms, update by update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from run_config import run_config

from megatron_patch.training.schedule import Schedule, build_schedule, go_on

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


def test_cosine():
    assert rates(schedule="cosine") == pytest.approx(expected(cosine, WARMUP, STEPS))


def test_linear_with_early_end():
    found = rates(schedule="linear", decay_steps=12)
    assert found == pytest.approx(expected(lambda x: 1 - x, WARMUP, 12))
    assert found[11:] == [LEAST] * 9


def test_constant():
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
def test_wsd(style, shape):
    found = rates(schedule="wsd", wsd_decay_steps=6, wsd_decay_style=style)
    assert found == pytest.approx(expected(shape, STEPS - 6, STEPS))
    assert found[WARMUP - 1 : STEPS - 6] == [PEAK] * (STEPS - 6 - WARMUP + 1)


def test_first_update_is_not_spent_at_zero_and_last_reaches_the_minimum():
    """Stepping the schedule after the update (Megatron-LM's order) gives 0 at update 1."""
    found = rates(schedule="cosine")
    assert found[0] == PEAK / WARMUP and found[-1] == pytest.approx(LEAST)


def test_resumed_schedule_continues():
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


# ------------------------------------------------------------------- a run that goes on


class Attempt:
    """One attempt of a run: what it says, and the rates of its steps, by Megatron-Core."""

    def __init__(
        self, until: int, steps: int, *, before: Attempt | None = None, **optimizer: Any
    ) -> None:
        base = {"lr": PEAK, "min_lr": LEAST, "warmup_steps": 2} | optimizer
        run = run_config(optimizer=base, training={"train_steps": steps})
        self.rates = {} if before is None else dict(before.rates)
        self.problems: list[Any] = []
        self.lines: list[str] = []
        groups = Groups()
        scheduler = build_schedule(run, groups)
        if before is not None:
            step = before.content["step"]
            steps = {"num_steps": step - run.optimizer.begin_step}  # as the checkpointer counts
            scheduler.load_state_dict(dict(before.content["schedule"]) | steps)
            self.problems, self.lines = go_on(run, scheduler, before.content, step=step)
            if self.problems:
                return
        for step in range((0 if before is None else before.content["step"]) + 1, until + 1):
            scheduler.step(increment=1)
            self.rates[step] = groups.param_groups[0]["lr"]
        names = ("wsd_decay_steps", "wsd_decay_style", "begin_step")
        written = {name: getattr(run.optimizer, name) for name in names}
        self.content = {
            "step": until,
            "schedule": scheduler.state_dict(),
            "config": yaml.safe_dump({"optimizer": written}),
        }


STYLES: list[dict[str, Any]] = [
    {"schedule": "cosine"},
    {"schedule": "linear"},
    {"schedule": "linear", "decay_steps": 15},
    {"schedule": "constant"},
    *({"schedule": "wsd", "wsd_decay_steps": 6, "wsd_decay_style": style}
      for style in ("linear", "cosine", "exponential", "minus_sqrt")),
]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("stop", [1, 10, 20])
def test_a_longer_run_goes_on_with_the_schedule_it_began_with(style, stop):
    """Bit for bit, and at the end of the decay it stays there, which is said."""
    whole = Attempt(20, 20, **style)
    same = Attempt(20, 20, before=Attempt(stop, 20, **style), **style)
    assert same.rates == whole.rates and same.lines == []
    longer = Attempt(50, 100, before=Attempt(stop, 20, **style), **style)
    assert {step: longer.rates[step] for step in whole.rates} == whole.rates
    last = PEAK if style["schedule"] == "constant" else LEAST
    assert {longer.rates[step] for step in range(21, 51)} == {last}
    if style["schedule"] == "constant" or "decay_steps" in style:
        assert longer.lines == []
        return
    (line,) = longer.lines
    assert line.startswith("warning: training.train_steps is 100, and the schedule")
    assert f"ends its decay at step 20: the learning rate stays {LEAST:.4g} from step 20 on" in line
    assert "optimizer.schedule_from: now" in line and "optimizer.decay_steps: 20" in line
    again = Attempt(60, 100, before=longer, **style)  # and resumed again
    assert again.rates[60] == LEAST and len(again.lines) == 1
    held = Attempt(60, 100, before=longer, **style | {"decay_steps": 20})
    assert held.rates == again.rates and held.lines == []


@pytest.mark.parametrize("style", STYLES)
def test_now_is_said_and_is_the_same_however_often_a_run_resumes(style):
    """The case of the issue (20 -> 100 at step 10, cosine), and others."""
    began = Attempt(10, 20, **style)
    now = style | {"schedule_from": "now"}
    once = Attempt(40, 100, before=began, **now)
    assert once.rates == began.rates | {
        step: rate for step, rate in Attempt(40, 100, **style).rates.items() if step > 10
    }
    middle = Attempt(25, 100, before=began, **now)
    assert Attempt(40, 100, before=middle, **now).rates == once.rates
    assert Attempt(40, 100, before=middle, **now).lines == []
    assert Attempt(40, 100, before=middle, **style).rates == once.rates  # the checkpoint carries it
    if style["schedule"] == "constant" or "decay_steps" in style:
        assert once.lines == []
        return
    old, new = (
        Schedule.of(
            run_config(
                optimizer={"lr": PEAK, "min_lr": LEAST, "warmup_steps": 2} | style,
                training={"train_steps": n},
            )
        ).rate(11)
        for n in (20, 100)
    )
    assert once.lines == [
        f"learning rate of step 11: {old:.4g} -> {new:.4g}; at the end {LEAST:.4g} from step 20 -> "
        f"{LEAST:.4g} from step 100"
    ]
    assert once.rates[11] == new


def test_wsd_after_its_end_stays_until_it_is_asked_to_go_on():
    """20 -> 40 after the end: 2e-4 went back to 2e-3 in one step, and nothing said so."""
    wsd: dict[str, Any] = {"schedule": "wsd", "wsd_decay_steps": 5, "lr": 2e-3, "min_lr": 2e-4}
    ended = Attempt(20, 20, **wsd)
    longer = Attempt(40, 40, before=ended, **wsd)
    assert {longer.rates[step] for step in range(20, 41)} == {2e-4}
    assert "(learning rate of step 21: 0.0002 -> 0.002)" in longer.lines[0]
    asked = Attempt(40, 40, before=ended, **wsd, schedule_from="now")
    assert asked.rates[21] == 2e-3 and asked.rates[40] == pytest.approx(2e-4)
    assert asked.lines == ["learning rate of step 21: 0.0002 -> 0.002; at the end 0.0002 from step "
                           "20 -> 0.0002 from step 40"]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"decay_steps": 100}, "decay_steps"),
        ({"decay_steps": 19}, "decay_steps"),
        ({"warmup_steps": 3}, "warmup_steps"),
        ({"schedule": "linear", "wsd_decay_steps": None}, "schedule"),
        ({"wsd_decay_steps": 7}, "wsd_decay_steps"),
        ({"wsd_decay_style": "linear"}, "wsd_decay_style"),
    ],
)
def test_another_schedule_is_refused_with_its_rates_and_the_remedy(changed, key):
    wsd: dict[str, Any] = {"schedule": "wsd", "wsd_decay_steps": 6}
    began = Attempt(16, 20, **wsd)
    (problem,) = Attempt(30, 100, before=began, **wsd | changed).problems
    assert problem.path == f"optimizer.{key}"
    old, new = began_with(wsd, key), (wsd | changed)[key]
    assert f"{new}, but the schedule that this run goes on with has {old}" in problem.message
    assert "optimizer.schedule_from: now (learning rate of step 17: " in problem.message
    asked = Attempt(30, 100, before=began, **wsd | changed, schedule_from="now")
    assert not asked.problems and asked.lines


def began_with(style: dict[str, Any], key: str) -> Any:
    return {"decay_steps": 20, "warmup_steps": 2, "wsd_decay_style": "minus_sqrt"}.get(
        key, style.get(key)
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("stop", [0, 2, 15])
def test_a_kept_counter_warms_up_again(style, stop):
    """From step 20 on as a new run from step 0, however often it resumes."""
    style = style | {"decay_steps": 40}
    again = style | {"warmup_steps": 4, "begin_step": 20, "schedule_from": "now"}
    again["decay_steps"] = 60
    began = Attempt(20, 20, **style)
    (problem,) = Attempt(60, 60, before=began, **style | {"begin_step": 20}).problems
    assert problem.path == "optimizer.begin_step"
    stopped = Attempt(20 + stop, 60, before=began, **again)
    found = Attempt(60, 60, before=stopped, **again)
    fresh = Attempt(40, 40, **style | {"warmup_steps": 4})
    assert found.rates == began.rates | {20 + step: rate for step, rate in fresh.rates.items()}
    kept = Attempt(60, 60, before=stopped, **again | {"schedule_from": "start"})
    assert kept.rates == found.rates and kept.lines == []


def test_a_rate_that_rescues_a_run_is_changed_at_once_and_said():
    began = Attempt(10, 20)
    lower = Attempt(20, 20, before=began, lr=PEAK / 2, min_lr=LEAST / 2)
    assert lower.rates[11] == pytest.approx(began.rates[10] / 2, rel=0.2)
    assert lower.rates[20] == LEAST / 2
    assert lower.lines == ["learning rate of step 11: 0.00055 -> 0.000275; at the end 0.0001 from "
                           "step 20 -> 5e-05 from step 20"]  # fmt: skip
    assert Attempt(20, 20, before=Attempt(15, 20, before=began, lr=PEAK / 2, min_lr=LEAST / 2),
                   lr=PEAK / 2, min_lr=LEAST / 2).rates == lower.rates  # fmt: skip


def test_a_shorter_run_ends_before_its_decay_and_is_told():
    shorter = Attempt(12, 12, before=Attempt(10, 20))
    assert shorter.rates == Attempt(12, 20).rates
    (line,) = shorter.lines
    assert f"the learning rate is {shorter.rates[12]:.4g} when the run ends" in line


def test_checkpoints_without_a_configuration_have_a_schedule():
    """Of a caller that gave none, as those of some tests: the two missing values are this run's."""
    began = Attempt(10, 20, schedule="wsd", wsd_decay_steps=6)
    began.content["config"] = ""
    assert Attempt(20, 20, before=began, schedule="wsd", wsd_decay_steps=6).lines == []


def test_a_run_from_another_s_checkpoint_follows_its_own_schedule():
    parent = Attempt(10, 20)
    run = run_config(optimizer={"lr": 2e-3}, training={"train_steps": 40})
    before = Schedule.saved(parent.content, run).rate(11)
    after = Schedule.of(run).rate(11)
    assert before == Attempt(11, 20).rates[11]
    assert after == Attempt(11, 40, lr=2e-3, min_lr=0.0, warmup_steps=0).rates[11]
