"""Hugging Face models: import, export, round trip bit for bit, the same logits, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_patch.checkpoint import hf, hf_weights

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 250, 48
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "norm_topk_prob": True, "head_dim": 8}  # fmt: skip
CASES = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied, exact gelu": ("GPT2", GPT2 | {"activation_function": "gelu", "n_inner": 40,
                                                 "tie_word_embeddings": False}),
    "llama": ("Llama", SHAPE),
    "llama, biases, tied": ("Llama", SHAPE | {"attention_bias": True, "mlp_bias": True,
                                              "tie_word_embeddings": True}),
    "llama 3.1": ("Llama", SHAPE | {"rope_parameters": LLAMA3}),
    "mistral, window": ("Mistral", SHAPE | {"sliding_window": 8}),
    "mixtral": ("Mixtral", SHAPE | {"num_local_experts": 4}),
    "qwen2, yarn": ("Qwen2", SHAPE | {"rope_parameters": YARN}),
    "qwen2, one windowed layer": ("Qwen2", SHAPE | {"use_sliding_window": True,
                                                    "sliding_window": 8, "max_window_layers": 1}),
    "qwen3, wide heads": ("Qwen3", SHAPE | {"head_dim": 16}),
    "qwen3 moe, one dense layer": ("Qwen3Moe", SHAPE | EXPERTS | {"mlp_only_layers": [0]}),
}  # fmt: skip


def made(folder: Path, name: str, dtype: torch.dtype = torch.float32, **save: str) -> Path:
    """The folder of a small model of transformers, every parameter random."""
    kind, shape = CASES[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    whole = model(config).to(dtype)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    whole.save_pretrained(folder, **save)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = hf_weights.Files(folder)
    return {name: files.get(name) for name in files.names.values()}


def our_logits(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    found = hf._find(checkpoint, None)
    with hf._one_rank():
        model, _, _ = hf.load_whole(found)
        positions = torch.arange(tokens.shape[1]).repeat(tokens.shape[0], 1)
        with torch.no_grad():
            return model.eval()(tokens, positions, None)


@pytest.mark.parametrize("name", CASES)
def test_round_trip_is_exact_and_logits_are_those_of_transformers(name, tmp_path):
    source = made(tmp_path / "in", name)
    found = hf.import_model(source, tmp_path / "checkpoints")
    hf.export_model(tmp_path / "checkpoints", tmp_path / "out")
    before, after = tensors(source), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)

    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = again.eval()(tokens).logits
    ours = our_logits(found.path, tokens)
    assert ours.shape[-1] == 256  # 250 padded
    torch.testing.assert_close(ours[..., :VOCAB], theirs, rtol=2e-4, atol=2e-4)
    assert theirs.std() > 0.1
