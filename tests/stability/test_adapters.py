"""The monitor in loops that are not ours, on a CPU; examples/plain_megatron.py is one more."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_cpu import VOCAB, tiny_run

from megatron_patch.model.build import build_model
from megatron_patch.report import collect, report
from megatron_patch.runtime.watcher import Pin, Stop
from megatron_patch.stability import AttentionMonitor, MonitorOptions, record
from megatron_patch.stability.adapters import Saves
from megatron_patch.stability.adapters.torch_loop import watch
from megatron_patch.stability.guard import StabilityStop

S, B, H, KV, D = 32, 2, 4, 2, 8
EVERY = MonitorOptions(interval=1)


pytestmark = pytest.mark.usefixtures("cpu_mode")


class Attend(torch.nn.Module):
    """Plain attention in float32; q, k, v [b, s, h, d]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.repeat_interleave(H // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, (H + 2 * KV) * D), torch.nn.Linear(H * D, 16)
        self.attend = Attend()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(2, (-1, D))
        return x + self.out(self.attend(*qkv.split([H, KV, KV], 2)))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loop(
    folder: Path,
    *,
    start: int = 0,
    steps: int = 4,
    library: str = "",
    dtype: torch.dtype = torch.float32,
    calls: Mapping[str, Any] = MappingProxyType({}),
    reduced: bool = True,
    **options: Any,
) -> list[Any]:
    """A plain training loop with the monitor in it; the records that it was given."""
    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shape = {"heads": H, "kv_heads": KV} | dict(calls)
    watched = watch(model, r"blocks\.\d+\.attend", library=library, **shape)
    monitor = AttentionMonitor(
        watched, optimizer, directory=folder, **({"options": EVERY} | options)
    )
    monitor.resume(start)
    found, batch = [], torch.randn(B, S, 16, dtype=dtype)
    for step in range(start + 1, steps + 1):
        monitor.before_step(step)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        if reduced:
            monitor.grads_reduced()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(monitor.after_step(step, loss=loss, grad_norm=norm))
    found.append(monitor.finish(steps))
    monitor.close()
    assert not any(m._forward_hooks for m in model.modules())
    return found


def test_a_plain_pytorch_loop(tmp_path):
    found = loop(tmp_path)
    assert found[0] is None and [one.step for one in found[1:]] == [1, 2, 3, 4]
    assert {one.verdict.level for one in found[1:]} == {"ok"} and not any(
        one.actions for one in found[1:]
    )
    told = record.read(tmp_path)
    assert told.steps.tolist() == [1, 2, 3, 4] and (told.scalars["lr"] == 0.01).all()
    for name in ("max_logit", "kappa", "delta_rms", "dk_sum", "dv_sum"):
        assert (told.heads[name] > 0).all(), name
    assert (told.scalars["loss_mean"] > 0).all() and (told.scalars["grad_norm_mean"] > 0).all()
    # The parts are those of the whole.
    squares = told.layers["grad_norm"].astype(float) ** 2
    whole = squares.sum(1) + told.scalars["grad_norm_rest"] ** 2
    torch.testing.assert_close(
        torch.tensor(whole) ** 0.5, torch.tensor(told.scalars["grad_norm_mean"]), rtol=1e-4, atol=0
    )


def test_gradients_of_the_parameters_that_there_are(tmp_path):
    """Only those that had gradients when the monitor was made were counted: layers that were thawed
    later, and adapters, showed 0."""
    model, batch = Net(), torch.randn(B, S, 16)
    model.blocks[0].requires_grad_(False)
    quantized = torch.zeros(3, dtype=torch.uint8, device="meta")  # of any type, on any device
    model.blocks[1].frozen = torch.nn.Parameter(quantized, requires_grad=False)
    watched = watch(model, r"blocks\.\d+\.attend", heads=H, kv_heads=KV)
    monitor = AttentionMonitor(watched, directory=tmp_path, options=EVERY)
    expected = []
    for step in range(1, 5):
        if step == 2:
            model.blocks[0].requires_grad_(True)
        if step == 3:
            model.blocks[0].out = torch.nn.Sequential(model.blocks[0].out, torch.nn.Linear(16, 16))
        if step == 4:  # its gradients stay
            model.blocks[1].requires_grad_(False)
        monitor.before_step(step)
        loss = model(batch).square().mean()
        loss.backward()
        monitor.grads_reduced()
        monitor.after_step(step, loss=loss)
        grads = [[p.grad for p in block.parameters() if p.requires_grad and p.grad is not None]
                 for block in model.blocks]  # fmt: skip
        expected.append([float(torch.nn.utils.get_total_norm(x)) for x in grads])
    monitor.finish(4)
    monitor.close()
    assert np.allclose(record.read(tmp_path).layers["grad_norm"], expected, rtol=1e-5)
    assert expected[0][0] == expected[3][1] == 0 < expected[1][0] < expected[2][0]


@pytest.mark.parametrize(("library", "unknown"), [("", False), ("compensated", True)])
def test_a_module_that_calls_our_library_is_not_judged_by_a_plain_o(tmp_path, library, unknown):
    """The O that delta was built from has a low-order part, which the module does not hand out."""
    loop(tmp_path, library=library, dtype=torch.bfloat16)
    heads = record.read(tmp_path).heads
    assert np.isnan(heads["used_error_rms"]).all() == unknown
    assert (heads["delta_error_rms"] > 0).all()


def test_a_loop_without_grads_reduced_is_told_once(tmp_path):
    said: list[str] = []
    loop(tmp_path / "whole", log=said.append)
    assert not any("grads_reduced" in line for line in said)
    loop(tmp_path / "without", reduced=False, log=said.append)
    assert [line[:34] for line in said if "norm is" in line] == [
        "step 1: grads_reduced() was not ca"
    ]


def test_the_report_reads_what_a_monitor_wrote(tmp_path):
    loop(tmp_path)
    facts = collect.collect(tmp_path)
    assert facts.telemetry is not None and "attention" in report.render(facts)


def test_a_restart_goes_on_with_the_records(tmp_path):
    loop(tmp_path)
    loop(tmp_path, start=2, steps=6)
    assert record.read(tmp_path).steps.tolist() == [1, 2, 3, 4, 5, 6]


def test_danger_asks_for_a_checkpoint_and_a_stop(tmp_path):
    said: list[str] = []
    rule = type(EVERY.rule)(confirm_steps=0, danger_error=1e-9)
    found = loop(
        tmp_path, options=MonitorOptions(interval=1, guard="stop", rule=rule), log=said.append
    )
    actions = [one.actions for one in found[1:]]
    assert [tuple(type(a) for a in some) for some in actions] == [(), (Pin, Stop), (Pin,), (Pin,)]
    stop: Any = actions[1][1]
    assert stop.error.exit_code == 5 and "after step 3" in str(stop.error)
    assert any("attention: danger (layer" in line for line in said)


class Ours(Attend):
    """As our core attention looks to the guard."""

    backend_name = "stable_flash"
    options = MappingProxyType({"stabilizer": "none"})

    def use(self, backend: str, **options: Any) -> None:
        self.backend_name, self.options = backend, options


def test_a_restart_keeps_a_switch_of_which_only_the_records_tell(tmp_path, monkeypatch):
    """Checkpoints of other programs know nothing of the guard: its switch was lost with them."""
    monkeypatch.setitem(globals(), "Attend", Ours)
    rule = type(EVERY.rule)(confirm_steps=0, danger_error=1e-9)
    options = MonitorOptions(interval=1, guard="switch", rule=rule)
    again = "stability guard: it switched after step 3; stabilizer compensated since then"
    for start in (0, 5, 8):
        said: list[str] = []
        loop(tmp_path, start=start, steps=start + 5, options=options, log=said.append)
        assert (again in said) == (start > 0), start
    assert record.read(tmp_path).scalars["switched"].tolist() == [0.0] + [3.0] * 12
    # Back at a checkpoint from before the signs it has not switched.
    said = []
    loop(tmp_path, start=1, steps=2, options=options, log=said.append)
    assert again not in said


def test_what_cannot_be_watched_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no module of Net is named 'nothing'"):
        watch(Net(), "nothing", heads=H)
    with pytest.raises(ValueError, match="no number"):
        watch(Net(), "head", heads=H)
    for wrong, message in (
        ({"heads": 0}, "heads 0, kv_heads 0: positive"),
        ({"kv_heads": 3}, "heads 4, kv_heads 3: .* divide"),
        ({"order": "bsdh"}, "order 'bsdh': use one of 'bshd', 'bhsd', 'sbhd'"),
        ({"library": "ours"}, "library 'ours': use one of '', 'compensated'"),
    ):
        with pytest.raises(ValueError, match=message):
            watch(Net(), ".*attend", **({"heads": H} | wrong))
    with pytest.raises(ValueError, match="no regular expression"):
        watch(Net(), "(", heads=H)
    for n, calls in enumerate(({"heads": 2 * H}, {"order": "bhsd"}, {"kv_heads": 1})):
        with pytest.raises(ValueError, match=r"blocks\.0\.attend is called with .*correct names"):
            loop(tmp_path / str(n), calls=calls)
    with pytest.raises(ValueError, match="counted from 1"):
        loop(tmp_path, start=-1)
    with pytest.raises(ValueError, match=r"after_step\(9\) after before_step\(0\)"):
        AttentionMonitor(watch(Net(), r".*\d\.attend", heads=H), directory=tmp_path).after_step(
            9, loss=1.0
        )
    monitor = AttentionMonitor(watch(Net(), r".*\d\.attend", heads=H), directory=tmp_path)
    monitor.before_step(7)
    with pytest.raises(ValueError, match=r"before_step\(1\) after 7: .* on over epochs"):
        monitor.before_step(1)  # its records would not ascend
    monitor.resume(0)
    monitor.before_step(1)
    monitor.close()
    with pytest.raises(ValueError, match="put our core attention into the model"):
        loop(tmp_path, options=MonitorOptions(guard="switch"))
    with pytest.raises(ValueError, match="interval"):
        loop(tmp_path, options=MonitorOptions(interval=0))


def test_a_model_in_which_nothing_would_be_watched_is_refused(tmp_path):
    """It was told `ok (no head shows anything)` for ever, whatever its attention did."""

    class Around(torch.nn.Module):  # as Core's LLaVAModel is
        def __init__(self) -> None:
            super().__init__()
            (self.language_model,) = build_model(tiny_run(), vocab_size=VOCAB).chunks
            self.config = self.language_model.config

    with pytest.raises(ValueError, match=r"no core attention in .* of Around: nothing would be"):
        AttentionMonitor([Around()], directory=tmp_path)
    AttentionMonitor([Around()], directory=tmp_path, options=MonitorOptions(enabled=False))
    with pytest.raises(ValueError, match=r"Net is no model of Megatron-Core; name its attention"):
        AttentionMonitor(Net(), directory=tmp_path)


def test_attention_that_is_not_called_as_it_is_watched_is_told_of(tmp_path):
    """And again when it is seen no more: calls in a CUDA graph, or with a padding mask, are not."""
    said: list[str] = []
    model, blind = Net(), torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = watch(model, r"blocks\.\d+\.attend", heads=H, kv_heads=KV)
    monitor = AttentionMonitor(
        watched, optimizer, directory=tmp_path, options=EVERY, log=said.append
    )
    for step in range(1, 7):
        monitor.before_step(step)
        loss = (model if step in (3, 4) else blind)(torch.randn(B, S, 16)).square().mean()
        loss.backward()
        monitor.grads_reduced()
        monitor.after_step(step, loss=loss)
    monitor.finish(6)
    monitor.close()
    lines = [line for line in said if "attention:" in line]
    unknown = "attention: ok (no head was measured, nothing is known of attention)"
    known = "attention: ok (no head shows anything)"
    assert lines == [f"step 1: {unknown}", f"step 3: {known}", f"step 5: {unknown}"]


@pytest.mark.parametrize("implementation", ["stable_attention", "sdpa"])
def test_a_hugging_face_model(tmp_path, implementation, monkeypatch):
    """The events of `Trainer` in its order (which itself needs accelerate)."""
    transformers = pytest.importorskip("transformers")
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    from megatron_patch.stability.adapters.hugging_face import attention_callback
    from stable_attention import hf

    hf.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=H, num_key_value_heads=KV, max_position_embeddings=S,
    )  # fmt: skip
    build = transformers.LlamaForCausalLM._from_config
    dtype = torch.bfloat16 if implementation == "stable_attention" else torch.float32
    model = build(config, attn_implementation=implementation).to(dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    callback = attention_callback(model, directory=tmp_path, options=EVERY)
    events = CallbackHandler([callback], model, None, optimizer, rates)
    args, state, control = SimpleNamespace(), TrainerState(), TrainerControl()
    events.on_train_begin(args, state, control)
    ids = torch.arange(2 * S).view(2, S) % 32
    for _ in range(3):
        events.on_step_begin(args, state, control)
        for micro in range(2):  # of an accumulated step, the first is observed
            model(input_ids=ids + 0 * micro, labels=ids, use_cache=False).loss.backward()
        events.on_pre_optimizer_step(args, state, control)
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        events.on_step_end(args, state, control)
    events.on_train_end(args, state, control)
    told = record.read(tmp_path)
    assert told.steps.tolist() == [1, 2, 3] and (told.scalars["lr"] == 0.01).all()
    assert told.scalars["loss_mean"][0] == pytest.approx(math.log(32), rel=0.1)
    assert (told.layers["grad_norm"] > 0).all() and (told.heads["kappa"] > 0).all()
    model(input_ids=ids, labels=ids, use_cache=False)  # nothing is left behind
    assert not model._forward_hooks
    # A stop is saved, and then fails the program.
    events.on_train_begin(args, state, control)
    asked = [Pin(3), Stop("by the test", StabilityStop.of("by the test", 3))]
    monkeypatch.setattr(AttentionMonitor, "switched", lambda self, found: asked)
    events.on_step_begin(args, state, control)
    state.global_step += 1
    events.on_step_end(args, state, control)
    assert control.should_save and control.should_training_stop
    with pytest.raises(StabilityStop):
        events.on_train_end(args, state, control)


def test_a_danger_saves_a_checkpoint_as_it_begins(tmp_path, monkeypatch):
    """One at every record would drive those from before it out of ``save_total_limit``."""
    saves, stop = Saves(), Stop("by the test", StabilityStop.of("by the test", 3))
    records = [Pin(50)], [Pin(100)], [], [Pin(250)], [Pin(300), stop], [Pin(501)], [Pin(551)]
    found = [saves.due(actions, interval=50) for actions in records]
    assert found == [True, False, False, False, True, True, False]
    found = [saves.due([Pin(step)], interval=1000) for step in (2000, 3000, 4000)]
    assert found == [True, False, False]

    transformers = pytest.importorskip("transformers")
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    from megatron_patch.stability.adapters.hugging_face import attention_callback

    config = transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32,
                                      num_hidden_layers=1, num_attention_heads=H)  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    rates = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()), factor=1.0)
    callback = attention_callback(model, directory=tmp_path, options=EVERY)
    events = CallbackHandler([callback], model, None, None, rates)
    args, state, control = SimpleNamespace(), TrainerState(), TrainerControl()
    events.on_train_begin(args, state, control)
    asked = []
    for step in (1, 2, 3):
        monkeypatch.setattr(AttentionMonitor, "switched", lambda *_, at=step: [Pin(at)])
        events.on_step_begin(args, state, control)
        state.global_step = step
        events.on_step_end(args, state, control)
        asked.append(control.should_save)
    events.on_train_end(args, state, control)
    assert asked == [True, False, False]


def test_the_trainer_of_hugging_face(tmp_path):
    """`Trainer` itself, where accelerate is installed: records; a stop is saved, then raised."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from megatron_patch.stability.adapters.hugging_face import attention_callback

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=H, num_key_value_heads=KV, max_position_embeddings=S,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    rule = type(EVERY.rule)(confirm_steps=0, danger_error=1e-9)
    options = MonitorOptions(interval=1, guard="stop", rule=rule)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "saved"), max_steps=9, report_to=[], use_cpu=True,
        per_device_train_batch_size=2, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    ids = torch.arange(S) % 32
    rows = [{"input_ids": ids, "labels": ids}] * 40
    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
    trainer.add_callback(attention_callback(model, directory=tmp_path / "run", options=options))
    with pytest.raises(StabilityStop, match="after step 3"):
        trainer.train()
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["checkpoint-3"]
    told = record.read(tmp_path / "run")
    # That of the last step is read at the end.
    assert told.steps.tolist() == [1, 2, 3] and (told.heads["kappa"] > 0).all()


class Asks:
    """A monitor whose record of every step asks for something."""

    options, actions = EVERY, (Pin(1),)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.resume = self.before_step = self.finish = self.close = lambda *_: None
        self.reduced_before = lambda _: contextlib.nullcontext()
        self.after_step = lambda *_, **__: None
        self.switched = lambda _: self.actions


def test_megatron_training_saves_a_step_as_that_step(tmp_path, monkeypatch):
    """What `train_step` returns is carried out before the step is counted: its weights would be a
    checkpoint of the step before, perhaps over the one that is there."""
    from megatron import training

    from megatron_patch.stability.adapters import megatron_training

    args = SimpleNamespace(curr_iteration=6, save_interval=100, exit_interval=None)
    monkeypatch.setattr(training, "get_args", lambda: args)
    result = {}, 0, False, False, 0, 1.0, 0, 0
    monkeypatch.setattr(training.training, "train_step", lambda *_, **__: result)
    monkeypatch.setattr(megatron_training, "AttentionMonitor", Asks)
    with megatron_training.watched(directory=tmp_path):
        assert training.training.train_step(None, None, [], None) == result
        assert (args.save_interval, args.exit_interval) == (7, None)
        args.curr_iteration = 7
        assert training.training.train_step(None, None, [], None) == result
        assert args.save_interval == 100  # of a danger that goes on, the one checkpoint is enough
        asked = (Pin(7), Stop("by the test", StabilityStop.of("by the test", 8)))
        monkeypatch.setattr(Asks, "actions", asked)
        assert training.training.train_step(None, None, [], None) == (*result[:4], 5, *result[5:])
        assert (args.save_interval, args.exit_interval) == (8, 8)
        args.curr_iteration, args.exit_interval = 8, None
        monkeypatch.setattr(Asks, "actions", ())
        training.training.train_step(None, None, [], None)
        assert (args.save_interval, args.exit_interval) == (100, None)


@pytest.mark.slow
def test_pretrain_that_the_guard_stopped_goes_on_as_if_it_had_not(tmp_path):
    """Its last checkpoint is of the step after which it was saved; no step is repeated."""

    def run(name: str, *more: str) -> int:
        worker = Path(__file__).parent / "pretrain_worker.py"
        save = ["--save", tmp_path / name / "saved", "--load", tmp_path / name / "saved"]
        command = [sys.executable, worker, tmp_path / name, *save, "--save-interval", "2", *more]
        return subprocess.run(command, capture_output=True, timeout=500).returncode

    assert run("whole") == 0
    assert run("part", "--sick", "2") == 5
    latest = tmp_path / "part" / "saved" / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == "3"
    assert run("part", "--no-load-rng") == 0
    whole, part = (record.read(tmp_path / name).scalars["loss_mean"] for name in ("whole", "part"))
    assert part[-1] == whole[-1]


@pytest.mark.slow
def test_pretrain_of_the_wheel(tmp_path):
    """megatron.training as its own program: records and a verdict line."""
    worker = Path(__file__).parent / "pretrain_worker.py"
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "attention: ok (no head shows anything)" in done.stdout
    told = record.read(tmp_path)
    logged = [float(x) for x in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert told.steps.tolist() == [1, 2, 3, 4]
    # Its second line is the mean of the first two steps.
    losses = told.scalars["loss_mean"]
    means = [losses[0], losses[:2].mean(), *losses[2:]]
    np.testing.assert_allclose(means, logged, rtol=1e-6)
    norms = [float(x) for x in re.findall(r"grad norm: (\S+)", done.stdout)]
    np.testing.assert_allclose(told.scalars["grad_norm_mean"], norms, atol=1e-3)
    whole = (told.layers["grad_norm"].astype(float) ** 2).sum(1) + told.scalars[
        "grad_norm_rest"
    ] ** 2
    np.testing.assert_allclose(whole**0.5, told.scalars["grad_norm_mean"], rtol=1e-3)
    assert (told.heads["max_logit"] > 0).all() and (told.scalars["lr"] == 1e-3).all()
