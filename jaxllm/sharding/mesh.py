"""The device mesh and how a parameter's axes become its sharding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import compat
from jaxllm.errors import ConfigError
from jaxllm.sharding.devices import find_devices

TENSOR = "tensor"
DATA = "data"

HOST_MEMORY = "pinned_host"
"""What JAX calls memory of the host that devices read by themselves."""

EVERY = (DATA, TENSOR)
"""Both axes: an array whose dimension lies along them has a piece on every device."""

Axes = tuple[str | tuple[str, ...] | None, ...]
"""For each dimension of an array the mesh axis that divides it, several, or None."""


def num_pieces(axes: Axes, tp: int, dp: int = 1) -> int:
    """Into how many pieces a mesh of `(data=dp, tensor=tp)` divides an array."""
    sizes = {DATA: dp, TENSOR: tp}
    names = [name for axis in axes if axis for name in ([axis] if isinstance(axis, str) else axis)]
    return math.prod(sizes[name] for name in names)


def build_mesh(tensor_parallel_size: int, data_parallel_size: int = 1) -> Mesh:
    """A `(data_parallel_size, tensor_parallel_size)` mesh over the first devices of the default platform.

    Where there are several processes, each has as many of them.

    Raises:
        ConfigError: there are fewer devices than asked for, or an NVIDIA GPU that JAX cannot run on.
    """
    return build_meshes(tensor_parallel_size, 1, data_parallel_size)[0]


def build_meshes(tensor_parallel_size: int, pipeline_parallel_size: int, data_parallel_size: int = 1) -> list[Mesh]:
    """One such mesh for each stage, over the next devices each; process 0, which reads what the last stage gives, has
    that one. Raises as `build_mesh`.
    """
    tp, dp = tensor_parallel_size, data_parallel_size
    of_stage, count = dp * tp, dp * tp * pipeline_parallel_size
    devices = _evenly(find_devices(), count)
    if count > len(devices):
        hint = f" (set JAX_NUM_CPU_DEVICES={count} for virtual ones)" if devices[0].platform == "cpu" else ""
        stages = f" and pipeline_parallel_size {pipeline_parallel_size}" if pipeline_parallel_size > 1 else ""
        batches = f" and data_parallel_size {dp}" if dp > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size is {tp}{stages}{batches}, but this machine has {len(devices)} {devices[0].platform} "
            f"device(s){hint}"
        )
    starts = list(range(0, count, of_stage))
    if len({device.process_index for device in devices}) > 1:
        starts.reverse()
    return [compat.make_mesh((dp, tp), (DATA, TENSOR), devices=devices[start : start + of_stage]) for start in starts]


def _evenly(devices: Sequence[jax.Device], count: int) -> Sequence[jax.Device]:
    """The first `count` devices, equally many of each process. Raises ConfigError where one has too few."""
    processes = sorted({device.process_index for device in devices})
    if len(processes) == 1:
        return devices
    each = count // len(processes)
    chosen = []
    for process in processes:
        its = [device for device in devices if device.process_index == process]
        if len(its) < each:
            hint = f" (set JAX_NUM_CPU_DEVICES={each} for virtual ones)" if its[0].platform == "cpu" else ""
            raise ConfigError(
                f"the model takes {count} devices of {len(processes)} processes, but process {process} has {len(its)} "
                f"{its[0].platform} device(s){hint}"
            )
        chosen += its[:each]
    return chosen


def local_device(meshes: Sequence[Mesh]) -> jax.Device:
    """A device of the meshes that this process can ask: the first where it has all of them."""
    here = jax.process_index()
    return next(device for mesh in meshes for device in mesh.devices.flat if device.process_index == here)


def processes_of(mesh: Mesh) -> list[int]:
    """The numbers of the processes that have its devices, from the lowest on."""
    return sorted({device.process_index for device in mesh.devices.flat})


def is_here(mesh: Mesh) -> bool:
    """Whether this process has any of its devices."""
    return jax.process_index() in processes_of(mesh)


def put(array: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array that is whole in this process's memory, onto the devices; every process puts its own part there."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def named_sharding(mesh: Mesh | AbstractMesh, axes: Axes, *, on_host: bool = False) -> NamedSharding:
    """The sharding of an array whose dimensions lie along `axes`; `on_host` its parts are in the memory of the hosts of
    their devices, which can read it there.
    """
    return NamedSharding(mesh, P(*axes), memory_kind=HOST_MEMORY if on_host else None)
