"""Megatron-Bridge's own ``train()`` and callbacks with the monitor, on a CPU.

Bridge itself needs Transformer Engine and modelopt. Its loop (training/train.py) and its callbacks
are those of the installed wheel (``pip install --no-deps megatron-bridge``); the modules of Bridge
that these import are stand-ins. Without the wheel the test is skipped.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_cpu import SEQ, VOCAB, single_rank, tiny_run

from megatron_patch.stability import MonitorOptions, record
from megatron_patch.stability.adapters.megatron_bridge import AttentionCallback

OURS = ("megatron.bridge.training.train", "megatron.bridge.training.callbacks")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for all of Bridge but `OURS`, and for modelopt."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        stands_in = name.split(".")[0] == "modelopt" or name.startswith("megatron.bridge")
        if not stands_in or name in OURS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: mock.MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it but its path."""
        place = ROOT / module.__name__.removeprefix("megatron.bridge").replace(".", "/").strip("/")
        module.__path__ = [str(place)]


class Loose(SimpleNamespace):
    """A configuration in which all that is not set is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


found = importlib.util.find_spec("megatron.bridge")
ROOT = Path() if found is None else Path(found.submodule_search_locations[0])  # type: ignore[index]


@pytest.fixture
def bridge() -> Iterator[Any]:
    """Bridge's module of the training loop, in Megatron-Core's CPU mode."""
    if found is None:
        pytest.skip("megatron-bridge is not installed")
    before = set(sys.modules)
    with single_rank():
        sys.meta_path.insert(0, absent := Absent())
        try:
            train = importlib.import_module(OURS[0])
            train.reduce_max_stat_across_model_parallel_group = lambda x, **_: float(x)
            train.prepare_forward_step_func = lambda function, state: function
            for name in ("should_profile_rank", "check_nvrx_straggler_detection",
                         "should_disable_forward_pre_hook", "is_full_iteration_cuda_graph",
                         "_should_skip_and_handle_iteration"):  # fmt: skip
                setattr(train, name, lambda *_: False)
            train.handle_profiling_step = lambda *_: None
            train._delete_cuda_graphs = lambda *_: None
            train.flop_utils.resolve_global_flops_runtime_stats = lambda *_, **__: (0,) * 5
            train.flop_utils.num_floating_point_operations = lambda *_, **__: 0
            yield train
        finally:
            sys.meta_path.remove(absent)
            for name in set(sys.modules) - before:
                if name.startswith(("megatron.bridge", "modelopt")):
                    del sys.modules[name]


def run(
    train: Any,
    folder: Path,
    saved: list[int],
    *,
    steps: int,
    guard: Any = "warn",
    more: float = 0.0,
) -> None:
    """Bridge's loop over a tiny model.

    ``saved`` gets the steps after which it saves; ``more`` is added to the losses that it is told.
    """
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import rerun_state_machine as rerun
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_patch.model.build import build_model
    from megatron_patch.training import optimizer as optimizers

    rerun.destroy_rerun_state_machine()
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.DISABLED)
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, 4, 2, 1)
    configured = tiny_run()
    chunks = optimizers.wrap_chunks(configured, build_model(configured, vocab_size=VOCAB).chunks)
    optimizer, _ = optimizers.build_optimizer(configured, chunks)
    optimizers.connect(configured, chunks, optimizer, finalize=finalize_model_grads)
    cfg = Loose(
        train=Loose(train_iters=steps, micro_batch_size=2, empty_unused_memory_level=0),
        model=Loose(seq_length=SEQ), optimizer=Loose(), ddp=Loose(), data_parallel_size=1,
        dataset=Loose(), validation=Loose(), dist=Loose(use_decentralized_pg=True),
        checkpoint=Loose(save="here", save_interval=1000), scheduler=Loose(lr_warmup_iters=0),
        logger=Loose(skip_train_metrics_log=True), profiling=None,
    )  # fmt: skip
    progress = Loose(
        step=0,
        consumed_train_samples=0,
        skipped_train_samples=0,
        floating_point_operations_so_far=0,
    )
    state = Loose(cfg=cfg, timers=mock.MagicMock(), train_state=progress, straggler_timer=None)
    train.save_checkpoint_and_time = lambda state, *_, **__: saved.append(state.train_state.step)

    def forward(batches: Any, model: Any) -> Any:
        tokens = next(batches)
        losses = model(tokens, torch.arange(SEQ).repeat(2, 1), None, labels=tokens.roll(-1, 1))
        count = torch.tensor(losses.numel(), dtype=torch.int32)
        total = losses.float().sum()
        return losses, lambda _: (
            total,
            count,
            {"lm loss": torch.stack([total.detach() + more, count])},
        )

    batches = iter(lambda: torch.randint(0, VOCAB, (2, SEQ)), None)
    options = MonitorOptions(interval=1, guard=guard)
    callback = AttentionCallback(directory=folder, options=options)
    callbacks = sys.modules[OURS[1]].normalize_callbacks([callback])  # type: ignore[attr-defined]
    train.train(
        forward, chunks, optimizer, mock.MagicMock(), batches, None, state, mock.MagicMock(),
        ProcessGroupCollection.use_mpu_process_groups(), callback_manager=callbacks,
    )  # fmt: skip


def test_every_step_of_its_loop_is_watched(tmp_path, bridge):
    saved: list[int] = []
    clip = bridge.clip_qk
    run(bridge, tmp_path, saved, steps=3)
    assert bridge.clip_qk is clip
    told = record.read(tmp_path)
    assert saved == [3]  # at its end, as Bridge does
    assert told.steps.tolist() == [1, 2, 3] and (told.scalars["lr"] == 1e-3).all()
    assert (told.scalars["loss_mean"] > 1).all() and (told.heads["dk_sum"] > 0).all()
    # Measured before clipping, and after the reduction: the parts are those of the whole.
    squares = told.layers["grad_norm"].astype(float) ** 2
    whole = (squares.sum(1) + told.scalars["grad_norm_rest"] ** 2) ** 0.5
    assert whole == pytest.approx(told.scalars["grad_norm_mean"], rel=1e-3)


def test_danger_saves_and_ends_the_run(tmp_path, bridge):
    saved: list[int] = []
    with pytest.raises(SystemExit) as ended:
        run(bridge, tmp_path, saved, steps=9, guard="stop", more=math.inf)
    # The record of the first step is read in the second, and no third update is made.
    assert ended.value.code == 5 and saved == [2]
    assert record.read(tmp_path).scalars["level"].tolist()[-1] == 2
