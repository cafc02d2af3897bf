"""Roles of the sm_90 kernels in random orders (`hopper_protocol`): nobody reads or overwrites a
tile too early or waits forever, and every sum has every product as often as it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopper_cases import Case, problem
from hopper_language import Sources
from hopper_protocol import Fault

from stable_attention.problem import Problem

SEEDS = range(8)
MASKS = {
    "causal": {"window_right": 0},
    "full": {"stabilizer": "none"},
    "band": {"window_left": 70, "window_right": 0},
    "grouped": {"window_right": 0, "kv_heads": 1},
    "short": {"sq": 60, "sk": 60, "batch": 2},
    "ragged": {"sq": 290, "sk": 170, "window_right": 0},
}
SHAPES = {
    "key_gradients": [(192, 128), (256, 256)],
    "query_gradient": [(192, 128), (256, 256)],
    "backward": [(64, 64), (128, 128)],
    "forward": [(64, 64), (128, 128), (192, 128), (256, 256)],
}
LENGTHS = {"key_gradients": 192, "query_gradient": 256, "backward": 256, "forward": 384}


def asked(kernel: str, d: int, dv: int, mask: str) -> Problem:
    n = LENGTHS[kernel]
    return problem(d, dv, **({"sq": n, "sk": n} | MASKS[mask]))


def tried(kernel: str, case: Case, seeds: range, sources: Sources) -> None:
    for seed in seeds:
        case.run(kernel, seed, sources)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "kernel, d, dv", [(kernel, *shape) for kernel in SHAPES for shape in SHAPES[kernel]]
)
def test_roles_in_any_order(kernel: str, d: int, dv: int, mask: str) -> None:
    tried(kernel, Case(asked(kernel, d, dv, mask)), SEEDS, Sources())


PACKED = ((150, 150), (0, 0), (70, 200), (0, 90), (64, 0))


@pytest.mark.parametrize("kernel, d, dv", [(k, *shape) for k in SHAPES for shape in SHAPES[k]])
def test_packed_sequences(kernel: str, d: int, dv: int) -> None:
    """Some without queries or keys."""
    tq, tk = (sum(n) for n in zip(*PACKED, strict=True))
    packed = problem(
        d, dv, 150, 200, window_right=0, layout="thd", batch=len(PACKED), tq=tq, tk=tk
    )  # fmt: skip
    tried(kernel, Case(packed, lengths=PACKED), SEEDS, Sources())
    projecting = replace(packed, **PROJECTING)
    if kernel != "forward":
        tried(kernel, Case(projecting, lengths=PACKED), SEEDS, Sources())


PROJECTING = {"stabilizer": "compensated_projected"}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [64, 128])
def test_rows_of_ds_are_summed_and_followed(d: int, mask: str) -> None:
    given = replace(asked("backward", d, d, mask), **PROJECTING)
    tried("backward", Case(given), SEEDS, Sources())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d, dv", SHAPES["query_gradient"])
@pytest.mark.parametrize("kernel", ["key_gradients", "query_gradient"])
def test_rows_of_ds_in_two_kernels(kernel: str, d: int, dv: int, mask: str) -> None:
    given = replace(asked(kernel, d, dv, mask), **PROJECTING)
    tried(kernel, Case(given), SEEDS, Sources())


@pytest.mark.parametrize("d", [64, 128])
def test_parts_of_query_heads(d: int) -> None:
    given = asked("backward", d, d, "grouped")
    tried("backward", Case(given, parts=2), SEEDS, Sources())


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("d, dv", SHAPES["forward"])
def test_segments_of_the_forward_pass(d: int, dv: int, low: bool) -> None:
    for mask in ("causal", "band", "grouped", "ragged"):
        for segment in (1, 2):
            case = Case(asked("forward", d, dv, mask), low=low, segment=segment)
            tried("forward", case, range(3), Sources())


def test_segments_of_packed_sequences() -> None:
    tq, tk = (sum(n) for n in zip(*PACKED, strict=True))
    packed = problem(
        256, 256, 150, 200, window_right=0, layout="thd", batch=len(PACKED), tq=tq, tk=tk
    )  # fmt: skip
    tried("forward", Case(packed, lengths=PACKED, segment=1), range(6), Sources())


def test_segments_as_launched() -> None:
    """Over so many keys that there are two and a rest."""
    tried("forward", Case(problem(256, 256, 130, 4300)), range(1), Sources())


PLANTED = {
    "operand freed before its first use": (
        "key_gradients", 192, "before a load of it ends",
        ("x = _operand(a.slots, slot, own_s, A_PARTS, X_L)",
         "... / mbarrier.arrive(a.empty.index(slot), count=1)"),
        ("mbarrier.arrive(a.empty.index(of_keys), count=1)", ""),
    ),
    "P freed before its use": (
        "key_gradients", 256, "before a load of it ends",
        ("p = fetched(p_s.index(p_place), S_L)", '... / arrive_named(P_EMPTY + p_place, "256")'),
        ('if W == 1: / arrive_named(P_EMPTY + p_place, "256")', ""),
    ),
    "slot of the other side freed a step early": (
        "key_gradients", 192, "before a product of it ends",
        ("acc, begun = _added(adding, begun, len(x)) / if LAST: / mbarrier.arrive(read, count=1)",
         "if LAST: mbarrier.arrive(read, count=1) / acc, begun = _added(adding, begun, len(x))"),
    ),
    "slot never freed": (
        "key_gradients", 192, "nobody can go on",
        ("mbarrier.arrive(a.empty.index(slot), count=1)", "pass"),
    ),
    "own place written without a fence": (
        "key_gradients", 256, "without a fence", ("fence_async_shared() / return", "return"),
    ),
    "scores not awaited": (
        "query_gradient", 192, "not awaited",
        ("warpgroup_mma_wait(1, deps=(s, dp))", "warpgroup_mma_wait(2, deps=(s, dp))"),
    ),
    "slot of K freed a step early": (
        "query_gradient", 192, "before a product of it ends",
        ("dq, s, dp = _await_keys(T.PARTS + 1,", "arrive_named(SLOT_OF_K + before, ALL) / ..."),
        ("T.PARTS) / arrive_named(SLOT_OF_K + before, ALL)", "T.PARTS)"),
    ),
    "slot of K freed twice": (
        "query_gradient", 192, "one too many",
        ("arrive_named(SLOT_OF_K + before, ALL)", "... / ..."),
    ),
    "Q never freed": (
        "query_gradient", 192, "nobody can go on",
        ("arrive_if(BUFFER_OF_Q, i + 1 == blocks, ALL, False)", ""),
    ),
    "blocks passed over before they are full": (
        "query_gradient", 192, "one too many",
        ("mbarrier.wait(smem.k.full.index(k), k_parity) / arrive_named(SLOT_OF_K + k, ALL)",
         "arrive_named(SLOT_OF_K + k, ALL)"),
    ),
    "dS read before the other half is there": (
        "backward", 128, "not full",
        ("if not FIRST: / mbarrier.wait(smem.ds.full.index(before), parity ^ before)",
         "if not FIRST:"),
    ),
    "dS overwritten while it is read": (
        "backward", 128, "before a product of it ends",
        ("mbarrier.wait(smem.ds.empty.index(slot), parity ^ 1)", ""),
    ),
    "dQ freed before it is read": (
        "backward", 64, "before a store of it ends",
        ("tma.store_wait(0) / mbarrier.arrive(smem.dq.empty, count=1)",
         "mbarrier.arrive(smem.dq.empty, count=1)"),
    ),
    "turn not awaited": ("backward", 128, "others", ("wait_for_turn(turns + tile, turn)", "")),
    "turn not passed on": (
        "backward", 64, "nobody can go on", ("pass_turn(turns + tile)", "pass"),
    ),
    "rows: dS freed before it is summed": (
        "excess", 64, "before a load of it ends",
        ("found = () / for i in", "mbarrier.arrive(smem.ds.empty.index(slot), count=1) / ..."),
        ("mbarrier.arrive(smem.ds.empty.index(slot), count=1) / return", "return"),
    ),
    "rows: dS never freed": (
        "excess", 128, "nobody can go on",
        ("mbarrier.arrive(smem.ds.empty.index(slot), count=1)", ""),
    ),
    "rows: dS summed before it is there": (
        "excess", 128, "not full", ("mbarrier.wait(smem.ds.full.index(slot), parity)", ""),
    ),
    "rows: the writer's half too": (
        "backward", 64, "not full",
        ("mbarrier.wait(smem.ds.full.index(W), (number >> 1) & 1)", ""),
    ),
    "rows: sums overwritten while they leave": (
        "excess", 64, "before a store of it ends|nobody can go on|without a fence",
        ("mbarrier.wait(excess.ring.empty.index(slot), parity ^ 1)", ""),
    ),
    "rows: sums without a fence": (
        "excess", 128, "without a fence", ("fence_async_shared() / mbarrier", "mbarrier"),
    ),
    "rows: sums leave before they are there": (
        "backward", 64, "not full|without a fence|nobody can go on|Sequence",
        ("mbarrier.wait(excess.ring.full.index(W), (number >> 1) & 1)", ""),
    ),
    "rows: half of a tile not followed": (
        "excess", 64, "Sequence",
        ("follow_largest(found, m, n, excess, HALF, HALF, T)",
         "follow_largest(found, m, n, excess, 0, HALF, T)"),
    ),
    "rows: a tile not followed": (
        "backward", 128, "Sequence",
        ("follow_largest(found, tile, n, excess, 0, HALF, T)",
         "follow_largest(found, tile, n, excess, 0, 0, T)"),
    ),
    "rows: a block of dS not summed": (
        "query_gradient", 192, "Sequence",
        ("pinned(sums + by_lane(widened(slopes)))", "pinned(by_lane(widened(slopes)))"),
    ),
    "rows: the key of another batch entry": (
        "projection", 192, "Sequence",
        ("keys.ptr + b.to(gl.int64) * keys.stride_b +", "keys.ptr +"),
    ),
    "rows: delta of the next rows": (
        "projection", 256, "Sequence|delta",
        ("gl.store(numbers.delta_ptr + place + rows, delta, mask=here)",
         "gl.store(numbers.delta_ptr + place + 64 + rows, delta, mask=here)"),
    ),
    "rows: second plane of LSE past its end": (
        "key_gradients", 192, "slice 128",
        ("planes_s.slice(ROWS + FIRST, T.N)", "planes_s.slice(2 * ROWS + FIRST, T.N)"),
    ),
    "Q's place free while O leaves": (
        "consumer", 128, "before a store of it ends",
        ("(blocks == 1) & (tiles > 0), ALL, True)", "(blocks == 1) & (tiles > 0), ALL, False)"),
    ),
    "V freed a step early": (
        "consumer", 64, "before a product of it ends",
        ("p_rounded = p.to(dtype) / if T.ROUNDED: / l_done, done",
         "arrive_named(SLOT_OF_V + v, ALL) / p_rounded = p.to(dtype) / "
         "if T.ROUNDED: /     l_done, done"),
        ("done = warpgroup_mma_wait(0, deps=(made,)) / arrive_named(SLOT_OF_V + v, ALL)",
         "done = warpgroup_mma_wait(0, deps=(made,))"),
    ),
    "turn of a consumer kept": (
        "consumer", 64, "nobody can go on",
        ('made = add_weighted(p_rounded, v_s.index(v), acc, i > 0, P_L) / '
         'arrive_named(TURN + 1 - W, "256")',
         "made = add_weighted(p_rounded, v_s.index(v), acc, i > 0, P_L)"),
    ),
    "wait for V left out": (
        "consumer", 192, "too many|before a product",
        ("mbarrier.wait(v_full.index(v), v_parity) / if T.ROUNDED: / l_made = add_rounded_sum("
         "p_rounded, smem.ones, l_rounded, i > 0, PE_L)",
         "if T.ROUNDED: /     l_made = add_rounded_sum("
         "p_rounded, smem.ones, l_rounded, i > 0, PE_L)"),
    ),
    "segments: total not rescaled": (
        "softmax", 256, "another shift",
        ("return y * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, like)), 1) + x",
         "return y + x"),
    ),
    "segments: one lost": (
        "consumer", 256, r"^\(\d+, \d+\)",
        ("acc = add_kept(total_p, acc, new_factor)", "pass"),
    ),
    "segments: total lost at the end": (
        "consumer", 256, r"^\(\d+, \d+\)",
        ("acc = add_kept(total_p, acc, total_factor)", "pass"),
    ),
    "segments: total of the item before": (
        "consumer", 256, "not left",
        ("if begin > 0: / acc = add_kept", "if begin >= 0: /     acc = add_kept"),
    ),
    "segments: both consumers in one place": (
        "consumer", 256, "another's|not left",
        ("(gl.program_id(0) * 2 + W) * 64 * T.DV", "gl.program_id(0) * 64 * T.DV"),
    ),
    "segments: all programs in one place": (
        "consumer", 256, "another's|not left",
        ("(gl.program_id(0) * 2 + W) * 64 * T.DV", "W * 64 * T.DV"),
    ),
    "segments: one added to the next too": (
        "consumer", 256, "Counter",
        ("total_shift = shift / in_segment = 0", "total_shift = shift"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str) -> None:
    module, d, message, *edits = PLANTED[name]
    of_rows = name.startswith("rows: ")
    segment = int(name.startswith("segments: "))
    kernels = {
        "consumer": "forward",
        "softmax": "forward",
        "excess": "backward",
        "projection": "query_gradient",
    }
    kernel = kernels.get(module, module)
    dv = dict(SHAPES[kernel])[d]
    sources = Sources({module: edits})
    with pytest.raises((Fault, AssertionError), match=message):
        for mask in MASKS:
            given = asked(kernel, d, dv, mask)
            given = replace(given, **PROJECTING) if of_rows else given
            tried(kernel, Case(given, segment=segment), range(30), sources)
