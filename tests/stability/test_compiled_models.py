"""The monitor on models under torch.compile, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stability.test_other_attention import H, Net, S

from megatron_patch.stability import AttentionMonitor, MonitorOptions, record
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


def test_a_graph_that_must_be_whole_says_why_it_cannot_be(tmp_path, compiled):
    """In the first observed step, not in silence."""
    model = Net()
    with pytest.raises(Exception, match="observes attention: leave out fullgraph=True"):
        observed_twice(tmp_path, model, compiled(model, fullgraph=True))


def test_a_model_compiled_before_its_monitor_is_told_of(tmp_path, compiled, caplog):
    """Its graphs do not look for hooks."""
    model = Net()
    run = compiled(model)
    run(torch.randn(2, S, 16)).backward()
    assert np.isnan(observed_twice(tmp_path, model, run)["max_logit"]).all()
    assert "no attention was called in an observed step, of layers.0 and others" in caplog.text
