"""A pass that is repeated leaves what it would have left, in memory of this call."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from stable_attention import configs, ops, stable_attention
from stable_attention.hopper import launch as hopper
from stable_attention.triton import backward, forward, launches, passes, preprocess
from stable_attention.triton.launches import launch
from stable_attention.triton.passes import repeated

N = 32


class Plus:
    """Stands for a compiled kernel: target = source + 1, and counts how it is launched."""

    arg_names = ("source", "target", "size")
    pre_run_hooks: tuple[object, ...] = ()

    def __init__(self) -> None:
        self.jitted = self.kept = 0
        self.streams: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def run(source: torch.Tensor, target: torch.Tensor, *, size: int, num_warps: int):
            self.jitted += 1
            self.add(source.data_ptr(), target.data_ptr(), size)
            return Compiled(self)

        return run

    @staticmethod
    def add(source: int, target: int, size: int) -> None:
        read, written = ((ctypes.c_float * size).from_address(x) for x in (source, target))
        for i in range(size):
            written[i] = read[i] + 1


class Compiled:
    def __init__(self, kernel: Plus) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]):
        def run(source: int, target: int, size: int) -> None:
            self.kernel.kept += 1
            self.kernel.add(source, target, size)

        return run


def below(compiled: Compiled, grid: tuple[int, int, int]):
    def call(stream: int, given: list[int]) -> None:
        compiled.kernel.streams.append(stream)
        compiled[grid](*given)

    return call, []


def arguments(source: torch.Tensor, target: torch.Tensor) -> launches.Arguments:
    return (1,), (source, target), {"size": N, "num_warps": 4}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as launches and passes ask."""
    monkeypatch.setattr(launches, "CompiledKernel", Compiled)
    monkeypatch.setattr(launches, "_below", below)
    monkeypatch.setattr(launches, "_launches", {})
    monkeypatch.setattr(launches, "_current_stream", lambda device: 7)
    monkeypatch.setattr(passes, "_stream", lambda device: 7)


class Run:
    """A pass; counts how often its Python runs."""

    def __init__(self, body) -> None:
        self.body, self.calls = body, 0

    def __call__(self, *tensors: torch.Tensor | None):
        self.calls += 1
        return self.body(*tensors)

    def again(self, *tensors: torch.Tensor | None, facts: tuple[object, ...] = ()):
        return repeated((id(self), *facts), self, tensors, self)


def numbers(start: float = 0.0) -> torch.Tensor:
    return torch.arange(N, dtype=torch.float32) + start


def twice(kernel: Plus) -> Run:
    def body(x: torch.Tensor, *_: torch.Tensor | None):
        between, out = (torch.empty(N) for _ in range(2))
        launch(kernel, (), (x, between), arguments)
        launch(kernel, (), (between, out), arguments)
        return (out,)

    return Run(body)


def test_from_the_fourth_on_the_launches_alone() -> None:
    kernel = Plus()
    run = twice(kernel)
    left = []
    for start in range(6):
        (out,) = run.again(numbers(start))
        assert torch.equal(out, numbers(start + 2))
        left.append(out)
    assert run.calls == 3
    assert kernel.jitted + kernel.kept == 12
    assert kernel.streams == [7] * kernel.kept
    assert len({x.data_ptr() for x in left}) == 6, "results are of this call"


def test_pieces_of_what_is_made() -> None:
    kernel = Plus()

    def body(x: torch.Tensor):
        first, second = torch.empty(2, N).unbind()
        whole = torch.empty(3, N)
        launch(kernel, (), (x, first), arguments)
        launch(kernel, (), (first, second), arguments)
        for row in whole.unbind():
            launch(kernel, (), (second, row), arguments)
        return whole, whole[1], None, torch.empty(0)

    run = Run(body)
    for start in range(6):
        whole, row, absent, empty = run.again(numbers(start))
        assert torch.equal(whole, numbers(start + 3).expand(3, N))
        assert row._base is not None or row.data_ptr() == whole[1].data_ptr()
        assert row.data_ptr() == whole[1].data_ptr()
        assert row.shape == (N,)
        assert absent is None
        assert empty.shape == (0,)
    assert run.calls == 3


def test_what_is_filled_is_filled_again() -> None:
    kernel = Plus()

    def body(x: torch.Tensor):
        zeros, low, scratch = torch.zeros(N), torch.full((N,), -torch.inf), torch.zeros(2 * N)
        launch(kernel, (), (x, scratch), arguments)
        out = torch.empty(N)
        launch(kernel, (), (scratch[N:], out), arguments)
        return zeros, low, x.new_zeros(N), out

    run = Run(body)
    for _ in range(6):
        zeros, low, more, out = run.again(numbers())
        assert not zeros.any()
        assert not more.any()
        assert torch.equal(low, torch.full((N,), -torch.inf))
        assert torch.equal(out, torch.ones(N))
        for x in (zeros, low, more):
            x.fill_(9)
    assert run.calls == 3


def test_one_tensor_in_two_places_says_nothing_of_the_next_call() -> None:
    kernel = Plus()

    def body(x: torch.Tensor, y: torch.Tensor):
        found = torch.empty(N), torch.empty(N)
        for source, target in zip((x, y), found, strict=True):
            launch(kernel, (), (source, target), arguments)
        return found

    run = Run(body)
    x = numbers()
    for _ in range(4):
        run.again(x, x)
    first, second = run.again(x, numbers(100))
    assert run.calls == 3
    assert torch.equal(first, numbers(1))
    assert torch.equal(second, numbers(101))


def test_what_calls_share_stays_shared() -> None:
    kernel, shared = Plus(), torch.zeros(N)

    def body(x: torch.Tensor):
        out = torch.empty(N)
        launch(kernel, (), (shared, shared), arguments)
        launch(kernel, (), (shared, out), arguments)
        return (out,)

    run = Run(body)
    for count in range(1, 7):
        (out,) = run.again(numbers())
        assert torch.equal(out, torch.full((N,), count + 1.0))
    assert run.calls == 3


@pytest.mark.parametrize("what", ["an operator", "a view of the caller's", "nothing kept"])
def test_a_pass_that_does_more_is_run(what: str) -> None:
    kernel = Plus()

    def body(x: torch.Tensor):
        out = torch.empty(N)
        if what == "an operator":
            x = x * 2
        if what == "a view of the caller's":
            x = x[: N // 2 * 2]
        fresh = (run.calls,) if what == "nothing kept" else ()
        launch(kernel, fresh, (x, out), arguments)
        return (out,)

    run = Run(body)
    for start in range(6):
        (out,) = run.again(numbers(start))
        assert torch.equal(out, numbers(start) * (1 + (what == "an operator")) + 1)
    assert run.calls == 6


def test_a_result_that_is_not_its_own_is_run() -> None:
    run = Run(lambda x: (x,))
    for _ in range(6):
        x = numbers()
        assert run.again(x)[0].data_ptr() == x.data_ptr()
    assert run.calls == 6


@pytest.mark.parametrize("other", ["strides", "alignment", "type", "absent", "facts", "stream"])
def test_another_kind_is_another_pass(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = twice(Plus())
    for _ in range(4):
        run.again(numbers(), numbers())
    x, facts = numbers(), ()
    if other == "strides":
        last = torch.zeros(2 * N)[::2]
    else:
        last = {
            "alignment": torch.zeros(N + 1)[1:],
            "type": torch.zeros(N, dtype=torch.int32),
            "absent": None,
        }.get(other, numbers())
    if other == "facts":
        facts = (1,)
    if other == "stream":
        monkeypatch.setattr(passes, "_stream", lambda device: 8)
    run.again(x, last, facts=facts)
    assert run.calls == 4


def test_hooks_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Plus()
    run = twice(kernel)
    for _ in range(4):
        run.again(numbers())
    assert run.calls == 3
    with monkeypatch.context() as told:
        told.setattr(kernel, "pre_run_hooks", (print,), raising=False)
        run.again(numbers())
    with monkeypatch.context() as told:
        told.setattr(launches.knobs.runtime, "launch_enter_hook", print)
        run.again(numbers())
    with monkeypatch.context() as told:
        told.setattr(launches.knobs.runtime, "debug", True)
        run.again(numbers())
    with launches.anew():
        run.again(numbers())
    assert run.calls == 7
    run.again(numbers())
    assert run.calls == 7


def test_nothing_is_repeated_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    run = Run(lambda x: (torch.empty(N),))
    for _ in range(5):
        run.again(numbers())
    assert run.calls == 5


def test_no_tensor_is_kept_alive() -> None:
    run = twice(Plus())
    storages = []
    for _ in range(5):
        x = numbers()
        (out,) = run.again(x)
        storages += [weakref.ref(t) for t in (x, out)]
    del x, out
    gc.collect()
    assert not [r for r in storages if r() is not None]


def test_launches_of_another_thread_are_not_of_the_pass() -> None:
    kernel, other = Plus(), Plus()
    for _ in range(3):
        launch(other, (), (numbers(), torch.empty(N)), arguments)

    def elsewhere() -> None:
        launch(other, (), (numbers(), torch.empty(N)), arguments)

    def body(x: torch.Tensor):
        out = torch.empty(N)
        launch(kernel, (), (x, out), arguments)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return (out,)

    run = Run(body)
    for _ in range(3):
        run.again(numbers())
    before = other.kept
    run.again(numbers())
    assert (run.calls, other.kept) == (3, before)


def test_passes_that_never_come_again_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "KEPT", 8)
    run = twice(Plus())
    for n in range(40):
        run.again(numbers(), facts=(n,))
    assert len(launches._launches) <= 9


class Named:
    """Stands for a kernel that does nothing; ``given`` is what all of them were launched with."""

    pre_run_hooks: tuple[object, ...] = ()
    given: list[tuple[object, ...]] = []
    made: list[torch.Tensor] = []
    """Alive, so that no address comes a second time."""

    @classmethod
    def alive(cls, x: torch.Tensor) -> torch.Tensor:
        cls.made.append(x)
        return x

    def __init__(self, name: str, arg_names: list[str]) -> None:
        self.name, self.arg_names = name, arg_names

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *positional, **named: Nothing(self.name)


class Nothing:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int, int, int]):
        return None


def noted_below(compiled: Nothing, grid: tuple[int, int, int]):
    def call(stream: int, given: list[object]) -> None:
        Named.given.append((compiled.name, grid, *given))

    return call, [{}] * 20


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The library as on the architecture of ``request.param``, with kernels that note arguments."""
    monkeypatch.setattr(launches, "CompiledKernel", Nothing)
    monkeypatch.setattr(launches, "_below", noted_below)
    monkeypatch.setattr(configs, "arch_of", lambda device: request.param)
    monkeypatch.setattr(
        launches.driver,
        "make_tensordesc_arg",
        lambda x, meta: [("map", x.base.data_ptr()), *x.shape, *x.strides],
    )
    for module in (hopper, preprocess, forward, backward):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Named(name, kernel.arg_names))
    for name in ("empty", "empty_like", "empty_strided", "full", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, f=make, **k: Named.alive(f(*a, **k)))


ADDRESS = 2**40
"""Above all numbers that are none."""


def anonymous(given: list[tuple[object, ...]], known: dict[int, str]) -> list[object]:
    """Launches with every address by its name: the caller's, or that of where it came first."""
    names = dict(known)

    def name(x: object) -> object:
        if isinstance(x, tuple):
            return tuple(map(name, x))
        if isinstance(x, int) and x > ADDRESS:
            return names.setdefault(x, f"new {len(names)}")
        return x

    return [name(launch) for launch in given]


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "pieces of one tensor": {"causal": True, "one": True},
    "full, d 128, GQA": {"d": 128, "kv_heads": 1},
    "window, fp32 o_lo": {"window": (32, 0), "o_lo": "fp32"},
    "none": {"stabilizer": "none"},
    "LSE and largest logits": {"causal": True, "return_lse": True, "return_max_logits": True},
    "packed": {"layout": "thd", "causal": True},
    "dropout": {"dropout_p": 0.5},
    "sinks": {"sinks": True},
    "projected": {"stabilizer": "compensated_projected"},
}
UNREPEATED = {"sinks"}
"""Calls whose backward sums on the host's side."""


def tensors_of(call: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """(q, k, v, dout), keywords."""
    options = dict(call)
    d, kv_heads, one = (options.pop(n, x) for n, x in (("d", 64), ("kv_heads", 2), ("one", False)))
    size = (256,) if options.get("layout") == "thd" else (2, 128)
    if one:
        qkv = list(torch.zeros(*size, 2, 3 * d, dtype=torch.bfloat16).split(d, -1))
    else:
        qkv = [torch.zeros(*size, n, d, dtype=torch.bfloat16) for n in (2, kv_heads, kv_heads)]
    if options.get("layout") == "thd":
        cu = torch.tensor([0, 100, 256], dtype=torch.int32)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        options |= {"max_seqlen_q": 156, "max_seqlen_k": 156}
    if options.get("sinks"):
        options["sinks"] = torch.zeros(2, requires_grad=True)
    if options.get("dropout_p"):
        options["dropout_seed"] = torch.zeros((), dtype=torch.int64)
    dout = torch.zeros(*size, 2, d, dtype=torch.bfloat16)
    return [*(x.requires_grad_() for x in qkv), dout], options


@pytest.mark.parametrize("named", ["sm90", "sm80"], indirect=True)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("named")
def test_a_repeated_call_launches_the_same(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (*qkv, dout), options = tensors_of(CALLS[call])
    callers = {x.data_ptr(): n for n, x in zip(("q", "k", "v", "dO"), (*qkv, dout), strict=True)}

    def run() -> tuple[list[object], list[torch.Tensor]]:
        Named.given.clear()
        Named.made.clear()
        found = stable_attention(*qkv, **options)
        out, *more = found if isinstance(found, tuple) else (found,)
        lse = (more[0],) if options.get("return_lse") else ()
        dlse = (torch.zeros_like(x) for x in lse)
        gradients = torch.autograd.grad((out, *lse), qkv, (dout, *dlse))
        return anonymous(Named.given, callers), [out, *more, *gradients]

    with monkeypatch.context() as apart:
        apart.setattr(passes, "_stream", lambda device: None)
        for _ in range(3):
            want, tensors = run()
        kinds = [(x.shape, x.stride(), x.dtype) for x in tensors]
    assert len(want) >= 4
    python = []
    for place in ("_run_forward", "_run_backward"):
        original = getattr(ops, place)
        monkeypatch.setattr(
            ops, place, lambda *a, f=original, n=place, **k: python.append(n) or f(*a, **k)
        )
    for _ in range(5):
        python.clear()
        got, tensors = run()
        assert got == want
        assert [(x.shape, x.stride(), x.dtype) for x in tensors] == kinds
        addresses = {x for launch in Named.given for x in flat(launch)}
        assert {x.data_ptr() for x in tensors} <= addresses
    assert python == (["_run_backward"] if call in UNREPEATED else [])


def flat(x: object) -> list[object]:
    return [z for y in x for z in flat(y)] if isinstance(x, tuple) else [x]
