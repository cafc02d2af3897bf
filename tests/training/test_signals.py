"""Stop flags as handlers and clock raise them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_patch.training.signals import (
    NO_STOP,
    STOP_INT,
    STOP_TERM,
    STOP_TIME,
    STOP_USR1,
    StopFlags,
)


@pytest.fixture
def flags():
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    found = StopFlags()
    found.install()
    yield found
    found.restore()
    assert all(signal.getsignal(number) == handler for number, handler in before.items())


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, STOP_TERM), (signal.SIGUSR1, STOP_USR1), (signal.SIGINT, STOP_INT)],
)
def test_a_signal_raises_a_flag_and_nothing_else(flags, number, code):
    assert flags.code() == NO_STOP
    os.kill(os.getpid(), number)
    assert flags.code() == code
    assert flags.code() == code  # stays raised


def test_a_signal_that_was_blocked_by_whoever_started_us_is_heard():
    """The mask is inherited through torchrun; a blocked request to stop would wait for ever."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        found = StopFlags()
        found.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert found.code() == STOP_USR1
        found.restore()
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


COMPILES = """
import os, signal, sys, time
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from megatron_patch.runtime import handlers
from megatron_patch.training.signals import NO_STOP, StopFlags

@triton.jit
def double(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(x + i, tl.load(x + i) * 2)

flags = StopFlags()
flags.install()
source = ASTSource(double, {"x": "*fp32", "n": "constexpr"}, {"n": 128})
compile(source, target=GPUTarget("cuda", 90, 32))
time.sleep(3 * handlers.LOOK_SECONDS)
number = getattr(signal, sys.argv[1])
os.kill(os.getpid(), number)
time.sleep(0.1)
heard = flags.code() != NO_STOP
flags.restore()
sys.exit(0 if heard and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL else 9)
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "SIGINT"])
def test_a_signal_is_heard_after_triton_has_compiled(name, tmp_path):
    """Its LLVM takes SIGUSR1 and keeps it: Slurm's notice of the time limit would be lost."""
    script = tmp_path / "compiles.py"  # triton.jit reads its source from a file
    script.write_text(COMPILES)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_ALWAYS_COMPILE": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script), name], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_second_interrupt_interrupts(flags):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_time_limit():
    assert StopFlags(limit_minutes=1e-9).code() == STOP_TIME
    assert StopFlags(limit_minutes=60).code() == NO_STOP
