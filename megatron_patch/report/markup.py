"""HTML that cannot be injected into: plain strings are always escaped, only `tag` makes markup.

Everything of a run (its name, its configuration, its log) is written by somebody; nothing of it
reaches the page except through `text`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
_VOID = frozenset({"meta", "br", "hr", "line", "rect", "path", "circle"})
# Control characters that no HTML document may hold, even escaped.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")


class Markup(str):
    """Text that is HTML already; made by this module only."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def text(value: object) -> Markup:
    """A value as escaped text; characters that HTML forbids become visible escapes."""
    if isinstance(value, Markup):
        return value
    shown = _CONTROL.sub(lambda m: f"\\x{ord(m.group()):02x}", str(value))
    return Markup(html.escape(shown, quote=True))


def join(children: Child) -> Markup:
    """Children one after the other; None is nothing."""
    if children is None:
        return Markup("")
    if isinstance(children, (str, int, float)):
        return text(children)
    return Markup("".join(join(child) for child in children))


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element. ``class_`` is class, ``aria_label`` is aria-label; None leaves one out."""
    assert _NAME.fullmatch(name), name
    written = []
    for key, value in attributes.items():
        if value is None:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        assert _NAME.fullmatch(attribute), attribute
        # SVG's viewBox is the one name with a capital that is needed here.
        attribute = "viewBox" if attribute == "viewbox" else attribute
        written.append(f' {attribute}="{text(value)}"')
    head = f"<{name}{''.join(written)}>"
    if name in _VOID:
        assert not children or name not in ("meta", "br", "hr"), name
        # Shapes may hold a <title>.
        return Markup(f"{head}{join(children)}</{name}>") if children else _void(name, written)
    return Markup(f"{head}{join(children)}</{name}>")


def _void(name: str, written: list[str]) -> Markup:
    closing = "" if name in ("meta", "br", "hr") else "/"
    return Markup(f"<{name}{''.join(written)}{closing}>")


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], *, caption: str) -> Markup:
    """A table with a caption; the first cell of a row names it."""
    body = []
    for row in rows:
        first, *others = list(row)
        body.append(tag("tr", tag("th", first, scope="row"), [tag("td", c) for c in others]))
    columns = tag("tr", [tag("th", cell, scope="col") for cell in head])
    inner = (tag("caption", caption), tag("thead", columns), tag("tbody", body))
    return tag("div", tag("table", *inner), class_="scroll")
