from __future__ import annotations

import pytest
from megatron_cpu import single_rank


@pytest.fixture(scope="module")
def rank():
    with single_rank():
        yield
