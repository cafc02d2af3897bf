"""The monitor on models under torch.compile, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stability.test_other_attention import H, Net, S

from megatron_patch.stability import AttentionMonitor, MonitorOptions, observe, record
from megatron_patch.stability.adapters.torch_loop import watch


def observed_twice(folder: Path, model: Net, run: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Heads of two observed steps of four; ``run`` is the model, compiled or not."""
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    monitor = AttentionMonitor(watched, directory=folder, options=MonitorOptions(interval=2))
    for step in range(1, 5):
        monitor.before_step(step)
        x = torch.randn(2, S, 16, generator=torch.Generator().manual_seed(step))
        loss = run(x)
        loss.backward()
        monitor.grads_reduced()
        monitor.after_step(step, loss=loss.detach())
        model.zero_grad()
    monitor.finish(4)
    monitor.close()
    return dict(record.read(folder).heads)


@pytest.fixture
def compiled():
    """Compiles without C++; what the monitor sets is undone. CPU mode does not compile."""
    import torch._dynamo as dynamo

    dynamo.reset()
    with dynamo.config.patch(skip_nnmodule_hook_guards=True):
        yield lambda model, **options: torch.compile(model, backend="aot_eager", **options)
    dynamo.reset()


def test_a_compiled_model_is_observed(tmp_path, compiled):
    """The graph of a step without hooks ran in observed steps, too: no head was ever measured."""
    model = Net()
    plain = observed_twice(tmp_path / "plain", model, model)
    found = observed_twice(tmp_path / "compiled", model, compiled(model))
    assert all(np.isfinite(found[name]).all() for name in ("max_logit", "kappa", "dk_sum"))
    for name, values in plain.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("whole", [True, False], ids=["fullgraph", "as-is"])
def test_steps_without_hooks_run_the_unbroken_graph(tmp_path, compiled, whole):
    """Observed steps left a graph broken at every attention call to all steps after them, of a
    model with activation checkpointing none at all, and ended the run under fullgraph=True."""
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(sum(node.target is sdpa for node in graph.graph.nodes))
            return graph.forward(*args)

        return run

    sdpa = torch.nn.functional.scaled_dot_product_attention
    model = Net()
    run = torch.compile(model, backend=backend, fullgraph=whole)
    found = observed_twice(tmp_path, model, run)
    assert ran == [2, 2], "one graph, with both layers, in the first step and the third"
    assert np.isfinite(found["kappa"]).all()


@pytest.mark.parametrize("way", ["module", "function"])
def test_what_attention_compiles_itself_is_traced_in_an_observed_step(compiled, way):
    """flex_attention as Python holds all logits, which ends a run of long sequences."""
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        ran.append(1)
        return graph.forward

    inner = torch.compile(torch.nn.functional.scaled_dot_product_attention, backend=backend)
    model = Net()
    model.layers[0].forward = lambda q, k, v: inner(q, k, v, is_causal=True)
    observer = observe.Observer(watch(model, r"layers\.0", heads=H, order="bhsd").sites)
    request = observe.ObservationRequest(micro_batch=9, layers=None, callback=lambda *_: None)
    observer.arm([request])
    q = torch.randn(1, H, 8, 16, requires_grad=True)
    if way == "module":
        model.layers[0](q, q, q)
    else:
        observer.around(lambda module, *args: inner(*args), [])(None, q, q, q)
    assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
    observer.disarm()
    assert ran == [1]


@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_the_stance_of_the_compiler_is_left_as_it_was(tmp_path, compiled, stance):
    """Of monitors that go through a step one after the other, and of one closed within it."""

    def now() -> str:
        return str(torch._dynamo.eval_frame._stance.stance)

    watched = watch(Net(), r"layers\.1", heads=H, order="bhsd")
    options = MonitorOptions(interval=1)
    first, second = (
        AttentionMonitor(watched, directory=tmp_path / name, options=options) for name in "ab"
    )
    with torch.compiler.set_stance(stance):
        for monitor in (first, second):
            monitor.before_step(1)
        assert now() == {"default": "eager_on_recompile"}.get(stance, stance)
        for monitor in (first, second):
            monitor.after_step(1, loss=1.0)
        assert now() == stance
        first.before_step(2)
        first.close()
        assert now() == stance
        second.before_step(2)
        torch.compiler.set_stance("fail_on_recompile")  # within the step: it is the user's
        second.close()
        assert now() == "fail_on_recompile"


def test_a_model_compiled_before_its_monitor_is_told_of(tmp_path, compiled, caplog):
    """Its graphs do not look for hooks."""
    model = Net()
    run = compiled(model)
    run(torch.randn(2, S, 16)).backward()
    assert np.isnan(observed_twice(tmp_path, model, run)["max_logit"]).all()
    assert "no attention was called in an observed step, of layers.0 and others" in caplog.text


def test_a_step_that_did_not_end_is_not_told_of(tmp_path, caplog):
    """Data that ended after ``before_step``, or an error: the advice was for another fault."""
    watched = watch(Net(), r"layers\.0", heads=H, order="bhsd")
    monitor = AttentionMonitor(watched, directory=tmp_path, options=MonitorOptions(interval=1))
    observe._warn_silent.cache_clear()
    monitor.before_step(1)
    monitor.before_step(1)
    monitor.close()
    assert "no attention was called" not in caplog.text
    monitor.before_step(1)
    monitor.after_step(1, loss=1.0)
    assert "no attention was called" in caplog.text
