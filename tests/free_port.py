"""Ports for processes that bind them later: a port is chosen now, and must still be free then."""

from __future__ import annotations

import random
import socket

BELOW_EPHEMERAL = range(16000, 31000)
"""The kernel gives none of these to a connection that asks for any port."""


def free_port() -> int:
    """A port nobody listens on, and that nobody is given by chance."""
    while True:
        port = random.SystemRandom().choice(BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
