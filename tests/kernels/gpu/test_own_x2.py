"""The backward in two parts on a GPU: every head dim, captured heads whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import drawn, gradients, over_bound
from regimes import REGIMES, make_regime
from suite import each_row_to_itself

from megatron_patch.stability.capture import CaptureFile

CAPTURES = sorted((Path(__file__).resolve().parents[2] / "stability" / "captures").glob("*.pt"))
PROJECTING = ("projected", "compensated_projected")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stabilizer", PROJECTING)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", REGIMES)
def test_gradients_of_regimes_are_as_exact_as_fp32_attention(
    name: str, d: int, stabilizer: str
) -> None:
    tensors = [x[None] for x in make_regime(name, heads=4, n=2048, d=d, device="cuda")]
    assert max(over_bound(tensors, stabilizer=stabilizer)) <= 1.0


@pytest.mark.parametrize("stabilizer", PROJECTING)
@pytest.mark.parametrize("path", CAPTURES, ids=lambda x: x.stem)
def test_gradients_of_captured_heads_are_as_exact_as_fp32_attention(
    path: Path, stabilizer: str
) -> None:
    one = CaptureFile.load(path)
    for i in range(len(one.heads)):
        at = one.head_to_kv[i]
        tensors = [
            x[:, :1, j : j + 1].permute(1, 2, 0, 3).contiguous().cuda()
            for x, j in ((one.q, i), (one.k, at), (one.v, at), (one.dout, i))
        ]
        assert max(over_bound(tensors, one.scale, stabilizer=stabilizer)) <= 1.0, one.heads[i]


@pytest.mark.parametrize(
    ("stabilizer", "backward", "limit"),
    [("projected", "own", 0.01), *((name, "own_x2", 0.002) for name in PROJECTING)],
)
def test_gradients_of_rows_with_one_key(stabilizer: str, backward: str, limit: float) -> None:
    assert not each_row_to_itself(stabilizer, backward, limit)


@pytest.mark.parametrize("stabilizer", PROJECTING)
@pytest.mark.parametrize("dims", [(40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_every_head_dim_with_few_key_heads_and_odd_lengths(
    dims: tuple[int, int], stabilizer: str
) -> None:
    d, dv = dims
    q, k = (drawn((2, 1111, heads, d), count=1)[0] for heads in (8, 2))
    v, dout = (drawn((2, 1111, heads, dv), seed=1, count=1)[0] for heads in (2, 8))
    found, own, again = (
        gradients([q, k, v, dout], causal=True, stabilizer=stabilizer, backward=x)
        for x in ("own_x2", "own", "own_x2")
    )
    for x, y, z in zip(found, own, again, strict=True):
        assert (x.float() - y.float()).norm() <= 0.01 * y.float().norm()
        assert torch.equal(x, z)


@pytest.mark.parametrize("stabilizer", PROJECTING)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_packed_sequences_and_windows(d: int, stabilizer: str) -> None:
    ends = torch.tensor([0, 0, 300, 301, 2000, 4000], dtype=torch.int32, device="cuda")
    q, dout = drawn((4097, 8, d), count=2)
    k, v = drawn((4097, 2, d), seed=1, count=2)
    dout[4000:] = float("nan")  # of no sequence
    packed = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    options: dict[str, Any]
    for options in ({"window": (100, 0)}, {}):
        found, own = (
            gradients([q, k, v, dout], **packed, **options, stabilizer=stabilizer, backward=x)
            for x in ("own_x2", "own")
        )
        for x, y in zip(found, own, strict=True):
            assert (x.float() - y.float()).norm() <= 0.01 * y.float().norm()
