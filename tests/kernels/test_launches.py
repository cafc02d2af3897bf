"""A kept launch is given what Triton would be given, with the addresses of this call."""

from __future__ import annotations

import collections
import gc
import os
import sys
import weakref
from types import FrameType, SimpleNamespace

import pytest
import torch
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from stable_attention import configs, stable_attention
from stable_attention.hopper import launch as hopper
from stable_attention.triton import launches, passes, preprocess
from stable_attention.triton.launches import launch

NAMES = ("x", "x_desc", "y", "size", "WIDTH")


class Compiled:
    """What a kernel returns once it is compiled."""

    def __init__(self, kept: list[tuple[object, ...]]) -> None:
        self._kept = kept

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *arguments: self._kept.append((grid, *arguments))


class Kernel:
    """Stands for a jitted function; notes what it is launched with, and how."""

    arg_names = NAMES
    pre_run_hooks: tuple[object, ...] = ()

    def __init__(self, *, compiles: bool = True) -> None:
        self.jitted: list[tuple[object, ...]] = []
        self.kept: list[tuple[object, ...]] = []
        self._compiles = compiles

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*positional: object, num_warps: int, **named: object) -> object:
            order = (*positional, *(named[n] for n in NAMES[len(positional) :]))
            self.jitted.append((grid, *order))
            return Compiled(self.kept) if self._compiles else None

        return run


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "CompiledKernel", Compiled)
    monkeypatch.setattr(launches, "_launches", {})


def arguments(x: torch.Tensor, y: torch.Tensor | None) -> launches.Arguments:
    described = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 16])
    named = {"WIDTH": 7, "size": x.shape[0], "num_warps": 4}
    return (x.shape[0],), (x, described, y), named


def call(kernel: Kernel, *tensors: torch.Tensor | None, facts: tuple[object, ...] = ()) -> None:
    launch(kernel, facts, tensors, arguments)


def pair(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, 16), torch.zeros(rows, 16)


def test_the_third_is_launched_without_triton() -> None:
    kernel, tensors = Kernel(), [pair() for _ in range(4)]
    for x, y in tensors:
        call(kernel, x, y)
    assert len(kernel.jitted) == len(kernel.kept) == 2
    for (x, y), (grid, *given) in zip(tensors[2:], kernel.kept, strict=True):
        assert grid == (3, 1, 1)
        address, described, other, size, width = given
        assert (address, other, size, width) == (x.data_ptr(), y.data_ptr(), 3, 7)
        assert described.base is x
        assert (described.shape, described.strides) == ([3, 16], [16, 1])
        assert described.block_shape == [1, 16]


def test_one_tensor_in_two_places_says_nothing_of_the_next_call() -> None:
    kernel = Kernel()
    x, y = pair()
    for _ in range(2):
        call(kernel, x, x)
    call(kernel, x, y)
    assert kernel.kept[0][1] == x.data_ptr()
    assert kernel.kept[0][3] == y.data_ptr()


def test_what_is_not_there_stays_away() -> None:
    kernel = Kernel()
    for _ in range(3):
        call(kernel, pair()[0], None)
    assert kernel.kept[0][3] is None


@pytest.mark.parametrize(
    "other",
    [
        pair(4),
        (torch.zeros(3, 16), None),
        (torch.zeros(3, 16).bfloat16(), torch.zeros(3, 16)),
        (torch.zeros(3, 32)[:, :16], torch.zeros(3, 16)),
        (torch.zeros(3, 16), torch.zeros(49)[1:].view(3, 16)),
    ],
    ids=["shape", "absent", "type", "strides", "alignment"],
)
def test_another_kind_is_not_the_same_launch(other: tuple[torch.Tensor, torch.Tensor]) -> None:
    kernel = Kernel()
    for _ in range(3):
        call(kernel, *pair())
    call(kernel, *other)
    assert len(kernel.kept) == 1


def test_other_facts_or_another_kernel_are_not_the_same_launch() -> None:
    kernel, other = Kernel(), Kernel()
    for _ in range(3):
        call(kernel, *pair(), facts=(1,))
    call(kernel, *pair(), facts=(2,))
    call(other, *pair(), facts=(1,))
    assert (len(kernel.kept), len(other.kept)) == (1, 0)


def test_nothing_is_kept_of_the_interpreter() -> None:
    kernel = Kernel(compiles=False)
    for _ in range(4):
        call(kernel, *pair())
    assert len(kernel.jitted) == 4


def test_no_tensor_is_kept_alive() -> None:
    kernel = Kernel()
    x, y = pair()
    storages = [weakref.ref(t) for t in (x, y)]
    for _ in range(3):
        call(kernel, x, y)
    kernel.jitted.clear()
    kernel.kept.clear()
    del x, y
    gc.collect()
    assert [r() for r in storages] == [None, None]


def test_launches_that_come_again_stay_when_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "KEPT", 8)
    kernel = Kernel()
    for rows in range(1, 9):  # as many as are kept
        for _ in range(2):
            call(kernel, *pair(rows))
    for rows in range(1, 9):
        call(kernel, *pair(rows))
    assert len(kernel.kept) == 8
    monkeypatch.setattr(launches, "KEPT", 10)
    for rows in range(20, 60):
        call(kernel, *pair(rows))
    for rows in range(1, 9):
        call(kernel, *pair(rows))
    assert len(kernel.kept) == 16


def test_what_triton_is_told_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debugging, instrumentation and hooks before a launch are not passed over."""
    kernel = Kernel()
    for _ in range(3):
        call(kernel, *pair())
    with monkeypatch.context() as told:
        told.setattr(launches.knobs.runtime, "debug", True)
        call(kernel, *pair())
    with monkeypatch.context() as told:
        told.setattr(kernel, "pre_run_hooks", (print,), raising=False)
        call(kernel, *pair())
    assert (len(kernel.jitted), len(kernel.kept)) == (4, 1)
    call(kernel, *pair())
    assert (len(kernel.jitted), len(kernel.kept)) == (4, 2)


def test_nothing_is_shared_with_what_is_made_anew() -> None:
    kernel = Kernel()
    for _ in range(3):
        call(kernel, *pair())
    with launches.anew():
        call(kernel, *pair())
    assert (len(kernel.jitted), len(kernel.kept)) == (3, 1)
    call(kernel, *pair())
    assert (len(kernel.jitted), len(kernel.kept)) == (3, 2)


def test_lengths_that_never_come_again_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "KEPT", 8)
    kernel = Kernel()
    for rows in range(1, 30):
        call(kernel, *pair(rows))
    assert len(launches._launches) <= 8
    for _ in range(3):
        call(kernel, *pair())
    assert len(kernel.kept) == 1


PASSES = {"forward": 45, "backward": 50}
"""Python calls within the library of one call as in training, by pass, with a few to spare."""


def test_a_call_is_few_python_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's time is counted, not measured: kernels do nothing, passes are repeated."""
    monkeypatch.setattr(launches, "CompiledKernel", Compiled)
    monkeypatch.setattr(launches, "_below", lambda compiled, grid: (lambda *_: None, [{}] * 20))
    monkeypatch.setattr(launches, "_current_stream", lambda device: 0)
    monkeypatch.setattr(passes, "_stream", lambda device: 0)
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda x, meta: [x.base.data_ptr()])
    monkeypatch.setattr(configs, "arch_of", lambda device: "sm90")
    for module in (hopper, preprocess):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            fake = Anything(getattr(module, name).arg_names)
            monkeypatch.setattr(module, name, fake)
    q, k, v = (torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    dout = torch.zeros_like(q)

    def forward() -> torch.Tensor:
        return stable_attention(q, k, v, layout="bhsd", causal=True)

    for _ in range(4):
        out = forward()
        torch.autograd.grad(out, (q, k, v), dout)
    out = forward()
    both = {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
    }
    for name, run in both.items():
        seen: collections.Counter[str] = collections.Counter()

        def note(frame: FrameType, event: str, argument: object, seen=seen) -> None:
            if event == "call" and f"{os.sep}stable_attention{os.sep}" in frame.f_code.co_filename:
                seen[frame.f_code.co_name] += 1

        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
        assert 10 < seen.total() <= PASSES[name], (name, seen.most_common(20))


class Anything:
    """Stands for a jitted function that does nothing."""

    pre_run_hooks: tuple[object, ...] = ()

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *positional, **named: Compiled([])


class Driver:
    """A kernel whose C function notes what it is given, under Triton's own encoding."""

    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self, *, listed: bool) -> None:
        self.given: list[tuple[object, ...]] = []
        signature = {0: "*fp32", 1: "tensordesc<fp32[1,16]>", 2: "*fp32", 3: "i32", 4: "constexpr"}
        self.run = SimpleNamespace(
            launch=driver.wrap_handle_tensordesc(self._launch, signature, [{"swizzle": 0}]),
            global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False,
            launch_pdl=False,
        )  # fmt: skip
        if listed:
            self.run.kernel_signature, self.run.arg_annotations = b"", ()

    def _launch(self, *given: object) -> None:
        *first, last = given
        self.given.append((*first, *last) if isinstance(last, list) else given)

    def __getitem__(self, grid: tuple[int, int, int]):
        def run(*_: object) -> None:
            raise AssertionError("through Triton's own launch")

        return run


def test_the_c_function_is_given_what_triton_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of Triton 3.6, and of 3.7 (arguments in a list); descriptors are encoded once."""
    encoded: list[int] = []

    def encode(x: TensorDescriptor, meta: object) -> list[object]:
        encoded.append(x.base.data_ptr())
        return [("map", x.base.data_ptr()), *x.shape, *x.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    active = SimpleNamespace(get_current_stream=lambda device: 0)
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
    monkeypatch.setattr(launches, "triton", SimpleNamespace(runtime=runtime))
    for listed in (False, True):
        x, y = pair()
        compiled = Driver(listed=listed)
        kept = launches._Launch(Kernel(), compiled, arguments(x, y), (x, y))
        addresses = [x.data_ptr(), y.data_ptr()]
        assert kept._call is not None
        encoded.clear()
        for _ in range(3):
            kept((x, y), addresses)
        assert len(encoded) == 1
        call = compiled.given[-1]
        expected = [addresses[0], ("map", addresses[0]), 3, 16, 16, 1, addresses[1], 3, 7]
        assert list(call[-len(expected) :]) == expected
        assert call[:7] == (3, 1, 1, 0, 11, False, False)
        other = torch.zeros(3, 16)
        kept((other, y), [other.data_ptr(), y.data_ptr()])
        assert ("map", other.data_ptr()) in compiled.given[-1]
    monkeypatch.setattr(launches, "KNOWN", False)  # another Triton: through its own launch
    assert launches._Launch(Kernel(), compiled, arguments(x, y), (x, y))._call is None
