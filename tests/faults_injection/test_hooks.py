"""Every place where the fault lab plants a fault is there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from fault_lab import hooks


@pytest.mark.parametrize("place", hooks.PLACES)
def test_a_place_is_there(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def look(owner: Any, name: str, **unused: Any) -> None:
        found.append(getattr(owner, name))

    monkeypatch.setattr(hooks, "wrap", look)
    hooks.PLACES[place](lambda: None)
    assert found and all(map(callable, found))
