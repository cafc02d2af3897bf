"""Layout over nodes, and bytes per axis from the papers' formulas written out."""

import re

import pytest
from megatron_cpu import CP, DIST, EP, PP, SP, TP, VP, tiny_run
from test_parameters import MOE

from megatron_patch.attention.registry import layer_cp_comm_type
from megatron_patch.planner import communication, hardware, states
from megatron_patch.planner.layout import NETWORK, NODE, layout_of
from megatron_patch.planner.sizes import rank_shapes
from megatron_patch.schema import cluster
from megatron_patch.schema.model import MTPConfig

SHAPE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 128}
VOCAB = 64
TOKENS = 2 * 128 * 64 * 2  # bytes of [micro-batch 2, sequence 128, hidden 64] in BF16


def traffic(parallel, *, world, model=None, training=None, stage=0):
    loop = {"precision": "bf16", "micro_batch_size": 2, "global_batch_size": 32}
    run = tiny_run(SHAPE | (model or {}), parallel=parallel, training=loop | (training or {}))
    layout = layout_of(run, -(-world // 8), min(world, 8))
    return run, layout, communication.traffic_of(run, layout, stage, VOCAB)


def sent(items, axis):
    return sum(item.sent for item in items if item.axis == axis)


def test_groups_fill_nodes_in_megatrons_order():
    run = tiny_run(parallel={TP: 4, CP: 2, PP: 2})
    layout = layout_of(run, 4, 8)
    assert layout.dp == 2
    tp, cp, dp, pp = (layout.group(axis) for axis in ("tp", "cp", "dp", "pp"))
    assert [g.stride for g in (tp, cp, dp, pp)] == [1, 4, 8, 16]
    assert [g.link for g in (tp, cp, dp, pp)] == [NODE, NODE, NETWORK, NETWORK]
    assert [g.in_node for g in (tp, cp, dp, pp)] == [4, 2, 1, 1]
    assert layout.group("dp_cp").link == NETWORK


def test_groups_are_those_megatron_core_makes():
    """Strides from the ranks core puts into the groups of rank 0."""
    import dry_run

    parallel = {TP: 2, CP: 2, PP: 2, EP: 2}
    run = tiny_run(SHAPE | MOE, parallel=parallel)
    layout = layout_of(run, 2, 8)
    with dry_run.rank_of(run, 0, 16):
        import torch.distributed as dist
        from megatron.core import parallel_state as ps

        groups = {
            "tp": ps.get_tensor_model_parallel_group(),
            "cp": ps.get_context_parallel_group(),
            "dp": ps.get_data_parallel_group(),
            "dp_cp": ps.get_data_parallel_group(with_context_parallel=True),
            "pp": ps.get_pipeline_model_parallel_group(),
            "ep": ps.get_expert_model_parallel_group(),
            "edp": ps.get_expert_data_parallel_group(),
        }
        for axis, group in groups.items():
            ranks = dist.get_process_group_ranks(group)
            planned = layout.group(axis)
            expected = [i * planned.stride for i in range(planned.size)]
            assert ranks == expected, axis


def test_sequence_parallelism_sends_ten_operations_a_layer():
    run, _, items = traffic({TP: 2, **SP}, world=2)
    half = TOKENS / 2  # a ring of two sends half of what it gathers
    layer = communication.tensor_per_layer(run, rank_shapes(run, VOCAB))
    assert layer == 10 * half
    micro = 16
    assert sent(items, "tp") == micro * (4 * layer + (2 + 3) * half)
    assert {i.link for i in items if i.axis == "tp"} == {NODE}


def test_full_recompute_repeats_the_forward_collectives():
    from megatron_patch.schema.training import RecomputeConfig

    again = {"recompute": RecomputeConfig(granularity="full")}
    _, _, plain = traffic({TP: 2, **SP}, world=2)
    _, _, more = traffic({TP: 2, **SP}, world=2, training=again)
    assert sent(more, "tp") - sent(plain, "tp") == 16 * 4 * 4 * TOKENS / 2


@pytest.mark.parametrize(("stage", "boundaries"), [(0, 1), (1, 2), (3, 1)])
def test_pipeline_sends_one_tensor_a_boundary_and_direction(stage, boundaries):
    _, _, items = traffic({PP: 4}, world=4, stage=stage)
    assert sent(items, "pp") == 16 * boundaries * TOKENS


def test_interleaving_multiplies_pipeline_traffic():
    _, _, items = traffic({PP: 2, VP: 2}, world=2)
    assert sent(items, "pp") == 16 * 3 * TOKENS  # two chunks, and nothing comes before the first


def test_distributed_optimizer_moves_three_times_two_bytes():
    """Reduce-scatter of float32 gradients and all-gather of BF16 weights: 6 bytes x (n - 1) / n."""
    run, layout, items = traffic({}, world=8)
    count = states.states_of(run, layout, 0, VOCAB).parameters
    assert sent(items, "dp") == 6 * count * 7 / 8
    _, _, whole = traffic({DIST: False}, world=8)
    assert sent(whole, "dp") == 8 * count * 7 / 8


def test_experts_travel_four_times():
    _, _, items = traffic({EP: 4}, world=8, model=MOE)
    tokens = 2 * 128 * 2 * 64 * 2  # top-2 copies in BF16
    micro, layers = 2, 3
    assert sent(items, "ep") == micro * layers * 4 * tokens * 3 / 4


def test_context_parallel_modes():
    """Keys and values around a ring (with float32 gradients), or everything between heads."""
    run, layout, _ = traffic({CP: 4}, world=4)
    n = rank_shapes(run, VOCAB)
    keys = n.T * 8 * 16  # kv heads x (d + dv)
    ring = communication.cp_per_layer(run, layout, n, "p2p")
    assert ring == {NODE: 3 * keys * (2 * 2 + 4)}
    assert communication.cp_per_layer(run, layout, n, "all_gather") == ring
    exchange = communication.cp_per_layer(run, layout, n, "a2a")
    assert exchange == {NODE: 3 / 4 * (2 * keys) * 2 * 2}


def test_depths_of_multi_token_prediction_communicate_too():
    """A depth's attention has the mode of the layer with its number, its experts the last's."""
    depths = {"mtp": MTPConfig(num_layers=2)}
    for kinds in ("p2p", ["p2p", "a2a", "all_gather", "p2p"]):
        parallel = {CP: 2, "cp_comm_type": kinds}
        run, layout, plain = traffic(parallel, world=2)
        _, _, more = traffic(parallel, world=2, model=depths)
        n, micro = rank_shapes(run, VOCAB), 16
        modes = [layer_cp_comm_type(run, number) for number in (1, 2)]
        each = [communication.cp_per_layer(run, layout, n, mode)[NODE] for mode in modes]
        assert sent(more, "cp") - sent(plain, "cp") == pytest.approx(micro * sum(each))
    _, _, plain = traffic({EP: 4}, world=8, model=MOE)
    _, _, more = traffic({EP: 4}, world=8, model=MOE | depths)
    assert sent(more, "ep") / sent(plain, "ep") == 5 / 3  # layers 2, 3, 4 have experts
    _, _, first = traffic({PP: 2, CP: 2}, world=4, model=depths)
    _, _, last = traffic({PP: 2, CP: 2}, world=4, model=depths, stage=1)
    assert sent(last, "cp") == 2 * sent(first, "cp")  # 2 layers and 2 depths


def test_a_float32_residual_stream_travels_in_float32():
    _, _, plain = traffic({PP: 2}, world=2)
    _, _, wide = traffic({PP: 2}, world=2, model={"fp32_residual_connection": True})
    assert sent(wide, "pp") == 2 * sent(plain, "pp")


def test_ranks_that_share_a_key_value_head():
    """They gather the whole qkv projection; the ring carries one head of each."""
    groups = {"num_query_groups": 2}
    run, layout, _ = traffic({TP: 4, CP: 2, **SP}, world=8, model=groups)
    n = rank_shapes(run, VOCAB)
    tokens, width = 2 * 128 // 2, (8 + 2 * 2) * 8
    plain = 10 * 2 * tokens * 64 * 3 / 4
    gathered = 2 * 2 * tokens * width * 3 / 4  # and the reduce-scatter of its gradient
    assert communication.tensor_per_layer(run, n) == plain + gathered
    ring = communication.cp_per_layer(run, layout, n, "p2p")
    assert ring == {NODE: tokens * (8 + 8) * (2 * 2 + 4)}


def test_the_configuration_takes_every_gpu_of_the_table():
    assert tuple(hardware.GPUS) == cluster.GPUS


def test_rates_of_the_table_are_plausible():
    for gpu in hardware.GPUS.values():
        assert 1e14 < gpu.peak < 3e15
        assert gpu.nvlink >= gpu.network
        advertised = re.search(r"(\d+)GB", gpu.device)
        if advertised:  # a GB is 0.93 GiB; the driver keeps a little
            assert 0.95 < gpu.memory * 2**30 / (int(advertised[1]) * 1e9) < 1.08
