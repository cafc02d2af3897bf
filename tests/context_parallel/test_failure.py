"""A rank that dies or hangs: the others fail in time and name it."""

import pytest
from cp_cases import Case
from ranks import Ranks

from megatron_patch.context_parallel import failure

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(("mode", "how"), [
    ("p2p", "killed"),
    ("all_gather", "stopped"),
    pytest.param("all_gather", "killed", marks=pytest.mark.slow),
    pytest.param("p2p", "stopped", marks=pytest.mark.slow),
    pytest.param("a2a", "killed", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_survivors_name_the_lost_rank(mode, how):
    timeout, victim = 15.0, 2  # also what a busy machine may take for the call that connects
    with Ranks(3, timeout=timeout) as ranks:
        case = Case(size=3, mode=mode, s=36, h=6)
        try:
            answers = ranks.play("die", case, victim, how, lost=victim)
        finally:
            ranks.processes[victim].kill()
    for rank in (0, 1):
        text, seconds = answers[rank]
        assert "lost rank 2 (context-parallel rank 2)" in text, text
        assert f"rank {rank}" in text and "waiting for" in text
        assert seconds < timeout + failure.GRACE_SECONDS + 20


def test_a_call_that_fails_leaves_no_answer_to_the_next_one():
    """The other ranks' errors were read as answers to the next call, and so on to the end."""
    with Ranks(2) as ranks:
        with pytest.raises(AssertionError, match="rank 0 of "):
            ranks.play("nothing that a rank can play")
        assert ranks.play("many", []) == [[], []]
