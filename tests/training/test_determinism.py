"""What ``training.deterministic`` switches on, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from run_config import run_config

from megatron_patch.schema.problem import ConfigError
from megatron_patch.training import determinism

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    import torch

    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_nothing_happens_unasked():
    determinism.enforce(run_config().training)
    assert not any(name in os.environ for name in VARIABLES)


def test_the_environment_is_filled_in():
    import torch

    determinism.enforce(run_config(training={"deterministic": True}).training)
    assert [os.environ[name] for name in VARIABLES] == [":4096:8", "^NVLS", "0"]
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_ALGO", "NVLS"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0")]
)
def test_a_contradicting_environment_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}; unset it"):
        determinism.enforce(run_config(training={"deterministic": True}).training)


def test_an_accepted_value_of_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    determinism.enforce(run_config(training={"deterministic": True}).training)
    assert os.environ["NCCL_ALGO"] == "Ring"


def test_the_loop_can_be_imported_before_cpu_mode():
    """Importing Megatron first would leave its fused functions under torch.compile."""
    code = (
        "import sys; from megatron_patch.training import trainer; "
        "sys.exit(any(name.startswith('megatron.core') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
