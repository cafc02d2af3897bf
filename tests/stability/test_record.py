"""What records say: points, growth of heads, and verdicts over resumes, switches and other runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from telemetry_records import EVERY, H, L, meta, write

from megatron_patch.stability import history, names, record
from megatron_patch.stability.look_back import history_from_parent
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import NOWHERE, Rule, Spot, judge
from megatron_patch.stability.writer import Writer

SCALARS = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.5}
QUIET = np.zeros((L, H), np.float32)


def norms(q: float = 1.0, k: float = 1.0, odd: float = 1.0) -> dict[str, np.ndarray]:
    """Spectral norms of all heads, W_K of layer 2 head 1 ``odd`` times as large."""
    wk = np.full((L, H), k, np.float32)
    wk[2, 1] *= odd
    return {
        "used_error_mean": QUIET,
        "used_error_rms": QUIET,
        "kappa": QUIET,
        "max_logit": np.full((L, H), 150.0, np.float32),
        "wq_norm": np.full((L, H), q, np.float32),
        "wk_norm": wk,
    }


def test_points_name_the_worst_head():
    mean, kappa = np.full((L, H), 1e-3, np.float32), np.full((L, H), 5, np.float32)
    mean[1, 2], kappa[1, 2] = -2e-3, 100
    kappa[2, 3] = np.nan
    rms, logits = np.abs(mean), np.full((L, H), 50, np.float32)
    rms[0, 1], logits[2, 0] = 0.1, 4000
    heads_ = {"used_error_mean": mean, "used_error_rms": rms, "kappa": kappa, "max_logit": logits}
    point = history.History(Rule()).add(step=10, scalars=SCALARS, heads=heads_)
    assert (point.bias.layer, point.bias.head) == (1, 2)
    assert point.bias.value == pytest.approx(0.2)
    assert (point.error.layer, point.error.head) == (0, 1)
    assert point.error.value == pytest.approx(0.5)
    assert point.logit == Spot(4000, 2, 0)
    assert point.growth == NOWHERE


def test_head_growth_is_against_all_other_heads():
    """All weights grow threefold, one head's fivefold in the same time."""
    found = history.History(Rule(head_steps=20))
    grown = [
        found.add(step=10 * (i + 1), scalars=SCALARS, heads=norms(q, 2 * q, odd)).growth.value
        for i, (q, odd) in enumerate([(1, 1), (2, 1.2), (3, 5 / 3), (6, 2.4)])
    ]
    assert np.isnan(grown[:2]).all()
    assert grown[2] == pytest.approx(5 / 3) and grown[3] == pytest.approx(2.0)
    last = found.points[-1]
    assert (last.growth.layer, last.growth.head) == (2, 1)


def test_head_growth_looks_back_to_the_latest_record_that_is_old_enough():
    found = history.History(Rule(head_steps=20, settle_steps=10))
    for step, odd in ((10, 1.0), (30, 2.0), (45, 4.0), (50, 6.0), (300, 12.0)):
        point = found.add(step=step, scalars=SCALARS, heads=norms(odd=odd))
        if step == 45:
            assert math.isnan(point.growth.value)  # the record of step 10 is of the warm-up
        if step == 50:
            assert point.growth.value == pytest.approx(3.0)
    assert point.growth.value == pytest.approx(2.0)  # a gap (a resume): against the last one
    assert len(found._norms) == 2


def test_heads_with_small_logits_do_not_count():
    """Early in training single heads leave the others behind, and nothing is wrong."""
    found = history.History(Rule(head_steps=10))
    found.add(step=10, scalars=SCALARS, heads=norms())
    small = norms(odd=3.0)
    small["max_logit"][2, 1] = 60.0
    assert found.add(step=20, scalars=SCALARS, heads=small).growth.value == pytest.approx(1.0)
    large = norms(odd=9.0)
    large["max_logit"][2, 1] = np.nan  # not known to be small
    assert found.add(step=30, scalars=SCALARS, heads=large).growth.value == pytest.approx(3.0)


def test_heads_without_norms_have_no_growth():
    """Layers without a fused QKV projection, weights of zeros, a record that is not finite."""
    found = history.History(Rule(head_steps=10))
    nothing, broken = norms(), norms(q=math.inf, k=0.0)
    for name in history.NORMS:
        nothing[name] = np.full((L, H), np.nan, np.float32)
    for i, heads_ in enumerate((nothing, nothing, broken, norms(), broken, nothing)):
        point = found.add(step=10 * (i + 1), scalars=SCALARS, heads=heads_)
        assert not point.growth.value > 1.0
    half = norms(odd=1.0)
    half["wq_norm"][0] = np.nan
    found.add(step=70, scalars=SCALARS, heads=half)
    half = norms(odd=3.0)
    half["wq_norm"][0] = np.nan
    assert found.add(step=80, scalars=SCALARS, heads=half).growth.value == pytest.approx(3.0)
    # One of the two kinds was measured: it counts.
    for missing, other in (("wq_norm", "wk_norm"), ("wk_norm", "wq_norm")):
        now, before = norms(), norms()
        now[missing][:] = np.nan
        now[other][2, 1] *= 2
        pair = [{name: values[name] for name in history.NORMS} for values in (now, before)]
        assert history.head_growth(*pair, without=np.zeros((L, H), bool)) == Spot(2.0, 2, 1)
    # Of the other kind only a head that does not count was measured: it hides nothing.
    now, before = norms(), norms()
    now["wq_norm"][2, 1] *= 2
    now["wk_norm"][:] = np.nan
    now["wk_norm"][0, 0] = 1.0
    without = np.zeros((L, H), bool)
    without[0, 0] = True
    pair = [{name: values[name] for name in history.NORMS} for values in (now, before)]
    assert history.head_growth(*pair, without=without) == Spot(2.0, 2, 1)


def test_a_resume_judges_as_an_unbroken_run(tmp_path):
    rule = Rule(head_steps=30)
    described = record.make_meta(layers=L, heads=H, interval=10, rule=rule, attention="a/b")
    writer = Writer(tmp_path, described, start_step=0)
    whole = history.History(rule)
    for i in range(12):
        heads_ = norms(odd=1.2**i)
        for target in (writer.write, whole.add):
            extra = {"layers": {}} if target == writer.write else {}
            full = {name: heads_.get(name, QUIET) for name in HEAD_METRICS}
            target(step=10 * (i + 1), scalars=SCALARS, heads=full, **extra)
    writer.close()
    for after in (0, 40, 110):
        resumed = record.read(tmp_path).history(after=after)
        expected = [p for p in whole.points if p.step > after]
        late = [p.step > after + rule.head_steps for p in expected]
        same = [a == b for a, b in zip(resumed.points, expected, strict=True)]
        assert all(s for s, is_late in zip(same, late, strict=True) if is_late)
    assert record.read(tmp_path).rule == rule
    forgetful = record.read(tmp_path).history()
    forgetful.forget(100)
    assert [p.step for p in forgetful.points] == [100, 110, 120]


def begin_from(
    source: Path, folder: Path, *, step: int, steps: int, name: str = "stable_flash/none"
) -> Path:
    """Start a run from another one's checkpoint."""
    writer = Writer(folder, meta(name), start_step=step)
    found, records = history_from_parent(source, writer.meta, step=step, steps=steps)
    writer.begin_with(records, parent={"run": str(source), "step": step})
    writer.close()
    return found


def test_other_attention_after_a_resume_is_another_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, [10, 20]).close()
    for start, name in ((20, "a/b"), (30, "a/b"), (40, "c/d")):
        writer = Writer(first, meta(name), start_step=start)
        full = dict.fromkeys(HEAD_METRICS, QUIET)
        writer.write(start + 10, scalars=SCALARS, layers={}, heads=full)
        writer.close()
    found = record.read(first)
    assert found.meta["earlier"] == [[20, "stable_flash/none"], [40, "a/b"]]
    at = {step: record.attention_at(found.meta, step) for step in (10, 20, 21, 40, 41)}
    assert list(at.values()) == ["stable_flash/none"] * 2 + ["a/b"] * 2 + ["c/d"]
    assert [p.step for p in found.points()] == [10, 20, 30, 40, 50]
    assert [p.step for p in found.history().points] == [50]
    # Back before the last change: what was changed later never was.
    Writer(first, meta("a/b"), start_step=30).close()
    assert record.read(first).meta["earlier"] == [[20, "stable_flash/none"]]
    Writer(first, meta("c/d"), start_step=30).close()
    assert record.read(first).history().points == []  # nothing is known of it yet
    # Whoever continues it sees the stretch its checkpoint is from, if that is its attention.
    for name, step, seen in (("a/b", 30, [30]), ("stable_flash/none", 20, [10, 20])):
        begin_from(first, second, step=step, steps=100, name=name)
        assert [p.step for p in record.read(second).history().points] == seen
        (second / "stability" / "meta.json").unlink()
    with pytest.raises(ValueError, match="attention 'stable_flash/none', this run has 'a/b'"):
        history_from_parent(first, meta("a/b"), step=20, steps=100)


def test_looking_back_on_another_run(tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    checkpoint = first / "checkpoints" / "step_00000040.attempt-1"
    checkpoint.mkdir(parents=True)
    for source in (checkpoint, checkpoint.parent, first):
        with pytest.raises(FileNotFoundError, match="no telemetry beside it"):
            history_from_parent(source, meta(), step=40, steps=25)
    write(first, [10, 20, 30, 40, 50]).close()
    write(second, [50, 60]).close()  # another story, of which nothing counts
    for source in (checkpoint, checkpoint.parent, first):  # started again and again
        assert begin_from(source, second, step=40, steps=25) == first
        assert [p.step for p in record.read(second).history().points] == [20, 30, 40]
    write(second, [50], start=40).close()
    write(second, [60], start=50).close()
    found = record.read(second)
    assert found.steps.tolist() == [50, 60]
    assert [p.step for p in found.history().points] == [20, 30, 40, 50, 60]
    assert [p.step for p in found.points()] == [s for s, _ in found.verdicts()] == [50, 60]
    # A third one sees through to the first.
    begin_from(second, third, step=50, steps=25)
    assert [p.step for p in record.read(third).history().points] == [30, 40, 50]
    with pytest.raises(FileNotFoundError, match="no telemetry of the steps up to 5"):
        history_from_parent(first, meta(), step=5, steps=25)
    # Another attempt, before the first record, with other attention: nothing is known of it.
    other = meta("sdpa_cudnn/compensated")
    Writer(third, other, start_step=50).close()
    with pytest.raises(ValueError, match="attention 'stable_flash/none', this run has 'sdpa_cudnn"):
        history_from_parent(second, other, step=50, steps=25)
    assert record.read(third).history().points == []
    # From its beginning.
    write(second, [10]).close()
    assert (found := record.read(second)).steps.tolist() == [10] and found.before is None


SICK = {name: np.ones((L, H), np.float32) for name in ("used_error_rms", "kappa")}


def test_verdicts_repeat_what_the_run_said(tmp_path):
    writer = Writer(tmp_path, meta(), start_step=0)
    for i in range(20):
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.3}
        table = dict.fromkeys(HEAD_METRICS, QUIET) | (SICK if i >= 12 else {})
        writer.write(10 * (i + 1), scalars=scalars, layers={}, heads=table)
    writer.close()
    verdicts = record.read(tmp_path).verdicts()
    assert verdicts[0][1].level == "ok" and verdicts[-1][1].level == "danger"


def rescued(folder: Path, *, switched_at: int, until: int = 60, odd: int = 0) -> list[str]:
    """Records of a run that the guard rescues, as the trainer makes them; what it said.

    A head is sick from step 310 on, under whatever numerics. ``switched_at``: steps between the
    record that shows the danger and the step in which it is read.
    """
    writer = Writer(folder, meta(), start_step=0)
    found, switched, said = history.History(EVERY, compensated=odd > 0), odd, []
    for i in range(until):
        step, full = 10 * (i + 1), dict.fromkeys(HEAD_METRICS, QUIET) | (SICK if i >= 30 else {})
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.3}
        found.add(step=step, scalars=scalars, heads=full)
        said.append(judge(found.points, found.rule).level)
        if said[-1] == "danger" and not switched:
            switched = step + switched_at
            found = history.History(EVERY, compensated=True)
        extra = {"switched": float(switched), "level": float(said[-1] == "danger")}
        writer.write(step, scalars=scalars | extra, layers={}, heads=full)
    writer.close()
    return said


@pytest.mark.parametrize("later", [0, 1])
def test_verdicts_start_anew_where_the_guard_switched(tmp_path, later):
    """What the run said, record by record: one danger, to be watched after the rescue."""
    said = rescued(tmp_path, switched_at=later)
    assert said.count("danger") == 1 and said[-1] == "watch"
    found = record.read(tmp_path)
    assert [verdict.level for _, verdict in found.verdicts()] == said
    assert [verdict.level for _, verdict in found.verdicts(EVERY)] == said
    assert [step for step, _ in found.verdicts()] == found.steps.tolist()
    danger = found.verdicts()[said.index("danger")][0]
    # A resume goes on from there; and no record is lost.
    assert found.history().points[0].step == danger + 10
    after = found.history(after=danger + later).points
    assert [p.step for p in after] == [p.step for p in found.history().points]
    assert [p.step for p in found.points()] == found.steps.tolist()


def test_a_run_that_began_with_switched_numerics(tmp_path):
    """Its checkpoint tells of a switch in another run, or after the step it was taken back to."""
    for switched in (5, 5000):
        folder = tmp_path / str(switched)
        said = rescued(folder, switched_at=0, odd=switched)
        assert said[-1] == "watch"  # its numerics are what a switch would give
        assert [v.level for _, v in record.read(folder).verdicts()] == said


def test_every_record_knows_whether_its_numerics_are_the_remedy(tmp_path):
    """The configuration says it, the guard's switch, and another guard setting that takes it back.

    A stabilizer that the configured backend does not use is none.
    """

    def write_on(name: str, steps: dict[int, int]) -> None:
        writer = Writer(tmp_path, meta(name), start_step=min(steps) - 10)
        for step, switched in steps.items():
            extra = {"switched": float(switched)}
            full = dict.fromkeys(HEAD_METRICS, QUIET)
            writer.write(step, scalars=SCALARS | extra, layers={}, heads=full)
        writer.close()

    write_on("sdpa_cudnn/compensated", {10: 0, 20: 21, 30: 21, 40: 21})
    assert record.read(tmp_path).history().compensated
    write_on("sdpa_cudnn/compensated", {50: 0})
    assert not record.read(tmp_path).history().compensated
    write_on("stable_flash/none", {60: 0})
    write_on("stable_flash/compensated/sdpa_cudnn", {70: 0})
    assert record.read(tmp_path).history().compensated
    Writer(tmp_path, meta("stable_flash/none"), start_step=70).close()
    found = record.read(tmp_path)
    assert not found.history().compensated and found.history().points == []
    told = [(p.step, p.compensated) for p in found.points()]
    assert told == [(10, False), (20, False), (30, True), (40, True), (50, False), (60, False),
                    (70, True)]  # fmt: skip


def test_head_growth_does_not_look_back_over_a_switch(tmp_path):
    described = record.make_meta(
        layers=L, heads=H, interval=10, rule=Rule(head_steps=20), attention="a/b"
    )
    writer = Writer(tmp_path, described, start_step=0)
    for i in range(6):
        full = {name: norms(odd=1.5**i).get(name, QUIET) for name in HEAD_METRICS}
        switched = {"switched": 31.0 if i >= 2 else 0.0}
        writer.write(10 * (i + 1), scalars=SCALARS | switched, layers={}, heads=full)
    writer.close()
    grown = [p.growth.value for p in record.read(tmp_path).points()]
    np.testing.assert_allclose(grown, [np.nan, np.nan, 2.25, np.nan, np.nan, 2.25], rtol=1e-6)


def test_worst_heads():
    values = np.array([[1.0, -3.0, 2.0], [0.5, 0.1, np.nan], [np.nan] * 3], np.float32)
    assert names.worst("delta_error_mean", values)[:2].tolist() == [-3.0, 0.5]
    assert names.worst("entropy", np.abs(values))[:2].tolist() == pytest.approx([1.0, 0.1])
    assert np.isnan(names.worst("kappa", values)[2])


def test_the_common_share_is_bounded():
    """Of a head whose largest logit is what its common part leaves of it, all is common."""
    common = np.array([3.0, 0.0, -17.0, -4.0, 2.0, 0.0, math.nan])
    largest = np.array([4.0, 5.0, 6.0, -0.2, 0.5, 0.0, 5.0])
    share = names.common_share(common, largest)
    np.testing.assert_array_equal(share[:5], [0.75, 0.0, -1.0, -1.0, 1.0])
    assert np.isnan(share[5:]).all()
