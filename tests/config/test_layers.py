"""``base:`` and ``--set``: precedence, merging, lists, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from minimal_config import MINIMAL

from megatron_patch import config

Write = Callable[..., Path]
Load = Callable[..., config.ConfigError]


def test_precedence_default_base_file_override(write):
    write(MINIMAL, "a/base.yaml")
    write("base: ../a/base.yaml\noptimizer: {lr: 2e-4, beta1: 0.8}\n", "b/middle.yaml")
    path = write("base: b/middle.yaml\noptimizer: {lr: 3e-4}\nname: top\n", "top.yaml")
    loaded = config.load(path, ["optimizer.beta2=0.5"])
    optimizer = loaded.config.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (3e-4, 0.8, 0.5)
    assert optimizer.eps == 1e-8
    assert loaded.config.name == "top"
    origins = {key: str(loaded.origins[f"optimizer.{key}"]) for key in ("lr", "beta1", "eps")}
    assert origins["lr"].endswith("top.yaml:2:17")
    assert origins["beta1"].endswith("middle.yaml:2:30")
    assert origins["eps"] == "default"
    assert str(loaded.origins["optimizer.beta2"]) == "--set optimizer.beta2=0.5"


def test_lists_are_replaced_not_merged(write):
    write(MINIMAL, "base.yaml")
    path = write("base: base.yaml\ndata: {blend: [{path: x}, {path: y}]}\n")
    assert [item.path for item in config.load(path).config.data.blend] == ["x", "y"]
    path = write("base: base.yaml\ndata: {blend: [], train: [{path: z}]}\n")
    assert config.load(path).config.data.blend == []


def test_null_takes_an_inherited_section_away(write):
    write(MINIMAL + "logging: {peak_tflops: 10}\n", "base.yaml")
    write("base: base.yaml\nmodel: {mtp: {num_layers: 2}}\n", "mtp.yaml")
    mtp = config.load(write("base: mtp.yaml\nmodel: {mtp: {loss_scaling_factor: 0.3}}\n"))
    assert mtp.config.model.mtp is not None
    assert (mtp.config.model.mtp.num_layers, mtp.config.model.mtp.loss_scaling_factor) == (2, 0.3)
    path = write("base: mtp.yaml\nmodel: {mtp: null}\nlogging: {peak_tflops: null}\n")
    loaded = config.load(path).config
    assert loaded.model.mtp is None
    assert loaded.logging.peak_tflops is None


def test_base_may_be_null_or_absolute(write, minimal):
    assert config.load(write(f"base: {minimal}\nname: x\n")).config.name == "x"
    assert config.load(write("base: null\n" + MINIMAL)).config.name == "demo"


def test_problems_of_a_base_are_reported_there(write, refused):
    write(MINIMAL + "checkpoint: {intervall: 5}\n", "base.yaml")
    error = refused(write("base: base.yaml\ntrainig: {}\n"))
    first, second = (str(problem) for problem in error.problems)
    assert "base.yaml:6:14: checkpoint.intervall" in first
    assert "did you mean interval?" in first
    assert "run.yaml:2:1: trainig" in second


@pytest.mark.parametrize(("files", "reason"), [
    ({"run.yaml": "base: run.yaml\n"}, "cannot be its own base"),
    ({"run.yaml": "base: b.yaml\n", "b.yaml": "base: run.yaml\n"}, "cannot be its own base"),
    ({"run.yaml": "base: gone.yaml\n"}, "gone.yaml: cannot be read: No such file"),
    ({"run.yaml": "base: [a, b]\n"}, "names one file"),
    ({"run.yaml": "base:\n"}, "names one file"),
    ({"run.yaml": "base: b.yaml\n", "b.yaml": "- a\n"}, "b.yaml:1:1: is not a mapping"),
    ({"run.yaml": "base: .\n"}, "is a directory"),
])  # fmt: skip
def test_bad_bases(write, refused, files, reason):
    for name, text in files.items():
        write(text, name)
    path = write(files["run.yaml"])
    error = refused(path)
    assert reason in str(error)
    assert str(path.parent) in str(error)


def test_a_link_does_not_hide_a_cycle(write, refused, tmp_path):
    path = write("base: link.yaml\n")
    (tmp_path / "link.yaml").symlink_to(path)
    assert "cannot be its own base" in str(refused(path))


def test_long_chains_end(write, refused):
    for index in range(40):
        write(f"base: {index + 1}.yaml\n", f"{index}.yaml")
    assert "more than 16 files in one chain" in str(refused(write("base: 0.yaml\n")))


@pytest.mark.parametrize(("override", "path", "value"), [
    ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
    ("training.train_steps=1_000", "training.train_steps", 1000),
    ("model.num_query_groups=null", "model.num_query_groups", None),
    ("model.window=[128, -1]", "model.window", [128, -1]),
    ("name=no", "name", "no"),
    ("name='quoted'", "name", "quoted"),
    ("run_dir=runs/a:b #1 [x", "run_dir", "runs/a:b #1 [x"),
    ("run_dir=*star", "run_dir", "*star"),
    ("run_dir=null", "run_dir", None),
    ('run_dir="null"', "run_dir", "null"),
    ("run_dir=a=b", "run_dir", "a=b"),
    ("logging.progress=off", "logging.progress", "off"),
    ("data.blend.0.path=other", "data.blend.0.path", "other"),
    ("data.blend.0={path: other, weight: 3}", "data.blend.0.weight", 3.0),
    ("data.blend=[{path: a}, {path: b}]", "data.blend.1.path", "b"),
    ("model.moe.num_experts=8", "model.moe.num_experts", 8),
    ("model.moe={num_experts: 8, top_k: 1}", "model.moe.top_k", 1),
    ("parallel.cp_comm_type=[p2p, a2a]", "parallel.cp_comm_type", ["p2p", "a2a"]),
    ("training.recompute.modules.0=core_attn", "training.recompute.modules.0", "core_attn"),
    (" optimizer.lr =1", "optimizer.lr", 1.0),
])  # fmt: skip
def test_overrides(write, override, path, value):
    """Read before the checks between keys, which may refuse some of these for this model."""
    from megatron_patch.config import loader, yaml
    from megatron_patch.schema.run import RunConfig

    problems: list[config.Problem] = []
    tree = yaml.load_layers(str(write(MINIMAL)), problems)
    tree = yaml.apply_overrides(tree, [override], RunConfig, problems)
    reader = loader._Reader(RunConfig, problems)
    found = loader._plain(reader.section(RunConfig, tree, "", tree.place))
    assert problems == []
    for key in path.split("."):
        found = found[int(key)] if key.isdecimal() else found[key]
    assert found == value
    assert str(reader.origins[path]).startswith("--set")


def test_elements_of_a_list_that_is_only_a_default(write):
    sets = ["data.split.0=0.9", "data.split.1=0.1", "data.blend.1.path=more"]
    loaded = config.load(write(MINIMAL), sets)
    assert loaded.config.data.split == [0.9, 0.1, 0.0]
    assert [item.path for item in loaded.config.data.blend] == ["corpus", "more"]
    shown = next(line for line in loaded.render().splitlines() if "split" in line)
    assert "--set data.split.0=0.9, --set data.split.1=0.1" in shown


def test_the_default_list_is_not_shared(write):
    first = config.load(write(MINIMAL)).config
    assert first.data.split is not config.load(write(MINIMAL)).config.data.split


def test_the_last_override_of_a_key_wins(minimal):
    loaded = config.load(minimal, ["optimizer.lr=1", "optimizer.lr=2"])
    assert loaded.config.optimizer.lr == 2


@pytest.mark.parametrize(("override", "reason"), [
    ("optimizer.lr", "not of the form section.key=value"),
    ("=3", "not of the form"),
    ("a..b=3", "not of the form"),
    ("base=x.yaml", "cannot be overridden"),
    ("optimizer.learning_rate=3", "unknown key 'learning_rate' in section optimizer"),
    ("optimizr.lr=3", "unknown key 'optimizr'; did you mean optimizer?"),
    ("optimizer.lr=1:30", "base 60"),
    ("optimizer.lr=", "nothing is written"),
    ("optimizer.lr='1e-4'", "remove the quotes"),
    ("optimizer=3", "is a value, a section"),
    ("name.x=3", "cannot be set inside a value"),
    ("optimizer.lr.0=3", "it has no element 0"),
    ("data.blend.2.path=x", "2 is out of range (1 appends one)"),
    ("data.blend.1={weight: 3}", "data.blend.1.path: is required"),
    ("data.blend.-1.path=x", "not of the form"),
    ("model.window=[128", "not valid YAML"),
    ("model.window=[1]]", "not valid YAML"),
    ("model.window=&a [1]", "anchors"),
    ("model={num_layers: 1, num_layers: 2}", "written twice"),
    ("run_dir=a\0b", "cannot stand in a configuration"),
    ("checkpoint.interval=none", "write null for no value"),
])  # fmt: skip
def test_bad_overrides(minimal, refused, override, reason):
    error = refused(minimal, (override,))
    assert reason in str(error)
    assert "--set " in str(error)
    assert all(char.isprintable() or char == "\n" for char in str(error))
