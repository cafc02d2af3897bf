"""Tiny Hugging Face models: of transformers, and of our own that do odd things to attention.

With `exact` in place, `stable_attention.hf` computes by the book in float32, so that whatever
differs from transformers' eager attention is the plumbing.
"""

from __future__ import annotations

from inspect import signature

import pytest
import torch
import transformers
from oracle import oracle_attention
from transformers import AttentionInterface, LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from stable_attention import hf
from stable_attention.hf import attention

ONE_GRAPH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Whether Dynamo can ask a mask function for its name; else a compiled model has a graph break."""
LENGTHS = (9, 8, 7)
TOKENS = sum(LENGTHS)
RESTARTING = torch.cat([torch.arange(n) for n in LENGTHS])[None]

VOCABULARY = {"vocab_size": 64}
SMALL = VOCABULARY | {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2),
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GPT = VOCABULARY | {
    "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_ctx": 64,
    **{f"{name}_pdrop": 0.0 for name in ("attn", "embd", "resid")},
}  # fmt: skip
OPT = VOCABULARY | {
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim", "ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2),
    "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip
XGLM = VOCABULARY | {
    "d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by the book, in float32, in the place of the kernels."""

    def compute(q, k, v, *, max_seqlen_q=None, max_seqlen_k=None, **options):
        return oracle_attention(q, k, v, compute=torch.float32, **options).out.contiguous()

    monkeypatch.setattr(attention, "stable_attention", compute)


def tiny(kind: str, implementation: str = hf.NAME, **shape) -> PreTrainedModel:
    """A model of transformers with random weights, the same for every implementation."""
    config = getattr(transformers, f"{kind}Config")(**shape or SMALL)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    build = getattr(transformers, f"{kind}{head}")._from_config
    return build(config, attn_implementation=implementation).float().train()


def gradients(model: torch.nn.Module, rows: int = 2, **given) -> torch.Tensor:
    """All gradients of one step of a language model on rows of `TOKENS` tokens."""
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (rows, TOKENS))
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False, **given).loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]  # of FSDP2
    return torch.cat([g.flatten() for g in grads])


def close(ours: torch.Tensor, true: torch.Tensor) -> bool:
    return ours.shape == true.shape and bool((ours - true).norm() <= 1e-5 * true.norm())


class OddConfig(LlamaConfig.__base__):
    model_type = "odd"


class OddAttention(torch.nn.Module):
    """One head of attention that does ``how`` with its mask and positions."""

    is_causal, num_key_value_groups = True, 1

    def __init__(self, config: OddConfig, how: str) -> None:
        super().__init__()
        self.config, self.how = config, how
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x, mask, positions, **kwargs):
        q, k, v = (y[:, None] for y in self.qkv(x).chunk(3, -1))
        if self.how in ("own", "own, masked"):
            scores = q @ k.transpose(2, 3) * 32**-0.5
            if self.how == "own, masked" and mask is not None:
                scores = scores + mask
            return (scores.softmax(-1) @ v)[:, 0]
        call = AttentionInterface().get(self.config._attn_implementation, eager_attention_forward)
        if self.how == "tensor":
            mask = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.how in ("no mask", "mask dropped", "positions only"):
            mask = None
        if self.how == "positions only":
            kwargs["position_ids"] = positions
        elif self.how != "all":
            kwargs.clear()
        out, _ = call(self, q, k, v, mask, scaling=32**-0.5, dropout=0.0, **kwargs)
        return out.reshape(x.shape)


class OddModel(PreTrainedModel):
    """Code of somebody else's: a language model of one `OddAttention`."""

    config_class = OddConfig
    how = "all"
    _supports_sdpa = True

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.embedding = torch.nn.Embedding(64, 32)
        self.attention = OddAttention(config, self.how)
        self.head = torch.nn.Linear(32, 64)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, position_ids=None, labels=None, use_cache=False, **kwargs):
        x = self.embedding(input_ids)
        mask = None
        if self.how not in ("own", "no mask", "positions only", "tensor"):
            mask = make_mask(create_causal_mask, self.config, x, position_ids=position_ids)
        logits = self.head(x + self.attention(x, mask, position_ids, **kwargs))
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def make_mask(create, config, embeds: torch.Tensor, **options):
    """What a mask function of transformers makes for a model without a cache, in any release."""
    parameters = signature(create).parameters
    name = "inputs_embeds" if "inputs_embeds" in parameters else "input_embeds"
    given = {"config": config, name: embeds, "attention_mask": None, "past_key_values": None}
    if "cache_position" in parameters:
        given["cache_position"] = torch.arange(embeds.shape[1])
    return create(**given | options)


def odd(how: str, implementation: str = hf.NAME) -> OddModel:
    kind = type("OddModel", (OddModel,), {"how": how, "__module__": __name__})
    torch.manual_seed(0)
    return kind._from_config(OddConfig(), attn_implementation=implementation).train()
