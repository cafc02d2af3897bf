"""The process that trains: prepared before Megatron is imported, announced once it is laid out."""

from __future__ import annotations

import os

import torch

from megatron_patch.core_patches import quiet
from megatron_patch.monitor.hub import Monitor
from megatron_patch.parallel import setup
from megatron_patch.parallel.setup import Layout
from megatron_patch.runtime import environment
from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.schema.run import RunConfig
from megatron_patch.training import determinism


def prepare_process(run: RunConfig) -> None:
    """Everything that must precede Megatron's import or CUDA's start.

    Raises ConfigError: the ranks started, the GPUs or the environment do not fit the configuration.
    """
    setup.check_world_size(run, setup.launched_world_size())
    determinism.enforce(run.training)
    quiet.install()
    environment.hide_old_nvrx()
    if run.training.device == "cpu":
        from megatron_patch.core_patches import cpu_mode

        cpu_mode.install()
    elif not torch.cuda.is_available():
        text = (
            "cuda, but PyTorch sees no GPU here; set training.device: cpu to train on the CPU, or "
            "run 'megatron-patch doctor'"
        )
        raise ConfigError([Problem("training.device", text)])
    elif (conflict := environment.cudnn_conflict()) is not None:
        raise ConfigError([Problem("training.device", conflict)])
    if run.training.fp8 != "none":
        _prepare_fp8(run, torch.cuda.get_device_capability())


def _prepare_fp8(run: RunConfig, sm: tuple[int, int]) -> None:
    """Refuse a recipe the GPU has no instructions for; choose the scaling of FP8 attention.

    Raises ConfigError: the recipe cannot run on a GPU of compute capability ``sm``.
    """
    recipe, why = run.training.fp8, ""
    if recipe == "mxfp8" and sm < (10, 0):
        why = "scales of 32 values are applied by the tensor cores of sm_100 (Blackwell) alone; "
        why += "use blockwise or current"
    elif sm < (9, 0):
        why = "its recipe needs sm_90 or newer; use none"
    if why:
        text = f"{recipe}: this GPU is sm_{sm[0]}{sm[1]}, and {why}"
        raise ConfigError([Problem("training.fp8", text)])
    if run.attention.fp8 and sm < (10, 0):
        # cuDNN takes the scales of an earlier step there. Read when Transformer Engine is imported.
        os.environ.setdefault("NVTE_DPA_FP8_RECIPE", "DelayedScaling")


def announce(monitor: Monitor, run: RunConfig, layout: Layout) -> None:
    """Start-up lines: versions, device, layout, batch."""
    found = environment.report() if layout.print_rank else {}
    names = ("megatron-patch-stable", "python", "torch", "triton", "megatron-core")
    versions = ", ".join(f"{n} {found.get(n)}" for n in names)
    commit = environment.short_commit(str(found.get("commit")))
    monitor.say(f"run {run.name}: {versions}, commit {commit}")
    extra = ("transformer-engine", "apex", "cuda")
    optional = ", ".join(f"{n} {found.get(n) or 'not installed'}" for n in extra)
    monitor.say(f"optional: {optional}")
    t, p = run.training, run.parallel
    line = f"CPU mode, gloo and PyTorch's CPU kernels, {torch.get_num_threads()} thread(s) a rank"
    if t.device != "cpu":
        gpu, cuda, driver, nccl = (found.get(n) for n in ("gpu", "cuda", "driver", "nccl"))
        line = f"{gpu}, CUDA {cuda}, driver {driver}, NCCL {nccl}"
    monitor.say(f"device: {line}")
    ranks = layout.sizes("{}")
    axes = " x ".join(f"{axis.upper()}{ranks[axis]}" for axis in ("tp", "cp", "pp", "dp"))
    extras = [f"EP{layout.ep_size}"] if layout.ep_size > 1 else []
    extras += ["sequence parallel"] if p.sequence_parallel else []
    if kinds := p.cp_comm_types:
        sizes = p.hierarchical_context_parallel_sizes
        extras.append("context parallel by " + " and ".join(kinds) + (f" {sizes}" if sizes else ""))
    if p.virtual_pipeline_model_parallel_size:
        extras.append(f"{p.virtual_pipeline_model_parallel_size} virtual stages")
    counts = p.stage_layers(run.model.num_layers)
    if counts is not None and len(set(counts)) > 1:
        extras.append(f"{' + '.join(map(str, counts))} layers")
    monitor.say(f"layout: {layout.world_size} rank(s), {', '.join([axes, *extras])}")
    accumulate = t.global_batch_size // (t.micro_batch_size * layout.dp_size)
    monitor.say(
        f"batch: {t.global_batch_size} sequences of {run.model.seq_length} = "
        f"{t.global_batch_size * run.model.seq_length:,} tokens a step; micro-batch "
        f"{t.micro_batch_size}, {accumulate} accumulated; {t.precision}, {t.train_steps:,} steps"
    )
    if t.batch_size_rampup:
        first, increment, samples = t.batch_size_rampup
        monitor.say(
            f"batch: from {first} sequences by {increment} to {t.global_batch_size} over "
            f"{samples:,} samples, full from step {t.batch_sizes.levels[-1][0] + 1:,} on"
        )
    monitor.say(determinism.line(t))
    for path in environment.other_copies():
        monitor.say(f"warning: another package named megatron_patch is on sys.path: {path}")
