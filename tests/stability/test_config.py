"""The ``stability:`` section refuses what cannot work, naming the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from run_config import run_config

from megatron_patch.config import checks
from megatron_patch.config.checks.stability import capture_mib
from megatron_patch.schema.stability import StabilityConfig


def complaints(stability: dict[str, Any], **sections: dict[str, Any]) -> list[str]:
    """``path: message`` of every problem of the section in a tiny run."""
    run = replace(run_config(**sections), stability=StabilityConfig(**stability))
    return [f"{p.path}: {p.message}" for p in checks.problems(run, ["stability"])]


FLASH = {"backend": "stable_flash"}


def test_the_defaults_are_fine() -> None:
    assert complaints({}) == []


@pytest.mark.parametrize(
    ("stability", "attention", "says"),
    [
        ({"interval": 0}, FLASH, "stability.interval: 0: must be at least 1"),
        ({"rows": 0}, FLASH, "stability.rows"),
        ({"head_logit": -1.0}, FLASH, "stability.head_logit: -1.0: must be at least 0"),
        ({"danger_error": 0.0}, FLASH, "stability.danger_error: 0.0: must be more than 0, or null"),
        ({"watch_logit": -5.0}, FLASH, "stability.watch_logit: -5.0: must be more than 0, or null"),
        ({"danger_growth": 1.0}, FLASH, "need 1 < watch_growth <= danger_growth"),
        ({"watch_growth": 2.0}, FLASH, "need 1 < watch_growth"),
        ({"guard": "stop", "enabled": False}, FLASH, "set stability.enabled: true"),
        ({"guard": "switch"}, FLASH, "is compensated already"),
        ({"guard": "switch"}, {"backend": "reference"}, "nothing to switch to"),
        ({"guard": "switch"}, {"backend": "te"}, "use guard: warn or stop"),
        ({"guard": "switch"}, {"backend": "sdpa_cudnn"}, "stable_flash cannot take over"),
        ({"capture_steps": [3]}, FLASH, "name both, or neither"),
        ({"capture_steps": [21], "capture_layers": [0]}, FLASH, "capture_steps: 21: must be in 1"),
        ({"capture_steps": [3], "capture_layers": [2]}, FLASH, "capture_layers: 2: must be in 0"),
        (
            {"capture_steps": [3], "capture_layers": [0], "capture_heads": [4]},
            FLASH,
            "capture_heads: 4: must be in 0..3",
        ),
        (
            {"capture_steps": [3], "capture_layers": [0], "capture_micro_batch": 9},
            FLASH,
            "capture_micro_batch: 9",
        ),
    ],
)
def test_what_is_refused(stability: dict[str, Any], attention: dict[str, Any], says: str) -> None:
    # precision fp32 is what stable_flash cannot take over from sdpa in this run
    found = complaints(stability, attention=attention)
    assert any(says in text for text in found), found


def test_switch_where_there_is_something_to_switch_to() -> None:
    for attention in ({"stabilizer": "none"}, {"stabilizer": "dynamic_max"}):
        assert complaints({"guard": "switch"}, attention=FLASH | attention) == []
    vendor = {"attention": {"backend": "sdpa_cudnn"}, "training": {"precision": "bf16"}}
    cuda = {"attention": vendor["attention"], "training": vendor["training"] | {"device": "cuda"}}
    assert complaints({"guard": "switch"}, **cuda) == []


def test_large_captures_are_refused() -> None:
    long = {"seq_length": 131_072, "max_position_embeddings": 131_072}
    capture = {"capture_steps": [3], "capture_layers": [0]}
    assert any("more than capture_max_mib" in text for text in complaints(
        capture | {"capture_max_mib": 10}, model=long))  # fmt: skip
    one_head = capture | {"capture_max_mib": 200, "capture_heads": [1]}
    assert complaints(one_head, model=long) == []
    worst = {"capture_at": ["danger"], "capture_max_mib": 100}
    assert complaints(worst | {"capture_worst_heads": 1}, model=long) == []
    assert complaints(worst | {"capture_worst_heads": 0}, model=long) != []
    run = replace(run_config(model=long), stability=StabilityConfig(**one_head))
    assert capture_mib(run, heads=1) == 5 * 131_072 * 16 * 4 / 2**20
