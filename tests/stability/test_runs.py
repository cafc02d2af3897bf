"""Telemetry, guard and captures in real runs on CPU ranks.

One process trains two steps and saves; it and every layout do step 3 from there on the same data.
What the telemetry says about step 3 must not depend on the layout. Row numbers are chosen so that
all rows are sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_ranks
from training_ranks import ONE_LAYER, figures, log_of, metrics

from megatron_patch.stability import capture, record
from megatron_patch.stability.capture import CaptureFile
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.record import Telemetry

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("own_worker")]

TP, SP = "parallel.tensor_model_parallel_size", "parallel.sequence_parallel"
PP, VPP = "parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size"
WHOLE = "parallel.use_distributed_optimizer=false"
WATCH = ["stability.interval=1", "stability.rows=1000", "training.train_steps=3"]
TAKE = ["stability.capture_steps=[3]", "stability.capture_layers=[0,3]",
        "stability.capture_heads=[1,2,3]"]  # fmt: skip
FULL = ["training.recompute.granularity=full"]
CORE = ["training.recompute.granularity=selective", "training.recompute.modules=[core_attn]"]

SIGNS = ["stability.capture_at=[watch, danger]"]

SMALL = [*ONE_LAYER, "training.train_steps=9", "checkpoint.keep_last=2"]
FULL_DISK = ["logging.tensorboard=true"]
CHANGED = "attention.stabilizer=compensated"
FAST = ["training.precision=fp32", "attention.backend=reference",
        "attention.stabilizer=compensated"]  # fmt: skip
ONE_STEP = ["training.train_steps=1", "stability.interval=1", "optimizer.warmup_steps=0"]
LATENT = ["model.num_query_groups=null", "model.mla.kv_lora_rank=8", "model.mla.qk_head_dim=8",
          "model.mla.qk_pos_emb_head_dim=4", "model.mla.v_head_dim=8", "model.mtp.num_layers=1",
          "stability.capture_steps=[1]", "stability.capture_layers=[4]",
          "logging.tensorboard=true"]  # fmt: skip
SINKS = ["model.softmax_type=learnable", "model.window=[7,0]", "model.window_skip_freq=2",
         "model.attention_dropout=0.1"]  # fmt: skip
# One key/value head: both tensor-parallel ranks hold it, and rank 0 captures nothing.
MULTI_QUERY = ["model.num_query_groups=1", "stability.capture_steps=[3]",
               "stability.capture_layers=[0]", "stability.capture_heads=[3]"]  # fmt: skip
EXPERTS = ["model.moe.num_experts=4", "model.moe.ffn_hidden_size=32",
           "model.moe.aux_loss_coeff=0.0"]  # fmt: skip


def run(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    return {"set": [f"name={name}", *keys], **more}


def run_all(folder: Path, corpus: Path, ranks: int, runs: list[dict[str, Any]]) -> Any:
    results = training_ranks.run_ranks(folder, corpus, ranks, runs)
    return {
        r["set"][0].removeprefix("name="): result for r, result in zip(runs, results, strict=True)
    }


# Run directories are relative to the ranks' working directory.
BEGIN, BEGIN_WHOLE = "checkpoint.load_from=runs/start", "checkpoint.load_from=runs/start_whole"
BEGIN_MQA = "checkpoint.load_from=runs/start_mqa"


@pytest.fixture(scope="module")
def single(folder: Path, corpus: Path) -> Path:
    """One process: the start, and step 3 in every way that must not matter."""
    two_of_three = ["training.exit_at_step=2", "training.train_steps=3", "stability.enabled=false"]
    results = run_all(folder, corpus, 1, [
        run("start", *two_of_three),
        run("start_whole", *two_of_three, WHOLE),
        run("one", BEGIN, *WATCH, *TAKE),
        run("off", BEGIN, "training.train_steps=3", "stability.enabled=false"),
        run("full", BEGIN, *WATCH, *FULL),
        run("core", BEGIN, *WATCH, *CORE),
        run("local", BEGIN, *WATCH, "attention.backend=mcore_local"),
        run("latent", *ONE_STEP, *LATENT),
        run("sinks", *ONE_STEP, *SINKS),
        run("start_mqa", *two_of_three, *MULTI_QUERY),
        run("mqa", BEGIN_MQA, *WATCH, *MULTI_QUERY),
    ])  # fmt: skip
    assert all(r[0]["code"] == 0 for r in results.values())
    return folder / "runs"


@pytest.fixture(scope="module")
def two(folder: Path, single: Path, corpus: Path) -> dict[str, Any]:
    """Two processes: step 3 in every layout; then runs whose first head is sick from step 6 on."""
    switch, sick = "stability.guard=switch", {"sick": 6}
    runs = [
        run("tp2_sp", BEGIN, *WATCH, *TAKE, f"{TP}=2", f"{SP}=true"),
        run("tp2_whole", BEGIN_WHOLE, *WATCH, f"{TP}=2", WHOLE),
        run("pp2_virtual", BEGIN, *WATCH, f"{PP}=2", f"{VPP}=2"),
        run("dp2", BEGIN, *WATCH),
        run("cp2", BEGIN, *WATCH, "parallel.context_parallel_size=2", *TAKE),
        run("ep2", *ONE_STEP, *EXPERTS, "parallel.expert_model_parallel_size=2"),
        run("mqa_tp2_sp", BEGIN_MQA, *WATCH, *MULTI_QUERY, f"{TP}=2", f"{SP}=true"),
        run("warn", *SMALL, "stability.guard=warn", **sick),
        run("switch", *SMALL, switch, *SIGNS, **sick),
        run("disk", *SMALL, switch, *SIGNS, *FULL_DISK, full=[3, 8], **sick),
        run("paused", *SMALL, switch, "training.exit_at_step=8", *SIGNS, **sick),
        run("paused", *SMALL, switch, *SIGNS, **sick),
        run("stop", *SMALL, *FAST, "stability.guard=stop", **sick),
        run("first", *SMALL, "stability.guard=warn", "training.exit_at_step=7", **sick),
        run("second", *SMALL, "stability.guard=warn", "checkpoint.load_from=runs/first", **sick),
        run("changed", *SMALL, CHANGED, "checkpoint.load_from=runs/first", **sick),
    ]
    return dict(zip(attempts(runs), training_ranks.run_ranks(folder, corpus, 2, runs), strict=True))


def attempts(runs: list[dict[str, Any]]) -> list[str]:
    """Names of the runs; a later attempt has its number behind it."""
    names = [r["set"][0].removeprefix("name=") for r in runs]
    counts = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name} {n + 1}" if n else name for name, n in zip(names, counts, strict=True)]


@pytest.fixture(scope="module")
def pair(two: dict[str, Any], folder: Path) -> Path:
    layouts = [two[name] for name in two if name[:2] in ("tp", "pp", "dp", "cp", "ep", "mq")]
    assert len(layouts) == 7 and all(rank["code"] == 0 for r in layouts for rank in r)
    return folder / "runs"


def told(runs: Path, name: str) -> Telemetry:
    found = record.read(runs / name)
    assert found.steps[-1] == 3
    return found


# The error of a rounding that float32 sums in another order can flip; the rest is float32 itself.
LOOSE = {"delta_error_mean", "delta_error_rms", "delta_error_sign"}


@pytest.mark.parametrize("name", ["full", "core", "local", "tp2_sp", "tp2_whole", "pp2_virtual"])
def test_every_head_of_every_layer_is_told_the_same(pair, name):
    same_heads(told(pair, "one"), told(pair, name))


def same_heads(one: Telemetry, other: Telemetry) -> None:
    assert other.heads["max_logit"].shape[1:] == (4, 4)
    for metric in HEAD_METRICS:
        a, b = one.heads[metric][-1], other.heads[metric][-1]
        if metric.startswith("used"):
            assert np.isnan(a).all() and np.isnan(b).all()
        elif metric.endswith("_sum"):
            # Float32 rounding and no more; half of the keys alone would leave 1e6.
            assert (np.isnan(a) == np.isnan(b)).all() and not (b > 1e4).any(), metric
        elif metric in LOOSE:
            np.testing.assert_allclose(b, a, atol=0.15 * float(np.abs(a).max()))
        else:
            np.testing.assert_allclose(b, a, rtol=3e-4, atol=1e-6, err_msg=metric)


def test_fewer_key_heads_than_tensor_parallel_ranks(pair):
    """The early warning's head growth reads these norms: none may be missing."""
    name = "mqa_tp2_sp"
    one, other = told(pair, "mqa"), told(pair, name)
    assert all(np.isfinite(other.heads[norm][-1]).all() for norm in ("wq_norm", "wk_norm"))
    same_heads(one, other)
    np.testing.assert_allclose(
        other.layers["grad_norm"][-1], one.layers["grad_norm"][-1], rtol=1e-5
    )
    whole = CaptureFile.load(pair / "mqa" / "captures" / capture.file_name(3, 0, 0))
    folder = pair / name / "captures"
    assert [p.name for p in folder.iterdir()] == [capture.file_name(3, 0, 1)]
    part = CaptureFile.load(folder / capture.file_name(3, 0, 1))
    assert part.heads == whole.heads == [3] and part.kv_heads == whole.kv_heads == [0]
    assert part.wq_norm is not None and part.wk_norm is not None
    for x in ("q", "k", "v", "out", "dout", "wq_norm", "wk_norm"):
        torch.testing.assert_close(getattr(part, x), getattr(whole, x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "local", "tp2_sp", "tp2_whole", "pp2_virtual", "dp2"])
def test_layer_gradients_count_every_value_once(pair, name):
    one, other = told(pair, "one"), told(pair, name)
    a, b = one.layers["grad_norm"][-1], other.layers["grad_norm"][-1]
    np.testing.assert_allclose(b, a, rtol=1e-5)
    rest = other.scalars["grad_norm_rest"][-1]
    total = float(np.sqrt((b.astype(np.float64) ** 2).sum() + rest**2))
    row = metrics(pair / name)[3]
    assert total == pytest.approx(float(row["grad_norm"]), rel=1e-6)
    assert other.scalars["grad_norm_mean"][-1] == pytest.approx(float(row["grad_norm"]), rel=1e-6)
    assert other.scalars["loss_mean"][-1] == pytest.approx(float(row["loss"]), rel=1e-6)


def test_context_parallel_ranks_see_each_others_keys(pair):
    """Other rows are sampled there, so this is rough; test_sampling has it exactly. The largest
    logit is over all rows."""
    one, two = told(pair, "one"), told(pair, "cp2")
    np.testing.assert_allclose(two.heads["max_logit"][-1], one.heads["max_logit"][-1], rtol=1e-5)
    assert two.scalars["rows"][-1] == one.scalars["rows"][-1] == 28
    assert one.heads["common_logit"][-1].any()
    for metric in ("kappa", "entropy", "first_token_mass", "top_mass", "delta_rms"):
        a, b = one.heads[metric][-1], two.heads[metric][-1]
        np.testing.assert_allclose(b, a, rtol=0.4, err_msg=metric)
    whole, part = (
        CaptureFile.load(pair / name / "captures" / capture.file_name(3, 0, 0))
        for name in ("one", "cp2")
    )
    for name in ("q", "k", "v", "out", "dout"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name), rtol=1e-4, atol=1e-6)


def test_latent_attention_and_prediction_layers(single):
    """Value heads of another size; the extra layer comes last, and has a capture of its own."""
    found = record.read(single / "latent")
    assert found.heads["kappa"].shape == (1, 5, 4)
    for metric in ("max_logit", "delta_error_rms", "kappa", "entropy", "delta_rms"):
        assert np.isfinite(found.heads[metric]).all(), metric
    assert np.isnan(found.heads["wq_norm"]).all()  # no fused projection
    taken = CaptureFile.load(single / "latent" / "captures" / capture.file_name(1, 4, 0))
    assert taken.layer_name.startswith("mtp.") and taken.wq_norm is None
    assert taken.q.shape[-1] == 12 and taken.v.shape[-1] == 8


def test_tensorboard_has_the_worst_head_of_every_layer(single):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(single / "latent" / "tensorboard")).Reload()
    found = record.read(single / "latent")
    for layer in range(5):
        (event,) = events.Scalars(f"stability/kappa/layer_{layer:03d}")
        assert event.step == 1
        assert event.value == pytest.approx(float(found.heads["kappa"][0, layer].max()))
    assert events.Scalars("stability/level")[0].value == 0


def test_sinks_windows_and_dropout(single):
    found = record.read(single / "sinks")
    for metric in ("max_logit", "entropy", "top_mass", "delta_rms", "wq_norm"):
        assert np.isfinite(found.heads[metric]).all(), metric
    # Under dropout the float32 rows are not the kernel's.
    assert np.isnan(found.heads["delta_error_rms"]).all() and np.isnan(found.heads["kappa"]).all()
    # Layers 1 and 3 see 8 keys: less entropy than 2 and 4, and seldom the first token.
    entropy, first = (found.heads[m][0].mean(1) for m in ("entropy", "first_token_mass"))
    assert (entropy[[0, 2]] < entropy[[1, 3]] - 0.3).all() and (first[[0, 2]] < first[[1, 3]]).all()


def test_gradients_of_experts_count_once(pair):
    found = record.read(pair / "ep2")
    squares = float((found.layers["grad_norm"][0].astype(np.float64) ** 2).sum())
    total = (squares + found.scalars["grad_norm_rest"][0] ** 2) ** 0.5
    assert total == pytest.approx(float(metrics(pair / "ep2")[1]["grad_norm"]), rel=1e-6)


def test_data_parallel_ranks_all_contribute(pair):
    one, two = told(pair, "one"), told(pair, "dp2")
    assert two.scalars["rows"][-1] == 2 * one.scalars["rows"][-1] > 0
    assert (two.heads["max_logit"][-1] >= one.heads["max_logit"][-1] - 1e-6).all()


def test_watching_changes_no_bit_of_the_run(single):
    assert figures(single / "one") == figures(single / "off")
    assert not (single / "off" / "stability").exists()


def test_captures_are_the_same_from_one_and_from_two_ranks(pair):
    for layer in (0, 3):
        one = CaptureFile.load(pair / "one" / "captures" / capture.file_name(3, layer, 0))
        assert one.heads == [1, 2, 3] and one.kv_heads == [0, 1] and one.head_to_kv == [0, 1, 1]
        assert one.q.shape == (32, 1, 3, 8) and one.k.shape == (32, 1, 2, 8)
        assert one.causal and one.micro_batch == 0 and one.layer == layer
        parts = [
            CaptureFile.load(pair / "tp2_sp" / "captures" / capture.file_name(3, layer, r))
            for r in (0, 1)
        ]
        assert [p.heads for p in parts] == [[1], [2, 3]]
        assert [p.head_to_kv for p in parts] == [[0], [0, 0]]
        for name in ("q", "k", "v", "out", "dout"):
            together = torch.cat([getattr(p, name) for p in parts], 2)
            torch.testing.assert_close(together, getattr(one, name), rtol=1e-4, atol=1e-6)
        # dO and O belong together: the captured call, computed again.
        q, k, v = (x.permute(1, 2, 0, 3) for x in (one.q, one.k[:, :, one.head_to_kv],
                                                   one.v[:, :, one.head_to_kv]))  # fmt: skip
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=one.scale
        )
        torch.testing.assert_close(out.permute(2, 0, 1, 3), one.out, rtol=1e-5, atol=1e-6)
        assert one.wq_norm is not None and (one.wq_norm > 0).all()


# The second record at which the error is as large as the signal; read one step later.
SWITCHED = 8


def test_switch_on_all_ranks_at_the_same_step(two, folder):
    runs = folder / "runs"
    assert [(r["code"], r["step"]) for r in two["switch"]] == [(0, 9)] * 2
    log = (runs / "switch" / "train.log").read_text()
    assert log.count(f"compensated, after step {SWITCHED}") == 1
    watched, switched = figures(runs / "warn"), figures(runs / "switch")
    # The numerics change with the step after, and with no step before.
    same = [s for s in watched if watched[s] == switched[s]]
    assert same == list(range(1, SWITCHED + 1))
    told = record.read(runs / "switch")
    assert told.scalars["switched"].tolist() == [0] * 6 + [SWITCHED] * 3
    plain, used = told.heads["delta_error_rms"], told.heads["used_error_rms"]
    # From step 6 on the first head's is planted.
    assert (plain[:5] == used[:5]).all() and (plain > 1e-4).any()
    assert (used[5:7, 0, 0] == 1).all() and (plain[:8, 0, 1] == used[:8, 0, 1]).all()
    # What is left is the rounding of P, which 16 tokens average little (docs/numerics.md).
    assert (used[8:] < plain[8:] / 2).all() and used[8:].mean() < plain[8:].mean() / 4
    # All ranks switched: their weights are the same, as data parallelism needs.
    assert two["switch"][0]["weights"] != two["warn"][0]["weights"]


def test_a_full_disk_of_the_first_rank_changes_no_bit(two, folder):
    """No file of it grows while the danger comes, nor its console: all ranks switch all the same.

    It fails to write a capture, too. Where the next rank is, nobody waits.
    """
    runs = folder / "runs"
    assert [(r["code"], r["step"]) for r in two["disk"]] == [(0, 9)] * 2
    assert [r["weights"] for r in two["disk"]] == [r["weights"] for r in two["switch"]]
    assert sorted(figures(runs / "disk")) == [1, 2, 9]
    assert figures(runs / "disk").items() <= figures(runs / "switch").items()
    told, whole = record.read(runs / "disk"), record.read(runs / "switch")
    assert told.steps.tolist() == [1, 8, 9]
    assert told.scalars["switched"].tolist() == whole.scalars["switched"][[0, 7, 8]].tolist()
    log = (runs / "disk" / "train.log").read_text()
    for name in ("metrics.csv", "records.bin", "the console"):
        assert log.count(f"warning: {name}: written again; records that are missing: ") == 1, name


def test_signs_start_captures_once(two, folder):
    """Nobody knew the steps: one record is to be watched, the next is danger.

    The record of a step is read after the next one, so the step captured is the second after it. A
    resumed run does not take the first one again; the second would have been in the step after the
    one it was stopped at, and its sign is not repeated: the guard has switched. Capturing changes
    no bit (the test before this one compares the run with one that captured nothing).
    """
    runs = folder / "runs"
    watch = f"step_{SWITCHED:08d}.layer_000.tp_0.watch.pt"
    danger = f"step_{SWITCHED + 1:08d}.layer_000.tp_0.danger.pt"
    for name, names in (("switch", [watch, danger]), ("paused", [watch])):
        assert sorted(p.name for p in (runs / name / "captures").iterdir()) == names, name
    first, second = (CaptureFile.load(runs / "switch" / "captures" / n) for n in (watch, danger))
    assert (first.trigger, second.trigger) == ("watch", "danger")
    assert first.heads == second.heads == [0, 1]
    assert (first.stabilizer, second.stabilizer) == ("none", "compensated")


def test_a_resume_keeps_the_switch_and_repeats_every_bit(two, folder):
    runs = folder / "runs"
    assert [r["step"] for r in two["paused"]] == [8, 8]
    assert figures(runs / "paused") == figures(runs / "switch")
    assert [r["weights"] for r in two["paused 2"]] == [r["weights"] for r in two["switch"]]
    log = (runs / "paused" / "train.log").read_text()
    assert f"it switched after step {SWITCHED}; stabilizer compensated since then" in log
    a, b = record.read(runs / "paused"), record.read(runs / "switch")
    for metric in HEAD_METRICS:
        if metric not in ("wq_norm", "wk_norm"):  # their iteration starts anew
            np.testing.assert_array_equal(a.heads[metric], b.heads[metric], err_msg=metric)
    for name, values in a.scalars.items():
        np.testing.assert_array_equal(values, b.scalars[name], err_msg=name)


def test_stop_saves_and_has_its_own_exit_code(two, folder):
    assert [(r["code"], r["step"]) for r in two["stop"]] == [(5, SWITCHED)] * 2
    assert "layer 0 head 0: error of delta 1x" in two["stop"][0]["error"]
    saved = folder / "runs" / "stop" / "checkpoints"
    assert [p.name[:13] for p in saved.glob("step_*")] == [f"step_{SWITCHED:08d}"]
    assert not (folder / "runs" / "stop" / "FINISHED").exists()


def test_a_run_that_continues_another_one_looks_back_on_it(two, folder):
    """At its first record it says what the unbroken run says, and only of its own steps."""
    whole, rest = (record.read(folder / "runs" / name) for name in ("warn", "second"))
    assert rest.steps.tolist() == [8, 9]
    assert rest.verdicts() == whole.verdicts()[-2:] and rest.verdicts()[0][1].level == "danger"
    assert rest.scalars["level"].tolist() == [2.0, 2.0]
    log = log_of(folder, "second")
    assert "early warning: looks back on runs/first before step 7" in log
    # Other attention is another run as far as the rule goes.
    assert all(rank["code"] == 0 for rank in two["changed"])
    log = log_of(folder, "changed")
    assert "early warning: begins anew at step 7 (runs/first: attention" in log
    assert record.read(folder / "runs" / "changed").verdicts()[0][1].level == "ok"


def test_warn_only_says_so(two, folder):
    log = log_of(folder, "warn")
    assert log.count("attention: danger") == 1 and two["warn"][0]["code"] == 0
    assert "| attention danger |" in log
    assert log.count("stability guard: warn leaves the run as it is. Resume it with") == 1
