"""Tiles that the forward kernel cannot run are refused; every shipped row is a legal tile."""

from __future__ import annotations

import pytest

from stable_attention import configs
from stable_attention.configs import Tile


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"ones": 4}, "not one of"),
        ({"ones": 0}, "set segment=64"),
        ({"ones": 0, "segment": 0}, "set segment=64"),
        ({"ahead": 1}, "set segment=64"),
        ({"segment": 96}, "take 0, bn or a multiple"),
    ],
)
def test_refused(fields: dict[str, int], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        Tile(64, 64, 4, 3, **fields)


def test_sums_over_lanes_need_late_products() -> None:
    assert Tile(64, 64, 4, 3, segment=64, ones=0, ahead=1).ones == 0


@pytest.mark.parametrize("arch", ["interpreter", "sm80", "sm90", "sm100"])
def test_shipped_rows_are_legal(arch: str) -> None:
    for row in configs.table()[arch].values():
        Tile(*row)
