"""A configuration with a key of every type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True, frozen=True, slots=True)
class Inner:
    """A section."""

    depth: int = 1
    """Depth."""
    rate: float = 0.5
    """A float."""
    text: str | None = None
    """A text."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Root:
    """One key of every type."""

    count: int = 0
    """An int."""
    rate: float = 0.0
    """A float."""
    flag: bool = False
    """A bool."""
    text: str = ""
    """A text."""
    maybe: str | None = None
    """An optional text."""
    limit: int | None = 5
    """An optional int."""
    mode: Literal["auto", "on", "off", "none"] = "auto"
    """A choice."""
    freq: int | list[int] = 1
    """An int or a list."""
    many: list[float] = field(default_factory=list)
    """A list."""
    words: list[str] = field(default_factory=list)
    """A list of texts."""
    inner: Inner = field(default_factory=Inner)
    """A section."""
    extra: Inner | None = None
    """An optional section."""
    parts: list[Inner] = field(default_factory=list)
    """A list of sections."""
