"""The device mesh and how a parameter's axes become its sharding."""

from __future__ import annotations

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import compat
from jaxllm.errors import ConfigError
from jaxllm.sharding.devices import find_devices

TENSOR = "tensor"
DATA = "data"

Axes = tuple[str | None, ...]
"""One mesh axis name or None for each dimension of an array."""


def build_mesh(tensor_parallel_size: int) -> Mesh:
    """A `(data=1, tensor=tensor_parallel_size)` mesh over the first devices of the default platform.

    Raises:
        ConfigError: there are fewer devices than asked for, or an NVIDIA GPU that JAX cannot run on.
    """
    devices = find_devices()
    if tensor_parallel_size > len(devices):
        hint = (
            f" (set JAX_NUM_CPU_DEVICES={tensor_parallel_size} for virtual ones)"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but this machine has {len(devices)} "
            f"{devices[0].platform} device(s){hint}"
        )
    return compat.make_mesh((1, tensor_parallel_size), (DATA, TENSOR), devices=devices[:tensor_parallel_size])


def named_sharding(mesh: Mesh, axes: Axes) -> NamedSharding:
    """The sharding of an array whose dimensions lie along `axes`."""
    return NamedSharding(mesh, P(*axes))
