"""The register: every change of Megatron-Core is listed, finds its place and can be undone."""

from __future__ import annotations

import ast
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from megatron_patch.core_patches import register
from megatron_patch.core_patches.register import Patch
from megatron_patch.core_patches.replace import Replacement, patched
from megatron_patch.runtime import doctor
from megatron_patch.runtime.doctor import State

PACKAGE = Path(register.__file__).parents[1]
PATCHES = {patch.name: patch for patch in register.PATCHES}
UNDONE = {name: patch for name, patch in PATCHES.items() if patch.install is not None}


@pytest.fixture(autouse=True)
def unpatched():
    """Core as it is installed, whatever the tests before have built."""
    for patch in UNDONE.values():
        patch.undo()
    yield
    for patch in UNDONE.values():
        patch.undo()


def core_attributes() -> dict[tuple[str, str], object]:
    """Every global name of Megatron-Core and of ``torch.cuda``, and what it stands for."""
    modules = {
        name: module
        for name, module in sys.modules.items()
        if module is not None and name.startswith(("megatron.core", "torch.cuda"))
    }
    return {
        (name, key): value
        for name, module in modules.items()
        for key, value in vars(module).items()
        if not key.startswith("__")
    }


@pytest.mark.parametrize("name", UNDONE)
def test_core_is_as_before_when_it_is_undone(name):
    patch = UNDONE[name]
    patch.install()  # imports what it needs
    patch.undo()
    before, filters = core_attributes(), warnings.filters[:]
    levels = {x: logging.getLogger(x).level for x in ("megatron.core", "torch.utils.cpp_extension")}
    patch.install()
    changed = {key for key, value in core_attributes().items() if before.get(key) is not value}
    assert changed or warnings.filters != filters
    patch.undo()
    after = core_attributes()
    assert {key for key in before if after[key] is not before[key]} == set()
    assert warnings.filters == filters
    assert levels == {name: logging.getLogger(name).level for name in levels}


@pytest.mark.parametrize("name", PATCHES)
def test_it_finds_its_place(name):
    PATCHES[name].selftest()


def test_names_are_unique_and_versions_are_those_required():
    assert len(PATCHES) == len(register.PATCHES)
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    wanted = text.split('"megatron-core', 1)[1].split('"', 1)[0]
    for version in ("0.18.9", "0.19.2", "0.19.9", "0.20.0"):
        allowed = SpecifierSet(wanted).contains(version)
        assert all(patch.fits(version) == allowed for patch in PATCHES.values())


def test_nothing_else_replaces_attributes_of_core():
    """No mock in the product, and no assignment to a module of Megatron-Core but these."""
    known = {
        ("checkpoint/writer.py", "filesystem_async"),
        ("stability/adapters/megatron_training.py", "training"),  # within a block of the user's
        ("stability/adapters/megatron_bridge.py", "loop"),  # while Bridge trains
    }
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        core = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not any(x.name.startswith("unittest") for x in node.names), where
                core |= {x.asname for x in node.names if x.name.startswith("megatron.core")}
            elif isinstance(node, ast.ImportFrom):
                assert node.module is None or not node.module.startswith("unittest"), where
                if (node.module or "").startswith("megatron."):
                    core |= {x.asname or x.name for x in node.names}
        for node in ast.walk(tree):
            targets = getattr(node, "targets", []) if isinstance(node, ast.Assign) else []
            for part in (inner for target in targets for inner in ast.walk(target)):
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                    found |= {(where, part.value.id)} & {(where, name) for name in core}
    assert found == known


class Thing:
    def method(self):
        return "class"


def test_a_block_gives_back_what_an_object_had_itself_or_from_its_class():
    thing, module = Thing(), SimpleNamespace(x=1)
    with pytest.raises(KeyError), patched((thing, "method", lambda: "ours"), (module, "x", 2)):
        assert thing.method() == "ours" and module.x == 2
        raise KeyError
    assert thing.method() == "class" and vars(thing) == {} and module.x == 1
    with (
        pytest.raises(AttributeError, match="renamed"),
        patched((module, "x", 2), (thing, "renamed", 3)),
    ):
        pass
    assert module.x == 1 and vars(thing) == {}


def test_a_replacement_is_made_once_and_undone_to_the_first():
    module = SimpleNamespace(x=1)
    again = Replacement(lambda: [(module, "x", module.x + 1)])
    assert again.install() and again.install() and module.x == 3
    again.undo()
    assert module.x == 1
    again.undo()
    assert module.x == 1


def row(target: str = "optimizer.Adam", **changes) -> Patch:
    return Patch("x", target, "it lacks x", **changes)


@pytest.mark.parametrize(("patch", "state", "text"), [
    (row(), State.OK, "it lacks x (optimizer.Adam >=0.19,<0.20)"),
    (row(versions="<0.19"), State.NOTE, "not known to be right for megatron-core 0.19"),
    (row("optimizer.Adams"), State.BROKEN, "does not find its place: AttributeError: module"),
    (row("optimizers.Adam"), State.BROKEN, "does not find its place: AttributeError: module"),
])  # fmt: skip
def test_doctor_says_what_applies(patch, state, text, monkeypatch):
    monkeypatch.setattr(register, "PATCHES", (patch,))
    (found,) = doctor.core_patches()
    assert (found.state, found.name) == (state, "x") and text in found.text
