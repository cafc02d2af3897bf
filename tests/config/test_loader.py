"""Everything wrong is reported at once, in order, with place, path and nearest key."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from minimal_config import MINIMAL

from megatron_patch import config
from megatron_patch.parallel.setup import LayoutError
from megatron_patch.schema.problem import Place, Problem

Write = Callable[..., Path]
Load = Callable[..., config.ConfigError]

MANY = """\
name: no
model:
  hiden_size: 3
  num_layers: 010
  hidden_size: 64
  num_attention_heads: 4
  lr: 1
training:
  train_steps: 10
  global_batch_size: 2
  micro_batch_size: 1
  deterministic: yes
  deterministic: true
optimizer:
  lr: 1e-4
data:
  blend:
    - path: x
      wieght: 2
    - weight: no
bogus_section: {a: 1}
"""


def test_every_problem_at_once_sorted_by_line(write, refused):
    error = refused(write(MANY), ("optimizer.warmup=3",))
    found = [(p.where.line if p.where else None, p.path) for p in error.problems]
    assert found == [
        (2, "model.seq_length"),  # is required, said where the section is named
        (3, "model.hiden_size"),
        (4, "model.num_layers"),
        (7, "model.lr"),
        (12, "training.deterministic"),
        (13, "training.deterministic"),
        (19, "data.blend.0.wieght"),
        (20, "data.blend.1.path"),
        (20, "data.blend.1.weight"),
        (21, "bogus_section"),
        (0, "optimizer.warmup"),
    ]
    text = str(error)
    assert "11 problems" in text
    assert "did you mean hidden_size?" in text
    assert "optimizer.lr is such a key" in text
    assert "did you mean weight?" in text
    assert "did you mean warmup_steps?" in text
    assert "known keys: name, run_dir, model" in text


def test_missing_sections_and_keys(write, refused):
    error = refused(write("name: x\nmodel: {num_layers: 2}\n"))
    found = {p.path: p.message for p in error.problems}
    assert found["model.hidden_size"] == "is required: an integer"
    assert "section is required with at least train_steps" in found["training"]
    assert "section is required with at least lr" in found["optimizer"]


@dataclass(kw_only=True, frozen=True, slots=True)
class Sizes:
    """A section with a check between its keys."""

    width: int = 8
    """Width."""
    parts: int = 2
    """Parts."""

    def problems(self) -> Iterator[Problem]:
        """Every contradiction."""
        if self.width % self.parts:
            yield Problem("sizes.parts", f"{self.parts} does not divide width {self.width}")


@dataclass(kw_only=True, frozen=True, slots=True)
class Whole:
    """Root."""

    limit: int = 100
    """Limit."""
    sizes: Sizes = field(default_factory=Sizes)
    """Sizes."""
    blend: list[Sizes] = field(default_factory=list)
    """List."""

    def problems(self) -> Iterator[Problem]:
        """Checks of the root itself, and between its sections."""
        if self.sizes.width > self.limit:
            yield Problem("sizes.width", f"{self.sizes.width} is above limit {self.limit}")
        for index, item in enumerate(self.blend):
            if item.width < 0:
                yield Problem(f"blend[{index}].width", "is negative")
        if self.limit < 0:
            yield Problem("sizes", "no size is below a negative limit")


def test_contradictions_carry_the_place_of_the_value(write, refused):
    path = write("limit: 5\nsizes:\n  width: 9\nblend:\n  - width: 1\n  - width: -1\n")
    error = refused(path, root=Whole)
    assert [(p.path, p.where and p.where.short.rpartition("/")[2]) for p in error.problems] == [
        ("sizes.width", "run.yaml:3"),
        ("blend.1.width", "run.yaml:6"),
        ("sizes.parts", "default"),
    ]


def test_contradictions_are_reported_with_misspellings(write, refused):
    """A key that cannot be read must not hide what else is wrong."""
    error = refused(write("limti: 5\nsizes: {width: 9, parts: two}\nlimit: 5\n"), root=Whole)
    assert {p.path for p in error.problems} == {"limti", "sizes.parts", "sizes.width"}
    assert "count as their defaults" in str(error)


def test_a_problem_of_a_section_is_placed_at_its_first_value(write, refused):
    (problem,) = refused(write("limit: -1\nsizes:\n  parts: 1\n  width: -2\n"), root=Whole).problems
    assert problem.where is not None
    assert problem.where.line == 3


def test_error_text_is_bounded(write, refused):
    error = refused(write("".join(f"key_{i}: 1\n" for i in range(2000))), root=Whole)
    assert len(error.problems) == 2000
    assert "... and 1900 more" in str(error)
    assert len(str(error)) < 20_000


def test_terminal_escapes_do_not_reach_the_terminal():
    problem = Problem("a\x1b[31m", "b\x1b]0;x\x07", Place("c\x1b[2J", 3, 4))
    text = str(config.ConfigError([problem]))
    assert "\x1b" not in text
    assert "c\\x1b[2J:3:4: a\\x1b[31m: b" in text


def test_every_rank_gets_the_error_of_the_first_one():
    error = LayoutError([Problem("a", "b", may_pass=True)], note="and so on")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is LayoutError and found.problems == error.problems
    assert str(found) == str(error) and found.exit_code == 1


@pytest.mark.parametrize("name", ["a b", "../x", "", "-x", ".x", "x" * 129, "é", "$(id)", "a\nb"])
def test_names_that_could_be_paths_or_commands(minimal, refused, name):
    assert {p.path for p in refused(minimal, (f"name='{name}'",)).problems} == {"name"}


def test_render_names_every_origin(minimal):
    loaded = config.load(minimal, ["optimizer.lr=3e-4"])
    lines = {line.split(":")[0]: line for line in loaded.render().splitlines()}
    lines = {key.removeprefix("  "): line for key, line in lines.items()}
    assert lines["lr"].split("#")[1].strip() == "--set optimizer.lr=3e-4"
    assert lines["num_layers"].endswith("minimal.yaml:2")
    assert lines["beta1"].endswith("# default")
    assert "#" not in loaded.render(origins=False)
    assert yaml.safe_load(loaded.render()) == loaded.tree
    assert yaml.safe_load(loaded.dump_origins())["optimizer.lr"] == "--set optimizer.lr=3e-4"


def test_loading_does_not_import_torch(write):
    """All checks run before anything heavy: a typo must not cost the import of torch.

    Nor must the options of prepare-data, and they answer where torch is broken.
    """
    heavy = ("torch", "megatron", "numpy", "triton", "tokenizers")
    program = (
        "import sys, megatron_patch.attention.registry, megatron_patch.data.options; "
        "from megatron_patch import config; config.load(sys.argv[1]); "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(write(MINIMAL))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ["attention", "cluster", "problem", "run", "training"])
def test_every_section_can_be_imported_first(room):
    program = f"import megatron_patch.schema.{room}"
    subprocess.run([sys.executable, "-c", program], check=True)
