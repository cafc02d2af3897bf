"""Hugging Face models: import, export, round trip bit for bit, the same logits, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import file_size_limit
from megatron_cpu import MLA, tiny_run
from rank_pool import convert, save

from megatron_patch.checkpoint import content, hf, hf_config, hf_weights
from megatron_patch.checkpoint.errors import CheckpointError, MismatchError
from megatron_patch.checkpoint.inspect import RequestError
from megatron_patch.schema.model import MoEConfig, MTPConfig

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
    torch.testing.assert_close(ours[..., :VOCAB], theirs, rtol=2e-5, atol=5e-5)
    assert theirs.std() > 0.1


def test_bfloat16_in_several_files(tmp_path):
    source = made(tmp_path / "in", "llama", torch.bfloat16, max_shard_size="20KB")
    assert (source / hf_weights.INDEX).is_file()
    found = hf.import_model(source, tmp_path / "checkpoints", seq_length=32)
    assert found.notes[0].startswith("llama, bf16") and found.tree["model"]["seq_length"] == 32
    hf.export_model(found.path, tmp_path / "out", shard=20_000)
    before, after = tensors(source), tensors(tmp_path / "out")
    assert (tmp_path / "out" / hf_weights.INDEX).is_file()
    assert all(p.stat().st_size < 30_000 for p in (tmp_path / "out").glob("model-*"))
    assert before.keys() == after.keys() and before["lm_head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(before[n], after[n]) for n in before)
    with hf._one_rank():
        whole, _, _ = hf.load_whole(hf._find(found.path, None))
    rows = before["lm_head.weight"].float()
    padded = whole.output_layer.weight.detach()[VOCAB:]
    assert torch.equal(padded, rows.mean(0).bfloat16().expand_as(padded))

    with pytest.raises(RequestError, match=r"--out .* is there already"):
        hf.export_model(found.path, tmp_path / "out")
    with pytest.raises(RequestError, match="--vocab-size 300: the embedding has 256 rows"):
        hf.export_model(found.path, tmp_path / "more", vocab_size=300)
    with pytest.raises(RequestError, match="--vocab-size 249: the tokenizer has 250 ids"):
        hf.export_model(found.path, tmp_path / "fewer", vocab_size=VOCAB - 1)
    assert not (tmp_path / "fewer").exists()
    for place in (found.path / "hf", found.path.with_name("step_00000007.attempt-1")):
        with pytest.raises(RequestError, match=r"--out .* would make a damaged one"):
            hf.export_model(found.path, place)
        with pytest.raises(RequestError, match=r"--out .* would make a damaged one"):
            hf.import_model(source, place)
    assert hf.inspect.survey(tmp_path / "checkpoints")[0].state == "complete"


def test_a_full_disk_is_named_and_the_command_can_be_repeated(tmp_path):
    source, room = made(tmp_path / "in", "llama"), 20_000
    what = r"--out .* cannot be written \(.*File too large.*\): put it right, remove what is there"
    with file_size_limit(room), pytest.raises(RequestError, match=what):
        hf.import_model(source, tmp_path / "full")
    found = hf.import_model(source, tmp_path / "checkpoints")
    with file_size_limit(room), pytest.raises(RequestError, match=what):
        hf.export_model(found.path, tmp_path / "out")
    for place in (tmp_path / "in" / "config.json" / "x", Path("/proc/x")):  # no directory
        with pytest.raises(RequestError, match=r"--out .* cannot be written"):
            hf.export_model(found.path, place)
    shutil.rmtree(tmp_path / "out")
    hf.export_model(found.path, tmp_path / "out")


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_told(tmp_path, monkeypatch):
    """Before it is verified, and after: as checkpoint.keep_last does while a large one is read."""
    source = made(tmp_path / "in", "llama")
    for owner, name in ((hf.CheckpointStore, "check"), (hf, "read_metadata")):
        path = hf.import_model(source, tmp_path / name).path
        whole = getattr(owner, name)

        def deleted(*args, path=path, whole=whole):
            shutil.rmtree(path)
            return whole(*args)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, deleted)
            with pytest.raises(CheckpointError, match=r"not there any more: .*keep_last"):
                hf.export_model(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_weights_that_do_not_fit_are_named(tmp_path):
    from safetensors.torch import save_file

    source = made(tmp_path / "in", "qwen3, wide heads")
    found = tensors(source)
    layer = "model.layers.0.self_attn"
    found[f"{layer}.q_proj.weight"] = found[f"{layer}.q_proj.weight"].t().contiguous()
    found[f"{layer}.q_proj.bias"] = torch.zeros(64)
    del found["model.norm.weight"]
    save_file(found, source / "model.safetensors")
    with pytest.raises(RequestError) as caught:
        hf.import_model(source, tmp_path / "checkpoints")
    text = str(caught.value)
    assert "model.norm.weight: not in the files" in text
    assert f"{layer}.q_proj.weight [32, 64], " in text
    assert f"{layer}.q_proj.bias: nothing in the model is made of it" in text
    assert not (tmp_path / "checkpoints").exists()


LLAMA = SHAPE | {"model_type": "llama", "rms_norm_eps": 1e-6}
MOE = LLAMA | EXPERTS | {"model_type": "qwen3_moe"}
REFUSED = [
    (LLAMA | {"model_type": "bert"}, "model_type: 'bert' is not one of gpt2, llama"),
    (LLAMA | {"hidden_act": "gelu"}, "hidden_act: 'gelu', only 'silu'"),
    (LLAMA | {"attention_bias": True}, "attention_bias: True, mlp_bias: False"),
    (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000, at most"),
    (LLAMA | {"hidden_size": "32"}, "hidden_size: '32', int is needed"),
    ({k: v for k, v in LLAMA.items() if k != "rms_norm_eps"}, "rms_norm_eps: None, float or int"),
    (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic'"),
    (LLAMA | {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "rope.low_freq_factor: 2.0"),
    (LLAMA | {"rope_scaling": YARN | {"attention_factor": 9.0}}, "rope.attention_factor: 9.0"),
    (LLAMA | {"rope_scaling": YARN | {"mscale": 0.7}}, "rope.mscale: 0.7"),
    (LLAMA | {"rope_scaling": YARN | {"beta_fast": 16}}, "rope.beta_fast: 16"),
    (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_emb"),
    (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config: "),
    (LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "0.5, only"),
    (MOE | {"norm_topk_prob": False}, "norm_topk_prob: False, only True"),
    (LLAMA | {"model_type": "mistral", "sliding_window": 0}, "sliding_window: 0, at least 1"),
    (LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": -1}, "window: -1"),
    (LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1,
              "sliding_window": 0}, "sliding_window: 0, at least 1 is needed, or null for none"),
    (GPT2 | {"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights: False"),
    (GPT2 | {"model_type": "gpt2", "activation_function": "tanh"}, "activation_function: 'tanh'"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "named"), REFUSED)
def test_what_would_be_computed_otherwise_is_refused(values, named):
    hf_config.read(LLAMA, seq_length=None)  # none of this is about the others
    with pytest.raises(RequestError) as caught:
        hf_config.read(values, seq_length=None)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "off", [{}, {"use_sliding_window": False}, {"use_sliding_window": True, "max_window_layers": 2}]
)
def test_a_window_of_no_token_where_no_layer_has_one_is_none(off):
    values = LLAMA | {"model_type": "qwen2", "sliding_window": 0} | off
    assert hf_config.read(values, seq_length=None)[0].window is None


def test_a_file_that_says_nothing_means_what_transformers_takes():
    for family, values in hf_config.DEFAULTS.items():
        theirs = getattr(
            transformers, hf_config.ARCHITECTURES[family].replace("ForCausalLM", "Config")
        )
        found = theirs(use_sliding_window=True).to_dict()
        found["rope_theta"] = found["rope_parameters"]["rope_theta"]
        assert {name: found[name] for name in values} == values

    def ours(family: str, **values: Any) -> tuple[Any, ...]:
        shape = SHAPE | {"rms_norm_eps": 1e-6, "model_type": family, "num_local_experts": 4}
        model, _, unread = hf_config.read(shape | values, seq_length=None)
        return model.window, model.window_skip_freq, model.rotary_base, unread

    assert ours("mistral")[0] == [4095, 0] and ours("mistral", sliding_window=None)[0] is None
    assert ours("mixtral")[:3] == (None, None, 1e6)
    # Llama's class has no window, and Mistral's one for all layers.
    kinds = ["full_attention", "sliding_attention"]
    assert ours("llama", sliding_window=8)[::3] == (None, ["num_local_experts", "sliding_window"])
    found = ours("mistral", sliding_window=8, layer_types=kinds)
    assert found[:2] == ([7, 0], None) and "layer_types" in found[3]
    found = ours("qwen2", sliding_window=8, use_sliding_window=True, layer_types=kinds)
    assert found[:2] == ([7, 0], [0, 1])


def test_fields_that_nothing_reads_are_named_and_old_notation_is_read():
    values = LLAMA | {"rope_theta": 5e5, "rope_scaling": YARN | {"type": "yarn"}, "novel": 1}
    values["rope_scaling"].pop("rope_theta")
    model, vocab, unread = hf_config.read(values, seq_length=None)
    assert (model.rotary_base, model.rope_scaling.kind, vocab, unread) == (
        5e5, "yarn", VOCAB, ["novel"],
    )  # fmt: skip
    with pytest.raises(RequestError, match="--seq-length 65: 1 to 64"):
        hf_config.read(LLAMA, seq_length=65)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"softmax_type": "learnable"}, "model.softmax_type: learnable, and llama has vanilla"),
        ({"position_embedding": "none"}, "model.position_embedding: none, and llama has rope"),
        ({"activation": "squared_relu"}, "model.activation: squared_relu, and llama has swiglu"),
        ({"rotary_percent": 0.5}, "model.rotary_percent: 0.5, and llama has 1.0"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "add_qkv_bias: True, and qwen3 has False"),
        ({"window": [7, 0], "window_skip_freq": 2}, "model.window_skip_freq: [1, 0], and mistral"),
        ({"moe": MoEConfig(num_experts=4, top_k=1)}, "exported as mixtral: "),
        ({"moe": MoEConfig(num_experts=4, load_balancing="sinkhorn")}, "load_balancing: sinkhorn"),
        ({"moe": MoEConfig(num_experts=4, shared_expert_ffn_hidden_size=8)}, "shared_expert"),
        ({"moe": MoEConfig(num_experts=4, layer_freq=2)}, "model.moe.layer_freq: [1, 0], and mix"),
        ({"mtp": MTPConfig()}, "model.mtp"),
        ({"mla": MLA}, "model.mla"),
        ({"position_embedding": "learned_absolute"}, "model.normalization: RMSNorm, and gpt2"),
    ],
)
def test_a_model_that_no_family_has_is_not_exported(changes, named):
    with pytest.raises(RequestError) as caught:
        hf_config.write(tiny_run(changes).model, vocab_size=60, precision="fp32")
    assert named in str(caught.value)


def test_rows_of_the_vocabulary_follow_from_the_tokenizer():
    for ids, padded in ((50257, 50304), (151_665, 151_936), (250, 256), (128_256, 128_256)):
        step = hf._divisor(ids, padded)
        assert -(-ids // step) * step == padded
    assert hf._divisor(50257, 50304) == 128


@pytest.mark.parametrize("carried", [("optimizer",), ("step",), ("data",), ()])
def test_an_import_gives_weights_and_nothing_else(carried):
    """A schedule that is asked of it was once a checkpoint that cannot be loaded."""
    ours: dict[str, Any] = {"distributed_optimizer": True, "precision": "bf16", "layout": {}}
    info = {"weights_only": True, "precision": "fp32"}
    if {"optimizer", "step"} & {*carried}:
        with pytest.raises(MismatchError, match=r"checkpoint\.load_weights_only: true"):
            content.check_options(info, carried=carried, **ours)
    else:
        content.check_options(info, carried=carried, **ours)


def test_any_layout_is_exported_alike(ranks, tmp_path):
    """Experts over two ranks, and three layers over two stages of one and two."""
    model = {"num_layers": 3, "qk_layernorm": True, "moe": MoEConfig(num_experts=4)}
    uneven = {"num_layers_in_first_pipeline_stage": 1}
    save(ranks, tmp_path / "one", 1, stop=1, model=model)
    split = {"model": model, "parallel": {"expert_model_parallel_size": 2}}
    convert(ranks, tmp_path / "one", tmp_path / "ep", world=2, **split)
    split = {"layout": "pp", "model": model, "parallel": uneven}
    convert(ranks, tmp_path / "one", tmp_path / "pp", world=2, **split)
    found = []
    for name in ("one", "ep", "pp"):
        hf.export_model(tmp_path / name, tmp_path / f"{name}-hf", vocab_size=60)
        found.append(tensors(tmp_path / f"{name}-hf"))
    assert len(found[0]) == 3 + 3 * (2 + 4 + 2 + 1 + 4 * 3)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[n], found[0][n]) for n in other)
