"""What a section says of its keys, and a written value -> the Python value, or why not.

A section is a frozen dataclass; a field's type says how a value is read, its default what happens
without one, and the docstring under it what it means. The loader, the help and the documentation
know nothing else. The type decides, never the look of the text: `docs.HEAD` has the table of what
each accepts and what is refused with a remedy. Optional fields take ``null`` or ``~``.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from megatron_patch.schema.paths import PathOrName, PathText
from megatron_patch.schema.problem import Place

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
    hints = typing.get_type_hints(section, include_extras=True)
    found = {}
    for item in dataclasses.fields(section):
        default = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        found[item.name] = Field(item.name, hints[item.name], default)
    return found


def is_path(tp: Any) -> bool:
    """Whether ``tp`` is `PathText` or `PathOrName`."""
    return get_origin(tp) is Annotated


def is_text(tp: Any) -> bool:
    """Whether a scalar for ``tp`` is exactly what was written, before a path is expanded."""
    return tp is str or is_path(tp)


def alternatives(tp: Any) -> tuple[list[Any], bool]:
    """The members of a union without None, and whether None was one of them."""
    if get_origin(tp) in (Union, UnionType):
        members = get_args(tp)
        return [member for member in members if member is not NoneType], NoneType in members
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


def section_under(tp: Any) -> type | None:
    """The dataclass of ``tp`` or, for a list, of its elements."""
    found = section_of(tp) or list_of(tp)
    return found if is_section(found) else None


NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text",
         PathText: "a path", PathOrName: "a path or name"}  # fmt: skip
PLURALS = {int: "integers", float: "numbers", bool: "true/false values", str: "texts",
           PathText: "paths"}  # fmt: skip


def describe(tp: Any) -> str:
    """What a person writes for ``tp``: ``an integer or a list of integers``."""
    members, optional = alternatives(tp)
    return " or ".join([_describe_one(member) for member in members] + ["null"] * optional)


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
        elif is_path(member):
            words.append(member.__metadata__[0])
        else:
            words.append("section" if is_section(member) else member.__name__)
    return " | ".join(words + ["null"] * optional)


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every key under ``section`` with its dotted path; list elements are shown as ``.N``."""
    for item in fields(section).values():
        path = prefix + item.name
        yield path, item
        inner = section_under(item.type)
        if inner is not None:
            yield from walk(inner, path + ("." if section_of(item.type) else ".N."))


def path_keys(value: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, type, value) of every path of a section that has a value."""
    section: type = type(value)
    for name, item in fields(section).items():
        yield from _paths_under(item.type, getattr(value, name), prefix + name)


def _paths_under(tp: Any, value: Any, key: str) -> Iterator[tuple[str, Any, str]]:
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths_under(list_of(tp), inner, f"{key}.{index}")
    elif is_section(type(value)):
        yield from path_keys(value, f"{key}.")
    elif isinstance(value, str):
        yield from ((key, member, value) for member in alternatives(tp)[0] if is_path(member))


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


# difflib is quadratic in the length; no key is longer.
LONGEST = 64


def nearest(word: str, names: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """The name closest to ``word``, if any is close."""
    plain = word[:LONGEST].lower().replace("-", "_")
    lowered = {name.lower().replace("-", "_"): name for name in reversed(names)}
    found = difflib.get_close_matches(plain, list(lowered), n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value as written."""

    text: str
    quoted: bool
    """Quoted, or a block scalar: certainly meant as text."""
    place: Place


def shown(text: str, limit: int = 60) -> str:
    """``text`` quoted for a message: escapes visible, never longer than ``limit``."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def is_null(node: Scalar) -> bool:
    """Whether ``node`` is written as null (quoted, it is text)."""
    return not node.quoted and node.text in NULLS


INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)")
NUMBER = re.compile(
    r"[+-]?((0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"
)
LEADING_ZERO = re.compile(r"[+-]?0[0-9_]+")
BASED = re.compile(r"[+-]?0[xXoObB][0-9a-fA-F_]+")
SEXAGESIMAL = re.compile(r"[+-]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
NULLS = ("null", "~")
# A finite double needs fewer; int() and float() of very long texts are slow or refused by Python.
MAX_DIGITS = 400
INT64 = 2**63


class BadValue(ValueError):
    """A scalar that cannot be read as its field's type; the text says what to write instead."""


def read_scalar(node: Scalar, tp: Any) -> Any:
    """``node`` as the scalar type ``tp`` (int, float, bool, str, a path or Literal)."""
    if not node.quoted and node.text == "":
        raise BadValue(
            f"nothing is written after the colon; write {describe(tp)}, or remove the key"
        )
    if get_origin(tp) is Literal:
        return _choice(node, tp)
    if is_text(tp):
        return _text(node)
    if node.quoted:
        raise BadValue(
            f"{shown(node.text)} is text because of its quotes, {describe(tp)} is needed; "
            "remove the quotes"
        )
    if is_null(node):
        raise BadValue(
            f"null is not allowed, {describe(tp)} is needed; remove the key to get the default"
        )
    reader = {bool: _bool, int: _int, float: _float}[tp]
    return reader(node.text)


def _text(node: Scalar) -> str:
    if is_null(node):
        raise BadValue(f"{node.text} is not allowed here, text is needed; quote it if it is text")
    return node.text


def _choice(node: Scalar, tp: Any) -> Any:
    allowed = get_args(tp)
    for value in allowed:
        if node.text == str(value):
            return value
    names = [str(value) for value in allowed]
    close = nearest(node.text, names)
    hint = f"; did you mean {close}?" if close else ""
    raise BadValue(f"{shown(node.text)} is not one of {', '.join(names)}{hint}")


def _bool(text: str) -> bool:
    if text in ("true", "false"):
        return text == "true"
    truth = dict.fromkeys(("yes", "on", "y", "1", "true"), "true")
    truth |= dict.fromkeys(("no", "off", "n", "0", "false"), "false")
    remedy = f"write {truth.get(text.lower(), 'true or false')}"
    raise BadValue(f"{shown(text)} is not true or false; {remedy}")


def _odd_number(text: str) -> str | None:
    """Why a text that some YAML reader takes for a number is refused."""
    plain = text.replace("_", "")
    if len(text) <= MAX_DIGITS and LEADING_ZERO.fullmatch(text):
        sign = plain[0] if plain[0] in "+-" else ""
        digits = plain.lstrip("+-")
        decimal = sign + (digits.lstrip("0") or "0")
        octal = f" or {sign}{int(digits, 8)}" if set(digits) <= set("01234567") else ""
        return (
            f"{shown(text)} has a leading zero, which some readers take for octal; "
            f"write {decimal}{octal}"
        )
    if len(text) <= MAX_DIGITS and BASED.fullmatch(text):
        try:
            decimal = f"; write {int(plain, 0)}"
        except ValueError:
            decimal = ""
        return f"{shown(text)} is not decimal{decimal}"
    if SEXAGESIMAL.fullmatch(text):
        return (
            f"{shown(text)} has a colon, which some readers take for base 60; "
            "write a decimal number, or put a space after the colon of a key"
        )
    return None


def _int(text: str) -> int:
    if INTEGER.fullmatch(text) and len(text) <= MAX_DIGITS:
        value = int(text.replace("_", ""))
        if not -INT64 <= value < INT64:
            raise BadValue(f"{shown(text)} does not fit a 64-bit integer")
        return value
    odd = _odd_number(text)
    if odd:
        raise BadValue(odd)
    if NUMBER.fullmatch(text) and len(text) <= MAX_DIGITS:
        number = float(text.replace("_", ""))
        if math.isfinite(number) and number == int(number) and abs(number) < 2**53:
            raise BadValue(f"{shown(text)} is not written as an integer; write {int(number)}")
    raise BadValue(f"{shown(text)} is not an integer; write decimal digits, e.g. 1000")


def _float(text: str) -> float:
    if NUMBER.fullmatch(text) and len(text) <= MAX_DIGITS:
        value = float(text.replace("_", ""))
        if math.isinf(value):
            raise BadValue(f"{shown(text)} is too large for a double")
        mantissa = re.split("[eE]", text)[0]
        if value == 0 and any(digit in mantissa for digit in "123456789"):
            raise BadValue(f"{shown(text)} is too small for a double and would become 0; write 0")
        return value
    odd = _odd_number(text)
    if odd:
        raise BadValue(odd)
    if text.lstrip("+-.").lower() in ("nan", "inf", "infinity"):
        raise BadValue(f"{shown(text)} is not a finite number")
    hint = "write a decimal number, e.g. 0.1 or 1e-4"
    if re.fullmatch(r"[0-9.]+%", text):
        hint = "write a share of 1, e.g. 0.1 for 10 %"
    elif re.fullmatch(r"[+-]?[0-9]+,[0-9]+", text):
        hint = "write a point, not a comma"
    raise BadValue(f"{shown(text)} is not a number; {hint}")
