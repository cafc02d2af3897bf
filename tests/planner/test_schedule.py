"""The order of passes, its number in flight, and the bubble."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_patch.planner import schedule

SHAPES = st.tuples(
    st.integers(1, 8), st.integers(1, 4), st.integers(1, 6)
)  # stages, virtual, groups


@given(SHAPES, st.integers(0, 7))
def test_every_chunk_goes_forward_and_back_for_every_micro_batch(shape, stage):
    stages, virtual, groups = shape
    stage %= stages
    count = groups * stages
    waiting = [0] * virtual
    done = [0] * virtual
    for what, chunk in schedule.passes(stage, stages, virtual=virtual, micro_batches=count):
        if what == schedule.FORWARD:
            waiting[chunk] += 1
        else:
            waiting[chunk] -= 1
            done[chunk] += 1
        assert min(waiting) >= 0, "a backward pass before its forward pass"
    assert done == [count] * virtual
    assert waiting == [0] * virtual


@pytest.mark.parametrize("stage", range(4))
def test_1f1b_holds_as_many_micro_batches_as_stages_follow(stage):
    """Narayanan et al. 2021, sec. 2.2: at most pp - p in flight, the last stage one."""
    assert schedule.in_flight(stage, 4, virtual=1, micro_batches=16) == 4 - stage
    assert schedule.in_flight(stage, 4, virtual=1, micro_batches=2) == min(4 - stage, 2)


def test_interleaving_matches_megatron_core():
    """Warm-up passes from core's own function, and the order of chunks from its own table."""
    from megatron.core.pipeline_parallel import schedules

    table = schedules.get_schedule_table(8, 3, 4)
    order = [chunk for _, chunk in table]
    for stage in range(4):
        found = list(schedule.passes(stage, 4, virtual=3, micro_batches=8))
        assert [c for what, c in found if what == schedule.FORWARD] == order
        assert [c for what, c in found if what == schedule.BACKWARD] == [2 - c for c in order]
        first = [what for what, _ in found].index(schedule.BACKWARD)
        assert first == 2 * (4 - stage - 1) + 2 * 4 + 1


def test_bubble_is_the_papers():
    assert schedule.bubble(8, virtual=1, micro_batches=32) == 7 / 32
    assert schedule.bubble(8, virtual=4, micro_batches=32) == 7 / 128
    assert schedule.bubble(1, virtual=1, micro_batches=32) == 0
