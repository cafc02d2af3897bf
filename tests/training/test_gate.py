"""The gate of the update: fused AdamW under Megatron-Core's optimizer, decided on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cpu import VOCAB, layout, single_rank, tiny_run

from megatron_patch.core_patches.optimizer import use_fused_kernel
from megatron_patch.faults.spike import SpikePolicy
from megatron_patch.model.build import build_model
from megatron_patch.runtime.heartbeat import PULSE
from megatron_patch.runtime.watcher import RewindWanted, UpdateDropped
from megatron_patch.schema.faults import FaultsConfig, SpikeConfig
from megatron_patch.schema.model import MoEConfig
from megatron_patch.training import finite
from megatron_patch.training.finite import NonFiniteError, StepGuard
from megatron_patch.training.gate import gate_of
from megatron_patch.training.optimizer import build_optimizer, wrap_chunks
from megatron_patch.training.signals import StopFlags


class Trained:
    """A tiny model's optimizer and guard; the gradients are given.

    Args:
        gated: False takes the same fused update without a gate, as before there was one.
    """

    def __init__(self, *, gated: bool = True, check: bool = True, **shape: Any) -> None:
        torch.manual_seed(5)
        run = tiny_run(shape, training={"precision": "bf16"})
        self.chunks = wrap_chunks(run, build_model(run, vocab_size=VOCAB).chunks)
        self.optimizer, _ = build_optimizer(run, self.chunks)
        use_fused_kernel(self.optimizer)
        self.guard = StepGuard(layout(), StopFlags(), check=check)
        gate = gate_of(self.optimizer)
        assert gate is not None
        self.guard.watch(self.optimizer, gate if gated else None)
        self.steps = 0

    def step(
        self,
        size: float = 1e-3,
        *,
        loss: float = 3.0,
        bad: float | None = None,
        meanwhile: Any = None,
    ) -> float:
        """One update by random gradients of about ``size`` each; the gradient norm."""
        make = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        self.guard.begin(self.steps, self.chunks, meanwhile=meanwhile)
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                noise = torch.randn(parameter.shape, generator=make)
                parameter.main_grad.copy_(size * noise)
            if bad is not None:
                parameter.main_grad.view(-1)[0] = bad
        self.guard.loss(torch.tensor([loss, 1.0]))
        self.optimizer.step()
        return self.guard.synchronize()

    def state(self) -> dict[str, torch.Tensor]:
        """Everything an update changes, copied."""
        found = {}
        for c, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                found[f"{c}.{name}"] = parameter.detach().clone()
        for p, part in enumerate(self.optimizer.chained_optimizers):
            groups = part.optimizer.param_groups
            for i, weight in enumerate(w for group in groups for w in group["params"]):
                found[f"{p}.{i}.main"] = weight.detach().clone()
                for key, value in part.optimizer.state[weight].items():
                    found[f"{p}.{i}.{key}"] = value.clone()
        return found


@pytest.fixture
def rank() -> Iterator[None]:
    with single_rank():
        yield


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("shape", [{}, {"moe": MoEConfig(num_experts=2)}])
def test_an_open_gate_changes_no_bit(rank, shape):
    one, other = Trained(**shape), Trained(gated=False, **shape)
    for _ in range(3):
        norm = one.step()
        assert norm < 1.0 and other.step() == norm
    assert same(one.state(), other.state())


def test_clipping_by_the_update_is_clipping_before_it(rank):
    """A division by the inverse instead of a multiplication: one rounding more, of FP32."""
    one, other = Trained(), Trained(gated=False)
    plain = Trained(gated=False)
    for part in plain.optimizer.chained_optimizers:
        part.config.clip_grad = 0.0
    for size in (1.0, 1e-3, 30.0):
        assert one.step(size) == other.step(size) == pytest.approx(plain.step(size))
    found, expected, unclipped = one.state(), other.state(), plain.state()
    for key, value in expected.items():
        if key.endswith(("exp_avg", "exp_avg_sq")):
            floor = 2**-22 * float(value.abs().max())  # the first moment's terms cancel
            torch.testing.assert_close(found[key], value, rtol=2**-21, atol=floor)
            assert not torch.allclose(unclipped[key], value)


@pytest.mark.parametrize(
    "fault", [{"bad": math.nan}, {"bad": math.inf}, {"size": 1e30}, {"loss": math.inf}]
)
def test_a_closed_gate_leaves_everything(rank, fault):
    """Weights, moments and step counters, bit for bit; and the run goes on from them."""
    run, healthy = Trained(), Trained()
    for one in (run, healthy):
        one.step()
    before = run.state()
    with pytest.raises(NonFiniteError, match="step 2"):
        run.step(**fault)
    assert same(run.state(), before)
    run.steps = 1
    assert run.step() == healthy.step()
    assert same(run.state(), healthy.state())


def test_without_the_check_a_bad_update_is_taken_as_without_a_gate(rank):
    """One bad gradient makes one bad weight."""
    bad = []
    for gated in (True, False):
        run = Trained(gated=gated, check=False)
        run.step()
        assert math.isnan(run.step(bad=math.nan)) and run.guard.nonfinite == 1
        bad.append({key: int(value.isnan().sum()) for key, value in run.state().items()})
    assert bad[0] == bad[1]
    assert [n for key, n in bad[0].items() if n and key.endswith("main")] == [1]


def test_the_host_reads_after_the_update(rank, monkeypatch):
    order: list[str] = []
    run = Trained()
    receive = finite.Agreement.receive

    def note(name: str, call: Any) -> Any:
        return lambda *args, **options: (order.append(name), call(*args, **options))[1]

    monkeypatch.setattr(finite.Agreement, "receive", note("read", receive))
    for part in run.optimizer.chained_optimizers:
        monkeypatch.setattr(part.optimizer, "step", note("update", part.optimizer.step))
    run.step(meanwhile=lambda: order.append("meanwhile"))
    assert order == ["update", "meanwhile", "read"]
    run.guard.may_drop = True
    run.step(meanwhile=lambda: order.append("meanwhile"))
    assert order[3:] == ["meanwhile", "read", "update"]


def test_a_host_that_reads_first_makes_the_same_update(rank):
    """Every bit, clipped or not: the rule about spikes is no part of the numerics."""
    one, other = Trained(), Trained()
    for size, first in ((1.0, False), (1.0, True), (1e-3, True), (1.0, False)):
        other.guard.may_drop = first
        assert one.step(size) == other.step(size)
    assert same(one.state(), other.state())


def watched(run: Trained, action: Any, folder: Path, say: Callable[[str], None]) -> SpikePolicy:
    """The rule about spikes, with five calm steps behind it."""
    spikes = FaultsConfig(spike=SpikeConfig(action=action, min_history=4, window=8))
    policy = SpikePolicy(
        spikes.spike,
        run.guard,
        layout(),
        roots=[],
        run_dir=folder,
        log=say,
        samples=lambda batch: [],
    )
    for _ in range(5):
        run.step()
    return policy


@pytest.mark.parametrize("action", ["record", "skip"])
def test_a_spike_is_dropped_before_its_update(rank, tmp_path, action):
    """A rule that may drop the update is asked first, one that only records later."""
    run = Trained()
    said: list[str] = []
    policy = watched(run, action, tmp_path, said.append)
    before = run.state()
    if action == "skip":
        with pytest.raises(UpdateDropped):
            run.step(0.1)
    else:
        run.step(0.1)
    assert policy.found == 1 and len(said) == 1
    assert same(run.state(), before) == (action == "skip")


@pytest.mark.parametrize("good", [True, False])
def test_looking_for_a_good_checkpoint_is_a_pause(rank, tmp_path, good):
    """It is hashed; the limit of a step's phases would call that a hang."""
    run = Trained()
    policy = watched(run, "rewind", tmp_path, lambda line: None)
    phases: list[str] = []

    def look(oldest: int) -> bool:
        phases.append(PULSE.now.phase)
        return good

    policy.can_rewind = look
    PULSE.enter("optimizer")
    with pytest.raises(RewindWanted if good else UpdateDropped):
        run.step(0.1)
    assert phases == ["save"] and PULSE.now.phase == "optimizer"


def test_a_step_that_was_given_up_is_not_read_later(rank):
    """The next step's figures are its own."""
    run = Trained()
    first = run.step()
    run.guard._agreement.send(77.0, 0)
    run.guard._unread = True
    run.guard.begin(2, run.chunks)
    assert run.guard.synchronize() == first


def test_what_has_no_gate(rank):
    """Unfused kernels, another kind of optimizer, another clipping, two limits."""
    run = Trained()
    (part,) = run.optimizer.chained_optimizers
    part.optimizer.param_groups[0]["fused"] = False
    assert gate_of(run.optimizer) is None
    part.optimizer.param_groups[0]["fused"] = True
    assert gate_of(run.optimizer) is not None
    inner, part.optimizer = part.optimizer, torch.optim.SGD([torch.zeros(1)])
    assert gate_of(run.optimizer) is None
    part.optimizer = inner
    from megatron.core.optimizer import clip_grads, optimizer

    ours = optimizer.clip_grad_by_total_norm_fp32
    try:
        optimizer.clip_grad_by_total_norm_fp32 = clip_grads.clip_grad_by_total_norm_fp32
        assert gate_of(run.optimizer) is None
    finally:
        optimizer.clip_grad_by_total_norm_fp32 = ours
    run.optimizer.has_grad_norm_group = lambda group: True
    assert gate_of(run.optimizer) is None
