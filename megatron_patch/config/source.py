"""YAML text as a tree of located source texts, before anything is made of it.

Nothing is resolved here: YAML 1.1's guesses (``no`` -> False, ``010`` -> 8, ``1:30`` -> 90,
``1e-4`` -> a string) never happen, because a scalar stays the text the person wrote until the type
of the field it is for is known (``values.py``). Of YAML, only what a configuration needs is let in:
one document of mappings, lists and scalars. Anchors, aliases, tags, merge keys, duplicate keys,
deep nesting and huge files are refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_patch.schema.problem import ConfigError, Place, Problem

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
# Keys and values; bounds the time on a hostile file to about a second. Thousands of datasets fit.
MAX_NODES = 10_000

# Control characters, and the line separators that YAML counts as line ends but editors do not.
FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value as written."""

    text: str
    quoted: bool
    """Quoted, or a block scalar: certainly meant as text."""
    place: Place


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


def shown(text: str, limit: int = 60) -> str:
    """``text`` quoted for a message: escapes visible, never longer than ``limit``."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


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
                    raise self.refuse(
                        event.start_mark,
                        "a second document starts here; a configuration is one document, "
                        "remove the '---'",
                    )
                root = self.node(next(events), events, depth=0, path="")
        if root is None:
            raise self.refuse(None, "is empty; a configuration is a mapping of sections")
        return root

    def node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int, path: str) -> Node:
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise self.refuse(
                mark, f"alias *{event.anchor}: anchors and aliases are not supported; use 'base:'"
            )
        assert isinstance(event, yaml.NodeEvent)
        if event.anchor is not None:
            raise self.refuse(
                mark, f"anchor &{event.anchor}: anchors and aliases are not supported; use 'base:'"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self.refuse(
                mark,
                f"tag {shown(tag)} is not supported; write the plain value, its type is known",
            )
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
