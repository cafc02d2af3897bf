"""One finding about a configuration, addressed to the person who wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

SHOWN = 100


def printable(text: str, *, keep: str = "") -> str:
    """``text`` with escapes for what a terminal would not show as it is (``keep`` excepted)."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a value comes from: a position in a file, a ``--set``, or the default."""

    source: str
    """File as the person named it, the whole ``--set a.b=c``, or ``default``."""
    line: int = 0
    """1-based line; 0 for values that come from no file."""
    column: int = 0
    """1-based column; 0 for values that come from no file."""

    def __str__(self) -> str:
        return f"{self.short}:{self.column}" if self.line and self.column else self.short

    @property
    def short(self) -> str:
        """``file:line``, without the column."""
        source = printable(self.source)
        return f"{source}:{self.line}" if self.line else source


DEFAULT = Place("default")


@dataclass(frozen=True, slots=True)
class Problem:
    """A value that cannot be used.

    Sections yield these from ``problems(run)``; the loader adds file and line from the value's
    origin and reports every problem of a configuration at once.
    """

    path: str
    """Dotted path of the offending key, e.g. ``parallel.tensor_model_parallel_size``."""
    message: str
    """The value, what is allowed, and the remedy, in one or two sentences."""
    where: Place | None = None
    """Filled in by the loader."""
    may_pass: bool = False
    """Not the value is wrong but what it names did not answer: the next attempt may find it."""

    def __str__(self) -> str:
        where = str(self.where) if self.where else ""
        parts = [where, printable(self.path), printable(self.message, keep="\n")]
        return ": ".join(part for part in parts if part)


def at_least(prefix: str, section: object, least: Mapping[str, float]) -> Iterator[Problem]:
    """A problem for every key of ``section`` that is set and below its least value."""
    for name, minimum in least.items():
        value = getattr(section, name)
        if value is not None and value < minimum:
            yield Problem(f"{prefix}.{name}", f"{value}: must be at least {minimum}")


def more_than_0(prefix: str, section: object, *names: str) -> Iterator[Problem]:
    """A problem for every such key that is set and not above 0."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value > 0:
            yield Problem(f"{prefix}.{name}", f"{value}: must be more than 0")


class ConfigError(ValueError):
    """A configuration that cannot be used; the text lists every problem with file and line.

    ``exit_code`` is 2, which is never tried again; 1 where all of it may pass.
    """

    def __init__(self, problems: Iterable[Problem], *, note: str = "") -> None:
        """Keep ``problems`` sorted by file and line; ``note`` is a last line of the text."""
        self.problems: tuple[Problem, ...] = tuple(sorted(problems, key=_position))
        self.note = note
        count = len(self.problems)
        self.exit_code = 1 if count and all(p.may_pass for p in self.problems) else 2
        lines = [f"{count} problem{'s' if count != 1 else ''} in the configuration:"]
        lines += [f"  {problem}" for problem in self.problems[:SHOWN]]
        if count > SHOWN:
            lines.append(f"  ... and {count - SHOWN} more")
        if note:
            lines.append(note)
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.problems, note=self.note), ()


def _position(problem: Problem) -> tuple[bool, Place, str, str]:
    """Files first, in order of name, line and column; then overrides and defaults."""
    where = problem.where or DEFAULT
    return (not where.line, where, problem.path, problem.message)
