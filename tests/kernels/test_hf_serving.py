"""Which Hugging Face models are served, and that all others are refused before their first step.

Gradients are those of transformers' eager attention to 1e-5: the attention itself is by the book
here (`hf_models.exact`), which leaves masks, positions and windows to be wrong.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import (
    GPT,
    ONE_GRAPH,
    OPT,
    RESTARTING,
    SMALL,
    TOKENS,
    XGLM,
    close,
    exact,
    gradients,
    odd,
    tiny,
)
from packaging.version import Version

from stable_attention import hf
from stable_attention.hf import serving

ROWS = RESTARTING.repeat(2, 1)
REFUSED = "^attn_implementation is stable_attention"


@pytest.fixture(autouse=True)
def book(monkeypatch: pytest.MonkeyPatch) -> None:
    hf.register()
    exact(monkeypatch)


SERVED = {
    "Llama": SMALL,
    "Mistral": SMALL | {"sliding_window": 5},
    "Gemma2": SMALL | {"sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 16},
    "GPTNeoX": SMALL | {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "GPT2": GPT,
    "OPT": OPT,
    # These three pass no positions to attention, or no window.
    "Persimmon": SMALL | {"hidden_dropout": 0.0},
    "GPTBigCode": GPT,
    "JetMoe": SMALL | {"kv_channels": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}
# Releases before 5.23 have masks or attention of their own for them.
NEWER = {"GPT2", "OPT", "Persimmon", "GPTBigCode", "JetMoe"}


@pytest.mark.parametrize("kind", SERVED)
def test_served_models_agree_with_eager(kind: str) -> None:
    """Plain rows, documents in one row, documents in several rows."""
    eager = tiny(kind, "eager", **SERVED[kind])
    try:
        ours = tiny(kind, **SERVED[kind])
        assert close(gradients(ours), gradients(eager))
    except ValueError:
        assert kind in NEWER and Version(transformers.__version__) < Version("5.23")
        return
    for rows, positions in ((1, RESTARTING), (2, ROWS)):
        true = gradients(eager, rows, position_ids=positions)
        assert close(gradients(ours, rows, position_ids=positions), true)
        if kind != "OPT":  # whose eager attention ignores documents
            assert not close(gradients(eager, rows), true)


ENCODERS = {
    "BertForMaskedLM": SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "BartForConditionalGeneration": {
        "vocab_size": 64,
        "d_model": 32,
        "dropout": 0.0,
        **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
    },
    "T5ForConditionalGeneration": {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
}


@pytest.mark.parametrize("name", ENCODERS)
def test_full_and_cross_attention(name: str) -> None:
    """Agrees with eager attention, or is refused: T5 adds biases."""
    kind = getattr(transformers, name)
    config = kind.config_class(**ENCODERS[name])
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % 61 + 3

    def step(implementation):
        torch.manual_seed(0)
        model = kind._from_config(copy.deepcopy(config), attn_implementation=implementation)
        model.float().train()(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    try:
        assert close(step(hf.NAME), step("eager"))
    except ValueError as error:
        assert name.startswith("T5") or Version(transformers.__version__) < Version("5.23")
        assert re.search("is stable_attention|position_bias|a tensor of", str(error))


OWN = {
    "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "CodeGen": GPT | {"rotary_dim": 4, "n_head": 4},
    "XGLM": XGLM,
    "Mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64},
    "GPTNeoXJapanese": SMALL,
    "GPTJ": GPT | {"rotary_dim": 4},
    "GPTNeo": OPT | {"num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]},
    "Falcon": SMALL,
    "Mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
}


@pytest.mark.parametrize("kind", OWN)
def test_models_with_attention_of_their_own_are_refused(kind: str) -> None:
    """Some lost their causal mask, some ended in a bare KeyError or AttributeError."""
    eager = gradients(tiny(kind, "eager", **OWN[kind]))
    try:
        ours = gradients(tiny(kind, **OWN[kind]))
    except ValueError as error:
        assert re.match(REFUSED, str(error))
    else:  # served since: CodeGen and GPT-J by 5.24
        assert Version(transformers.__version__) > Version("5.23.0") and close(ours, eager)


# How a model of somebody else's treats its mask: served with (one document, several documents)?
ODD = {
    "all": (True, True),
    "mask only": (True, True),
    "positions only": (True, True),
    "no mask": (True, False),
    "mask dropped": (True, False),
    "tensor": (False, False),
    "own": (False, False),
    "own, masked": (False, False),
}


@pytest.mark.parametrize("how", ODD)
def test_models_never_seen(how: str) -> None:
    documents = [(1, {}), (2, {}), (1, {"position_ids": RESTARTING}), (2, {"position_ids": ROWS})]
    true = odd("all", "eager")
    for rows, given in documents:
        model = odd(how)
        if ODD[how][bool(given)]:
            assert close(gradients(model, rows, **given), gradients(true, rows, **given))
        else:
            with pytest.raises(ValueError, match=r"is stable_attention|several docu|a tensor of"):
                gradients(model, rows, **given)


def test_models_of_two_threads_do_not_answer_for_each_other() -> None:
    """One that must be refused ran unseen while the other's forward was under way."""
    outer, found = odd("all"), []

    def meanwhile(*_: object) -> None:
        thread = threading.Thread(target=lambda: found.append(error_of("own")))
        thread.start()
        thread.join()

    def error_of(how: str) -> str:
        try:
            return str(gradients(odd(how), 1))
        except ValueError as error:
            return str(error)

    layer = next(x for x in outer.modules() if isinstance(x, torch.nn.Linear))
    layer.register_forward_pre_hook(meanwhile)
    true = gradients(odd("all", "eager"), 1)
    assert close(gradients(outer, 1), true)
    assert len(found) == 1 and re.match(REFUSED, found[0])


def test_offsets_that_do_not_reach_attention_are_refused() -> None:
    """As arguments only, positions running on: a mask does not see them."""
    cu = torch.tensor([0, 9, 17, 24], dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    assert not close(gradients(odd("all"), 1, **given), gradients(odd("all"), 1))
    for how in ("mask only", "no mask", "mask dropped"):
        with pytest.raises(ValueError, match="cu_seq_lens_q is of several documents"):
            gradients(odd(how), 1, **given)


def test_a_table_of_attention_classes_is_refused_when_built(monkeypatch) -> None:
    table = {"eager": torch.nn.Linear, "sdpa": torch.nn.Linear}
    monkeypatch.setitem(odd.__globals__, "ODD_ATTENTION_CLASSES", table)
    with pytest.raises(ValueError, match=f"{REFUSED} for OddModel, which looks"):
        odd("all")
    odd("all", "eager")
    table[hf.NAME] = torch.nn.Linear
    odd("all")


def lora(model):
    peft = pytest.importorskip("peft")
    target = ["q_proj", "query_key_value", "in_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=target))


def distributed(wrap):
    def run(model):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        return wrap(model)

    return run


def fsdp(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return model


def reset(model):
    model = copy.deepcopy(model)
    model.config._attn_implementation = hf.NAME
    return model


WRAPPED = {
    "deepcopy": copy.deepcopy,
    "checkpointing": checkpointed,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "DDP": distributed(torch.nn.parallel.DistributedDataParallel),
    "FSDP2": distributed(fsdp),
    "PEFT": lora,
    "set afterwards": reset,
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compile")) for n in WRAPPED]
)
def test_wrapped_models(name: str) -> None:
    def wrapped(kind, **shape):
        return WRAPPED[name](tiny(kind, "eager" if name == "set afterwards" else hf.NAME, **shape))

    try:
        ours = gradients(wrapped("Llama"), 1, position_ids=RESTARTING)
        if name != "PEFT":
            eager = gradients(tiny("Llama", "eager", **SMALL), 1, position_ids=RESTARTING)
            assert close(ours, eager)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        # Unsupported: what Dynamo makes of an error that it traces.
        for kind in ("Bloom", "Mamba"):
            with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="stable_att"):
                gradients(wrapped(kind, **OWN[kind]))
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_a_model_of_compiled_layers_is_seen_to_call_it(monkeypatch) -> None:
    monkeypatch.undo()  # the operators themselves
    model, plain = (tiny("Llama", hf.NAME).bfloat16() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    ids = torch.arange(3, 35)[None]
    for _ in range(2):
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_generating_with_a_cache() -> None:
    ids = torch.arange(3, 12)[None].repeat(2, 1)
    want = {"max_new_tokens": 4, "do_sample": False}
    ours, eager = (tiny("Llama", name).eval().generate(ids, **want) for name in (hf.NAME, "eager"))
    assert torch.equal(ours, eager)
    with pytest.raises(ValueError, match=REFUSED):
        tiny("Bloom", **OWN["Bloom"]).eval().generate(ids, **want)


@pytest.mark.parametrize(
    ("kind", "rows"), [("Llama", 1), ("Llama", 2), ("Mistral", 1), ("Persimmon", 1)]
)
def test_models_compile_into_one_graph(kind: str, rows: int, monkeypatch) -> None:
    """One row may be packed for all that tracing knows; documents of several rows end the run."""
    monkeypatch.undo()  # the operators themselves
    model = tiny(kind, **SERVED[kind] | {"num_hidden_layers": 1}).bfloat16()
    try:
        gradients(model, rows)
    except ValueError:
        assert kind in NEWER and Version(transformers.__version__) < Version("5.23")
        return
    compiled = torch.compile(model, backend="eager", fullgraph=ONE_GRAPH)
    ids = torch.arange(rows * TOKENS).view(rows, TOKENS) % 61 + 3

    def step(model, positions):
        model.zero_grad()
        model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    def same(positions):
        ours, plain = step(compiled, positions).float(), step(model, positions).float()
        return (ours - plain).norm() <= 2**-7 * plain.norm()

    assert same(torch.arange(TOKENS)[None].repeat(rows, 1))
    if rows == 1:
        assert same(RESTARTING)
    else:
        with pytest.raises(RuntimeError, match="packed documents in a compiled model"):
            step(compiled, ROWS)


def test_an_old_transformers_is_refused(monkeypatch) -> None:
    for release, ok in (("4.53.2", False), ("4.52.4", False), ("4.53.3", True), ("5.0.0rc1", True)):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", release)
        if ok:
            serving.check_version()
        else:
            with pytest.raises(RuntimeError, match=rf"is {release}; allowed: 4\.53\.3 or newer"):
                hf.register("another")


@pytest.mark.slow
@pytest.mark.parametrize("folder", os.environ.get("TRANSFORMERS_RELEASES", "").split(os.pathsep))
def test_other_releases(folder: str) -> None:
    """TRANSFORMERS_RELEASES: folders of ``pip install --target``, separated by colons."""
    if not folder:
        pytest.skip("TRANSFORMERS_RELEASES is not set")
    here = Path(__file__).parent
    files = [here / "test_hf.py", here / "test_hf_serving.py"]
    path = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *files]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
