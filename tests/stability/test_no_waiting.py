"""Nothing an observation computes needs a value on the host: proved without a device.

Meta tensors have no values, so whatever would bring one to the host (``.item()``, ``.cpu()``,
``.tolist()``, a condition, indexing with a mask) raises on them. A copy *to* the device from
ordinary memory waits as well; a dispatch mode catches those. test_gpu.py asks the driver.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.stability.gradients import LayerNorms
from megatron_patch.stability.observe import Seen
from megatron_patch.stability.sampling import Geometry
from megatron_patch.stability.sums import HeadSums
from megatron_patch.stability.weights import SpectralNorms

META = torch.device("meta")
S, B, H, D = 96, 2, 4, 16


class NoCrossing(TorchDispatchMode):
    """Raises at every copy between the device and the host."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor) and x.dim() > 0]
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            kinds = {x.device.type for x in tensors}
            if len(kinds) > 1:
                raise AssertionError(f"{function} between {sorted(kinds)}")
        return result


def seen(backend: str, stabilizer: str, *, low: torch.dtype | None) -> Seen:
    def empty(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(S, B, H, D, device=META, dtype=dtype)

    return Seen(
        site=SimpleNamespace(  # type: ignore[arg-type]
            layer=1,
            backend=backend,
            stabilizer=stabilizer,
            exact_delta=BACKENDS[backend].exact_delta,
        ),
        q=empty(),
        k=empty(),
        v=empty(),
        out=empty(),
        low=None if low is None else empty(low),
        max_logits=torch.empty(H, device=META),
        sinks=None,
        geometry=Geometry(scale=0.25, causal=True),
        dropout_p=0.0,
    )


@pytest.mark.parametrize(
    ("backend", "stabilizer", "low"),
    [
        ("stable_flash", "compensated", torch.bfloat16),
        ("stable_flash", "compensated", torch.int8),
        ("stable_flash", "none", None),
        ("sdpa_cudnn", "", None),
        ("reference", "", None),
    ],
)
def test_sums_of_heads(backend, stabilizer, low):
    sums = HeadSums(layers=2, heads=H, first_head=0, rows=8, sequences=2, device=META)
    with NoCrossing():
        sums.clear(phase=3)
        for _ in range(2):
            sums.add(seen(backend, stabilizer, low=low), torch.empty(S, B, H, D, device=META))
        sums.totals()


def test_norms_of_gradients_and_weights():
    norms = LayerNorms.__new__(LayerNorms)
    norms.squares = torch.zeros(3, dtype=torch.float64, device=META)
    buffer = SimpleNamespace(grad_data=torch.empty(100, device=META))
    norms._pieces = [(buffer, 0, 40), (buffer, 40, 100)]
    norms._known, norms._watched = [], SimpleNamespace(roots=[])
    norms._slots = torch.zeros(2, dtype=torch.int64, device=META)
    weight = torch.empty(3 * H * D, H * D, device=META, dtype=torch.bfloat16)
    attention = SimpleNamespace(
        linear_qkv=SimpleNamespace(weight=weight),
        num_attention_heads_per_partition=H,
        num_query_groups_per_partition=H,
        hidden_size_per_attention_head=D,
    )
    sites: Any = [SimpleNamespace(attention=attention)] * 2
    spectral = SpectralNorms(sites)
    with NoCrossing():
        norms.clear()
        norms.measure()
        spectral.measure()  # the first time, when the vector is made
        spectral.measure()


def test_weights_of_fewer_key_heads_than_ranks(monkeypatch):
    """The shapes say what goes to whom."""
    sizes: list[Any] = []
    monkeypatch.setattr(
        torch.distributed,
        "all_to_all_single",
        lambda out, x, counts, sends, *, group: sizes.append((counts, sends)),
    )
    attention = SimpleNamespace(
        # 4 query heads, a key and a value over 2 ranks: the rows of this one are 3 query heads.
        linear_qkv=SimpleNamespace(
            weight=torch.empty(3 * D, H * D, device=META, dtype=torch.bfloat16)
        ),
        config=SimpleNamespace(num_query_groups=1),
        world_size=2,
        pg_collection=SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0, size=lambda: 2)),
        num_attention_heads_per_partition=H,
        num_query_groups_per_partition=1,
        hidden_size_per_attention_head=D,
    )
    site: Any = SimpleNamespace(attention=attention)
    spectral = SpectralNorms([site])
    with NoCrossing():
        assert spectral.measure()
        spectral.measure()
    # Its own two query heads, and the key of the other rank; a query head for that one.
    assert sizes == [([2 * D, D], [2 * D, D])] * 2


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: float(x.sum()),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x + torch.arange(8.0).to(META),
    ],
)
def test_what_waits_would_be_found(wait):
    x = torch.empty(8, device=META)
    with NoCrossing(), pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        wait(x)
