"""Weights in tiles, made and read on the host, and memory for what every step reads, in pages of 2 MiB.

Looking up the addresses of small pages takes up to a third of a step.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float32, UInt8

from jaxllm import machine
from jaxllm.cpu_kernels.library import call, library

logger = logging.getLogger(__name__)

HUGE = 2 * 2**20
SMALL = 2**16
"""Bytes of an array that is not worth it."""

MADV_COLLAPSE = 25
"""`madvise(2)`: gather memory into huge pages now; since Linux 6.1, whatever /sys says of transparent ones."""

ALIGNMENT = 64
"""Bytes, of the address of a buffer that XLA takes as it is on a CPU."""

CHUNK = 64 * 2**20
"""Bytes that arrays share, and that the system puts into huge pages when they are first written."""


class Room:
    """Memory for arrays that stay, side by side in chunks: nothing is left to gather afterwards.

    A chunk lives as long as the last array in it. What is not written of it takes no memory.
    """

    def __init__(self) -> None:
        self._chunk: weakref.ref[np.ndarray] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> UInt8[np.ndarray, "bytes"]:
        """Bytes that were not written yet, where XLA's buffers may begin."""
        if nbytes > CHUNK // 4:
            return _aligned(_fresh(nbytes + ALIGNMENT), 0, nbytes)
        with self._lock:
            chunk = self._chunk() if self._chunk else None
            if chunk is None or self._end + ALIGNMENT + nbytes > CHUNK:
                chunk, self._end = _fresh(CHUNK), 0
                self._chunk = weakref.ref(chunk)
            taken = _aligned(chunk, self._end, nbytes)
            self._end = taken.ctypes.data + nbytes - chunk.ctypes.data
            return taken


def _fresh(nbytes: int) -> UInt8[np.ndarray, "bytes"]:
    """Memory that nothing was in before: what an allocator has left over lies in small pages already, and stays."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _aligned(room: np.ndarray, start: int, nbytes: int) -> np.ndarray:
    start += -(room.ctypes.data + start) % ALIGNMENT
    return room[start : start + nbytes]


def zeros(shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """`jnp.zeros`, while tracing: on the device that runs it, in huge pages where the system has them."""
    return call("jaxllm_zeros", jax.ShapeDtypeStruct(tuple(shape), dtype))()


def use_huge_pages(arrays: Iterable[jax.Array]) -> int:
    """Gather what the arrays occupy into huge pages, on Linux; returns the bytes, and changes no result."""
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    found = {page for array in arrays for page in _pages(array)}
    # One by one: where there is no memory around an array, a page cannot be gathered.
    gathered = [libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE), MADV_COLLAPSE) == 0 for at in sorted(found)]
    logger.debug("%.0f MiB lie in huge pages", sum(gathered) * HUGE / 2**20)
    return sum(gathered) * HUGE


def _pages(array: jax.Array) -> Iterator[int]:
    """The addresses of the huge pages that an array has a part of, unless it is small."""
    for shard in array.addressable_shards:
        if shard.data.nbytes >= SMALL:
            begin = shard.data.unsafe_buffer_pointer()
            yield from range(begin // HUGE * HUGE, begin + shard.data.nbytes, HUGE)


GROUP = 16
"""Output rows in a tile."""

_room = Room()


FORMATS = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "bf16", "f32", "u4", "i8", "e4m3", "mxfp4",
    "iq4_nl", "iq4_xs", "nvfp4",
)  # fmt: skip
"""How tiles hold weights, in the order of `src/formats.h`: the names are also what `repack` takes them from."""

SCALED = ("i8", "e4m3", "nvfp4")
"""Whose scales lie beside the tiles: float32 `[*stack, groups, runs, 16]`, one for each row and run of inputs."""

FLOATS: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}


def number(format: str) -> int:
    """The library's number of a format. Raises ValueError: no such format."""
    if format.lower() not in FORMATS:
        raise ValueError(f"the format is {format!r}; there are tiles of {', '.join(FORMATS)}")
    return FORMATS.index(format.lower())


IN_BF16 = 64
"""Added to the number of a format whose weights are unpacked to bfloat16; see `src/calls.h`."""


def tile_inputs(format: str) -> int:
    """Inputs in a tile: 32, or 256 in K formats and iq4_xs."""
    return int(library().jaxllm_tile_inputs(number(format)))


def tile_bytes(format: str) -> int:
    return int(library().jaxllm_tile_bytes(number(format)))


def repack(type: str, *parts: np.ndarray) -> UInt8[np.ndarray, "*stack groups blocks bytes"]:
    """Tiles `[*stack, ceil(o / 16), i / block, tile_bytes]` of matrices, whose rows are padded with zeros to 16.

    They lie where JAX on a CPU takes them as they are, without another copy. Several parts lie one after the other.

    Args:
        type: the checkpoint's type, in any case; one of `FORMATS`. Tiles are of the format of that name.
        parts: uint8 `[*stack, o, i / block, block_bytes]` as a GGUF file has them; of `bf16` and `f32`, the matrices
            `[*stack, o, i]` themselves in that type (inputs are padded to 32). Blocks of `u4` are a float16 `d`, the
            code of zero and 32 codes of four bits in GGUF's order; of `i8` and `e4m3` 32 codes; of `nvfp4` two
            scales in e4m3 and 32 codes of four bits.

    Raises ValueError: no such type, or blocks of another size.
    """
    name, kind, lib = type.lower(), number(type), library()
    parts = tuple(_blocks(name, part) for part in parts)
    *stack, _, columns, _ = parts[0].shape
    ends = list(itertools.accumulate((-(-part.shape[-3] // GROUP) for part in parts), initial=0))
    shape = (*stack, ends[-1], columns, tile_bytes(name))
    tiles, threads = _room.take(math.prod(shape)).reshape(shape), machine.compute_threads()
    for part, start in zip(parts, ends, strict=False):
        for index in np.ndindex(*stack):
            into = _address(tiles[index][start:])
            lib.jaxllm_repack(kind, _address(part[index]), part.shape[-3], columns, into, threads)
    return tiles


def _blocks(format: str, blocks: np.ndarray) -> np.ndarray:
    if format in FLOATS:
        blocks = np.asarray(blocks, FLOATS[format])
        if rest := -blocks.shape[-1] % 32:
            blocks = np.pad(blocks, [(0, 0)] * (blocks.ndim - 1) + [(0, rest)])
        blocks = np.ascontiguousarray(blocks).view(np.uint8).reshape(*blocks.shape[:-1], blocks.shape[-1] // 32, -1)
    nbytes = library().jaxllm_block_bytes(number(format))
    if blocks.dtype != np.uint8 or blocks.ndim < 3 or blocks.shape[-1] != nbytes:
        wanted = f"uint8 [o, blocks, {nbytes}]"
        raise ValueError(f"the blocks are {blocks.dtype} {list(blocks.shape)}; {format} takes {wanted}")
    return np.ascontiguousarray(blocks)


def lanes(scales: Float32[np.ndarray, "*stack o runs"]) -> Float32[np.ndarray, "*stack groups runs 16"]:
    """Scales of rows as they lie beside tiles; rows that are not there have none."""
    *stack, rows, runs = scales.shape
    padded = np.zeros((*stack, -(-rows // GROUP), GROUP, runs), np.float32)
    padded.reshape(*stack, -1, runs)[..., :rows, :] = scales
    return np.ascontiguousarray(padded.swapaxes(-1, -2))


def unpack(
    format: str, tiles: np.ndarray, rows: int, inputs: int | None = None, scales: np.ndarray | None = None
) -> Float32[np.ndarray, "o i"]:
    """The weights `[rows, inputs]` that tiles stand for, bit for bit as the gguf package decodes them.

    Without `inputs`, all that the tiles hold. SCALED formats take their `scales`. Raises ValueError: no such format, or
    too few rows or inputs.
    """
    kind, columns = number(format), tiles.shape[1]
    held = columns * tile_inputs(format)
    inputs = held if inputs is None else inputs
    if tiles.shape[2] != tile_bytes(format) or rows > len(tiles) * GROUP or inputs > held:
        raise ValueError(f"{format} tiles of shape {list(tiles.shape)} do not hold [{rows}, {inputs}] weights")
    runs = 0 if scales is None else scales.shape[1]
    wanted = (len(tiles), runs, GROUP) if format.lower() in SCALED else None
    if wanted != (None if scales is None else scales.shape):
        raise ValueError(f"{format} tiles with {'no scales' if scales is None else f'scales {list(scales.shape)}'}")
    tiles = np.ascontiguousarray(tiles)
    out = np.empty((rows, inputs), np.float32)
    beside = None if scales is None else _address(scales := np.ascontiguousarray(scales, np.float32))
    threads = machine.compute_threads()
    library().jaxllm_unpack(kind, _address(tiles), beside, runs, rows, columns, inputs, _address(out), threads)
    return out


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
