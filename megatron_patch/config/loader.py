"""The strict loader: YAML file + overrides -> frozen dataclasses, or every reason why not.

It knows no section by name: a room adds a field to its dataclass and the loader, ``--set``, the
help and the documentation know it. No import here or in any section reaches torch.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

from megatron_patch.config import checks, types
from megatron_patch.config.types import BadValue, Scalar, is_null, read_scalar, shown
from megatron_patch.config.yaml import Mapping, Node, Sequence, apply_overrides, load_layers
from megatron_patch.schema import paths
from megatron_patch.schema.problem import DEFAULT, ConfigError, Place, Problem
from megatron_patch.schema.run import Loaded, RunConfig

# Suggestions are searched for so many unknown keys; a file with more of them is no near miss.
MAX_SUGGESTIONS = 50
NO_VALUE_WORDS = ("none", "nil", "nothing", "null")
HOME_IS_NULL = (
    '~ alone is null in YAML, not your home directory: write null for no value, "~" in quotes or '
    "$HOME for the directory"
)


def load(
    path: str | os.PathLike[str],
    overrides: Many[str] = (),
    *,
    root: type = RunConfig,
    for_job: bool = False,
) -> Loaded:
    """Load ``path``, apply ``overrides`` (``a.b=c``), check everything that needs no GPU.

    ``root``: the dataclass of the whole configuration; default ``RunConfig``.
    ``for_job``: its paths are for a job on other machines (`schema.paths.expand`).
    Raises ``ConfigError`` with every problem found: syntax, unknown keys, types, values, and what
    the sections' ``problems(run)`` say about values that do not fit together.
    """
    problems: list[Problem] = []
    tree = load_layers(os.fspath(path), problems)
    tree = apply_overrides(tree, overrides, root, problems)
    reader = _Reader(root, problems, for_job=for_job)
    config = reader.section(root, tree, "", tree.place)
    note = ""
    if config is not None:
        found = [
            _located(problem, reader.origins) for problem in _contradictions(config, reader.origins)
        ]
        if problems and found:
            note = (
                "Values that could not be read count as their defaults in checks between keys; "
                "some of these problems may go away with them."
            )
        problems += found
    if problems:
        raise ConfigError(dict.fromkeys(problems), note=note)
    assert config is not None
    return Loaded(config, reader.origins, _plain(config))


class _Reader:
    """Builds dataclasses from the tree, noting problems and origins on the way.

    A value that cannot be read becomes its default, so that the checks between keys can still run
    and be reported with it; without a default the section, and so the whole, becomes None.
    """

    def __init__(self, root: type, problems: list[Problem], *, for_job: bool = False) -> None:
        self.root = root
        self.for_job = for_job
        self.problems = problems
        self.origins: dict[str, Place] = {}
        self.suggestions = 0

    def refuse(self, path: str, message: str, place: Place) -> None:
        self.problems.append(Problem(path if len(path) <= 200 else "", message, place))

    def section(self, section: type, node: Mapping, path: str, place: Place) -> Any | None:
        """``node`` as an instance of ``section`` (named at ``place``); None if incomplete."""
        prefix = f"{path}." if path else ""
        known = types.fields(section)
        for key in node.entries:
            if key not in known:
                self.unknown(key, section, prefix + key, node.keys[key])
        values: dict[str, Any] = {}
        complete = True
        for name, item in known.items():
            inner = prefix + name
            if name in node.entries:
                value = self.value(item.type, node.entries[name], inner, node.keys[name])
            elif item.required:
                self.missing(item, inner, place)
                value = _UNREAD
            else:
                self.default_origins(inner, item.default)
                continue
            if not isinstance(value, _Unread):
                values[name] = value
            elif item.required:
                complete = False
        return section(**values) if complete else None

    def unknown(self, key: str, section: type, path: str, place: Place) -> None:
        removed: str | None = getattr(section, "REMOVED", {}).get(key)
        if removed is not None:
            self.refuse(path, f"is no key any more: {removed}", place)
            return
        self.suggestions += 1
        hint = ""
        if self.suggestions <= MAX_SUGGESTIONS:
            hint = "; " + suggestion(key, section, self.root)
        parent = path.removesuffix(key).rstrip(".")
        where = f" in section {parent}" if parent else ""
        self.refuse(path, f"unknown key {shown(key)}{where}{hint}", place)

    def missing(self, item: types.Field, path: str, place: Place) -> None:
        section = types.section_of(item.type)
        if section is None:
            self.refuse(path, f"is required: {types.describe(item.type)}", place)
            return
        needed = [name for name, inner in types.fields(section).items() if inner.required]
        keys = f" with at least {', '.join(needed)}" if needed else ""
        self.refuse(path, f"section is required{keys}", place)

    def value(self, tp: Any, node: Node, path: str, key_place: Place) -> Any:
        """``node`` as ``tp``, or ``_UNREAD`` after noting why not."""
        members, optional = types.alternatives(tp)
        if isinstance(node, Scalar):
            if is_null(node) and node.text == "~" and any(map(types.is_path, members)):
                self.refuse(path, HOME_IS_NULL, node.place)
                return _UNREAD
            if optional and is_null(node):
                self.origins[path] = node.place
                return None
            return self.scalar(tp, node, path)
        if isinstance(node, Mapping):
            section = types.section_of(tp)
            if section is None:
                message = f"is a section here, {types.describe(tp)} is needed"
                self.refuse(path, message, key_place)
                return _UNREAD
            built = self.section(section, node, path, key_place)
            return _UNREAD if built is None else built
        inner = types.list_of(tp)
        if inner is None:
            self.refuse(path, f"is a list here, {types.describe(tp)} is needed", node.place)
            return _UNREAD
        return self.items(inner, node, path)

    def items(self, inner: Any, node: Sequence, path: str) -> Any:
        self.origins[path] = node.place
        values = [
            self.value(inner, item, f"{path}.{index}", item.place)
            for index, item in enumerate(node.items)
        ]
        return _UNREAD if any(isinstance(value, _Unread) for value in values) else values

    def scalar(self, tp: Any, node: Scalar, path: str) -> Any:
        members, optional = types.alternatives(tp)
        scalars = [m for m in members if not types.is_section(m) and types.element(m) is None]
        if not scalars:
            self.refuse(path, self.not_scalar(tp, node), node.place)
            return _UNREAD
        if optional and not node.quoted and _means_nothing(node.text, scalars):
            message = f'{node.text}: write null for no value, or "{node.text}" for the text'
            self.refuse(path, message, node.place)
            return _UNREAD
        message = ""
        for member in scalars:
            try:
                value = read_scalar(node, member)
                if types.is_path(member):
                    value = paths.expand(value, for_job=self.for_job)
            except (BadValue, paths.PathError) as error:
                message = str(error)
            else:
                self.origins[path] = node.place
                return value
        if len(scalars) > 1:
            message = f"{shown(node.text)} is not {types.describe(tp)}"
        self.refuse(path, message, node.place)
        return _UNREAD

    def not_scalar(self, tp: Any, node: Scalar) -> str:
        """Message for a scalar where a section or a list is needed."""
        wanted = types.describe(tp)
        if node.text == "" and not node.quoted:
            remedy = "[]" if types.list_of(tp) is not None else "{}"
            return f"nothing is written under it, {wanted} is needed; write {remedy} or remove it"
        if types.list_of(tp) is not None:
            return f"{shown(node.text)} is one value, {wanted} is needed; put it in brackets: [...]"
        return f"{shown(node.text)} is a value, {wanted} ('key: value' lines) is needed"

    def default_origins(self, path: str, value: Any) -> None:
        """Note that ``path``, and everything under it, has its default."""
        if types.is_section(type(value)):
            for item in dataclasses.fields(value):
                self.default_origins(f"{path}.{item.name}", getattr(value, item.name))
            return
        self.origins[path] = DEFAULT


def suggestion(key: str, section: type, root: type) -> str:
    """Where an unknown ``key`` of ``section`` belongs: the end of an error message."""
    names = list(types.fields(section))
    here = types.nearest(key, names)
    leaves: dict[str, str] = {}
    for path, _ in types.walk(root):
        leaves.setdefault(path.rpartition(".")[2], path)
    if key in leaves and key not in names:
        elsewhere = f"{leaves[key]} is such a key"
        return f"did you mean {here}? ({elsewhere}, too)" if here else elsewhere
    if here:
        return f"did you mean {here}?"
    far = types.nearest(key, list(leaves), cutoff=0.75)
    if far:
        return f"did you mean {leaves[far]}?"
    return "known keys: " + ", ".join(names)


class _Unread:
    """Stands for a value that could not be read (None is a value)."""


_UNREAD = _Unread()


def _means_nothing(text: str, scalars: list[Any]) -> bool:
    """Whether ``text`` is a person's word for null and no allowed choice."""
    names = [str(name) for tp in scalars if tp is not str for name in getattr(tp, "__args__", ())]
    return text.lower() in NO_VALUE_WORDS and text not in names


def _contradictions(config: Any, origins: dict[str, Place]) -> Iterator[Problem]:
    """What the sections, and for a whole run the rules between them, find about read values."""
    if isinstance(config, RunConfig):
        written = {key for key, place in origins.items() if place is not DEFAULT}
        yield from checks.idle_problems(config, written)
        yield from checks.problems(config)
        return
    for item in [config, *(getattr(config, f.name) for f in dataclasses.fields(config))]:
        if types.is_section(type(item)) and hasattr(item, "problems"):
            yield from item.problems()


def _located(problem: Problem, origins: dict[str, Place]) -> Problem:
    """``problem`` with the place of its value, or of the nearest section that was written."""
    path = re.sub(r"\[(\d+)\]", r".\1", problem.path)
    where = origins.get(path)
    if where is None:
        # A section: its first written value says where it stands.
        under = [place for key, place in origins.items() if key.startswith(path + ".")]
        where = min((place for place in under if place is not DEFAULT), default=DEFAULT)
    return Problem(path, problem.message, where)


def _plain(value: Any, tp: Any = None) -> Any:
    """Dataclasses as dicts, all the way down; paths as they are written, to be expanded again."""
    section: type = type(value)
    if types.is_section(section):
        known = types.fields(section)
        return {name: _plain(getattr(value, name), item.type) for name, item in known.items()}
    if isinstance(value, list):
        return [_plain(item, types.list_of(tp)) for item in value]
    if isinstance(value, str) and any(map(types.is_path, types.alternatives(tp)[0])):
        return paths.written(value)
    return value
