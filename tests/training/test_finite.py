"""The guard's verdicts and messages, on a group of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cpu import layout

from megatron_patch.training.agreement import Agreement
from megatron_patch.training.finite import (
    NonFiniteError,
    StepGuard,
    _Finding,
    _message,
    global_name,
)
from megatron_patch.training.signals import STOP_TERM, STOP_USR1, StopFlags


@pytest.fixture(scope="module", autouse=True)
def group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Model(torch.nn.Module):
    """Two layers of a pipeline stage that starts at layer 5, with gradients in main_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
        for number, layer in enumerate(self.layers):
            layer.layer_number = 5 + number
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        buffer = SimpleNamespace(grad_data=torch.zeros(4))
        self.buffers, self.expert_parallel_buffers = [buffer], []  # type: ignore[assignment]


class Optimizer:
    """Steps when the guard lets it."""

    def __init__(self, norm: Any) -> None:
        self.norm, self.stepped = norm, 0

    def get_grad_norm(self) -> Any:
        return self.norm

    def step(self) -> None:
        self.get_grad_norm()
        self.stepped += 1


def guarded(norm: Any, *, check: bool = True) -> tuple[StepGuard, Optimizer]:
    guard, optimizer = StepGuard(layout(), StopFlags(), check=check), Optimizer(norm)
    guard.watch(optimizer)
    guard.begin(7, [Model()])
    return guard, optimizer


@pytest.mark.parametrize("norm", [1.5, torch.tensor([1.5])])
def test_finite_steps_pass(norm):
    guard, optimizer = guarded(norm)
    guard.loss(torch.tensor([3.0, 2.0]))
    optimizer.step()
    assert optimizer.stepped == 1 and guard.nonfinite == 0


@pytest.mark.parametrize(
    "norm", [float("nan"), float("inf"), torch.tensor(float("nan")), torch.tensor([float("inf")])]
)
def test_a_bad_norm_prevents_the_update(norm):
    _, optimizer = guarded(norm)
    with pytest.raises(NonFiniteError, match="step 7") as caught:
        optimizer.step()
    assert optimizer.stepped == 0 and caught.value.exit_code == 3 and caught.value.step == 7


def test_a_bad_loss_prevents_the_update_although_the_norm_is_finite():
    guard, optimizer = guarded(1.0)
    guard.loss(torch.tensor([float("inf"), 2.0]))
    with pytest.raises(NonFiniteError, match=r"loss not finite.*\n.*loss not finite on rank 0"):
        optimizer.step()
    assert optimizer.stepped == 0


def test_an_overflowing_norm_of_finite_gradients_is_told_apart():
    guard, optimizer = guarded(float("inf"))
    guard.before_reduction([Model()])
    with pytest.raises(NonFiniteError, match="every gradient is finite, their norm overflows"):
        optimizer.step()


def test_without_check_steps_are_counted_only():
    guard, optimizer = guarded(float("nan"), check=False)
    optimizer.step()
    optimizer.step()
    assert optimizer.stepped == 2 and guard.nonfinite == 2


def test_the_stop_request_travels_with_the_check():
    guard, optimizer = guarded(1.0)
    guard.stop._signal = STOP_TERM
    optimizer.step()
    assert guard.stop_code == STOP_TERM and optimizer.stepped == 1


def test_what_is_agreed_on():
    """Loss per token and norm, to the guard and to whoever judges a finite step."""
    guard, optimizer = guarded(torch.tensor([0.25]))
    judged: list[tuple[float, float]] = []
    guard.judge = lambda loss, norm: judged.append((loss, norm))
    guard.loss(torch.tensor([6.0, 4.0]))
    optimizer.step()
    assert judged == [(1.5, 0.25)]
    assert guard.agreed is not None and (guard.agreed.loss, guard.agreed.grad_norm) == judged[0]
    guard.begin(8, [])  # a stage without a loss, after one with
    optimizer.step()
    assert (guard.agreed.loss, guard.agreed.loss_bad) == (0.0, False)


def test_a_bad_step_is_not_judged():
    guard, optimizer = guarded(1.0, check=False)
    guard.judge = lambda loss, norm: pytest.fail("judged")
    guard.loss(torch.tensor([float("nan"), 4.0]))
    optimizer.step()
    assert guard.nonfinite == 1 and guard.agreed is not None
    assert guard.agreed.loss_bad and not guard.agreed.norm_bad and guard.agreed.loss != 0.0


def test_a_rank_that_does_not_report_the_loss_still_sees_that_it_is_bad():
    quiet = layout(cp_rank=1, cp_size=2, tp_rank=1, tp_size=2)
    assert not quiet.reports_loss
    for loss, bad in ((2.0, False), (float("inf"), True)):
        agreement = Agreement(quiet)
        agreement.report(torch.tensor([loss, 1.0]))
        agreement.send(1.0, STOP_USR1)
        agreed = agreement.receive()
        assert (agreed.loss, agreed.loss_bad, agreed.stop_code) == (0.0, bad, STOP_USR1)


def test_one_reduction_a_step(monkeypatch):
    """Finite check, stop, loss and spikes had one each; every one of them waited for the device."""
    guard, optimizer = guarded(1.0)
    guard.judge = lambda loss, norm: None
    reduce, calls = torch.distributed.all_reduce, []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda *args, **kw: (calls.append(1), reduce(*args, **kw))
    )
    guard.loss(torch.tensor([6.0, 4.0]))
    optimizer.step()
    assert len(calls) == 1


def test_layers_are_counted_over_the_whole_model():
    model = Model()
    assert global_name(model, "layers.1.weight") == "layers.5.weight"
    assert global_name(model, "embedding.weight") == "embedding.weight"


def test_local_gradients_are_judged_before_the_reduction():
    guard, _ = guarded(1.0)
    model = Model()
    guard.before_reduction([model])
    assert not guard._local
    model.buffers[0].grad_data[1] = float("-inf")  # type: ignore[index]
    guard.before_reduction([model])
    assert guard._local


def test_parameters_nearest_to_the_loss_come_first_and_long_lists_end():
    def finding(stage: int, names: list[str]) -> _Finding:
        where = layout(rank=stage, pp_rank=stage).describe()
        return _Finding(where, True, stage == 0, [(n, 1, 4) for n in names])

    many = [f"layers.{n}.weight" for n in range(9, -1, -1)]
    text = _message(3, [finding(0, many), finding(1, ["layers.11.weight", "layers.10.weight"])])
    listed = [line.split(":")[0].strip() for line in text.splitlines() if "of 4 values" in line]
    assert listed[:3] == ["layers.11.weight", "layers.10.weight", "layers.9.weight"]
    assert "... and 4 more" in text
    assert "before their reduction on rank 0 (tp 0, pp 0" in text
