"""``~`` and ``$VAR`` mean the same in every key and every argument that names a place."""

from __future__ import annotations

import argparse
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minimal_config import MINIMAL

from megatron_patch import config
from megatron_patch.checkpoint import last_checkpoint
from megatron_patch.cli import app
from megatron_patch.cli.common import as_path
from megatron_patch.config import loader, types, yaml
from megatron_patch.data.options import PrepareOptions
from megatron_patch.schema import paths
from megatron_patch.schema.run import RunConfig

USER = pwd.getpwuid(os.getuid())
KEYS = [
    key.replace(".N.", ".0.") + (".0" if types.list_of(item.type) else "")
    for key, item in types.walk(RunConfig)
    if any(map(types.is_path, [*types.alternatives(item.type)[0], types.list_of(item.type)]))
]

EXPANDED = [
    ("~/x", "/home/ada/x"),
    ("~/a/../x y", "/home/ada/a/../x y"),
    ('"~"', "/home/ada"),
    (f"~{USER.pw_name}/x", f"{USER.pw_dir.rstrip('/')}/x"),
    ("$SCRATCH/x", "/scratch/ada/x"),
    ("${SCRATCH}/x", "/scratch/ada/x"),
    ("$SCRATCH", "/scratch/ada"),
    ("data/${SUB}_v2/$SUB", "data/blue_v2/blue"),
    ("$TILDE/x", "/home/ada/y/x"),
    ("x$$y/$$SUB", "x$y/$SUB"),
    ("./~x", "./~x"),
    ("a/~/b", "a/~/b"),
    ("./x", "./x"),
    ("/abs//x/", "/abs//x/"),
    ("grün/文", "grün/文"),
]
REFUSED = [
    ("$NO_SUCH/x", "NO_SUCH is not set here; set it, write the path out, or write $$"),
    ("a/${NO_SUCH}", "NO_SUCH is not set here"),
    ("$EMPTY/x", "the variable EMPTY is empty"),
    ("${SPACES}/x", "the variable SPACES is empty"),
    ("$TORN", "holds '/scratch\\n'"),
    ("~no-such-user/x", "this machine has no user 'no-such-user'"),
    ("$(pwd)/x", "a $ begins $NAME or ${NAME} and nothing else; write $$"),
    ("${SCRATCH:-/tmp}/x", "a $ begins"),
    ("${oc.env:SCRATCH}/x", "a $ begins"),
    ("$1/x", "a $ begins"),
    ("x$", "a $ begins"),
    ("~", "~ alone is null in YAML, not your home directory"),
    ('""', "is empty; name a file or directory"),
    (" ~/x", "white space"),
    ("x ", "white space"),
]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home, a scratch directory and an empty working directory."""
    for name, value in (
        ("HOME", "/home/ada"), ("SCRATCH", "/scratch/ada"), ("SUB", "blue"), ("TILDE", "~/y"),
        ("EMPTY", ""), ("SPACES", " "), ("TORN", "/scratch\n"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_SUCH", raising=False)
    monkeypatch.chdir(tmp_path)


def read(key: str, value: str) -> tuple[Any, list[config.Problem]]:
    """What ``--set key=value`` becomes, before the checks between keys."""
    problems: list[config.Problem] = []
    tree, _ = yaml.parse(MINIMAL, "run.yaml")
    assert isinstance(tree, yaml.Mapping)
    tree = yaml.apply_overrides(tree, [f"{key}={value}"], RunConfig, problems)
    found: Any = loader._Reader(RunConfig, problems).section(RunConfig, tree, "", tree.place)
    for name in key.split(".") if not problems else ():
        found = found[int(name)] if name.isdecimal() else getattr(found, name)
    return found, problems


@pytest.mark.parametrize("key", KEYS)
def test_every_path_key_takes_every_form(key):
    assert {v: read(key, v) for v, _ in EXPANDED} == {v: (w, []) for v, w in EXPANDED}
    for value, reason in REFUSED:
        (problem,) = read(key, value)[1]
        assert problem.path == key and reason in str(problem), value


NO_PATHS = (
    "cluster.container.python",  # in the image, where this machine's home means nothing
    "cluster.environment.N.value",  # takes neither ~ nor $
    "cluster.environment.N.reason",
    "document_separator",
    "json_key",  # speaks of files, and names a field in them
)
PLACES = re.compile(r"path|file|directory|folder|script|dir\b|sqsh|_from\b|where ", re.IGNORECASE)


def test_no_path_key_is_forgotten():
    """A key whose name or docstring speaks of files is marked, or no text at all."""
    for root in (RunConfig, PrepareOptions):
        for key, item in types.walk(root):
            members = [*types.alternatives(item.type)[0], types.list_of(item.type)]
            owner = root
            for name in key.split(".")[:-1]:
                owner = (
                    owner if name == "N" else types.section_under(types.fields(owner)[name].type)
                )
            if str in members and PLACES.search(f"{item.name} {types.help_of(owner, item.name)}"):
                assert key in NO_PATHS, f"{key}: mark it as a path"


PLACE_METAVARS = {"FILE", "PATH", "DIR", "RUN", "HTML", "PNG", "CAPTURE", "INPUT", "OUT"}


def arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from arguments(inner)
        else:
            yield parser.prog, action


def test_every_argument_that_names_a_place_is_expanded():
    found = [
        (prog, action)
        for prog, action in arguments(app.build_parser())
        if action.metavar in PLACE_METAVARS or action.dest in ("out", "inputs", "tokenizer_path")
    ]
    assert len(found) >= 20
    assert [(p, a.dest) for p, a in found if a.type is not as_path] == []


@given(st.lists(st.sampled_from(["~", "/", "$SUB", "${SUB}", "$$", "x", ".", " y", "$HOME"])))
def test_an_expanded_path_is_written_so_that_it_means_itself(parts):
    """What a run directory and the launcher's configuration hold is read again."""
    try:
        found = paths.expand("".join(parts))
    except paths.PathError:
        return
    assert not found.startswith("~")
    assert paths.expand(paths.written(found)) == found


CASES = [
    ("run_dir", "~/x", "/home/ada/x"),
    ("run_dir", "$SCRATCH/x", "/scratch/ada/x"),
    ("checkpoint.directory", "~/ck", "/home/ada/ck"),
    ("cluster.secrets_file", "${SCRATCH}/key", "/scratch/ada/key"),
    ("data.blend.0.path", "$SCRATCH/corpus", "/scratch/ada/corpus"),
    ("cluster.setup_script", "~/env.sh", "/home/ada/env.sh"),
    ("cluster.container.image", "$SCRATCH/nemo.sqsh", "/scratch/ada/nemo.sqsh"),
    ("cluster.container.mounts.0", "$SCRATCH:/scratch:ro", "/scratch/ada:/scratch:ro"),
]


@pytest.mark.parametrize(("key", "value", "place"), CASES)
@pytest.mark.parametrize("how", ["file", "set"])
def test_check_says_where_a_path_leads(key, value, place, how, capsys):
    """A path in the file and one on the command line; and the resolved text loads to the same."""
    image = "cluster: {container: {image: x.sqsh}}\n" if "mounts" in key else ""
    Path("run.yaml").write_text(MINIMAL + image)
    argv = ["run.yaml", "--set", f"{key}={value}"]
    if how == "file":
        section, _, name = key.partition(".")
        inner = "{container: {image: x, mounts: [V]}}" if "mounts" in key else f"{{{name}: V}}"
        inner = "{container: {image: V}}" if "image" in key else inner
        inner = "{blend: [{path: V}]}" if "blend" in key else inner if name else "V"
        text = (
            MINIMAL.replace("data: {blend: [{path: corpus}]}\n", "") if "blend" in key else MINIMAL
        )
        Path("run.yaml").write_text(text + f"{section}: {inner.replace('V', repr(value))}\n")
        argv = ["run.yaml"]
    assert app.run(["config", "check", *argv]) == 0
    out = capsys.readouterr().out
    assert f"\n  {key}: {place}\n" in out
    loaded = config.load("run.yaml", argv[2:])
    Path("again.yaml").write_text(loaded.dump_yaml())
    again = config.load("again.yaml")
    assert again.config == loaded.config and again.dump_yaml() == loaded.dump_yaml()
    if key != "run_dir":
        assert f"  run_dir: {Path.cwd()}/runs/demo\n" in out, "relative: to the working directory"


def test_a_dollar_of_a_name_survives_the_recorded_configuration(monkeypatch):
    Path("run.yaml").write_text(MINIMAL)
    monkeypatch.setenv("SCRATCH", "/vol$1/ada")
    loaded = config.load("run.yaml", ["run_dir=$SCRATCH/a$$b", "checkpoint.directory=./~"])
    assert os.fspath(loaded.config.directory) == "/vol$1/ada/a$b"
    Path("again.yaml").write_text(loaded.dump_yaml())
    assert config.load("again.yaml").config == loaded.config


@pytest.mark.parametrize("text", ["~/old", "$SCRATCH/old"])
def test_what_earlier_versions_wrote_under_the_bare_name_is_not_left_behind(text):
    """A run in ``./~/old`` must not begin anew in the home directory."""
    Path("run.yaml").write_text(MINIMAL)
    Path(text).mkdir(parents=True)
    bare = "./~/old" if text[0] == "~" else "$$SCRATCH/old"
    with pytest.raises(config.ConfigError, match=re.escape(f"or write {bare} for it")):
        config.load("run.yaml", [f"run_dir={text}"])
    assert Path(text).samefile(config.load("run.yaml", [f"run_dir={bare}"]).config.directory)


def test_home(monkeypatch):
    for home, reason in (("", "is empty"), ("ada", "not an absolute path")):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(paths.PathError, match=reason):
            paths.expand("~/x")
    monkeypatch.setenv("HOME", "/")
    assert paths.expand("~/x") == "/x" and paths.expand("~") == "/"
    monkeypatch.delenv("HOME")
    assert paths.expand("~") == USER.pw_dir


@pytest.mark.parametrize("base", ["~/base.yaml", "$LIB/base.yaml"])
def test_base(base, monkeypatch, tmp_path):
    (tmp_path / "base.yaml").write_text(MINIMAL)
    for name in ("HOME", "LIB"):
        monkeypatch.setenv(name, os.fspath(tmp_path))
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "run.yaml").write_text(f"base: {base}\nname: other\n")
    assert config.load("below/run.yaml").config.name == "other"
    for bad, reason in (("$NO_SUCH/x", "NO_SUCH is not set"), ("~", "names one file")):
        Path("bad.yaml").write_text(f"base: {bad}\n")
        with pytest.raises(config.ConfigError, match=reason):
            config.load("bad.yaml")


@pytest.mark.parametrize(
    "wish",
    ["20", "step_00000020", "run/checkpoints/step_00000030.attempt-1", "run/checkpoints/latest",
     "run/checkpoints/iter_0000020", "$SCRATCH/run"],
)  # fmt: skip
def test_load_from_names_what_is_there(wish, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step_00000020.attempt-1").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000020.attempt-1\n")
    Path("run.yaml").write_text(MINIMAL)
    with pytest.raises(config.ConfigError, match="is not a directory; name a checkpoint, a run"):
        config.load("run.yaml", [f"checkpoint.load_from={wish}"])


def test_a_run_that_has_saved_needs_the_run_it_started_from_no_more(tmp_path):
    """Its requeue, weeks later, must not end for good because the old checkpoints are gone."""
    Path("run.yaml").write_text(MINIMAL)
    last_checkpoint.remember(tmp_path, tmp_path / "x", step=3)
    keys = ["checkpoint.load_from=gone", f"run_dir={tmp_path}"]
    assert config.load("run.yaml", keys).config.checkpoint.load_from == "gone"


LAUNCH = ["launch", "--config", "run.yaml", "--nodes", "1", "--dry-run",
          "--set", "cluster.gpus_per_node=0", "--set", "cluster.ranks_per_node=1"]  # fmt: skip


def test_launch_writes_the_same_paths(capsys):
    Path("run.yaml").write_text(MINIMAL)
    sets = {"run_dir": "$SCRATCH/x", "cluster.python": "~/venv/bin/python",
            "cluster.setup_script": "env.sh", "cluster.local_dir": "$SCRATCH/local",
            "cluster.secrets_file": "~/.secrets", "cluster.container.image": "~/x.sqsh",
            "cluster.container.mounts.0": "$HOME:/me"}  # fmt: skip
    more = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    assert app.run([*LAUNCH, *more]) == 0
    script = capsys.readouterr().out
    assert "RUN_DIR=/scratch/ada/x\n" in script and "LOCAL_DIR=/scratch/ada/local\n" in script
    assert f"SETUP_SCRIPT={Path.cwd()}/env.sh\n" in script
    assert "SECRETS_FILE=/home/ada/.secrets\n" in script
    assert "CONTAINER_IMAGE=/home/ada/x.sqsh\n" in script and "/home/ada:/me\n" in script
    assert app.run([*LAUNCH, "--set", "cluster.python=~/venv/bin/python"]) == 0
    assert "PYTHON=/home/ada/venv/bin/python\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["TMPDIR", "SLURM_JOB_ID", "SLURM_TMPDIR"])
def test_launch_refuses_what_only_the_nodes_know(name, monkeypatch, capsys):
    """Set in the shell that submits, it is that shell's. A process on a node takes its own."""
    monkeypatch.setenv(name, "/tmp/17")
    Path("run.yaml").write_text(MINIMAL)
    assert app.run([*LAUNCH, "--set", f"cluster.local_dir=${name}/x"]) == 2
    assert f"{name} of a job is known on its nodes only" in capsys.readouterr().err
    assert config.load("run.yaml", [f"run_dir=${name}/x"]).config.run_dir == "/tmp/17/x"


@pytest.mark.parametrize("value", ["~/bin/python", "$CONDA/bin/python"])
def test_a_path_inside_the_image_is_not_expanded(value):
    Path("run.yaml").write_text(MINIMAL)
    with pytest.raises(config.ConfigError, match="inside the image, written out"):
        config.load("run.yaml", [f"cluster.container.python={value}"])


def test_arguments(monkeypatch, capsys):
    """As in ``--config=~/run.yaml``, which no shell expands."""
    here = Path.cwd()
    monkeypatch.setenv("HOME", os.fspath(here))
    Path("run.yaml").write_text(MINIMAL)
    assert app.run(["config", "check", "--config=~/run.yaml"]) == 0
    assert f"{here}/run.yaml: ok" in capsys.readouterr().out
    assert app.run(["config", "docs", "--write=$HOME/page.md"]) == 0 and Path("page.md").exists()
    Path("corpus.txt").write_text("text\n")
    argv = ["prepare-data", "${HOME}/corp*.txt", "--out=~/data", "--quiet", "--workers=1"]
    assert app.run(argv) == 0 and Path("data.bin").exists()
    assert not Path("~").exists() and not Path("$HOME").exists()
    Path("a$SUB").touch()
    assert as_path("a$SUB") == "a$SUB", "the shell found it"
    for bad in ("$NO_SUCH/x", "~no-such-user/x", ""):
        with pytest.raises(SystemExit) as caught:
            app.run(["report", "run", f"--out={bad}"])
        assert caught.value.code == 2
        assert "argument -o/--out: " in capsys.readouterr().err
