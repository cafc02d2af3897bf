"""The monitor on attention of other programs, on a CPU: autocast, cross attention, nested names."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_patch.parallel import first_rank
from megatron_patch.stability import AttentionMonitor, MonitorOptions, record
from megatron_patch.stability.adapters.torch_loop import watch
from megatron_patch.stability.capture import CaptureFile, Capturer, Wanted
from megatron_patch.stability.numbering import layers_in
from megatron_patch.stability.observe import Seen
from megatron_patch.stability.sampling import Geometry

H, S, D = 2, 96, 16
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


pytestmark = pytest.mark.usefixtures("cpu_mode")


class Attend(torch.nn.Module):
    """PyTorch's; q, k, v [b, h, s, d]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Net(torch.nn.Module):
    """Layers of attention side by side, whose q, k and v go through ``form`` first."""

    def __init__(self, form: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.qkv, self.form = torch.nn.Linear(16, 3 * H * D, bias=False), form
        torch.nn.init.normal_(self.qkv.weight, std=2.0, generator=torch.Generator().manual_seed(0))
        self.layers = torch.nn.ModuleList(Attend() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.form(x) for x in self.qkv(x).unflatten(2, (3, H, D)).permute(2, 0, 3, 1, 4))
        return torch.stack([layer(q, k, v).float().square().mean() for layer in self.layers]).sum()


def heads_of(folder: Path, model: Net) -> dict[str, np.ndarray]:
    """What one observed step under autocast tells of every head."""
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    monitor = AttentionMonitor(watched, directory=folder, options=MonitorOptions(interval=1))
    monitor.before_step(1)
    x = torch.randn(2, S, 16, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x)
    loss.backward()
    monitor.grads_reduced()
    monitor.after_step(1, loss=loss)
    monitor.finish(1)
    monitor.close()
    return record.read(folder).heads


def test_inputs_that_autocast_rounds_are_no_error_of_attention(tmp_path):
    """After RoPE or a norm in float32, as Llama's in Hugging Face's `Trainer` with ``bf16``. The
    rounding of q and k counted as the kernel's own, ten times what that was: a false alarm."""
    wide = heads_of(tmp_path / "wide", Net(lambda x: x.float() * 1.1))
    narrow = heads_of(tmp_path / "narrow", Net(lambda x: (x.float() * 1.1).bfloat16()))
    for name, values in wide.items():
        assert np.array_equal(values, narrow[name], equal_nan=True), name
    assert (wide["dk_sum"] < 30).all() and (wide["used_error_rms"] > 0).all()


@pytest.mark.parametrize("keys", [300, S, 3])
def test_cross_attention_of_any_number_of_keys(tmp_path, keys, caplog):
    """Fewer keys than sampled rows ended the training in an error inside the backward pass; what
    was captured of other numbers of keys than queries could not be read."""

    class Attend(torch.nn.Module):
        def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(*qkv)

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Attend()])})
    options = MonitorOptions(interval=1, capture_steps=[1], capture_layers=[0])
    q = torch.randn(1, H, S, D, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(1, H, keys, D, dtype=torch.bfloat16, requires_grad=True)

    def step(folder: Path, *, causal: bool) -> None:
        where = torch.nn.ParameterList([q])
        watched = watch(model, r"layers\.0", heads=H, order="bhsd", causal=causal)
        monitor = AttentionMonitor(
            dataclasses.replace(watched, roots=[where]), directory=folder, options=options
        )
        monitor.before_step(1)
        loss = model["layers"][0](q, k, k).float().square().mean()
        loss.backward()
        monitor.after_step(1, loss=loss)
        monitor.finish(1)
        monitor.close()

    step(tmp_path, causal=False)
    heads = record.read(tmp_path).heads
    p = (q.float() @ k.float().mT / D**0.5).softmax(-1)
    assert np.allclose(heads["top_mass"][0, 0], p.amax(-1).mean(-1)[0].detach(), rtol=0.1)
    saved = list((tmp_path / "captures").glob("*.pt"))
    assert [CaptureFile.load(path).step for path in saved] == [1] * (keys == S)
    if keys != S:
        assert f"not captured at step 1: it has {S} queries and {keys} keys" in caplog.text
        with pytest.raises(ValueError, match=r"tokens of q, k and v; .* causal=False"):
            step(tmp_path / "causal", causal=True)


def test_an_output_that_is_changed_in_place_is_no_error_of_attention(tmp_path, caplog):
    """Where the backward pass does not read it, autograd lets that pass: a false alarm."""

    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
            return (q @ k.mT / D**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Attend() for _ in range(2))})
    options = MonitorOptions(interval=1, capture_steps=[1], capture_layers=[0, 1])
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    q, k, v = (torch.nn.Parameter(torch.randn(1, H, S, D)) for _ in range(3))
    watched = dataclasses.replace(watched, roots=[torch.nn.ParameterList([q, k, v])])
    monitor = AttentionMonitor(watched, directory=tmp_path, options=options)
    monitor.before_step(1)
    outs = [layer(q.clone(), k.clone(), v.clone()) for layer in model["layers"]]
    outs[0].mul_(0.5).add_(1)
    loss = torch.stack(outs).square().mean()
    loss.backward()
    monitor.after_step(1, loss=loss)
    found = monitor.finish(1)
    monitor.close()
    assert found is not None and found.verdict.level == "ok"
    heads = record.read(tmp_path).heads
    assert (
        np.isnan(heads["used_error_rms"][0, 0]).all()
        and (heads["used_error_rms"][0, 1] < 1e-5).all()
    )
    assert (heads["dv_sum"] < 30).all()
    assert [CaptureFile.load(path).layer for path in (tmp_path / "captures").iterdir()] == [1]
    assert "attention of layers.0 is not observed: what it returned is changed" in caplog.text
    assert "layer 0 is not captured at step 1: what it returned was changed" in caplog.text


@pytest.mark.parametrize("told", [True, False])
def test_an_encoder_with_other_heads_than_the_decoder(tmp_path, told, caplog):
    """Hugging Face's BART: the training ended in an error inside the first observed backward."""
    transformers = pytest.importorskip("transformers")
    from megatron_patch.stability.adapters.hugging_face import attention_callback

    config = transformers.BartConfig(
        vocab_size=32, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
    )  # fmt: skip
    build = transformers.BartForConditionalGeneration._from_config
    model = build(config, attn_implementation="sdpa").train()
    for module in model.modules() if not told else ():
        if hasattr(module, "num_heads"):
            module.heads = module.__dict__.pop("num_heads")
    options = MonitorOptions(interval=1)
    callback = attention_callback(model, directory=tmp_path, options=options)
    rates = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()), factor=1.0)
    state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_save=False)
    control.should_training_stop = False
    given = SimpleNamespace(), state, control
    callback.on_train_begin(*given)
    callback.on_step_begin(*given)
    ids = torch.arange(1, 31).view(1, 30)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    state.global_step = 1
    callback.on_step_end(*given, lr_scheduler=rates)
    callback.on_train_end(*given)
    seen = np.isfinite(record.read(tmp_path).heads["kappa"][0]).sum(-1)
    assert seen.tolist() == ([2, 4, 4] if told else [2, 0, 0])
    assert ("self_attn is not observed: it has 4 query heads" in caplog.text) == (not told)


def test_a_training_within_the_training_of_another_model(tmp_path):
    """Hugging Face: where it ended, attention of the outer model was observed no more."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    from megatron_patch.stability.adapters.hugging_face import attention_callback

    config = transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32,
                                      num_hidden_layers=1, num_attention_heads=4)  # fmt: skip
    before, ids = FUNCTIONS["sdpa"], torch.arange(1, 31).view(1, 30)
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    trainings: list[Any] = []
    for name in ("outer", "inner"):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        options = MonitorOptions(interval=1)
        callback = attention_callback(model, directory=tmp_path / name, options=options)
        trainings.append((model, callback, SimpleNamespace(global_step=0)))

    def step(model: Any, callback: Any, state: Any) -> None:
        callback.on_step_begin(None, state, control)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        state.global_step += 1
        rates = SimpleNamespace(get_last_lr=lambda: [0.1])
        callback.on_step_end(SimpleNamespace(), state, control, lr_scheduler=rates)

    for _, callback, state in trainings:
        callback.on_train_begin(None, state, control)
    for training in (*trainings, *trainings):
        step(*training)
    for (_, callback, state), more in zip(trainings[::-1], (trainings[:1], []), strict=True):
        callback.on_train_end(None, state, control)
        for training in more:
            step(*training)
    assert FUNCTIONS["sdpa"] is before
    for name, steps in (("outer", 3), ("inner", 2)):
        kappa = record.read(tmp_path / name).heads["kappa"]
        assert len(kappa) == steps and (kappa > 0).all()


def test_values_that_layers_share_have_no_sum_of_their_own(tmp_path):
    """As Gemma 3n's last ones do: the gradient is that of all, and `dv_sum` was in millions."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Attend() for _ in range(4))})
    q, k, v, own, both = (torch.nn.Parameter(torch.randn(1, H, S, D)) for _ in range(5))
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    watched = dataclasses.replace(watched, roots=[torch.nn.ParameterList([q, k, v])])
    monitor = AttentionMonitor(watched, directory=tmp_path, options=MonitorOptions(interval=1))
    monitor.before_step(1)
    x = torch.zeros(1, H, S, D)
    for layer, (key, value) in zip(
        model["layers"], [(k, v), (k, v), (own * 1, own * 1), (both, both)], strict=True
    ):
        x = x + layer(q + x, key, value)
    loss = x.square().mean()
    loss.backward()
    monitor.after_step(1, loss=loss)
    monitor.finish(1)
    monitor.close()
    heads = record.read(tmp_path).heads
    assert np.isnan(heads["dv_sum"][0, [0, 1, 3]]).all() and np.isnan(heads["dk_sum"][0, 3]).all()
    assert (heads["dv_sum"][0, 2] < 50).all() and (heads["dk_sum"][0, :3] < 50).all()


def test_the_first_pipeline_stage_may_have_no_attention(tmp_path, monkeypatch):
    """As with the layout E|t..: its rank named none, and the guard took compensated numerics for
    plain ones."""
    model = Net()
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd", library="compensated")
    (last, *_) = watched.sites

    def gather(values: list[Any], value: Any) -> None:
        values[:] = [value, 2 if isinstance(value, int) else last.numerics]

    ranks = SimpleNamespace(get_world_size=lambda: 2, all_gather_object=gather,
                            broadcast_object_list=lambda box, src: None)  # fmt: skip
    monkeypatch.setattr(first_rank, "_started", lambda: ranks)
    first = dataclasses.replace(watched, sites=[])
    assert AttentionMonitor(first, directory=tmp_path).compensated


def test_going_back_after_an_error_in_a_step_leaves_no_hooks(tmp_path):
    """Those of the step that failed stood for ever, and the file of the records was open twice."""
    model, x = Net(), torch.ones(2, S, 16)
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    monitor = AttentionMonitor(watched, directory=tmp_path, options=MonitorOptions(interval=2))
    for step in (1, 2):
        monitor.before_step(step)
        loss = model(x)
        if step == 1:
            monitor.after_step(1, loss=loss)
    writer = monitor._writer
    monitor.resume(0)  # step 2 ran out of memory, say
    assert not any(layer._forward_hooks for layer in model.layers)
    assert writer is not None and writer._file._handle is None
    monitor.close()


def test_gradients_that_are_reduced_more_than_once_in_a_step(tmp_path):
    """As in a closure, which its optimizer evaluates several times: they were added up."""
    model = Net()
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    monitor = AttentionMonitor(watched, directory=tmp_path, options=MonitorOptions(interval=1))
    monitor.before_step(1)

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.ones(2, S, 16)) / 1e3
        loss.backward()
        monitor.grads_reduced()
        return loss

    loss = torch.optim.LBFGS(model.parameters(), max_iter=3).step(closure)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    monitor.after_step(1, loss=loss)
    monitor.finish(1)
    monitor.close()
    assert record.read(tmp_path).scalars["grad_norm_rest"] == pytest.approx(float(norm), rel=1e-5)


def test_gradients_of_an_embedding_that_are_sparse(tmp_path):
    """The first observed step ended in an error."""
    model = Net()
    model.embed = torch.nn.Embedding(64, 16, sparse=True)
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    monitor = AttentionMonitor(watched, directory=tmp_path, options=MonitorOptions(interval=1))
    monitor.before_step(1)
    loss = model(model.embed(torch.arange(2 * S).view(2, S) % 40))
    loss.backward()
    monitor.grads_reduced()
    monitor.after_step(1, loss=loss)
    monitor.finish(1)
    monitor.close()
    whole = torch.stack([p.grad.to_dense().norm() for p in model.parameters()]).norm()
    assert record.read(tmp_path).scalars["grad_norm_rest"] == pytest.approx(float(whole), rel=1e-5)


def test_transforms_of_torch_func_are_not_seen(tmp_path):
    """Gradients per sample, Jacobians: they ended the observed step in an error of autograd."""
    model, x = Net(), torch.randn(2, S, 16)
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    options = MonitorOptions(interval=1, rows=1000)
    monitor = AttentionMonitor(watched, directory=tmp_path, options=options)
    monitor.before_step(1)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(weights: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (row[None],))

    each = torch.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, x)
    loss = model(x)
    several = torch.eye(2)[:, :1].sum(1)
    torch.autograd.grad(loss, model.qkv.weight, several, is_grads_batched=True, retain_graph=True)
    loss.backward()
    monitor.after_step(1, loss=loss)
    monitor.finish(1)
    monitor.close()
    told = record.read(tmp_path)
    assert each["qkv.weight"].mean(0).allclose(model.qkv.weight.grad, rtol=1e-3, atol=1e-4)
    assert (told.heads["kappa"] > 0).all() and told.scalars["rows"] == 2 * (S - 12)


@pytest.mark.parametrize("kind", [list, dict])
def test_outputs_in_other_containers_do_not_end_the_step(tmp_path, kind):
    """The first tensor of a list is known; of the others the verdict says that nothing is."""

    class Contained(Attend):
        def forward(self, *qkv: torch.Tensor) -> Any:
            return kind([("out", super().forward(*qkv))]) if kind is dict else [
                super().forward(*qkv), None
            ]  # fmt: skip

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Contained()])})
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    q, k, v = (torch.nn.Parameter(torch.randn(1, H, S, D)) for _ in range(3))
    watched = dataclasses.replace(watched, roots=[torch.nn.ParameterList([q, k, v])])
    monitor = AttentionMonitor(watched, directory=tmp_path, options=MonitorOptions(interval=1))
    monitor.before_step(1)
    out = model["layers"][0](q, k, v)
    loss = (out["out"] if kind is dict else out[0]).square().mean()
    loss.backward()
    monitor.after_step(1, loss=loss)
    found = monitor.finish(1)
    monitor.close()
    assert found is not None
    assert ("nothing is known of attention" in found.verdict.line()) == (kind is dict)


def test_a_model_on_several_devices_is_refused(tmp_path):
    """It ended in an error of torch in the first observed step."""
    model = Net()
    model.far = torch.nn.Linear(2, 2, device="meta")
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    with pytest.raises(ValueError, match="are trained on cpu, meta; allowed: one device a rank"):
        AttentionMonitor(watched, directory=tmp_path)
    AttentionMonitor(watched, directory=tmp_path, options=MonitorOptions(enabled=False))
    model.far.requires_grad_(False)
    AttentionMonitor(watched, directory=tmp_path)


def test_a_copy_made_in_an_observed_step_is_not_seen(tmp_path):
    """A teacher, or an average of the weights, has the hooks for ever: its calls were counted as
    the model's, and seen in place of those."""
    model, x = Net(), torch.randn(2, S, 16, generator=torch.Generator().manual_seed(1))
    watched = watch(model, r"layers\.\d+", heads=H, order="bhsd")
    monitor = AttentionMonitor(watched, directory=tmp_path, options=MonitorOptions(interval=1))
    for step in (1, 2):
        monitor.before_step(step)
        if step == 1:
            teacher = copy.deepcopy(model)
            assert teacher.layers[0]._forward_hooks
        loss = teacher(9 * x) + model(x)
        loss.backward()
        monitor.after_step(step, loss=loss)
    monitor.finish(2)
    monitor.close()
    q, k, _ = model.qkv(x).unflatten(2, (3, H, D)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / D**0.5).masked_fill(torch.ones(S, S).triu(1) > 0, -torch.inf)
    largest = np.tile(scores.amax((0, 2, 3)).detach(), (2, 2, 1))
    assert np.allclose(record.read(tmp_path).heads["max_logit"], largest, rtol=1e-4)


def test_attention_with_a_softcap_is_not_captured(tmp_path, caplog):
    """`probe` judged it as attention without one."""
    site = SimpleNamespace(layer=3, name="x", backend="sdpa_flash", stabilizer="", variant="",
                           attention=None)  # fmt: skip
    x = torch.randn(S, 1, H, D)
    seen = Seen(site=site, q=x, k=x, v=x, out=x, low=None, max_logits=None, sinks=None,
                geometry=Geometry(scale=1.0, causal=True), dropout_p=0.0, softcap=True)  # fmt: skip
    where = SimpleNamespace(tp_rank=0, dp_rank=0)
    capturer = Capturer(MonitorOptions(), where, tmp_path, name="tiny", per_kv_head=1)
    capturer._take(7, Wanted(trigger="step", heads={3: ()}), seen, x)
    assert list(tmp_path.iterdir()) == [] and "layer 3 is not captured at step 7" in caplog.text


def test_modules_whose_names_share_a_number_are_layers_of_their_own(tmp_path):
    """They were added up: a head that fails in one of them vanished among those of the others."""

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Attend() for _ in range(2))
            self.norm = torch.nn.Linear(1, 1)

    class Staged(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = torch.nn.ModuleList(Stage() for _ in range(2))

    model = Staged()
    watched = watch(model, r"stages\.\d+\.blocks\.\d+", heads=H, order="bhsd")
    monitor = AttentionMonitor(watched, directory=tmp_path, options=MonitorOptions(interval=1))
    monitor.before_step(1)
    x = torch.randn(1, H, S, D, requires_grad=True)
    factors = [1.0, 2.0, 4.0, 8.0]
    blocks = [block for stage in model.stages for block in stage.blocks]
    every = zip(factors, blocks, strict=True)
    loss = torch.stack([block(x * f, x, x).square().mean() for f, block in every]).sum()
    loss.backward()
    monitor.after_step(1, loss=loss)
    monitor.finish(1)
    monitor.close()
    found = record.read(tmp_path).heads["max_logit"][0]
    assert np.allclose(found, found[:1] * np.array(factors)[:, None], rtol=1e-5)

    names = ["encoder.layers.0.attn", "decoder.layers.0.attn", "decoder.layers.0.cross"]
    blocks_of = [name.rpartition(".")[0] + "." for name in names]
    assert list(layers_in(names).items()) == [(n, (i, blocks_of[i])) for i, n in enumerate(names)]
    assert layers_in(["h.7.attn", "h.11.attn.2"]) == {"h.7.attn": (7, "h.7."),
                                                      "h.11.attn.2": (11, "h.11.")}  # fmt: skip
