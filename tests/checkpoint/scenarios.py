"""What ranks do in tests: a small GPT, a few steps, saves and loads."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_patch.checkpoint.errors import CheckpointError
from megatron_patch.checkpoint.megatron import Checkpointer
from megatron_patch.checkpoint.train_state import TrainState
from megatron_patch.model.build import build_model
from megatron_patch.parallel import setup
from megatron_patch.schema import render
from megatron_patch.schema.data import DataConfig
from megatron_patch.schema.model import ModelConfig
from megatron_patch.schema.parallel import ParallelConfig
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import OptimizerConfig, TrainingConfig
from megatron_patch.training import auxiliary
from megatron_patch.training.optimizer import build_optimizer, wrap_chunks
from megatron_patch.training.schedule import build_schedule
from megatron_patch.training.step import global_loss, run_schedule

sys.path.append(str(Path(__file__).resolve().parents[1]))
import group_threads
from megatron_cpu import forget_trackers

SEQ, VOCAB, BATCH = 16, 64, 4

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
}


def config(
    layout: str = "single",
    *,
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> RunConfig:
    run = RunConfig(
        name="checkpoint-test",
        model=ModelConfig(
            **{
                "num_layers": 2,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "seq_length": SEQ,
                "make_vocab_size_divisible_by": 8,
                **(model or {}),
            }
        ),
        training=TrainingConfig(
            **{
                "train_steps": 10,
                "global_batch_size": BATCH,
                "micro_batch_size": 1,
                "device": "cpu",
                "precision": "fp32",
                **(training or {}),
            }
        ),
        optimizer=OptimizerConfig(**{"lr": 1e-2, "warmup_steps": 1, **(optimizer or {})}),
        data=DataConfig(),
        parallel=ParallelConfig(**LAYOUTS[layout], **(parallel or {})),
    )
    run = replace(run, attention=replace(run.attention, backend="reference"))
    return replace(run, checkpoint=replace(run.checkpoint, **(checkpoint or {})))


class Live:
    """A model with its optimizer and schedule, and a checkpointer under ``root``."""

    def __init__(self, run: RunConfig, root: str, *, seed: int | None = None) -> None:
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        self.run = run
        started = run if seed is None else replace(run, training=replace(run.training, seed=seed))
        self.layout = setup.initialize(started)
        forget_trackers()
        self.chunks = wrap_chunks(run, build_model(run, vocab_size=VOCAB).chunks)
        self.optimizer, _ = build_optimizer(run, self.chunks)
        self.schedule = build_schedule(run, self.optimizer)
        from megatron.core.distributed import finalize_model_grads

        core = self.chunks[0].config
        core.grad_scale_func = self.optimizer.scale_loss
        core.finalize_model_grads_func = finalize_model_grads
        self.checkpointer = Checkpointer(
            run, self.layout, self.chunks, self.optimizer, self.schedule,
            config_text=render.dump(asdict(run)), root=root,
        )  # fmt: skip
        self.losses: list[float] = []

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.losses.append(self._step(step))

    def _step(self, step: int) -> float:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        batches: list[Any] = [
            {
                "tokens": row[None, :-1].contiguous(),
                "labels": row[None, 1:].contiguous(),
                "position_ids": torch.arange(SEQ)[None],
                "loss_mask": torch.ones(1, SEQ),
            }
            for row in tokens[self.layout.dp_rank :: self.layout.dp_size]
        ]
        session: Any = SimpleNamespace(
            run=self.run, layout=self.layout, chunks=self.chunks, config=self.chunks[0].config,
            micro_batches=len(batches), sequences=BATCH,
        )  # fmt: skip
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with auxiliary.weighed(session, batches):
            report = run_schedule(session, batches, forward_only=False)
        self.schedule.step(increment=1)
        self.optimizer.step()
        return global_loss(session, report)[0]

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters of this rank by chunk and local name."""
        found = {}
        for stage, chunk in enumerate(self.chunks):
            for name, value in chunk.named_parameters():
                found[f"{stage}:{name}"] = value.detach().float().cpu().numpy().copy()
        return found

    def moments(self) -> list[dict[str, Any]]:
        """Optimizer state of this rank in the order of its parameters."""
        found = []
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    if not state:
                        continue
                    found.append(
                        {
                            "main": parameter.detach().float().cpu().numpy().copy(),
                            "step": float(state["step"]),
                            "own_step": id(state["step"]),
                            "exp_avg": state["exp_avg"].float().cpu().numpy().copy(),
                            "exp_avg_sq": state["exp_avg_sq"].float().cpu().numpy().copy(),
                        }
                    )
        return found

    def draws(self) -> list[Any]:
        """One number from every random stream."""
        import random

        from megatron.core import tensor_parallel

        numbers: list[Any] = [random.random(), float(np.random.rand()), float(torch.rand(1))]
        device = self.layout.device
        numbers.append(float(torch.rand(1, device=device)))
        with tensor_parallel.get_cuda_rng_tracker().fork():
            numbers.append(float(torch.rand(1, device=device)))
        return numbers

    def result(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "weights": self.weights(),
            "moments": self.moments(),
            "draws": self.draws(),
        }


def leave() -> None:
    setup.destroy()
    group_threads.forget()


@contextmanager
def _lines() -> Any:
    """Collects what the checkpoint room logs."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, keep = logging.getLogger("megatron_patch.checkpoint"), Keep()
    logger.addHandler(keep)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)


def train_and_save(
    root: str, *, save_at: int, stop_at: int, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train to ``stop_at`` without a break, saving once on the way."""
    live = Live(config(**(changes or {})), root)
    live.train(1, save_at)
    live.checkpointer.save(
        TrainState(step=save_at, consumed_samples=BATCH * save_at, consumed_tokens=7)
    )
    at_save = {"weights": live.weights(), "moments": live.moments()}
    live.train(save_at + 1, stop_at)
    live.checkpointer.finalize(blocking=True)
    return {**live.result(), "at_save": at_save}


def load_and_train(
    root: str, *, stop_at: int, changes: dict[str, Any] | None = None, seed: int = 999
) -> dict[str, Any]:
    """Start with other weights, load, compare at once, train on."""
    live = Live(config(**(changes or {})), root, seed=seed)
    with _lines() as lines:
        try:
            progress = live.checkpointer.load()
        except CheckpointError as error:
            return {"error": type(error).__name__, "text": str(error), "lines": lines}
    at_load = {"weights": live.weights(), "moments": live.moments()}
    if progress is not None:
        live.train(progress.step + 1, stop_at)
    return {
        **live.result(),
        "at_load": at_load,
        "progress": None if progress is None else progress.as_dict(),
        "lines": lines,
    }


def convert(source: str, target: str, *, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Load what ``source`` holds on this layout and save it, unchanged, under ``target``."""
    live = Live(config(**(changes or {})), source, seed=999)
    with _lines() as lines:
        progress = live.checkpointer.load()
        assert progress is not None
    directory = live.checkpointer.store.directory
    directory.root = directory.root.parent / target
    live.checkpointer.save(progress)
    return {"progress": progress.as_dict(), "lines": lines}


def contents(path: str) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, whole, by its name in the file."""
    from torch.distributed import checkpoint as dcp

    from megatron_patch.checkpoint.safe_metadata import read_metadata
    from megatron_patch.checkpoint.safe_reader import SafeReader

    index = read_metadata(path)
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(found, storage_reader=SafeReader(path, index), no_dist=True)
    return {name: value.float().numpy() for name, value in found.items()}


def core_alone(root: str, *, optimizer_sharding: str) -> dict[str, Any]:
    """The same state through core's own functions, without our corrections of the optimizer."""
    from megatron.core import dist_checkpointing

    from megatron_patch.checkpoint import content, optimizer_state

    live = Live(config(), root)
    live.train(1, 2)
    metadata = content.core_metadata(optimizer_sharding)

    def state(loading: bool) -> dict[str, Any]:
        model = content.model_state(live.checkpointer.parts, metadata)
        sharded = live.optimizer.sharded_state_dict(
            model["model"], is_loading=loading, metadata=metadata
        )
        return {**model, "optimizer": sharded}

    dist_checkpointing.save(state(False), root)
    optimizer_state.write_step(live.optimizer, 0)  # as a new process has it
    with torch.no_grad():
        loaded = dist_checkpointing.load(state(True), root)
        try:
            live.optimizer.load_state_dict(loaded["optimizer"])
        except KeyError as error:
            return {"error": repr(error)}
    moments = live.moments()
    return {
        "steps": sorted({m["step"] for m in moments}),
        "step_tensors": len({m["own_step"] for m in moments}),
        "parameters": len(moments),
    }


def failing_save(root: str, *, rank: int, where: str, background: bool) -> dict[str, Any]:
    """A good save of step 1, then one of step 2 in which one rank fails."""
    from megatron_patch.checkpoint import content, writer

    live = Live(config("dp", checkpoint={"async_save": background}), root)
    live.checkpointer.save(TrainState(step=1))
    live.checkpointer.finalize(blocking=True)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    owner: Any = writer.Plan if hasattr(writer.Plan, where) else content
    original = getattr(owner, where)
    if live.layout.rank == rank:
        setattr(owner, where, fail)
    try:
        live.checkpointer.save(TrainState(step=2))
        live.checkpointer.finalize(blocking=True)
        text = ""
    except CheckpointError as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        setattr(owner, where, original)
    live.checkpointer.save(TrainState(step=3))
    live.checkpointer.finalize(blocking=True)
    progress = live.checkpointer.load()
    assert progress is not None
    return {"text": text, "progress": progress.as_dict()}


def killed_while_saving(root: str, *, rank: int, phase: str) -> None:
    """One rank dies by SIGKILL in a phase of a save of step 2."""
    import os
    import signal

    from megatron_patch.checkpoint import writer

    live = Live(config("dp"), root)
    if live.layout.rank == rank:
        die = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        setattr(writer.Plan, phase, die)
    live.checkpointer.save(TrainState(step=2))


def steps_while_saving(root: str) -> dict[str, Any]:
    """A background save held up: not committed early, and later steps do not leak into it."""
    import threading

    from megatron_patch.checkpoint import writer

    live = Live(config("dp", checkpoint={"async_save": True}), root)
    live.train(1, 2)
    gate, original = threading.Event(), writer.Plan.write

    def slow(self: Any) -> None:
        gate.wait(60)
        original(self)

    if live.layout.rank == 1:
        writer.Plan.write = slow  # type: ignore[method-assign]
    before = live.moments()
    try:
        live.checkpointer.save(TrainState(step=2))
        early = [live.checkpointer.finalize(blocking=False) for _ in range(3)]
        visible = live.checkpointer.store.find() is not None
        live.train(3, 4)
    finally:
        gate.set()
        writer.Plan.write = original  # type: ignore[method-assign]
    live.checkpointer.finalize(blocking=True)
    live.checkpointer.load()
    return {"early": early, "visible": visible, "before": before, "loaded": live.moments()}


# What an attacker wants resolved; gloo and core pickle messages of their own, which are not files.
FORBIDDEN = {"os", "posix", "nt", "subprocess", "builtins", "__builtin__", "sys", "runpy",
             "importlib"}  # fmt: skip
_resolved: list[str] = []
_hooked = False


def _watch(event: str, arguments: Any) -> None:
    if event == "pickle.find_class" and str(arguments[0]).split(".")[0] in FORBIDDEN:
        _resolved.append(f"{arguments[0]}.{arguments[1]}")
    elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        _resolved.append(event)


def hostile_loads(folder: str, good: str, names: list[str]) -> dict[str, Any]:
    """Load after every attack on the newer of two checkpoints; what happened, by attack."""
    import shutil
    import sys
    from pathlib import Path

    import hostile

    global _hooked
    live = Live(config(), good)
    assert live.checkpointer._environment  # asks git for the commit: before the audit hook
    if not _hooked:
        sys.addaudithook(_watch)
        _hooked = True
    found = {}
    for name in names:
        root, sentinel = Path(folder) / name / "checkpoints", Path(folder) / name / "sentinel"
        shutil.copytree(good, root)
        newest = root / (root / "latest").read_text().strip()
        hostile.attack(newest, name, sentinel)
        live.checkpointer.store.directory.root = root
        _resolved.clear()
        with _lines() as lines:
            try:
                progress = live.checkpointer.load()
                outcome = f"step {progress.step if progress else None}"
            except CheckpointError as error:
                outcome = f"{type(error).__name__}: {error}"
        found[name] = {
            "outcome": outcome,
            "lines": lines,
            "ran": sentinel.exists(),
            "resolved": list(_resolved),
        }
    return found


def core_runs_it(folder: str, good: str, names: list[str]) -> dict[str, bool]:
    """The same attacks on core's own loading: whether the payload ran."""
    import shutil
    from pathlib import Path

    import hostile
    from megatron.core import dist_checkpointing

    from megatron_patch.checkpoint import content

    live = Live(config(), good)
    found = {}
    for name in names:
        copy, sentinel = Path(folder) / name / "copy", Path(folder) / name / "sentinel"
        source = Path(good) / (Path(good) / "latest").read_text().strip()
        shutil.copytree(source, copy)
        hostile.attack(copy, name, sentinel)
        request = content.model_state(
            live.checkpointer.parts, content.core_metadata("fully_reshardable")
        )
        with suppress(Exception, CheckpointException):
            dist_checkpointing.load(request, str(copy))
        found[name] = sentinel.exists()
    return found
