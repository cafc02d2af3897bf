"""What a resumed run may change; what is equal, however it is written."""

from __future__ import annotations

import copy
import dataclasses
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from minimal_config import TINY

from megatron_patch.config import load, types
from megatron_patch.schema import render
from megatron_patch.schema.effective import DERIVED, EARLIER, IDLE
from megatron_patch.schema.model import MLAConfig, MoEConfig, MTPConfig
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.switches import SWITCHES
from megatron_patch.training import resume_rules
from megatron_patch.training.resume_rules import (
    another_run,
    check_data,
    data_keys,
    differences,
    keep_recorded,
)

FOUND_AT_START = ("logging.peak_tflops",)
"""Keys whose default is not known before a device is."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``tiny(*overrides)``: a loaded configuration."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.yaml"
    path.write_text(TINY)
    return lambda *overrides: load(path, list(overrides))


@pytest.fixture(scope="module")
def full(tiny: Any) -> dict[str, Any]:
    """A resolved tree with every section; no check has seen it."""
    tree = copy.deepcopy(tiny().tree)
    tree["model"] |= {
        "moe": dataclasses.asdict(MoEConfig(num_experts=4)),
        "mla": dataclasses.asdict(MLAConfig()),
        "mtp": dataclasses.asdict(MTPConfig()),
        "rope_scaling": {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
        "window": [8, 0],
        "window_skip_freq": 2,
        "num_layers": 6,
    }
    return tree


def at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[part]
    return tree


def put(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value."""
    tree = copy.deepcopy(tree)
    above, _, name = path.rpartition(".")
    (at(tree, above) if above else tree)[name] = value
    return tree


# --------------------------------------------------------------------------------- equal


SPELLINGS = {
    "run_dir": ["runs/tiny"],
    "checkpoint.directory": ["runs/tiny/checkpoints"],
    "model.num_query_groups": [4],
    "model.kv_channels": [16],
    "model.ffn_hidden_size": [256],
    "model.max_position_embeddings": [32],
    "model.window": [[8, -1]],
    "model.window_skip_freq": [[1, 0, 1, 0, 1, 0]],
    "model.moe.ffn_hidden_size": [256],
    "model.moe.layer_freq": [[1, 1, 1, 1, 1, 1]],
    "optimizer.decay_steps": [20],
    "data.seed": [1234],
    "data.eod_mask_loss": [False],
    "data.reset_position_ids": [True],
    "data.tokenizer.eod_id": [256],
    "parallel.expert_tensor_parallel_size": [1],
}
"""For the tree ``full``: what each key of `DERIVED` may be written out as."""


def test_every_key_with_a_derived_default_is_known():
    named = {
        path
        for path, item in types.walk(RunConfig)
        for section in [_section_of(path)]
        if item.default is None and "default: " in types.help_of(section, item.name).lower()
    }
    assert named - set(FOUND_AT_START) - {p for p in named if p.startswith("cluster.")} <= {
        *DERIVED
    }
    assert set(SPELLINGS) == set(DERIVED)


def _section_of(path: str) -> type:
    section: Any = RunConfig
    for part in path.replace(".N.", ".").split(".")[:-1]:
        section = types.section_under(types.fields(section)[part].type)
    return section


@settings(max_examples=10)
@given(before=st.sets(st.sampled_from(sorted(SPELLINGS))), after=st.sets(
    st.sampled_from(sorted(SPELLINGS))))  # fmt: skip
def test_a_value_that_is_written_out_is_equal(full, before, after):
    def written(paths: set[str]) -> str:
        tree = full
        for path in paths:
            tree = put(tree, path, SPELLINGS[path][0])
        return render.dump(tree)

    assert differences(written(before), written(after)) == []


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("lr: 0.001", "lr: 1e-3"),
        ("lr: 0.001", "lr: 1.0E-3"),
        ("rotary_base: 10000.0", "rotary_base: 10000"),
        ("norm_epsilon: 1.0e-05", "norm_epsilon: 0.00001"),
        ("split: [0.99, 0.01, 0.0]", "split:\n    - 0.99\n    - 1e-2\n    - .0"),
        ("eps: 1.0e-08", ""),
        ("softmax_type: vanilla", "softmax_type: 'vanilla'"),
        ("schedule_from: start", ""),
    ],
)
def test_numbers_lists_and_what_an_update_brought_are_equal(tiny, line, other):
    """As config.yaml of an earlier version, or of a person, may have them."""
    text = tiny().dump_yaml()
    assert text.count(f" {line}\n") == 1
    changed = text.replace(f" {line}\n", f" {other}\n")
    assert differences(changed, text) == [] == differences(text, changed)
    assert another_run(changed, tiny()) is None


# Key -> (settings under which nothing reads it, another value, settings under which it is read).
UNREAD = {
    "model.rope_fusion": (["model.position_embedding=none"], "none", []),
    "model.max_position_embeddings": ([], "64", ["model.position_embedding=learned_absolute"]),
    "model.add_qkv_bias": (["model.add_bias_linear=true"], "true", []),
    "training.grouped_experts": ([], "false", ["model.moe.num_experts=4"]),
}


@pytest.mark.parametrize("key", [key for key in IDLE if key not in SWITCHES])
def test_what_nothing_reads_is_equal(tiny, key):
    """On both sides; where one side reads it, it is what it is."""
    unread, value, read = UNREAD[key]
    setting = f"{key}={value}"
    saved = tiny(*unread).dump_yaml()
    assert differences(saved, tiny(*unread, setting).dump_yaml()) == []
    assert another_run(saved, tiny(*unread, setting)) is None
    found = differences(tiny(*read).dump_yaml(), tiny(*read, setting).dump_yaml())
    assert [name for name, _, _ in found] == [key]


@pytest.mark.parametrize("key", EARLIER)
def test_a_run_that_goes_on_keeps_the_default_it_began_with(tiny, key, tmp_path):
    """A record of before the key, then one with it; what somebody sets counts."""
    name = key.rpartition(".")[2]
    where = f"run_dir={tmp_path}"
    fresh = tiny(where)
    assert keep_recorded(fresh) is fresh
    lines = [x for x in fresh.dump_yaml().splitlines() if not x.startswith(f"  {name}:")]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    assert keep_recorded(fresh) is fresh, "nothing goes on: it begins at step 0"
    (tmp_path / "checkpoints" / "step_00000003.attempt-1").mkdir(parents=True)
    kept = keep_recorded(fresh)
    assert at(dataclasses.asdict(kept.config), key) == at(kept.tree, key) == EARLIER[key]
    assert differences("\n".join(lines), kept.dump_yaml()) == []
    (tmp_path / "config.yaml").write_text(fresh.dump_yaml())
    assert keep_recorded(fresh).dump_yaml() == fresh.dump_yaml()
    asked = tiny(where, f"{key}={str(EARLIER[key]).lower()}")
    assert keep_recorded(asked).dump_yaml() == asked.dump_yaml()
    (tmp_path / "config.yaml").write_text("a: [")
    assert keep_recorded(fresh) is fresh


def test_the_cases_people_ran_into_are_equal(tiny):
    """Written out against null: data.seed 1234, num_query_groups 4, decay_steps 20 ..."""
    keys = ["data.seed=1234", "model.num_query_groups=4", "model.kv_channels=16",
            "optimizer.decay_steps=20", "model.ffn_hidden_size=256"]  # fmt: skip
    saved = tiny().dump_yaml()
    assert differences(saved, tiny(*keys).dump_yaml()) == []
    assert another_run(saved, tiny(*keys, "data.blend.0.path=./elsewhere/tiny")) is None
    # The key that follows is not named beside the one that changed.
    assert differences(saved, tiny("model.hidden_size=128").dump_yaml()) == [
        ("model.hidden_size", "64", "128")
    ]
    assert differences(saved, tiny("model.num_query_groups=2").dump_yaml()) == [
        ("model.num_query_groups", "4", "2")
    ]


def test_differences_see_lists_and_missing_keys():
    found = differences("a: [1, 2]\nb: {}\n", "a: [1, 3, 4]\nb: {c: 1}\n")
    assert ("a.1", "2", "3") in found and ("a.2", "absent", "4") in found
    assert ("b.c", "absent", "1") in found
    with pytest.raises(ValueError, match="no settings"):
        differences("", "a: 1\n")


# ------------------------------------------------------------------------------- refused


def another(tp: Any, value: Any, path: str) -> Any:
    """A value that means something else."""
    if path == "model.window":
        return [9, 0]
    members, _ = types.alternatives(tp)
    kind = members[0]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    if get_origin(kind) is list:
        return [*(value or ()), *(value or [1])[-1:]]
    if kind is bool:
        return not value
    if kind is str or get_origin(kind) is Annotated:
        return f"{value}x"
    return 7 if value is None else type(value)(2 * value + 1)


def leaves(full: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (path, item.type)
        for path, item in types.walk(RunConfig)
        if ".N." not in path and types.section_of(item.type) is None
        and types.section_under(item.type) is None
    ]  # fmt: skip


ON = {
    "cluster.container.image": "x.sqsh",
    "stability.capture_steps": [3],
    "parallel.context_parallel_size": 2,
}


def test_every_real_change_is_refused_unless_the_key_is_named_as_changeable(
    tiny, full, monkeypatch
):
    monkeypatch.setattr(yaml, "safe_load", lambda text: yaml.load(text, yaml.CSafeLoader))
    refused, run = set(), tiny()
    for path, tp in leaves(full):
        tree = full
        learned = ("data.reset_position_ids", "model.max_position_embeddings")
        if path in learned:  # nothing else reads them
            tree = put(full, "model.position_embedding", "learned_absolute")
        if path in SWITCHES:  # tests/config/test_switches.py has them off
            switch = SWITCHES[path]
            on = switch.on[0] if switch.on else ON.get(switch.key, at(full, switch.key))
            tree = put(full, switch.key, on)
        saved, changed = render.dump(tree), put(tree, path, another(tp, at(tree, path), path))
        why = another_run(saved, dataclasses.replace(run, tree=changed)) or ""
        lines = [line for line in why.splitlines() if line.startswith(f"  {path}")]
        assert lines or differences(saved, render.dump(changed)), path
        free = (*resume_rules.CHANGEABLE, *resume_rules.DATA, "optimizer.decay_steps")
        assert bool(lines) != resume_rules._under(path, free), (path, why)
        refused |= {path} if lines else set()
    some = {"model.norm_epsilon", "data.seed", "training.seed", "optimizer.beta1", "model.window"}
    assert (
        some | {"data.eod_mask_loss", "model.moe.layer_freq", "optimizer.warmup_steps"} <= refused
    )
    assert len(refused) > 50


def test_the_schedule_changes_under_its_key_only(tiny):
    saved = tiny().dump_yaml()
    wsd = ["optimizer.schedule=wsd", "optimizer.wsd_decay_steps=5", "optimizer.warmup_steps=2"]
    why = another_run(saved, tiny(*wsd)) or ""
    assert "optimizer.schedule: wsd, but it was saved with cosine" in why
    assert another_run(saved, tiny(*wsd, "optimizer.schedule_from=now")) is None


@pytest.mark.parametrize(
    ("base", "change", "effect"),
    [
        ([], "training.micro_batch_size=4", ""),
        (["model.hidden_dropout=0.1"], "training.micro_batch_size=4", " (changes dropout masks)"),
        (["model.attention_dropout=0.1"], "attention.backend=mcore_local",
         " (changes dropout masks)"),
        (["model.hidden_dropout=0.1"], "training.eval_steps=3", ""),
        (["model.moe.num_experts=4"], "training.micro_batch_size=4",
         " (changes the balancing of experts, which is done in each micro-batch)"),
        (["model.moe.num_experts=4", "model.moe.load_balancing=seq_aux_loss"],
         "training.micro_batch_size=4", ""),
    ],
)  # fmt: skip
def test_what_else_a_change_changes_is_said(tiny, tmp_path, base, change, effect):
    (tmp_path / "config.yaml").write_text(tiny(*base).dump_yaml())
    problems, (note,) = resume_rules.check_settings(tiny(*base, change), tmp_path)
    key, _, new = change.partition("=")
    assert not problems
    assert note.startswith(f"configuration changed since the last attempt: {key}: ")
    assert note.endswith(f" -> {new}{effect}")


def test_a_refused_schedule_names_its_key(tiny, tmp_path):
    (tmp_path / "config.yaml").write_text(tiny().dump_yaml())
    problems, _ = resume_rules.check_settings(tiny("optimizer.warmup_steps=3"), tmp_path)
    assert "set it back, or ask for the change with optimizer.schedule_from: now" in str(problems)
    assert resume_rules.check_settings(tiny("optimizer.decay_steps=9"), tmp_path) == ([], [])


# ---------------------------------------------------------------------------------- data


ONE, TWO = "1" * 64, "2" * 64


def test_data_that_changed_is_not_a_damaged_record_of_it(tmp_path):
    """A run whose checkpoints are of an earlier version: its directory knows the data."""
    file, moved = tmp_path / "data.sha256", [("data.blend.0.path", "a", "b")]

    def check(fingerprint: str, *, step: int) -> list[Any]:
        identities = {"train": fingerprint}
        return check_data(
            file, fingerprint, step=step, identities=identities, recorded=None, moved=moved
        )[0]

    (problem,) = check(ONE, step=5)  # nothing tells that a and b are the same
    assert "saved with a, and nothing records which tokens" in str(problem) and not file.exists()
    file.write_text(ONE + "\n")
    assert check(ONE, step=5) == []
    (problem,) = check(TWO, step=5)
    assert "not those the first 5 steps were trained on" in str(problem)
    for content in (b"", b"\xff\x00", ONE[:40].encode()):
        file.write_bytes(content)
        (problem,) = check(ONE, step=5)
        assert "it is damaged" in str(problem)
        assert file.read_bytes() == content


def test_a_checkpoint_knows_its_data_whatever_the_directory_says(tiny, tmp_path):
    file, loaded = tmp_path / "data.sha256", tiny()
    moved = data_keys({"config": tiny("data.blend.0.path=before").dump_yaml()}, loaded)
    assert moved == [("data.blend.0.path", "before", "tiny")]
    recorded = {"train": ONE, "valid": ONE}

    def check(**identities: str) -> tuple[list[Any], list[str]]:
        return check_data(file, TWO, step=5, identities=identities, recorded=recorded, moved=moved)

    for text in (None, ONE, TWO, "nonsense"):
        if text is not None:
            file.write_text(text)
        assert check(train=ONE, valid=ONE) == ([], [])
        assert file.read_text() == TWO + "\n"
        (problem,), _ = check(train=TWO, valid=ONE)
        assert "the tokens, or their order, are not those the first 5 steps" in str(problem)
    for other in ({"valid": TWO}, {}, {"valid": ONE, "test": ONE}):  # changed, gone, new
        problems, (line,) = check(train=ONE, **other)
        assert not problems and "losses of before and after are not comparable" in line
    fresh = {"step": 0, "identities": {"train": ONE}, "recorded": None, "moved": []}
    assert check_data(file, ONE, **fresh) == ([], [])
