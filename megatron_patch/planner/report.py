"""The plan as text, as JSON, and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_patch.planner.layout import micro_batches
from megatron_patch.planner.memory import GIB, StageMemory
from megatron_patch.planner.parameters import chunk_parameters, chunks_of
from megatron_patch.planner.plan import Plan
from megatron_patch.planner.search import Alternative
from megatron_patch.schema.problem import ConfigError, Problem

AXES = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "dp": "dp_cp"}
COLUMNS = (
    ("weights", "weights"),
    ("gradients", "grads"),
    ("optimizer", "optim"),
    ("activations", "activ"),
    ("attention kernel", "attn"),
    ("working memory", "work"),
    ("fragmentation", "frag"),
    ("CUDA context, NCCL", "system"),
)
TIMES = (
    ("matrix", "matrix products"),
    ("attention", "attention kernels"),
    ("memory", "norms, activations, cross entropy"),
    ("tensor_parallel", "tensor-parallel communication"),
    ("context_parallel", "context-parallel communication, exposed"),
    ("expert_parallel", "expert-parallel communication"),
    ("pipeline", "pipeline transfers"),
    ("bubble", "pipeline bubble"),
    ("data_parallel", "data-parallel communication, exposed"),
    ("update", "optimizer update"),
)


def text(plan: Plan, tokens: float) -> str:
    """The whole report; ``tokens`` is the budget of the last line."""
    parts = (_head(plan), _groups(plan), _memory(plan), _traffic(plan), _speed(plan, tokens))
    return "\n\n".join("\n".join(part) for part in parts)


def _head(plan: Plan) -> list[str]:
    run, machine, counts = plan.run, plan.machine, plan.counts
    t = run.training
    tokens = t.global_batch_size * run.model.seq_length
    active = "" if counts.active == counts.total else f", {counts.active:,} active"
    lines = [
        f"run {run.name} on {machine.nodes} node(s) x {machine.gpus_per_node} "
        f"{machine.gpu.device} ({machine.gpu.memory:g} GiB): {plan.layout.describe()}",
        f"model: {counts.total:,} parameters{active} ({counts.embedding:,} in tables); vocabulary "
        f"{plan.vocabulary.ids:,}, padded to {plan.vocabulary.padded:,} ({plan.vocabulary.origin})",
        f"batch: {t.global_batch_size:,} sequences of {run.model.seq_length:,} = {tokens:,} tokens "
        f"a step; micro-batch {t.micro_batch_size}, {micro_batches(run, plan.layout)} accumulated; "
        f"recompute {_recompute(plan)}",
    ]
    if t.batch_size_rampup:
        lines.append("batch_size_rampup: everything below is of the full batch")
    if run.model.layer_spec == "te":
        lines.append("layers: Transformer Engine's are planned with the tensors of the local ones")
    return lines


def _recompute(plan: Plan) -> str:
    r = plan.run.training.recompute
    if r.granularity == "selective":
        return f"of {', '.join(r.modules)}"
    if r.granularity == "full":
        return f"full, {r.method}, {r.num_layers} layer(s)"
    return "none"


def _groups(plan: Plan) -> list[str]:
    rows = [["group", "ranks", "stride", "in a node", "link"]]
    for axis in ("tp", "cp", "ep", "edp", "dp", "pp"):
        group = plan.layout.group(axis)
        if group.size > 1 and not (axis == "edp" and plan.layout.ep == 1):
            numbers = map(str, (group.size, group.stride, group.in_node))
            rows.append([axis.upper(), *numbers, group.link])
    return ["Layout over nodes", *_table(rows)] if len(rows) > 1 else ["Layout: a single GPU"]


def _memory(plan: Plan) -> list[str]:
    rows = [["stage", "layers", "parameters", *(short for _, short in COLUMNS), "total"]]
    for stage in _telling(plan):
        stack, states = stage.stack(), stage.states
        row = [str(stage.stage), str(len(stage.layers)), f"{states.parameters:,}"]
        sizes = [*(stack[name] for name, _ in COLUMNS), stage.total]
        rows.append(row + [f"{size / GIB:.2f}" for size in sizes])
    worst, whole = plan.worst, f"{plan.machine.gpu.memory:g}"
    verdict = f"fits: {plan.room:.1f} GiB of {whole} left on stage {worst.stage}"
    if not plan.fits:
        need = f"{worst.total / GIB:.1f} GiB of {whole}"
        verdict = f"DOES NOT FIT: stage {worst.stage} needs {need}"
    return [
        "Memory of one GPU, GiB (per pipeline stage)",
        *_table(rows),
        f"peak of stage {worst.stage}: {worst.in_flight} pass(es) in flight, {worst.moment}; "
        f"torch.cuda.max_memory_allocated about {worst.allocated / GIB:.2f} GiB",
        verdict,
        f"host memory of a checkpoint: about {plan.save_bytes / GIB:,.1f} GiB on the node that "
        "holds most (docs/checkpoints.md)",
    ]


def _telling(plan: Plan) -> list[StageMemory]:
    """All stages, or of many the first two, the middle and the last two."""
    count = len(plan.stages)
    if count <= 8:
        return plan.stages
    return [plan.stages[i] for i in (0, 1, count // 2, count - 2, count - 1)]


def _traffic(plan: Plan) -> list[str]:
    stages = [plan.traffic(stage) for stage in range(plan.layout.pp)]
    busiest = max(stages, key=lambda items: sum(item.sent for item in items))
    rows = [[item.axis, item.what, f"{item.sent / 1e9:.3f}", item.link] for item in busiest]
    if not rows:
        return ["Communication: none"]
    head = ["axis", "what", "GB a GPU and step", "link"]
    return ["Communication (sent, stage that sends most)", *_table([head, *rows])]


def _speed(plan: Plan, tokens: float) -> list[str]:
    speed = plan.speed
    lines = [f"Step time, estimated: {speed.step.total:.3f} s"]
    parts = [(getattr(speed.step, name), words) for name, words in TIMES]
    lines += [f"  {s:9.3f} s  {s / speed.step.total:5.1%}  {words}" for s, words in parts if s]
    lines.append(
        f"  {speed.tokens_per_second:,.0f} tokens/s, {speed.tflops_per_gpu:.0f} TFLOP/s a GPU, MFU "
        f"{speed.mfu:.1%} (estimate; calibrated on GPT-2 124M, docs/planning.md)"
    )
    if plan.run.optimizer.name == "muon":
        lines.append("  without Muon's own matrix products and launches (docs/training.md)")
    lines.append(f"  {tokens / 1e9:,.1f}B tokens: {speed.days(tokens):,.1f} days")
    return lines


def refusal(plan: Plan, found: list[Alternative], elsewhere: list[Alternative]) -> str:
    worst = plan.worst
    biggest = sorted(worst.stack().items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in biggest)
    lines = [
        f"the layout does not fit: stage {worst.stage} needs {worst.total / GIB:.1f} GiB a GPU, "
        f"{plan.machine.gpu.device} has {plan.machine.gpu.memory:g} (GiB: {parts})"
    ]
    machine = plan.machine
    here = f"{machine.nodes} node(s) of {machine.gpus_per_node}"
    if found:
        lines.append(f"What fits {here}, fastest first:")
        lines += [_line(a) for a in found]
    else:
        lines.append(
            f"Nothing tried fits {here}: TP up to {machine.gpus_per_node}, every PP and CP that "
            "divides, smaller micro-batches, full recompute."
        )
        if elsewhere:
            nodes = elsewhere[0].plan.machine.nodes
            lines.append(f"The fewest nodes that do (tried by doubling): {nodes}. There:")
            lines += [_line(a) for a in elsewhere]
    return "\n".join(lines)


def _line(alternative: Alternative) -> str:
    plan, how = alternative.plan, alternative.arguments or "the layout as it is"
    return (
        f"  {plan.layout.describe()}: {plan.worst.total / GIB:.1f} GiB, "
        f"{plan.speed.tokens_per_second:,.0f} tokens/s estimated\n    {how}"
    )


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            left = i == 0 or not (rows[1][i][:1].isdigit())
            cells.append(cell.ljust(width) if left else cell.rjust(width))
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def as_json(plan: Plan, tokens: float, found: list[Alternative]) -> dict[str, Any]:
    """The same as data: bytes, seconds, counts."""
    run, speed = plan.run, plan.speed
    return {
        "name": run.name,
        "gpu": plan.machine.gpu.name,
        "gpu_memory_gib": plan.machine.gpu.memory,
        "layout": asdict(plan.layout),
        "links": {axis: plan.layout.group(name).link for axis, name in AXES.items()},
        "vocabulary": asdict(plan.vocabulary),
        "parameters": asdict(plan.counts),
        "tokens_per_step": speed.tokens_per_step,
        "micro_batches": micro_batches(run, plan.layout),
        "stages": [_stage(plan, stage) for stage in plan.stages],
        "fits": plan.fits,
        "room_gib": plan.room,
        "save_bytes_of_a_node": plan.save_bytes,
        "traffic": [[asdict(item) for item in plan.traffic(s)] for s in range(plan.layout.pp)],
        "step_seconds": speed.step.total,
        "step_parts": asdict(speed.step),
        "tokens_per_second": speed.tokens_per_second,
        "tflops_per_gpu": speed.tflops_per_gpu,
        "mfu": speed.mfu,
        "token_budget": tokens,
        "days": speed.days(tokens),
        "alternatives": [
            {"set": a.changes, "nodes": a.plan.machine.nodes, "room_gib": a.plan.room}
            | {"tokens_per_second": a.plan.speed.tokens_per_second}
            for a in found
        ],
    }


def _stage(plan: Plan, stage: StageMemory) -> dict[str, Any]:
    run, vocabulary = plan.run, plan.vocabulary.padded
    chunks = chunks_of(run, stage.stage)
    return {
        "stage": stage.stage,
        "layers": list(stage.layers),
        "parameters": stage.states.parameters,
        "tensors": sum(len(chunk_parameters(run, chunk, vocabulary)) for chunk in chunks),
        "in_flight": stage.in_flight,
        "peak_moment": stage.moment,
        "bytes": stage.stack(),
        "allocated": stage.allocated,
        "reserved": stage.reserved,
        "total": stage.total,
    }


def draw(plan: Plan, path: Path) -> None:
    """A bar a pipeline stage, its parts stacked, and the GPU's capacity as a line.

    Raises ConfigError: the picture cannot be written.
    """
    wrong = "is a directory" if path.is_dir() else "" if path.suffix else "has no ending"
    if wrong:  # matplotlib would write a file beside it
        name = path / "memory.png" if path.is_dir() else f"{path}.png"
        raise ConfigError([Problem("--plot", f"{path} {wrong}; name a PNG file, e.g. {name}")])
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, 0.5 * len(plan.stages) + 4), 4.5), layout="tight")
    axes = figure.subplots()
    bottom = [0.0] * len(plan.stages)
    names = [str(stage.stage) for stage in plan.stages]
    for part in plan.stages[0].stack():
        heights = [stage.stack()[part] / GIB for stage in plan.stages]
        axes.bar(names, heights, bottom=bottom, label=part, width=0.7)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.axhline(plan.machine.gpu.memory, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("GiB a GPU")
    axes.set_title(f"{plan.run.name}: {plan.layout.describe()}", fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture's
        raise ConfigError([Problem("--plot", f"cannot write {path}: {error}")]) from None
