"""The device mesh, how parameters lie on it, collectives across it, and arrays that go from one mesh to another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from jaxllm import compat
from jaxllm.errors import ConfigError
from jaxllm.sharding.devices import find_devices

TENSOR = "tensor"
DATA = "data"

HOST_MEMORY = "pinned_host"  # JAX's name for memory of the host that devices read by themselves

EVERY = (DATA, TENSOR)  # both axes: an array whose dimension lies along them has a piece on every device

Axes = tuple[str | tuple[str, ...] | None, ...]  # the mesh axes, if any, that divide each dimension


def num_pieces(axes: Axes, tp: int, dp: int = 1) -> int:
    """The number of pieces into which a mesh of `(data=dp, tensor=tp)` divides an array."""
    sizes = {DATA: dp, TENSOR: tp}
    names = [name for axis in axes if axis for name in ([axis] if isinstance(axis, str) else axis)]
    return math.prod(sizes[name] for name in names)


def build_meshes(tensor_parallel_size: int, pipeline_parallel_size: int = 1, data_parallel_size: int = 1) -> list[Mesh]:
    """A `(data_parallel_size, tensor_parallel_size)` mesh for each stage, over the first devices of each process.

    Process 0 has the last stage, whose results it reads. Raises ConfigError if there are fewer devices than asked for,
    or an NVIDIA GPU that JAX cannot run on.
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
    """A device of the meshes that this process can ask: the first if it has all of them."""
    here = jax.process_index()
    return next(device for mesh in meshes for device in mesh.devices.flat if device.process_index == here)


def processes_of(mesh: Mesh) -> list[int]:
    """The numbers of the processes that have its devices, in ascending order."""
    return sorted({device.process_index for device in mesh.devices.flat})


def is_here(mesh: Mesh) -> bool:
    return jax.process_index() in processes_of(mesh)


def put(array: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """Put an array that is whole in this process's memory onto the devices; every process puts its own part there."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def named_sharding(mesh: Mesh | AbstractMesh, axes: Axes, *, on_host: bool = False) -> NamedSharding:
    """The sharding of an array along `axes`; with `on_host` in its devices' hosts' memory, where they can read it."""
    return NamedSharding(mesh, P(*axes), memory_kind=HOST_MEMORY if on_host else None)


@dataclass(frozen=True)
class Segment:
    """Rows of one checkpoint tensor inside a fused parameter (channels, if the layout's axis is not the first).

    `rows` are the tensor's own rows; `shards` is the number of different pieces. With fewer shards than devices each
    piece is repeated: KV heads are replicated that way.
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
    pad_to: int = 0  # rows after zero padding (vocabularies); 0 is no padding

    @property
    def rows(self) -> int:
        return self.pad_to or sum(self.tp * s.rows // s.shards for s in self.segments)

    @property
    def stored_rows(self) -> int:
        """Rows as a checkpoint has them: without padding or replicas."""
        return sum(s.rows for s in self.segments)

    def joins_whole(self, tensors: Sequence[Any]) -> bool:
        """The parameter is several tensors one after the other, each of them whole."""
        return len(tensors) > 1 and self.tp == 1 and not self.pad_to

    def assemble(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The whole parameter from one tensor a segment, or from one that holds all of them in order."""
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
    return lax.axis_size(DATA)


def gather_over_data(tree: Any) -> Any:
    """Arrays of all batches, in their order along a new first axis: `[n, ...]` becomes `[batches, n, ...]`.

    All arrays travel as bytes in one collective: several independent ones might begin in another order in another
    process.
    """
    arrays, form = jax.tree.flatten(tree)
    sent = [lax.bitcast_convert_type(a, jnp.uint8).ravel() for a in arrays]
    found = lax.all_gather(jnp.concatenate(sent), DATA)
    parts = jnp.split(found, list(itertools.accumulate(part.size for part in sent))[:-1], axis=1)
    return jax.tree.unflatten(form, [_of_bytes(part, a) for part, a in zip(parts, arrays, strict=True)])


def _of_bytes(part: jax.Array, like: jax.Array) -> jax.Array:
    size = like.dtype.itemsize
    shape = (part.shape[0], *like.shape, *([size] if size > 1 else []))
    return lax.bitcast_convert_type(part.reshape(shape), like.dtype)


def share_out_over_data(x: Float[Array, "m ..."]) -> Float[Array, "n ..."]:
    """Add the data axis's results for the rows of every batch, and keep those of this one."""
    return lax.psum_scatter(x, DATA, scatter_dimension=0, tiled=True) if data_size() > 1 else x


def own_rows(x: Shaped[Array, "m ..."]) -> Shaped[Array, "n ..."]:
    """This batch's rows of those of all batches, which lie one batch after the other."""
    count = x.shape[0] // data_size()
    return lax.dynamic_slice_in_dim(x, lax.axis_index(DATA) * count, count)


HandOver = Callable[[jax.Array | None, jax.ShapeDtypeStruct], jax.Array | None]
"""The way from one mesh to another for an array of a form, which every source device has whole.

Every process calls it for each array, in the same order, and never waits. The array is None in a process without source
devices; the result is None in a process without target devices.
"""


class Exchange:
    """Sends arrays between processes whose devices do not reach each other, through a server in each.

    The receiver names an array by a number. All processes count alike, from a number that only they know.
    """

    def __init__(self, server: Any, addresses: Sequence[str], first: int):
        """`addresses` are those of all processes' servers; `first` is the number that all count from."""
        self._server, self._addresses = server, addresses
        self.numbers = itertools.count(first)
        self._connections: dict[int, Any] = {}

    def offer(self, number: int, array: jax.Array) -> None:
        """Keep an array of one device until it is taken, also while it is still being computed."""
        self._server.await_pull(number, [array])

    def take(self, number: int, process: int, device: jax.Device, form: jax.ShapeDtypeStruct) -> jax.Array:
        """The array that `process` offers under this number, on one of this process's devices once it is there."""
        if process not in self._connections:
            self._connections[process] = self._server.connect(self._addresses[process])
        wanted = jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=SingleDeviceSharding(device))
        found: jax.Array = self._connections[process].pull(number, [wanted])[0]
        return found


def hand_over(source: Mesh, target: Mesh, exchange: Exchange | None) -> HandOver:
    """The way from one mesh to another; `exchange` is there where JAX copies nothing between processes."""
    if exchange is None or processes_of(source) == processes_of(target):
        return _copying(source, target)
    return _pulling(source, target, exchange)


def _copying(source: Mesh, target: Mesh) -> HandOver:
    """JAX copies the array; on GPUs also from one process to another."""
    before, after = named_sharding(source, ()), named_sharding(target, ())
    gives, takes = is_here(source), is_here(target)

    def copy(array: jax.Array | None, form: jax.ShapeDtypeStruct) -> jax.Array | None:
        if not (gives or takes):
            return None
        if array is None:
            array = jax.make_array_from_single_device_arrays(form.shape, before, [], dtype=form.dtype)
        found = jax.device_put(array, after)
        return found if takes else None

    return copy


def _pulling(source: Mesh, target: Mesh, exchange: Exchange) -> HandOver:
    """Each process that needs the array takes it from one that has it, and gives all of its devices a copy."""
    here, givers = jax.process_index(), processes_of(source)
    pairs = [(givers[at % len(givers)], taker) for at, taker in enumerate(processes_of(target))]
    sharding = named_sharding(target, ())
    devices = [device for device in target.devices.flat if device.process_index == here]

    def pull(array: jax.Array | None, form: jax.ShapeDtypeStruct) -> jax.Array | None:
        found = None
        for giver, taker in pairs:
            number = next(exchange.numbers)  # here and in every other process
            if giver == here:
                assert array is not None, "this process has the devices that give it"
                exchange.offer(number, array.addressable_shards[0].data)
            if taker == here:
                found = exchange.take(number, giver, devices[0], form)
        if found is None:
            return None
        copies = [jax.device_put(found, device) for device in devices]
        return jax.make_array_from_single_device_arrays(form.shape, sharding, copies)

    return pull
