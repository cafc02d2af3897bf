"""Capture files: what is saved is read back, and nothing else is taken for one."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_disk import KINDS, disk

from megatron_patch.schema.stability import StabilityConfig
from megatron_patch.stability import capture
from megatron_patch.stability.capture import CaptureFile, Capturer, Wanted
from megatron_patch.stability.observe import Seen
from megatron_patch.stability.sampling import Geometry


def make(**changes: Any) -> CaptureFile:
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
        "norms_exact": True,
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
    return CaptureFile(**(fields | changes))


def test_round_trip(tmp_path):
    path = tmp_path / "captures" / capture.file_name(100, 2, 0)
    one = make()
    one.save(path)
    assert path.name == "step_00000100.layer_002.tp_0.pt"
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file is left
    found = CaptureFile.load(path)
    for name in CaptureFile.__dataclass_fields__:
        a, b = getattr(one, name), getattr(found, name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert torch.load(path, weights_only=True)["format"] == capture.FORMAT


def test_what_is_no_capture(tmp_path):
    with pytest.raises(FileNotFoundError):
        CaptureFile.load(tmp_path / "missing.pt")
    text = tmp_path / "text.pt"
    for content, why in (("hello", "begins as none does"), ("", "is empty")):
        text.write_text(content)
        with pytest.raises(ValueError, match=f"not a capture: the file {why}"):
            CaptureFile.load(text)
    other = tmp_path / "other.pt"
    torch.save({"format": 1}, other)
    with pytest.raises(ValueError, match=f"format {capture.FORMAT}"):
        CaptureFile.load(other)
    torch.save({"format": capture.FORMAT, "step": 3}, other)
    with pytest.raises(ValueError, match="backend"):
        CaptureFile.load(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": [1]},
        {"head_to_kv": [0, 2]},
        {"dout": torch.zeros(16, 1, 2, 8)},
        {"k": torch.zeros(15, 1, 2, 8)},
        {"k": torch.zeros(16, 1, 2, 4)},
        {"v": torch.zeros(16, 1, 1, 4)},
        {"wq_norm": torch.ones(3)},
        {"sinks": torch.ones(3)},
    ],
)
def test_contradicting_shapes(tmp_path, changes):
    path = tmp_path / "x.pt"
    replace(make(), **changes).save(path)
    with pytest.raises(ValueError, match="do not fit together"):
        CaptureFile.load(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": None}, "q is None, expected a tensor of 4 dimensions"),
        ({"q": torch.zeros(16, 2, 8)}, r"q is a tensor \[16, 2, 8\] of torch.float32, expected"),
        ({"k": torch.zeros(16, 1, 2, 8, dtype=torch.int64)}, "expected a tensor of 4 .*floating"),
        ({"k": torch.zeros(16, 1, 2, 8, device="meta")}, "k is a tensor"),
        ({"v": torch.zeros(16, 1, 2, 4).to_sparse()}, "v is a tensor"),
        ({"q": torch.zeros(0, 1, 2, 8)}, "not empty"),
        ({"wq_norm": 3.0}, r"wq_norm is 3.0, expected a floating tensor \[heads\] or None"),
        ({"heads": ["1", "5"]}, "heads is .*, expected a list of whole numbers from 0"),
        ({"head_to_kv": [0, -1]}, "head_to_kv is"),
        ({"kv_heads": 2}, "kv_heads is 2"),
        ({"window": []}, r"window is \[\], expected None or two whole numbers"),
        ({"window": [7, 0.5]}, "window is"),
        ({"window": [10**30, 0]}, r"window is \[10*, 0\], expected .* of 32 bits"),
        ({"scale": 10**400}, "scale is 10*.*, expected a finite number above 0"),
        ({"q": torch.zeros(16, 1, 2, 8).to(torch.float8_e4m3fn)}, "q is .*, of 16 bits or more"),
        ({"step": "100"}, "step is '100', expected a whole number"),
        ({"layer": True}, "layer is True"),
        ({"causal": 1}, "causal is 1, expected True or False"),
        ({"scale": float("nan")}, "scale is nan, expected a finite number above 0"),
        ({"dropout_p": None}, "dropout_p is None"),
        ({"run_name": b"x" * 500}, r"run_name is b'x{50,60}\.\.\., expected text"),
        ({"variant": 3}, "variant is 3, expected text or None"),
        ({"layout": "bshd"}, "layout is 'bshd', expected 'sbhd'"),
    ],
)
def test_fields_of_other_types(tmp_path, changes, said):
    path = tmp_path / "x.pt"
    replace(make(), **changes).save(path)
    with pytest.raises(capture.CaptureError, match=rf"x\.pt: .*{said}.*capture again"):
        CaptureFile.load(path)


def test_captures_of_formats_before_say_what_they_do_not_tell(tmp_path):
    """Norms of format 2 are lower bounds; no file before format 4 tells of a variant."""
    path = tmp_path / "x.pt"
    make(variant="k_centered").save(path)
    whole = CaptureFile.load(path)
    assert whole.norms_exact and whole.variant == "k_centered"
    content = torch.load(path, weights_only=True)
    del content["variant"]
    torch.save(content | {"format": 3}, path)
    third = CaptureFile.load(path)
    assert third.norms_exact and third.variant is None
    torch.save(content, path)
    with pytest.raises(capture.CaptureError, match="format 4: it lacks variant"):
        CaptureFile.load(path)
    del content["norms_exact"]
    torch.save(content | {"format": 2}, path)
    second = CaptureFile.load(path)
    assert not second.norms_exact and second.variant is None
    torch.save(content | {"format": 3}, path)
    with pytest.raises(capture.CaptureError, match="format 3: it lacks norms_exact"):
        CaptureFile.load(path)


def test_a_capture_names_the_variant_that_computed_it(tmp_path):
    assert taken(tmp_path, SimpleNamespace(), 4, 2).variant == ""
    assert taken(tmp_path, SimpleNamespace(), 4, 2, variant="k_centered").variant == "k_centered"


def test_spectral_norms_are_exact(tmp_path):
    """A random matrix is where few power iterations stay furthest below."""
    heads, groups, d, c = 4, 2, 64, 768
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(groups, heads // groups + 2, d, c, generator=gen)
    attention = SimpleNamespace(
        linear_qkv=SimpleNamespace(weight=weight.flatten(0, 2)),
        num_attention_heads_per_partition=heads,
        num_query_groups_per_partition=groups,
        hidden_size_per_attention_head=d,
    )
    true = torch.linalg.matrix_norm(weight.double(), ord=2).float()
    found = taken(tmp_path, attention, heads, groups)
    assert found.norms_exact and found.wq_norm is not None and found.wk_norm is not None
    torch.testing.assert_close(found.wq_norm, true[:, :2].flatten(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.wk_norm, true[:, 2].repeat_interleave(2), rtol=1e-6, atol=0)
    # A run that broke is captured all the same.
    weight[0, 1, 0, 0] = torch.inf
    found = taken(tmp_path, attention, heads, groups)
    assert (
        found.wq_norm is not None and found.wq_norm.isnan().tolist() == [False, True] + [False] * 2
    )


def taken(
    folder: Path, attention: Any, heads: int, groups: int, *, variant: str = ""
) -> CaptureFile:
    """What a run captures of a layer."""
    capturer = take(folder, attention, heads, groups, variant=variant)
    capturer.close()
    return CaptureFile.load(folder / capture.file_name(3, 0, 0))


def take(
    folder: Path, attention: Any, heads: int, groups: int, *steps: int, variant: str = ""
) -> Capturer:
    """Let a run capture a layer at these steps; default: 3."""
    where: Any = SimpleNamespace(tp_rank=0, dp_rank=0)
    site: Any = SimpleNamespace(
        layer=0, name="x", backend="reference", stabilizer="", variant=variant, attention=attention
    )
    q, k = torch.randn(16, 1, heads, 8), torch.randn(16, 1, groups, 8)
    seen = Seen(
        site=site, q=q, k=k, v=k, out=q, low=None, max_logits=None, sinks=None,
        geometry=Geometry(scale=1.0, causal=True), dropout_p=0.0,
    )  # fmt: skip
    capturer = Capturer(StabilityConfig(), where, folder, name="tiny", per_kv_head=heads // groups)
    for step in steps or (3,):
        capturer._take(step, Wanted(trigger="step", heads={0: ()}), seen, q)
    return capturer


@pytest.mark.parametrize("kind", [*KINDS, "in the way"])
def test_a_capture_that_cannot_be_written_is_told_and_left_out(kind, tmp_path, caplog):
    """In the backward pass of one rank; torch has an error of its own for an archive cut off."""
    with disk(tmp_path / "disk", kind if kind in KINDS else "limit") as small:
        folder, attention = small.folder / "captures", SimpleNamespace()
        if kind == "in the way":
            folder.write_text("")
            capturer = take(folder, attention, 4, 2, 3, 4)
        else:
            with small.full():
                capturer = take(folder, attention, 4, 2, 3, 4)
            assert os.listdir(folder) == []
            assert taken(folder, attention, 4, 2).heads == [0, 1, 2, 3]
        assert capturer.saved == []
        capturer.close()
    (first, last) = [r for r in caplog.records if r.name.startswith("megatron_patch")]
    assert first.levelno == logging.ERROR and "captures: cannot be written (" in first.message
    assert last.message == "captures: not written to the end; records that are missing: 2"


def test_odd_keys_and_formats_are_no_capture(tmp_path):
    path = tmp_path / "x.pt"
    for content in ({"format": torch.ones(2)}, {"format": True}, {"format": capture.FORMAT, 3: 4}):
        torch.save(content, path)
        with pytest.raises(capture.CaptureError, match=r"x\.pt is not a capture of format") as said:
            CaptureFile.load(path)
    assert "it lacks backend, causal, " in str(said.value) and str(said.value).endswith("and has 3")


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "expected"),
    [
        (8, 2, 4, [[0], [0], [1], [1]]),  # key/value heads are repeated
        (8, 4, 2, [[0, 1], [2, 3]]),
        (4, None, 2, [[0, 1], [2, 3]]),
    ],
)
def test_numbers_of_key_heads_are_those_of_the_layer(tmp_path, heads, groups, tp, expected):
    mine, kv = heads // tp, max(1, (groups or heads) // tp)
    for rank in range(tp):
        where: Any = SimpleNamespace(tp_rank=rank, dp_rank=0)
        site: Any = SimpleNamespace(
            layer=0,
            name="x",
            backend="reference",
            stabilizer="",
            variant="",
            attention=SimpleNamespace(),
        )
        q, k = torch.randn(16, 1, mine, 8), torch.randn(16, 1, kv, 8)
        seen = Seen(
            site=site,
            q=q,
            k=k,
            v=k,
            out=q,
            low=None,
            max_logits=None,
            sinks=None,
            geometry=Geometry(scale=1.0, causal=True),
            dropout_p=0.0,
        )
        capturer = Capturer(
            StabilityConfig(), where, tmp_path, name="tiny", per_kv_head=heads // (groups or heads)
        )
        capturer._take(3, Wanted(trigger="step", heads={0: ()}), seen, q)
        found = CaptureFile.load(tmp_path / capture.file_name(3, 0, rank))
        assert found.kv_heads == expected[rank]
        assert found.heads == list(range(rank * mine, (rank + 1) * mine))
