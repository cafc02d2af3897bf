"""Files made to run code or to exhaust memory: nothing runs, the older checkpoint is taken.

The manifests are resealed, as anyone can without a key, so every file gets past the hashes. Two
witnesses: a sentinel file the payload would leave, and an audit hook on ``pickle.find_class`` and
on starting programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile import ATTACKS
from rank_pool import save

pytestmark = pytest.mark.multiprocess

# Refused by another rule than "this checkpoint is bad": the text of the refusal.
BEFORE_READING = {"link": "is not a plain file", "named_pipe": "is not a plain file"}


@pytest.fixture(scope="module")
def good(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2."""
    root = tmp_path_factory.mktemp("good")
    for step in (1, 2):
        save(ranks, root, step)
    return root


@pytest.fixture(scope="module")
def outcomes(ranks: Any, good: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hostile")
    (found,) = ranks.play("hostile_loads", folder=str(folder), good=str(good), names=list(ATTACKS))
    return found


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_runs(outcomes, name):
    found = outcomes[name]
    assert not found["ran"] and found["resolved"] == []
    assert found["outcome"] == "step 1", found
    (why,) = [line for line in found["lines"] if "refused" in line and "step_00000002" in line]
    assert BEFORE_READING.get(name, "refused: ") in why
    assert any("moved step_00000002.attempt-1 to" in line for line in found["lines"])


@pytest.mark.parametrize(
    "name, named",
    [
        ("index_pickle", "it names posix.system"),
        ("index_eval_inside", "it names builtins.eval"),
        ("index_getattr", "it names builtins.getattr"),
        ("common_state", "it names posix.system"),
        ("random_state", "it names __builtin__.eval"),
        ("tensor", "it names posix.system"),
        ("index_sets_class", "changes the classes ChunkStorageMetadata"),
        ("zip_bomb", "it has a compressed record"),
        ("storage_larger_than_record", "has another size"),
    ],
)
def test_the_reason_names_what_it_was(outcomes, name, named):
    assert any(named in line for line in outcomes[name]["lines"]), outcomes[name]["lines"]


def test_the_payloads_are_live(ranks, good, tmp_path):
    """Core 0.19.2 by itself runs the index and the common state: the tests above can fail."""
    names = ["index_pickle", "common_state"]
    (ran,) = ranks.play("core_runs_it", folder=str(tmp_path), good=str(good), names=names)
    assert ran == dict.fromkeys(names, True)
