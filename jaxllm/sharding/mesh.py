"""The device mesh, how parameters lie on it (from a checkpoint's tensors to shards), and collectives across it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

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


@dataclass(frozen=True)
class Segment:
    """Rows of one checkpoint tensor inside a fused parameter (channels, where the layout's axis is not the first).

    `rows` are the tensor's own rows; `shards` is how many different pieces they are cut into. With fewer shards than
    devices each piece is repeated, which is how KV heads are replicated where there are more devices than heads.
    """

    rows: int
    shards: int


@dataclass(frozen=True)
class Layout:
    """How a parameter is laid out from checkpoint tensors along one axis, device by device.

    Worked example, two devices, `q` of 4 rows in 2 shards and `k` of 2 rows in 1 shard:

        device 0: q0 q1 k0 k1      device 1: q2 q3 k0 k1      so the whole parameter has 8 rows
    """

    segments: tuple[Segment, ...]
    tp: int
    axis: int = 0
    pad_to: int = 0
    """Rows after zero padding (vocabularies); 0 is no padding."""

    @property
    def rows(self) -> int:
        return self.pad_to or sum(self.tp * s.rows // s.shards for s in self.segments)

    @property
    def stored_rows(self) -> int:
        """Rows as a checkpoint has them: without padding or replicas."""
        return sum(s.rows for s in self.segments)

    def assemble(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The whole parameter from one tensor a segment, or from one that holds them all in their order."""
        if self.pad_to:
            (tensor,) = tensors
            padding = [(0, 0)] * tensor.ndim
            padding[self.axis] = (0, self.pad_to - tensor.shape[self.axis])
            return np.pad(tensor, padding) if any(after for _, after in padding) else tensor
        if self.tp == 1:
            return tensors[0] if len(tensors) == 1 else np.concatenate(tensors, self.axis)
        if len(tensors) == 1:
            tensors = np.split(tensors[0], np.cumsum([s.rows for s in self.segments])[:-1], self.axis)
        parts = []
        for device in range(self.tp):
            for tensor, segment in zip(tensors, self.segments, strict=True):
                size = segment.rows // segment.shards
                shard = device * segment.shards // self.tp
                parts.append(np.take(tensor, range(shard * size, (shard + 1) * size), self.axis))
        return np.concatenate(parts, self.axis)


def split_rows(rows: int, tp: int) -> Layout:
    """One tensor cut into `tp` equal pieces."""
    return Layout((Segment(rows, tp),), tp)


def padded_rows(rows: int, tp: int, multiple: int = 64) -> Layout:
    """One tensor padded with zero rows until every device has the same, whole multiple of rows."""
    unit = multiple * tp
    return Layout((Segment(rows, tp),), tp, pad_to=math.ceil(rows / unit) * unit)


def place(layout: Layout | None, tensors: Iterable[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The whole parameter in `dtype`; each tensor is cast by itself, so that nothing wider is ever whole."""
    cast = [tensor.astype(dtype, copy=False) for tensor in tensors]
    return cast[0] if layout is None else layout.assemble(cast)


def tensor_rank() -> jax.Array:
    """This device's place along the tensor axis."""
    return lax.axis_index(TENSOR)


def tensor_size() -> int:
    """The degree of tensor parallelism, a Python int."""
    return lax.axis_size(TENSOR)


def sum_over_tensor(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Add the partial results of every device of the tensor axis."""
    return lax.psum(x, TENSOR) if tensor_size() > 1 else x


def gather_over_tensor(x: Float[Array, "... n"]) -> Float[Array, "... m"]:
    """Lay the last axes of every device of the tensor axis end to end."""
    return lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True) if tensor_size() > 1 else x


def device_rank() -> jax.Array:
    """This device's place among all: along the tensor axis first."""
    return lax.axis_index(EVERY)


def data_size() -> int:
    """How many batches run side by side, a Python int."""
    return lax.axis_size(DATA)


def gather_over_data(tree: Any) -> Any:
    """Arrays of every batch, one batch after the other along a new first axis: `[n, ...]` becomes `[batches, n, ...]`.

    All arrays travel as bytes in one collective: several that do not wait for each other might begin in another order
    in another process.
    """
    arrays, form = jax.tree.flatten(tree)
    sent = [lax.bitcast_convert_type(a, jnp.uint8).ravel() for a in arrays]
    found = lax.all_gather(jnp.concatenate(sent), DATA)
    parts = jnp.split(found, list(itertools.accumulate(part.size for part in sent))[:-1], axis=1)
    return jax.tree.unflatten(form, [_of_bytes(part, a) for part, a in zip(parts, arrays, strict=True)])


def _of_bytes(part: jax.Array, like: jax.Array) -> jax.Array:
    """`[batches, bytes]` -> as many arrays as `like`."""
    size = like.dtype.itemsize
    shape = (part.shape[0], *like.shape, *([size] if size > 1 else []))
    return lax.bitcast_convert_type(part.reshape(shape), like.dtype)


def share_out_over_data(x: Float[Array, "m ..."]) -> Float[Array, "n ..."]:
    """Add what the devices of the data axis have for the rows of every batch, and keep those of this one."""
    return lax.psum_scatter(x, DATA, scatter_dimension=0, tiled=True) if data_size() > 1 else x


def own_rows(x: Shaped[Array, "m ..."]) -> Shaped[Array, "n ..."]:
    """Of the rows of every batch, one batch after the other, those of this one."""
    count = x.shape[0] // data_size()
    return lax.dynamic_slice_in_dim(x, lax.axis_index(DATA) * count, count)
