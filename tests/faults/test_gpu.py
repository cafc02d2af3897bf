"""What only a GPU shows: the event clock of the straggler report, NCCL's flight recorder."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

RECORD = """
import os, sys
from pathlib import Path
from megatron_patch.faults import hang, stacks
folder = Path(sys.argv[1])
hang.record_collectives(folder)
import torch
torch.cuda.set_device(0)
torch.distributed.init_process_group(
    "nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0),
    store=torch.distributed.HashStore())
torch.distributed.all_reduce(torch.ones(8, device="cuda"))
torch.cuda.synchronize()
stacks.RECORDER_SECONDS = 120  # the first answer of a busy machine, asked for by a test
print(stacks.dump_recorder(folder, 0))
torch.distributed.destroy_process_group()
"""


def test_the_event_clock_counts_device_time_without_waiting():
    import torch

    from megatron_patch.faults.straggler import _DeviceClock

    clock = _DeviceClock()
    clock.begin()
    torch.cuda._sleep(200_000_000)
    clock.end()
    assert clock.seconds() == 0.0, "the device is still at it, and nobody waited"
    torch.cuda.synchronize()
    assert 0.02 < clock.seconds() < 2.0


def test_the_recorder_leaves_a_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RECORD, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=300, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nccl_trace_rank_0, " in done.stdout
    assert (tmp_path / "nccl_trace_rank_0").stat().st_size > 100
