"""Layers of a configuration: a file, the files it is based on, and ``--set`` overrides.

Precedence: defaults < the deepest ``base:`` < ... < the file itself < ``--set`` in order. Sections
are merged key by key; every other value, lists included, is replaced as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence as Many
from typing import Any, Literal, get_origin

from megatron_patch.config import fields, source
from megatron_patch.config.source import Mapping, Node, Scalar, Sequence, shown
from megatron_patch.config.values import NULLS, is_null
from megatron_patch.schema.problem import DEFAULT, ConfigError, Place, Problem

BASE = "base"
MAX_BASES = 16

OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*|\.[0-9]{1,6})*")


def load_layers(path: str, problems: list[Problem]) -> Mapping:
    """The tree of ``path`` on top of everything it is based on."""
    merged: Mapping | None = None
    seen: list[str] = []
    asked_at: Place | None = None
    while True:
        try:
            text = source.read(path, asked_at=asked_at)
            _check_chain(path, seen, asked_at)
            tree, found = source.parse(text, path)
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
        path = os.path.normpath(os.path.join(os.path.dirname(path), base.text))
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
    if not (isinstance(node, Scalar) and is_null(node)):
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
            message = "is not of the form section.key=value"
            problems.append(Problem("", message, place))
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
            found = (Problem(p.path or path, p.message, place) for p in error.problems)
            problems.extend(found)
            continue
        assert isinstance(changed, Mapping)
        tree = changed
    return tree


def type_at(root: type, keys: Many[str]) -> Any:
    """Type of the key at the dotted path ``keys``, None when there is no such key."""
    current: Any = root
    for key in keys:
        if key.isdecimal():
            current = fields.list_of(current)
        else:
            section = fields.section_of(current)
            found = fields.fields(section).get(key) if section else None
            current = found.type if found else None
        if current is None:
            return None
    return current


def _override_value(text: str, tp: Any, place: Place) -> Node:
    """``text`` as a tree: verbatim where text is expected, else read as YAML.

    Verbatim means that a shell's ``name=a:b`` or ``name=#1`` need no second level of quotes; only
    null (where allowed) and a value in a pair of quotes mean what they mean in a file.
    """
    members, optional = fields.alternatives(tp)
    textual = all(member is str or get_origin(member) is Literal for member in members)
    stripped = text.strip()
    in_quotes = len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\""
    if tp is not None and textual and not in_quotes:
        bad = source.FORBIDDEN.search(text)
        if bad:
            message = f"character {bad.group()!r} cannot stand in a configuration; remove it"
            raise ConfigError([Problem("", message, place)])
        quoted = not (optional and stripped in NULLS) and stripped != ""
        return Scalar(text if quoted else stripped, quoted, place)
    if not stripped:
        return Scalar("", False, place)
    node, problems = source.parse(text, place.source, line=0)
    if problems:
        raise ConfigError(problems)
    return node


class _Spot:
    """Where ``_put`` is: the schema at this level, for lists that exist only as defaults."""

    __slots__ = ("default", "place", "type")

    def __init__(self, tp: Any, place: Place, default: Any = None) -> None:
        self.type = tp
        self.place = place
        self.default = default

    def under(self, key: str) -> _Spot:
        """The spot of ``key`` of this section, or of an element of this list."""
        if key.isdecimal():
            return _Spot(fields.list_of(self.type), self.place)
        section = fields.section_of(self.type) if self.type is not None else None
        found = fields.fields(section).get(key) if section else None
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
    if spot.type is not None and fields.list_of(spot.type) is None:
        raise _refused(f"takes {fields.describe(spot.type)}, it has no element {index}", spot)
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
