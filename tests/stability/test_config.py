"""The ``stability:`` section refuses what cannot work, naming the remedy."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from run_config import run_config

from megatron_patch.config import checks
from megatron_patch.config.checks.stability import capture_mib
from megatron_patch.config.loader import load
from megatron_patch.schema.problem import ConfigError
from megatron_patch.schema.stability import RuleConfig, StabilityConfig
from megatron_patch.stability.adapters.megatron_bridge import AttentionCallback
from megatron_patch.stability.adapters.megatron_training import watched


def complaints(stability: dict[str, Any], **sections: dict[str, Any]) -> list[str]:
    """``path: message`` of every problem of the section in a tiny run."""
    run = replace(run_config(**sections), stability=StabilityConfig(**stability))
    return [f"{p.path}: {p.message}" for p in checks.problems(run, ["stability"])]


FLASH = {"backend": "stable_flash"}


def rule(**values: Any) -> dict[str, Any]:
    return {"rule": RuleConfig(**values)}


def test_the_defaults_are_fine():
    assert complaints({}) == []


@pytest.mark.parametrize(
    ("stability", "attention", "says"),
    [
        ({"interval": 0}, FLASH, "stability.interval: 0: must be at least 1"),
        ({"rows": 0}, FLASH, "stability.rows"),
        (rule(head_logit=-1.0), FLASH, "stability.rule.head_logit: -1.0: must be at least 0"),
        (rule(danger_error=0.0), FLASH, "stability.rule.danger_error: 0.0: must be more than 0"),
        (rule(watch_logit=-5.0), FLASH, "rule.watch_logit: -5.0: must be more than 0, or null"),
        (rule(danger_head_growth=1.0), FLASH, "need 1 < watch_head_growth <= danger_head_growth"),
        (rule(head_steps=0), FLASH, "stability.rule.head_steps: 0: must be at least 1"),
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
    ],
)
def test_what_is_refused(stability, attention, says):
    # precision fp32 is what stable_flash cannot take over from sdpa in this run
    found = complaints(stability, attention=attention)
    assert any(says in text for text in found), found


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (StabilityConfig(guard="swich"), "stability.guard: 'swich': must be one of off, warn, "),
        (StabilityConfig(guard=None), "stability.guard: None: must be one of off, warn, "),
        (StabilityConfig(capture_at="danger"), "stability.capture_at: 'd': must be one of watch, "),
        ({"guard": "stop"}, "options is a dict; allowed: MonitorOptions"),
    ],
)
@pytest.mark.parametrize("where", [AttentionCallback, lambda **given: watched(**given).__enter__()])
def test_what_programs_give_is_refused_before_they_train(where, options, says):
    """A guard of a name that is none did nothing, and said so to nobody."""
    with pytest.raises(ValueError, match=re.escape(says)):
        where(directory="x", options=options)
    with pytest.raises(TypeError, match=r"direcory|directory"):
        where(direcory="x")


def test_switch_where_there_is_something_to_switch_to():
    for attention in ({"stabilizer": "none"}, {"stabilizer": "dynamic_max"}):
        assert complaints({"guard": "switch"}, attention=FLASH | attention) == []
    vendor = {"attention": {"backend": "sdpa_cudnn"}, "training": {"precision": "bf16"}}
    cuda = {"attention": vendor["attention"], "training": vendor["training"] | {"device": "cuda"}}
    assert complaints({"guard": "switch"}, **cuda) == []


def test_large_captures_are_refused():
    long = {"seq_length": 1_048_576, "max_position_embeddings": 1_048_576}
    capture = {"capture_steps": [3], "capture_layers": [0]}
    assert any("more than 1,024: name fewer heads" in text for text in complaints(
        capture, model=long))  # fmt: skip
    one_head = capture | {"capture_heads": [1]}
    assert complaints(one_head, model=long) == []
    run = replace(run_config(model=long), stability=StabilityConfig(**one_head))
    assert capture_mib(run, heads=1) == 5 * 1_048_576 * 16 * 4 / 2**20


def test_keys_of_the_release_before_are_named_with_what_replaces_them(tmp_path):
    """Every one of the 27 that is none any more."""
    old = {**dict.fromkeys(StabilityConfig.REMOVED, 1), "interval": 4}
    file = tmp_path / "run.yaml"
    file.write_text("name: x\nstability: {" + ", ".join(f"{k}: {v}" for k, v in old.items()) + "}")
    with pytest.raises(ConfigError) as caught:
        load(file)
    text = str(caught.value)
    assert "stability.danger_error" in text and "it is stability.rule.danger_error now" in text
    assert text.count("is no key any more") == len(StabilityConfig.REMOVED) == 18
    known = {item.name for item in fields(StabilityConfig)} | {f.name for f in fields(RuleConfig)}
    moved = {k for k, v in StabilityConfig.REMOVED.items() if v == f"it is stability.rule.{k} now"}
    assert moved <= known and not (set(StabilityConfig.REMOVED) - moved) & known
