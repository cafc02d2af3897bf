"""The command: what it prints, what it refuses, and what it proposes instead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import pytest

from megatron_patch import config
from megatron_patch.cli import app
from megatron_patch.cli.cluster import token_budget
from megatron_patch.planner import compute, hardware, plan, search

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
TRAINING = ROOT / "docs" / "assets" / "training.json"


def run_plan(capsys, *arguments) -> tuple[int, str, str]:
    code = app.run(["plan", *map(str, arguments)])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def planned(path: str, gpu: str, nodes: int, *sets: str, per_node: int = 8, vocab: int = 128256):
    run = config.load(CONFIGS / path, list(sets)).config
    machine = plan.Machine(hardware.gpu_named(gpu), nodes, per_node)
    return plan.make_plan(run, machine, plan.vocabulary_of(run, vocab))


def test_report(capsys, tmp_path):
    picture = tmp_path / "memory.png"
    path = CONFIGS / "llama_70b_8k.yaml"
    code, out, _ = run_plan(
        capsys, "--config", path, "--nodes", 2, "--tokens", "1T", "--plot", picture
    )
    assert code == 0
    for words in ("TP8 x CP1 x PP2 x DP1", "70,553,706,496 parameters", "fits:", "1,000.0B tokens"):
        assert words in out
    assert picture.stat().st_size > 5000


def test_json_says_the_same(capsys):
    path = CONFIGS / "llama_8b_8k.yaml"
    code, out, _ = run_plan(capsys, "--config", path, "--gpu", "h100", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["fits"]
    assert found["layout"]["dp"] == 4
    assert found["links"]["tp"] == "NVLink"
    (stage,) = found["stages"]
    assert sum(stage["bytes"].values()) == stage["total"]
    assert found["step_seconds"] == pytest.approx(sum(found["step_parts"].values()))


def test_70b_on_one_node_is_refused_with_the_smallest_that_fits(capsys):
    path = CONFIGS / "llama_70b_8k.yaml"
    arguments = ("--set", "parallel.pipeline_model_parallel_size=1")
    code, _, err = run_plan(capsys, "--config", path, "--nodes", 1, *arguments)
    assert code == 2
    assert "does not fit" in err
    assert "Nothing tried fits 1 node(s) of 8" in err
    assert "fewest nodes that do (tried by doubling): 2" in err
    assert "--set parallel.pipeline_model_parallel_size=2" in err


def test_70b_as_shipped_on_one_node_is_refused_with_two(capsys):
    code, _, err = run_plan(capsys, "--config", CONFIGS / "llama_70b_8k.yaml")
    assert code == 2
    assert "16 ranks hold one replica" in err
    assert "Nothing tried fits these 8 GPUs; on 2 nodes would fit:" in err
    assert err.count("--set parallel.") >= 3


@pytest.mark.parametrize("recompute", [
    [],
    ["granularity=full", "method=block", "num_layers=4"],
    ["granularity=selective", "modules=[core_attn]"],
])  # fmt: skip
def test_what_is_proposed_fits_and_loads(recompute):
    """Every proposal, given back as --set, passes the checks and the plan."""
    path = CONFIGS / "llama_8b_8k.yaml"
    tight = ["parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false"]
    tight += [f"training.recompute.{setting}" for setting in recompute]
    run = config.load(path, tight).config
    machine = plan.Machine(hardware.gpu_named("h100"), 1, 8)
    vocabulary = plan.vocabulary_of(run, 128256)
    assert not plan.make_plan(run, machine, vocabulary).fits
    found = search.alternatives(run, machine, vocabulary)
    rates = [a.plan.speed.tokens_per_second for a in found]
    assert rates == sorted(rates, reverse=True)
    assert len(found) == 5
    for one in found:
        sets = [f"{key}={value}" for key, value in one.changes.items()]
        again = config.load(path, tight + sets).config
        assert plan.make_plan(again, machine, vocabulary).fits
        assert again.parallel == one.plan.run.parallel


def test_a_layout_that_does_not_divide_is_refused_with_one_that_does(capsys):
    path = CONFIGS / "llama_70b_8k.yaml"
    code, _, err = run_plan(capsys, "--config", path, "--nodes", 3, "--gpus-per-node", 8)
    assert code == 2
    assert "does not divide the 24 ranks" in err


@pytest.mark.parametrize(("arguments", "words"), [
    (["--gpu", "h300"], "'h300' is not one of"),
    (["--nodes", "0"], "0: must be at least 1"),
    (["--gpus-per-node", "0"], "0: must be at least 1"),
    (["--tokens", "many"], "not a number of tokens"),
    (["--tokens", "9" * 400], "not a number of tokens up to 1e+18"),
    (["--vocab-size", "0"], "--vocab-size: 0"),
    (["--plot", "no/such/folder/x.png"], "--plot: cannot write no/such/folder/x.png"),
    (["--plot", "x.nonsense"], "--plot: cannot write x.nonsense"),
])  # fmt: skip
def test_bad_arguments_end_in_words(capsys, arguments, words):
    path = CONFIGS / "gpt2_124m.yaml"
    code, _, err = run_plan(capsys, "--config", path, *arguments)
    assert code == 2
    assert words in err


def test_a_missing_tokenizer_is_assumed_aloud(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = CONFIGS / "gpt2_124m.yaml"
    _, out, _ = run_plan(capsys, "--config", path)
    assert "ASSUMED GPT-2's: data/tokenizer.json is not here" in out
    assert "124,475,904 parameters" in out  # 50,257 rows padded to 50,304
    muon = ("--set", "optimizer.name=muon")
    _, out, _ = run_plan(capsys, "--config", path, "--vocab-size", 32768, *muon)
    assert "111," in out and "ASSUMED" not in out and "without Muon's own" in out
    _, out, _ = run_plan(capsys, "--config", CONFIGS / "llama_8b_8k.yaml")
    assert "vocabulary 128,256" in out and "ASSUMED Llama 3's" in out


@pytest.mark.parametrize(
    ("text", "tokens"), [("300B", 3e11), ("2.5t", 2.5e12), ("100000000", 1e8), (".5M", 5e5)]
)
def test_token_budget(text, tokens):
    assert token_budget(text) == tokens


@pytest.mark.parametrize("gpus", [1, 2])
def test_step_time_of_gpt2_124m_is_the_measured_one(gpus):
    """The point the eager memory factor was fitted to (1 GPU), and one it was not (2 GPUs).

    What compile_fusions fuses has grown since its own factor was fitted.
    """
    part = f"gpt2_124m, {gpus} GPU{'s' * (gpus > 1)}"
    measured = json.loads(TRAINING.read_text())[part]
    name = "trainer, stable_flash"
    (seconds,) = (r["step_seconds"] for r in measured["runs"] if r["system"] == name)
    found = planned(
        "gpt2_124m.yaml",
        "h200",
        1,
        f"training.micro_batch_size={measured['micro_batch']}",
        f"training.global_batch_size={measured['global_batch']}",
        "training.compile_fusions=false",
        per_node=gpus,
        vocab=32768,
    )
    assert found.speed.step.total == pytest.approx(seconds, rel=0.08)


def test_attention_that_projects_takes_as_long_as_measured():
    rows = json.loads((TRAINING.parent / "projection.json").read_text())["times"]["rows"]
    ms: dict = {}
    for row in rows:
        if row["kernels"] == "":  # those of sm_90, where it has them
            ms.setdefault((row["d"], row["backend"]), []).append(row["both_ms"])

    def attention(*sets: str) -> float:
        sets = tuple(f"attention.{x}" for x in sets)
        return planned("llama_8b_8k.yaml", "h200", 1, *sets).speed.step.attention

    for stabilizer, kinds in compute.PROJECTING.items():
        for backward, by_dim in kinds.items():
            name = stabilizer + ", own_x2" * (backward == "own_x2")
            for d, factor in by_dim.items():
                pairs = zip(ms[d, name], ms[d, "none"], strict=True)
                assert factor == round(geometric_mean(a / b for a, b in pairs), 2), (name, d)
            asked = attention(f"stabilizer={stabilizer}", f"backward={backward}")
            assert asked / attention() == pytest.approx(by_dim[128])


def test_more_of_everything_costs_more():
    """Monotone where it must be: memory in the batch, time in the layers."""
    one = planned("gpt2_124m.yaml", "h200", 1)
    less = planned("gpt2_124m.yaml", "h200", 1, "training.micro_batch_size=32")
    assert one.worst.total > less.worst.total
    deep = planned("gpt2_124m.yaml", "h200", 1, "model.num_layers=24")
    assert deep.speed.step.total > one.speed.step.total
    assert deep.worst.states.total > one.worst.states.total


def test_plan_needs_no_torch_process_group_or_gpu():
    import torch

    planned("llama_8b_8k.yaml", "h100", 1)
    assert not torch.distributed.is_initialized()


def test_one_byte_too_much_does_not_fit():
    found = planned("llama_8b_8k.yaml", "h100", 1)
    exact = replace(found.machine.gpu, memory=found.worst.total / 2**30)
    less = replace(exact, memory=exact.memory - 1e-6)
    assert replace(found, machine=replace(found.machine, gpu=exact)).fits
    assert not replace(found, machine=replace(found.machine, gpu=less)).fits
