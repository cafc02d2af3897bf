"""A result or an error of the first rank reaches the others as it is, pickled on its way."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from megatron_patch.faults import skips
from megatron_patch.parallel.first_rank import on_first_rank
from megatron_patch.schema.problem import ConfigError


def on_two_ranks(work: Callable[[], Any], *errors: type[Exception]) -> list[Any]:
    """What each rank gets or is raised there."""
    sent: list[bytes] = []

    def to_all(value: Any) -> Any:
        sent[:] = sent or [pickle.dumps(value)]
        return pickle.loads(sent[0])

    found: list[Any] = []
    for rank in (0, 1):
        try:
            found.append(on_first_rank(work, *errors, rank=rank, to_all=to_all))
        except errors as error:
            found.append(error)
    return found


def test_the_first_rank_alone_does_the_work():
    calls = iter([{"step": 3}])
    assert on_two_ranks(lambda: next(calls)) == [{"step": 3}] * 2


def test_a_damaged_list_of_batches_is_the_same_problem_on_every_rank(tmp_path):
    (tmp_path / skips.FILE).write_text('{"windows": 3}')
    found = on_two_ranks(lambda: skips.read(tmp_path), ValueError)
    assert [type(error) for error in found] == [ConfigError] * 2
    assert str(found[0]) == str(found[1]) and "expected windows and rewinds" in str(found[0])
