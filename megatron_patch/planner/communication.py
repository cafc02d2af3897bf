"""Bytes one GPU sends in one step, by parallel axis, and the link they cross.

A ring all-gather or reduce-scatter of X bytes over n ranks sends X (n - 1) / n per rank; an
all-reduce is one of each (Thakur et al. 2005). Volumes per axis follow Narayanan et al. 2021
(arXiv:2104.04473, sec. 3), Korthikanti et al. 2022 (arXiv:2205.05198, sec. 4.2) for sequence
parallelism, Rajbhandari et al. 2020 (arXiv:1910.02054, sec. 7) for the distributed optimizer, Liu
et al. 2023 (arXiv:2310.01889) for rings over the sequence and Jacobs et al. 2023
(arXiv:2309.14509) for all-to-alls over heads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_patch.attention.registry import layer_cp_comm_type
from megatron_patch.planner.layout import Layout, micro_batches
from megatron_patch.planner.parameters import chunk_parameters, chunks_of
from megatron_patch.planner.sizes import FLOAT, RankShapes, rank_shapes
from megatron_patch.planner.states import states_of
from megatron_patch.schema.model import is_moe_layer
from megatron_patch.schema.run import RunConfig


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of communication of the busiest rank of a stage, in one step."""

    axis: str
    """tp, pp, cp, ep, dp."""
    what: str
    sent: float
    """Bytes sent per GPU and step."""
    link: str
    """NVLink or network."""


def traffic_of(run: RunConfig, layout: Layout, stage: int, vocab: int) -> list[Traffic]:
    """Everything a rank of pipeline stage ``stage`` sends in a step; ``vocab`` is padded."""
    n = rank_shapes(run, vocab)
    count = micro_batches(run, layout)
    chunks = chunks_of(run, stage)
    layers = [number for chunk in chunks for number in chunk.layers]
    depths = sum(_depths(run, chunk.last) for chunk in chunks)
    found = []
    if layout.tp > 1:
        collectives = sum(_tensor(run, n, chunk.first, chunk.last) for chunk in chunks)
        collectives += len(layers) * tensor_per_layer(run, n)
        name = "all-gathers and reduce-scatters" if n.sp else "all-reduces"
        found.append(Traffic("tp", name, count * collectives, layout.group("tp").link))
    if layout.pp > 1:
        ends = sum(chunk.first + chunk.last for chunk in chunks)
        sent = count * n.stream * (2 * len(chunks) - ends)
        link = layout.group("pp").link
        found.append(Traffic("pp", "activations and their gradients", sent, link))
    if layout.cp > 1:
        # The depths of multi-token prediction take their modes from the first layers.
        modes = Counter(layer_cp_comm_type(run, n) for n in (*layers, *range(1, depths + 1)))
        for mode, times in modes.items():
            assert mode is not None, "every depth has one, by the checks"
            for axis_link, size in cp_per_layer(run, layout, n, mode).items():
                found.append(Traffic("cp", mode, count * times * size, axis_link))
    moe = run.model.moe
    if moe is not None and layout.ep * layout.etp > 1:
        # A depth is a layer like the last one.
        last = [run.model.num_layers] * depths
        routed = sum(is_moe_layer(moe.layer_freq, number) for number in (*layers, *last))
        found.append(_experts(run, layout, n, routed * count))
    return found + _data(run, layout, stage, vocab)


def tensor_per_layer(run: RunConfig, n: RankShapes) -> float:
    """Bytes a layer's forward and backward pass send over the tensor-parallel group.

    Sequence parallel: forward 2 all-gathers and 2 reduce-scatters; backward the same, and 2
    all-gathers of inputs for the weight gradients. Without: 2 all-reduces each way, as much as 8
    such operations. Ranks that share a key/value head also gather the whole qkv projection, and
    reduce-scatter its gradient. Full recompute repeats the forward pass.
    """
    share = (n.tp - 1) / n.tp
    one, whole = n.w * n.T * n.h * share, 0.0
    if n.shared > 1:
        whole = n.w * n.T * n.mixed * share
    forward, backward = (4, 6) if n.sp else (4, 4)
    passes = 2 if run.training.recompute.granularity == "full" else 1
    return one * (passes * forward + backward) + whole * (passes + 1)


def _depths(run: RunConfig, last: bool) -> int:
    """Depths of multi-token prediction in a chunk; ``last``: whether it is the last one."""
    return run.model.mtp.num_layers if last and run.model.mtp is not None else 0


def _tensor(run: RunConfig, n: RankShapes, first: bool, last: bool) -> float:
    """Embedding and output projection: forward and backward."""
    one = n.w * n.T * n.h * (n.tp - 1) / n.tp
    depths = _depths(run, last)
    ends = (2 if first else 0) + (3 if n.sp else 2) * ((1 + depths) if last else 0)
    return one * ends + depths * tensor_per_layer(run, n)


def cp_per_layer(run: RunConfig, layout: Layout, n: RankShapes, mode: str) -> dict[str, float]:
    """Bytes per link that one layer sends for one micro-batch.

    p2p: K and V travel around the ring in the forward pass, and again in the backward pass with
    their float32 gradients. all_gather: the same bytes in one piece. a2a: q, k, v and O change
    between sequence and heads, and so do their gradients. a2a+p2p: a2a over the inner group, then
    the ring over the outer one with the inner group's heads.
    """
    keys = n.T * n.g * (n.d + n.dv)
    heads = n.T * (n.q * (n.d + n.dv) + n.g * (n.d + n.dv))
    group = layout.group("cp")
    inner = run.parallel.hierarchical_context_parallel_sizes
    again = 1 if run.training.recompute.granularity == "full" else 0

    def ring(size: int, values: float) -> float:
        return (size - 1) * values * (n.w * (2 + again) + FLOAT)

    def exchange(size: int) -> float:
        return (size - 1) / size * heads * n.w * (2 + again)

    if mode == "a2a":
        return {group.link: exchange(layout.cp)}
    if mode == "a2a+p2p" and inner:
        near = "NVLink" if inner[0] * layout.tp <= layout.gpus_per_node else "network"
        found = {near: exchange(inner[0])}
        found[group.link] = found.get(group.link, 0.0) + ring(inner[1], keys)
        return found
    return {group.link: ring(layout.cp, keys)}


def _experts(run: RunConfig, layout: Layout, n: RankShapes, passes: int) -> Traffic:
    """Tokens to their experts and back, forward and backward: 4 times top_k tokens of width h."""
    moe = run.model.moe
    assert moe is not None
    ranks = layout.ep * layout.etp
    again = 2 if run.training.recompute.granularity == "full" else 0
    one = n.w * n.S * n.h * moe.top_k * (ranks - 1) / ranks
    if moe.token_dispatcher == "allgather":
        one = n.w * n.S * n.h * (ranks - 1)
    link = layout.group("ep").link if layout.ep > 1 else layout.group("etp").link
    return Traffic("ep", f"tokens, {moe.token_dispatcher}", passes * one * (4 + again), link)


def _data(run: RunConfig, layout: Layout, stage: int, vocab: int) -> list[Traffic]:
    """Gradients in float32 and, with the distributed optimizer, weights in the compute type."""
    found = []
    states = states_of(run, layout, stage, vocab)
    every = [p for c in chunks_of(run, stage) for p in chunk_parameters(run, c, vocab)]
    experts = sum(p.numel for p in every if p.expert)
    weight = 2 if run.training.precision == "bf16" else 4
    parts = (("dp_cp", states.parameters - experts, "dense"), ("edp", experts, "experts"))
    for axis, numel, name in parts:
        group = layout.group(axis)
        if group.size == 1 or numel == 0:
            continue
        share, link = (group.size - 1) / group.size, group.link
        sharded = run.parallel.use_distributed_optimizer
        if sharded and run.optimizer.name != "muon":
            found.append(Traffic("dp", f"{name}: gradient reduce-scatter", 4 * numel * share, link))
        else:
            found.append(Traffic("dp", f"{name}: gradient all-reduce", 8 * numel * share, link))
        if sharded:
            sent = weight * numel * share
            found.append(Traffic("dp", f"{name}: weight all-gather", sent, link))
    return found
