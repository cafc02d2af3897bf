"""`attn_implementation="stable_attention"` in Hugging Face transformers, against its eager one."""

from __future__ import annotations

import sys
import threading
from inspect import signature

import pytest
import torch
import transformers
from hf_models import make_mask
from oracle import oracle_attention
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from stable_attention import hf
from stable_attention.hf import attention

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hf.register()


def model(kind: str, implementation: str, dtype: torch.dtype, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **changes)
    build = getattr(transformers, f"{kind}ForCausalLM")._from_config
    return build(config, attn_implementation=implementation).to(dtype)


def loss_and_gradients(kind, implementation, dtype, given, **changes):
    module = model(kind, implementation, dtype, **changes).train()
    torch.manual_seed(1)
    ids = torch.randint(0, 64, given.get("size", (2, 37)))
    extra = {name: value for name, value in given.items() if name != "size"}
    result = module(input_ids=ids, labels=ids, use_cache=False, **extra)
    result.loss.backward()
    grads = [p.grad.flatten().double() for p in module.parameters() if p.grad is not None]
    return result.loss.item(), torch.cat(grads)


PACKED = {
    "size": (1, 37),
    "position_ids": torch.cat([torch.arange(20), torch.arange(11), torch.arange(6)])[None],
}
CASES = {
    "llama": ("Llama", {}, {}),
    "packed documents": ("Llama", PACKED, {}),
    "sliding window": ("Mistral", {}, {"sliding_window": 8}),
    "softcap": ("Gemma2", {}, {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "sinks": (
        "GptOss",
        {},
        {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_models_agree_with_eager(case: str) -> None:
    """Loss and all gradients: no further from float32 eager than twice what BF16 eager is."""
    kind, given, changes = CASES[case]
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip("not in this transformers")
    _, true = loss_and_gradients(kind, "eager", torch.float32, given, **changes)
    _, peer = loss_and_gradients(kind, "eager", torch.bfloat16, given, **changes)
    _, ours = loss_and_gradients(kind, hf.NAME, torch.bfloat16, given, **changes)
    assert ours.numel() == true.numel()
    assert (ours - true).norm() <= 2 * (peer - true).norm() + 2**-9 * true.norm()


def test_positions_that_change_in_place_are_read_again() -> None:
    positions = torch.arange(12)[None]
    assert attention._packed(positions, (1, 12)) is None
    positions[0, 5:] -= 5
    assert attention._packed(positions, (1, 12)).tolist() == [0, 5, 12]
    assert attention._packed(positions, (1, 12)).dtype == torch.int32
    assert attention._packed(positions, (2, 12)).tolist() == [0, 5, 12, 17, 24]
    assert attention._packed(torch.arange(7, 19)[None], (1, 12)) is None


def test_threads_keep_their_own_documents() -> None:
    """Another model's forward came between look-up and answer, with its documents."""
    ours, theirs = (torch.cat([torch.arange(n), torch.arange(12 - n)])[None] for n in (3, 7))

    def between_lines(frame, event, _):
        if frame.f_code is not attention._packed.__code__:
            return None
        if event == "line":
            thread = threading.Thread(target=attention._packed, args=(theirs, (1, 12)))
            thread.start()
            thread.join()
        return between_lines

    before = sys.gettrace()
    sys.settrace(between_lines)
    try:
        found = attention._packed(ours, (1, 12))
    finally:
        sys.settrace(before)
    assert found is not None and found.tolist() == [0, 3, 12]


def test_what_is_not_supported_is_refused() -> None:
    module = model("Llama", hf.NAME, torch.bfloat16).eval()
    ids = torch.arange(9)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="Pack sequences without padding"):
        module(input_ids=ids, attention_mask=mask)
    q = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="cache"):
        hf.attention_forward(module, q, q, q, cache=object())


def tiny_llama4(implementation: str, dtype: torch.dtype, chunk: int):
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 3}
    config = transformers.Llama4TextConfig(
        **SHAPE,
        **experts,
        intermediate_size_mlp=64,
        attention_chunk_size=chunk,
        no_rope_layers=[1, 1],
        pad_token_id=0,
    )
    build = transformers.Llama4ForCausalLM._from_config
    return build(config, attn_implementation=implementation).to(dtype).eval()


def test_chunked_attention_longer_than_a_chunk_is_refused() -> None:
    """Llama 4's local layers: the kernels would silently attend across chunks."""
    ids = torch.arange(20)[None]
    with pytest.raises(ValueError, match="in chunks of 8 for 20 keys"):
        tiny_llama4(hf.NAME, torch.bfloat16, 8)(input_ids=ids)
    with torch.no_grad():
        true = tiny_llama4("eager", torch.float32, 20)(input_ids=ids).logits.double()
        peer = tiny_llama4("eager", torch.bfloat16, 20)(input_ids=ids).logits.double()
        ours = tiny_llama4(hf.NAME, torch.bfloat16, 20)(input_ids=ids).logits.double()
    assert (ours - true).norm() <= 2 * (peer - true).norm()


def masks(batch: int = 1, length: int = 8, create=create_causal_mask, **options):
    """What transformers hands the layers of a model as their mask."""
    config = transformers.LlamaConfig(sliding_window=4)
    config.sliding_window = 4  # older ones of Llama know none
    config._attn_implementation = hf.NAME
    return make_mask(create, config, torch.zeros(batch, length, 16), **options)


RESTARTING = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
REFUSED = {
    "prefix LM": ({"or_mask_function": lambda b, h, q, k: k < 4}, "a function of"),
    "joined mask": ({"and_mask_function": lambda b, h, q, k: k > q - 2}, "a function of"),
    "blocks": ({"block_sequence_ids": torch.tensor([[0, 0, 0, 1, 1, -1, -1, -1]])}, "blockwise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_are_functions_are_refused(name: str) -> None:
    """FlashAttention's mask of transformers is None for each of them: another model."""
    options, text = REFUSED[name]
    if name == "blocks" and "block_sequence_ids" not in signature(create_causal_mask).parameters:
        pytest.skip("not in this transformers")
    for create in (create_causal_mask, create_sliding_window_causal_mask):
        with pytest.raises(ValueError, match=text):
            masks(create=create, **options)


def test_masks_carry_what_the_kernels_mask() -> None:
    """Causal, window, documents; padding is seen, and one decoding step is not packed."""
    for create, window in (
        (create_causal_mask, None),
        (create_sliding_window_causal_mask, (3, 0)),
    ):
        for options, offsets in (
            ({}, None),
            ({"position_ids": RESTARTING}, [0, 4, 8]),
            ({"batch": 2, "position_ids": RESTARTING}, [0, 4, 8, 12, 16]),
            ({"batch": 2, "position_ids": RESTARTING.repeat(2, 1)}, [0, 4, 8, 12, 16]),
            ({"batch": 2, "position_ids": torch.arange(8)[None]}, None),
            ({"length": 1, "position_ids": torch.zeros(1, 1, dtype=torch.int64)}, None),
        ):
            mask = masks(create=create, **options)
            assert (mask.causal, mask.window, mask.padded) == (True, window, None)
            assert (mask.offsets if offsets is None else mask.offsets.tolist()) == offsets
        ones = torch.ones(2, 8, dtype=torch.bool)
        assert masks(create=create, batch=2, attention_mask=ones).padded is None
        ones[0, 0] = False
        assert masks(create=create, batch=2, attention_mask=ones).padded == (2, 8)


USES = {
    "tensor + mask": lambda x, mask: x + mask,
    "mask + tensor": lambda x, mask: mask + x,
    "torch.where": lambda x, mask: torch.where(mask, x, x),
    "masked_fill": lambda x, mask: x.masked_fill(mask, 0.0),
    "slice": lambda x, mask: mask[:, :, :, :4],
    "shape": lambda x, mask: mask.shape,
    "to": lambda x, mask: mask.to(x.dtype),
    "==": lambda x, mask: mask == 0,
    "~": lambda x, mask: ~mask,
    "1.0 -": lambda x, mask: 1.0 - mask,
    "truth": lambda x, mask: bool(mask),
    "cat": lambda x, mask: torch.cat([x, mask]),
}


@pytest.mark.parametrize("use", USES)
def test_a_mask_is_no_tensor(use: str) -> None:
    with pytest.raises(ValueError, match="the model uses the mask itself"):
        USES[use](torch.zeros(1, 4, 8, 8), masks())


def test_static_cache_longer_than_its_tokens_is_refused() -> None:
    """Its empty slots come as keys, and only a mask says so."""
    module = model("Llama", hf.NAME, torch.bfloat16).eval()
    given = {"config": module.config, "max_cache_len": 32}
    if "max_batch_size" in signature(transformers.StaticCache.__init__).parameters:
        given |= {"max_batch_size": 1, "dtype": torch.bfloat16}
    cache = transformers.StaticCache(**given)
    with pytest.raises(ValueError, match="of 32 keys for 9 tokens"):
        module(input_ids=torch.arange(9)[None], past_key_values=cache, use_cache=True)


def test_offsets_need_a_batch_of_one() -> None:
    q = torch.zeros(2, 2, 4, 16, dtype=torch.bfloat16)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="a batch of 1"):
        hf.attention_forward(torch.nn.Module(), q, q, q, cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def test_offsets_of_keys_alone_are_not_left_out() -> None:
    q = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16)
    cu = torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q is None beside cu_seq_lens_k"):
        hf.attention_forward(torch.nn.Module(), q, q, q, cu_seq_lens_k=cu)


@pytest.mark.parametrize(
    "name", ["position_bias", "head_mask", "indices", "block_indices", "sinks"]
)
def test_arguments_of_other_attentions_are_refused(name: str) -> None:
    """T5's biases, sparse attention's keys: swallowed, they give another model's numbers."""
    q = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"^{name} is set"):
        hf.attention_forward(torch.nn.Module(), q, q, q, **{name: torch.zeros(1, 2, 4, 4)})
    out, _ = hf.attention_forward(torch.nn.Module(), q, q, q, **{name: None})
    assert out.shape == (1, 4, 2, 16)


def test_window_of_a_model_that_is_not_causal_reaches_both_ways() -> None:
    """ModernBERT: w - 1 keys before and after the query's own, as transformers' own kernels."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16).bfloat16() for _ in range(3))
    module = torch.nn.Module()
    module.is_causal = False
    out, _ = hf.attention_forward(module, q, k, v, sliding_window=5)
    true = oracle_attention(q, k, v, layout="bhsd", window=(4, 4)).out.transpose(1, 2)
    assert (out.double() - true).abs().max() <= 2**-6


SHAPES = {
    "heads": (1, 2, 2, 9, 16, 16),
    "shared heads": (2, 4, 2, 9, 16, 16),
    "another d of v": (2, 2, 1, 9, 16, 24),
    "one token": (2, 2, 2, 1, 16, 16),
    "documents": (1, 2, 2, 8, 16, 16),
}


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_are_contiguous(name: str) -> None:
    """Models call .view on them."""
    b, h, kv_heads, s, d, dv = SHAPES[name]
    q, k, v = (
        torch.randn(b, n, s, w).bfloat16() for n, w in ((h, d), (kv_heads, d), (kv_heads, dv))
    )
    given = {"position_ids": RESTARTING} if name == "documents" else {}
    out, weights = hf.attention_forward(torch.nn.Module(), q, k, v, **given)
    assert out.shape == (b, s, h, dv) and out.is_contiguous() and weights is None


UNDER_AUTOCAST = [
    ("Llama", torch.bfloat16),
    ("Llama", torch.float16),
    ("Mistral", torch.float16),
    ("Gemma2", torch.bfloat16),
    ("Qwen3", torch.bfloat16),  # q and k in float32 by their norm, too
]


@pytest.mark.parametrize(("kind", "dtype"), UNDER_AUTOCAST)
def test_autocast_of_float32_weights(kind: str, dtype: torch.dtype) -> None:
    """``Trainer(bf16=True)``: rotary positions leave q and k in float32; sdpa casts them."""

    def gradients(implementation: str, enabled: bool) -> torch.Tensor:
        module = model(kind, implementation, torch.float32).train()
        ids = torch.arange(40).view(2, 20)
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten().double() for p in module.parameters()])

    true, peer = gradients("eager", False), gradients("eager", True)
    ours = gradients(hf.NAME, True)
    assert (ours - true).norm() <= 2 * (peer - true).norm() + 2**-9 * true.norm()
    with pytest.raises(ValueError, match=r"q\.dtype is torch\.float32"):
        gradients(hf.NAME, False)
