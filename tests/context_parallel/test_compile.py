"""Attention inside ``torch.compile``: a graph on either side, and nothing of it traced."""

from __future__ import annotations

import pytest
from cp_cases import Case
from ranks import Ranks


@pytest.mark.multiprocess
def test_a_compiled_function_breaks_its_graph_around_the_attention():
    with Ranks(1) as ranks:
        ((same, breaks),) = ranks.play("compiled", Case(size=1, mode="p2p"))
    assert same
    assert len(breaks) == 1 and "torch.compiler.disable" in breaks[0], breaks
