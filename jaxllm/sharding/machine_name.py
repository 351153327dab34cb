"""What tells the machines of a group apart."""

from __future__ import annotations

import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> tuple[str, str]:
    """The host's name, and what no other host of that name says; a container has a name of its own."""
    host = socket.gethostname()
    return host, f"{host} {BOOT_ID.read_text().strip()}" if BOOT_ID.exists() else host
