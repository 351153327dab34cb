"""The machine that an engine is planned for."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxllm import compat, machine
from jaxllm.sharding.devices import find_devices


def prepare_backend(utilization: float) -> None:
    """Before JAX's backend starts: how much of an accelerator's memory it takes, and how many of the host's cores."""
    compat.share_device_memory(utilization)
    if (count := machine.compute_threads()) < machine.allowed_cores():
        compat.keep_to_cores(count)


@dataclass(frozen=True)
class Platform:
    """The machine as far as planning goes; bytes are a device's."""

    name: str
    num_devices: int
    memory_limit: int | None
    """Bytes that one device lets this process use; None on CPU, where free memory of the host decides."""
    free_host_memory: int
    memory: int | None = None
    """Bytes that one device has, of which gpu_memory_utilization is a share; None: as much as `memory_limit`."""
    device: str = ""
    """Its maker's name for it."""
    host_memory: int | None = None
    """Bytes of the host that this process may use in all; None: not known."""

    @classmethod
    def current(cls, utilization: float) -> Platform:
        """JAX's platform in this process, of whose memory an accelerator's share is asked for if it has not started."""
        prepare_backend(utilization)
        return cls.of(find_devices()[0])

    @classmethod
    def of(cls, device: jax.Device) -> Platform:
        """The machine that a mesh's device is one of."""
        memory = compat.device_memory(device)
        limit, total = memory or (None, None)
        host = machine.memory()
        return cls(
            device.platform, device.client.device_count(), limit, host.available, total, device.device_kind, host.total
        )
