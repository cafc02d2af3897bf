"""`CoreAttention` keeps Megatron-Core's contract and agrees with its stock module.

Shapes: q [s, b, np, hn], k and v [s, b, ng, hn], output [s, b, np * hv]; packed [t, np, hn].
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import os

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron_cpu import reseed

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.core import (
    CoreAttention,
    _warn_mask_ignored,
    _warn_without_qk_norm,
    core_attention_spec,
)
from megatron_patch.attention.registry import BackendError

pytestmark = pytest.mark.usefixtures("rank")
S, B, HEADS, GROUPS, DIM = 24, 2, 4, 2, 8


def config(**changes) -> TransformerConfig:
    base = {
        "num_layers": 4,
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "cuda_graph_modules": [],
    }
    return TransformerConfig(**(base | changes))


def build(cls=CoreAttention, settings=None, *, layer_number=1, cp_comm_type=None, **kwargs):
    if cls is CoreAttention:
        kwargs.setdefault("backend", "reference")
    return cls(
        config=settings or config(),
        layer_number=layer_number,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=cp_comm_type,
        softmax_scale=None,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **kwargs,
    )


def inputs(*, dtype=torch.float32, seed=0):
    """q and k contiguous, v a strided view of a fused projection, as Megatron-Core passes them."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(S, B, HEADS, DIM, generator=g).to(dtype).requires_grad_()
    k = torch.randn(S, B, GROUPS, DIM, generator=g).to(dtype).requires_grad_()
    fused = torch.randn(S, B, GROUPS, 3 * DIM, generator=g).to(dtype).requires_grad_()
    return q, k, fused


def run(module, q, k, fused, **kwargs):
    v = fused[..., -DIM:]
    assert not v.is_contiguous()
    return module(q, k, v, None, attn_mask_type=AttnMaskType.causal, **kwargs)


def gradients(module, **kwargs):
    q, k, fused = inputs()
    out = run(module, q, k, fused, **kwargs)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(9)))
    return [out, q.grad, k.grad, fused.grad]


CASES = {
    "causal": {},
    "window": {"window_size": (5, 0)},
    "window on odd layers": {"window_size": (5, 0), "window_attn_skip_freq": 2},
    "off-by-one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable"},
    "layer scaling": {"apply_query_key_layer_scaling": True},
}


@pytest.mark.parametrize("layer_number", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_stock_module(case, layer_number):
    settings = config(**CASES[case])
    stock = build(DotProductAttention, settings, layer_number=layer_number)
    ours = build(settings=settings, layer_number=layer_number)
    if case == "learnable":
        with torch.no_grad():
            stock.softmax_offset.copy_(torch.linspace(-1, 2, HEADS))
            ours.softmax_offset.copy_(stock.softmax_offset)
    for theirs, mine in zip(gradients(stock), gradients(ours), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if case == "learnable":
        torch.testing.assert_close(ours.softmax_offset.grad, stock.softmax_offset.grad)


def test_constructed_twice_with_a_copied_config_has_no_side_effect():
    """Multi-latent attention builds core attention twice and drops the first."""
    state = torch.get_rng_state()
    settings = config()
    first = build(settings=settings)
    second = build(settings=copy.deepcopy(settings), k_channels=DIM, v_channels=DIM)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gradients(first)[0], gradients(second)[0])


def test_mla_head_dims_come_from_the_configuration():
    settings = MLATransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        rope_type="rope",
        attention_dropout=0.0,
        use_cpu_initialization=True,
        cuda_graph_modules=[],
    )
    module = build(settings=settings)  # the first construction: no k_channels
    q, k, v = torch.randn(S, B, 4, 24), torch.randn(S, B, 4, 24), torch.randn(S, B, 4, 16)
    out = module(q, k, v, None, attn_mask_type=AttnMaskType.causal)
    assert out.shape == (S, B, 4 * 16)
    with pytest.raises(BackendError, match="value head dimension 16 differs"):
        build(settings=settings, backend="sdpa_flash")


def test_packed_input_is_each_document_alone():
    module = build()
    g = torch.Generator().manual_seed(1)
    q = torch.randn(S, HEADS, DIM, generator=g)
    k, v = torch.randn(2, S, GROUPS, DIM, generator=g)
    ends = [0, 7, 8, S]
    cu = torch.tensor(ends, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=torch.tensor(16),
        max_seqlen_kv=16,
    )
    out = module(q, k, v, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
    assert out.shape == (S, HEADS * DIM)
    for start, end in itertools.pairwise(ends):
        q1, k1, v1 = (x[start:end, None] for x in (q, k, v))
        alone = module(q1, k1, v1, None, attn_mask_type=AttnMaskType.causal)
        torch.testing.assert_close(out[start:end], alone[:, 0])


def test_padded_packs():
    """Padding after each document is invisible under a causal mask; elsewhere it is refused."""
    module = build()
    q = torch.randn(12, HEADS, DIM)
    k, v = torch.randn(2, 12, GROUPS, DIM)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 5, 9], dtype=torch.int32),
        cu_seqlens_kv=torch.tensor([0, 5, 9], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, 8, 12], dtype=torch.int32),
        cu_seqlens_kv_padded=torch.tensor([0, 8, 12], dtype=torch.int32),
    )
    out = module(q, k, v, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
    alone = module(*(x[8:12, None] for x in (q, k, v)), None)
    torch.testing.assert_close(out[8:12], alone[:, 0])
    with pytest.raises(ValueError, match="need a causal mask"):
        module(q, k, v, None, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=packed)


def test_mask_type_of_the_call_wins():
    module = build()
    q, k, fused = inputs()
    v = fused[..., -DIM:]
    full = module(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)
    assert not torch.allclose(full[0], module(q, k, v, None)[0])
    torch.testing.assert_close(full[-1], module(q, k, v, None)[-1])


def test_dropout_draws_from_the_model_parallel_stream_and_replays():
    module = build(attention_dropout=0.5)
    q, k, fused = inputs()
    reseed()
    first = run(module, q, k, fused)
    moved = get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()
    second = run(module, q, k, fused)
    assert not torch.equal(first, second)
    reseed()
    default = torch.get_rng_state()
    assert torch.equal(run(module, q, k, fused), first)
    assert torch.equal(torch.get_rng_state(), default), "the default stream must not move"
    assert torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], moved)
    module.eval()
    assert torch.equal(run(module, q, k, fused), gradients(build())[0])


def test_under_sequence_parallelism_the_block_has_forked_already():
    """Forking again would draw from the same place as the block's other dropouts."""
    module = build(attention_dropout=0.5)
    module.config = copy.copy(module.config)
    module.config.sequence_parallel = True
    before = get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()
    run(module, *inputs())
    assert torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], before)


def test_recompute_replays_dropout_exactly():
    plain = []
    for recompute in (False, True):
        module = build(attention_dropout=0.4)
        q, k, fused = inputs()
        reseed()
        if recompute:
            out = checkpoint(lambda a, b, c, m=module: run(m, a, b, c), False, q, k, fused)
        else:
            out = run(module, q, k, fused)
        out.backward(torch.ones_like(out))
        plain.append([out, q.grad, k.grad, fused.grad])
    for kept, replayed in zip(*plain, strict=True):
        assert torch.equal(kept, replayed)


def test_maximum_logits_accumulate_and_carry_no_graph():
    module = build(settings=config(qk_clip=True))
    assert module.current_max_attn_logits is None
    seen = []
    for seed in (1, 2):
        q, k, fused = inputs(seed=seed)
        run(module, q, k, fused)
        scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(2, 2)) * DIM**-0.5
        scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
        seen.append(scores.amax((0, 2, 3)).detach())
    top = module.current_max_attn_logits
    assert top.shape == (HEADS,) and top.dtype == torch.float32 and not top.requires_grad
    torch.testing.assert_close(top, torch.maximum(*seen))
    module.eval()
    run(module, *inputs(seed=3))
    assert module.current_max_attn_logits is top, "evaluation must not count"


def test_checkpoint_state_is_the_stock_modules():
    metadata = {"dp_cp_group": ProcessGroupCollection.use_mpu_process_groups().dp_cp}
    for kind in ("vanilla", "off-by-one"):
        assert build(settings=config(softmax_type=kind)).sharded_state_dict() == {}
    settings = config(softmax_type="learnable")
    ours = build(settings=settings).sharded_state_dict("layer.", metadata=metadata)
    stock = build(DotProductAttention, settings).sharded_state_dict("layer.", metadata=metadata)
    assert list(ours) == list(stock) == ["layer.softmax_offset"]
    mine, theirs = ours["layer.softmax_offset"], stock["layer.softmax_offset"]
    assert (mine.key, mine.global_shape) == (theirs.key, theirs.global_shape)
    assert build(settings=settings).sharded_state_dict()  # metadata None is allowed


def test_sinks_are_marked_tensor_parallel():
    """Unmarked (as in Megatron-Core), ranks above 0 drop their gradient from norm and clipping."""
    offset = build(settings=config(softmax_type="learnable")).softmax_offset
    assert offset.tensor_model_parallel is True and offset.partition_dim == 0


def test_bf16_output_keeps_its_type():
    q, k, fused = inputs(dtype=torch.bfloat16)
    out = run(build(settings=config(bf16=True, params_dtype=torch.bfloat16)), q, k, fused)
    assert out.dtype == torch.bfloat16
    exact = run(build(), *(x.float() for x in (q, k, fused)))
    torch.testing.assert_close(out.float(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("option", ["fp8_dot_product_attention", "fp8_multi_head_attention"])
def test_fp8_attention_is_refused(option):
    settings = config()
    setattr(settings, option, True)
    with pytest.raises(ValueError, match=f"{option} is True"):
        build(settings=settings)


def test_what_it_cannot_do_is_refused():
    module = build()
    q, k, fused = inputs()
    v = fused[..., -DIM:]
    with pytest.raises(ValueError, match=r"attention_bias of shape \(1, 1, 24, 24\)"):
        module(q, k, v, None, attention_bias=torch.zeros(1, 1, S, S))
    with pytest.raises(ValueError, match="attn_mask_type is arbitrary"):
        mask = torch.zeros(1, 1, S, S, dtype=torch.bool)
        module(q, k, v, mask, attn_mask_type=AttnMaskType.arbitrary)
    with pytest.raises(ValueError, match="called with qr, x"):
        module(q, k, v, None, x=q, qr=q)
    with pytest.raises(ValueError, match="local_cp_size is 2"):
        packed = PackedSeqParams(qkv_format="sbhd", local_cp_size=2)
        module(q, k, v, None, packed_seq_params=packed)
    with pytest.raises(ValueError, match="'mcore_local' is a Megatron-Core module of its own"):
        build(backend="mcore_local")


def test_packed_input_is_refused_by_a_backend_without_it(monkeypatch):
    module = build()
    row = dataclasses.replace(BACKENDS["reference"], thd=False)
    monkeypatch.setitem(BACKENDS, "reference", row)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, S]))
    q, k, v = torch.randn(S, HEADS, DIM), torch.randn(S, GROUPS, DIM), torch.randn(S, GROUPS, DIM)
    with pytest.raises(BackendError, match="packed sequences"):
        module(q, k, v, None, packed_seq_params=packed)


def test_an_ignored_mask_is_named_once(caplog):
    _warn_mask_ignored.cache_clear()
    module = build()
    q, k, fused = inputs()
    mask = torch.ones(S, S).triu(1).bool().view(1, 1, S, S)
    with caplog.at_level(logging.WARNING, logger="megatron_patch.attention.core"):
        outputs = [module(q, k, fused[..., -DIM:], mask) for _ in range(2)]
    assert torch.equal(outputs[0], run(module, q, k, fused))
    assert [r.message for r in caplog.records if "is ignored" in r.message] == [
        caplog.records[0].message
    ]


def test_context_parallelism_is_refused_where_a_backend_or_the_heads_cannot(monkeypatch):
    settings = config()
    settings.context_parallel_size = 8
    with pytest.raises(ValueError, match=rf"{HEADS} \(of one .*\) is not a multiple of 8. Use"):
        build(settings=settings, cp_comm_type="a2a")
    with pytest.raises(ValueError, match="'a2a\\+p2p' needs two groups"):
        build(settings=settings, cp_comm_type="a2a+p2p")
    module = build(settings=settings, cp_comm_type="all_gather")
    assert module.selection.kind.endswith("context parallel all_gather")
    monkeypatch.setitem(BACKENDS, "reference", dataclasses.replace(BACKENDS["reference"], cp=False))
    with pytest.raises(BackendError, match=r"context parallelism \(8 ranks\)"):
        build(settings=settings)


def test_spec_of_each_backend_takes_its_own_options():
    spec = core_attention_spec("stable_flash", stabilizer="none")
    assert spec.module is CoreAttention
    assert spec.params == {"backend": "stable_flash", "options": {"stabilizer": "none"}}
    spec = core_attention_spec("reference", gradient_wire="bf16")
    assert spec.params["options"] == {"gradient_wire": "bf16"}
    assert core_attention_spec("mcore_local") is DotProductAttention
    with pytest.raises(ValueError, match="takes only gradient_wire, head_groups; got stabilizer"):
        core_attention_spec("reference", stabilizer="none")
    with pytest.raises(ValueError, match=r"takes only stabilizer, .*head_groups; got stabiliser"):
        core_attention_spec("stable_flash", stabiliser="none")
    for name in ("stabilizer", "o_lo", "backward"):
        with pytest.raises(ValueError, match=f"^{name} is 'nonsense'; allowed: "):
            core_attention_spec("stable_flash", **{name: "nonsense"})
    with pytest.raises(ValueError, match=r"^o_lo 'int8' has no effect: stabilizer 'none'"):
        core_attention_spec("stable_flash", stabilizer="none", o_lo="int8")
    with pytest.raises(ValueError, match="takes no options; got gradient_wire"):
        core_attention_spec("sdpa_flash", gradient_wire="bf16")
    with pytest.raises(ValueError, match="'flash' is not one of"):
        core_attention_spec("flash")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.parametrize(
    "changes", [{}, {"window_size": (5, 0)}, {"softmax_type": "learnable"}], ids=str
)
def test_our_kernels_agree_with_the_reference(changes):
    """On a CPU through Triton's interpreter; test_gpu_backends.py has the compiled kernels."""
    settings = config(bf16=True, params_dtype=torch.bfloat16, **changes)
    results = []
    for backend in ("reference", "stable_flash"):
        module = build(settings=settings, backend=backend)
        if module.softmax_offset is not None:
            with torch.no_grad():
                module.softmax_offset.copy_(torch.linspace(-1, 2, HEADS))
        q, k, fused = inputs(dtype=torch.bfloat16)
        out = run(module, q, k, fused)
        out.backward(torch.ones_like(out))
        results.append([x.float() for x in (out, q.grad, k.grad, fused.grad)])
    for exact, ours in zip(*results, strict=True):
        assert (ours - exact).norm() <= 0.01 * exact.norm() + 1e-6


def test_int8_attention_trains_through_the_module_and_takes_its_settings(caplog):
    """On a CPU by the oracle; without QK-norm it warns."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 1}
    settings = config(**sizes, bf16=True)
    q = torch.randn(S, B, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(S, B, 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    _warn_without_qk_norm.cache_clear()
    with caplog.at_level(logging.WARNING):
        module = build(settings=settings, backend="sage_int8")
    assert "diverged so at 2.1M tokens" in caplog.text and "model.qk_layernorm" in caplog.text
    out = module(q, k, v, None, attn_mask_type=AttnMaskType.causal)
    exact = build(settings=config(**sizes, bf16=True))
    wanted = exact(q, k, v, None, attn_mask_type=AttnMaskType.causal)
    for x, y in zip(
        [out, *torch.autograd.grad(out.sum(), (q, k, v))],
        [wanted, *torch.autograd.grad(wanted.sum(), (q, k, v))],
        strict=True,
    ):
        assert (x - y).float().norm() < 0.05 * y.float().norm()
    module.use("sage_int8", normalizer="paper", scales="tile")
    other = module(q, k, v, None, attn_mask_type=AttnMaskType.causal)
    assert not torch.equal(other, out)
    caplog.clear()
    _warn_without_qk_norm.cache_clear()
    build(settings=config(**sizes, bf16=True, qk_layernorm=True), backend="sage_int8")
    assert not caplog.text
    with pytest.raises(ValueError, match="takes no options; got smooth_k"):
        core_attention_spec("sdpa_flash", smooth_k=True)
