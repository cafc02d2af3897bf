"""A resolved configuration as YAML that every YAML reader, strict or lenient, reads the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron_patch.schema.problem import DEFAULT, Place

# Texts that no reader takes for anything else; all others get quotes.
SAFE = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nil", "nan", "inf"}
ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
COMMENT_COLUMN = 44


def quote(text: str) -> str:
    """``text`` as a YAML scalar that is certainly text."""
    if SAFE.fullmatch(text) and text.lower() not in WORDS and not text.startswith("."):
        return text
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(char: str) -> str:
    if char in ESCAPES:
        return ESCAPES[char]
    return char if char.isprintable() else f"\\U{ord(char):08x}"


def scalar(value: Any) -> str:
    """A scalar, or an empty list or section, as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        # YAML 1.1 takes 1e-05 for text: its floats need a point.
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, (list, dict)):
        return "[" + ", ".join(map(scalar, value)) + "]" if isinstance(value, list) else "{}"
    return quote(value) if isinstance(value, str) else str(value)


def _flow(value: Any) -> bool:
    """Whether ``value`` is written on its key's line."""
    if isinstance(value, list):
        return not any(isinstance(item, (dict, list)) for item in value)
    return not isinstance(value, dict) or not value


def _lines(value: Any, path: str, indent: str) -> Iterator[tuple[str, str]]:
    """``(line, path of its value or "")`` for a section or a list of sections."""
    for key, item in value.items():
        inner = f"{path}.{key}" if path else key
        if _flow(item):
            yield f"{indent}{key}: {scalar(item)}", inner
            continue
        yield f"{indent}{key}:", ""
        if isinstance(item, dict):
            yield from _lines(item, inner, indent + "  ")
            continue
        for index, element in enumerate(item):
            assert isinstance(element, dict), "lists of lists have no field type"
            lead = indent + "  - "
            for line, where in _lines(element, f"{inner}.{index}", indent + "    "):
                yield lead + line[len(lead) :], where
                lead = indent + "    "


def dump(tree: dict[str, Any], origins: dict[str, Place] | None = None) -> str:
    """``tree`` as YAML; with ``origins``, each value's origin stands in a comment beside it."""
    text = []
    for line, path in _lines(tree, "", ""):
        if origins is not None and path:
            place = _origin(path, tree, origins)
            line = f"{line:<{COMMENT_COLUMN}}  # {place}"
        text.append(line + "\n")
    return "".join(text)


def _origin(path: str, tree: dict[str, Any], origins: dict[str, Place]) -> str:
    """Origin of ``path``; for a list whose elements were set one by one, all of them."""
    place = origins.get(path, DEFAULT)
    names = [place.short]
    for key, other in origins.items():
        if key.startswith(path + ".") and other.short not in names and not other.line:
            names.append(other.short)
    return ", ".join(names)
