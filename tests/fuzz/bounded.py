"""Sizes of a fuzzer: what runs by default, and the long version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies

randoms = strategies.randoms(use_true_random=False)
"""Generators whose draws hypothesis makes, and makes smaller where an example fails."""


def examples(short: int, long: int) -> pytest.MarkDecorator:
    """Parametrise a test by ``count``; the long count is marked slow."""
    return pytest.mark.parametrize("count", [short, pytest.param(long, marks=pytest.mark.slow)])


def fuzz(check: Callable[..., None], count: int, **drawn: Any) -> None:
    """Call ``check`` with ``count`` examples of the strategies ``drawn``."""
    silent = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    bounds = settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=silent,
    )  # fmt: skip
    bounds(given(**drawn)(check))()
