"""What the loader, the help and the documentation know of a section: its dataclass, nothing else.

A section is a frozen dataclass; a field's type says how a value is read, its default what happens
without one, and the docstring under it what it means.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

MISSING = dataclasses.MISSING


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a section."""

    name: str
    type: Any
    default: Any
    """Default value; ``MISSING`` when the key is required."""

    @property
    def required(self) -> bool:
        """Whether a configuration without this key is refused."""
        return self.default is MISSING


def is_section(tp: Any) -> bool:
    """Whether ``tp`` is read from a mapping."""
    return isinstance(tp, type) and dataclasses.is_dataclass(tp)


@cache
def fields(section: type) -> dict[str, Field]:
    """The keys of ``section`` in order."""
    hints = typing.get_type_hints(section)
    found = {}
    for item in dataclasses.fields(section):
        default = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        found[item.name] = Field(item.name, hints[item.name], default)
    return found


def alternatives(tp: Any) -> tuple[list[Any], bool]:
    """The members of a union without None, and whether None was one of them."""
    if get_origin(tp) in (Union, types.UnionType):
        members = get_args(tp)
        return [member for member in members if member is not type(None)], type(None) in members
    return [tp], False


def element(tp: Any) -> Any:
    """Type of the elements of ``list[...]``, or None when ``tp`` is no list."""
    return get_args(tp)[0] if get_origin(tp) is list else None


def section_of(tp: Any) -> type | None:
    """The dataclass that a mapping for ``tp`` is read into, if there is one."""
    return next((member for member in alternatives(tp)[0] if is_section(member)), None)


def list_of(tp: Any) -> Any:
    """The element type that a list for ``tp`` is read into, or None."""
    return next((element(m) for m in alternatives(tp)[0] if element(m) is not None), None)


NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
PLURALS = {int: "integers", float: "numbers", bool: "true/false values", str: "texts"}


def describe(tp: Any) -> str:
    """What a person writes for ``tp``: ``an integer or a list of integers``."""
    members, optional = alternatives(tp)
    words = [_describe_one(member) for member in members]
    return " or ".join(words + ["null"] * optional)


def _describe_one(tp: Any) -> str:
    if get_origin(tp) is Literal:
        return "one of " + ", ".join(map(str, get_args(tp)))
    inner = element(tp)
    if inner is not None:
        if inner in PLURALS:
            return f"a list of {PLURALS[inner]}"
        return "a list of sections" if is_section(inner) else f"a list, each {describe(inner)}"
    return "a section" if is_section(tp) else NOUNS[tp]


def spell(tp: Any) -> str:
    """``tp`` as the documentation writes it: ``int | list[int]``, ``gelu | swiglu``."""
    members, optional = alternatives(tp)
    words = []
    for member in members:
        inner = element(member)
        if get_origin(member) is Literal:
            words.append(" | ".join(map(str, get_args(member))))
        elif inner is not None:
            words.append(f"list[{spell(inner)}]")
        else:
            words.append("section" if is_section(member) else member.__name__)
    return " | ".join(words + ["null"] * optional)


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every key under ``section`` with its dotted path; list elements are shown as ``.N``."""
    for item in fields(section).values():
        path = prefix + item.name
        yield path, item
        inner = section_of(item.type)
        if inner is not None:
            yield from walk(inner, path + ".")
        listed = list_of(item.type)
        if listed is not None and is_section(listed):
            yield from walk(listed, path + ".N.")


@cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """Docstrings under the fields of every class of ``module``."""
    source = inspect.getsourcefile(sys.modules[module])
    assert source is not None, module
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(source).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found = docs.setdefault(node.name, {})
        for item, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                found[item.target.id] = " ".join(inspect.cleandoc(after.value.value).split())
    return docs


def help_of(section: type, name: str) -> str:
    """The docstring under field ``name`` of ``section``, on one line."""
    return _module_docs(section.__module__).get(section.__name__, {}).get(name, "")
