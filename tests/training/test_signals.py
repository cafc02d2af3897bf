"""Stop flags as handlers and clock raise them."""

import os
import signal
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
    [
        (signal.SIGTERM, STOP_TERM),
        (signal.SIGUSR1, STOP_USR1),
        (signal.SIGINT, STOP_INT),
    ],
)
def test_a_signal_raises_a_flag_and_nothing_else(flags, number: int, code: int) -> None:
    assert flags.code() == NO_STOP
    os.kill(os.getpid(), number)
    assert flags.code() == code
    assert flags.code() == code  # stays raised


def test_a_signal_that_was_blocked_by_whoever_started_us_is_heard() -> None:
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


def test_a_second_interrupt_interrupts(flags) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_time_limit() -> None:
    assert StopFlags(limit_minutes=1e-9).code() == STOP_TIME
    assert StopFlags(limit_minutes=60).code() == NO_STOP
