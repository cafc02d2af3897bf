"""Tiles that the forward kernel cannot run are refused; every shipped row is a legal tile."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from stable_attention import AttentionArgumentError, configs, dispatch
from stable_attention.configs import Tile
from stable_attention.describe import describe
from stable_attention.hopper import launch as hopper
from stable_attention.problem import Options


@pytest.mark.parametrize("row", dispatch.KERNEL_SETS, ids=lambda row: row.name)
def test_the_table_has_no_yes_that_no_call_can_reach(row: dispatch.KernelSet) -> None:
    """What a feature comes with stands in the table, too: chunks with dropout need both."""
    of = {
        "packed chunks": {"chunks", "varlen"},
        "chunks with dropout": {"chunks", "dropout"},
        "dropout in a band": {"dropout"},
        "softcap in a band": {"softcap"},
        "projection with dropout": {"dropout"},
    }
    assert set(of) <= set(dispatch.FEATURES)
    for feature in row.features & set(of):
        assert of[feature] <= row.features, feature
    assert ("different v head dim" in row.features) is (row.mixed_head_dims != ())


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"ones": 4}, "not one of"),
        ({"ones": 0}, "not one of"),
        ({"reverse": 1}, "set segment=64"),
        ({"segment": 96}, "take 0, bn or a multiple"),
        ({"early": 1, "ones": 16}, "set ones=8"),
    ],
)
def test_refused(fields: dict[str, int], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        Tile(64, 64, 4, 3, **fields)


def test_dropout_may_have_a_row_of_its_own() -> None:
    widths = {"widths": (256, 256), "arch": "sm90", "banded": True}
    plain, dropout = (configs.tile_for("dq", dropout=drop, **widths) for drop in (False, True))
    assert (plain.stages, dropout.stages) == (3, 2)
    same = (configs.tile_for("dkdv", dropout=drop, **widths) for drop in (False, True))
    assert len(set(same)) == 1


def test_head_dims_are_padded_as_little_as_two_tiles_allow() -> None:
    """72 and 80 take 64 + 32 columns, 136 to 192 take 128 + 64, not the next power of two."""
    padded = {d: configs.tile_width(d) for d in range(8, 257, 8)}
    assert {d for d, width in padded.items() if width == 96} == {72, 80, 88, 96}
    assert {d for d, width in padded.items() if width == 192} == set(range(136, 193, 8))
    assert all(d <= width < max(2 * d, 17) for d, width in padded.items())


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
def test_every_width_has_rows(arch: str) -> None:
    for widths in itertools.combinations_with_replacement(reversed(configs.WIDTHS), 2):
        for which in configs.PASSES:
            for banded in (False, True):
                assert configs.tile_for(which, arch=arch, widths=widths, banded=banded).bm >= 32


def test_two_head_dims_take_their_own_row_or_that_of_the_wider_one() -> None:
    rows = configs.table()["sm90"]
    common = {"arch": "sm90", "banded": True}
    mla = configs.tile_for("dkdv", widths=(192, 128), **common)
    assert [mla.bm, mla.bn, mla.warps, mla.stages] == rows["dkdv/192x128/full"]
    same = configs.tile_for("dkdv", widths=(192, 192), **common)
    assert configs.tile_for("dkdv", widths=(192, 96), **common) == same != mla


@pytest.mark.parametrize("arch", ["interpreter", "sm80", "sm90", "sm100"])
def test_shipped_rows_are_legal(arch: str) -> None:
    for row in configs.table()[arch].values():
        Tile(*row)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm80"),
        ((8, 9), "sm80"),
        ((9, 0), "sm90"),
        ((10, 3), "sm100"),
        ((7, 5), "sm75"),
        ((12, 0), "sm120"),
    ],
)
def test_architectures_nobody_compiled_for_are_refused(
    capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T4 took the tiles of sm_100, and failed inside the compiler."""
    monkeypatch.setattr(configs, "_capability", lambda index: capability)
    device = torch.device("cuda", 0)
    assert configs.arch_of(device) == arch
    q = torch.empty(1, 8, 2, 16, dtype=torch.bfloat16, device="meta")
    asked, _ = describe(q, q, q, Options())
    if arch in configs.table():
        assert dispatch.select(asked, device).name == "triton"
    else:
        with pytest.raises(AttentionArgumentError, match=f"architecture {arch}"):
            dispatch.select(asked, device)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "hopper"),
        ({"causal": True, "sinks": "off-by-one", "stabilizer": "compensated"}, "hopper"),
        ({"stabilizer": "dynamic_max"}, "hopper_backward"),
        ({"o_lo": "int8"}, "hopper_backward"),
        ({"o_lo": "int8", "stabilizer": "none"}, "hopper"),
        ({"window": (4, 0)}, "hopper"),
        ({"softcap": 30.0}, "hopper_backward"),
        ({"softcap": 30.0, "window": (4, 0)}, "triton"),
        ({"dropout_p": 0.1, "causal": True}, "hopper_backward"),
        ({"dropout_p": 0.1, "window": (4, 0)}, "triton"),
        ({"dropout_p": 0.1, "causal": True, "keys": 24}, "triton"),
        ({"stabilizer": "paper_bf16", "allow_broken": True}, "triton"),
        ({"causal": True, "keys": 24}, "hopper"),
        ({"d": 96}, "hopper_forward"),
        ({"d": 256, "causal": True}, "hopper_wide"),
        ({"d": 256, "window": (4, 0)}, "hopper_wide"),
        ({"d": 256, "o_lo": "int8"}, "hopper_wide_backward"),
        ({"d": 192, "dv": 128, "stabilizer": "dynamic_max"}, "hopper_wide_backward"),
        ({"d": 192}, "triton"),
        ({"d": 192, "dv": 128}, "hopper_wide"),
        ({"d": 128, "dv": 64}, "triton"),
        ({"d": 256, "dropout_p": 0.1}, "triton"),
        ({"stabilizer": "projected"}, "triton"),
        ({"stabilizer": "compensated_projected"}, "hopper"),
        ({"stabilizer": "compensated_projected", "o_lo": "int8"}, "hopper_backward"),
        ({"stabilizer": "compensated_projected", "dropout_p": 0.1}, "triton"),
        ({"stabilizer": "compensated_projected", "d": 96}, "hopper_forward"),
        ({"stabilizer": "compensated_projected", "d": 256}, "hopper_wide"),
        (
            {"stabilizer": "compensated_projected", "d": 192, "dv": 128, "window": (4, 0)},
            "hopper_wide",
        ),
        (
            {"stabilizer": "compensated_projected", "d": 256, "o_lo": "int8"},
            "hopper_wide_backward",
        ),
        ({"stabilizer": "projected", "d": 256}, "triton"),
    ],
)
def test_hopper_serves_what_its_row_says(
    options: dict[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "_capability", lambda index: (9, 0))
    named = dict(options)
    keys, d = named.pop("keys", 16), named.pop("d", 128)
    q, k = (
        torch.empty(1, n, heads, d, dtype=torch.bfloat16, device="meta")
        for n, heads in ((16, 4), (keys, 2))
    )
    sinks, dv = named.pop("sinks", None), named.pop("dv", d)
    seed = 1 if "dropout_p" in named else None
    v = torch.empty(1, keys, 2, dv, dtype=torch.bfloat16, device="meta")
    asked, _ = describe(q, k, v, Options.of(**named), sinks=sinks, dropout_seed=seed)
    device = torch.device("cuda", 0)
    assert dispatch.select(asked, device).name == name
    portable = asked.dropout_p or asked.softcap or d not in (64, 128)
    chunks = "triton" if portable else name
    assert dispatch.select(replace(asked, chunked=True), device).name == chunks
    packed = replace(asked, chunked=True, layout="thd")
    assert dispatch.select(packed, device).name == "triton"


def test_chunks_whose_positions_the_device_has_take_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The band of sm_90 is the host's: such chunks would all lie at position 0."""
    q = torch.empty(2, 128, 2, 64, dtype=torch.bfloat16, device="meta")
    at = torch.zeros(2, dtype=torch.int32, device="meta")
    asked, extras = describe(q, q, q, Options(), positions=(at, 0))
    for place in ("portable_forward.forward", "portable_backward.backward"):
        monkeypatch.setattr(f"stable_attention.hopper.launch.{place}", lambda *_, **__: "portable")
    wide = tuple(torch.empty_like(q, dtype=torch.float32) for _ in range(3))
    lse = torch.empty(2, 2, 128, device="meta")
    assert hopper.forward(asked, q, q, q, extras=extras, out_dtype=torch.float32) == "portable"
    named = {"lse": lse, "delta": lse, "extras": extras, "accumulators": wide}
    assert hopper.backward(asked, q, q, q, q, **named) == "portable"


def test_kernel_sets_are_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_capability", lambda index: (9, 0))
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="meta")
    asked, _ = describe(q, q, q, Options())
    device = torch.device("cuda", 0)
    for value, name in (("triton", "triton"), ("triton,hopper", "hopper"), ("", "hopper")):
        monkeypatch.setenv(dispatch.SELECTED, value)
        assert dispatch.select(asked, device).name == name
    monkeypatch.setenv(dispatch.SELECTED, "hoper")
    with pytest.raises(
        AttentionArgumentError,
        match="'hoper'; allowed: 'hopper', 'hopper_backward', 'hopper_forward', ",
    ):
        dispatch.select(asked, device)
