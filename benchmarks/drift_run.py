"""A run opened to be measured: its weights at a checkpoint and its data, and no trace left behind.

What `gradient_drift.py` needs of the trainer, and what it cannot measure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patch.data.loader import Loaders
    from megatron_patch.schema.run import RunConfig
    from megatron_patch.training.session import Session


class Refusal(ValueError):
    """What cannot be measured; one line for the person who asked."""


def refusals(run: RunConfig, layers: Sequence[int]) -> Iterator[str]:
    """Why E = err^T x would not be the error of this configuration's W_Q and W_K."""
    model, parallel = run.model, run.parallel
    other = "measure a run without it"
    linear = "then q and k are not linear functions of the projection's input"
    heads = model.num_attention_heads
    yield from (
        f"{key} is {value!r}, only {' or '.join(map(repr, allowed))} can be measured: {why}"
        for key, value, allowed, why in (
            ("model.layer_spec", model.layer_spec, ("local",),
             "others fuse the norm into the projection; give --set model.layer_spec=local"),
            ("model.position_embedding", model.position_embedding, ("learned_absolute", "none"),
             f"{linear}; {other}"),
            ("model.qk_layernorm", model.qk_layernorm, (False,), f"{linear}; {other}"),
            ("model.mla", model.mla and "set", (None,), f"{linear}; {other}"),
            ("model.softmax_type", model.softmax_type, ("vanilla",),
             f"the float64 truth has no sinks; {other}"),
            ("model.window", model.window, (None,), f"the float64 truth has no window; {other}"),
            ("model.num_query_groups", model.num_query_groups, (None, heads),
             f"one key head per query head; {other}"),
            ("model.attention_dropout", model.attention_dropout, (0.0,),
             f"the truth would need its random numbers; {other}"),
            ("model.hidden_dropout", model.hidden_dropout, (0.0,),
             f"batches would differ in more than their tokens; {other}"),
            *((f"parallel.{name}", getattr(parallel, name), (1,),
               f"one process holds all heads; give --set parallel.{name}=1")
              for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size",
                           "context_parallel_size", "expert_model_parallel_size")),
        )
        if value not in allowed
    )  # fmt: skip
    if ranks := int(os.environ.get("WORLD_SIZE", "1")) - 1:
        yield f"WORLD_SIZE is {ranks + 1}, only 1 can be measured: start it without torchrun"
    for layer in layers:
        if not 0 <= layer < model.num_layers:
            yield f"--layers {layer}: the model has layers 0 to {model.num_layers - 1}; name those"


def configuration(args: argparse.Namespace, scratch: Path) -> RunConfig:
    """The run's configuration, made to load the weights of the checkpoint and to leave no trace.

    Raises:
        ConfigError, Refusal: it cannot be loaded, or not be measured.
    """
    from megatron_patch.checkpoint.manifest import MANIFEST
    from megatron_patch.config import load

    if not (args.checkpoint / MANIFEST).is_file():
        raise Refusal(
            f"--checkpoint {args.checkpoint}: there is no {MANIFEST} in it; name the folder of one "
            "step, as megatron-patch writes them under checkpoints"
        )
    path = args.config / "config.yaml" if args.config.is_dir() else args.config
    # What the run itself began with may be gone, and is not wanted.
    unset = ("load_from=null", "load_weights_only=false", "directory=null", "resume=auto")
    run = load(path, [*args.set, *(f"checkpoint.{key}" for key in unset)]).config
    if found := list(refusals(run, args.layers)):
        raise Refusal("; ".join(found))
    checkpoint = dataclasses.replace(
        run.checkpoint, load_from=str(args.checkpoint), load_weights_only=True, async_save=False
    )
    # Of no use to one process that makes no update; the latter's hooks wait for one.
    parallel = dataclasses.replace(
        run.parallel, overlap_grad_reduce=False, overlap_param_gather=False
    )
    return dataclasses.replace(run, run_dir=str(scratch), checkpoint=checkpoint, parallel=parallel)


class _Console:
    """Where `build_session` says what it built; no run directory is opened for it."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def opened(run: RunConfig) -> Iterator[tuple[Session, Loaders]]:
    """The trainer's own session with the weights of ``checkpoint.load_from``, and its data."""
    from megatron_patch.data.verify import verify_datasets
    from megatron_patch.parallel import setup
    from megatron_patch.training.process import prepare_process
    from megatron_patch.training.signals import StopFlags

    prepare_process(run)
    layout = setup.initialize(run)
    try:
        # Imports Megatron, which must find CPU mode installed.
        from megatron_patch.checkpoint.megatron import Checkpointer
        from megatron_patch.data.loader import build_loaders
        from megatron_patch.training.session import build_session

        console: Any = _Console()
        for text in verify_datasets(run):
            console.say(text)
        loaders = build_loaders(run, layout)
        try:
            session, _ = build_session(run, layout, loaders, stop=StopFlags(), monitor=console)
            if run.checkpoint.load_from is not None:
                parts = (session.chunks, session.optimizer, session.schedule)
                Checkpointer(run, layout, *parts).load()
            yield session, loaders
        finally:
            loaders.close()
    finally:
        setup.destroy()


def variant_of(config: Path) -> str:
    """The attribution variant that an experiment ran this run directory with; else ``plain``."""
    from megatron_patch.experiments.cell import FINGERPRINT

    told = config / FINGERPRINT
    return str(json.loads(told.read_text())["variant"]) if told.is_file() else "plain"


def step_of(checkpoint: Path) -> int:
    """Steps made before a checkpoint; its manifest has been verified."""
    from megatron_patch.checkpoint.manifest import MANIFEST

    return int(json.loads((checkpoint / MANIFEST).read_text())["step"])
