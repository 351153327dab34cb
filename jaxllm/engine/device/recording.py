"""Which activations a step is to give, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.engine.device.handle import Recorded
from jaxllm.engine.work import Chunk
from jaxllm.requests.captures import FINAL, TAPPED, Tap


def wanted_taps(chunks: Sequence[Chunk]) -> list[Tap]:
    """The activations that some request of a step wants of tokens in it."""
    captures = [chunk.request.capture for chunk in chunks if chunk.captured_positions]
    return list(dict.fromkeys(tap for capture in captures if capture is not None for tap in capture.taps))


def fill_places(places: np.ndarray, taps: Sequence[Tap], room: int) -> None:
    """Tell each layer, and the last norm, where its activations go: in the order of `taps`, or behind `room`."""
    places[:] = room
    for place, (name, layer) in enumerate(taps):
        places[layer, 0 if name == FINAL else TAPPED.index(name)] = place


def record(found: jax.Array, taps: Sequence[Tap], chunks: Sequence[tuple[Chunk, int]]) -> list[Recorded]:
    """What each request is to get of a step's activations `[N, T, E]`; each chunk begins at a row of them.

    Only rows that somebody wants are copied to the host, as far as they are few.
    """
    found = found.addressable_data(0)  # every device has all of it
    wanted = [(chunk, row, chunk.captured_positions) for chunk, row in chunks if chunk.captured_positions]
    rows = [row + position - chunk.start for chunk, row, positions in wanted for position in positions]
    most = 1 << (len(rows) - 1).bit_length()  # so that few shapes are compiled
    if 2 * most <= found.shape[1]:
        found = _rows(found, np.array(rows + [0] * (most - len(rows)), np.int32))
        rows = list(range(len(rows)))
    recorded, first = [], 0
    for chunk, _, positions in wanted:
        assert chunk.request.capture is not None
        places = [taps.index(tap) for tap in chunk.request.capture.taps]
        own = rows[first : first + len(positions)]
        recorded.append(Recorded(chunk.request, positions, places, own, found))
        first += len(positions)
    return recorded


@jax.jit
def _rows(found: Float[Array, "N T E"], rows: Int[Array, "R"]) -> Float[Array, "N R E"]:
    return jnp.take(found, rows, axis=1)
