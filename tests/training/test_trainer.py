"""The loop and its watchers: one order of calls on every rank, and what the trainer carries out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patch.checkpoint.train_state import TrainState
from megatron_patch.faults.skips import Skips
from megatron_patch.runtime.heartbeat import PULSE, Heartbeat, phase
from megatron_patch.runtime.watcher import Action, Pin, RewindWanted, Stop, Watcher
from megatron_patch.training import trainer
from megatron_patch.training.trainer import Trainer


class Seen(Watcher):
    """Writes down which hook was called on whom."""

    def __init__(self, name: str, calls: list[str], actions: list[Action] | None = None) -> None:
        self.name, self.calls, self.actions = name, calls, actions or []

    def __getattribute__(self, hook: str) -> Any:
        if hook in Watcher.__dict__ and not hook.startswith("_"):
            self.calls.append(f"{hook} {self.name}")
        return super().__getattribute__(hook)

    def after_step(self, step: int, result: Any) -> list[Action]:
        return self.actions

    def state(self) -> dict[str, Any]:
        return {"faults" if self.name == "a" else self.name: {}}


def loop(calls: list[str], *actions: list[Action]) -> Any:
    """A trainer whose parts do nothing, with one watcher for each list of actions."""
    made: Any = Trainer.__new__(Trainer)
    training = SimpleNamespace(
        train_steps=9, exit_at_step=None, eval_interval=None, global_batch_size=1, device="cpu"
    )
    made.run = SimpleNamespace(
        training=training,
        model=SimpleNamespace(seq_length=1),
        logging=SimpleNamespace(interval=100),
        checkpoint=SimpleNamespace(interval=None),
    )
    made.layout = SimpleNamespace(print_rank=False)
    watchers = [Seen(name, calls, x) for name, x in zip("abc", actions, strict=False)]
    made.session = SimpleNamespace(
        watchers=watchers, guard=SimpleNamespace(stop_code=0, nonfinite=2), skipped=3,
        hooks_enabled=False, reads_data=False, micro_batches=1, sequences=1,
    )  # fmt: skip
    made.stability = SimpleNamespace(switched_at=0)
    made.spikes = SimpleNamespace(skips=Skips(((2, 3),), 1))
    made.loaders = SimpleNamespace(
        position=lambda batch: {"batch": batch}, micro_batches_of=lambda batch: 1
    )
    made.heartbeat = Heartbeat(1)
    made.recorder = SimpleNamespace(stepped=lambda: None, restart=lambda: None)
    made.monitor = SimpleNamespace(tick=lambda: None, restart=lambda *_, **__: None)
    made.saver = SimpleNamespace(keep_before_danger=calls.append)
    made.checkpointer = SimpleNamespace(saving=False, loaded_extra={})
    made.position, made._begin, made._stop, made._batches = TrainState(), 20, None, None
    return made


@pytest.fixture(autouse=True)
def step_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "train_step", lambda *args, **named: None)
    monkeypatch.setattr(Trainer, "_report", lambda *args, **named: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)


def test_every_hook_is_called_in_the_order_of_the_list():
    """It is the order of collectives: another one on some rank would be a deadlock."""
    calls: list[str] = []
    loop(calls, [], [], [])._step(1)
    assert calls == [f"{hook} {name}" for hook in ("before_step", "after_step") for name in "abc"]


def test_the_order_of_the_watchers(monkeypatch):
    """Spikes tell what is left out before telemetry tells where it begins."""
    from megatron_patch.stability.adapters import trainer as watcher

    made: Any = loop([])
    made.layout = SimpleNamespace(world_size=1)
    made.session = SimpleNamespace(chunks=[], guard=SimpleNamespace())
    made.loaders = SimpleNamespace(samples=print)
    made.run_dir, made.monitor = None, SimpleNamespace(say=print)
    made.run.faults = SimpleNamespace(spike=None)
    made.saver.can_rewind = None
    kinds = {trainer: ("SpikePolicy", "Stragglers"), watcher: ("Stability",)}
    for module, names in kinds.items():
        for name in names:
            fake = lambda *args, _name=name, **named: SimpleNamespace(kind=_name, last_maxima=None)  # noqa: E731
            monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, mine: None)
    made._watch()
    order = [watcher.kind for watcher in made.session.watchers]
    assert order == ["SpikePolicy", "Stability", "Stragglers"]


def test_the_first_stop_counts_and_a_checkpoint_is_pinned():
    calls: list[Any] = []
    first, second = Stop("one", ValueError("saved: one")), Stop("two")
    made = loop(calls, [Pin(7), first], [second])
    assert made._step(1) is first and 7 in calls
    made.run.training.train_steps = 2
    assert made._step(2) is None, "the end of the run is no stop"


def test_a_checkpoint_carries_what_all_watchers_keep_and_which_data_it_is_of():
    made = loop([], [], [])
    made.loaders.identities = {"train": "1"}
    made.position.step = 4  # batches 2 to 4 were left out
    faults = {"skipped": 3, "nonfinite": 2}
    kept = {"faults": faults, "b": {}, "sequences": {"train": "1"}, "data": {"batch": 7}}
    assert made._extra() == kept
    made.checkpointer.loaded_extra = {"faults": {"skipped": 5, "nonfinite": 4}}
    made._load_watchers()
    assert (made.session.skipped, made.session.guard.nonfinite) == (5, 4)
    made.checkpointer.loaded_extra = {"faults": {"skipped": 1}}  # of an earlier version
    made._load_watchers()
    assert (made.session.skipped, made.session.guard.nonfinite) == (1, 0)


def test_a_rewind_is_planned_before_anything_is_loaded():
    calls: list[str] = []
    made = loop(calls, [], [])
    made._stop, made._begin = Stop("of a step that is repeated"), 8

    def rewind(newest: int, plan: Any) -> TrainState:
        assert newest == 5
        plan(4)
        calls.append("load")
        return TrainState(step=4)

    made.saver.back_to, made.saver.rewind = 4, rewind
    made._rewind(RewindWanted("spike", newest=5))
    hooks = ("before_rewind", "plan_rewind", "load_state")
    expected = [f"{hook} {name}" for hook in hooks for name in "ab"]
    assert calls == [*expected[:4], "load", *expected[4:]]
    assert (made.position.step, made._begin, made._stop) == (4, 4, None)


def test_a_phase_ends_with_its_block_and_an_error_keeps_it():
    PULSE.reset()
    with Heartbeat(1).step(3):
        with phase("forward"):
            with phase("forward", then="backward"):
                pass
            assert PULSE.now.phase == "backward"
        assert (PULSE.now.phase, PULSE.now.step, PULSE.finished) == ("data", 3, 0)
    assert PULSE.finished == 1
    with pytest.raises(ValueError), phase("save"), phase("evaluation"):
        raise ValueError
    assert PULSE.now.phase == "evaluation"
