"""How a rank finds its place, with and without torchrun."""

from __future__ import annotations

import os
import socket

import pytest
from run_config import run_config

from megatron_patch.parallel import setup

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_without_torchrun_there_is_a_world_of_one():
    assert setup.launched_world_size() == 1
    *where, store = setup._launch_environment()
    assert where == [0, 1, 0] and str(store.port) == os.environ["MASTER_PORT"]
    # Another process cannot take the port before it is used, nor is a second start in its way.
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", store.port))
    assert setup._launch_environment()[3].port != store.port
    assert int(os.environ["MASTER_PORT"]) > 0


def test_torchrun_is_believed(monkeypatch):
    for name, value in zip(NAMES, ("3", "4", "1", "host", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert setup._launch_environment() == (3, 4, 1, None)


def test_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(setup.LayoutError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT not"):
        setup._launch_environment()


def test_what_the_user_set_wins(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    setup._communication_environment(run_config(parallel={"tensor_model_parallel_size": 2}))
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_context_parallelism_keeps_the_order_of_launches(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    setup._communication_environment(run_config())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    setup._communication_environment(run_config(parallel={"context_parallel_size": 2}))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
