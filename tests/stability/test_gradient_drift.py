"""`benchmarks/gradient_drift.py`: errors of the gradients of W_Q and W_K, the weights held still.

The statistics are asked about planted series, with many "heads" as repetitions of one experiment;
the rest about a tiny model that the trainer has made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import benchmark_scripts
import pytest
import torch
from run_config import run_config
from training_ranks import metrics

from megatron_patch.config import load
from stable_attention.probes import BackendResult

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "stability" / "base" / "tiny_cpu.yaml"
HEADS, D, C, BATCHES = 150, 4, 12, 64
"""Of the planted series: repetitions, and the shape of a head's matrix."""
SAVED, STEPS = 3, 6
refusals = benchmark_scripts.load("drift_run").refusals
ENVIRONMENT = dict(os.environ)
"""Of the processes that are started: a session that is open in this one leaves its rank there."""


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("gradient_drift")


@pytest.fixture(scope="module")
def stats(script: Any) -> Any:
    return script.drift_statistics


def drawn(seed: int, *shape: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def figures(stats: Any, errors: torch.Tensor, true: torch.Tensor | None = None) -> Any:
    """{name: [heads]} of errors [n, h, d, c]."""
    weight = drawn(99, *errors.shape[1:])
    sketch = stats.projection(weight[0].numel(), weight.device)
    side = stats.Side(weight, ["planted"], sketch)
    true = drawn(98, *errors.shape) if true is None else true
    for t, e in zip(true, errors, strict=True):
        side.add(t, {"planted": e})
    rows = side.report()["planted"]
    return {name: torch.tensor([row[name] for row in rows]).double() for name in rows[0]}


def near(values: torch.Tensor, expected: float) -> bool:
    """Whether the mean of independent repetitions is within 4 of its standard errors."""
    return abs(float(values.mean()) - expected) < 4 * float(values.std()) / math.sqrt(len(values))


def test_noise_is_a_walk(stats: Any) -> None:
    found = figures(stats, drawn(0, BATCHES, HEADS, D, C))
    coherence, error = found["coherence"], found["coherence_se"]
    assert near(coherence, 0.0) and near(found["cross"], 0.0) and near(found["growth"], 0.0)
    # The docstring's claim: the jackknife counts the variance twice where the mean is zero.
    assert 1.2 < float(error.square().mean().sqrt() / coherence.std()) < 1.7
    assert float(((coherence / error).abs() > 3).double().mean()) < 0.02
    assert float(found["walk_z"].std()) == pytest.approx(1.0, abs=0.25)
    assert float(found["walk_sd"].mean() / coherence.std()) == pytest.approx(1.0, abs=0.25)
    # A test of level p rejects a share p of 150: within 4 standard errors of a binomial.
    for p in (0.05, 0.5):
        share = float((found["walk_p"] <= p).double().mean())
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / HEADS)
    assert float((found["ahead"] / found["ahead_se"]).std()) == pytest.approx(1.0, abs=0.25)
    # Independent directions: mean cos^2 is one over the number of dims, to the error of the one
    # projection that all pairs share, some 1 / sqrt(512) of it.
    assert float(found["line"].mean()) == pytest.approx(1 / (D * C), rel=0.1)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_planted_bias_is_recovered(stats: Any, share: float) -> None:
    """|mean|^2 is ``share`` of the mean of |E|^2."""
    bias = drawn(1, 1, HEADS, D, C)
    bias = bias / bias.norm(dim=(2, 3), keepdim=True) * math.sqrt(D * C * share)
    errors = math.sqrt(1 - share) * drawn(2, BATCHES, HEADS, D, C) + bias
    found = figures(stats, errors)
    coherence, error = found["coherence"], found["coherence_se"]
    assert float((coherence - share).abs().mean()) < 2 * float(error.mean())
    # A ratio of means: biased by a share of 1 / batches, and by no more.
    assert float(coherence.mean()) == pytest.approx(share, abs=share / BATCHES + 0.003)
    # 15 degrees of freedom of one jackknife; 150 of them, and the spread of 150 values.
    spread = float(coherence.std())
    assert float(error.square().mean().sqrt()) == pytest.approx(spread, rel=0.35)
    assert float(found["walk_p"].median()) < 1e-3
    assert float(found["ahead"].mean()) > 0.5 * math.sqrt(share)


def test_errors_of_random_sign_on_one_line(stats: Any) -> None:
    """The account without a bias: nothing adds up, and yet all errors have one direction."""
    side = drawn(3, 1, HEADS, D, 1) * drawn(4, 1, HEADS, 1, C)
    found = figures(stats, drawn(5, BATCHES, HEADS, 1, 1) * side)
    assert near(found["coherence"], 0.0) and near(found["ahead"], 0.0)
    share = float((found["walk_p"] <= 0.05).double().mean())
    assert abs(share - 0.05) < 4 * math.sqrt(0.05 * 0.95 / HEADS)
    assert float(found["line"].min()) == pytest.approx(1.0)
    assert float(found["rank_one"].min()) == pytest.approx(1.0)
    assert float(figures(stats, drawn(6, 8, HEADS, D, C))["rank_one"].max()) < 0.9


@pytest.mark.parametrize("batches", [5, 21, 32])
def test_pairs_are_those_of_all_batches(stats: Any, batches: int) -> None:
    """Against sums over pairs written out, the groups left out included."""
    errors, true = drawn(7, batches, 3, D, C) + 0.2, drawn(8, batches, 3, D, C) + 0.1
    found = figures(stats, errors, true)

    def mean_pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = a.flatten(2), b.flatten(2)
        products = torch.einsum("shx,thx->hst", a, b)
        off = products.sum((1, 2)) - products.diagonal(dim1=1, dim2=2).sum(1)
        size = (a.square().sum(2).mean(0) * b.square().sum(2).mean(0)).sqrt()
        return off / (len(a) * (len(a) - 1)) / size

    for name, other in (("coherence", errors), ("cross", true)):
        # Six digits are reported.
        torch.testing.assert_close(found[name], mean_pair(errors, other), rtol=1e-5, atol=1e-9)
        group = torch.arange(batches) % stats.GROUPS
        without = [
            mean_pair(errors[group != g], other[group != g]) for g in range(min(batches, 16))
        ]
        if batches % stats.GROUPS == 0:  # equal groups: the textbook's formula
            left = torch.stack(without)
            count = len(left)
            expected = ((count - 1) / count * (left - left.mean(0)).square().sum(0)).sqrt()
            torch.testing.assert_close(found[f"{name}_se"], expected, rtol=1e-5, atol=1e-9)
        assert bool(found[f"{name}_se"].isfinite().all())
    torch.testing.assert_close(
        found["relative"],
        (errors.square().sum((0, 2, 3)) / true.square().sum((0, 2, 3))).sqrt(),
        rtol=1e-5,
        atol=0.0,
    )


def test_growth_is_what_a_descent_step_does(stats: Any) -> None:
    weight = drawn(99, 2, D, C)
    errors = -weight * torch.tensor([0.3, -0.3], dtype=torch.float64)[:, None, None]
    found = figures(stats, errors.expand(8, -1, -1, -1))
    stepped = (weight - 0.1 * errors).norm(dim=(1, 2)) - weight.norm(dim=(1, 2))
    assert found["growth"].tolist() == [1.0, -1.0] == stepped.sign().tolist()


def test_what_is_no_number_is_none(script: Any, stats: Any) -> None:
    errors = drawn(9, 8, 3, D, C)
    errors[:, 0] = 0.0
    errors[2, 1, 0, 0] = math.nan
    weight = drawn(99, 3, D, C)
    side = stats.Side(weight, ["planted"], stats.projection(D * C, weight.device))
    for e in errors:
        side.add(e + 1, {"planted": e})
    exact, broken, good = side.report()["planted"]
    assert exact["relative"] == 0.0 and exact["coherence"] is exact["line"] is None
    assert all(value is None for name, value in broken.items() if name not in ("head", "rank_one"))
    assert all(value is not None for value in good.values())
    json.dumps(side.report(), allow_nan=False)
    told = script.drift_table.figures({"run": {"q": side.report(), "k": side.report()}})
    assert told.splitlines()[2].startswith("| run | W_Q | true |") and "| planted |" in told


def test_every_head_by_kind_bold_where_it_repeats() -> None:
    def heads(coherence: float, p: float) -> list[dict[str, Any]]:
        known = {"coherence": coherence, "walk_p": p, "relative": 0.01, "growth": 0.5}
        return [{"head": 4, "coherence_se": 0.0, **known}]

    def run(**kinds: list[dict[str, Any]]) -> dict[str, Any]:
        side = {"true": heads(0.5, 1e-5), "none": heads(0.25, 1e-4), **kinds}
        of = {"batches": 2, "sequences": 3, "repeated_sequences": 0}
        return {"q": side, "k": side, "kinds": [k for k in side if k != "true"], **of}

    runs = {"one": run(), "two": run(low_order_o=heads(0.125, 0.2))}
    origin = {"versions": {}, "machine": {"cpu": ""}, "commit": "", "utc": ""}
    table = benchmark_scripts.load("drift_table").by_head({"runs": runs, **origin})
    assert "| one | W_Q | 4 | **0.5** | **0.25** | - | 0.01 | 0.5 |" in table
    assert "| two | W_K | 4 | **0.5** | **0.25** | 0.12 | 0.01 | 0.5 |" in table


@pytest.mark.parametrize(
    ("section", "key", "value", "told"),
    [
        ("model", "layer_spec", "te", "model.layer_spec is 'te', only 'local' can be measured"),
        ("model", "position_embedding", "rope", "only 'learned_absolute' or 'none' can be"),
        ("model", "qk_layernorm", True, "model.qk_layernorm is True"),
        ("model", "softmax_type", "learnable", "the float64 truth has no sinks"),
        ("model", "window", [7, 0], "model.window is [7, 0], only None can be measured"),
        ("model", "num_query_groups", 2, "num_query_groups is 2, only None or 4 can be"),
        ("model", "attention_dropout", 0.1, "the truth would need its random numbers"),
        ("model", "hidden_dropout", 0.1, "model.hidden_dropout is 0.1"),
        ("parallel", "tensor_model_parallel_size", 2, "--set parallel.tensor_model_parallel_size"),
        ("parallel", "pipeline_model_parallel_size", 2, "parallel.pipeline_model_parallel_size is"),
        ("parallel", "context_parallel_size", 2, "parallel.context_parallel_size is 2, only 1 can"),
        ("training", "seed", 1, "--layers 2: the model has layers 0 to 1; name those"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(section: str, key: str, value: Any, told: str) -> None:
    plain = run_config(model={"position_embedding": "learned_absolute"})
    assert list(refusals(plain, [0, 1])) == []
    run = replace(plain, **{section: replace(getattr(plain, section), **{key: value})})
    (found,) = refusals(run, [2 if key == "seed" else 1])
    assert told in found


def test_latent_attention_and_several_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_patch.schema.model import MLAConfig

    plain = run_config(model={"position_embedding": "none"})
    run = replace(plain, model=replace(plain.model, mla=MLAConfig()))
    (found,) = refusals(run, [0])
    assert "model.mla is 'set', only None can be measured" in found
    monkeypatch.setenv("WORLD_SIZE", "2")
    (found,) = refusals(plain, [0])
    assert found == "WORLD_SIZE is 2, only 1 can be measured: start it without torchrun"


def command(folder: Path, *more: str, **changed: str) -> list[str]:
    """Arguments of the script for the run in ``folder``."""
    given = {
        "config": str(folder),
        "checkpoint": str(step_folder(folder)),
        "layers": "1",
        "batches": "6",
    } | changed
    return [*(part for key, value in given.items() for part in (f"--{key}", value)), *more]


def step_folder(folder: Path) -> Path:
    (found,) = (folder / "checkpoints").glob(f"step_{SAVED:08d}*")
    return found


def train(corpus: Path, folder: Path, *keys: str) -> Path:
    """A run directory of the trainer, with a checkpoint from the middle of the run."""
    keys += (f"data.blend.0.path={corpus}", f"run_dir={folder}", f"training.train_steps={STEPS}")
    keys += (f"checkpoint.interval={SAVED}", "checkpoint.keep_last=null")
    keys += ("training.deterministic=false",)
    call = [sys.executable, "-m", "megatron_patch", "train", "--config", str(TINY)]
    done = subprocess.run(
        [*call, *(part for key in keys for part in ("--set", key))],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32: what is compared with the trainer's own gradient is not its rounding."""
    return train(corpus, tmp_path_factory.mktemp("drift") / "run", "training.precision=fp32")


@pytest.fixture(scope="module")
def opened(script: Any, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(session, loaders) of the run's configuration and checkpoint, two micro-batches a batch."""
    from megatron_patch.core_patches import cpu_mode

    args = argparse.Namespace(
        config=trained,
        checkpoint=step_folder(trained),
        set=["training.micro_batch_size=2"],
        layers=[0, 1],
    )
    run = script.configuration(args, tmp_path_factory.mktemp("scratch"))
    with mock.patch.dict(os.environ):
        try:
            with script.opened(run) as parts:
                yield parts
        finally:
            cpu_mode.uninstall()


def measured(script: Any, opened: Any, table: dict[str, Any], **more: Any) -> Any:
    """Facts by layer; also what the trainer itself made."""
    session, loaders = opened
    given = {"first": SAVED, "layers": [0, 1], "batches": 6} | more
    kinds = [*table, script.TRAINER]
    return script.measure(session, loaders, kinds=kinds, table=table, **given)


def true_result(x: Any) -> BackendResult:
    """Attention in float64 by autograd."""
    q, k, v = (t.double().requires_grad_() for t in (x.q, x.k, x.v))
    scores = q @ k.mT * x.scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v
    dq, dk = torch.autograd.grad(out, (q, k), x.dout.double())
    return BackendResult(out=out, dq=dq, dk=dk)


def test_it_is_the_gradient_of_the_weights(
    script: Any, opened: Any, stats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x, dQ and dK, their heads and the sum over micro-batches: against the trainer's autograd."""
    monkeypatch.setattr(stats, "BLOCK_BYTES", 8 * 32 * 12)  # the truth in blocks of 12 rows
    session, _ = opened
    assert session.micro_batches == 2
    weights = [p.detach().clone() for chunk in session.chunks for p in chunk.parameters()]
    layers = measured(script, opened, {"exact": true_result})
    for facts in layers.values():
        for side in ("q", "k"):
            for head in facts[side]["trainer"]:
                # A sum of 128 products in float32: its rounding, some times the unit's.
                assert head["relative"] < 16 * torch.finfo(torch.float32).eps
            for head in facts[side]["exact"]:
                assert head["relative"] < 64 * torch.finfo(torch.float64).eps
            assert all(head["rms"] > 0 for head in facts[side]["true"])
    after = [p.detach() for chunk in session.chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))
    # The hooks are off again.
    assert not any(m._forward_pre_hooks for c in session.chunks for m in c.modules()
                   if type(m).__name__ == "ColumnParallelLinear")  # fmt: skip


def test_it_begins_with_the_batch_that_training_had_next(
    script: Any, opened: Any, trained: Path
) -> None:
    from megatron_patch.training.step import fetch

    session, loaders = opened
    still = script.Still(session, [1], [])
    reader = loaders.iterate("train", start_step=SAVED)
    loss = still.batch(fetch(session, reader), {})
    # The loss of a step is that before its update, in other micro-batches: float32's rounding.
    assert loss == pytest.approx(float(metrics(trained)[SAVED + 1]["loss"]), rel=1e-5)
    later = metrics(trained)[SAVED + 2]["loss"]
    assert loss != pytest.approx(float(later), rel=1e-5)
    still.layers[1].close()


def test_a_constant_added_to_dq_is_a_bias(script: Any, opened: Any) -> None:
    """Of rank one: the constant times the sum of x; and dK has none."""

    def biased(x: Any) -> BackendResult:
        true = true_result(x)
        assert true.dq is not None
        return BackendResult(out=true.out, dq=true.dq + 0.01, dk=true.dk)

    def noisy(x: Any) -> BackendResult:
        true = true_result(x)
        assert true.dq is not None and true.dk is not None
        dq, dk = (t + 0.01 * torch.randn_like(t) for t in (true.dq, true.dk))
        return BackendResult(out=true.out, dq=dq, dk=dk)

    facts = measured(script, opened, {"biased": biased, "noisy": noisy}, layers=[1], batches=16)[1]
    for head, walk in zip(facts["q"]["biased"], facts["q"]["noisy"], strict=True):
        assert head["coherence"] > 0.5 and head["walk_p"] < 1e-3 and head["ahead"] > 0.5
        assert head["coherence"] > 5 * head["coherence_se"]
        assert head["rank_one"] == pytest.approx(1.0) == head["rank_one_of_mean"]
        assert abs(walk["coherence"]) < 4 * walk["walk_sd"] and walk["rank_one"] < 0.9
    for head in facts["k"]["biased"]:
        assert head["relative"] < 64 * torch.finfo(torch.float64).eps


def test_what_is_known_so_far_is_written_every_minute(
    script: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what as many batches would have found, and looking at it changes nothing."""
    told: list[Any] = []
    fewer = measured(script, opened, {}, layers=[0], batches=5, write=told.append)
    whole = measured(script, opened, {}, layers=[0])
    assert not told
    monkeypatch.setattr(script, "WRITE_EVERY", 0.0)
    assert measured(script, opened, {}, layers=[0], write=told.append) == whole
    assert [facts[0]["batches"] for facts in told] == [4, 5]
    assert told[1] == fewer


def test_it_ends_when_there_is_no_time_for_another_batch(
    script: Any, opened: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    answers = iter([False] * 4 + [True])
    facts = measured(script, opened, {}, layers=[0], over=lambda: next(answers))[0]
    assert facts["batches"] == 5 and facts["repeated_sequences"] == 0
    with pytest.raises(script.Refusal, match="only 1 batches were done, 4 are needed"):
        measured(script, opened, {}, layers=[0], over=lambda: True)
    # Started at 90, to end by 190; the first batch, which compiles, says nothing about the others.
    clock = iter([100.0, 160.0, 161.0, 182.0])
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    progress = script._Progress(10, 90.0, 100.0)
    capsys.readouterr()
    assert [progress.over() for _ in range(3)] == [False, False, True]
    assert capsys.readouterr().out.splitlines() == [
        "batch 1 of 10, 60.00 s each, about 9.0 min left",
        "batch 3 of 10, 11.00 s each, about 1.3 min left",
    ]


@pytest.mark.gpu
def test_the_kernels_themselves(corpus: Path, tmp_path: Path) -> None:
    keys = ("training.device=cuda", "training.precision=bf16", "attention.backend=stable_flash")
    run = train(corpus, tmp_path / "run", *keys)
    more = ["--kinds", "none", "compensated", "sdpa_flash", "rounded", "trainer"]
    call = [sys.executable, str(ROOT / "benchmarks" / "gradient_drift.py"), *command(run)]
    done = subprocess.run([*call, *more, "--out", str(tmp_path)], env=ENVIRONMENT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gradient_drift.json").read_text())
    facts = result["runs"][f"tiny, step {SAVED}, layer 1"]
    for side in ("q", "k"):
        for head in range(2):
            size = {kind: facts[side][kind][head]["relative"] for kind in facts["kinds"]}
            assert 2**-13 < size["rounded"] < size["compensated"] < size["none"] < 2**-5
            assert size["sdpa_flash"] < 2**-5 and size["trainer"] < 2**-5


def test_the_script_from_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    """BF16, recomputed layers, an earlier result kept; nothing is written into the run."""
    before = sorted(trained.rglob("*"))
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"commit": "c", "runs": {"old": {"layer": 3}}}))
    sets = ("training.precision=bf16", "training.micro_batch_size=2",
            "training.recompute.granularity=full")  # fmt: skip
    more = [part for key in sets for part in ("--set", key)]
    more += ["--keep", str(kept), "--out", str(tmp_path / "out")]
    call = [sys.executable, str(ROOT / "benchmarks" / "gradient_drift.py")]
    done = subprocess.run(
        [*call, *command(trained, *more)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"| tiny, step {SAVED}, layer 1 | W_Q | compensated |" in done.stdout
        and "batch 1 of 6" in done.stdout
    )
    assert sorted(trained.rglob("*")) == before
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["gradient_drift.json"]
    result = json.loads((tmp_path / "out" / "gradient_drift.json").read_text())
    assert result["runs"]["old"] == {"commit": "c", "layer": 3}
    facts = result["runs"][f"tiny, step {SAVED}, layer 1"]
    assert facts["first_batch"] == SAVED and facts["batches"] == 6
    for side in ("q", "k"):
        for head in range(2):
            size = {kind: facts[side][kind][head]["relative"] for kind in facts["kinds"]}
            # Rounding dQ once is part of what the others do; BF16 has 8 bits.
            assert 2**-13 < size["rounded"] < size["compensated"] < size["none"] < 2**-5
            assert size["trainer"] < 2**-5


@pytest.mark.parametrize(
    ("changed", "more", "told"),
    [
        ({"checkpoint": "."}, [], "--checkpoint .: there is no manifest.json in it; name the"),
        ({"layers": "2"}, [], "--layers 2: the model has layers 0 to 1"),
        ({"kinds": "nothing"}, [], "--kinds nothing: not on cpu; choose from compensated, "),
        ({"config": "nowhere.yaml"}, [], "nowhere.yaml"),
        ({}, ["--set", "model.position_embedding=rope"], "model.position_embedding is 'rope'"),
    ],
)
def test_one_line_for_what_is_wrong(
    script: Any, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, changed: Any,
    more: Any, told: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["x", *command(trained, *more, **changed)])
    assert script.main() == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["x", *command(trained, batches="2")])
    with pytest.raises(SystemExit):
        script.main()
    assert "--batches 2: at least 4" in capsys.readouterr().err


def test_a_run_of_an_experiment_keeps_its_variant(script: Any, tmp_path: Path) -> None:
    """The trainer's own pass is then what the run's was; see `experiments.cell.record`."""
    assert script.variant_of(tmp_path) == script.variant_of(TINY) == "plain"
    (tmp_path / "experiment.json").write_text(json.dumps({"variant": "low_order_o"}))
    assert script.variant_of(tmp_path) == "low_order_o"


def test_the_configuration_leaves_no_trace(script: Any, trained: Path, tmp_path: Path) -> None:
    """What the run itself began with is not looked for, and its directory is not this one."""
    args = argparse.Namespace(
        config=trained / "config.yaml",
        checkpoint=step_folder(trained),
        set=["checkpoint.load_from=gone", "training.train_steps=9"],
        layers=[0],
    )
    run = script.configuration(args, tmp_path)
    assert run.run_dir == str(tmp_path) and run.checkpoint.directory is None
    assert run.checkpoint.load_weights_only and run.training.train_steps == 9
    assert load(str(trained / "config.yaml")).config.run_dir == str(trained)
