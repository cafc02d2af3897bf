"""The references themselves: oracle against PyTorch, blockwise against the oracle, gradcheck."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Case, make_inputs
from error_rule import run_oracle
from oracle import gradients, oracle_attention

from stable_attention.reference import blockwise, reference_attention
from stable_attention.reference.dropout import keep_mask, philox
from stable_attention.reference.int8 import int8_reference

CASES = [
    "b=2 sq=70 sk=70 causal=1",
    "b=2 sq=70 sk=45 causal=1 hq=4 layout=sbhd",
    "sq=33 sk=90 causal=1 left=7 dlse=1 layout=bhsd",
    "sq=65 sk=65 left=5 right=9 sinks=learned dlse=1",
    "sq=64 sk=40 softcap=3 sinks=off-by-one dv=16",
    "sq=50 sk=50 dropout=0.3 b=2 hq=4",
    "sq=40 sk=40 scale=0.7 values=outlier causal=1",
    "layout=thd lens_q=0,5,33,1,20 lens_k=4,0,33,1,40 causal=1 sinks=learned unused=3 dlse=1",
    "layout=thd lens_q=9,17 lens_k=9,17 gaps=4 left=3 dropout=0.2",
    "sq=90 sk=20 left=2 right=2",
]


def float64_reference(case: Case, tile: int = 0) -> tuple[dict, dict]:
    """Outputs and gradients of oracle and blockwise reference, both in float64."""
    given = make_inputs(case, "cpu")
    truth = run_oracle(case, given, torch.float64)
    q, k, v = (x.detach().double().requires_grad_() for x in (given.q, given.k, given.v))
    named = given.arguments(case)
    leaves = [q, k, v]
    if isinstance(given.sinks, torch.Tensor):
        named["sinks"] = given.sinks.double().requires_grad_()
        leaves.append(named["sinks"])
    out, lse, top = reference_attention(q, k, v, return_lse=True, return_max_logits=True, **named)
    outputs, cotangents = [out], [given.dout.double()]
    if given.dlse is not None:
        outputs.append(lse)
        cotangents.append(given.dlse.double())
    grads = torch.autograd.grad(outputs, leaves, cotangents)
    names = ("out", "lse", "max_logits", "dq", "dk", "dv", "dsink")
    return truth.named(), dict(zip(names, (out, lse, top, *grads), strict=False))


@pytest.mark.parametrize("line", CASES)
def test_blockwise_equals_the_oracle(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "TILE_BYTES", 1)  # 64 x 64 tiles: several a sequence
    expected, found = float64_reference(Case.parse(line))
    for name, want in expected.items():
        torch.testing.assert_close(
            found[name].detach(), want, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_oracle_equals_sdpa(layout: str, causal: bool) -> None:
    case = Case(layout=layout, b=2, sq=37, sk=37, hq=4, d=16, causal=int(causal), seed=3)
    given = make_inputs(case, "cpu")
    q, k, v = (x.double().requires_grad_() for x in (given.q, given.k, given.v))
    out = oracle_attention(q, k, v, layout=layout, causal=causal).out
    perm = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}[layout]
    back = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}[layout]
    dense = (x.permute(perm) for x in (q, k, v))
    want = F.scaled_dot_product_attention(*dense, is_causal=causal, enable_gqa=True).permute(back)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    dout = given.dout.double()
    for a, b in zip(
        gradients((out,), (q, k, v), (dout,)), gradients((want,), (q, k, v), (dout,)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_bottom_right_alignment_and_window_by_enumeration() -> None:
    q, k = torch.zeros(1, 3, 1, 8), torch.zeros(1, 5, 1, 8)
    v = torch.eye(5).view(1, 5, 1, 5).repeat(1, 1, 1, 2)[..., :8]
    out = oracle_attention(q, k, v, causal=True, window=(1, 0)).out[0, :, 0, :5]
    # Query i of 3 sits at key i + 2 and sees itself and the one before.
    want = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]) / 2
    torch.testing.assert_close(out, want.double())


def test_fully_masked_rows_are_zero_and_inert() -> None:
    case = Case(sq=9, sk=4, causal=1, seed=1, dlse=0)
    expected, found = float64_reference(case)
    for results in (expected, found):
        assert bool((results["out"][:, :5] == 0).all())
        assert bool((results["lse"][..., :5] == -torch.inf).all())
        assert bool((results["dq"][:, :5] == 0).all())
        assert all(bool(torch.isfinite(results[n]).all()) for n in ("dq", "dk", "dv"))


def test_blockwise_is_deterministic_and_keeps_16_bit_dtypes() -> None:
    given = make_inputs(Case(sq=80, sk=80, hq=4, causal=1, dtype="fp16"), "cpu")
    runs = []
    for _ in range(2):
        q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
        out = reference_attention(q, k, v, causal=True)
        assert out.dtype == torch.float16
        runs.append((out, *torch.autograd.grad(out, (q, k, v), given.dout)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_blockwise_ignores_autocast() -> None:
    given = make_inputs(Case(sq=40, sk=40), "cpu")
    q, k, v = (x.float().requires_grad_() for x in (given.q, given.k, given.v))
    plain = reference_attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = reference_attention(q, k, v)
    assert torch.equal(plain, mixed)


def test_gradients_of_lse_and_sink_by_finite_differences() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def outputs(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c, s = leaves
        return reference_attention(a, b, c, causal=True, sinks=s, softcap=2.0, return_lse=True)

    assert torch.autograd.gradcheck(outputs, (q, k, v, sink))


def test_philox_known_answers() -> None:
    """Vectors published with Random123 (kat_vectors, philox4x32 10)."""
    zero = torch.zeros((), dtype=torch.int64)
    ones = torch.full((), 0xFFFFFFFF, dtype=torch.int64)
    got = [int(w) for w in philox(0, zero, zero, zero, zero)]
    assert got == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    got = [int(w) for w in philox((1 << 64) - 1, ones, ones, ones, ones)]
    assert got == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_dropout_mask_depends_on_positions_only() -> None:
    span = torch.arange(50)
    whole = keep_mask(7, 0.3, batches=span[:2], heads=span[:3], rows=span, columns=span)
    part = keep_mask(
        7, 0.3, batches=span[1:2], heads=span[2:3], rows=span[9:31], columns=span[6:41]
    )
    assert torch.equal(part[0, 0], whole[1, 2, 9:31, 6:41])
    assert abs(float(whole.double().mean()) - 0.7) < 4 * (0.21 / whole.numel()) ** 0.5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layout": "hbsd"}, "bshd, sbhd, bhsd, thd"),
        ({"dropout_p": 0.1}, "dropout_seed"),
        ({"sinks": "plus-one"}, "off-by-one"),
        ({"cu_seqlens_q": torch.tensor([0, 4])}, "layout='thd'"),
        # These computed something else, without a word.
        ({"cu_seqlens_k": torch.tensor([0, 4])}, "layout='thd'"),
        ({"sinks": [0.0, 0.0]}, "off-by-one"),
        ({"window": (1.5, 0)}, "integers"),
        ({"window": (1, 2, 3)}, "integers"),
        ({"k": torch.zeros(1, 4, 1, 8)}, "as many tokens and heads"),
        ({"v": torch.zeros(1, 5, 2, 8)}, "as many tokens and heads"),
        ({"k": torch.zeros(1, 4, 2, 16)}, "q's head dim"),
        ({"q": torch.zeros(3, 4, 2, 8)}, "one batch"),
        ({"q": torch.zeros(1, 4, 2, 8, dtype=torch.int32)}, "floating"),
    ],
)
def test_bad_arguments_are_named(change: dict, match: str) -> None:
    given = dict.fromkeys("qkv", torch.zeros(1, 4, 2, 8))
    with pytest.raises(ValueError, match=match):
        reference_attention(**given | change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"cu_seqlens_k": None}, "layout='thd'"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 9])}, r"3..9; allowed: .* in 0\.\.8"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 1])}, r"3..1; allowed: .* in 0\.\.8"),
        ({"cu_seqlens_q_padded": torch.tensor([0, 4])}, r"4..9; allowed: .* in 0\.\.8"),
    ],
)
def test_bad_offsets_are_named(change: dict, match: str) -> None:
    q, cu = torch.zeros(8, 2, 8), torch.tensor([0, 3, 8])
    with pytest.raises(ValueError, match=match):
        reference_attention(
            q, q, q, **{"layout": "thd", "cu_seqlens_q": cu, "cu_seqlens_k": cu} | change
        )


@pytest.mark.parametrize("attention", [reference_attention, int8_reference])
def test_second_derivatives_are_refused(attention) -> None:
    """They were silently 0 where dO needs no gradient of its own."""
    q = torch.randn(1, 4, 1, 16, requires_grad=True)
    (first,) = torch.autograd.grad(attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
def test_results_may_be_changed_in_place(layout: str) -> None:
    """Also where O and LSE already lie as they are returned."""
    q = torch.randn(4, 2, 8) if layout == "thd" else torch.randn(1, 4, 2, 8)
    q.requires_grad_()
    cu = torch.tensor([0, 4]) if layout == "thd" else None
    given = {"layout": layout, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "return_lse": True}
    out, lse = reference_attention(q, q.detach(), q.detach(), **given)
    (want,) = torch.autograd.grad(2 * out.square().sum() + 3 * lse.sum(), q)
    out, lse = reference_attention(q, q.detach(), q.detach(), **given)
    out.mul_(2**0.5)
    lse.mul_(3)
    (got,) = torch.autograd.grad(out.square().sum() + lse.sum(), q)
    torch.testing.assert_close(got, want)
