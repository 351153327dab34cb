"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket

PORTS = range(10_000, 30_000, 2)
"""Below those that systems give to connections, or to whoever asks for any port: one of them may be taken meanwhile."""


def free_port() -> int:
    """One that nobody listens on at this moment, nor on the next one."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue
