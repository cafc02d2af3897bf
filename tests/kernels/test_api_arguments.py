"""Bad arguments raise `AttentionArgumentError` with value, allowed set and remedy."""

from __future__ import annotations

import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch

from stable_attention import AttentionArgumentError, stable_attention
from stable_attention import flash_compat as fa
from stable_attention.chunks import chunk_forward
from stable_attention.layouts import dims, shape, strides
from stable_attention.problem import window_bounds
from stable_attention.stabilizers import STABILIZERS


def qkv(**changes):
    made = {
        "q": torch.zeros(2, 8, 4, 16, dtype=torch.bfloat16),
        "k": torch.zeros(2, 8, 2, 16, dtype=torch.bfloat16),
        "v": torch.zeros(2, 8, 2, 16, dtype=torch.bfloat16),
    }
    return made | changes


def zeros(*size, dtype=torch.bfloat16):
    return torch.zeros(size, dtype=dtype)


def of_width(d):
    return {"q": zeros(1, 4, 1, d), "k": zeros(1, 4, 1, d), "v": zeros(1, 4, 1, 16)}


CU = torch.tensor([0, 3, 8], dtype=torch.int32)
PACKED = {"q": zeros(8, 2, 16), "k": zeros(8, 2, 16), "v": zeros(8, 2, 16)}
BAD = {
    "rank": (qkv(q=zeros(8, 4, 16)), {}, r"q\.dim\(\) is 3"),
    "float32": (qkv(k=zeros(2, 8, 2, 16, dtype=torch.float32)), {}, "k.dtype is torch.float32"),
    "mixed dtypes": (qkv(v=zeros(2, 8, 2, 16, dtype=torch.float16)), {}, "v.dtype"),
    "last stride": (qkv(q=zeros(2, 8, 16, 4).transpose(2, 3)), {}, r"q\.stride\(-1\) is 4"),
    "kv heads": (qkv(k=zeros(2, 8, 3, 16), v=zeros(2, 8, 3, 16)), {}, "heads of q is 4"),
    "k head dim": (qkv(k=zeros(2, 8, 2, 24)), {}, "head dim of k is 24"),
    "v length": (qkv(v=zeros(2, 9, 2, 16)), {}, "length of v is 9"),
    "odd head dim": (of_width(20), {}, "head dim of q and k is 20"),
    "wide head dim": (of_width(264), {}, "head dim of q and k is 264"),
    "stabilizer": (qkv(), {"stabilizer": "fp32"}, "'compensated', 'dynamic_max', 'none'"),
    "broken": (qkv(), {"stabilizer": "paper_bf16"}, "allow_broken=True"),
    "sinks shape": (qkv(), {"sinks": torch.zeros(2)}, r"shape \(2,\)"),
    "cu without thd": (qkv(), {"cu_seqlens_q": CU}, "cu_seqlens_q is given"),
    "seed": (qkv(), {"dropout_p": 0.1, "dropout_seed": torch.zeros(2)}, "dropout_seed"),
    "thd without cu": (PACKED, {"layout": "thd"}, "cu_seqlens_q is None"),
    "thd cu dtype": (PACKED, {"layout": "thd", "cu_seqlens_q": CU.long(), "cu_seqlens_k": CU},
                     "torch.int64"),
    "padded starts": (qkv(), {"cu_seqlens_q_padded": CU}, "cu_seqlens_q_padded"),
    # Scalars that float32 or a softcap cannot serve: a softcap of 1e6 was wrong by 4 %, of 1e8
    # uniform attention; a scale of 1e-60 gave NaN.
    "large softcap": (qkv(), {"softcap": 1e6}, "softcap is 1000000.0"),
    "softcap too large": (qkv(), {"softcap": math.nextafter(1e5, 2e5)}, "softcap is"),
    "small softcap": (qkv(), {"softcap": 1e-45}, "softcap is 1e-45"),
    "softcap too small": (qkv(), {"softcap": 2.0**-127}, "softcap is"),
    "small scale": (qkv(), {"scale": 1e-60}, "scale is 1e-60"),
    "scale too small": (qkv(), {"scale": 2.0**-127}, "scale is"),
    "large scale": (qkv(), {"scale": 1e39}, r"scale is 1e\+39"),
    "scale too large": (qkv(), {"scale": 2.0**127 * 1.01}, "scale is"),
    "ratio too small": (qkv(), {"scale": 2.0**-120, "softcap": 1e5}, "scale / softcap is"),
    "ratio too large": (qkv(), {"scale": 2.0**100, "softcap": 2.0**-100}, "scale / softcap is"),
    # They were constants: a learned scale stayed what it was.
    "learned scale": (qkv(), {"scale": torch.ones((), requires_grad=True)}, "wants a gradient"),
    "learned softcap": (qkv(), {"softcap": torch.ones(1, requires_grad=True)}, "wants a gradient"),
}  # fmt: skip
THD = PACKED | {"layout": "thd", "cu_seqlens_q": CU, "cu_seqlens_k": CU}
RAGGED = torch.nested.nested_tensor([zeros(3, 2, 16), zeros(5, 2, 16)], layout=torch.jagged)
# Without a shape, and without strides.
UNSHAPED = torch.nested.nested_tensor([zeros(3, 2, 16), zeros(5, 2, 16)])
UNSTRIDED = zeros(2, 8, 4, 16).to_sparse_csr()
NEGATED = torch._neg_view(zeros(2, 8, 4, 16))
DENSE, SEEDED = qkv(), qkv(dropout_p=0.1)
FLAT = dict.fromkeys("qkv", zeros(16))
# (options of a call that is right, the name, values that are wrong)
WRONG = [
    (DENSE, "attn_mask", (torch.ones(8, 8), True)),
    (DENSE, "bias", (torch.ones(8, 8),)),
    (DENSE, "alibi_slopes", (torch.ones(4),)),
    (DENSE, "q", (None, [1.0], "q", zeros(2, 8, 4, 16).to_sparse(), RAGGED, UNSHAPED, UNSTRIDED)),
    (DENSE, "q", (NEGATED,)),
    (DENSE, "k", (None, [1.0], UNSHAPED, UNSTRIDED, NEGATED)),
    (DENSE, "v", (None, 1.0, UNSHAPED, UNSTRIDED, NEGATED)),
    (DENSE, "layout", (None, ["bshd"], 3, "hbsd")),
    (DENSE, "window", ((-2, 0), (1, 2, 3), (1,), 4, "ab", (1.0, 2), (None, 0), {1: 2, 3: 4})),
    (DENSE, "scale", (-1.0,)),
    (DENSE, "scale", ("x", "1", b"1", [1.0], torch.ones(2), math.nan, math.inf, 10**400, 1j)),
    (DENSE, "softcap", (-1.0, None, "x", math.nan, math.inf, 10**400, (1.0,))),
    (DENSE, "dropout_p", (None, "x", math.nan, -0.1, 1.0, [0.1])),
    (DENSE, "sinks", ([0.0] * 4, 0.0, True, (), {}, torch.zeros(4, dtype=torch.int32))),
    (DENSE, "sinks", ("one",)),
    (FLAT, "sinks", ("off-by-one",)),
    (SEEDED, "dropout_seed", (1.5, 2**64, 2**63, -(2**63) - 1, "x", [1])),
    (DENSE, "dropout_seed", (1.5, 2**64, "x")),
    (DENSE, "batch_offset", (1.5, -1, 2**40, 2**31, "x", None, torch.ones(2, dtype=torch.int32))),
    (DENSE, "head_offset", (1.5, -1, 2**40, 2**31, "x", None, torch.ones(()))),
    (DENSE, "beta", ("x", None, math.nan, math.inf, 1e39, [2.0])),
    (DENSE, "eps", ("x", None, math.nan, -math.inf, 1e39)),
    (DENSE, "causal", ("yes", None, 2, torch.tensor(True), [])),
    (DENSE, "deterministic", ("no", None, 2)),
    (DENSE, "return_lse", ("no", None)),
    (DENSE, "return_max_logits", ("no", None)),
    (DENSE, "return_o_lo", ("no", None)),
    (DENSE, "allow_broken", ("no", None)),
    (DENSE, "stabilizer", (None, 3, ["none"])),
    (DENSE, "o_lo", (None, 3, "fp8")),
    (DENSE, "cu_seqlens_q", ([0, 8],)),
    (DENSE, "cu_seqlens_k_padded", ([0, 8],)),
    (DENSE, "max_seqlen_q", (8, "x")),
    (DENSE, "max_seqlen_k", (torch.tensor(8),)),
    (THD, "cu_seqlens_q", ([0, 3, 8], None, 8)),
    (THD, "cu_seqlens_k", ([0, 3, 8], "x")),
    (THD, "cu_seqlens_q_padded", ([0, 3], 0)),
    (THD, "cu_seqlens_k_padded", ((0, 3), "x")),
    (THD, "max_seqlen_q", ("x", 7.5, -1, [8], torch.ones(2, dtype=torch.int32), torch.ones(()))),
    (THD, "max_seqlen_k", ("x", math.nan, -1, True + 0.5)),
]


@pytest.mark.parametrize(("right", "name", "values"), WRONG, ids=[x[1] for x in WRONG])
def test_every_wrong_type_or_range_is_named(right, name, values):
    for value in values:
        with pytest.raises(AttentionArgumentError) as caught:
            stable_attention(**right | {name: value})
        text = str(caught.value)
        named = name if right is not FLAT else "q.dim()"
        assert text.startswith(f"{named} is ") and "; allowed: " in text, (value, text)
        assert len(text.split(". ", 1)[1]) > 4, text  # the remedy


@pytest.mark.parametrize(
    "options", [{"softcap": 1e5}, {"softcap": 2.0**-126, "scale": 2.0**-100}, {"scale": 2.0**-126}]
)
def test_the_last_scalars_that_are_served_give_finite_gradients(options):
    q, k, v = (torch.randn(1, 8, 1, 16).bfloat16().requires_grad_() for _ in range(3))
    out = stable_attention(q, k, v, **options)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(bool(x.isfinite().all()) for x in (out, *grads))


def test_an_unknown_keyword_is_still_a_type_error():
    with pytest.raises(TypeError, match="attention_bias"):
        stable_attention(**qkv(), attention_bias=None)


def test_numbers_of_other_libraries_count():
    """NumPy's scalars and 0-d tensors where a number is wanted: they were taken, and still are."""
    lengths = {"max_seqlen_q": np.int64(5), "max_seqlen_k": torch.tensor(5, dtype=torch.int32)}
    want = stable_attention(**THD, causal=True, scale=0.5, softcap=2.0)
    options = {"causal": np.True_, "scale": np.float32(0.5), "softcap": torch.tensor(2.0)}
    options |= {"batch_offset": np.int32(0), "beta": 2, "deterministic": 1, "dropout_p": 0}
    assert torch.equal(stable_attention(**THD, **lengths, **options), want)
    with torch.no_grad():  # nothing is lost of a learned one
        learned = torch.nn.Parameter(torch.tensor(0.5))
        options["scale"] = learned
        assert torch.equal(stable_attention(**THD, **lengths, **options), want)


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_is_named_with_its_remedy(name):
    tensors, options, text = BAD[name]
    with pytest.raises(AttentionArgumentError) as caught:
        stable_attention(**tensors, **options)
    message = str(caught.value)
    assert re.search(text, message), message
    assert "allowed: " in message and isinstance(caught.value, ValueError)


def test_the_error_survives_pickling_and_copying():
    """As a worker's error does on its way to the process that waits for it."""
    error = AttentionArgumentError("q.device", torch.device("cpu"), "cuda", "Move it.")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is AttentionArgumentError
        assert str(again) == str(error) == "q.device is cpu; allowed: cuda. Move it."


def test_a_compiled_call_says_what_is_wrong():
    compiled = torch.compile(stable_attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="AttentionArgumentError") as caught:
        compiled(**qkv(), scale=-1.0)
    # An older Dynamo shows the class and not the text.
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12):
        assert "Negate q for a negative scale" in str(caught.value)


def test_device_values_are_checked_only_in_debug_mode(monkeypatch):
    """cu_seqlens beyond the buffer: the kernels clamp; the debug mode says so."""
    q = zeros(8, 1, 16)
    bad = torch.tensor([0, 9], dtype=torch.int32)
    call = {"layout": "thd", "cu_seqlens_q": bad, "cu_seqlens_k": bad}
    out = stable_attention(q, q, q, **call)
    assert out.shape == q.shape and bool(torch.isfinite(out).all())
    monkeypatch.setenv("STABLE_ATTENTION_DEBUG", "1")
    with pytest.raises(AttentionArgumentError, match="non-decreasing"):
        stable_attention(q, q, q, **call)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_seqlen_q": 4}, "max_seqlen_q is 4; allowed: at least 5, the longest"),
        ({"max_seqlen_k": 2}, "max_seqlen_k is 2"),
        ({"cu_seqlens_q_padded": CU[1:]}, r"cu_seqlens_q_padded is \[3, 8\]"),
        ({"cu_seqlens_k_padded": -CU}, "cu_seqlens_k_padded is"),
        ({"cu_seqlens_q_padded": CU - CU}, r"cu_seqlens_q_padded is .*share no token"),
    ],
)
def test_debug_mode_checks_bounds_and_starts(monkeypatch, given, text):
    """Tokens beyond a bound are left out, without a word otherwise."""
    monkeypatch.setenv("STABLE_ATTENTION_DEBUG", "1")
    stable_attention(**THD, max_seqlen_q=5, max_seqlen_k=9, cu_seqlens_q_padded=CU)
    with pytest.raises(AttentionArgumentError, match=text):
        stable_attention(**THD | given)


def test_debug_mode_checks_that_gradients_have_tokens_of_their_own(monkeypatch):
    """Sequences may read the same keys; the gradient of the last one replaced the others'."""
    monkeypatch.setenv("STABLE_ATTENTION_DEBUG", "1")
    shared = THD | {"cu_seqlens_k_padded": CU - CU}
    stable_attention(**shared)
    learned = shared["v"].clone().requires_grad_()
    with pytest.raises(AttentionArgumentError, match=r"cu_seqlens_k_padded is .*share no token"):
        stable_attention(**shared | {"v": learned})


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch):
    monkeypatch.setattr("stable_attention.ops.interpreting", lambda: False)
    with pytest.raises(AttentionArgumentError, match="TRITON_INTERPRET=1"):
        stable_attention(**qkv())


@pytest.mark.parametrize("wants", [True, False])
def test_tensors_without_memory_are_refused_under_the_interpreter_too(wants):
    meta = {name: x.to("meta").requires_grad_(wants) for name, x in qkv().items()}
    with pytest.raises(AttentionArgumentError, match=r"q.device is meta; allowed: cuda \(or cpu"):
        stable_attention(**meta)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
def test_layout_helpers_are_inverse(layout):
    size = shape(layout, batch=1 if layout == "thd" else 3, length=5, heads=2, d=8)
    x = torch.zeros(size)
    batch, length, heads, d = dims(x, layout)
    assert shape(layout, batch=batch, length=length, heads=heads, d=d) == size
    sb, ss, sh = strides(x, layout)
    assert {sb, ss, sh} - {0} == set(x.stride()[:-1])


def test_causal_bounds_the_window_on_the_right():
    assert window_bounds(True, (3, 9)) == (3, 0)
    assert window_bounds(True, None) == (-1, 0)
    assert window_bounds(False, None) == (-1, -1)


def test_saved_bytes_per_token_and_head():
    """What docs/numerics.md states: O, LSE, and the low-order part or the rest of an LSE."""
    assert STABILIZERS["none"].saved_bytes(128) == 2 * 128 + 4
    assert STABILIZERS["compensated"].saved_bytes(128, "bf16") == 4 * 128 + 4
    assert STABILIZERS["compensated"].saved_bytes(128, "int8") == 3 * 128 + 4
    assert STABILIZERS["projected"].saved_bytes(128) == 2 * 128 + 8
    assert STABILIZERS["compensated_projected"].saved_bytes(128, "int8") == 3 * 128 + 8


def flash(name, **options):
    """A call of a FlashAttention function, right but for ``options``."""
    q = options.pop("q", zeros(1, 8, 2, 16))
    packed = options.pop("packed", None)
    ends = torch.tensor([0, 8], dtype=torch.int32)
    functions = {
        "plain": lambda: fa.flash_attn_func(q, options.pop("k", q), q, **options),
        "kv": lambda: fa.flash_attn_kvpacked_func(q, packed, **options),
        "qkv": lambda: fa.flash_attn_qkvpacked_func(packed, **options),
        "varlen": lambda: fa.flash_attn_varlen_func(
            *(q[0],) * 3, **{"max_seqlen_q": 8, "max_seqlen_k": 8} | options
            | {x: options.get(x, ends) for x in ("cu_seqlens_q", "cu_seqlens_k")},
        ),
        "varlen kv": lambda: fa.flash_attn_varlen_kvpacked_func(q[0], packed, ends, ends, 8, 8),
        "varlen qkv": lambda: fa.flash_attn_varlen_qkvpacked_func(packed, ends, 8),
    }  # fmt: skip
    return functions[name]()


WRONG_FLASH = [
    ("plain", "window_size", (4, None, (1, 2, 3), (1.5, 0), "ab", (None, None))),
    ("plain", "softcap", (None, "x")),
    ("plain", "dropout_p", (None, "x", 1.0, -0.5)),
    ("plain", "softmax_scale", ("x", -1.0)),
    ("plain", "causal", ("yes", None)),
    ("plain", "deterministic", ("no",)),
    ("plain", "alibi_slopes", (torch.ones(2),)),
    ("plain", "q", (None, [1.0], zeros(8, 2, 16), zeros(1, 8, 2, 0), zeros(1, 8, 2, 264))),
    ("plain", "k", (None, zeros(1, 8, 2, 15))),
    ("varlen", "max_seqlen_q", ("x", 7.5, -1)),
    ("varlen", "max_seqlen_k", ("x",)),
    ("varlen", "cu_seqlens_q", ([0, 8], None)),
    ("kv", "packed", (zeros(1, 8, 3, 2, 16), zeros(1, 8, 2, 16), None, [1.0])),
    ("qkv", "packed", (zeros(1, 8, 2, 2, 16), zeros(1, 8, 4, 2, 16), zeros(8, 3, 2, 16), None)),
    ("varlen kv", "packed", (zeros(8, 3, 2, 16), zeros(8, 2, 16), None)),
    ("varlen qkv", "packed", (zeros(8, 2, 2, 16), zeros(1, 8, 3, 2, 16), None)),
]


@pytest.mark.parametrize(("function", "name", "values"), WRONG_FLASH)
def test_wrong_arguments_of_flash_attention_are_named(function, name, values):
    for value in values:
        with pytest.raises(AttentionArgumentError) as caught:
            flash(function, **{name: value})
        text = str(caught.value)
        assert "; allowed: " in text and len(text.split(". ", 1)[1]) > 4, (value, text)


@pytest.mark.parametrize(
    "call",
    [
        lambda q: fa.flash_attn_func(q, q, q, alibi_slopes=torch.ones(4)),
        lambda q: fa.flash_attn_varlen_func(
            q[0], q[0], q[0], CU, CU, 8, 8, block_table=torch.zeros(1)
        ),
        lambda q: fa.flash_attn_with_kvcache(q, q, q),
    ],
)
def test_what_flash_attention_has_and_we_have_not_raises(call):
    with pytest.raises(AttentionArgumentError):
        call(zeros(1, 8, 4, 16))


@pytest.mark.parametrize("name", ["projected", "compensated_projected"])
def test_a_projection_needs_rows_whose_sum_is_known(name):
    """A softcap bends dS after the sum; chunks make dK before it: refused with a remedy."""
    instead = "compensated" if name == "compensated_projected" else "none"
    with pytest.raises(AttentionArgumentError, match=f"softcap.*Use stabilizer='{instead}'"):
        stable_attention(**qkv(), softcap=20.0, stabilizer=name)
    if name == "projected":  # its delta needs the sum before dK of the first chunk
        with pytest.raises(AttentionArgumentError, match=r"chunk.*'compensated_projected'"):
            chunk_forward(**qkv(), stabilizer=name)
