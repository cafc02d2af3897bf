"""Megatron's warnings are not part of these tests."""

import logging
import warnings

import pytest


@pytest.fixture(autouse=True)
def _quiet():
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(level)
