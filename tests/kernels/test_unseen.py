"""Calls that leave out the dispatcher, and everybody who must see the operators all the same."""

from __future__ import annotations

import pytest
import torch
from side_by_side import LAYOUTS, gradients, projected
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from stable_attention import ops, stable_attention

NAMES = {"stable_attention::forward", "stable_attention::backward"}


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Counted:
    """An operator that counts its calls."""

    def __init__(self, operator):
        self.operator, self.calls = operator, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.operator(*arguments)


@pytest.fixture
def counted(monkeypatch):
    """(forward, backward) operators as the module calls them."""
    found = Counted(ops.forward_op), Counted(ops.backward_op)
    for name, operator in zip(("forward_op", "backward_op"), found, strict=True):
        monkeypatch.setattr(ops, name, operator)
    return found


def run(q, k, v):
    out = stable_attention(q, k, v, causal=True)
    return torch.autograd.grad(out.float().square().sum(), (q, k, v))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits_with_and_without_the_operators(layout, counted, monkeypatch):
    q, k, v = projected(layout, d=16, dv=8)
    direct = gradients(q, k, v, layout=layout)
    assert [o.calls for o in counted] == [0, 0]
    monkeypatch.setattr(ops, "_unseen", lambda tensors: False)
    dispatched = gradients(q, k, v, layout=layout)
    assert [o.calls for o in counted] == [2, 1]  # `attention`, and the rule below autograd
    for a, b in zip(direct, dispatched, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_without_gradients_too(counted):
    q, k, v = projected("bshd", d=16, dv=16)
    want = stable_attention(q, k, v, causal=True, return_lse=True)
    assert want[0].requires_grad
    assert not stable_attention(*(x.detach() for x in (q, k, v))).requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = stable_attention(q, k, v, causal=True, return_lse=True)
        assert all(
            torch.equal(a, b) and not a.requires_grad for a, b in zip(got, want, strict=True)
        )
    assert [o.calls for o in counted] == [0, 0]


def test_a_dispatch_mode_sees_both():
    with Seen() as seen:
        run(*projected("bshd", d=16, dv=16))
    assert seen.names.count("stable_attention::forward") == 1
    assert seen.names.count("stable_attention::backward") == 1


def test_a_mode_around_the_backward_pass_alone_sees_it():
    q, k, v = projected("bshd", d=16, dv=16)
    out = stable_attention(q, k, v, causal=True)
    with Seen() as seen:
        torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert seen.names.count("stable_attention::backward") == 1


def test_the_profiler_names_them():
    arguments = projected("bshd", d=16, dv=16)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run(*arguments)
    assert {event.name for event in found.events()} >= NAMES


def test_subclasses_and_function_modes_get_the_operators(counted):
    class Named(torch.Tensor):
        pass

    q, k, v = (x.detach() for x in projected("bshd", d=16, dv=16))
    stable_attention(q.as_subclass(Named), k, v)
    assert counted[0].calls
    before = counted[0].calls
    with torch.device("cpu"):
        stable_attention(q, k, v)
    assert counted[0].calls > before
    before = counted[0].calls
    stable_attention(torch.nn.Parameter(q), k, v)  # a parameter is a tensor like others
    assert counted[0].calls == before


def test_transforms_and_traces_get_the_operators(counted):
    q, k, v = (x.detach() for x in projected("bshd", d=16, dv=16))
    many = q.unsqueeze(0).expand(2, *q.shape)
    got = torch.func.vmap(lambda x: stable_attention(x, k, v, causal=True))(many)
    assert counted[0].calls and torch.equal(got[1], stable_attention(q, k, v, causal=True))
    seen = []

    def traced(x):
        seen.append(ops._unseen((x,)))
        return x + 1

    torch.jit.trace(traced, q)
    assert seen[0] is False  # later calls compare the trace with the function itself
    compiled = torch.compile(lambda x: x + int(ops._unseen((x,))), backend="eager")
    assert torch.equal(compiled(q), q)
    assert ops._unseen((q, None))
