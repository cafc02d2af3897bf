"""What is wrong with a configuration as a whole: `problems` asks every section and every rule.

A section judges its own values (`problems` in `megatron_patch.schema`). A rule that needs two
sections, or what another room can serve, stands here with the section whose key it names; those of
``model:``, ``attention:`` and ``stability:`` have files of their own. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.checkpoint import last_checkpoint
from megatron_patch.checkpoint.manifest import read_key
from megatron_patch.config.checks import attention, model, stability
from megatron_patch.schema import render, switches
from megatron_patch.schema.effective import EARLIER, decay_steps
from megatron_patch.schema.problem import Problem
from megatron_patch.schema.run import RunConfig


def optimizer_problems(run: RunConfig) -> Iterator[Problem]:
    """A warm-up, a decay and a run that do not fit into each other."""
    o = run.optimizer
    if o.name == "muon":
        yield from _muon(run)
    if o.qk_clip is not None and run.model.qk_layernorm and run.model.mla is None:
        text = f"{o.qk_clip} with model.qk_layernorm, which undoes the scaling: leave one out"
        yield Problem("optimizer.qk_clip", text)
    decay = decay_steps(run)
    length = decay - o.begin_step
    if decay >= 1 and o.warmup_steps >= length:
        begin = f" after optimizer.begin_step {o.begin_step}" * (o.begin_step > 0)
        yield Problem(
            "optimizer.warmup_steps",
            f"{o.warmup_steps}{begin}: the warm-up must end before the decay does, at step {decay} "
            "(optimizer.decay_steps, by default training.train_steps)",
        )
    if o.begin_step and run.checkpoint.load_from and "step" not in run.checkpoint.carried:
        text = (
            f"{o.begin_step}: steps start at 0 without step in checkpoint.carry_over; leave it out"
        )
        yield Problem("optimizer.begin_step", text)
    if o.schedule != "wsd":
        return
    path = "optimizer.wsd_decay_steps"
    if o.wsd_decay_steps is None:
        yield Problem(path, "is required by schedule wsd: the length of the final decay")
    elif not 1 <= o.wsd_decay_steps <= length - o.warmup_steps:
        yield Problem(
            path,
            f"{o.wsd_decay_steps}: must be between 1 and {length - o.warmup_steps}, the "
            "steps between the end of the warm-up and the end of the decay",
        )


def _muon(run: RunConfig) -> Iterator[Problem]:
    """What Megatron-Core's Muon and its sharding by whole matrices have not."""
    p = run.parallel
    if p.use_distributed_optimizer and run.training.precision == "fp32":
        yield Problem(
            "parallel.use_distributed_optimizer",
            "true with optimizer.name muon and training.precision fp32: Megatron-Core shards Muon "
            "by whole matrices in bf16 only; set it to false",
        )
    if p.overlap_param_gather:
        text = (
            "true with optimizer.name muon: weights are gathered after the update; set it to false"
        )
        yield Problem("parallel.overlap_param_gather", text)


def data_problems(run: RunConfig) -> Iterator[Problem]:
    """An evaluation that is asked for and has no data, and positions that nothing reads."""
    data, interval = run.data, run.training.eval_interval
    yield from _documents(run)
    if data.reset_position_ids and run.model.position_embedding != "learned_absolute":
        yield Problem(
            "data.reset_position_ids",
            f"has no effect with model.position_embedding {run.model.position_embedding!r}: only "
            "learned_absolute embeddings read position ids (rope counts from the start of the "
            "sequence); remove it",
        )
    asked = [("valid", 1, "eval_interval", interval), ("test", 2, "eval_test", None)]
    for split, at, key, value in asked if run.training.eval_test else asked[:1]:
        if split == "valid" and interval is None:
            continue
        what = f"training.{key}" + ("" if value is None else f" {value}")
        if not data.blend and data.train and not getattr(data, split):
            kind = "validation" if split == "valid" else split
            text = f"{what}, but there is no {kind} data: name a dataset, or remove {key}"
            yield Problem(f"data.{split}", text)
        elif data.blend and not any(data._split_problems()) and data.split[at] == 0:
            text = f"{data.split} leaves nothing for {what}; give {split} a share, or remove {key}"
            yield Problem("data.split", text)


def _documents(run: RunConfig) -> Iterator[Problem]:
    """What cannot be trained on packed documents; backends are the capability table's."""
    path, model = "data.document_attention", run.model
    if not run.data.document_attention:
        return
    if model.mtp is not None:
        text = "true with model.mtp, whose further tokens would cross documents: leave one out"
        yield Problem(path, text)
    if model.moe is not None and run.parallel.context_parallel_size > 1:
        yield Problem(
            path,
            "true with model.moe over context-parallel ranks: the padding between documents would "
            "count in the balance of experts; use parallel.context_parallel_size: 1",
        )
    balanced = model.moe is not None and model.moe.load_balancing == "seq_aux_loss"
    if balanced and run.training.micro_batch_size > 1:
        yield Problem(
            path,
            "true with model.moe.load_balancing seq_aux_loss: the sequences of a micro-batch would "
            "be balanced as one; use aux_loss, or training.micro_batch_size: 1",
        )


def parallel_problems(run: RunConfig) -> Iterator[Problem]:
    """Experts, layers and backends that the layout asks for and the model has not."""
    if run.parallel.expert_model_parallel_size > 1 and run.model.moe is None:
        yield Problem(
            "parallel.expert_model_parallel_size",
            f"{run.parallel.expert_model_parallel_size} needs an MoE model (section model.moe); a "
            "dense model has no experts to spread",
        )
    yield from _modes_per_layer(run)
    yield from _gradient_wire(run)


def _modes_per_layer(run: RunConfig) -> Iterator[Problem]:
    kinds, layers, mtp = run.parallel.cp_comm_type, run.model.num_layers, run.model.mtp
    if not isinstance(kinds, list):
        return
    path = "parallel.cp_comm_type"
    if len(kinds) != layers:
        yield Problem(
            path,
            f"{len(kinds)} entries for {layers} layers (model.num_layers): give one value "
            "for all of them, or a list with one entry per layer",
        )
    elif mtp is not None and mtp.num_layers > layers:
        # Depths of multi-token prediction are numbered from 1 and take the first entries.
        yield Problem(
            path,
            f"a list of {layers} entries does not reach {mtp.num_layers} depths "
            "of multi-token prediction (model.mtp.num_layers): give one value",
        )


def _gradient_wire(run: RunConfig) -> Iterator[Problem]:
    wire, kinds = run.parallel.cp_gradient_wire, run.parallel.cp_comm_types
    if wire == "fp32" or not kinds:
        return
    ours = [row.name for row in BACKENDS.values() if row.chunk_primitives]
    if run.attention.backend not in ours:
        yield Problem(
            "parallel.cp_gradient_wire",
            f"{wire} is an option of attention.backend "
            f"{' and '.join(ours)}, not of {run.attention.backend}: leave it out",
        )
    elif kinds == ["a2a"]:
        yield Problem(
            "parallel.cp_gradient_wire",
            f"{wire} has no effect under parallel.cp_comm_type a2a, whose "
            "gradients travel complete, or in FP32 where heads are replicated: leave it out, "
            "or use p2p, all_gather or a2a+p2p",
        )


def checkpoint_problems(run: RunConfig) -> Iterator[Problem]:
    """A start from what is not there, an optimizer format without its optimizer, a key file that
    cannot serve."""
    c = run.checkpoint
    # A run that has saved never reads it again, and it may be gone by then.
    begins = not os.path.isfile(run.directory / last_checkpoint.FILE)
    if c.load_from is not None and begins and not os.path.isdir(c.load_from):
        yield Problem(
            "checkpoint.load_from",
            f"{c.load_from!r} is not a directory; name a checkpoint, a run directory or its "
            "checkpoints",
        )
    if c.optimizer_sharding == "dp_reshardable" and not run.parallel.use_distributed_optimizer:
        yield Problem(
            "checkpoint.optimizer_sharding",
            "dp_reshardable belongs to the distributed optimizer; set "
            "parallel.use_distributed_optimizer: true, or fully_reshardable here",
        )
    elif c.optimizer_sharding == "dp_reshardable" and run.optimizer.name == "muon":
        # It would only forbid what is saved to load on other layouts.
        yield Problem(
            "checkpoint.optimizer_sharding",
            "dp_reshardable has no effect with optimizer.name muon, which is sharded by whole "
            "matrices; set it to fully_reshardable",
        )
    if c.hmac_key_file is not None:
        try:
            read_key(c.hmac_key_file)
        except ValueError as error:
            yield Problem("checkpoint.hmac_key_file", str(error))


def faults_problems(run: RunConfig) -> Iterator[Problem]:
    """A rewind that has no checkpoint to go back to."""
    spike, checkpoint = run.faults.spike, run.checkpoint
    if spike.action != "rewind":
        return
    if checkpoint.interval is None:
        text = "rewind needs checkpoints to go back to; set checkpoint.interval"
        yield Problem("faults.spike.action", text)
    elif checkpoint.keep_last is not None:
        kept = checkpoint.interval * (checkpoint.keep_last - 1)
        if spike.rewind_margin > kept:
            yield Problem(
                "faults.spike.rewind_margin",
                f"{spike.rewind_margin}: the oldest of checkpoint.keep_last "
                f"{checkpoint.keep_last} checkpoints can be {kept} steps old only; raise "
                "keep_last",
            )


def idle_problems(run: RunConfig, written: Collection[str]) -> Iterator[Problem]:
    """Keys that somebody changed and nothing reads, as `switches` says; ``written``: all keys that
    somebody wrote. A run that has saved goes on: what it holds may be of an earlier version."""
    if os.path.isfile(run.directory / last_checkpoint.FILE):
        return
    for key, value, switch in switches.idle(run):
        if value == EARLIER.get(key) or (switch.key in written and not switch.strict):
            continue
        now = render.scalar(attrgetter(switch.key)(run))
        text = f"{render.scalar(value)} has no effect with {switch.key}: {now}; leave it out, or "
        yield Problem(key, text + switch.remedy())


RULES: dict[str, Callable[[RunConfig], Iterator[Problem]] | None] = {
    "model": model.problems,
    "training": None,
    "optimizer": optimizer_problems,
    "data": data_problems,
    "attention": attention.problems,
    "parallel": parallel_problems,
    "checkpoint": checkpoint_problems,
    "logging": None,
    "stability": stability.problems,
    "faults": faults_problems,
    "cluster": None,
}
"""The rules of each section that other sections decide; None: it has none."""


def problems(run: RunConfig, sections: Sequence[str] = ("", *RULES)) -> Iterator[Problem]:
    """Everything about ``sections`` that can be checked without a GPU and without a cluster.

    ``sections``: names of sections; the empty name stands for the keys outside all of them.
    """
    for name in sections:
        section = getattr(run, name) if name else run
        if hasattr(section, "problems"):
            yield from section.problems()
        rules = RULES.get(name)
        if rules is not None:
            yield from rules(run)
