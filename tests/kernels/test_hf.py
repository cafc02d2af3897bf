"""`attn_implementation="stable_attention"` in Hugging Face transformers, against its eager one."""

from __future__ import annotations

import pytest
import torch
import transformers

from stable_attention import hf

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
    _, true = loss_and_gradients(kind, "eager", torch.float32, given, **changes)
    _, peer = loss_and_gradients(kind, "eager", torch.bfloat16, given, **changes)
    _, ours = loss_and_gradients(kind, hf.NAME, torch.bfloat16, given, **changes)
    assert ours.numel() == true.numel()
    assert (ours - true).norm() <= 2 * (peer - true).norm() + 2**-9 * true.norm()


def test_packing_is_seen_and_matters() -> None:
    """Without the position ids the documents attend to each other: another gradient."""
    alone = {"size": (1, 37)}
    _, packed = loss_and_gradients("Llama", hf.NAME, torch.bfloat16, PACKED)
    _, mixed = loss_and_gradients("Llama", hf.NAME, torch.bfloat16, alone)
    assert (packed - mixed).norm() > 0.1 * mixed.norm()


def test_positions_that_change_in_place_are_read_again() -> None:
    positions = torch.arange(12)[None]
    assert hf._packed(positions) is None
    positions[0, 5:] -= 5
    assert hf._packed(positions).tolist() == [0, 5, 12]
    assert hf._packed(positions).dtype == torch.int32
    assert hf._packed(torch.arange(7, 19)[None]) is None


def test_decoding_with_a_cache() -> None:
    """One token at a time over a key-value cache: the logits of the whole sequence at once."""
    ids = torch.arange(14)[None]

    def decoded(implementation: str) -> torch.Tensor:
        module = model("Llama", implementation, torch.bfloat16).eval()
        with torch.no_grad():
            state = module(input_ids=ids[:, :9], use_cache=True)
            logits = [state.logits]
            for i in range(9, 14):
                state = module(
                    input_ids=ids[:, i : i + 1],
                    past_key_values=state.past_key_values,
                    use_cache=True,
                )
                logits.append(state.logits)
        return torch.cat(logits, 1).double()

    with torch.no_grad():
        true = model("Llama", "eager", torch.float32).eval()(input_ids=ids).logits.double()
    ours, peer = decoded(hf.NAME), decoded("eager")
    assert (ours - true).norm() <= 2 * (peer - true).norm()


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
