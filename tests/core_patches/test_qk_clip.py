"""QK-Clip in hybrids, with sharded weights and for what both of our backends measure."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cpu import single_gpu, single_rank

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.registry import BackendError
from megatron_patch.core_patches.qk_clip import clip_qk

HEADS, GROUPS, DIM, HIDDEN = 4, 2, 8, 32
SERVED = [name for name, row in BACKENDS.items() if not row.module]  # by `CoreAttention`


@pytest.fixture(autouse=True)
def one_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    on_gpu = request.node.get_closest_marker("gpu") is not None
    with single_gpu() if on_gpu else single_rank():
        yield


def hybrid(
    backend: str = "reference", *, bf16: bool = False, device: str = "cpu",
    options: dict[str, Any] | None = None, **changes: Any,
) -> Any:  # fmt: skip
    """A chunk as core wraps it: one layer with attention, one without, logits far above 1."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from megatron_patch.attention.core import core_attention_spec
    from megatron_patch.attention.replace import replace_core_attention

    hidden = HEADS * 64 if device == "cuda" else HIDDEN
    config = TransformerConfig(**{
        "num_layers": 2, "hidden_size": hidden, "num_attention_heads": HEADS,
        "num_query_groups": GROUPS, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "use_cpu_initialization": True, "qk_clip": True, "qk_clip_threshold": 1.0,
        "init_method_std": 1.0, "bf16": bf16, "add_bias_linear": False, "cuda_graph_modules": [],
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
    } | changes)  # fmt: skip
    core = core_attention_spec(backend, **(options or {}))
    spec, _ = replace_core_attention(get_gpt_layer_local_spec(), core)
    torch.manual_seed(0)
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList(
        [torch.nn.Linear(2, 2), build_module(spec, config=config, layer_number=2)]
    )
    model = torch.nn.Module()
    model.decoder = decoder
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = model
    return wrapped.to(device)


def forward(chunk: Any, *, seed: int = 0) -> Any:
    """One pass; the attention module with the logits of it."""
    layer = chunk.module.module.decoder.layers[1]
    weight = layer.self_attention.linear_qkv.weight
    x = torch.randn(16, 2, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(weight.dtype)
    layer.train()(x, None)
    return layer.self_attention


@pytest.mark.parametrize(("backend", "bf16"), [("reference", False), ("stable_flash", True)])
def test_a_layer_without_attention_is_no_hindrance(backend, bf16):
    chunk = hybrid(backend, bf16=bf16)
    attention = forward(chunk)
    before = attention.core_attention.current_max_attn_logits.clone()
    assert (before > 1).all()
    weight = attention.linear_qkv.weight.clone()
    assert clip_qk([chunk], log_max_only=True) == float(before.max())
    assert attention.core_attention.current_max_attn_logits is None
    assert torch.equal(weight, attention.linear_qkv.weight)
    forward(chunk)
    assert clip_qk([chunk]) == float(before.max())
    forward(chunk)
    after = attention.core_attention.current_max_attn_logits
    # Each group's largest is at the threshold.
    torch.testing.assert_close(
        after.view(GROUPS, -1).amax(1), torch.ones(GROUPS), rtol=2e-2 if bf16 else 1e-4, atol=0
    )
    assert clip_qk([chunk], log_max_only=True) == float(after.max())
    assert clip_qk([chunk]) == 0.0  # nothing was measured since


def test_a_head_whose_logits_are_all_negative_is_left_alone():
    """Beside one that is above the threshold its weights became NaN."""
    chunk = hybrid()
    attention = forward(chunk)
    logits, weight = attention.core_attention.current_max_attn_logits, attention.linear_qkv.weight
    logits.copy_(torch.tensor([-3.0, -1.0] + [4.0] * (HEADS - 2)))
    before = weight.detach().clone().view(GROUPS, -1, HIDDEN)
    assert clip_qk([chunk]) == 4.0
    after = weight.detach().view(GROUPS, -1, HIDDEN)
    assert torch.equal(after[0], before[0]) and after.isfinite().all()
    queries = HEADS // GROUPS * HIDDEN // HEADS
    torch.testing.assert_close(after[1][:queries], before[1][:queries] / 2)


@pytest.mark.parametrize("bf16", [False, True])
def test_logits_of_biases_come_down_too(bf16):
    """They stayed above the threshold, and every step scaled the weights again, towards zero."""
    chunk = hybrid(bf16=bf16, add_qkv_bias=True)
    attention = forward(chunk)
    bias = attention.linear_qkv.bias
    with torch.no_grad():
        bias.normal_(std=3.0)
    if bf16:  # as core's whole optimizer keeps them
        bias.main_param = bias.detach().float()
    forward(chunk)
    assert clip_qk([chunk]) > 1
    forward(chunk)
    after = attention.core_attention.current_max_attn_logits.view(GROUPS, -1).amax(1)
    torch.testing.assert_close(after, torch.ones(GROUPS), rtol=2e-2 if bf16 else 1e-4, atol=0)
    if bf16:
        torch.testing.assert_close(bias.main_param, bias.detach().float(), rtol=1e-2, atol=0)


def with_shard(chunk: Any, rank: int, *, name: str = "weight") -> Any:
    """The chunk as the distributed optimizer of one of two ranks leaves it: a flat FP32 shard."""
    projection = chunk.module.module.decoder.layers[1].self_attention.linear_qkv
    weight = getattr(projection, name)
    n = weight.numel()
    cut = (0, n // 3) if rank == 0 else (n // 3, n)
    weight.main_param = weight.detach().float().flatten()[slice(*cut)].clone()
    weight.main_param_sharded = True
    begin, size = 64, 2 * (64 + n // 3)  # the bucket's halves cut the weight
    chunk.buffers = [
        SimpleNamespace(
            data_parallel_group=SimpleNamespace(rank=lambda: rank, size=lambda: 2),
            ddp_config=SimpleNamespace(use_distributed_optimizer=True),
            buckets=[SimpleNamespace(grad_data=torch.empty(max(size, 1)), offset=0)],
            params=[weight],
            param_index_map={weight: (begin, begin + n, 0)},
        )
    ]
    if rank == 1:  # its half has to hold the rest
        chunk.buffers[0].buckets[0].offset = begin + n // 3 - (begin + n)
        chunk.buffers[0].buckets[0].grad_data = torch.empty(2 * (begin + n))
    chunk.expert_parallel_buffers = []
    return weight, cut


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_shard_of_the_distributed_optimizer_is_scaled_like_the_weight(rank, name):
    chunk = hybrid(bf16=True, add_qkv_bias=True)
    with torch.no_grad():
        chunk.module.module.decoder.layers[1].self_attention.linear_qkv.bias.normal_()
    weight, cut = with_shard(chunk, rank, name=name)
    forward(chunk)
    whole = weight.detach().float().flatten()
    clip_qk([chunk])
    assert weight.main_param.dim() == 1 and weight.main_param_sharded
    now = weight.detach().float().flatten()
    assert not torch.equal(whole, now)
    torch.testing.assert_close(weight.main_param, now[slice(*cut)], rtol=1e-2, atol=1e-6)
    kept = weight.main_param.clone()
    chunk.module.module.decoder.layers[1].self_attention.config.qk_clip_threshold = 1e9
    forward(chunk)
    clip_qk([chunk])  # nothing is above
    assert torch.equal(kept, weight.main_param)


def test_a_rank_that_updates_nothing_of_the_weight_scales_what_it_has():
    """Core says of every 16-bit weight that it is sharded, and gives a shard to who has one."""
    chunk = hybrid(bf16=True)
    weight, _ = with_shard(chunk, 0)
    weight.main_param = None
    chunk.buffers[0].buckets[0].grad_data = torch.empty(2 * 64)  # ends before the weight
    forward(chunk)
    before = weight.detach().clone()
    clip_qk([chunk])
    assert weight.main_param is None and not torch.equal(before, weight)


def test_an_optimizer_without_weights_to_scale_is_refused():
    chunk = hybrid(bf16=True)
    weight, _ = with_shard(chunk, 0)
    weight.main_param = None
    forward(chunk)
    with pytest.raises(ValueError, match="use_precision_aware_optimizer"):
        clip_qk([chunk])


def in_the_call(attention: Any, device: str) -> torch.Tensor:
    """Float32 [h] largest causal logits of the q and k that core attention receives in a pass."""
    got: list[torch.Tensor] = []
    hook = attention.core_attention.register_forward_pre_hook(
        lambda _, args: got.extend(x.detach().float() for x in args[:2])
    )
    hidden = attention.config.hidden_size
    x = torch.randn(16, 2, hidden, generator=torch.Generator().manual_seed(3)).to(device)
    attention(x.to(attention.linear_qkv.weight.dtype), None)
    hook.remove()
    q, k = got
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("ibhd,jbhd->hbij", q, k) * q.shape[-1] ** -0.5
    hidden_keys = torch.ones(16, 16, dtype=torch.bool, device=device).triu(1)
    return scores.masked_fill(hidden_keys, -torch.inf).amax((1, 2, 3))


def measures_or_refuses(backend: str, *, device: str, **options: Any) -> str:
    """What a backend does with ``log_max_attention_logit`` alone; raises if it is wrong."""
    try:
        chunk = hybrid(
            backend, bf16=backend != "reference", device=device, options=options,
            qk_clip=False, log_max_attention_logit=True,
        )  # fmt: skip
    except BackendError as error:
        assert BACKENDS[backend].max_logits or (
            "the maximum logit of each head (qk_clip) is not something it has" in str(error)
            and "stable_flash" in str(error)
        ), error
        return f"refused: {error}"
    attention = chunk.module.module.decoder.layers[1].self_attention.train()
    expected = in_the_call(attention, device)
    found = attention.core_attention.current_max_attn_logits
    # "paper_bf16" rounds its scores.
    limit = 2.0**-8 if options.get("stabilizer") == "paper_bf16" else 2e-5
    torch.testing.assert_close(found, expected, rtol=limit, atol=2e-5)
    assert clip_qk([chunk], log_max_only=True) == pytest.approx(float(expected.max()), rel=limit)
    return "measured"


@pytest.mark.parametrize("backend", SERVED)
def test_every_backend_gives_its_largest_logits_or_says_that_it_has_none(backend):
    did = measures_or_refuses(backend, device="cpu")
    assert did == "measured" or backend not in ("reference", "stable_flash"), did
    if not BACKENDS[backend].max_logits:
        assert did.startswith("refused")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "options"),
    [(name, {}) for name in SERVED]
    + [("stable_flash", {"backward": name}) for name in ("sdpa_cudnn", "sdpa_flash", "fa4")]
    + [
        ("stable_flash", {"stabilizer": name, "allow_broken": name == "paper_bf16"})
        for name in BACKENDS["stable_flash"].stabilizers
    ],
    ids=str,
)
def test_the_same_on_a_gpu(backend, options):
    did = measures_or_refuses(backend, device="cuda", **options)
    print(backend, options, did)
    if backend == "stable_flash" and options.get("backward") != "fa4":
        assert did == "measured"
