"""What the monitor knows of the loss in Hugging Face's `Trainer`, on a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patch.stability import MonitorOptions, record
from megatron_patch.stability.adapters.hugging_face import attention_callback

transformers = pytest.importorskip("transformers")
IDS = torch.arange(64).view(2, 32) % 32


pytestmark = pytest.mark.usefixtures("cpu_mode")


def train(folder: Path, *steps: Any, begins: int = 1, **args: bool) -> Any:
    """What is recorded of steps, each of which is a function of the model; `Trainer`'s events.

    ``begins``: how often the training begins, until it runs.
    """
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32,
                                      num_hidden_layers=1, num_attention_heads=4)  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()
    rates = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()), factor=1.0)
    callback = attention_callback(model, directory=folder, options=MonitorOptions(interval=1))
    events = CallbackHandler([callback], model, None, None, rates)
    given = SimpleNamespace(**args), TrainerState(), TrainerControl()
    for _ in range(begins):
        events.on_train_begin(*given)
    for step in steps:
        events.on_step_begin(*given)
        step(model)
        events.on_pre_optimizer_step(*given)
        given[1].global_step += 1
        events.on_step_end(*given)
    events.on_train_end(*given)
    assert not model._forward_hooks
    return record.read(folder).scalars


@pytest.mark.parametrize(("told", "begins"), [(False, 1), (True, 1), (True, 2)])
def test_the_loss_of_accumulated_steps(tmp_path, told, begins):
    """`Trainer` tells the model how many tokens the step has: losses of micro-batches are parts.

    With ``auto_find_batch_size`` it begins again where memory is short, and does not end before:
    every loss counted twice.
    """
    more = {"num_items_in_batch": torch.tensor(4 * 2 * 31)} if told else {}

    def step(model: Any) -> None:
        for _ in range(4):
            model(input_ids=IDS, labels=IDS, use_cache=False, **more).loss.backward()

    loss = train(tmp_path, step, begins=begins)["loss_mean"]
    assert loss == pytest.approx(math.log(32), rel=0.1)


def test_the_loss_of_several_ranks(tmp_path, monkeypatch):
    """The tokens are those of all ranks: each returned its part, the mean over which was recorded,
    half the loss under two."""

    def step(model: Any) -> None:
        told = torch.tensor(2 * 2 * 31)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        model(input_ids=IDS, labels=IDS, use_cache=False, num_items_in_batch=told).loss.backward()

    loss = train(tmp_path, step, average_tokens_across_devices=True)["loss_mean"]
    assert loss == pytest.approx(math.log(32), rel=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_that_returns_no_loss(tmp_path, precision):
    """With label smoothing, or a loss function of `Trainer`, gradients alone say that all is lost.

    Those of fp16 overflow now and then, and such steps are left out.
    """

    def step(model: Any, worth: float = 1.0) -> None:
        (model(input_ids=IDS, use_cache=False).logits.square().mean() * worth).backward()

    told = train(tmp_path, step, lambda model: step(model, math.nan), **{precision: True})
    assert told["level"].tolist() == ([0, 2] if precision == "bf16" else [0, 0])
