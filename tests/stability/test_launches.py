"""An observation is bound by kernel launches where steps are short: they are counted.

On two GPUs steps of 79 ms had 50 ms of an observation with 145 launches a layer, above the goal of
1 % at the default interval, and with 78 a layer some runs still were (docs/performance.md). Here
all layers of GPT-2 small have as many as three had: with its 1,024 tokens they are two batches.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patch.stability.observe import Seen, Site
from megatron_patch.stability.sampling import Geometry
from megatron_patch.stability.sums import HeadSums
from megatron_patch.stability.weights import SpectralNorms

S, B, H, D = 128, 4, 12, 64
VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "unsqueeze", "squeeze", "slice", "select", "permute", "t"),
        *("transpose", "expand", "detach", "alias", "as_strided", "unbind"),
        *("split", "split_with_sizes"),
    )
)


class Launches(TorchDispatchMode):
    """Counts operations that are not views of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name not in VIEWS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def call(stabilizer: str, tokens: int = S) -> Seen:
    module: Any = torch.nn.Module()
    module.backend_name, module.options = "stable_flash", {"stabilizer": stabilizer}
    q, k, v, out, low = torch.randn(5, tokens, B, H, D).bfloat16()
    return Seen(
        site=Site(module, 1, "decoder.layers.1.self_attention.core_attention", module),
        q=q,
        k=k,
        v=v,
        out=out,
        low=low if stabilizer == "compensated" else None,
        max_logits=torch.zeros(H),
        sinks=None,
        geometry=Geometry(scale=D**-0.5, causal=True),
        dropout_p=0.0,
    )


@pytest.mark.parametrize(("stabilizer", "layers", "tokens", "most"), [
    ("compensated", 1, S, 82), ("compensated", 12, S, 176), ("none", 12, S, 160),
    ("compensated", 12, 1024, 242),
])  # fmt: skip
def test_an_observation(stabilizer, layers, tokens, most):
    sums = HeadSums(
        layers=2, heads=H, first_head=0, rows=32, sequences=4, device=torch.device("cpu")
    )
    seen, dout = call(stabilizer, tokens), torch.randn(tokens, B, H, D).bfloat16()
    with torch.no_grad(), Launches() as launches:
        sums.clear(phase=1)
        for _ in range(layers):
            sums.add(seen, dout)
        sums.totals()
    assert sum(launches.found.values()) <= most, launches.found


@pytest.mark.parametrize("layers", [1, 12])
def test_the_norms_of_weights(layers):
    attention = SimpleNamespace(
        linear_qkv=SimpleNamespace(weight=torch.randn(3 * H * D, 96).bfloat16()),
        num_attention_heads_per_partition=H,
        num_query_groups_per_partition=H,
        hidden_size_per_attention_head=D,
    )
    sites: Any = [SimpleNamespace(attention=attention)] * layers
    norms = SpectralNorms(sites)
    norms.measure()
    with Launches() as launches:
        norms.measure()
    assert sum(launches.found.values()) <= 14, launches.found
