"""A written value and the type it is for -> the Python value, or the reason why not.

The field's type decides, never the look of the text. What each type accepts:

========  ==================================================================================
bool      ``true`` or ``false``, nothing else
int       decimal digits, thousands separated by ``_`` at will: ``1000``, ``-3``, ``1_000``
float     a decimal number with or without exponent, finite: ``1e-4``, ``.5``, ``3``
text      exactly what was written, quoted or not (``no``, ``010`` and ``1e-4`` are text here)
choice    one of the names, exactly
null      ``null`` or ``~``, where the field is optional
========  ==================================================================================

Refused with a remedy: leading zeros (``010`` is 8 in YAML 1.1 and 10 elsewhere), ``0x10``,
``1:30``, ``1e3`` for an int, numbers in quotes, numbers that overflow or vanish, nan and inf, and a
key with nothing after its colon.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, get_args, get_origin

from megatron_patch.config import fields
from megatron_patch.config.source import Scalar, shown
from megatron_patch.config.suggest import nearest

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


def is_null(node: Scalar) -> bool:
    """Whether ``node`` is written as null (quoted, it is text)."""
    return not node.quoted and node.text in NULLS


def read_scalar(node: Scalar, tp: Any) -> Any:
    """``node`` as the scalar type ``tp`` (int, float, bool, str or Literal)."""
    if not node.quoted and node.text == "":
        raise BadValue(
            f"nothing is written after the colon; write {fields.describe(tp)}, or remove the key"
        )
    if get_origin(tp) is Literal:
        return _choice(node, tp)
    if tp is str:
        return _text(node)
    if node.quoted:
        raise BadValue(
            f"{shown(node.text)} is text because of its quotes, {fields.describe(tp)} is needed; "
            "remove the quotes"
        )
    if is_null(node):
        raise BadValue(
            f"null is not allowed, {fields.describe(tp)} is needed; "
            "remove the key to get the default"
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
    truth = {"yes": "true", "on": "true", "y": "true", "1": "true", "true": "true"}
    truth |= {"no": "false", "off": "false", "n": "false", "0": "false", "false": "false"}
    meant = truth.get(text.lower())
    remedy = f"write {meant}" if meant else "write true or false"
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
