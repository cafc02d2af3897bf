"""The report: every kind of run gives a page, nothing of a run becomes markup or is fetched."""

from __future__ import annotations

import fcntl
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_pages import FLAT, checked, make_run

from megatron_patch.cli import app
from megatron_patch.report import report
from megatron_patch.report.collect import LOG_TAIL_BYTES, ReportError, collect

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=http://evil.invalid/x onerror=alert(1)>',
    "' onload='alert(1)",
    "</style></title><svg onload=alert(1)>",
    "javascript:alert(1) &lt;b&gt; {{7*7}} ]]> <!-- -->",
    "\x00\x07\x1b[31m\u202e\ud800 null and bells",
)

# 4 curves, 8 lines in time, layers in time, 13 maps of the last record, 9 of the first danger.
DRAWINGS = 4 + 8 + 1 + 13 + 9
EXPLODED = FLAT + [7.0] * 120


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_of_a_run_becomes_markup(tmp_path, hostile):
    log = f"2026-01-01 00:00:00 warning: {hostile}\n"
    name = hostile.encode("utf-8", "replace").decode()
    telemetry = hostile == HOSTILE[0]
    run = make_run(
        tmp_path / "run", losses=FLAT, name=name, log=log, hostile=name, telemetry=telemetry
    )
    (run / "events.jsonl").write_text(json.dumps({"utc": name, "kind": name}) + "\n{torn")
    report.write(run, run / "out.html")
    found = checked((run / "out.html").read_text(encoding="utf-8"))
    said = "".join(found.text)
    # Shown as it is, in the heading, the configuration, the software, the log and the events.
    shown = "".join(f"\\x{ord(c):02x}" if c in "\0\a\x1b" else c for c in name)
    assert said.count(shown) >= 4
    assert "events.jsonl: 1 line(s) could not be read" in said


@given(st.text(), st.text())
@settings(max_examples=80, deadline=None)
def test_the_template_escapes_whatever_it_is_given(content, attribute):
    template = report.environment().from_string('<p class="{{ a }}">{{ t }}</p>')
    made = checked(template.render(a=attribute, t=content))
    assert made.count == {"p": 1}
    if content.isprintable():
        assert "".join(made.text) == content


def test_the_template_marks_nothing_as_safe():
    source = (Path(report.__file__).parent / "report.html.j2").read_text()
    printed = re.findall(r"{[{%].*?[%}]}", source, re.DOTALL)
    assert len(printed) > 50
    assert not [one for one in printed if "safe" in one or "autoescape" in one]


def test_a_run_with_telemetry(tmp_path):
    run = make_run(tmp_path / "run", losses=FLAT, telemetry=True)
    (run / "FINISHED").write_text('{"step": 120}')
    assert app.run(["report", str(run)]) == 0
    found = checked((run / "report.html").read_text(encoding="utf-8"))
    said = " ".join(found.text)
    assert "finished after step 120" in said and "Largest attention logit" in said
    assert found.count["img"] == DRAWINGS
    assert 'content="default-src ' in (run / "report.html").read_text(encoding="utf-8")


def test_a_run_without_telemetry_and_one_that_explodes(tmp_path):
    run = make_run(tmp_path / "run", losses=EXPLODED, log="2026-01-01 00:00:00 no end\n")
    said = " ".join(checked(report.render(collect(run))).text)
    assert "ended without a word after step 240" in said
    assert "rose by 3.00 above the lowest before it, to 7.00" in said
    assert "recorded no stability telemetry" in said


def test_an_explosion_leaves_something_to_see_of_the_steps_before():
    """Curves that span orders of magnitude are logarithmic, where they can be."""
    nan = math.nan
    assert report.spreads([2.0, nan, 300.0])
    for values in ([2.0, 100.0], [0.0, 300.0], [-1.0, 300.0], [nan], []):
        assert not report.spreads(values)


def test_a_long_list_of_events_is_read_from_its_end(tmp_path):
    """Where the tail begins is in the middle of a line: nothing is wrong with the file."""
    run = make_run(tmp_path / "run", losses=FLAT)
    entry = json.dumps({"step": 7, "loss": 9.5, "samples": "x" * 5000}) + "\n"
    (run / "spikes.jsonl").write_text(entry * (LOG_TAIL_BYTES // len(entry) + 3))
    facts = collect(run)
    assert not [note for note in facts.notes if "could not be read" in note]
    assert any("spikes" in text for _, text in facts.events)


def test_validation_is_judged_against_its_own_lowest(tmp_path):
    def said(values: list[float]) -> tuple[str, str]:
        run = make_run(tmp_path / f"run{len(values)}{values[-1]}", losses=FLAT)
        facts = collect(run)
        facts.columns["eval_loss"] = [*values, *[math.nan] * (len(facts.steps) - len(values))]
        (found,) = [a for a in report.answers(facts) if a.question == "Validation loss"]
        return found.grade, found.text

    assert said([7.05]) == ("none", "7.0500, evaluated once")
    assert said([3.4, 3.3])[0] == "good" and said([3.4, 7.05])[0] == "bad"


def test_events_of_other_rooms(tmp_path):
    run = make_run(tmp_path / "run", losses=FLAT)
    spike = {"step": 77, "loss": 9.5, "samples": [1, 2], "text": ""}
    (run / "spikes.jsonl").write_text(json.dumps(spike) + "\n")
    crash = {"utc": "2026-01-02T00:00:00Z", "rank": 3, "exit_code": 6, "trace": "x" * 5000}
    (run / "crashes.jsonl").write_text(json.dumps(crash) + "\n")
    said = collect(run).events
    assert said == [
        ("", "spikes: step 77, loss 9.5"),
        ("2026-01-02T00:00:00Z", "crashes: rank 3, exit_code 6"),
    ]


def test_states(tmp_path):
    ends = {
        "stopped": "stopped gracefully after step 5: received SIGTERM; the same command continues",
        "non-finite": "stopped by NonFiniteError: step 6: loss not finite",
        "guarded": "stopped by StabilityStop: stability.guard stopped the run after step 6, saved",
        "failed": "stopped by OSError: disk",
        "interrupted": "step 5/10 | loss 4",
    }
    for state, line in ends.items():
        run = make_run(tmp_path / state, losses=FLAT, log=f"2026-01-01 00:00:00 {line}\n")
        assert collect(run).state == state
    why = collect(tmp_path / "guarded").why
    assert "stability guard (exit code 5): stability.guard stopped the run after step 6" in why
    assert "error" not in why and graded(tmp_path / "guarded")["State"] == ("bad", why)
    # A run in progress holds its lock; FINISHED of an earlier, shorter attempt does not end it.
    (run / "FINISHED").write_text('{"step": 5}')
    with (run / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert collect(run).state == "running"
    assert collect(run).state == "finished"


def graded(run: Path) -> dict[str, tuple[str, str]]:
    """The answers at the top of the page: (grade, text) by question."""
    return {a.question: (a.grade, a.text) for a in report.answers(collect(run))}


@pytest.mark.parametrize(("what", "verb"), [("loss", "is"), ("gradients", "are")])
def test_a_run_that_ended_not_finite_is_good_in_nothing_that_says_so(tmp_path, what, verb):
    """The step that ended it is in no row of metrics.csv: only the log knows it."""
    end = f"stopped by NonFiniteError: step 1121: {what} not finite; stopped before the update"
    run = make_run(tmp_path / "run", losses=FLAT, log=f"2026-01-01 00:00:00 {end}\n")
    found = graded(run)
    for question in ("State", "Loss", "Steps not finite"):
        grade, text = found[question]
        assert grade == "bad" and f"step 1,121, whose {what} {verb} not finite" in text, question
    assert found["Steps not finite"][1].startswith("1, ") and "4.0000 before" in found["Loss"][1]
    # Before the first row, and in words that this version does not know.
    young = make_run(tmp_path / "young", losses=[], log="2026-01-01 00:00:00 stopped by "
                     "NonFiniteError: something else\n")  # fmt: skip
    found = graded(young)
    assert found["Loss"][0] == found["Steps not finite"][0] == "bad"


def test_one_loss_that_is_infinite_is_bad_though_it_came_back(tmp_path):
    run = make_run(tmp_path / "run", losses=[*FLAT[:70], math.inf, *FLAT[71:]])
    assert graded(run)["Loss"] == ("bad", "not finite at step 71")


@pytest.mark.parametrize("begin", ["resuming after step 400 (1 tokens)",
                                   "no checkpoint: starting at step 0"])  # fmt: skip
@pytest.mark.parametrize("end", ["stopped by NonFiniteError: loss is nan at step 500",
                                 "stopped gracefully after step 500: SIGTERM",
                                 "stopped by StabilityStop: danger",
                                 "stopped by OSError: disk"])  # fmt: skip
def test_the_state_is_that_of_the_last_attempt(tmp_path, begin, end):
    """An earlier attempt's last line says nothing about one that was killed later."""

    def state(name: str, *said: str) -> str:
        log = "".join(f"2026-01-01 00:00:00 {line}\n" for line in said)
        return collect(make_run(tmp_path / name, losses=FLAT, log=log)).state

    assert state("killed", end, begin, "step 900/10000 | loss 4") == "interrupted"
    alone = state("alone", begin, end)
    assert alone != "interrupted"
    assert state("again", "stopped by ValueError: x", begin, end) == alone
    # A text about resuming is not the beginning of an attempt.
    assert state("quoted", begin, end, f"warning: {begin}") == alone


def test_a_rescued_run_is_not_called_bad_and_is_judged_once(tmp_path, monkeypatch):
    from megatron_patch.stability import history, record
    from megatron_patch.stability.names import HEAD_METRICS
    from megatron_patch.stability.warning import Rule
    from megatron_patch.stability.writer import Writer

    run = make_run(tmp_path / "run", losses=FLAT)
    rule = Rule()
    meta = record.make_meta(layers=1, heads=1, interval=50, rule=rule, attention="a/none")
    heads = {name: np.ones((1, 1), np.float32) * 1e-9 for name in HEAD_METRICS}
    writer = Writer(run, meta, start_step=0)
    for i in range(1, 81):
        # Two records: danger in the 44th, ok after the switch.
        heads["used_error_rms"][:] = heads["kappa"][:] = 1.0 if i in (43, 44) else 1e-5
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.3}
        scalars["switched"] = 2201.0 if i >= 44 else 0.0
        writer.write(50 * i, scalars=scalars, layers={}, heads=heads)
    writer.close()
    taken, add = [], history.History.add
    monkeypatch.setattr(history.History, "add", lambda *a, **k: (taken.append(1), add(*a, **k))[1])
    facts = collect(run)
    report.render(facts)
    assert len(taken) == 80
    (found,) = [a for a in report.answers(facts) if a.question == "Early warning"]
    assert found.grade == "watch" and found.text.startswith("ok at step 4,000")
    assert "first danger at step 2,200" in found.text and "after step 2,201" in found.text


def test_an_experiment_is_told_which_runs_it_has(tmp_path):
    experiment = tmp_path / "experiment"
    for name in "fabdec":
        make_run(experiment / "runs" / name, losses=FLAT)
    (experiment / "runs" / "aa_empty").mkdir()
    (experiment / "logs").mkdir()
    runs = experiment / "runs"
    for folder in (experiment, runs):
        with pytest.raises(ReportError) as refused:
            collect(folder)
        end = f"; runs are in {runs}: a, b, c, d and 2 more; give one of them, e.g. {runs / 'a'}"
        assert str(refused.value).startswith(f"{folder} is no run directory: ")
        assert str(refused.value).endswith(end)
    with pytest.raises(ReportError, match=r"train\.log; give the directory of a run"):
        collect(experiment / "logs")


def test_a_young_a_torn_and_no_run(tmp_path):
    young = tmp_path / "young"
    young.mkdir()
    with pytest.raises(ReportError, match="no run directory"):
        collect(young)
    with pytest.raises(ReportError, match="no such directory"):
        collect(tmp_path / "nowhere")
    (young / "train.log").write_text("")
    said = " ".join(checked(report.render(collect(young))).text)
    assert "metrics.csv has no rows yet" in said and "There is no config.yaml" in said
    (young / "metrics.csv").write_bytes(b"step,loss,grad_norm\n1,9.5,2\n2,nan,inf\n3,8.1\0,")
    (young / "config.yaml").write_text("a: [")
    (young / "environment.json").write_text("[]")
    (young / "stability").mkdir()
    (young / "stability" / "meta.json").write_text('{"format": 99}')
    with (young / "metrics.csv").open("a") as more:
        more.write("\n" + "9" * 200_000 + "\n")
    facts = collect(young)
    assert facts.steps == [1, 2] and math.isnan(facts.column("loss")[1])
    said = " ".join(checked(report.render(facts)).text)
    assert "config.yaml could not be read" in said and "not finite at step 2" in said
    assert app.run(["report", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize(("change", "said"), [
    (lambda meta: [meta], "meta.json: does not describe the records"),
    (
        lambda meta: meta | {"rule": {"magic": 1.0}},
        "rule is of another version (it has magic;",
    ),
    (lambda meta: meta | {"rule": None}, "it has a NoneType"),
    (lambda meta: {k: v for k, v in meta.items() if k != "rule"}, "KeyError: 'rule'"),
    (lambda meta: meta | {"rule": {"settle_steps": "x"}}, "it has settle_steps"),
    (lambda meta: meta | {"scalars": None}, "no loss_mean"),
    (lambda meta: meta | {"layers": math.inf}, "OverflowError"),
    (lambda meta: meta | {"attention": None}, "attention is None, expected text"),
    (lambda meta: meta | {"head_metrics": meta["head_metrics"][::-1][1:]}, "no dv_sum"),
])  # fmt: skip
def test_telemetry_of_another_making_is_a_note(tmp_path, change, said):
    run = make_run(tmp_path / "run", losses=FLAT, telemetry=True)
    file = run / "stability" / "meta.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert app.run(["report", str(run)]) == 0
    found = " ".join(checked((run / "report.html").read_text(encoding="utf-8")).text)
    assert "The stability telemetry could not be read" in found and said in found


@pytest.mark.parametrize("name", ["environment.json", "FINISHED"])
@pytest.mark.parametrize("content", ["null", "[]", '"x"', "3"])
def test_files_that_hold_no_object_are_a_note(tmp_path, name, content):
    run = make_run(tmp_path / "run", losses=FLAT)
    (run / name).write_text(content)
    assert any(note.startswith(f"{name} holds no JSON object") for note in collect(run).notes)
    assert app.run(["report", str(run)]) == 0


@pytest.mark.parametrize(("attempts", "note"), [
    (None, "attempts is no list but a NoneType"),
    ({}, "attempts is no list but a dict"),
    ([3, {"torch": "2.13"}], "1 attempt(s) are no objects"),
])  # fmt: skip
def test_attempts_that_are_none(tmp_path, attempts, note):
    run = make_run(tmp_path / "run", losses=FLAT)
    (run / "environment.json").write_text(json.dumps({"attempts": attempts}))
    assert app.run(["report", str(run)]) == 0
    assert note in " ".join(checked((run / "report.html").read_text(encoding="utf-8")).text)


@pytest.mark.parametrize("damage", [bytes, lambda n: np.random.default_rng(1).bytes(n)])
def test_records_that_are_damaged_are_a_note(tmp_path, damage):
    """Blocks that a crash lost, and records after them; or something else altogether."""
    run = make_run(tmp_path / "run", losses=FLAT, telemetry=True)
    file = run / "stability" / "records.bin"
    content, size = bytearray(file.read_bytes()), file.stat().st_size // 30
    content[10 * size : 20 * size] = damage(10 * size)
    file.write_bytes(content)
    assert app.run(["report", str(run)]) == 0
    found = " ".join(checked((run / "report.html").read_text(encoding="utf-8")).text)
    assert "could not be read: the steps of records.bin do not rise" in found
