"""What can be shown without processes: bytes, dropout masks, sizes, the empty and the masked."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cp_cases import Case, make_inputs, truth, verdict
from emulate import SixteenBitMerges, emulate
from emulated import found, run

from megatron_patch.context_parallel.layout import chunks_of
from stable_attention import dispatch
from stable_attention.hopper import launch as hopper
from stable_attention.reference import chunks

MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@pytest.mark.parametrize("mode", MODES)
def test_eight_ranks(mode):
    case = Case(size=8, mode=mode, s=64, h=8, kv=2, window=(11, 0), sinks=True, dropout_p=0.1)
    assert not verdict(case, found(run(case)))
    case = Case(size=8, mode=mode, layout="thd", h=8, kv=2, lengths=(70, 3, 0, 16), sinks=True)
    assert not verdict(case, found(run(case)))


@pytest.mark.parametrize("mode", MODES[:3])
def test_documents_of_odd_lengths_on_one_rank(mode):
    """Nothing is cut, so nothing has to be even: `padded_lengths` pads nothing for one rank."""
    for lengths in ((5, 3), (1, 0, 13, 8), (1,)):
        for changes in ({}, {"causal": False}, {"window": (2, 0), "sinks": True, "dropout_p": 0.2}):
            case = Case(size=1, mode=mode, layout="thd", lengths=lengths, tail=3, **changes)
            for known in (None, lengths):
                assert not verdict(case, found(run(case, document_lengths=known))), case


def test_a2a_groups_of_four_with_replicated_heads():
    for kv in (1, 2, 3, 4, 6, 12):
        case = Case(size=8, mode="a2a+p2p", s=64, h=12, kv=kv)
        assert not verdict(case, found(run(case, across=4))), kv


def test_head_groups_of_all_gather_do_not_matter():
    for groups in (1, 2, 3, 5):
        case = Case(size=2, mode="all_gather", h=10, kv=5)
        assert not verdict(case, found(run(case, head_groups=groups)))
    with pytest.raises(ValueError, match=r"head_groups is 6; allowed: 1..5"):
        run(case, head_groups=6)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, None), (False, None), (True, (3, 0)), (True, (4, 0)), (True, (17, 0)), (False, (5, 2))],
)
def test_p2p_sends_a_chunk_only_to_who_sees_it(size, causal, window):
    """Counted from the definition of the mask, position by position."""
    case = Case(size=size, mode="p2p", causal=causal, window=window, b=1)
    chunk = case.s // (2 * size)
    left, right = window or (-1, -1)
    right = 0 if causal else right

    def sees(reader: int, c: int) -> bool:
        return any(
            (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
            for q in chunks_of(reader, size)
            for i in range(q * chunk, (q + 1) * chunk)
            for j in range(c * chunk, (c + 1) * chunk)
        )

    each = case.b * case.kv * (case.d + case.dv) * 4 * chunk
    want = []
    for rank in range(size):
        others = [r for r in range(size) if r != rank]
        keys = sum(sees(r, c) for r in others for c in chunks_of(rank, size))
        gradients = sum(sees(rank, c) for r in others for c in chunks_of(r, size))
        # Keys travel in the forward and in the backward, gradients (float32) once.
        want.append(each * (2 * keys + gradients))
    assert run(case).sent == want


def test_a_window_saves_bytes_of_packs_whose_lengths_are_known():
    lengths = (64, 64)
    case = Case(size=4, mode="p2p", layout="thd", lengths=lengths, tail=0, window=(8, 0))
    known, unknown = run(case, document_lengths=lengths), run(case)
    assert sum(known.sent) < sum(unknown.sent)
    assert torch.equal(known.out, unknown.out)
    assert not verdict(case, found(known))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("lengths", [(8, 8, 8), (8,)])
def test_documents_of_one_token_a_chunk(mode, window, lengths):
    """All chunks that a chunk of one token sees are visible to it as a whole; the rest is not."""
    case = Case(size=4, mode=mode, layout="thd", lengths=lengths, tail=0, window=window)
    for known in (None, lengths):
        assert not verdict(case, found(run(case, document_lengths=known)))


def test_bf16_wire_halves_gradients_on_the_way():
    case = Case(size=2, mode="p2p", causal=False, dtype="bf16")
    wide, narrow = run(case), run(dataclasses.replace(case, gradient_wire="bf16"))
    each = case.s // 2 * case.b * case.kv * (case.d + case.dv)
    assert wide.sent == [each * (2 * 2 + 4)] * 2
    assert narrow.sent == [each * (2 * 2 + 2)] * 2


def dropout_mask(size: int, mode: str, layout: str, lengths: tuple[int, ...]) -> torch.Tensor:
    """Boolean [tokens, heads, tokens] of kept pairs: V is the identity and all logits are 0."""
    case = Case(size=4, mode=mode, layout=layout, lengths=lengths, s=32, b=1, h=4, kv=1, tail=0)
    given = make_inputs(case)
    n = given.q.shape[0]
    v = torch.eye(n).reshape(n, *([1] * (given.q.dim() - 2)), n)
    options = {}
    if layout == "thd":
        options["cu_seqlens"], options["cu_seqlens_padded"] = case.documents()
    out = emulate(
        torch.zeros_like(given.q),
        torch.zeros_like(given.k),
        v,
        torch.zeros(*given.q.shape[:-1], n),
        size=size,
        mode=mode,
        layout=layout,
        backend="reference",
        causal=True,
        dropout_p=0.4,
        dropout_seed=5,
        **options,
    ).out
    return out.reshape(n, 4, n) > 0


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_one_dropout_mask_for_every_size_and_mode(layout):
    lengths = (15, 9, 7)
    one = dropout_mask(1, "p2p", layout, lengths)
    kept = one.float().mean(1)
    assert 0.5 < float(kept[kept > 0].mean()) < 0.8
    assert not torch.equal(one[:, 0], one[:, 1])
    for size in (2, 4):
        for mode in MODES[: 3 if size == 2 else 4]:
            assert torch.equal(dropout_mask(size, mode, layout, lengths), one), (size, mode)


def test_ranks_with_nothing_but_padding():
    """Documents far shorter than their room: whole chunks and whole ranks hold no token."""
    case = Case(size=4, mode="p2p", layout="thd", lengths=(1, 2, 0, 3), tail=0, sinks=True)
    for mode in MODES:
        for causal in (True, False):
            this = dataclasses.replace(case, mode=mode, causal=causal)
            assert not verdict(this, found(run(this)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 4])
def test_packs_without_documents(mode, size):
    if size == 1 and mode == "a2a+p2p":
        return
    for lengths, tail in (((), 8), ((), 0), ((0, 0), 8)):
        case = Case(size=size, mode=mode, layout="thd", lengths=lengths, tail=tail, sinks=True)
        result = run(case, document_lengths=lengths)
        for x in (result.out, result.dq, result.dk, result.dv, result.dsinks):
            assert not x.any()
        assert torch.equal(result.max_logits, torch.full((4,), -torch.inf))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty", [{"s": 0}, {"b": 0}])
def test_a_sequence_or_a_batch_of_nothing(mode, empty):
    for changes in ({}, {"causal": False}, {"window": (3, 0)}, {"sinks": True, "dropout_p": 0.1}):
        case = Case(size=4, mode=mode, **empty, **changes)
        given = make_inputs(case)
        result = run(case, given)
        for name in ("q", "k", "v"):
            assert getattr(result, f"d{name}").shape == getattr(given, name).shape
        assert result.out.shape == given.dout.shape
        assert result.dsinks is None or not result.dsinks.any()


def test_rows_that_see_no_key_are_zero_not_nan():
    """A window to the right only, at the end of documents; no sink to lean on."""
    for mode in MODES:
        given = make_inputs(case := Case(size=4, mode=mode, causal=False, window=(-1, -1)))
        given.k[:] = float("-1e30")
        given.q[:] = float("1e30")
        result = run(case, given)
        # Logits of -inf in every key: no key counts, as for a row that is masked throughout.
        for x in (result.out, result.dq, result.dk, result.dv):
            assert torch.isfinite(x).all() and not x.any()


def test_a_bug_in_one_rank_ends_the_emulation():
    case = Case(size=4, mode="p2p")
    given = make_inputs(case)
    with pytest.raises(RuntimeError, match="head dim"):
        emulate(
            given.q, given.k, given.v, given.dout, size=4, backend="reference", primitives=_Broken()
        )


class _Broken:
    def chunk_forward(self, *args, **kwargs):
        raise RuntimeError("head dim")


SERVED = [
    ("p2p", {}, ("hopper", "hopper")),
    ("all_gather", {}, ("hopper", "hopper")),
    ("a2a", {}, ("hopper", "hopper")),
    ("p2p", {"softcap": 5.0}, ("triton", "triton")),
    ("p2p", {"layout": "thd", "lengths": (9, 6), "tail": 0}, ("triton", "triton")),
]


@pytest.mark.parametrize(("mode", "options", "served"), SERVED)
def test_which_kernels_get_the_chunks(mode, options, served, monkeypatch):
    """By the table's rows, as on sm_90: whose functions the engine calls, all passing on."""
    called = {"forward": set(), "backward": set()}
    portable = dispatch.KERNEL_SETS[-1]
    owner = {portable.forward: "triton", hopper.forward: "hopper"}
    owner |= {portable.backward: "triton", hopper.backward: "hopper"}

    def counted(row, name):
        def run_portable(*arguments, **named):
            called[name].add(owner[getattr(row, name)])
            return getattr(portable, name)(*arguments, **named)

        return run_portable

    rows = [
        dataclasses.replace(
            row, archs=row.archs | {"interpreter"},
            forward=counted(row, "forward"), backward=counted(row, "backward"),
        )
        for row in dispatch.KERNEL_SETS
    ]  # fmt: skip
    monkeypatch.setattr(dispatch, "KERNEL_SETS", tuple(rows))
    shape = {"backend": "stable_flash", "dtype": "bf16", "s": 16, "b": 1, "h": 2, "kv": 2}
    run(Case(size=2, mode=mode, **shape, d=64, dv=64, **options))
    assert called == {"forward": {served[0]}, "backward": {served[1]}}


def test_kernels_in_every_mode():
    """Small: Triton's interpreter is slow. The GPU test runs the whole grid."""
    shape = {"backend": "stable_flash", "dtype": "bf16", "s": 32, "b": 1, "h": 2, "kv": 2}
    for mode, extra in (
        ("a2a", {"sinks": True, "window": (9, 0), "stabilizer": "compensated_projected"}),
        ("all_gather", {"layout": "thd", "lengths": (9, 0, 6), "tail": 0}),
        ("p2p", {"sinks": True, "stabilizer": "compensated_projected"}),
        ("p2p", {"causal": False, "o_lo": "int8", "dtype": "fp16", "softcap": 3.0}),
    ):
        case = Case(size=2, mode=mode, **(shape | extra))
        assert not verdict(case, found(run(case))), case


def test_merging_in_bf16_is_worse_and_gets_worse_with_ranks():
    """What the accuracy table compares with; here in PyTorch, with attention spread over chunks."""
    errors = {}
    for size in (1, 2, 8):
        case = Case(size=size, mode="p2p", s=128, dtype="bf16", v_mean=4.0, causal=False)
        given = make_inputs(case)
        exact = truth(case, given)
        delta = (given.dout.double() * exact["out"]).sum(-1)
        for name, changes in (
            ("ours", {}),
            ("bf16", {"primitives": SixteenBitMerges(chunks), "wire": torch.bfloat16}),
        ):
            options = {k: v for k, v in case.attention().items() if k != "layout"}
            result = emulate(
                given.q, given.k, given.v, given.dout, size=size, backend="reference",
                **options, **changes,
            )  # fmt: skip
            seen = (given.dout.double() * result.delta_out.double()).sum(-1)
            errors[name, size] = float((seen - delta).pow(2).mean().sqrt())
    assert errors["ours", 8] < 1e-3 * errors["bf16", 2]
    assert errors["bf16", 1] < errors["bf16", 2] < errors["bf16", 8]
