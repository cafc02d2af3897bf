"""Weights, gradients, main weights and moments: byte for byte what a CPU-mode rank allocates."""

from __future__ import annotations

from dataclasses import replace

import dry_run
import pytest
from megatron_cpu import DIST, EP, PP, SP, TP, VP, tiny_run
from test_parameters import GPT2, GQA, MLA, MOE, TIED_MTP, VOCAB, world_of

from megatron_patch.planner import layout as layouts
from megatron_patch.planner import states
from megatron_patch.planner.plan import padded

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
WHOLE = {DIST: False}
RUNS = {
    "one rank": (GQA, {}, 1, "bf16"),
    "fewer kv heads than ranks, dp2": (GQA, {TP: 4, **SP}, 2, "bf16"),
    "tied embeddings and an extra depth, pp2 dp2": (TIED_MTP, {PP: 2, **OVERLAP}, 2, "bf16"),
    "dp3": (GQA, {}, 3, "bf16"),
    "dp3 fp32": (GQA, {}, 3, "fp32"),
    "dp2 whole": (GPT2, WHOLE, 2, "bf16"),
    "dp2 whole fp32": (GPT2, WHOLE, 2, "fp32"),
    "tied pp2 dp2": (GPT2, {PP: 2}, 2, "bf16"),
    "tied pp2 dp2 overlapped": (GPT2, {PP: 2, **OVERLAP}, 2, "bf16"),
    "tp2 sp pp2 vp2 dp2": (GQA, {TP: 2, PP: 2, VP: 2, **SP}, 2, "bf16"),
    "latent, tp2": (MLA, {TP: 2, **SP}, 2, "bf16"),
    "moe ep2 dp4": (MOE, {EP: 2}, 4, "bf16"),
}


def allocated(run, rank: int, world: int) -> states.States:
    """Bytes of weights, gradients and optimizer state after one update, from the tensors."""
    with dry_run.rank_of(run, rank, world):
        from megatron_patch.model.build import build_model
        from megatron_patch.training import optimizer

        model = build_model(run, vocab_size=VOCAB)
        chunks = optimizer.wrap_chunks(run, model.chunks)
        adam, _ = optimizer.build_optimizer(run, chunks)
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
        for buffer in buffers:
            buffer.grad_data.fill_(1.0)
        for part in adam.chained_optimizers:
            part.prepare_grads()
            part.inner = part.optimizer.step()
        inner = {id(part.optimizer): part.optimizer for part in adam.chained_optimizers}.values()
        held = [t for o in inner for state in o.state.values() for t in state.values()]
        moments = sum(t.nbytes for t in held if t.dim() > 0)
        own = {p.untyped_storage().data_ptr() for p in parameters}
        main = [
            p
            for o in inner
            for group in o.param_groups
            for p in group["params"]
            if p.untyped_storage().data_ptr() not in own
        ]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parameters}
        return states.States(
            parameters=sum(p.numel() for p in parameters),
            weights=sum(sizes.values()),
            gradients=sum(b.grad_data.nbytes for b in buffers),
            optimizer=moments + sum(p.nbytes for p in main),
        )


@pytest.mark.parametrize(("model", "parallel", "dp", "precision"), RUNS.values(), ids=RUNS.keys())
def test_every_rank_holds_what_the_plan_says(model, parallel, dp, precision, monkeypatch):
    # Small enough for the tiny model to have several buckets.
    for name, value in (("BUCKET", 3000), ("BUCKET_PER_RANK", 1)):
        monkeypatch.setattr(states, name, value)
    _smaller_buckets(monkeypatch, 3000)
    run = tiny_run({"num_layers": 4, **model}, parallel=parallel, training={"precision": precision})
    replica = world_of({k: v for k, v in parallel.items() if k != EP})
    world = replica * dp
    layout = layouts.layout_of(run, 1, world)
    vocab = padded(run, VOCAB)
    for rank in range(world):
        found = allocated(run, rank, world)
        block = layout.tp * layout.dp
        stage, place = rank // block, rank % block // layout.tp
        assert found == states.states_of(run, layout, stage, vocab, dp_rank=place)
        most = states.states_of(run, layout, stage, vocab)
        assert found.optimizer <= most.optimizer


@pytest.mark.parametrize(
    ("model", "parallel", "dp"), [(GPT2, {}, 3), (GQA, WHOLE, 2), (MOE, {EP: 2}, 4)]
)
def test_every_rank_holds_what_the_plan_says_of_muon(model, parallel, dp):
    pytest.importorskip("emerging_optimizers")
    run = tiny_run({"num_layers": 4, **model}, parallel=parallel, training={"precision": "bf16"})
    run = replace(run, optimizer=replace(run.optimizer, name="muon"))
    layout, vocab = layouts.layout_of(run, 1, dp), padded(run, VOCAB)
    most = states.states_of(run, layout, 0, vocab)
    for rank in range(dp):
        found = allocated(run, rank, dp)
        planned = states.states_of(run, layout, 0, vocab, dp_rank=rank)
        assert found.optimizer <= most.optimizer
        assert found == planned


def _smaller_buckets(monkeypatch, size):
    from megatron.core.distributed import DistributedDataParallelConfig

    plain = DistributedDataParallelConfig.__init__

    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.bucket_size = size

    monkeypatch.setattr(DistributedDataParallelConfig, "__init__", init)


def test_a_bucket_ends_where_every_rank_gets_the_same_share():
    run = tiny_run(GQA, parallel={})
    layout = layouts.layout_of(run, 1, 3)
    (found,) = states.buffers_of(run, layout, 0, 64)
    buffer, ranks = found
    assert ranks == 3
    assert buffer.numel % 384 == 0
    assert sum(buffer.owned(r, 3) for r in range(3)) == sum(e - b for b, e in buffer.spans)
