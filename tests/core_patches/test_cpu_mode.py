"""CPU mode answers Megatron-Core's CUDA assumptions, and leaves nothing behind when undone."""

import logging

import pytest
import torch
import torch.distributed as dist
from megatron_cpu import reseed, single_rank

from megatron_patch.core_patches import cpu_mode


@pytest.fixture(scope="class")
def rank():
    with single_rank():
        yield


def dropout(x):
    return torch.nn.functional.dropout(x, 0.5)


def in_tensor_parallel_region(x):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        return dropout(x)


@pytest.mark.usefixtures("rank")
class TestInstalled:
    @pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda"), None])
    def test_every_way_to_ask_for_the_gpu(self, device):
        target = torch.cuda.current_device() if device is None else device
        made = [
            torch.empty(2, device=target),
            torch.tensor([1.0], device=target),
            torch.zeros(2, device=target, pin_memory=True),
            torch.empty_like(torch.ones(2), device=target),
            torch.ones(2).new_empty(3, device=target),
            torch.ones(2).to(target),
            torch.ones(2).to(target, non_blocking=True),
            torch.ones(2).to(device=target, dtype=torch.bfloat16),
            torch.ones(2).cuda(),
            torch.ones(2).pin_memory(),
            torch.nn.Linear(2, 2).to(target).weight,
            torch.arange(4, device=target),
        ]
        assert {t.device.type for t in made} == {"cpu"}
        assert made[7].dtype == torch.bfloat16

    def test_other_devices_and_arguments_pass_through(self):
        assert torch.empty(1, device="meta").device.type == "meta"
        assert torch.ones(2).to("meta").device.type == "meta"
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        assert torch.ones(2).type(torch.float16).dtype == torch.float16

    def test_type_names_sort_parameters_as_on_a_gpu(self):
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"

    def test_streams_events_memory_and_ranges(self):
        side = torch.cuda.Stream()
        event = torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            event.record(side)
            torch.ones(1).record_stream(side)
        torch.cuda.current_stream().wait_event(event)
        side.record_event().synchronize()
        assert side == torch.cuda.current_stream() and event.query() and side.query()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.nvtx.range_push("x")
        torch.cuda.nvtx.range_pop()
        assert torch.cuda.is_current_stream_capturing() is False
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 0
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0

    def test_random_streams_are_independent_and_repeat(self):
        x = torch.ones(4096)
        reseed(3)
        default, forked = dropout(x), in_tensor_parallel_region(x)
        reseed(3)
        assert torch.equal(in_tensor_parallel_region(x), forked)
        assert torch.equal(dropout(x), default), "the fork must not move the default stream"
        assert not torch.equal(default, forked)

    def test_tensor_parallel_ranks_draw_differently(self):
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        x = torch.ones(4096)
        draws = []
        for tp_rank in (0, 1):
            model_parallel_cuda_manual_seed(3, tp_rank=tp_rank, force_reset_rng=True)
            draws.append((dropout(x), in_tensor_parallel_region(x)))
        assert torch.equal(draws[0][0], draws[1][0])
        assert not torch.equal(draws[0][1], draws[1][1])

    @pytest.mark.parametrize("function", [dropout, in_tensor_parallel_region])
    def test_recompute_replays_dropout(self, function):
        """The gradient of x -> dropout(x) is the mask: equal masks mean an exact replay."""
        from megatron.core.tensor_parallel import checkpoint

        reseed(5)
        x = torch.ones(4096, requires_grad=True)
        out = checkpoint(function, False, x)
        dropout(torch.ones(7))  # the stream moves on between forward and backward
        state = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(x.grad, out.detach())
        assert torch.equal(torch.get_rng_state(), state), "the backward must restore the stream"

    def test_recompute_may_ask_for_the_gpu(self):
        """As the mask of Megatron-Core's unfused attention does."""
        from megatron.core.tensor_parallel import checkpoint

        def masked(x):
            assert torch.ones(1).type() == "torch.cuda.FloatTensor", "the mode is on, once"
            return x * torch.ones(3, device="cuda")

        x = torch.ones(3, requires_grad=True)
        checkpoint(masked, False, x).sum().backward()
        assert torch.equal(x.grad, torch.ones(3))

    def test_a_fork_is_not_reported_as_a_leak(self, caplog):
        with caplog.at_level(logging.WARNING):
            in_tensor_parallel_region(torch.ones(4))
        assert not caplog.records

    def test_the_average_that_gloo_lacks(self):
        x = torch.full((3,), 6.0)
        assert dist.all_reduce(x, op=dist.ReduceOp.AVG) is None
        assert torch.equal(x, torch.full((3,), 6.0))
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        with pytest.raises(ValueError, match="average_in_collective"):
            dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True)

    def test_split_sizes_may_be_tensors(self):
        out, sent = torch.empty(4), torch.arange(4.0)
        sizes = torch.tensor([4])
        dist.all_to_all_single(out, sent, output_split_sizes=sizes, input_split_sizes=sizes)
        assert torch.equal(out, sent)

    def test_compiled_functions_run_eagerly(self):
        ran = []

        @torch.compile
        def function(x):
            ran.append(type(x))  # a tracer would see a fake tensor
            return x + 1

        assert torch.equal(function(torch.zeros(2)), torch.ones(2)) and ran == [torch.Tensor]

    def test_installing_again_changes_nothing(self, caplog):
        before = (torch.cuda.synchronize, torch.cuda.Stream)
        with caplog.at_level(logging.WARNING):
            cpu_mode.install()
        assert (torch.cuda.synchronize, torch.cuda.Stream) == before and not caplog.records


def test_uninstall_restores_every_function():
    names = ["current_device", "synchronize", "Stream", "Event", "manual_seed", "get_rng_state"]
    originals = [getattr(torch.cuda, name) for name in names]
    all_reduce = dist.all_reduce
    cpu_mode.install()
    try:
        assert all(getattr(torch.cuda, n) is not o for n, o in zip(names, originals, strict=True))
    finally:
        cpu_mode.uninstall()
    assert [getattr(torch.cuda, name) for name in names] == originals
    assert dist.all_reduce is all_reduce
    assert torch.ones(1).type() == "torch.FloatTensor"
    for call in (
        ()
        if torch.cuda.is_available()
        else (
            lambda: torch.empty(1, device="cuda"),
            lambda: torch.ones(1).cuda(),
            torch.cuda.current_device,
            torch.cuda.Stream,
            torch.cuda.synchronize,
            torch.cuda.current_stream,
        )
    ):
        with pytest.raises((AssertionError, RuntimeError)):  # what works above
            call()


@pytest.mark.parametrize(("rank_name", "lines"), [("0", 1), ("1", 0)])
def test_one_line_announces_it_on_the_first_rank(rank_name, lines, monkeypatch, caplog):
    monkeypatch.setenv("RANK", rank_name)
    try:
        cpu_mode.install()
        cpu_mode.install()
    finally:
        cpu_mode.uninstall()
    assert [r.getMessage() for r in caplog.records] == [cpu_mode.ANNOUNCEMENT] * lines
