"""How a rank finds its place, with and without torchrun."""

from __future__ import annotations

import os
import socket

import pytest
from run_config import run_config

from megatron_patch.parallel import setup

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "host",
       "MASTER_PORT": "29500"}  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(setup, "_own_port", None)  # as in a process that has just started


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["", None])
def test_a_variable_that_is_missing_starts_no_world_of_one(monkeypatch, name, value):
    """Without MASTER_PORT every rank once trained alone."""
    for key, text in (TWO | {name: value}).items():
        if text is not None:
            monkeypatch.setenv(key, text)
    with pytest.raises(setup.LayoutError, match=f"set but {name} not"):
        setup._launch_environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "2"), ("RANK", "-1"), ("RANK", "x"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "2.0"),
     ("LOCAL_RANK", "2"), ("LOCAL_RANK", "\u0661"), ("MASTER_PORT", "65536"),
     ("WORLD_SIZE", "9" * 5000)],
)  # fmt: skip
def test_a_variable_of_no_rank_is_refused_by_name(monkeypatch, name, value):
    for key, text in (TWO | {name: value}).items():
        monkeypatch.setenv(key, text)
    with pytest.raises(setup.LayoutError, match=f"{name} is '{value[:40]}' in the environment"):
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
