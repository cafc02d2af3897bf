"""What ranks do in tests: a small GPT, a few steps, saves and loads. Imported in rank processes only."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_patch.checkpoint.errors import CheckpointError
from megatron_patch.checkpoint.megatron import Checkpointer
from megatron_patch.checkpoint.progress import Progress
from megatron_patch.config.root import RunConfig
from megatron_patch.data.config import DataConfig
from megatron_patch.model.build import build_model
from megatron_patch.model.config import ModelConfig
from megatron_patch.parallel import setup
from megatron_patch.parallel.config import ParallelConfig
from megatron_patch.training.config import OptimizerConfig, TrainingConfig
from megatron_patch.training.optimizer import build_optimizer, wrap_chunks
from megatron_patch.training.schedule import build_schedule

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
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            seq_length=SEQ,
            make_vocab_size_divisible_by=8,
            **(model or {}),
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
        self.chunks = wrap_chunks(run, build_model(run, vocab_size=VOCAB).chunks)
        self.optimizer, _ = build_optimizer(run, self.chunks)
        self.schedule = build_schedule(run, self.optimizer)
        from megatron.core.distributed import finalize_model_grads

        core = self.chunks[0].config
        core.grad_scale_func = self.optimizer.scale_loss
        core.finalize_model_grads_func = finalize_model_grads
        self.checkpointer = Checkpointer(
            run, self.layout, self.chunks, self.optimizer, self.schedule,
            config_text="name: checkpoint-test\n", root=root,
        )  # fmt: skip
        self.losses: list[float] = []

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.losses.append(self._step(step))

    def _step(self, step: int) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        mine = tokens[self.layout.dp_rank :: self.layout.dp_size]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def forward(iterator: Any, model: Any) -> Any:
            row = next(iterator)[None]
            out = model(
                row[:, :-1].contiguous(),
                torch.arange(SEQ)[None],
                None,
                labels=row[:, 1:].contiguous(),
            )

            def loss(losses: torch.Tensor) -> Any:
                total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int32)
                return total, count, {"loss": torch.stack([total.detach(), count.float()])}

            return out, loss

        reports = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(mine) for _ in self.chunks] if len(self.chunks) > 1 else iter(mine),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(mine),
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=False,
        )
        self.schedule.step(increment=1)
        self.optimizer.step()
        total = torch.zeros(2)
        for report in reports if self.layout.tp_rank == 0 else ():
            total += report["loss"]
        torch.distributed.all_reduce(total)
        return float(total[0] / total[1])

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters of this rank by global layer number, as exact numbers."""
        found = {}
        for chunk in self.chunks:
            for name, value in chunk.named_parameters():
                found[name] = value.detach().float().numpy().copy()
        return found

    def moments(self) -> list[dict[str, Any]]:
        """Optimizer state of this rank in the order of its parameters."""
        found = []
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    found.append(
                        {
                            "main": parameter.detach().float().numpy().copy(),
                            "step": float(state["step"]),
                            "own_step": id(state["step"]),
                            "exp_avg": state["exp_avg"].float().numpy().copy(),
                            "exp_avg_sq": state["exp_avg_sq"].float().numpy().copy(),
                        }
                    )
        return found

    def draws(self) -> list[Any]:
        """One number from every random stream."""
        import random

        from megatron.core import tensor_parallel

        numbers: list[Any] = [random.random(), float(np.random.rand()), float(torch.rand(1))]
        with tensor_parallel.get_cuda_rng_tracker().fork():
            numbers.append(float(torch.rand(1)))
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
        Progress(step=save_at, consumed_samples=BATCH * save_at, consumed_tokens=7)
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
