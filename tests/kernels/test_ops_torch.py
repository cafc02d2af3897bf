"""The operators inside torch: opcheck, compile, LSE as an output, views, FlashAttention."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from stable_attention import flash_compat as fa
from stable_attention import ops, stable_attention
from stable_attention.chunks import chunk_forward, merge_chunks
from stable_attention.describe import describe
from stable_attention.layouts import shape
from stable_attention.problem import Options


def randn(*size, grad=True, dtype=torch.bfloat16):
    return torch.randn(size).to(dtype).requires_grad_(grad)


def op_arguments(q, k, v, sinks=None, with_lse=True, **options):
    asked = Options.of(scale=0.25, causal=True, deterministic=True, **options)
    problem, _ = describe(q, k, v, asked, sinks=sinks)
    small = (None,) * 5
    return (q, k, v, sinks, *small, problem.sq, problem.sk, problem.encode(), True, with_lse)


@pytest.mark.parametrize(
    ("stabilizer", "o_lo"), [("compensated", "bf16"), ("compensated", "int8"), ("none", "bf16")]
)
def test_opcheck(stabilizer, o_lo):
    """Schema, fake tensors, autograd registration and AOT dispatch agree with the kernels."""
    q, k, v = randn(1, 20, 2, 16), randn(1, 24, 1, 16), randn(1, 24, 1, 8)
    sinks = torch.randn(2, requires_grad=True)
    arguments = op_arguments(q, k, v, sinks, stabilizer=stabilizer, o_lo=o_lo)
    torch.library.opcheck(ops.forward_op, arguments)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_opcheck_without_lse(layout):
    """The LSE is (0,) then, and the gradient that opcheck sends into it was read as rows."""
    q, k, v = (
        torch.randn(shape(layout, batch=2, length=n, heads=h, d=d)).bfloat16().requires_grad_()
        for n, h, d in ((20, 2, 16), (24, 1, 16), (24, 1, 8))
    )
    arguments = op_arguments(q, k, v, layout=layout, with_lse=False)
    torch.library.opcheck(ops.forward_op, arguments)


@pytest.mark.parametrize("stabilizer", ["compensated", "none"])
def test_a_gradient_of_no_lse_is_no_gradient(stabilizer, monkeypatch):
    q, k, v = (randn(1, 20, 2, 16) for _ in range(3))
    out, lse, *_ = ops.forward_op(*op_arguments(q, k, v, stabilizer=stabilizer, with_lse=False))
    assert lse.shape == ((0,) if stabilizer == "compensated" else (1, 2, 20))
    dout, dlse = torch.randn(out.shape).bfloat16(), torch.zeros_like(lse)
    want = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    seen = []
    operator = ops.backward_op
    monkeypatch.setattr(ops, "_unseen", lambda tensors: False)
    monkeypatch.setattr(ops, "backward_op", lambda *a: seen.append(a[1]) or operator(*a))
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert (seen[0] is None) == (stabilizer == "compensated")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_compile_fullgraph_matches_eager():
    q, k, v = (randn(1, 20, 2, 16) for _ in range(3))

    def run(q, k, v):
        out, lse = stable_attention(q, k, v, causal=True, return_lse=True)
        return out.float().square().sum() + lse.sum()

    eager = torch.autograd.grad(run(q, k, v), (q, k, v))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), eager, strict=True):
        assert torch.equal(a, b)


def test_compile_with_dynamic_shapes_compiles_once_and_matches_eager():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    def run(q, k, v):
        return stable_attention(q, k, v, causal=True, softcap=5.0, scale=0.2)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    for n in (33, 48, 65):
        q, k, v = (randn(1, n, 2, 16, grad=False) for _ in range(3))
        assert torch.equal(compiled(q, k, v), run(q, k, v))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("window", "dynamic"), [((-1, -1), None), ((3, 0), True), ((2**31 - 1, 2), None)]
)
def test_compile_of_a_longest_sequence_that_comes_from_data(window, dynamic):
    """max_seqlen is then a number that tracing does not know, in checks and in the window."""

    def run(q, k, v, cu):
        longest = (cu[1:] - cu[:-1]).max()
        return fa.flash_attn_varlen_func(
            q, k, v, cu, cu, longest, longest, causal=window[1] < 0, window_size=window
        )

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for ends in ((0, 5, 16), (0, 2, 24), (0, 12, 24)):
        q, k, v = (randn(ends[-1], 2, 16) for _ in range(3))
        cu = torch.tensor(ends, dtype=torch.int32)
        results = []
        for call in (run, compiled):
            out = call(q, k, v, cu)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_compiled_negative_longest_sequence_is_refused_when_it_runs():
    def run(q, cu):
        longest = cu.max() - 99
        return fa.flash_attn_varlen_func(q, q, q, cu, cu, longest, longest)

    q, cu = randn(16, 2, 16, grad=False), torch.tensor([0, 5, 16], dtype=torch.int32)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="assertion failed"):
        compiled(q, cu)


@pytest.mark.parametrize("name", ["q", "sinks"])
def test_the_second_derivative_is_refused(name):
    """Never a silent zero: the rule is differentiable once, also in sinks alone."""
    given = {x: randn(1, 20, 2, 16, grad=name == "q") for x in "qkv"}
    given |= {"sinks": torch.zeros(2, requires_grad=name == "sinks")}
    loss = stable_attention(**given).float().sum()
    (first,) = torch.autograd.grad(loss, given[name], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(first.float().square().sum(), given[name])


def test_gradients_of_torch_func_are_refused():
    """It was told how to write an autograd.Function."""
    q, k = (randn(2, 20, 2, 16, grad=False) for _ in range(2))
    loss = torch.func.grad(lambda x, y: stable_attention(x, y, y).float().sum())
    with pytest.raises(RuntimeError, match=r"differentiable once.*torch\.func"):
        loss(q, k)
    with pytest.raises(RuntimeError, match=r"differentiable once.*torch\.func"):
        torch.func.vmap(loss)(q[:, None], k[:, None])


def test_a_trace_of_the_default_scale():
    q, k, v = (randn(1, 20, 2, 16, grad=False) for _ in range(3))
    traced = torch.jit.trace(lambda *x: stable_attention(*x, causal=True), (q, k, v))
    assert torch.equal(traced(q, k, v), stable_attention(q, k, v, causal=True))


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_forward_mode_is_refused(name):
    """A tangent was silently zero."""
    given = {x: randn(1, 20, 2, 16, grad=False) for x in "qkv"} | {"sinks": torch.zeros(2)}
    tangent = torch.ones_like(given[name])
    with pytest.raises(RuntimeError, match="differentiable once, in reverse mode"):
        torch.func.jvp(lambda x: stable_attention(**given | {name: x}), (given[name],), (tangent,))
    with forward_ad.dual_level():
        want = stable_attention(**given)  # nothing moves: nothing to refuse
        dual = forward_ad.make_dual(given[name], tangent)
        with pytest.raises(RuntimeError, match="differentiable once, in reverse mode"):
            stable_attention(**given | {name: dual})
    assert torch.equal(want, stable_attention(**given))


def test_forward_over_reverse_is_refused():
    q, k, v = (randn(1, 20, 2, 16) for _ in range(3))
    out = stable_attention(q, k, v)
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(RuntimeError, match="differentiable once, in reverse mode"):
            torch.autograd.grad(out, q, dout)


def test_no_query_heads():
    """A rank may have none: an empty output, and zero gradients of k and v."""
    q, k, v = randn(1, 4, 0, 16), randn(1, 8, 2, 16), randn(1, 8, 2, 16)
    out = stable_attention(q, k, v)
    assert out.shape == q.shape
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert dq.shape == q.shape and not dk.any() and not dv.any()


def test_expanded_gradient_of_a_sum():
    """out.sum() hands the backward a dO whose strides are all 0."""
    q, k, v = (randn(2, 17, 2, 16) for _ in range(3))
    expanded = torch.autograd.grad(stable_attention(q, k, v).sum(), (q, k, v))
    ones = torch.ones(2, 17, 2, 16, dtype=torch.bfloat16)
    plain = torch.autograd.grad(stable_attention(q, k, v), (q, k, v), ones)
    assert all(torch.equal(a, b) for a, b in zip(expanded, plain, strict=True))
    assert torch.allclose(plain[2].float().sum(1), torch.full((2, 2, 16), 17.0), rtol=2e-2)


def test_gradients_that_are_views_which_negate():
    q, k, v, g = (torch.randn(1, 16, 2, 16, dtype=torch.bfloat16) for _ in range(4))
    out, lse = stable_attention(q.requires_grad_(), k, v, return_lse=True)
    h = torch.randn_like(lse)
    views = torch.autograd.grad((out, lse), q, (torch._neg_view(g), torch._neg_view(h)), True)
    assert torch.equal(views[0], torch.autograd.grad((out, lse), q, (-g, -h))[0])
    sinks = torch.tensor([2.0, -1.0])
    got, want = (stable_attention(q, k, v, sinks=x) for x in (torch._neg_view(sinks), -sinks))
    assert torch.equal(got, want)


@pytest.mark.parametrize("last", [1, -1])
@pytest.mark.parametrize("stabilizer", ["compensated", "compensated_projected"])
def test_hooks_may_lay_saved_tensors_out_anew(last, stabilizer):
    """O, its LSE and low-order part were read, or the gradients written, past their ends."""
    qkv = [randn(2, 24, 2, 16) for _ in range(3)]

    def swapped(x):
        return x.transpose(0, last) if x.dim() > 1 else x

    found = []
    for pack in (lambda x: x, lambda x: swapped(x).contiguous()):
        unpack = swapped if found else pack
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out, lse = stable_attention(*qkv, stabilizer=stabilizer, return_lse=True)
        loss = out.float().square().sum() + lse.square().sum()
        found.append((out, *torch.autograd.grad(loss, qkv)))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_batch_and_head_offsets_shift_the_dropout_mask():
    """A data- or tensor-parallel rank draws the mask its batch and heads have globally."""
    q, k, v = (randn(2, 40, 4, 16, grad=False) for _ in range(3))
    whole = stable_attention(q, k, v, dropout_p=0.4, dropout_seed=11)
    part = stable_attention(
        *(x[1:, :, 2:] for x in (q, k, v)),
        dropout_p=0.4,
        dropout_seed=torch.tensor(11),
        batch_offset=1,
        head_offset=2,
    )
    assert torch.equal(part, whole[1:, :, 2:])


def test_dropout_mask_does_not_depend_on_the_tiles(monkeypatch):
    """With V = 1 the output is the kept weight: equal for every tile size."""
    from stable_attention import configs

    q, k = randn(1, 70, 1, 16, grad=False), randn(1, 70, 1, 16, grad=False)
    v = torch.eye(70, 72)[None, :, None].bfloat16()
    kept = stable_attention(q, k, v, dropout_p=0.5, dropout_seed=3) != 0
    lookup = configs.lookup
    other = lambda which, p, d: configs.Tile(16, 64, 4, 1, segment=64)  # noqa: E731
    monkeypatch.setattr(configs, "lookup", other)
    again = stable_attention(q, k, v, dropout_p=0.5, dropout_seed=3) != 0
    assert configs.lookup is not lookup and torch.equal(kept, again)


def test_sixteen_bit_sinks_count_in_float32():
    """A BF16 sink logit is a number like any other: same bits as its float32 copy."""
    q, k, v = (randn(1, 40, 2, 16) for _ in range(3))
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        sinks = torch.tensor([7.03125, -1.3515625]).to(dtype).requires_grad_()
        out, lse = stable_attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        loss = out.float().square().sum() + lse.sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v, sinks))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("cap", [1.0, 1e3, 1e5])
def test_softcap_costs_the_absolute_error_the_docs_state(cap):
    q, k, v = (randn(1, 40, 2, 32, grad=False) for _ in range(3))
    _, lse = stable_attention(q, k, v, softcap=cap, return_lse=True)
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 32**-0.5
    true = torch.logsumexp(cap * torch.tanh(s / cap), -1)
    assert (lse.double() - true).abs().max() <= 2e-7 * cap + 1e-5


def test_int8_o_lo_of_tiny_outputs_is_finite():
    """127 / half_ulp must not overflow where BF16 ends: the code of 0 would be NaN."""
    q, k = (randn(1, 20, 1, 16, grad=False) for _ in range(2))
    v = torch.full((1, 20, 1, 16), 2.0**-124).bfloat16()
    out, low = stable_attention(q, k, v, o_lo="int8", return_o_lo=True)
    assert torch.equal(out, v) and torch.count_nonzero(low) == 0


def test_chunk_positions_may_differ_per_sequence():
    """Halves of packed sequences, picked by starts and per-sequence positions, equal the whole."""
    lens, heads, d = [32, 64], 2, 16
    q, k, v = (randn(96, heads, d, grad=False) for _ in range(3))
    cu = torch.tensor([0, 32, 96], dtype=torch.int32)
    whole = stable_attention(
        q, k, v, layout="thd", causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=64
    )
    half = torch.tensor([16, 32], dtype=torch.int32)
    zero = torch.zeros_like(half)
    cu_half = torch.tensor([0, 16, 48], dtype=torch.int32)
    parts = []
    for start, position in ((cu[:2], zero), (cu[:2] + half, half)):
        parts.append(
            chunk_forward(
                q,
                k,
                v,
                layout="thd",
                causal=True,
                q_position=half,
                k_position=position,
                cu_seqlens_q=cu_half,
                cu_seqlens_q_padded=cu[:2] + half,
                cu_seqlens_k=cu_half,
                cu_seqlens_k_padded=start.contiguous(),
            )
        )
    (out, lse), (part, part_lse) = parts
    merge_chunks(out, lse, part, part_lse, layout="thd")
    rows = torch.cat([torch.arange(16, 32), torch.arange(64, 96)])
    assert sum(lens) == 96
    assert (out[rows] - whole[rows].float()).abs().max() < 2**-7
    others = torch.ones(96, dtype=torch.bool).index_fill(0, rows, False)
    assert torch.count_nonzero(out[others]) == 0 and bool((lse[:, others] == -torch.inf).all())


@pytest.mark.parametrize("d", [20, 72])
def test_flash_attention_signed_probabilities(d):
    """S_dmask's sign is the very mask the output was made with; its size exp(score - maximum)."""
    q = randn(1, 40, 2, d, grad=False)
    k, v = randn(1, 50, 1, d, grad=False), randn(1, 50, 1, d, grad=False)
    out, lse, signed = fa.flash_attn_func(q, k, v, 0.3, causal=True, return_attn_probs=True)
    assert signed.shape == (1, 2, 128, 128) and lse.shape == (1, 2, 40)
    keep = (signed >= 0)[:, :, :40, :50]
    s = torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double()) * d**-0.5
    s = s.masked_fill(~torch.ones(40, 50, dtype=torch.bool).tril(10), -torch.inf)
    p = torch.softmax(s, -1) * keep / 0.7
    want = torch.einsum("bhqk,bkd->bqhd", p, v[:, :, 0].double())
    assert (out.double() - want).abs().max() <= 2**-7 * want.abs().max()
    sizes = (s - s.amax(-1, keepdim=True)).exp()
    assert (signed.abs()[:, :, :40, :50].double() - sizes).abs().max() <= 2**-8


def test_flash_attention_signed_probabilities_under_autocast():
    """Everything was computed from the cast tensors, and then S_dmask was refused for others."""
    x, results = randn(1, 40, 2, 16, grad=False), []
    for y in (x, x.float()):
        torch.manual_seed(0)
        with torch.autocast(x.device.type, x.dtype, enabled=y is not x):
            results.append(fa.flash_attn_func(y, y, y, 0.3, return_attn_probs=True))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("d", [16, 20])
def test_flash_attention_packed_signatures_agree(d):
    qkv = randn(1, 24, 3, 2, d, grad=False)
    q, k, v = qkv.unbind(2)
    cu = torch.tensor([0, 24], dtype=torch.int32)
    want = fa.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa.flash_attn_qkvpacked_func(qkv, causal=True), want)
    assert torch.equal(fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), want)
    packed = fa.flash_attn_varlen_qkvpacked_func(qkv[0], cu, 24, causal=True)
    assert torch.equal(packed, want[0])
    packed = fa.flash_attn_varlen_kvpacked_func(q[0], qkv[0, :, 1:], cu, cu, 24, 24, causal=True)
    assert torch.equal(packed, want[0])
    # FlashAttention's own tests draw a window as a tensor.
    want = fa.flash_attn_func(q, k, v, window_size=(5, 2))
    for pair in ([5, 2], torch.tensor([5, 2])):
        assert torch.equal(fa.flash_attn_func(q, k, v, window_size=pair), want)


@pytest.mark.parametrize(
    ("size", "order"),
    [
        ((1, 24, 1, 1), (0, 1, 2, 3)),
        ((2, 24, 2, 1), (0, 3, 2, 1)),
        ((2, 24, 2, 3), (3, 1, 2, 0)),
        ((2, 24, 2, 1), (0, 2, 3, 1)),
    ],
)
def test_flash_attention_pads_whatever_the_strides(size, order):
    """A head dim of 1 keeps its stride in .contiguous(), and the padded tensor was refused."""
    back = [order.index(i) for i in range(4)]
    plain = [randn(*size, grad=False) for _ in range(3)]
    views = [torch.empty([size[i] for i in order], dtype=x.dtype).permute(back) for x in plain]
    for view, x in zip(views, plain, strict=True):
        view.copy_(x)
    want = fa.flash_attn_func(*plain, causal=True)
    assert want.shape == size and torch.equal(fa.flash_attn_func(*views, causal=True), want)


# The dtypes of q, k and v, autocast's, and what comes out (None: refused).
B, H, F, D = torch.bfloat16, torch.float16, torch.float32, torch.float64
AUTOCAST = [
    ((F, F, F), B, B),
    ((F, F, B), B, B),  # rotary positions in float32
    ((F, F, F), H, H),
    ((B, B, B), H, H),
    ((H, F, B), B, B),
    ((D, D, D), B, None),
    ((F, F, F), None, None),
    ((B, B, B), None, B),
]


@pytest.mark.parametrize(
    ("dtypes", "cast", "want", "compiled"), [(*case, i % 2 == 1) for i, case in enumerate(AUTOCAST)]
)
def test_autocast_casts_as_torch_does(dtypes, cast, want, compiled):
    """Also the operator itself; gradients come in the dtypes of q, k and v."""
    qkv = [torch.randn(1, 20, 2, 16).to(x).requires_grad_() for x in dtypes]

    def run(q, k, v):
        with torch.autocast("cpu", dtype=cast, enabled=cast is not None):
            return stable_attention(q, k, v, causal=True, scale=0.25)

    if compiled and want is not None:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    if want is None:
        with pytest.raises(ValueError, match=r"q\.dtype"):
            run(*qkv)
        return
    out = run(*qkv)
    assert out.dtype == want
    by_torch = [x.to(want) for x in qkv]
    assert torch.equal(out, stable_attention(*by_torch, causal=True, scale=0.25))
    out.float().sum().backward()
    assert [x.grad.dtype for x in qkv] == list(dtypes)
    others = op_arguments(*(x.detach() for x in by_torch))[3:]
    with torch.autocast("cpu", dtype=cast, enabled=cast is not None):
        direct = ops.forward_op(*(x.detach() for x in qkv), *others)[0]
        if cast is not None:
            q, k, v = (x.detach().transpose(1, 2) for x in qkv)
            assert torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == want
    assert torch.equal(direct, out)


FLOPS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (4, 0)},
    "shared heads": {"kv_heads": 1},
    "another d of v": {"dv": 24},
    "longer keys": {"sk": 40},
    "sinks": {"sinks": "off-by-one"},
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops_are_counted_as_those_of_torch(name):
    """torch's own formulas for scaled_dot_product_attention, forwards and backwards."""
    options = dict(FLOPS[name])
    h, sq = 2, 20
    kv_heads, sk = options.pop("kv_heads", h), options.pop("sk", sq)
    dv = options.pop("dv", 16)
    q, k, v = randn(2, sq, h, 16), randn(2, sk, kv_heads, 16), randn(2, sk, kv_heads, dv)
    pairs = 2 * h * sq * sk
    with FlopCounterMode(display=False) as forwards:
        out = stable_attention(q, k, v, **options)
    assert forwards.get_total_flops() == 2 * pairs * (16 + dv)
    with FlopCounterMode(display=False) as backwards:
        out.backward(torch.ones_like(out))
    assert backwards.get_total_flops() == 2 * pairs * (3 * 16 + 2 * dv)
    if dv == 16 and kv_heads == h:
        shapes = [torch.Size((2, h, n, 16)) for n in (sq, sk, sk)]
        assert forwards.get_total_flops() == flop_counter.sdpa_flop_count(*shapes)
        whole = flop_counter.sdpa_backward_flop_count(shapes[0], *shapes)
        assert backwards.get_total_flops() == whole


def test_flops_of_packed_sequences_are_those_of_their_lengths():
    lengths = [3, 0, 17]
    cu = torch.tensor([0, 3, 3, 20], dtype=torch.int32)
    q, k, v = (randn(20, 2, 16) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        out = stable_attention(q, k, v, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu)
        out.backward(torch.ones_like(out))
    assert counter.get_total_flops() == 2 * 2 * sum(n * n for n in lengths) * 7 * 16


@pytest.mark.parametrize("most", [11, 13, 20, 500, None])
def test_bounds_of_packed_sequences_compile_without_sym_min(most, monkeypatch):
    """torch 2.11 cannot trace it where the numbers are constants."""

    def cannot(*_):
        raise TypeError("torch.* op returned non-Tensor")

    monkeypatch.setattr(torch, "sym_min", cannot)
    q, k, v = (randn(20, 2, 16, grad=False) for _ in range(3))
    cu = torch.tensor([0, 9, 20], dtype=torch.int32)

    def run(q, k, v, cu):
        given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": most, "max_seqlen_k": most}
        return stable_attention(q, k, v, layout="thd", causal=True, **given)

    # A second bound would make it a symbol, for which Dynamo itself calls sym_min.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        compiled = torch.compile(run, fullgraph=True, backend="eager")
        assert torch.equal(compiled(q, k, v, cu), run(q, k, v, cu))
