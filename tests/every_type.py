"""A configuration with one key of every type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True, frozen=True, slots=True)
class Part:
    """A section."""

    depth: int = 1
    """An int."""
    rate: float = 0.5
    """A float."""
    text: str | None = None
    """An optional text."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Everything:
    """The root."""

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
    """A list of numbers."""
    words: list[str] = field(default_factory=list)
    """A list of texts."""
    inner: Part = field(default_factory=Part)
    """A section."""
    extra: Part | None = None
    """An optional section."""
    parts: list[Part] = field(default_factory=list)
    """A list of sections."""
