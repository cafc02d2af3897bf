"""Capture files: what is saved is read back, and nothing else is taken for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patch.stability import capture
from megatron_patch.stability.capture import Capture


def make(**changes: Any) -> Capture:
    gen = torch.Generator().manual_seed(0)

    def draw(heads: int, d: int) -> torch.Tensor:
        return torch.randn(16, 1, heads, d, generator=gen).bfloat16()

    fields = {
        "step": 100,
        "layer": 2,
        "layer_name": "decoder.layers.2.self_attention.core_attention",
        "micro_batch": 0,
        "dp_rank": 0,
        "heads": [1, 5],
        "kv_heads": [0, 1],
        "head_to_kv": [0, 1],
        "q": draw(2, 8),
        "k": draw(2, 8),
        "v": draw(2, 4),
        "out": draw(2, 4),
        "dout": draw(2, 4),
        "sinks": None,
        "wq_norm": torch.ones(2),
        "wk_norm": None,
        "scale": 0.125,
        "causal": True,
        "window": [7, 0],
        "dropout_p": 0.0,
        "backend": "stable_flash",
        "stabilizer": "none",
        "precision": "bf16",
        "run_name": "tiny",
        "trigger": "step",
    }
    return Capture(**(fields | changes))


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "captures" / capture.file_name(100, 2, 0)
    one = make()
    one.save(path)
    assert path.name == "step_00000100.layer_002.tp_0.pt"
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file is left
    found = capture.load(path)
    for name in Capture.__dataclass_fields__:
        a, b = getattr(one, name), getattr(found, name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert torch.load(path, weights_only=True)["format"] == capture.FORMAT


def test_what_is_no_capture(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        capture.load(tmp_path / "missing.pt")
    text = tmp_path / "text.pt"
    text.write_text("hello")
    with pytest.raises(ValueError, match="not a capture"):
        capture.load(text)
    other = tmp_path / "other.pt"
    torch.save({"format": 1}, other)
    with pytest.raises(ValueError, match=f"format {capture.FORMAT}"):
        capture.load(other)
    torch.save({"format": capture.FORMAT, "step": 3}, other)
    with pytest.raises(ValueError, match="backend"):
        capture.load(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": [1]},
        {"head_to_kv": [0, 2]},
        {"dout": torch.zeros(16, 1, 2, 8)},
        {"k": torch.zeros(15, 1, 2, 8)},
    ],
)
def test_contradicting_shapes(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "x.pt"
    replace(make(), **changes).save(path)
    with pytest.raises(ValueError, match="do not fit together"):
        capture.load(path)
