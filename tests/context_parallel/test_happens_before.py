"""Streams, memory and the order of transfers, proved for every schedule without a GPU."""

import pytest
import torch
from cp_cases import Case, make_inputs
from emulated import run
from happens_before import COMPUTE, Device, Watched, Work, batches, hidden, races, recorded, stuck

from megatron_patch.context_parallel import communicator
from megatron_patch.context_parallel.movement import Ring
from stable_attention.reference import chunks as primitives

CASES = [
    *(Case(size=n, mode="p2p", s=8 * n, sinks=True) for n in (2, 3, 4, 8)),
    Case(size=4, mode="p2p", causal=False),
    Case(size=4, mode="p2p", window=(5, 0)),
    Case(size=8, mode="p2p", s=64, window=(9, 0), sinks=True),
    Case(size=4, mode="p2p", layout="thd"),
    Case(size=4, mode="p2p", layout="thd", window=(5, 0)),
    Case(size=4, mode="p2p", gradient_wire="bf16", dtype="bf16", causal=False),
    Case(size=4, mode="p2p", dropout_p=0.2),
    *(Case(size=n, mode="all_gather", s=8 * n, kv=4) for n in (2, 4)),
    Case(size=4, mode="all_gather", layout="thd", gradient_wire="bf16", dtype="bf16"),
    *(Case(size=n, mode="a2a", s=8 * n, sinks=True) for n in (2, 4)),
    Case(size=4, mode="a2a", kv=1, layout="thd"),
    Case(size=4, mode="a2a+p2p", h=8, kv=4),
    Case(size=8, mode="a2a+p2p", s=64, h=8, kv=1, layout="thd"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_access_is_ordered_and_no_order_of_launches_hangs(case, monkeypatch):
    with recorded(monkeypatch) as devices:
        run(case)
    assert not races(devices)
    for one_queue in (False, True):
        assert not stuck(devices, one_queue=one_queue)
    assert all(batches(device) for device in devices)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_every_transfer_hides_behind_attention(size, causal, monkeypatch):
    """Keys behind the block before, gradients behind the block after: all but the last ones."""
    with recorded(monkeypatch) as devices:
        watched = Watched(primitives, devices)
        run(Case(size=size, mode="p2p", s=8 * size, causal=causal), primitives=watched)
    for device in devices:
        found = batches(device)
        groups = size // 2  # of the n - 1 steps, two in each but the last
        # Keys of every group, the largest logits, then keys and gradients of every group.
        assert len(found) == 3 * groups + 1
        keys, back = found[:groups], found[groups + 1 :]
        assert all(hidden(device, b, "chunk_forward") for b in keys)
        assert [hidden(device, b, "chunk_backward") for b in back] == [True] * (len(back) - 1) + [
            False
        ]


def test_no_gradients_wait_for_other_ranks_while_a_rank_computes(monkeypatch):
    """A transfer that waits keeps processors: all ranks start those of a group once it is done."""
    with recorded(monkeypatch) as devices:
        run(Case(size=4, mode="p2p", s=32), primitives=Watched(primitives, devices))
    launches = {0: (0, 1, 2, 3), 1: (0, 1, 3, 4), 2: (0, 1, 2, 3), 3: (0, 1, 2, 3)}
    for rank, before in launches.items():  # keys of both groups, then gradients of both
        device = devices[rank]
        backward = [k.clock[COMPUTE] for k in device.kernels if k.name == "chunk_backward"]
        starts = [batch.clock[COMPUTE] for batch in batches(device)[-4:]]
        assert tuple(sum(k <= start for k in backward) for start in starts) == before


def test_all_gather_brings_the_next_heads_while_it_computes(monkeypatch):
    case = Case(size=4, mode="all_gather", kv=4)
    with recorded(monkeypatch) as devices:
        run(case, primitives=Watched(primitives, devices))
    for device in devices:
        found = batches(device)
        forward = found[:8]  # keys and values of four heads; the first ones have nothing to hide
        assert [hidden(device, b, "chunk_forward") for b in forward] == [False] * 2 + [True] * 6


def test_a_rank_launches_as_few_kernels_as_the_mask_allows(monkeypatch):
    """One for two steps of the ring whose keys the same queries see, forward and backward; two a
    group of heads that were gathered."""
    ring = {4: [3, 4, 3, 3], 8: [5, 6, 5, 6, 5, 6, 5, 5]}  # odd ranks change sides within a group
    gathered, heads = {4: [4] * 4}, {4: [1] * 4}
    for mode, wanted in (("p2p", ring), ("all_gather", gathered), ("a2a", heads)):
        for size, launches in wanted.items():
            with recorded(monkeypatch) as devices:
                run(Case(size=size, mode=mode, s=8 * size), primitives=Watched(primitives, devices))
            for device, count in zip(devices, launches, strict=True):
                names = [k.name for k in device.kernels]
                assert names == ["chunk_forward"] * count + ["chunk_backward"] * count, mode


@pytest.mark.parametrize("keys", [{"window": (20, 0)}, {"dropout_p": 0.2}, {"layout": "thd"}])
def test_masks_and_packs_keep_steps_apart(keys, monkeypatch):
    """What a launch cannot tell apart by position or document is not put into one."""
    with recorded(monkeypatch) as devices:
        run(Case(size=4, mode="p2p", **keys), primitives=Watched(primitives, devices))
    for device in devices:
        assert sum(k.name == "chunk_forward" for k in device.kernels) >= 4


# ------------------------------------------------------------------- planted bugs


def _results_are_read_too_early(patch):
    patch.setattr(communicator._Works, "wait", lambda self: None)


def _a_transfer_starts_before_its_input_is_made(patch):
    """As if it ran on a stream that never waits for the compute stream."""
    real = Device.order
    patch.setattr(
        Device,
        "order",
        lambda self, stream, after: None if stream != COMPUTE else real(self, stream, after),
    )


def _nothing_keeps_what_is_sent(patch):
    """Neither torch's work nor ours."""
    made, begun = communicator._Works.__init__, Work.__init__

    def forget(self, works, buffers, *rest):
        made(self, works, (), *rest)

    patch.setattr(communicator._Works, "__init__", forget)
    patch.setattr(Work, "__init__", lambda self, device, batch, _: begun(self, device, batch, []))


def _gradients_are_added_without_waiting(patch):
    def add(self, home, dk, dv):
        ticket, coming = home
        for (dk_in, dv_in), part in coming:
            self.tokens.add(dk, dk_in.to(dk.dtype), part)
            self.tokens.add(dv, dv_in.to(dv.dtype), part)
        if ticket is not None:
            ticket.wait()

    patch.setattr(Ring, "_add", add)


def _one_buffer_for_all_keys(patch):
    """The next keys arrive where the ones being used lie."""
    kept = {}

    def new_empty(self, *shape, **options):
        device = torch.utils._python_dispatch._get_current_dispatch_mode().device
        if (device.rank, shape) not in kept:
            kept[device.rank, shape] = [torch.empty(shape, dtype=self.dtype) for _ in range(2)]
        pair = kept[device.rank, shape]
        pair.append(pair.pop(0))  # keys, values, and the same two again
        return pair[-1]

    patch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.mark.parametrize(("plant", "says"), [
    (_results_are_read_too_early, "races with batch"),
    (_a_transfer_starts_before_its_input_is_made, "races with"),
    (_nothing_keeps_what_is_sent, "memory freed while under way"),
    (_gradients_are_added_without_waiting, "races with batch"),
    (_one_buffer_for_all_keys, "races with"),
])  # fmt: skip
def test_a_missing_wait_is_found(plant, says, monkeypatch):
    case = Case(size=8, mode="p2p", s=64, causal=False)
    with recorded(monkeypatch) as devices, monkeypatch.context() as patch:
        plant(patch)
        run(case, make_inputs(case))
    found = races(devices)
    assert found and any(says in text for text in found), found[:5]


def test_ranks_that_start_transfers_in_another_order_hang(monkeypatch):
    """Which gloo does not mind: one rank sends gradients before the keys of the next step."""
    with recorded(monkeypatch) as devices:
        run(Case(size=4, mode="p2p"))
    program = devices[1].program
    at = [i for i, (kind, _) in enumerate(program) if kind == "batch"][-4:-2]
    program[at[0]], program[at[1]] = program[at[1]], program[at[0]]
    for one_queue in (False, True):
        assert stuck(devices, one_queue=one_queue)
