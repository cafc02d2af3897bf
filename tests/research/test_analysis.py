"""research/: the report is as its results say, and the scripts find again what they found."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_cpu import single_rank

from megatron_patch.stability import record
from megatron_patch.stability.capture import CaptureFile
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer

ROOT = Path(__file__).resolve().parents[2]
RESEARCH = ROOT / "research"
PAGE = RESEARCH / "report.md"
WORDS, FIGURES, TABLES, LINES = 8000, 10, 12, 2250
"""At most so much, of the report and of the scripts."""


@pytest.fixture(scope="module")
def scripts() -> Any:
    """The modules of research/analysis by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RESEARCH / "analysis"))
        import captured
        import continued
        import drift
        import heads
        import monitors
        import report_tables
        import shared

        found = (captured, continued, drift, heads, report_tables, shared, monitors)
        yield {m.__name__: m for m in found}


def test_the_tables_are_as_their_results_say(scripts):
    page = PAGE.read_text()
    told = scripts["report_tables"].fill(page)
    assert told == page, "run: python research/analysis/report_tables.py"
    with pytest.raises(ValueError, match="bias"):
        scripts["report_tables"].fill(page.replace("<!-- bias:end -->", ""))


def test_the_report_is_short_and_its_links_lead_somewhere():
    page = PAGE.read_text()
    assert len(page.replace("|", " ").split()) <= WORDS
    images, links = (re.findall(p, page) for p in (r"!\[[^\]]*\]\(([^)]+)\)", r"\]\(([^)#]+)\)"))
    assert 0 < len(images) <= FIGURES
    assert all((PAGE.parent / link).exists() for link in links if "://" not in link)
    assert len(re.findall(r"^<!-- \w+:begin", page, re.MULTILINE)) + 1 <= TABLES
    ends = (path.read_text().count("\n") for path in (RESEARCH / "analysis").glob("*.py"))
    assert sum(ends) <= LINES


def test_every_result_says_where_it_comes_from():
    for path in (RESEARCH / "results").glob("*.json"):
        for name, section in json.loads(path.read_text()).items():
            if path.stem == "runs":  # each run has its own
                assert all(run["commit"] for run in section["runs"] if run["steps"]), name
                continue
            told = section.get("environment", section)
            assert told.get("commit"), f"{path.name}, {name}"
            assert "environment" in section or {"machine", "versions", "utc"} <= section.keys()
    with (RESEARCH / "results" / "heads.csv").open() as rows:
        sources = {name for row in csv.DictReader(rows) for name in row["sources"].split(" ")}
    assert sources == json.loads((RESEARCH / "results" / "heads.json").read_text()).keys()


def write(folder: Path, name: str, steps: range, growth: float) -> Path:
    """A run of 2 layers of 3 heads; logits of head 1.2 grow by a factor every 1,000 steps."""
    meta = record.make_meta(layers=2, heads=3, interval=50, rule=Rule(), attention="a/none")
    writer = Writer(folder / name, meta, start_step=0)
    for i, step in enumerate(steps):
        heads = {metric: np.full((2, 3), 0.5, np.float32) for metric in HEAD_METRICS}
        heads["max_logit"][:] = 20.0
        heads["max_logit"][1, 2] = 10 * growth ** (step / 1000)
        heads["common_logit"][1, 2] = 0.9 * heads["max_logit"][1, 2]
        heads["delta_error_rms"][1, 2] = 5.0
        heads["delta_error_mean"] += np.float32(0.1 * (-1) ** i)
        heads["growth_noise"][1, 2] = step / 1000
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.3}
        writer.write(step, scalars=scalars, layers={}, heads=heads)
    writer.close()
    return folder / name


def test_heads_that_run_away_are_found(scripts, tmp_path, monkeypatch):
    run = write(tmp_path, "none-s1", range(50, 3001, 50), 10.0)

    def call(what: str, *more: str) -> Any:
        monkeypatch.setattr(
            sys, "argv", ["heads.py", what, str(run), "--out", str(tmp_path), *more]
        )
        assert scripts["heads"].main() == 0
        return json.loads((tmp_path / "head_figures.json").read_text()) if what != "at" else None

    spans = call("errors", "--steps", "1000", "2000", "3000")["errors"]["runs"]["none-s1"]
    assert spans["ran_away"] == [[1, 2]] and spans["between"][0]["largest"][0] == [1, 2]
    assert spans["between"][0]["over_median"][0] == pytest.approx(10.0)
    noise = call("noise")["growth_noise"]["runs"]["none-s1"]
    assert [(head["layer"], head["head"]) for head in noise["went"]] == [(1, 2)]
    assert noise["before_step"] == 2000 and noise["went"][0]["passed"]["step"] == 1100
    named = call("common")["common_part"]["runs"]["none-s1"]
    assert named["named"]["0.6"][0]["head"] == 2 and named["went"][0]["above_100"] == 1050
    every = call("saturated", "--steps", "3000")
    assert every["saturated"]["runs"]["none-s1"]["at"]["3000"]["by_layer"] == {"1": 1}
    # Other sections of the file stay, and another read of a section keeps the runs it had.
    assert every.keys() == {"errors", "growth_noise", "common_part", "saturated"}
    assert call("noise")["growth_noise"]["runs"].keys() == {"none-s1"}
    call("at", "--steps", "2000", "3000", "--layer", "1", "--head", "2")
    rows = list(csv.DictReader((tmp_path / "heads.csv").open()))
    assert [float(row["max_logit"]) for row in rows] == [pytest.approx(1e3), pytest.approx(1e4)]


def test_the_verdict_on_continued_runs(scripts, tmp_path, monkeypatch):
    rows = []
    for cell, growth in (("base", 10.0), ("control", 10.0), ("low_order_o", 1.0), ("slow", 2.0)):
        begin = 0 if cell == "base" else 2000
        write(tmp_path / "runs", f"{cell}-s1", range(begin + 50, 3001, 50), growth)
        origin = None if cell == "base" else {"step": 2000, "event": 2900}
        event = {"base": 2900, "control": 3000}.get(cell)
        row = {
            "run": f"{cell}-s1",
            "cell": cell,
            "seed": 1,
            "state": "finished",
            "variant": "plain",
        }
        rows.append(row | {"origin": origin, "first_large_gradient": event})
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "verdicts.json").write_text(json.dumps({"runs": rows}))
    monkeypatch.setattr(sys, "argv", ["continued.py", str(tmp_path), "--out", str(tmp_path)])
    assert scripts["continued"].main() == 0
    runs = json.loads((tmp_path / "continued_heads.json").read_text())["runs"]["runs"]
    assert scripts["continued"].section("stability_attribution_continued") == "runs"
    assert scripts["continued"].section("stability_projection") == "projection"
    assert {name: run["verdict"] for name, run in runs.items()} == {
        "control-s1": "goes on", "low_order_o-s1": "stops", "slow-s1": "stops",
    }  # fmt: skip
    assert runs["control-s1"]["judged_at"] == 2900
    verdict = scripts["continued"].head_verdict
    assert [verdict(x, 16.0) for x in (1.25, 3.9, 4.0)] == ["stops", "slows", "goes on"]
    assert verdict(9.0, 1.9) == ""


@pytest.mark.parametrize("what", ["growth", "shared", "centered", "exponent"])
def test_captured_heads_say_what_they_said(scripts, what):
    """Against stored figures of the same tensors; processors round the emulation differently."""
    one = next(scripts["captured"].heads([]))
    stored = scripts["shared"].read("captured_heads")[what]["heads"]
    place = one.place.items()
    (row,) = (row for row in stored if place <= {(k, row[k]) for k in one.place})
    found = scripts["captured"].EXAMINE[what](one)
    for key, value in found.items():
        if key in row:
            assert value == pytest.approx(row[key], rel=0.02), key


def test_a_bias_repeats_and_a_walk_does_not(scripts):
    drift = scripts["drift"]
    gen = torch.Generator().manual_seed(0)
    noise = torch.randn(64, 2, 4, 12, generator=gen, dtype=torch.float64)
    bias = torch.zeros(2, 4, 12, dtype=torch.float64)
    bias[1] = 0.5  # of head 1: a fifth of the mean square
    weight = -torch.ones(2, 4, 12, dtype=torch.float64)
    series = drift.Series(weight)
    for error in noise:
        series.add(error + bias)
    walk, biased = series.report(series)
    assert abs(walk["coherence"]) < 0.02 and walk["walk_p"] > 0.01
    assert biased["coherence"] == pytest.approx(0.2, abs=0.03) and biased["walk_p"] < 1e-3
    # A descent step along -error makes a weight of the other sign larger.
    assert biased["growth"] > 5 * biased["growth_se"] > 0
    assert walk["relative"] == biased["relative"] == 1.0


def test_monitors_are_compared_by_thresholds_of_other_runs(scripts, monkeypatch):
    """A score alarms in the second observation in a row above what quiet runs reach so."""
    side = scripts["monitors"]
    steps = np.arange(100, 1100, 100)
    scores = {"quiet": [9, 1, 9, 2, 3, 1, 1, 9, 1, 1], "gone": [1, 1, 9, 1, 9, 9, 9, 9, 9, 9],
              "late": [1] * 9 + [9], "false": [1, 1, 1, 4, 4, 1, 1, 1, 1, 1]}  # fmt: skip
    tables = {name: np.array([values, [0] * 10], float).T for name, values in scores.items()}

    def read(run: Any) -> Any:
        if run.name == "blind":  # the monitor had failed there
            return side.of_file(run, "nothing", "entropy")
        return steps, tables[run.name]

    monkeypatch.setattr(side, "SCORES", {"score": ("rule", read)})

    def run(name: str, event: int | None, danger: int | None) -> Any:
        return side.Watched(name, Path(), 200, event, danger, 1000)

    reported = [run("gone", 900, 850), run("late", 900, 950), run("false", None, None)]
    reported.append(run("blind", 900, 850))
    found = side.compare([run("quiet", None, None)], reported)
    # In the warm-up nothing counts: the first 9 of the quiet run; one alone does not, either.
    assert found["score"]["threshold"] == 2
    assert found["score"]["reported"]["leads"] == {"gone": 300, "late": None}
    assert found["score"]["reported"]["false"] == ["false"]
    leads = {"gone": 50, "late": None, "blind": 50}
    assert found["present rule"]["reported"]["leads"] == leads
    assert "|score|2|1 of 2|300 / 300 / 300|1 of 1|0.50 %|" in side.markdown(
        {"detectors": found, "cost": {"rule": 0.005}}
    )


def test_added_runs_leave_what_is_known_of_earlier_ones(scripts, monkeypatch, tmp_path):
    side = scripts["report_tables"]
    monkeypatch.setattr(side, "RESULTS", tmp_path)
    one, two = ({"run": name, "steps": 9, "state": "finished"} for name in ("one", "two"))
    earlier = {"environment": {"gpu": "H100"}, "steps": 9, "runs": [one, two | {"steps": 0}]}
    (tmp_path / "runs.json").write_text(json.dumps({"protocol": earlier}))
    (tmp_path / "runs.csv").write_text("protocol,run,step,loss\nprotocol,one,9,3.5\n")
    made = tmp_path / "made"
    made.mkdir()
    (made / "verdicts.json").write_text(json.dumps({"steps": 9, "runs": [one | {"steps": 0}, two]}))
    (made / "curves.csv").write_text("run,step,loss\ntwo,9,3.25\n")
    side.add(made, "protocol")
    found = json.loads((tmp_path / "runs.json").read_text())["protocol"]
    assert found == earlier | {"runs": [one, two]}
    assert (tmp_path / "runs.csv").read_text().splitlines()[1:] == [
        "protocol,one,9,3.5", "protocol,two,9,3.25",
    ]  # fmt: skip


def test_runs_are_added_to_a_protocol_that_exists(scripts, monkeypatch, tmp_path, capsys):
    (tmp_path / "verdicts.json").write_text("{}")
    for given, missing in (("llama", "llama.yaml"), ("llama_350m", "verdicts.json")):
        folder = tmp_path if given == "llama" else tmp_path / "none"
        monkeypatch.setattr("sys.argv", ["report_tables.py", "--add", str(folder), given])
        with pytest.raises(SystemExit):
            scripts["report_tables"].main()
        assert f"{missing}; name RUNS/results of run.py and a protocol" in capsys.readouterr().err


class OneStep:
    """The events of a `Trainer`'s only step (which itself needs accelerate)."""

    def __init__(self, *, model: Any, args: Any, train_dataset: Any, callbacks: Any) -> None:
        assert args["learning_rate"] == 0.0 and args["max_steps"] == 1
        self.model, self.callbacks, (self.row,) = model.train(), callbacks, train_dataset

    def train(self) -> None:
        from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        rates = torch.optim.lr_scheduler.ConstantLR(optimizer)
        events = CallbackHandler(self.callbacks, self.model, None, optimizer, rates)
        state, control = TrainerState(), TrainerControl()
        for event in ("train_begin", "step_begin"):
            getattr(events, f"on_{event}")(None, state, control)
        row = {name: torch.tensor([ids]) for name, ids in self.row.items()}
        self.model(**row, use_cache=False).loss.backward()
        events.on_pre_optimizer_step(None, state, control)
        state.global_step = 1
        for event in ("step_end", "train_end"):
            getattr(events, f"on_{event}")(None, state, control)


def test_every_layer_of_a_stock_model_is_captured(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model = transformers.LlamaConfig(
        vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(model).save_pretrained(tmp_path / "tiny")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tiny")
    (tmp_path / "text").write_text("one two " * 20)
    import stock

    monkeypatch.setattr(stock, "Trainer", OneStep)
    monkeypatch.setattr(stock, "TrainingArguments", lambda out, **named: named)
    given = ["stock.py", str(tmp_path / "tiny"), str(tmp_path / "text"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*given, "--tokens", "41"])
    assert stock.main() == 2 and "40 tokens, 41 wanted" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*given, "--tokens", "32"])
    with single_rank():
        assert stock.main() == 0
    found = [CaptureFile.load(path) for path in sorted((tmp_path / "captures").glob("*.pt"))]
    assert [x.layer for x in found] == [0, 1, 2]
    for one in found:
        assert one.run_name == "tiny" and one.causal and one.q.dtype == torch.bfloat16
        assert one.q.shape == (32, 1, 4, 8) and one.k.shape == (32, 1, 2, 8)
        assert one.dout.abs().sum() > 0
