"""Hooks on core attention: which call is seen, when, and that nothing is left behind."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from megatron_cpu import core_attention

from megatron_patch.stability import guard

pytestmark = pytest.mark.usefixtures("rank")
S, B, HEADS, GROUPS, DIM = 16, 2, 4, 2, 8


def core(backend: str = "reference", *, bf16: bool = False, **options: Any) -> Any:
    return core_attention(
        HEADS, DIM, backend=backend, options=options, layer_number=3, num_query_groups=GROUPS,
        bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )  # fmt: skip


class Model(torch.nn.Module):
    """As deep as a GPTModel: one decoder layer (the model's third) and one prediction layer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.decoder, self.mtp = torch.nn.Module(), torch.nn.Module()
        for part, inner in ((self.decoder, "self_attention"), (self.mtp, "transformer_layer")):
            layer = torch.nn.Module()
            layer.layer_number = 3 if part is self.decoder else 1  # type: ignore[assignment]
            around = torch.nn.Module()
            around.core_attention = core(**settings)
            setattr(layer, inner, around)
            part.layers = torch.nn.ModuleList([layer])


def tensors(seed: int = 0) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    shapes = ((S, B, HEADS, DIM), (S, B, GROUPS, DIM), (S, B, GROUPS, DIM))
    return tuple(torch.randn(s, generator=gen).requires_grad_() for s in shapes)


@pytest.fixture
def watched() -> tuple[Any, Any, Any, list[Any]]:
    """(observer, site of the decoder layer, its module, what was seen)."""
    from megatron_patch.stability.observe import ObservationRequest, Observer, find_sites

    sites = find_sites([Model()], decoder_layers=4)
    observer, found = Observer(sites), []
    request = ObservationRequest(micro_batch=1, layers=frozenset([2]),
                      callback=lambda seen, do: found.append((seen, do.clone())))  # fmt: skip
    observer.arm([request])
    return observer, sites[0], sites[0].module, found


def test_sites_are_numbered_over_the_whole_model():
    from megatron_patch.stability.observe import find_sites

    sites = find_sites([Model()], decoder_layers=4)
    assert [(s.layer, s.name) for s in sites] == [
        (2, "decoder.layers.2.self_attention.core_attention"),  # the first of this stage
        (4, "mtp.layers.0.transformer_layer.core_attention"),
    ]
    assert sites[0].backend == "reference" and sites[0].stabilizer == ""


def test_a_site_names_the_variant_of_an_experiment(monkeypatch):
    """The function says so that core attention calls, whoever put it there."""
    from megatron_patch.attention.backends import BACKENDS
    from megatron_patch.stability.observe import find_sites

    def changed(call: Any) -> Any:
        return row.run(call)

    row = BACKENDS["reference"]
    changed.variant = "k_centered"  # type: ignore[attr-defined]
    assert find_sites([Model()], decoder_layers=4)[0].variant == ""
    monkeypatch.setitem(BACKENDS, "reference", dataclasses.replace(row, run=changed))
    assert find_sites([Model()], decoder_layers=4)[0].variant == "k_centered"


def test_the_wanted_micro_batch_and_its_gradient_are_seen(watched):
    _, _, module, found = watched
    calls = [tensors(seed) for seed in range(3)]
    with torch.no_grad():
        module(*calls[0], None)  # an evaluation does not count
    outs = [module(*call, None) for call in calls]
    assert found == []  # nothing happens before the backward pass
    weights = torch.arange(float(outs[0].numel())).view_as(outs[0])
    for i, out in enumerate(outs):
        (out * weights * (i + 1)).sum().backward()
    ((seen, do),) = found
    assert torch.equal(seen.q, calls[1][0]) and torch.equal(seen.v, calls[1][2])
    assert torch.equal(do.flatten(2), 2 * weights)
    assert torch.equal(seen.out.flatten(2), outs[1])
    assert seen.max_logits is not None and seen.low is None and seen.geometry.causal
    assert seen.geometry.scale == DIM**-0.5


def test_recomputed_calls_count_once(watched):
    """The first pass of a checkpointed call has no gradients; the second, in the backward, has."""
    from torch.utils.checkpoint import checkpoint

    _, _, module, found = watched
    calls = [tensors(seed) for seed in range(2)]
    outs = [checkpoint(module, *call, None, use_reentrant=True) for call in calls]
    for out in outs:
        out.sum().backward()
    ((seen, do),) = found
    assert torch.equal(seen.k, calls[1][1]) and (do == 1).all()


def test_inputs_that_are_dropped_and_recomputed_are_back_when_they_are_looked_at():
    """Recompute of ``mla_up_proj``: a hook on the output, registered after the observer's, refills
    the storage of q, k and v."""
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    from megatron_patch.stability.observe import ObservationRequest, Observer, find_sites

    sites = find_sites([Model()], decoder_layers=4)
    observer, found = Observer(sites), []

    def look(seen: Any, do: torch.Tensor) -> None:
        assert seen.q.untyped_storage().size()  # reading one that is empty ends the process
        found.append([x.clone() for x in (seen.q, seen.k, seen.v, do)])

    observer.arm([ObservationRequest(micro_batch=0, layers=None, callback=look)])
    latents = tensors()
    kept = CheckpointWithoutOutput(fp8=None)  # of False it makes FP8
    q, k, v = kept.checkpoint(lambda *xs: tuple(2 * x for x in xs), *latents)
    out = sites[0].module(q, k, v, None)
    kept.discard_output_and_register_recompute(out)
    assert q.untyped_storage().size() == 0
    (3 * out).sum().backward()
    ((*seen, do),) = found
    assert all(torch.equal(x, 2 * y) for x, y in zip(seen, latents, strict=True))
    assert (do == 3).all()


def test_disarmed_and_never_armed_modules_carry_no_hook(watched):
    observer, _, module, found = watched
    assert module._forward_hooks
    observer.disarm()
    for site in observer.sites:
        assert not site.module._forward_hooks and not site.module._forward_pre_hooks
        assert site.module.observed is None
    for _ in range(2):
        module(*tensors(), None).sum().backward()
    assert found == []
    observer.arm([])
    assert not module._forward_hooks


def test_what_was_seen_is_freed_with_the_graph(watched):
    """A hook that held the tensor it stands on would keep every observed step alive."""
    observer, _, module, _ = watched
    from megatron_patch.stability.observe import ObservationRequest

    kept: list[Any] = []

    def keep(seen: Any, do: torch.Tensor) -> None:
        kept.append(weakref.ref(seen.out))

    observer.arm([ObservationRequest(micro_batch=0, layers=None, callback=keep)])
    gc.collect()
    gc.disable()
    try:
        out = module(*tensors(), None)
        out.sum().backward()
        assert len(kept) == 1 and kept[0]() is not None
        del out
        assert kept[0]() is None
    finally:
        gc.enable()


class Recorder(torch.nn.Module):
    """Stands for a core attention that can be exchanged."""

    def __init__(self, backend: str, **options: Any) -> None:
        super().__init__()
        self.backend_name, self.options = backend, options
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def use(self, backend: str, **options: Any) -> None:
        self.calls.append((backend, options))
        self.backend_name, self.options = backend, options


def test_the_guard_exchanges_what_needs_it_once():
    from megatron_patch.stability.observe import Site

    modules = [
        Recorder("stable_flash", stabilizer="none", o_lo="int8", backward="sdpa_flash"),
        Recorder("sdpa_cudnn"),
        Recorder("stable_flash"),
        Recorder("fa4"),
        Recorder("fa4", stabilizer="none"),
    ]
    sites = [Site(m, i, "x", torch.nn.Module()) for i, m in enumerate(modules)]
    assert guard.switch(sites) == 3
    kept = {"o_lo": "int8", "backward": "sdpa_flash"}
    assert modules[0].calls == [("stable_flash", {"stabilizer": "compensated", **kept})]
    for module in (modules[1], modules[4]):
        assert module.calls == [("stable_flash", {"stabilizer": "compensated"})]
    assert modules[2].calls == modules[3].calls == []
    assert guard.switch(sites) == 0


def test_a_backend_that_cannot_serve_leaves_the_layer_as_it_was():
    from megatron_patch.attention.registry import BackendError

    module = core()
    with pytest.raises(BackendError):  # float32, on a CPU
        module.use("sdpa_cudnn")
    assert module.backend_name == "reference" and module.options == {}
    assert torch.isfinite(module(*tensors(), None)).all()
