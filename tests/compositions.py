"""Feature sets, layouts and one optimizer step on either: shared by test_compositions.py and ranks.

The reference is the bare model of one process: no wrappers, no schedule, no optimizer. Its losses
are written out from the batch: the sum over the tokens that count, divided by how many there are.

    python compositions.py '["name"]'      (in the folder of the references, on every rank)
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_cpu import (
    CP,
    DIST,
    EP,
    ETP,
    MLA,
    PP,
    QUERY_MLA,
    SEQ,
    SP,
    TP,
    forget_trackers,
    reseed,
    tiny_run,
)

from megatron_patch.context_parallel.layout import shard
from megatron_patch.core_patches import cpu_mode
from megatron_patch.parallel import setup
from megatron_patch.parallel.buffers import unwrap
from megatron_patch.parallel.setup import Layout
from megatron_patch.runtime.watcher import Watcher
from megatron_patch.schema.data import DataConfig
from megatron_patch.schema.model import MoEConfig, MTPConfig
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import RecomputeConfig
from megatron_patch.training import auxiliary
from megatron_patch.training.evaluate import evaluate
from megatron_patch.training.finite import global_name
from megatron_patch.training.session import Session, build_session
from megatron_patch.training.signals import StopFlags
from megatron_patch.training.step import fetch, train_step

ROWS = 4  # sequences of the global batch
CLIP = 0.01
VOCAB = 257  # of bytes
FLOOR = 1e-2  # of a gradient: that of a key bias is rounding alone
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Features:
    """A model, and the sequences of a micro-batch: balancing is a mean over micro-batches."""

    model: dict[str, Any]
    micro: int = 1
    attention: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


def moe(**keys: Any) -> MoEConfig:
    return MoEConfig(num_experts=4, ffn_hidden_size=16, aux_loss_coeff=0.5, **keys)


DENSE = {
    "num_query_groups": 2,
    "normalization": "LayerNorm",
    "qk_layernorm": True,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "position_embedding": "learned_absolute",
    "activation": "gelu",
    "tie_embeddings": True,
}
FEATURES = {
    "dense": Features(DENSE),
    "dense compiled": Features(DENSE, training={"compile_fusions": True}),
    "sinks": Features({"softmax_type": "learnable", "window": [6, 0], "window_skip_freq": 2}),
    "core sinks": Features({"softmax_type": "learnable"}, attention={"backend": "mcore_local"}),
    "mla": Features({"mla": QUERY_MLA, "qk_layernorm": True}),
    "mla keys": Features({"mla": MLA}),
    "one key head": Features({"num_query_groups": 1, "qk_layernorm": True, "add_qkv_bias": True}),
    "moe": Features({"moe": moe(shared_expert_ffn_hidden_size=16)}, micro=2),
    "moe biases": Features({"moe": moe(), "add_bias_linear": True, "activation": "gelu"}, micro=2),
    "moe seq": Features({"moe": moe(load_balancing="seq_aux_loss")}, micro=2),
    "sinkhorn": Features({"moe": moe(load_balancing="sinkhorn")}, micro=2),
    "mtp": Features({"mtp": MTPConfig(num_layers=2, loss_scaling_factor=0.5)}),
    "mtp recomputed": Features(
        {"mtp": MTPConfig(loss_scaling_factor=0.5)},
        training={"recompute": RecomputeConfig(granularity="full")},
    ),
    "mtp tied": Features({"mtp": MTPConfig(loss_scaling_factor=0.5), "tie_embeddings": True}),
    "mtp dense": Features(
        {"mtp": MTPConfig(loss_scaling_factor=0.5), "moe": moe(layer_freq=[1, 0])}, micro=2
    ),
    "mtp moe": Features({"mtp": MTPConfig(loss_scaling_factor=0.5), "moe": moe()}, micro=2),
}


def run_of(features: Features, parallel: dict[str, Any], *, micro: int | None = None) -> RunConfig:
    """The configuration of a feature set on a layout."""
    run = tiny_run(
        {"seq_length": SEQ, "init_std": 0.2} | features.model,
        attention=features.attention,
        training={
            "global_batch_size": ROWS,
            "micro_batch_size": micro or features.micro,
            "eval_steps": 1,
            "compile_fusions": False,
        }
        | features.training,
        parallel={DIST: False} | parallel,
    )
    optimizer = dataclasses.replace(run.optimizer, clip_grad=CLIP)
    return dataclasses.replace(run, data=DataConfig(eod_mask_loss=True), optimizer=optimizer)


def rows() -> dict[str, torch.Tensor]:
    """The global batch [4, s]: sequences with all, some, one (their last) and few tokens of loss.

    Ranks and micro-batches hold very different numbers, of some depths none.
    """
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=random)
    mask = torch.ones(ROWS, SEQ)
    mask[1, ::3] = 0
    mask[2, :-1] = 0
    mask[3, 3:] = 0
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": mask,
        "position_ids": torch.arange(SEQ).repeat(ROWS, 1),
    }


# ------------------------------------------------------------------------------- the reference


def scatter_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Give every parameter values of its own, by name; zeros and ones hide faults."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def reference(features: Features) -> dict[str, Any]:
    """Weights, losses and gradients of one process, by the definition of the losses."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from megatron_patch.model.build import build_model

    reseed()
    (model,) = build_model(run_of(features, {}), vocab_size=VOCAB).chunks
    weights = scatter_weights(model)
    batch, mtp, moe = rows(), features.model.get("mtp"), features.model.get("moe")
    depths = mtp.num_layers if mtp else 0
    # The mask of depth d is that of the token d further on.
    masks = [F.pad(batch["loss_mask"][:, d:], (0, d)) for d in range(1 + depths)]
    factors = [1.0] + [mtp.loss_scaling_factor / depths for _ in range(depths)]
    size = features.micro if moe else ROWS
    count = ROWS // size
    # Not `set_loss_scale`: it keeps the shape that an earlier test of this process has left.
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor([1 / (size * SEQ * count)])
    MTPLossAutoScaler.set_loss_scale(torch.tensor(0.0))
    forget_trackers()
    seen: list[torch.Tensor] = []
    of_logits = model.compute_language_model_loss
    model.compute_language_model_loss = lambda *x: seen.append(of_logits(*x)) or seen[-1]
    means = torch.zeros(1 + depths)
    for part in (slice(i, i + size) for i in range(0, ROWS, size)):
        seen.clear()
        here = {name: x[part] for name, x in batch.items()}
        model(here["tokens"], here["position_ids"], None, labels=here["labels"])
        losses = [seen[-1], *seen[:-1]]  # the main one comes last
        parts = [(m[part] * x).sum() / m.sum() for m, x in zip(masks, losses, strict=True)]
        sum(f * x for f, x in zip(factors, parts, strict=True)).backward()
        means += torch.stack(parts).detach()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in grads.values()))
    figures = {"loss": means[0].item(), "eval": means[0].item(), "norm": norm, "layers": norm}
    figures |= {"clip": CLIP / norm, "parameters": sum(w.numel() for w in weights.values())}
    if depths:
        figures["mtp"] = means[1:].mean().item()
    if moe and moe.load_balancing in auxiliary._BALANCING:
        kind = get_moe_metrics_tracker().metrics[auxiliary._BALANCING[moe.load_balancing]]
        figures["moe"] = kind.values[kind.values != 0].mean().item() / count
    return {"weights": weights, "grads": grads, "figures": figures}


# --------------------------------------------------------------------------- a step of the trainer


class Batches:
    """The loaders of a rank, over the one global batch."""

    def __init__(self, run: RunConfig, layout: Layout) -> None:
        self.run, self.layout = run, layout
        self.micro_batches = ROWS // (run.training.micro_batch_size * layout.dp_size)

    def iterate(self, split: str) -> Any:
        layout, size = self.layout, self.run.training.micro_batch_size
        for micro in range(self.micro_batches):
            first = (micro * layout.dp_size + layout.dp_rank) * size
            yield {
                name: shard(
                    x[first : first + size], rank=layout.cp_rank, size=layout.cp_size, dim=1
                )
                for name, x in rows().items()
            }


class Snapshot(Watcher):
    """Copies of the reduced gradients, and this rank's share of their squares by layer."""

    def __init__(self, session: Session) -> None:
        from megatron_patch.stability.gradients import LayerNorms
        from megatron_patch.stability.observe import watched_chunks

        self.session = session
        self.norms = LayerNorms(watched_chunks(session.chunks), device=torch.device("cpu"))

    def grads_reduced(self) -> None:
        self.norms.measure()
        self.grads = {
            global_name(root, name): parameter.main_grad.clone()
            for root in (unwrap(chunk) for chunk in self.session.chunks)
            for name, parameter in root.named_parameters()
        }


def mine(full: torch.Tensor, name: str, shape: torch.Size, layout: Layout, *, gated: bool) -> Any:
    """The part of a whole parameter that this rank holds; where it differs in shape it is cut."""
    if full.shape == shape:
        return full
    (dim,) = [d for d in range(full.dim()) if full.shape[d] != shape[d]]
    size, rank = full.shape[dim] // shape[dim], layout.tp_rank
    assert size == layout.tp_size
    if gated and "linear_fc1" in name:  # gate and value, each cut
        halves = full.chunk(2, dim=dim)
        return torch.cat([half.chunk(size, dim=dim)[rank] for half in halves], dim=dim)
    return full.chunk(size, dim=dim)[rank]


def whole_name(name: str, run: RunConfig, layout: Layout) -> str:
    """The name of a local parameter in a model of one rank."""
    if run.model.tie_embeddings and name == "output_layer.weight":
        return EMBEDDING
    before, at, after = name.partition("local_experts.")
    if not at:
        return name
    number, _, rest = after.partition(".")
    first = layout.ep_rank * run.model.moe.num_experts // layout.ep_size
    return f"{before}{at}{first + int(number)}.{rest}"


def step(run: RunConfig, expected: dict[str, Any], *, fault: Fault | None = None) -> dict[str, Any]:
    """One training step and an evaluation of this layout, next to the reference.

    Returns:
        The figures of the step, and the largest relative difference of any gradient with its name.
    """
    forget_trackers()
    reseed()
    layout = setup._layout(dist.get_rank(), dist.get_world_size(), 0, device=torch.device("cpu"))
    batches = Batches(run, layout)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        session, _ = build_session(
            run, layout, batches, stop=StopFlags(), monitor=SimpleNamespace(say=said.append)
        )
        gated = run.model.activation == "swiglu"

        def placed(kind: str, name: str, like: torch.Tensor) -> torch.Tensor:
            full = expected[kind][whole_name(name, run, layout)]
            return mine(full, name, like.shape, layout, gated=gated)

        with torch.no_grad():
            for root in (unwrap(chunk) for chunk in session.chunks):
                for name, parameter in root.named_parameters():
                    parameter.copy_(placed("weights", global_name(root, name), parameter))
        session.optimizer.reload_model_params()
        watch = Snapshot(session)
        session.watchers = [watch]
        figures = {"eval": evaluate(session, batches)}
        fetched = fetch(session, batches.iterate("train") if session.reads_data else None)
        result = train_step(session, fetched, 1)
        figures |= {"loss": session.guard.agreed.loss, "norm": result.grad_norm}
        extra = {"moe": auxiliary.moe_loss(session), "mtp": auxiliary.mtp_loss(session)}
        figures |= {name: value for name, value in extra.items() if value is not None}
    (counted,) = (line.split()[1] for line in said if line.startswith("model: "))
    figures["parameters"] = int(counted.replace(",", ""))
    dist.all_reduce(watch.norms.squares)
    figures["layers"] = watch.norms.squares.sum().sqrt().item()
    worst = ("", 0.0)
    if not run.parallel.use_distributed_optimizer:
        for name, grad in watch.grads.items():
            scale = expected["grads"][whole_name(name, run, layout)].abs().max().item()
            error = (grad - placed("grads", name, grad)).abs().max().item()
            worst = max(worst, (name, error / max(scale, FLOOR)), key=lambda pair: pair[1])
        after = [p.main_grad.norm().item() for c in session.chunks for p in c.parameters()]
        before = [grad.norm().item() for grad in watch.grads.values()]
        if any(before):
            figures["clip"] = math.hypot(*after) / math.hypot(*before)
    return {"figures": figures, "worst": worst}


# ------------------------------------------------------------------------------------- the ranks

TP2, TP2SP, CP2, PP2, EP2 = {TP: 2}, {TP: 2, **SP}, {CP: 2}, {PP: 2}, {EP: 2}
SHARDED = {DIST: True}
Fault = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Case:
    features: str
    parallel: dict[str, Any] = field(default_factory=dict)
    micro: int | None = None  # sequences of a micro-batch, if not those of the features
    fault: Fault | None = None

    @property
    def run(self) -> RunConfig:
        return run_of(FEATURES[self.features], self.parallel, micro=self.micro)


TWO = {
    "dense dp2": Case("dense"),
    "dense tp2 sp": Case("dense", TP2SP),
    "dense compiled tp2 sp": Case("dense compiled", TP2SP),
    "dense cp2": Case("dense", CP2),
    "dense pp2": Case("dense", PP2),
    "sinks tp2": Case("sinks", TP2),
    "core sinks tp2": Case("core sinks", TP2),
    "mla tp2 sp": Case("mla", TP2SP),
    "mla keys tp2": Case("mla keys", TP2),
    "one key head tp2": Case("one key head", TP2),
    "moe ep2 sharded": Case("moe", EP2 | SHARDED),
    "moe tp2 sp": Case("moe", TP2SP),
    "moe tp2 sp, whole experts": Case("moe", TP2SP | {ETP: 1}),
    "moe cp2": Case("moe", CP2),
    "moe biases tp2 sp, whole experts": Case("moe biases", TP2SP | {ETP: 1}),
    "moe seq tp2 sp": Case("moe seq", TP2SP),
    "mtp dp2": Case("mtp"),
    "mtp dp2, two sequences": Case("mtp", micro=2),
    "mtp cp2": Case("mtp", CP2),
    "mtp tied pp2": Case("mtp tied", PP2),
    "mtp moe tp2 sp": Case("mtp moe", TP2SP),
    "mtp dense pp2": Case("mtp dense", PP2),
    "mtp recomputed tp2 sp": Case("mtp recomputed", TP2SP),
}
TWO_MORE = {
    "dense tp2": Case("dense", TP2),
    "dense dp2 sharded": Case("dense", SHARDED),
    "dense dp2, two sequences": Case("dense", micro=2),
    "dense tp2 sp sharded": Case("dense", TP2SP | SHARDED),
    "one key head tp2 sp": Case("one key head", TP2SP),
    "sinks tp2 sp": Case("sinks", TP2SP),
    "sinks cp2": Case("sinks", CP2),
    "mla cp2": Case("mla", CP2),
    "moe dp2": Case("moe"),
    "moe ep2": Case("moe", EP2),
    "moe pp2": Case("moe", PP2),
    "moe tp2 sp, whole experts ep2": Case("moe", TP2SP | {ETP: 1, EP: 2}),
    "moe seq cp2": Case("moe seq", CP2),
    "mtp tp2": Case("mtp", TP2),
    "mtp tp2 sp": Case("mtp", TP2SP),
    "mtp pp2": Case("mtp", PP2),
    "mtp moe dp2": Case("mtp moe"),
    "mtp moe cp2": Case("mtp moe", CP2),
}
FOUR = {
    "dense tp2 sp pp2": Case("dense", TP2SP | PP2),
    "dense tp2 cp2": Case("dense", TP2 | CP2),
    "sinks tp2 cp2": Case("sinks", TP2 | CP2),
    "mla tp2 sp dp2": Case("mla", TP2SP),
    # Gloo cannot gather the uneven numbers of tokens that experts split over ranks receive.
    "moe tp2 sp ep2, whole experts": Case("moe", TP2SP | EP2 | {ETP: 1}),
    "moe tp2 sp cp2 ep4, whole experts": Case("moe", TP2SP | CP2 | {ETP: 1, EP: 4}),
    "moe pp2 ep2 sharded": Case("moe", PP2 | EP2 | SHARDED),
    "mtp cp4": Case("mtp", {CP: 4}),
    "mtp cp2 pp2": Case("mtp", CP2 | PP2),
    "mtp tied dp2 pp2": Case("mtp tied", PP2),
    "mtp moe dp2 cp2": Case("mtp moe", CP2),
}


def local_counts(patch: pytest.MonkeyPatch) -> None:
    """Losses beside the main one are weighted as Megatron-Core does."""
    patch.setattr(auxiliary, "weighed", lambda *unused: nullcontext())


def unmarked_sinks(patch: pytest.MonkeyPatch) -> None:
    from megatron_patch.attention import core
    from megatron_patch.model import build

    patch.setattr(build, "mark_sinks", lambda model: None)
    patch.setattr(core, "set_tensor_model_parallel_attributes", lambda *unused: None)


def copies_marked_as_parts(patch: pytest.MonkeyPatch) -> None:
    """Every weight counts as a part, as Transformer Engine marks replicated ones."""
    from megatron_patch.model import build

    def mark(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.tensor_model_parallel = True

    patch.setattr(build, "mark_sinks", mark)


def unsummed_copies(patch: pytest.MonkeyPatch) -> None:
    """Weights on every rank keep the gradient of that rank's tokens."""
    from megatron_patch.model import build

    def unmark(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.sequence_parallel = False

    patch.setattr(build, "mark_sinks", unmark)


def stock_latent_attention(patch: pytest.MonkeyPatch) -> None:
    """Megatron-Core's own: each rank keeps its heads' part of the rotary key's gradient."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megatron_patch.model import build

    patch.setattr(build, "MLASelfAttention", MLASelfAttention)


FAULTS = {
    "core's latent attention": Case("mla keys", TP2, fault=stock_latent_attention),
    "core sinks unmarked": Case("core sinks", TP2, fault=unmarked_sinks),
    "own sinks unmarked": Case("sinks", TP2, fault=unmarked_sinks),
    "copies marked": Case("mla", TP2SP, fault=copies_marked_as_parts),
    "copies unsummed": Case("moe", TP2SP, fault=unsummed_copies),
    "mtp counts of a rank": Case("mtp", fault=local_counts),
    "mtp counts of a micro-batch": Case("mtp", micro=2, fault=local_counts),
    "balancing of masked tokens": Case("moe", CP2, fault=local_counts),
    # Why config/checks refuses it: each rank balances its part of the sequence.
    "sinkhorn tp2 sp": Case("sinkhorn", TP2SP),
}
CASES = TWO | TWO_MORE | FOUR | FAULTS


def main() -> None:
    """Run the cases named in the argument, those of one layout after each other."""
    cpu_mode.install()  # before anything of Megatron is imported
    from megatron.core.parallel_state import destroy_model_parallel

    folder, chosen = Path(), json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    expected = torch.load(folder / "reference.pt", weights_only=True)
    found, groups = {}, None
    for name in sorted(chosen, key=lambda name: repr(CASES[name].run.parallel)):
        case, run = CASES[name], CASES[name].run
        parallel = dataclasses.replace(run.parallel, use_distributed_optimizer=False)
        if parallel != groups:  # starting them takes longer than a step
            destroy_model_parallel()
            setup._megatron_groups(run)
            groups = parallel
        found[name] = step(run, expected[case.features], fault=case.fault)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
