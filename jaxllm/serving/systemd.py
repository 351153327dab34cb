"""What systemd is told by a service of Type=notify, see sd_notify(3)."""

from __future__ import annotations

import logging
import os
import socket
import time

logger = logging.getLogger(__name__)


def notify(*lines: str) -> None:
    """Send lines such as READY=1 to who has started this process, where that has said where to."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name in the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        logger.warning("systemd was not told %s: %s", lines[0], error.strerror)


class Watchdog:
    """Tells systemd that the event loop turns, twice as often as WatchdogSec asks for; it restarts us otherwise."""

    def __init__(self) -> None:
        asked = os.environ.get("WATCHDOG_USEC", "")
        for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._every = int(asked) / 2e6 if asked.isdecimal() and int(asked) and for_us else None
        self._next = 0.0

    def feed(self) -> None:
        """Call this as often as you like."""
        if self._every is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            notify("WATCHDOG=1")
