"""Lets the tests of this room share their helpers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_patch.report import charts

sys.path.append(str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are laid out and not drawn: that is most of the time of a page."""
    monkeypatch.setattr(charts, "_uri", lambda figure: "data:image/png;base64,")
