"""JAX over several processes, each with some of the devices, and arrays that go from one mesh to another."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from jaxllm import compat
from jaxllm.errors import ConfigError, one_line
from jaxllm.sharding import nvidia
from jaxllm.sharding.devices import expected_platform
from jaxllm.sharding.mesh import named_sharding, processes_of

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


class HandOver(Protocol):
    """The way from one mesh to another. Every process calls it for each array, in the same order, and never waits."""

    def __call__(self, array: jax.Array | None, form: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Hand on an array of this form that every source device has whole.

        `array` is None in a process without source devices, and so is what is returned in one without any that take it.
        """
        ...


class Copied:
    """JAX copies the array; on GPUs also from one process to another."""

    def __init__(self, source: Mesh, target: Mesh):
        self._source, self._target = named_sharding(source, ()), named_sharding(target, ())
        here = jax.process_index()
        self._gives, self._takes = here in processes_of(source), here in processes_of(target)

    def __call__(self, array: jax.Array | None, form: jax.ShapeDtypeStruct) -> jax.Array | None:
        if not (self._gives or self._takes):
            return None
        if array is None:
            array = jax.make_array_from_single_device_arrays(form.shape, self._source, [], dtype=form.dtype)
        found = jax.device_put(array, self._target)
        return found if self._takes else None


class Exchange:
    """What processes whose devices do not reach each other send arrays by: a server in each, and connections to others.

    Whoever takes an array names it by a number. All count alike, from a number on that only they know.
    """

    def __init__(self, server: Any, addresses: Sequence[str], first: int):
        """`addresses` are those of all processes' servers; `first` is what all begin to count from."""
        self._server, self._addresses = server, addresses
        self._numbers = itertools.count(first)
        self._connections: dict[int, Any] = {}

    def number(self) -> int:
        """That of the next array, here and in every other process."""
        return next(self._numbers)

    def offer(self, number: int, array: jax.Array) -> None:
        """Keep an array of one device until it is taken, also while it is still being computed."""
        self._server.await_pull(number, [array])

    def take(self, number: int, process: int, device: jax.Device, form: jax.ShapeDtypeStruct) -> jax.Array:
        """What that process offers by this number, on one of this process's devices once it is there."""
        if process not in self._connections:
            self._connections[process] = self._server.connect(self._addresses[process])
        wanted = jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=SingleDeviceSharding(device))
        found: jax.Array = self._connections[process].pull(number, [wanted])[0]
        return found


class Pulled:
    """Each process that needs the array takes it from one that has it, and gives all of its devices a copy."""

    def __init__(self, source: Mesh, target: Mesh, exchange: Exchange):
        self._exchange = exchange
        self._here = jax.process_index()
        givers, takers = processes_of(source), processes_of(target)
        self._pairs = [(givers[at % len(givers)], taker) for at, taker in enumerate(takers)]
        self._sharding = named_sharding(target, ())
        self._devices = [device for device in target.devices.flat if device.process_index == self._here]

    def __call__(self, array: jax.Array | None, form: jax.ShapeDtypeStruct) -> jax.Array | None:
        found = None
        for giver, taker in self._pairs:
            number = self._exchange.number()
            if giver == self._here:
                assert array is not None, "this process has the devices that give it"
                self._exchange.offer(number, array.addressable_shards[0].data)
            if taker == self._here:
                found = self._exchange.take(number, giver, self._devices[0], form)
        if found is None:
            return None
        copies = [jax.device_put(found, device) for device in self._devices]
        return jax.make_array_from_single_device_arrays(form.shape, self._sharding, copies)


def hand_over(source: Mesh, target: Mesh, exchange: Exchange | None) -> HandOver:
    """The way from one mesh to another; `exchange` is there where JAX copies nothing between processes."""
    if exchange is None or processes_of(source) == processes_of(target):
        return Copied(source, target)
    return Pulled(source, target, exchange)
