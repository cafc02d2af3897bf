"""Weights of Hugging Face models: one table of names a family, and the safetensors files.

Shape legend: h hidden size, d head dim, n query heads, g key/value heads, f width of the MLP, e
expert, v vocabulary. Ours are those of a whole model on one rank; linear weights are [out, in].
Rotary channels are paired half by half in both (channel i with i + d / 2), so queries and keys need
no permutation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_patch.checkpoint.inspect import RequestError
from megatron_patch.schema import model as shape
from megatron_patch.schema.model import ModelConfig

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
PREFIX = re.compile(r"^(transformer|model)\.")
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(bias|masked_bias))$")
"""Constants that older files hold beside the weights."""
Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one of our tensors and those of a file become each other, without rounding."""

    fuse: Callable[[ModelConfig, Tensors], torch.Tensor]
    split: Callable[[ModelConfig, torch.Tensor], Tensors]


def _fuse_qkv(model: ModelConfig, parts: Tensors) -> torch.Tensor:
    """[n d, ...], [g d, ...], [g d, ...] to Megatron's g x (n / g queries, key, value) of d."""
    g, d = shape.query_groups(model), shape.attention_head_dim(model)
    if [part.shape[0] for part in parts] != [model.num_attention_heads * d, g * d, g * d]:
        raise RuntimeError("not the heads of the model")
    rows = [part.reshape(g, -1, d, *part.shape[1:]) for part in parts]
    return torch.cat(rows, dim=1).flatten(0, 2)


def _split_qkv(model: ModelConfig, fused: torch.Tensor) -> Tensors:
    g, d = shape.query_groups(model), shape.attention_head_dim(model)
    rows = fused.reshape(g, -1, d, *fused.shape[1:])
    return [part.flatten(0, 2) for part in rows.split([rows.shape[1] - 2, 1, 1], dim=1)]


SAME = Kind(lambda model, parts: parts[0], lambda model, x: [x])
TRANSPOSED = Kind(lambda model, parts: parts[0].t(), lambda model, x: [x.t()])
"""GPT-2's Conv1D holds [in, out]; its biases pass unchanged (`Tensor.t` of one dimension)."""
QKV = Kind(_fuse_qkv, _split_qkv)
PACKED = Kind(
    lambda model, parts: _fuse_qkv(model, list(parts[0].t().chunk(3))),
    lambda model, x: [torch.cat(_split_qkv(model, x)).t()],
)
"""GPT-2: [h, 3 h], all queries, then all keys, then all values."""
GATED = Kind(
    lambda model, parts: torch.stack(parts).flatten(0, 1), lambda model, x: list(x.chunk(2))
)
"""SwiGLU's gate [f, h] above the projection [f, h]."""

Rule = tuple[str, Kind, tuple[str, ...]]
"""Our name, and the names in the file; {n} layer, {e} expert, {p} weight or bias."""

GPT2: tuple[Rule, ...] = (
    ("embedding.word_embeddings.weight", SAME, ("transformer.wte.weight",)),
    ("embedding.position_embeddings.weight", SAME, ("transformer.wpe.weight",)),
    ("{L}.input_layernorm.{p}", SAME, ("{H}.ln_1.{p}",)),
    ("{L}.self_attention.linear_qkv.{p}", PACKED, ("{H}.attn.c_attn.{p}",)),
    ("{L}.self_attention.linear_proj.{p}", TRANSPOSED, ("{H}.attn.c_proj.{p}",)),
    ("{L}.pre_mlp_layernorm.{p}", SAME, ("{H}.ln_2.{p}",)),
    ("{L}.mlp.linear_fc1.{p}", TRANSPOSED, ("{H}.mlp.c_fc.{p}",)),
    ("{L}.mlp.linear_fc2.{p}", TRANSPOSED, ("{H}.mlp.c_proj.{p}",)),
    ("decoder.final_layernorm.{p}", SAME, ("transformer.ln_f.{p}",)),
    ("output_layer.weight", SAME, ("lm_head.weight",)),
)
LLAMA: tuple[Rule, ...] = (
    ("embedding.word_embeddings.weight", SAME, ("model.embed_tokens.weight",)),
    ("{L}.input_layernorm.weight", SAME, ("{H}.input_layernorm.weight",)),
    ("{L}.self_attention.linear_qkv.{p}", QKV,
     ("{H}.self_attn.q_proj.{p}", "{H}.self_attn.k_proj.{p}", "{H}.self_attn.v_proj.{p}")),
    ("{L}.self_attention.q_layernorm.weight", SAME, ("{H}.self_attn.q_norm.weight",)),
    ("{L}.self_attention.k_layernorm.weight", SAME, ("{H}.self_attn.k_norm.weight",)),
    ("{L}.self_attention.linear_proj.{p}", SAME, ("{H}.self_attn.o_proj.{p}",)),
    ("{L}.pre_mlp_layernorm.weight", SAME, ("{H}.post_attention_layernorm.weight",)),
    ("{L}.mlp.linear_fc1.{p}", GATED, ("{H}.mlp.gate_proj.{p}", "{H}.mlp.up_proj.{p}")),
    ("{L}.mlp.linear_fc2.{p}", SAME, ("{H}.mlp.down_proj.{p}",)),
    ("decoder.final_layernorm.weight", SAME, ("model.norm.weight",)),
    ("output_layer.weight", SAME, ("lm_head.weight",)),
)  # fmt: skip
EXPERT = "{L}.mlp.experts.local_experts.{e}"
QWEN_MOE: tuple[Rule, ...] = (
    *LLAMA,
    ("{L}.mlp.router.weight", SAME, ("{H}.mlp.gate.weight",)),
    (EXPERT + ".linear_fc1.weight", GATED,
     ("{H}.mlp.experts.{e}.gate_proj.weight", "{H}.mlp.experts.{e}.up_proj.weight")),
    (EXPERT + ".linear_fc2.weight", SAME, ("{H}.mlp.experts.{e}.down_proj.weight",)),
)  # fmt: skip
MIXTRAL: tuple[Rule, ...] = (
    *LLAMA,
    ("{L}.mlp.router.weight", SAME, ("{H}.block_sparse_moe.gate.weight",)),
    (EXPERT + ".linear_fc1.weight", GATED,
     ("{H}.block_sparse_moe.experts.{e}.w1.weight", "{H}.block_sparse_moe.experts.{e}.w3.weight")),
    (EXPERT + ".linear_fc2.weight", SAME, ("{H}.block_sparse_moe.experts.{e}.w2.weight",)),
)  # fmt: skip
TABLES = {
    "gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA,
    "qwen3_moe": QWEN_MOE, "mixtral": MIXTRAL,
}  # fmt: skip
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Ours whose rows are token ids, padded."""


def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name.replace("{L}", "decoder.layers.{n}"))
    for key, group in (("n", r"\d+"), ("e", r"\d+"), ("p", "weight|bias")):
        text = text.replace(re.escape("{" + key + "}"), f"(?P<{key}>{group})")
    return re.compile(text)


def locate(family: str, name: str) -> tuple[Kind, list[str]]:
    """How one of our parameters is made of tensors of the family, and their names."""
    layers = "transformer.h.{n}" if family == "gpt2" else "model.layers.{n}"
    for ours, kind, theirs in TABLES[family]:
        match = _pattern(ours).fullmatch(name)
        if match is not None:
            names = [t.replace("{H}", layers).format(**match.groupdict()) for t in theirs]
            return kind, names
    raise AssertionError(f"{name} has no row in the table of {family}")


# -------------------------------------------------------------------------------------- files


class Files:
    """The safetensors files of a folder, opened as they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises RequestError: there are none, or the index is not one."""
        self.folder = folder
        self._open: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            try:
                where = json.loads((folder / INDEX).read_bytes())["weight_map"]
                self._where = {str(name): str(file) for name, file in where.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RequestError(f"{folder / INDEX} is no index: {error!r:.200}") from None
        elif (folder / SINGLE).is_file():
            self._where = {}
            self._where = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise RequestError(
                f"{folder} has neither {SINGLE} nor {INDEX}; other formats become safetensors with "
                "transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        # Files of a model without its head have no prefix.
        self.names = {PREFIX.sub("", name): name for name in self._where}

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            if not FILE.fullmatch(name):
                raise RequestError(
                    f"{self.folder / INDEX} names {name[:80]!r}, not a file beside it"
                )
            try:
                self._open[name] = safe_open(str(self.folder / name), framework="pt")
            except (OSError, SafetensorError) as error:
                raise RequestError(f"{self.folder / name} cannot be read: {error}") from None
        return self._open[name]

    def get(self, name: str) -> torch.Tensor:
        """A tensor by its full name; KeyError where it is not there."""
        from safetensors import SafetensorError

        stored = self.names.get(PREFIX.sub("", name))
        if stored is None:
            raise KeyError(name)
        try:
            return self._file(self._where[stored]).get_tensor(stored)
        except SafetensorError as error:
            raise RequestError(f"{stored} cannot be read: {error}") from None

    def types(self) -> set[str]:
        """Element types of all tensors, as the files name them."""
        return {
            self._file(file).get_slice(name).get_dtype()
            for name, file in self._where.items()
            if not BUFFERS.search(name)
        }


def fill(
    model: torch.nn.Module, config: ModelConfig, family: str, files: Files, vocab: int
) -> None:
    """Copy every tensor of the files into a whole model, padded rows of the vocabulary included.

    A padded row is the mean of all rows: its logit is the mean logit, and as exp is convex, k such
    rows enlarge the denominator of the softmax over v tokens by at most k / v. Zeros could dominate
    it, since the logits of a model may all be negative.

    Raises RequestError: a tensor is missing, left over, or of another shape; naming it.
    """
    problems: list[str] = []
    left = {name for name in files.names if not BUFFERS.search(name)}
    for name, parameter in model.named_parameters():
        kind, theirs = locate(family, name)
        try:
            parts = [files.get(their) for their in theirs]
        except KeyError as error:
            problems.append(f"{error.args[0]}: not in the files")
            continue
        left -= {PREFIX.sub("", their) for their in theirs}
        try:
            value = kind.fuse(config, parts)
        except RuntimeError:
            value = None
        rows = parameter.shape[0]
        if value is not None and name in VOCABULARY and value.shape[0] == vocab < rows:
            mean = value.float().mean(dim=0, keepdim=True).to(value.dtype)
            value = torch.cat([value, mean.expand(rows - vocab, -1)])
        if value is None or value.shape != parameter.shape:
            shapes = ", ".join(f"{t} {list(p.shape)}" for t, p in zip(theirs, parts, strict=True))
            problems.append(f"{shapes}: config.json makes {list(parameter.shape)} of {name}")
            continue
        with torch.no_grad():
            parameter.copy_(value)
    if config.tie_embeddings and "lm_head.weight" in left:
        left.discard("lm_head.weight")
        embedding = files.get(locate(family, VOCABULARY[0])[1][0])
        if not torch.equal(files.get("lm_head.weight"), embedding):
            problems.append(
                "lm_head.weight differs from the embedding, but tie_word_embeddings is true"
            )
    problems += [
        f"{files.names[name]}: nothing in the model is made of it" for name in sorted(left)
    ]
    if problems:
        more = [f"... and {len(problems) - 12} more"] if len(problems) > 12 else []
        text = f"the weights in {files.folder} do not fit its config.json:\n  "
        raise RequestError(text + "\n  ".join(problems[:12] + more))


def pieces(
    model: torch.nn.Module, config: ModelConfig, family: str, vocab: int
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Every tensor of the family by name, each made when it is asked for."""
    for name, parameter in model.named_parameters():
        kind, theirs = locate(family, name)
        whole = parameter.detach()
        if name in VOCABULARY:
            whole = whole[:vocab]
        for index, their in enumerate(theirs):
            yield their, partial(_piece, kind, config, whole, index)


def _piece(kind: Kind, config: ModelConfig, whole: torch.Tensor, index: int) -> torch.Tensor:
    return kind.split(config, whole)[index].contiguous()


def write(
    folder: Path, tensors: Iterator[tuple[str, Callable[[], torch.Tensor]]], *, shard: int
) -> Mapping[str, str]:
    """Write tensors into files of at most ``shard`` bytes (one tensor at least); name -> file."""
    from safetensors.torch import save_file

    made = list(tensors)
    groups: list[list[tuple[str, Callable[[], torch.Tensor]]]] = [[]]
    room, total = shard, 0
    for name, make in made:
        size = (piece := make()).numel() * piece.element_size()
        if size > room and groups[-1]:
            groups.append([])
            room = shard
        groups[-1].append((name, make))
        room, total = room - size, total + size
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = SINGLE
        if len(groups) > 1:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(
            {n: make().clone() for n, make in group}, folder / file, metadata={"format": "pt"}
        )
        where |= {name: file for name, _ in group}
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return where
