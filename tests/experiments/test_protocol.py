"""Protocols: what is refused, which runs they mean, and that a started one cannot be changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_patch.config import ConfigError
from megatron_patch.config.checks.stability import capture_mib
from megatron_patch.experiments import plan
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.protocol import Protocol, read, trainer_config
from megatron_patch.experiments.store import FINISHED, State, Store

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "stability"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[p.stem for p in SHIPPED])
def test_shipped_protocols_pass(path: Path) -> None:
    experiment = read(path)
    assert experiment.runs and len({run.id for run in experiment.runs}) == len(experiment.runs)


def test_the_baselines_are_what_was_promised() -> None:
    """Two seeds of baseline and vendor numerics, three of compensated; both residual streams."""
    for name, residual in (("baselines", True), ("baselines_bf16_residual", False)):
        experiment = read(CONFIGS / f"{name}.yaml")
        seeds = {}
        for run in experiment.runs:
            seeds.setdefault(run.cell.name, []).append(run.seed)
            loaded = trainer_config(experiment.config, run, steps=experiment.protocol.steps).config
            assert loaded.model.fp32_residual_connection is residual
            assert (loaded.optimizer.lr, loaded.optimizer.weight_decay) == (1e-3, 0.0)
            assert loaded.training.global_batch_size * loaded.model.seq_length == 65536
            # Nobody has to know the step of an explosion; a file may ship as a fixture.
            assert loaded.stability.capture_at == ["watch", "danger"]
            assert loaded.stability.capture_at_grad_norm == experiment.protocol.explosion.grad_norm
            assert capture_mib(loaded, heads=loaded.stability.capture_worst_heads) * 2**20 < 5e6
        assert experiment.protocol.steps == 15000
        assert seeds["compensated"] == seeds["none"] == [1, 2, 3]
        two = ("sdpa_cudnn", "sdpa_flash", "fp32_attention", "paper_bf16")
        assert all(seeds[cell] == [1, 2] for cell in two)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_runs_of_a_seed_see_the_same_batches(path: Path) -> None:
    """Or the first one's reference refuses all others."""
    experiment = read(path)
    seen: dict[int, tuple[Any, ...]] = {}
    for run in experiment.runs:
        loaded = trainer_config(experiment.config, run, steps=experiment.protocol.steps).config
        batches = (loaded.training.global_batch_size, loaded.model.seq_length, repr(loaded.data))
        assert seen.setdefault(run.seed, batches) == batches, run.id


def test_attribution_covers_every_question() -> None:
    experiment = read(CONFIGS / "attribution.yaml")
    cells = {run.cell.name for run in experiment.runs}
    assert cells == {
        *("none", "low_order_o", "consistent_sum", "both", "fp32_o", "fp32_o_consistent_sum"),
        *("dynamic_max_2", "dynamic_max_7", "k_centered", "v_centered", "qk_norm"),
        *("weight_decay", "fp32_attention"),
    }
    assert all(len([r for r in experiment.runs if r.cell.name == c]) == 2 for c in cells)
    configs = {
        r.cell.name: trainer_config(experiment.config, r, steps=15000).config
        for r in experiment.runs
    }
    assert configs["dynamic_max_7"].attention.dynamic_max_beta == 7
    assert configs["qk_norm"].model.qk_layernorm
    assert configs["weight_decay"].optimizer.weight_decay == 0.1
    assert configs["k_centered"].attention.stabilizer == "none"


def test_the_rescue_continues_what_keeps_its_checkpoints() -> None:
    """On both sides of the event, with a control that changes nothing."""
    for name, base in (("rescue", "none"), ("rescue_paper", "paper_bf16")):
        experiment = read(CONFIGS / f"{name}.yaml")
        kinds = {}
        for run in experiment.runs:
            loaded = trainer_config(experiment.config, run, steps=experiment.protocol.steps).config
            kinds[run.cell.name] = (run.cell.before, loaded.attention.stabilizer)
            assert run.seed in (1, 2) and experiment.gpus_of(run) == 1 + (run.cell.name == "base")
        assert kinds.pop("base") == kinds.pop("guard") == (0, base)
        assert kinds.pop("control") == (500, base)
        assert sorted(kinds.values()) == [
            (n, "compensated") for n in (-1000, -500, -250, 0, 250, 500, 1000)
        ]


def test_the_late_rescue_outlasts_its_lost_loss() -> None:
    """The run to be saved is not ended before the last cell's checkpoint, nor its checkpoints."""
    experiment = read(CONFIGS / "rescue_late.yaml")
    base, *cells = experiment.protocol.cells
    last = max(-cell.before for cell in cells)
    assert base.follow == last and (experiment.protocol.explosion.stop_after or 0) >= last
    assert "checkpoint.keep_last=null" in base.set
    for cell in cells:
        assert cell.from_cell == "base" and (cell.follow or 0) + cell.before >= 1500
        assert "attention.stabilizer=compensated" in cell.set


def test_a_cell_that_is_continued_changes_what_it_changes_from_step_0() -> None:
    """All from one checkpoint of a run with plain numerics, with its control first."""
    whole = {cell.name: cell for cell in read(CONFIGS / "attribution.yaml").protocol.cells}
    whole |= {"control": whole.pop("none"), "compensated": whole.pop("both")}
    del whole["qk_norm"]  # it has weights that the base has not
    experiment = read(CONFIGS / "attribution_continued.yaml")
    base, control, *_ = cells = experiment.protocol.cells
    assert (base.name, base.gpus, base.variant, control.name) == ("base", 2, "plain", "control")
    assert {cell.name for cell in cells[1:]} == whole.keys()
    for cell in cells[1:]:
        assert (cell.from_cell, cell.before) == ("base", 800) and (cell.follow or 0) >= 50
        assert (cell.set, cell.variant) == (whole[cell.name].set, whole[cell.name].variant)


def test_a_run_is_picked_by_cell_by_its_own_name_or_by_seed(protocol: Path) -> None:
    runs = read(protocol).runs
    picked = {
        only: [run.id for run in runs if run.among(only.split())]
        for only in ("", "s1", "a", "a-s2", "b s2")
    }
    assert picked == {
        "": ["a-s1", "b-s1", "a-s2"],
        "s1": ["a-s1", "b-s1"],
        "a": ["a-s1", "a-s2"],
        "a-s2": ["a-s2"],
        "b s2": ["b-s1", "a-s2"],
    }


@pytest.mark.parametrize("name", ["s1", "s7"])
def test_no_cell_has_the_name_of_a_seed(protocol: Path, name: str) -> None:
    """Neither of the protocol's nor of a cell's own."""
    text = protocol.read_text().replace("name: b", f"name: {name}").replace("[1]}", "[1, 7]}")
    protocol.write_text(text)
    with pytest.raises(ConfigError, match="--only takes that for a seed"):
        read(protocol)


def test_runs_are_ordered_by_seed(protocol: Path) -> None:
    """An experiment that is cut short has whole comparisons of its first seed."""
    assert [run.id for run in read(protocol).runs] == ["a-s1", "b-s1", "a-s2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seeds: [1, 2]>seeds: [1, 1]", "none twice"),
        ("seeds: [1, 2]>seeds: []", "at least one seed"),
        ("name: b,>name: a,", "the name of two cells"),
        ("name: b,>name: 'B b',", "a-z 0-9 _"),
        ("name: b,>name: b, variant: nothing,", "use one of plain"),
        ("name: b,>name: b, variant: low_order_o,", "it changes stable_flash"),
        ("optimizer.lr=2e-3>optimizer.lr=-1", "must be more than 0"),
        ("optimizer.lr=2e-3>no.key=1", "unknown key"),
        ("steps: 100>steps: 100\ngpus_per_run: 2", "leave it at 1"),
        ("steps: 100>steps: 0", "must be at least 1"),
        ("save_seconds: 0>save_second: 0", "save_seconds"),
        ("window: 10>window: 0", "at least 1"),
    ],
)
def test_what_is_refused(protocol: Path, change: str, message: str) -> None:
    old, _, new = change.partition(">")
    text = protocol.read_text()
    assert old in text
    protocol.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read(protocol)


def test_a_started_protocol_cannot_be_changed(protocol: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    Store(out, read(protocol)).close()
    text = protocol.read_text()
    for old, new in (
        ("optimizer.lr=2e-3", "optimizer.lr=3e-3"),
        ("loss: 5.0", "loss: 4.0"),
        ("steps: 100", "steps: 90"),
        ("name: tiny", "name: other"),
    ):
        protocol.write_text(text.replace(old, new))
        with pytest.raises(ExperimentError, match="--out"):
            Store(out, read(protocol))
    # Runs may be added, and that is on record.
    protocol.write_text(text.replace("seeds: [1]", "seeds: [1, 2]"))
    store = Store(out, read(protocol))
    assert "b-s2" in store.states and '"added"' in (out / "experiment.json").read_text()
    store.states["b-s2"] = State(FINISHED, attempts=[{"exit_code": 0}])
    store.save()
    with pytest.raises(ExperimentError, match="another process"):
        Store(out, read(protocol))
    store.close()
    # A run that was started cannot be made to disappear.
    protocol.write_text(text)
    with pytest.raises(ExperimentError, match="run b-s2: taken out, but it was started"):
        Store(out, read(protocol))


SAVING = ("checkpoint.interval=7", "checkpoint.keep_last=2", "checkpoint.async_save=true")


@pytest.mark.parametrize("key", SAVING)
def test_how_often_a_run_is_saved_is_a_choice_of_the_day(
    protocol: Path, tmp_path: Path, key: str
) -> None:
    Store(tmp_path / "out", read(protocol)).close()
    Store(tmp_path / "out", read(protocol, [key])).close()
    with pytest.raises(ExperimentError, match=r"run a-s1: set .*checkpoint.resume"):
        Store(tmp_path / "out", read(protocol, ["checkpoint.resume=never"]))


@pytest.mark.parametrize(
    ("cell", "change", "refused"),
    [
        ("base", "checkpoint.interval=20", True),
        ("base", "checkpoint.async_save=true", True),
        ("late", "checkpoint.interval=20", False),
        ("late", "checkpoint.keep_last=2", False),
    ],
)
def test_what_others_continue_from_is_not(
    protocol: Path, tmp_path: Path, cell: str, change: str, refused: bool
) -> None:
    """They start from the newest checkpoint at a distance of its event: saved otherwise, elsewhere.

    Adding a cell that continues a run fixes how that run is saved.
    """
    head = protocol.read_text().split("cells:")[0]
    cells = {"base": "checkpoint.interval=10, checkpoint.keep_last=null", "late": ""}

    def write(names: list[str]) -> None:
        lines = [
            f"  - {{name: {name}, set: [{cells[name]}]"
            + (", from_cell: base, before: -10}" if name == "late" else "}")
            for name in names
        ]
        protocol.write_text(head + "cells:\n" + "\n".join(lines) + "\n")

    write(["base", "late"])
    Store(tmp_path / "both", read(protocol)).close()
    write(["base"])
    Store(tmp_path / "alone", read(protocol)).close()
    cells[cell] = ", ".join(text for text in (cells[cell], change) if text)
    write(["base", "late"])
    for out in ("both", "alone"):
        if refused:
            with pytest.raises(ExperimentError, match=r"run base-s1: set .*checkpoint"):
                Store(tmp_path / out, read(protocol))
        else:
            Store(tmp_path / out, read(protocol)).close()


def test_choices_of_the_day_may_differ(protocol: Path, tmp_path: Path) -> None:
    """Machines keep data in different places, and cut a batch into passes that fit them.

    What is captured changes nothing.
    """
    out = tmp_path / "out"
    here = ["data.blend.0.path=here/books", "data.tokenizer.path=null"]
    Store(out, read(protocol, here)).close()
    there = ["data.blend.0.path=there/books", "training.micro_batch_size=2"]
    there += ["stability.capture_steps=[2,3]", "stability.capture_layers=[0]"]
    Store(out, read(protocol, there)).close()
    with pytest.raises(ExperimentError, match="--out") as refused:
        Store(out, read(protocol, [*here, "data.seed=5"]))
    # What differs is named, and nothing else of the run.
    assert "data.seed=5" in str(refused.value) and "recipe" not in str(refused.value)


def test_a_gpu_takes_its_share_in_one_pass() -> None:
    def sizes(**options) -> dict[str, int]:
        experiment = read(CONFIGS / "rescue.yaml", **options)
        loaded = {r.id: trainer_config(experiment.config, r, steps=15000) for r in experiment.runs}
        return {name: found.config.training.micro_batch_size for name, found in loaded.items()}

    alone = sizes()
    assert alone["base-s2"] == 32 and alone["at_event-s2"] == 64  # two GPUs, and one
    assert sizes(gpus_per_run=4)["at_event-s2"] == 16
    # A key on the command line is the user's; some numbers do not divide a batch.
    assert set(sizes(overrides=["training.micro_batch_size=8"]).values()) == {8}
    with pytest.raises(ConfigError, match=r"64 sequences on 3 GPUs \(run none-s1\)"):
        read(CONFIGS / "baselines.yaml", gpus_per_run=3)
    # It is no part of what is fixed: the smoke protocol leaves the size as configured.
    assert not read(CONFIGS / "smoke.yaml").protocol.single_pass


def test_the_plan_says_what_time_is_enough_for() -> None:
    experiment = read(CONFIGS / "early.yaml")
    protocol = experiment.protocol
    assert isinstance(protocol, Protocol)
    text = plan.describe(experiment, steps=7000, gpus=2, minutes=10, only=["compensated"])
    assert "2 runs of 7,000 steps" in text and "2 side by side" in text
    steps = int((600 - protocol.save_seconds) * protocol.steps_per_second)
    assert f"0 of 2 run(s) come to their end; compensated-s1 is at {steps:,} of 7,000" in text
    assert "the same command goes on from their checkpoints" in text
    pairs = read(CONFIGS / "baselines.yaml", gpus_per_run=2)
    text = plan.describe(pairs, steps=15000, gpus=4, minutes=24, only=["none"])
    assert "at 14.8 steps/s" in text and "2 side by side" in text  # the protocol's 7.4 are of one


def test_the_plan_of_continued_runs() -> None:
    """Two GPUs: the run to be saved has both, the continued ones one each, two at a time."""
    experiment = read(CONFIGS / "rescue.yaml")
    names = ["base-s2", "at_event-s2", "before_500-s2", "control-s2", "after_500-s2"]
    runs = [experiment.by_id(name) for name in names]
    speed = experiment.protocol.steps_per_second
    assert speed is not None
    times = plan.timetable(experiment, runs[::-1], steps=15000, seats=2)
    assert [(run.id, start * speed, end * speed) for run, start, end in times] == [
        ("base-s2", 0, pytest.approx(7500)),
        ("after_500-s2", pytest.approx(7500), pytest.approx(9000)),
        ("control-s2", pytest.approx(7500), pytest.approx(9500)),
        ("before_500-s2", pytest.approx(9000), pytest.approx(11000)),
        ("at_event-s2", pytest.approx(9500), pytest.approx(11000)),
    ]
    minutes = (10000 / speed + experiment.protocol.save_seconds) / 60
    text = plan.describe(experiment, steps=15000, gpus=2, minutes=minutes, only=names)
    assert "base-s2 takes 2 GPU(s)" in text and "3 of 5 run(s) come to their end" in text
    assert "-s2 is at 1,000 of 2,000 steps" in text
    # One seat is too few for the first run; the plan counts it as if it had them.
    alone = plan.timetable(experiment, runs[:1], steps=15000, seats=1)
    assert alone[0][2] * speed == pytest.approx(7500)
