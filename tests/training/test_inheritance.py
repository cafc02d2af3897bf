"""A start from another run's checkpoint: meaning, data, and a run that would train nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patch.config import load, types
from megatron_patch.data.loader import Loaders, build_loaders
from megatron_patch.faults.skips import Skips
from megatron_patch.schema import kinds
from megatron_patch.schema.problem import ConfigError
from megatron_patch.schema.run import RunConfig
from megatron_patch.training.inheritance import (
    Inheritance,
    check_begin,
    check_length,
    compare,
    judge,
)

# ------------------------------------------------------------------------- the table of keys


HOW = ("parallel", "checkpoint", "logging", "stability", "faults", "cluster")
"""Sections of which no key says what is trained, or on what."""
WHOLE = ("data.tokenizer", "training.recompute")
"""Compared as one."""


def test_every_key_has_a_kind_of_its_own():
    """A new key is not taken for harmless, or for anything, before somebody has decided."""
    known = [
        path
        for path, item in types.walk(RunConfig)
        if ".N." not in path and types.section_of(item.type) is None
    ]
    forgotten = [
        key
        for key in known
        if key not in kinds.KINDS and not key.startswith(tuple(f"{s}." for s in (*HOW, *WHOLE)))
    ]
    assert not forgotten, "give them a kind in schema/kinds.py"
    gone = [
        key
        for key in kinds.KINDS
        if key not in known and not any(other.startswith(key + ".") for other in known)
    ]
    assert not gone
    assert all(kinds.kind_of(f"{section}.anything") == "other" for section in HOW)
    assert kinds.kind_of("model.moe.top_k") == kinds.kind_of("model.window.1") == "meaning"
    assert kinds.kind_of("model.gone_since") == "other"


# ---------------------------------------------------------------------- plain comparison


LEARNED = "model.position_embedding=learned_absolute"
MEANING: list[tuple[str, str, str, list[str]]] = [
    ("model.num_attention_heads", "4", "8", []),
    ("model.position_embedding", "rope", "none", []),
    ("model.rotary_base", "10000.0", "500000.0", []),
    ("model.rotary_percent", "1.0", "0.5", []),
    ("model.norm_epsilon", "1.0e-05", "1.0e-06", []),
    ("model.normalization", "RMSNorm", "LayerNorm", []),
    ("model.activation", "squared_relu", "relu", ["model.activation=squared_relu"]),
    ("model.window", "null", "[8, 0]", []),
    ("model.window", "[8, 0]", "[16, 0]", ["model.window=[8,0]"]),
    ("model.softmax_type", "vanilla", "off-by-one", []),
    ("model.moe.top_k", "2", "1", ["model.moe.num_experts=4"]),
    ("model.seq_length", "32", "64", []),
    ("data.reset_position_ids", "false", "true", [LEARNED]),
    ("data.eod_mask_loss", "false", "true", []),
    ("data.document_attention", "false", "true", []),
    ("model.max_position_embeddings", "64", "96", [LEARNED, "model.max_position_embeddings=64"]),
]
"""Key, what the checkpoint has, what the start has, and what else both have."""
START = ("checkpoint.load_from=.",)


@pytest.mark.parametrize(("key", "old", "new", "both"), MEANING)
def test_another_meaning_is_refused_unless_it_is_intended(tiny, key, old, new, both):
    saved = tiny(*both).dump_yaml()
    after = (*both, f"{key}={new}", *START)
    changes = compare(saved, tiny(*after))
    (change,) = (c for c in changes if c.kind == "meaning")
    assert (change.key, change.old, change.new) == (key, old, new)
    (problem,) = judge(changes, tiny(*after).config, step=3)
    assert problem.path == key and f"{change.new}, but" in problem.message
    assert f"checkpoint.intended_changes: [{key}]" in problem.message
    meant = tiny(*after, f"checkpoint.intended_changes=[{key}]")
    assert judge(compare(saved, meant), meant.config, step=3) == []


def test_all_meanings_are_refused_at_once_and_one_intention_covers_one_key(tiny):
    saved = tiny().dump_yaml()
    keys = ("model.rotary_base=5e5", "model.norm_epsilon=1e-6", "model.window=[8,0]")
    child = tiny(*keys, *START, "checkpoint.intended_changes=[model.window]")
    problems = judge(compare(saved, child), child.config, step=0)
    assert [p.path for p in problems] == ["model.rotary_base", "model.norm_epsilon"]
    assert "[model.window, model.rotary_base]" in problems[0].message


@pytest.mark.parametrize(
    "keys",
    [
        ["training.global_batch_size=4", "data.blend.0.weight=3.0"],
        ["attention.backend=mcore_local", "model.layer_spec=local", "training.seed=5"],
        ["optimizer.lr=0.5", "optimizer.weight_decay=0.0", "model.hidden_dropout=0.1"],
        ["parallel.tensor_model_parallel_size=2", "training.recompute.granularity=full"],
        ["name=other", "run_dir=elsewhere", "checkpoint.interval=7", "model.init_std=0.5"],
    ],
)
def test_what_leaves_the_meaning_alone_is_no_reason(tiny, keys):
    child = tiny(*keys, *START)
    changes = compare(tiny().dump_yaml(), child)
    assert judge(changes, child.config, step=0) == []
    told = {change.key for change in changes}
    assert told == {
        {"data.blend.0.weight": "data.blend"}.get(key, key)
        for key in (text.partition("=")[0] for text in keys)
        if key not in ("name", "run_dir", "model.layer_spec")
    }


def test_a_default_written_out_is_no_change(tiny):
    written = ("model.num_query_groups=4", "model.kv_channels=16", "data.seed=1234")
    moved = "data.blend.0.path=/elsewhere/tiny"
    assert compare(tiny().dump_yaml(), tiny(*written, moved, *START)) == []


def test_a_key_without_effect_has_no_meaning(tiny):
    """Positions that are not rotated have no base."""
    none = "model.position_embedding=none"
    child = tiny(none, "model.rotary_base=5e5", "model.max_position_embeddings=99", *START)
    assert compare(tiny(none).dump_yaml(), child) == []
    (change,) = compare(tiny(none).dump_yaml(), tiny(*START))
    assert change.key == "model.position_embedding"
    meant = tiny(none, *START, "checkpoint.intended_changes=[model.rotary_base]")
    (problem,) = judge(compare(tiny(none).dump_yaml(), meant), meant.config, step=0)
    assert "is the same in the checkpoint, or has no effect" in problem.message


def test_a_section_more_is_one_change(tiny):
    child = tiny("model.moe.num_experts=4", "model.moe.top_k=1", *START)
    (change,) = compare(tiny().dump_yaml(), child)
    assert (change.key, change.old) == ("model.moe", "null") and "num_experts: 4" in change.new


def test_a_key_that_came_with_an_update_is_no_change(tiny):
    saved = tiny().dump_yaml()
    older = "\n".join(x for x in saved.splitlines() if "norm_epsilon" not in x)
    assert compare(older, tiny(*START)) == []
    (change,) = compare(older, tiny("model.norm_epsilon=1e-3", *START))
    assert (change.key, change.kind) == ("model.norm_epsilon", "meaning")


@pytest.mark.parametrize(
    "keys, told",
    [
        (["[model.rotary_base]"], "has no effect without load_from"),
        (["[model.rotary]", *START], "'model.rotary' is no key that decides"),
        (["[model]", *START], "'model' is no key that decides"),
        (["[optimizer.lr]", *START], "allowed: data.document_attention, data.eod_mask_loss"),
        (["['*']", *START], "is no key"),
        (["[model.window, model.window]", *START], "model.window is named twice"),
    ],
)
def test_an_intention_has_an_effect_or_is_refused(tiny, keys, told):
    with pytest.raises(ConfigError) as error:
        tiny(f"checkpoint.intended_changes={keys[0]}", *keys[1:])
    assert told in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        (["train_steps=10"], ["train_steps"]),
        (["train_steps=20"], ["train_steps"]),
        (["train_steps=30", "exit_at_step=20"], ["exit_at_step"]),
        (["train_steps=5", "exit_at_step=2"], ["train_steps", "exit_at_step"]),
        (["train_steps=21"], []),
    ],
)
def test_a_start_that_trains_nothing_is_refused(tiny, keys, refused):
    found = [f"training.{key}" for key in keys]
    problems = judge([], tiny(*found, *START).config, step=20)
    assert [p.path for p in problems] == [f"training.{key}" for key in refused]
    for problem in problems:
        assert "nothing would be trained" in problem.message
        assert "load_weights_only: true" in problem.message and "step 20" in problem.message
    weights = tiny(*found, *START, "checkpoint.load_weights_only=true").config
    assert judge([], weights, step=20) == []


def test_a_run_beyond_its_end_is_no_success(tiny):
    run = tiny("training.train_steps=10").config
    check_length(run, step=10)
    with pytest.raises(ConfigError, match="10, but this run is at step 20 already") as error:
        check_length(run, step=20)
    assert error.value.exit_code == 2 and "checkpoint rollback" in str(error.value)


def test_no_step_goes_before_its_schedule(tiny):
    run = tiny("optimizer.begin_step=4").config
    check_begin(run, step=4)
    with pytest.raises(ConfigError, match=r"4, but the run goes on after step 3, .* set it to 3"):
        check_begin(run, step=3)


# ------------------------------------------------------------- what a checkpoint recorded


@pytest.fixture
def started(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Inheritance, Loaders]]:
    """A start of the tiny configuration on `corpus`, by its data alone."""
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda objects, src: None)

    def start(config: Any) -> tuple[Inheritance, Loaders]:
        loaders = build_loaders(config.config, ALONE)
        return Inheritance(config, SimpleNamespace(rank=0), loaders), loaders

    return start


ALONE = SimpleNamespace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1)


def recorded(config: Any, step: int, **extra: Any) -> dict[str, Any]:
    """What a checkpoint of this configuration holds under ``run``."""
    return {"config": config.dump_yaml(), "progress": {"step": step}, "extra": extra}


def test_a_position_that_no_one_recorded_is_derived_where_it_is_proven(
    tiny, started, corpus, tmp_path
):
    """Of earlier versions: step 7, of which a rewind left batches 2 and 3 out, is 72 samples."""
    data = f"data.blend.0.path={corpus}"
    parent, child = tiny(data), tiny(data, "training.global_batch_size=4", *START)
    state = recorded(parent, 7, faults={"skips": {"windows": [[2, 2]], "rewinds": 1}})
    path = tmp_path / "run" / "checkpoints" / "step_00000007.attempt-1"
    path.mkdir(parents=True)
    fingerprint = build_loaders(parent.config, ALONE).fingerprint

    def table() -> tuple[str, int]:
        inheritance, loaders = started(child)
        inheritance.check(path, state)
        lines = inheritance.begin(step=7, skips=Skips(((2, 2),)))
        return "\n".join(lines), int(loaders.samples("train", 9)[0]["window"])

    told, first = table()
    assert first == 72 and "no data.sha256 of its run is there to prove" in told
    (tmp_path / "run" / "data.sha256").write_text(fingerprint + "\n")
    told, first = table()
    assert first == 72 and "note" not in told and "72 samples taken" in told
    assert "  schedule  training.global_batch_size: 8 -> 4\n" in told
    (tmp_path / "run" / "data.sha256").write_text("0" * 64)
    told, first = table()
    assert first == 0 and "its token files are not those found now" in told
    assert "nothing is left out, and what the checkpoint's run has read is read again" in told
    (tmp_path / "run" / "data.sha256").write_text(fingerprint)
    state["config"] = state["config"].replace(str(corpus), str(tmp_path / "gone"))
    told, first = table()
    assert first == 0 and "its datasets cannot be looked at" in told


@pytest.mark.parametrize(
    ("carried", "step", "windows", "first"),
    [
        ("optimizer, step, data", 4, (), 32),
        ("optimizer, step, data", 4, ((4, 3),), 56),  # batches 4 to 6 are known to be bad
        ("optimizer, step, data", 4, ((3, 1),), 32),  # of the parent's steps
        ("optimizer, data", 0, ((0, 2),), 48),
        ("optimizer, step", 4, (), 0),  # its steps are not counted in the data
        ("optimizer, step", 4, ((4, 3),), 24),
        ("", 0, ((0, 2),), 16),
    ],
)
def test_where_a_start_reads(tiny, started, corpus, tmp_path, carried, step, windows, first):
    """Behind what the other run took, or at the first sample, and behind what is left out."""
    data, skips = f"data.blend.0.path={corpus}", Skips(windows)
    inheritance, loaders = started(tiny(data, *START, f"checkpoint.carry_over=[{carried}]"))
    position = loaders.position(4)
    inheritance.check(tmp_path, recorded(tiny(data), 4, data=position))
    told = "\n".join(inheritance.begin(step=step, skips=skips))
    assert loaders.samples("train", skips.batch(step + 1))[0]["window"] == first
    assert ("every dataset starts at its first sample" in told) == ("data" not in carried)


def test_one_sequence_a_step_starts_where_nothing_is_known(tiny, started, corpus, tmp_path):
    one = "training.{}_batch_size=1".format
    inheritance, loaders = started(
        tiny(f"data.blend.0.path={corpus}", *START, one("global"), one("micro"))
    )
    inheritance.check(tmp_path, recorded(tiny(), 4) | {"config": ""})
    assert "what the checkpoint's run has read is read again" in "".join(
        inheritance.begin(step=4, skips=Skips())
    )
    assert loaders.samples("train", 4)[0]["window"] == 0


@pytest.mark.parametrize("weights_only", [False, True])
def test_another_tokenizer_is_another_meaning_whatever_its_size(
    tiny, started, corpus, tmp_path, weights_only
):
    data = f"data.blend.0.path={corpus}"
    only = f"checkpoint.load_weights_only={str(weights_only).lower()}"
    inheritance, loaders = started(tiny(data, *START, only))
    position = loaders.position(2)
    inheritance.check(tmp_path, recorded(tiny(data), 2, data=position))
    other = recorded(tiny(data), 2, data=position | {"tokenizer": "f" * 64})
    with pytest.raises(ConfigError, match=r"data\.tokenizer: bytes, SHA-256") as error:
        inheritance.check(tmp_path, other)
    assert "checkpoint.intended_changes: [data.tokenizer]" in str(error.value)
    meant = tiny(data, *START, only, "checkpoint.intended_changes=[data.tokenizer]")
    inheritance, _ = started(meant)
    inheritance.check(tmp_path, other)
    lines = inheritance.begin(step=2, skips=Skips())
    assert any(line.startswith("  meaning   data.tokenizer: bytes, SHA-256 fff") for line in lines)
    last = "every dataset starts at its first sample" if weights_only else "continues there"
    assert any(line.endswith(last) for line in lines)


@pytest.mark.parametrize("kind", ["none", "sentencepiece"])
def test_without_a_record_the_tokenizer_is_looked_at(tiny, started, corpus, tmp_path, kind):
    """Of an earlier version whose datasets are gone: by its file, or by what is written."""
    data = f"data.blend.0.path={corpus}"
    state = recorded(tiny("data.blend.0.path=gone"), 2)
    inheritance, _ = started(tiny(data, *START))
    inheritance.check(tmp_path, state)
    keys = {"none": "vocab_size: 257", "sentencepiece": "path: gone.model"}
    state["config"] = state["config"].replace("kind: bytes", f"kind: {kind}", 1)
    key = keys[kind].partition(":")[0]
    assert f"    {key}: null" in state["config"]
    state["config"] = state["config"].replace(f"    {key}: null", f"    {keys[kind]}", 1)
    with pytest.raises(ConfigError, match=f"were trained with {kind}"):
        inheritance.check(tmp_path, state)


@pytest.mark.parametrize("text", ["", "[]", "a: [", "{}", "model: 3"])
def test_a_configuration_that_cannot_be_read_is_said(tiny, started, corpus, tmp_path, text):
    child = tiny(f"data.blend.0.path={corpus}", *START)
    inheritance, loaders = started(child)
    state = recorded(child, 2, data=loaders.position(2)) | {"config": text}
    try:
        inheritance.check(tmp_path, state)
    except ConfigError as error:
        assert "what it records of its run cannot be read" in str(error)
        return
    told = "\n".join(inheritance.begin(step=2, skips=Skips()))
    assert "it records no configuration that can be read" in told and "16 samples taken" in told


def test_own_steps_on_other_token_files_are_refused(tiny, started, corpus):
    inheritance, loaders = started(tiny(f"data.blend.0.path={corpus}"))
    saved = loaders.position(3)
    inheritance._resume_data({"data": saved}, 3)
    saved["reading"][0]["source"]["sha256"] = "0" * 64
    with pytest.raises(ConfigError, match="not those the first 3 steps were trained on"):
        inheritance._resume_data({"data": saved}, 3)


# -------------------------------------------------------------------------- keys and files


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["checkpoint.carry_over=[data]"], "has no effect without load_from"),
        (["checkpoint.carry_over=[data, data]", *START], "name each once"),
        (["checkpoint.carry_over=[]", "checkpoint.load_weights_only=true", *START], "leave one"),
    ],
)
def test_what_is_carried_over_is_checked(tiny, keys, told):
    with pytest.raises(ConfigError, match=told):
        tiny(*keys)


@pytest.mark.parametrize("stage", ["continued", "annealed"])
def test_shipped_stages_load(tmp_path, stage, monkeypatch):
    (tmp_path / "runs" / "gpt2_124m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run = load(Path(__file__).parents[2] / "configs" / "stages" / f"gpt2_124m_{stage}.yaml").config
    assert "data" in run.checkpoint.carried and "step" not in run.checkpoint.carried
