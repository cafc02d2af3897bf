"""Variants change rounding and nothing else; preconditions refuse what cannot be compared."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from run_config import run_config

from megatron_patch.attention.backends import reference, stable
from megatron_patch.attention.backends.call import Call
from megatron_patch.experiments import preconditions, variants
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.variants import VARIANTS


def make_call(dtype: torch.dtype = torch.float32, **options: object) -> Call:
    """Causal, 2 sequences of 24 tokens, 3 heads; K and V far from zero mean."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(24, 2, 3, 16, generator=gen) for _ in range(3))
    k, v = k + 3, v - 2
    leaves = (x.to(dtype).requires_grad_() for x in (q, k, v))
    return Call(**dict(zip("qkv", leaves, strict=True)), layout="sbhd", scale=0.25, causal=True,
                options=dict(options))  # fmt: skip


def results(run, call: Call) -> list[torch.Tensor]:
    out = run(call)[0]
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), (call.q, call.k, call.v))]


@pytest.mark.parametrize("name", ["k_centered", "v_centered", "fp32_attention"])
def test_exact_variants_are_the_same_mathematics(name: str) -> None:
    """In float32 output and all three gradients stay, to float32 rounding."""
    wrap = VARIANTS[name].wrap
    assert wrap is not None
    for mine, plain in zip(
        results(wrap(reference.run), make_call()), results(reference.run, make_call()), strict=True
    ):
        assert torch.allclose(mine, plain, rtol=1e-4, atol=2e-5)


def test_centering_does_what_it_says() -> None:
    """The kernel sees K (and V) without its common part."""
    seen: list[Call] = []

    def spy(call: Call):
        seen.append(call)
        return reference.run(call)

    call = make_call()
    variants.center_keys(spy)(call)
    assert seen[-1].k.mean(0).abs().max() < 1e-5 < call.k.mean(0).abs().min()
    variants.center_values(spy)(call)
    first, second = seen[-2:]
    mean = reference.run(call)[0].mean(0)
    assert torch.equal(first.v, call.v) and torch.allclose(second.v, call.v - mean)
    shared = make_call()
    shared.v = shared.v[:, :, :1]
    with pytest.raises(ValueError, match="as many of both"):
        variants.center_values(reference.run)(shared)


def test_largest_logits_of_centered_keys_are_not_handed_to_an_observer() -> None:
    """They would stand beside those of the control; without them it computes its own."""
    tops = {}
    for name in ("plain", "k_centered", "v_centered"):
        call = make_call()
        call.held = {}
        (VARIANTS[name].wrap or (lambda run: run))(reference.run)(call)
        tops[name] = call.held.get("max_logits")
    assert tops["k_centered"] is None
    assert torch.equal(tops["plain"], tops["v_centered"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("low_order_o", {"stabilizer": "low_order_o"}),
        ("consistent_sum", {"stabilizer": "consistent_sum"}),
        ("fp32_o", {"stabilizer": "low_order_o", "residual": "fp32"}),
        ("fp32_o_consistent_sum", {"stabilizer": "compensated", "residual": "fp32"}),
    ],
)
def test_setting_variants_reach_the_kernel(name: str, options: dict[str, str]) -> None:
    """Through the interpreter: the backend is called with the setting and runs with it."""
    seen: list[Call] = []

    def spy(call: Call):
        seen.append(call)
        return stable.run(call)

    wrap = VARIANTS[name].wrap
    assert wrap is not None
    held: dict[str, torch.Tensor] = {}
    call = make_call(torch.bfloat16, stabilizer="none")
    call.held = held
    wrap(spy)(call)
    assert seen[0].options == options and call.options == {"stabilizer": "none"}
    keeps = {"consistent_sum": None, "low_order_o": torch.bfloat16}.get(name, torch.float32)
    assert (held["low"].dtype if "low" in held else None) == keeps


def test_installing_changes_the_configured_backend_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_config(attention={"backend": "reference"})
    home = importlib.import_module("megatron_patch.attention.backends.reference")
    monkeypatch.setattr(home, "run", home.run)  # puts it back afterwards
    before, other = home.run, stable.run
    variants.install("plain", run)
    assert home.run is before
    variants.install("k_centered", run)
    assert home.run is not before and stable.run is other
    assert home.run.variant == "k_centered" and not hasattr(before, "variant")
    with pytest.raises(ValueError, match="it changes stable_flash"):
        variants.install("low_order_o", run)
    with pytest.raises(ValueError, match="it starts from 'none'"):
        variants.install("low_order_o", run_config(attention={"backend": "stable_flash"}))
    assert VARIANTS["k_centered"].unmet(run_config(model={"attention_dropout": 0.1}))


def fingerprint(**changes: object) -> dict:
    facts: dict = {
        "weights": {"a": "1", "b": "2"},
        "batches_sha256": "x",
        "checked_steps": 3,
        "environment": dict.fromkeys(preconditions.COMPARED, "1.0"),
    }
    return facts | changes


def test_preconditions(tmp_path: Path) -> None:
    """The first run of a seed sets the reference, the others must match it."""
    file = tmp_path / "reference" / "seed_1.json"
    preconditions.check(fingerprint(), file)
    assert json.loads(file.read_text()) == fingerprint()
    preconditions.check(fingerprint(), file)
    other = dict.fromkeys(preconditions.COMPARED, "1.0") | {"torch": "2.0", "gpu": "A100"}
    for changed, message in (
        (fingerprint(weights={"a": "1", "b": "3"}), "initial weights differ: b"),
        (fingerprint(weights={"a": "1"}), "1 of the reference's 2 initial weights are missing"),
        (fingerprint(weights={"c": "1"}), "share no parameter name"),
        (fingerprint(batches_sha256="y"), "batches of the first 3 steps differ"),
        (fingerprint(checked_steps=4), "4 steps of batches were hashed, 3 in"),
        (fingerprint(environment=other), "torch is 2.0, it was 1.0\n  - gpu is A100"),
    ):
        with pytest.raises(ExperimentError, match=message):
            preconditions.check(changed, file)
    assert list(file.parent.iterdir()) == [file]


QK = {"a": "1", "b": "2", "l.q_layernorm.weight": "9", "l.k_layernorm.weight": "9"}
PLAIN, NORMED = {"qk_layernorm": False}, {"qk_layernorm": True}
AGREE = "[]"


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        # What a key of the model adds, whichever of the two was there first.
        ({"model": PLAIN}, {"model": NORMED, "weights": QK}, AGREE),
        ({"model": NORMED, "weights": QK}, {"model": PLAIN}, AGREE),
        ({}, {"model": NORMED, "weights": QK}, AGREE),
        ({"weights": QK}, {"model": PLAIN}, AGREE),
        # The key was said by both, or it is not what adds this name, or adds no name at all.
        ({"model": NORMED, "weights": QK}, {"model": NORMED}, "2 of the reference's 4 initial "),
        ({"model": PLAIN}, {"model": NORMED, "weights": QK | {"c": "1"}}, "1 initial weights are"),
        ({"model": PLAIN}, {"model": PLAIN | {"window": [9]}, "weights": QK}, "2 initial weights"),
        ({"model": PLAIN}, {"model": PLAIN, "weights": {"a": "1"}}, "says why: b"),
        ({}, {"model": PLAIN, "weights": {"a": "1"}}, "1 of the reference's 2 initial weights"),
        # Any other key may add anything.
        ({"model": PLAIN}, {"model": PLAIN | {"add_qkv_bias": True}, "weights": QK}, AGREE),
        ({"model": PLAIN}, {"model": PLAIN | {"num_layers": 6}, "weights": {"a": "1"}}, AGREE),
    ],
)
def test_weights_that_only_one_model_has_must_be_declared(
    first: dict, second: dict, says: str
) -> None:
    found = preconditions.differences(fingerprint(**second), fingerprint(**first))
    assert says in str(found) and len(found) == (says != AGREE)


def test_data_are_compared_beyond_the_batches_that_were_hashed(tmp_path: Path) -> None:
    """Where both fingerprints have them: references of earlier versions are read as they are."""
    ours, old = fingerprint(data_sha256="x", model=PLAIN), fingerprint()
    others = fingerprint(data_sha256="y", model=PLAIN)
    assert preconditions.differences(ours, ours) == []
    assert preconditions.differences(ours, old) == preconditions.differences(old, ours) == []
    (text,) = preconditions.differences(others, ours)
    assert text.startswith("the data of the whole run differ")
    file = tmp_path / "seed_1.json"
    file.write_text(json.dumps(old))
    preconditions.check(ours, file)
    # Results and archives that were written with them stay comparable.
    assert preconditions.comparable(ours) == preconditions.comparable(old)


def test_what_machines_share_does_not_depend_on_which_model_came_first() -> None:
    """As written by earlier versions, too: digests of a model without these weights are theirs."""
    plain, normed = (
        fingerprint(weights=weights, weights_sha256=preconditions.combined(weights))
        for weights in (fingerprint()["weights"], QK)
    )
    assert (
        preconditions.comparable(normed)
        == preconditions.comparable(plain)
        == plain | {"environment": {k: v for k, v in plain["environment"].items() if k != "commit"}}
    )
    latent = normed | {"weights": QK | {"l.self_attention.kv_layernorm.weight": "9"}}
    assert preconditions.comparable(latent) == preconditions.comparable(plain)
    for changed in ({"weights": QK | {"a": "9"}}, {"weights": QK | {"c": "1"}}):
        assert preconditions.comparable(normed | changed) != preconditions.comparable(plain)
    # Where both have these weights, and both are at hand, they are compared.
    other = normed | {"weights": QK | {"l.q_layernorm.weight": "8"}}
    assert preconditions.comparable(other)["weights"] == preconditions.comparable(normed)["weights"]
    assert not preconditions.alike(normed, other)
    assert preconditions.alike(normed, plain) and preconditions.alike(normed, normed)


def test_references_that_cannot_be_used(tmp_path: Path) -> None:
    """A file of something else, and a place where none can be written."""
    file = tmp_path / "file"
    for content in (b"\x80\x04\xff", b"", b"[]", b'{"weights": {}}'):
        file.write_bytes(content)
        with pytest.raises(ExperimentError, match="is no fingerprint of a seed"):
            preconditions.check(fingerprint(), file)
    with pytest.raises(ExperimentError, match="cannot be written"):
        preconditions.check(fingerprint(), file / "below")
    assert list(tmp_path.iterdir()) == [file]


def test_hashes_see_every_bit() -> None:
    x = torch.zeros(4)
    same = [preconditions.hash_tensor(x), preconditions.hash_tensor(x.clone())]
    x[3] = -0.0
    others = [
        preconditions.hash_tensor(y)
        for y in (x, torch.zeros(2, 2), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(5))
    ]
    assert same[0] == same[1] and len({same[0], *others}) == 5


def test_hashes_of_batches_follow_seed_and_not_the_micro_batch(corpus: Path) -> None:
    def of(micro: int, seed: int) -> tuple[str, str]:
        run = run_config(
            data={"blend": [type(run_config().data.blend[0])(path=str(corpus))], "num_workers": 0},
            training={"micro_batch_size": micro, "seed": seed, "global_batch_size": 8},
        )
        return preconditions.hash_batches(run, 3)

    assert of(2, 1) == of(8, 1) != of(8, 2)


def test_data_that_differ_after_the_hashed_batches(tmp_path: Path) -> None:
    """Two datasets with the same first tokens, which differ in their last word."""
    from megatron_patch.data.prepare import PrepareOptions, prepare

    found = []
    for name, last in (("one", "end"), ("other", "not")):
        (tmp_path / f"{name}.txt").write_text("word " * 400 + last)
        out = str(tmp_path / name)
        prepare(PrepareOptions(inputs=[f"{out}.txt"], out=out, workers=1, quiet=True))
        run = run_config(
            data={
                "train": [type(run_config().data.blend[0])(path=out)],
                "blend": [],
                "num_workers": 0,
            },
            training={"micro_batch_size": 1, "global_batch_size": 1, "eval_interval": None},
        )
        found.append(preconditions.hash_batches(run, 1))
    (batches, data), (same, others) = found
    assert batches == same and data != others
