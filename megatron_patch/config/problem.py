"""One finding about a configuration, addressed to the person who wrote it."""

from __future__ import annotations

from dataclasses import dataclass


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
