"""YAML files as one tree of located source texts, before anything is made of it.

Nothing is resolved here: YAML 1.1's guesses (``no`` -> False, ``010`` -> 8, ``1:30`` -> 90,
``1e-4`` -> a string) never happen, because a scalar stays the text the person wrote until the type
of the field it is for is known (`types`). Of YAML, only what a configuration needs is let in:
one document of mappings, lists and scalars. Anchors, aliases, tags, merge keys, duplicate keys,
deep nesting and huge files are refused.

Precedence: defaults < the deepest ``base:`` < ... < the file itself < ``--set`` in order. Sections
are merged key by key; every other value, lists included, is replaced as a whole.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_origin

import yaml

from megatron_patch.config import types
from megatron_patch.config.types import NULLS, Scalar, is_null, shown
from megatron_patch.schema import paths
from megatron_patch.schema.problem import DEFAULT, ConfigError, Place, Problem

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
# Keys and values; bounds the time on a hostile file to about a second. Thousands of datasets fit.
MAX_NODES = 10_000
BASE = "base"
MAX_BASES = 16

OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*|\.[0-9]{1,6})*")

# Control characters, and the line separators that YAML counts as line ends but editors do not.
FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: list[Node]
    place: Place


@dataclass(frozen=True, slots=True)
class Mapping:
    """A section: keys in file order. ``keys`` holds where each key stands."""

    entries: dict[str, Node]
    keys: dict[str, Place]
    place: Place


Node = Scalar | Sequence | Mapping


def read(path: str | os.PathLike[str], *, asked_at: Place | None = None) -> str:
    """Text of a configuration file; ``ConfigError`` when it is none.

    ``asked_at``: where the file was named, for ``base:``; else the file itself is blamed.
    """
    name = os.fspath(path)

    def refuse(reason: str) -> ConfigError:
        return ConfigError([Problem("", f"{name}: {reason}", asked_at)])

    if "\0" in name:
        raise refuse("a file name cannot contain a NUL character")
    try:
        status = os.stat(name)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise refuse(f"is {kind}; name a YAML file")
        if status.st_size > MAX_BYTES:
            raise refuse(f"has {status.st_size} bytes; a configuration has at most {MAX_BYTES}")
        data = Path(name).read_bytes()[: MAX_BYTES + 1]
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"line {line}: byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        raise refuse(reason) from None


@dataclass(slots=True)
class _Builder:
    source: str
    line: int | None
    """Line reported for every place; None: the line in the text."""
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0

    def place(self, mark: Any) -> Place:
        if self.line is not None or mark is None:
            return Place(self.source, self.line or 0)
        return Place(self.source, mark.line + 1, mark.column + 1)

    def refuse(self, mark: Any, message: str) -> ConfigError:
        """The problems so far and a last one, after which the text cannot be read on."""
        return ConfigError([*self.problems, Problem("", message, self.place(mark))])

    def build(self, events: Iterator[yaml.Event]) -> Node:
        """The tree of the only document in ``events``."""
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if event.tags:
                    raise self.refuse(event.start_mark, "%TAG directives are not supported")
                if root is not None:
                    message = "a second document starts here; a configuration is one document, "
                    raise self.refuse(event.start_mark, message + "remove the '---'")
                root = self.node(next(events), events, depth=0, path="")
        if root is None:
            raise self.refuse(None, "is empty; a configuration is a mapping of sections")
        return root

    def node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int, path: str) -> Node:
        mark = event.start_mark
        assert isinstance(event, yaml.NodeEvent)
        if event.anchor is not None:
            kind = "alias *" if isinstance(event, yaml.AliasEvent) else "anchor &"
            message = f"{kind}{event.anchor}: anchors and aliases are not supported; use 'base:'"
            raise self.refuse(mark, message)
        tag = getattr(event, "tag", None)
        if tag is not None:
            message = f"tag {shown(tag)} is not supported; write the plain value, its type is known"
            raise self.refuse(mark, message)
        if depth > MAX_DEPTH:
            raise self.refuse(mark, f"nested deeper than {MAX_DEPTH} levels")
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.refuse(mark, f"more than {MAX_NODES} keys and values")
        if isinstance(event, yaml.ScalarEvent):
            bad = FORBIDDEN.search(event.value)
            if bad:
                raise self.refuse(mark, f"control character {bad.group()!r} in a value or key")
            return Scalar(event.value, event.style is not None, self.place(mark))
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self.node(event, events, depth + 1, f"{path}.{len(items)}"))
            return Sequence(items, self.place(mark))
        return self.mapping(mark, events, depth, path)

    def mapping(self, mark: Any, events: Iterator[yaml.Event], depth: int, path: str) -> Mapping:
        entries: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self.node(event, events, depth + 1, path)
            if not isinstance(key, Scalar):
                raise self.refuse(event.start_mark, "a key must be a plain name")
            inner = f"{path}.{key.text}" if path else key.text
            value = self.node(next(events), events, depth + 1, inner)
            if key.text == "<<" and not key.quoted:
                message = "merge keys are not supported; use 'base:'"
                self.problems.append(Problem(path, message, key.place))
            elif key.text in entries:
                message = f"key written twice; first at {keys[key.text].short}, keep one of them"
                self.problems.append(Problem(inner[:200], message, key.place))
            else:
                entries[key.text] = value
                keys[key.text] = key.place
        return Mapping(entries, keys, self.place(mark))


def parse(text: str, source: str, *, line: int | None = None) -> tuple[Node, list[Problem]]:
    """The tree of ``text`` and what is wrong with it but does not hinder reading on.

    ``source`` names the text in messages; ``line`` 0 leaves positions out. Raises ``ConfigError``
    for what is not YAML, or is a part of YAML that a configuration does not use.
    """
    builder = _Builder(source, line)
    bad = FORBIDDEN.search(text)
    if bad:
        before = text[: bad.start()]
        at = Place(source, before.count("\n") + 1) if line is None else builder.place(None)
        message = f"character {bad.group()!r} cannot stand in a configuration; remove it"
        raise ConfigError([Problem("", message, at)])
    try:
        return builder.build(yaml.parse(text, Loader=yaml.SafeLoader)), builder.problems
    except yaml.MarkedYAMLError as error:
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise builder.refuse(error.problem_mark, f"not valid YAML: {message}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML turns an escape beyond Unicode into chr()'s own ValueError or OverflowError.
        if isinstance(error, ConfigError):
            raise
        raise builder.refuse(None, f"not valid YAML: {error}") from None


def load_layers(path: str, problems: list[Problem]) -> Mapping:
    """The tree of ``path`` on top of everything it is based on."""
    merged: Mapping | None = None
    seen: list[str] = []
    asked_at: Place | None = None
    while True:
        try:
            text = read(path, asked_at=asked_at)
            _check_chain(path, seen, asked_at)
            tree, found = parse(text, path)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        problems.extend(found)
        if not isinstance(tree, Mapping):
            message = "is not a mapping; a configuration is 'key: value' lines under sections"
            raise ConfigError([*problems, Problem("", message, tree.place)])
        base = _take_base(tree, problems)
        merged = tree if merged is None else merge(tree, merged)
        if base is None:
            return merged
        try:
            named = paths.expand(base.text)
        except paths.PathError as error:
            problem = Problem(BASE, str(error), base.place)
            raise ConfigError([*problems, problem]) from None
        path = os.path.normpath(os.path.join(os.path.dirname(path), named))
        asked_at = base.place


def _check_chain(path: str, seen: list[str], asked_at: Place | None) -> None:
    """Refuse a file that is already below itself, and chains without a sensible end."""
    real = os.path.realpath(path)
    if real in seen:
        raise ConfigError([Problem(BASE, f"{path}: a file cannot be its own base", asked_at)])
    seen.append(real)
    if len(seen) > MAX_BASES:
        message = f"{path}: more than {MAX_BASES} files in one chain of bases"
        raise ConfigError([Problem(BASE, message, asked_at)])


def _take_base(tree: Mapping, problems: list[Problem]) -> Scalar | None:
    """Remove ``base:`` from ``tree`` and return the file it names."""
    if BASE not in tree.entries:
        return None
    node = tree.entries.pop(BASE)
    tree.keys.pop(BASE)
    if isinstance(node, Scalar) and node.text and not is_null(node):
        return node
    if not (isinstance(node, Scalar) and is_null(node) and node.text != "~"):
        message = "names one file, relative to this one, e.g. base: base/gpt.yaml"
        problems.append(Problem(BASE, message, node.place))
    return None


def merge(lower: Mapping, upper: Mapping) -> Mapping:
    """``upper`` over ``lower``: sections key by key, anything else replaced."""
    entries = dict(lower.entries)
    keys = dict(lower.keys)
    for key, node in upper.entries.items():
        below = entries.get(key)
        if isinstance(node, Mapping) and isinstance(below, Mapping):
            node = merge(below, node)
        entries[key] = node
        keys[key] = upper.keys[key]
    return Mapping(entries, keys, upper.place)


def apply_overrides(
    tree: Mapping, overrides: Many[str], root: type, problems: list[Problem]
) -> Mapping:
    """``tree`` with every ``a.b=c`` of ``overrides`` applied in order."""
    for text in overrides:
        place = Place(f"--set {text if len(text) <= 120 else text[:120] + '...'}")
        path, equals, value = text.partition("=")
        path = path.strip()
        if not equals or not OVERRIDE.fullmatch(path):
            problems.append(Problem("", "is not of the form section.key=value", place))
            continue
        if path == BASE:
            message = "cannot be overridden; name another file with --config"
            problems.append(Problem(BASE, message, place))
            continue
        keys = path.split(".")
        try:
            node = _override_value(value, type_at(root, keys), place)
            changed = _put(tree, keys, node, _Spot(root, place))
        except ConfigError as error:
            problems += (Problem(p.path or path, p.message, place) for p in error.problems)
            continue
        assert isinstance(changed, Mapping)
        tree = changed
    return tree


def type_at(root: type, keys: Many[str]) -> Any:
    """Type of the key at the dotted path ``keys``, None when there is no such key."""
    current: Any = root
    for key in keys:
        if key.isdecimal():
            current = types.list_of(current)
        else:
            section = types.section_of(current)
            found = types.fields(section).get(key) if section else None
            current = found.type if found else None
        if current is None:
            return None
    return current


def _override_value(text: str, tp: Any, place: Place) -> Node:
    """``text`` as a tree: verbatim where text is expected, else read as YAML.

    Verbatim means that a shell's ``name=a:b`` or ``name=#1`` need no second level of quotes; only
    null (where allowed) and a value in a pair of quotes mean what they mean in a file.
    """
    members, optional = types.alternatives(tp)
    textual = all(types.is_text(member) or get_origin(member) is Literal for member in members)
    stripped = text.strip()
    in_quotes = len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\""
    if tp is not None and textual and not in_quotes:
        bad = FORBIDDEN.search(text)
        if bad:
            message = f"character {bad.group()!r} cannot stand in a configuration; remove it"
            raise ConfigError([Problem("", message, place)])
        home = stripped == "~" and any(map(types.is_path, members))
        quoted = stripped != "" and not (optional and stripped in NULLS) and not home
        return Scalar(text if quoted else stripped, quoted, place)
    if not stripped:
        return Scalar("", False, place)
    node, problems = parse(text, place.source, line=0)
    if problems:
        raise ConfigError(problems)
    return node


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where ``_put`` is: the schema at this level, for lists that exist only as defaults."""

    type: Any
    place: Place
    default: Any = None

    def under(self, key: str) -> _Spot:
        """The spot of ``key`` of this section, or of an element of this list."""
        if key.isdecimal():
            return _Spot(types.list_of(self.type), self.place)
        section = types.section_of(self.type) if self.type is not None else None
        found = types.fields(section).get(key) if section else None
        if found is None:
            return _Spot(None, self.place)
        return _Spot(found.type, self.place, None if found.required else found.default)


def _put(node: Node | None, keys: Many[str], value: Node, spot: _Spot) -> Node:
    """A copy of ``node`` in which ``keys`` leads to ``value``."""
    if not keys:
        if isinstance(value, Mapping) and isinstance(node, Mapping):
            return merge(node, value)
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(node, Scalar) and is_null(node):
        node = None
    if key.isdecimal():
        return _put_element(node, int(key), rest, value, spot)
    if node is None:
        node = Mapping({}, {}, spot.place)
    if not isinstance(node, Mapping):
        raise _refused(f"{shown(key)} cannot be set inside a value that is not a section", spot)
    entries = {**node.entries, key: _put(node.entries.get(key), rest, value, spot.under(key))}
    return Mapping(entries, {**node.keys, key: spot.place}, node.place)


def _put_element(node: Node | None, index: int, rest: Many[str], value: Node, spot: _Spot) -> Node:
    if spot.type is not None and types.list_of(spot.type) is None:
        raise _refused(f"takes {types.describe(spot.type)}, it has no element {index}", spot)
    if node is None:
        node = Sequence([_written(item) for item in spot.default or ()], spot.place)
    if not isinstance(node, Sequence):
        raise _refused(f"is not a list, it has no element {index}", spot)
    items = list(node.items)
    if index > len(items):
        raise _refused(
            f"has {len(items)} element{'s' if len(items) != 1 else ''}; "
            f"{index} is out of range ({len(items)} appends one)",
            spot,
        )
    old = items[index] if index < len(items) else None
    items[index : index + 1] = [_put(old, rest, value, spot.under(str(index)))]
    return Sequence(items, node.place)


def _written(value: Any) -> Node:
    """An element of a default list as if it had been written."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Scalar(text, isinstance(value, str), DEFAULT)


def _refused(message: str, spot: _Spot) -> ConfigError:
    return ConfigError([Problem("", message, spot.place)])
