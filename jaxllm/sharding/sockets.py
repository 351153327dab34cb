"""Sockets that several threads use: connections are taken as they come, and what waits at one can be interrupted.
Also ports for those that are yet to be opened.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


def accept_each(listener: socket.socket, most: int, name: str, serve: Callable[[socket.socket, str], None]) -> None:
    """Have `serve` called with each connection and the address that it comes from, on a daemon thread of that name.

    At most so many run at a time; further connections are closed at once. Returns when the listener is closed.
    """
    free = threading.Semaphore(most)

    def run(connection: socket.socket, source: str) -> None:
        try:
            serve(connection, source)
        finally:
            free.release()

    while True:
        try:
            connection, source = listener.accept()
        except OSError:
            return
        if not free.acquire(blocking=False):
            connection.close()
            continue
        threading.Thread(target=run, args=(connection, source[0]), name=name, daemon=True).start()


def free_port(address: str = "127.0.0.1") -> int:
    """One that nobody listens on at this moment; an empty address is all of them."""
    with socket.create_server((address, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def interrupt(waited_at: socket.socket) -> None:
    """Whoever accepts, receives or sends there stops waiting, with an OSError or at the end of what comes."""
    with suppress(OSError):  # it has ended meanwhile
        waited_at.shutdown(socket.SHUT_RDWR)
