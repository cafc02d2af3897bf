"""Helpers of these tests are modules beside them; Megatron's chatter is not part of a test."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True)
def _quiet():
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(level)
