"""JAX over several processes, each with some of the devices."""

from __future__ import annotations

import os

from jaxllm import compat
from jaxllm.errors import ConfigError, one_line
from jaxllm.sharding import nvidia
from jaxllm.sharding.devices import expected_platform

HEARTBEAT_SECONDS = 15
"""JAX ends a process whose coordinator, or another process, has been silent for so long."""
MEETING_SECONDS = 120
CPU_THREADS = 16
"""Of XLA's pool on a CPU: a collective waits in one of them for the other processes."""


def join(address: str, number: int, count: int, devices: list[int], shares_steps: bool) -> None:
    """Make this process one of several for JAX; its backends must not have started. Returns when all have come.

    `devices` are those of its machine that it uses, see `local_devices`. With `shares_steps` several processes have
    devices of one mesh.

    Raises:
        ConfigError: JAX has started already, or its coordinator cannot be reached.
    """
    if compat.backends_run():
        raise ConfigError(
            f"num_processes is {count}, but JAX has started in this process: make the engine before you compute"
        )
    if expected_platform() == "cpu":
        os.environ.setdefault("NPROC", str(CPU_THREADS))
    try:
        compat.join_processes(
            address,
            number,
            count,
            devices,
            shares_steps=shares_steps,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            meeting_seconds=MEETING_SECONDS,
        )
    except RuntimeError as error:
        raise ConfigError(f"JAX's coordinator at {address} cannot be used: {one_line(error)}") from None


def local_devices(each: int, place: int, neighbours: int) -> list[int]:
    """The `each` devices of a process that is the `place`th of some on its machine.

    Where whatever started the processes has given each of them GPUs of its own, these are the first that it sees.
    """
    cards = len(nvidia.cards()) if nvidia.installed_cuda() is not None else 0
    first = each * place if cards >= each * neighbours else 0
    return list(range(first, first + each))
