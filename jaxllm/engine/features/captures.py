"""Activations that leave a step beside what it is for.

Which of them do is data: each layer is told where in one buffer its own go, and neither computes nor writes those that
no request wants. So a step is compiled for a number of activations, not for a choice of them, and layers that are alike
are still traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.engine.core.feature import Feature, Fields, Ran, Reading, Traced, TracedStep
from jaxllm.engine.core.keys import Key, room
from jaxllm.engine.core.request import Chunk, Request, Status
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.messages import CapturedRows, EngineRequest, TokenDelta
from jaxllm.models.layers.hands import Hand, LayerHand, Product
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.captures import FINAL, TAPPED, CaptureParams, Tap


@dataclass
class _CaptureState:
    params: CaptureParams
    rows: list[CapturedRows] = field(default_factory=list)
    """What has reached the host, and its caller has not been told."""


class CapturesFeature(Feature):
    """A step with it is told of each layer, and of the last norm, where in its buffer each activation goes."""

    name = "captures"
    on = ("backbone",)
    rare = gives = True
    asked_by = ("capture",)
    rooms = (1, 4, 16, 64, 256, 1024)
    """The most are those of all points of all layers, which requests of one step may want together."""

    def __init__(self, widest: int):
        """`widest` is how many numbers of a token the largest activation has."""
        self._widest = widest

    def prepare(self, request: Request, asked: EngineRequest) -> _CaptureState | None:
        return asked.capture and _CaptureState(asked.capture)

    def amount(self, extra: _CaptureState) -> int:
        return len(extra.params.taps)

    def first_read(self, request: Request, extra: _CaptureState) -> int:
        return extra.params.first(request.num_prompt)

    def apart(self, request: Request, extra: _CaptureState, tokens: range) -> bool:
        return True

    def needed(self, chunks: Sequence[Chunk]) -> int:
        return len(self._taps(chunks))

    def _positions(self, chunk: Chunk) -> list[int]:
        """Those of a chunk's tokens whose activations are wanted."""
        extra = chunk.request.extras.get(self.name)
        tokens = range(chunk.start, chunk.start + chunk.length)
        return [] if extra is None else extra.params.among(tokens, chunk.request.num_prompt)

    def _taps(self, chunks: Sequence[Chunk]) -> list[Tap]:
        """The activations that some request of a step wants of tokens in it."""
        wanted = [chunk.request.extras[self.name].params.taps for chunk in chunks if self._positions(chunk)]
        return list(dict.fromkeys(tap for taps in wanted for tap in taps))

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        return {"taps": (len(sizes.caches) + 1, len(TAPPED))}

    def padding(self, key: Key, x: Fields) -> None:
        x["taps"][:] = room(key.variant, self.name)

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> tuple[np.ndarray, ...]:
        self.padding(key, x)
        for place, (name, layer) in enumerate(self._taps(chunks)):
            x["taps"][layer, 0 if name == FINAL else TAPPED.index(name)] = place
        return ()

    def read(self, ran: Ran) -> Iterable[Reading]:
        """Only rows that some request wants are copied to the host, as far as they are few."""
        if self.name not in ran.found:
            return
        found = ran.found[self.name].addressable_data(0)  # every device has all of it
        taps = self._taps([chunk for chunk, _ in ran.chunks])
        wanted = [(chunk, row, positions) for chunk, row in ran.chunks if (positions := self._positions(chunk))]
        rows = [row + position - chunk.start for chunk, row, positions in wanted for position in positions]
        most = 1 << (len(rows) - 1).bit_length()  # so that few shapes are compiled
        if 2 * most <= found.shape[1]:
            found = _rows(found, np.array(rows + [0] * (most - len(rows)), np.int32))
            rows = list(range(len(rows)))

        def deliver() -> Iterable[TokenDelta]:
            values, first = np.asarray(found), 0
            for chunk, _, positions in wanted:
                own, first = rows[first : first + len(positions)], first + len(positions)
                if chunk.request.status is not Status.FINISHED:
                    extra = chunk.request.extras[self.name]
                    places = [taps.index(tap) for tap in extra.params.taps]
                    of_request = values[np.ix_(places, own)].astype(np.float32)
                    extra.rows.append(CapturedRows(positions, of_request.tobytes()))
            return ()

        yield Reading(found, deliver)

    def said(self, request: Request, extra: _CaptureState, delta: TokenDelta) -> None:
        delta.captured, extra.rows = extra.rows, []

    def traced(self, step: TracedStep) -> Traced:
        return _Recording(_Recorder(step.x["taps"], room(step.variant, self.name), self._widest))


@jax.jit
def _rows(found: Float[Array, "N T E"], rows: Int[Array, "R"]) -> Float[Array, "N R E"]:
    return jnp.take(found, rows, axis=1)


class _LayerTaps(NamedTuple):
    """The place in the buffer of a layer's activation at each of TAPPED; one after the buffer's end where no request
    wants it."""

    places: Int[Array, "n"]
    buffer: Float[Array, "N T W"]


class _LayerRecorder(LayerHand):
    whole = True
    data: _LayerTaps

    def tap(self, point: str, value: Callable[[], Float[Array, "T _"]]) -> None:
        places, buffer = self.data
        place = places[TAPPED.index(point)]

        def write(buffer: Float[Array, "N T W"]) -> Float[Array, "N T W"]:
            return _written(buffer, place, value())

        self.data = _LayerTaps(places, lax.cond(place < len(buffer), write, lambda buffer: buffer, buffer))

    def add(self, point: str, product: Product, residual: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Where some request wants the product, it is computed by itself, written and added."""
        places, buffer = self.data
        place = places[TAPPED.index(point)]

        def apart(buffer: Float[Array, "N T W"]) -> tuple[Float[Array, "T E"], Float[Array, "N T W"]]:
            out = product(None)
            return residual + out, _written(buffer, place, out)

        def at_once(buffer: Float[Array, "N T W"]) -> tuple[Float[Array, "T E"], Float[Array, "N T W"]]:
            return product(residual), buffer

        x, buffer = lax.cond(place < len(buffer), apart, at_once, buffer)
        self.data = _LayerTaps(places, buffer)
        return x


class _Recorder(Hand):
    """The activations of one step while it is traced."""

    layers = _LayerRecorder

    def __init__(self, places: Int[Array, "L n"], count: int, width: int):
        """`places` of each layer, and a last row for what comes after all of them; `width` is of the widest activation:
        others leave the rest of their rows as it is.
        """
        self._places, self._count, self._width = places, count, width
        self.buffer: Float[Array, "N T W"] | None = None

    def layer(self, index: int, x: Float[Array, "T E"]) -> _LayerTaps:
        if self.buffer is None:
            self.buffer = jnp.zeros((self._count, len(x), self._width), x.dtype)
        return _LayerTaps(self._places[index], self.buffer)

    def took(self, index: int, data: _LayerTaps) -> None:
        self.buffer = data.buffer

    def last(self, hidden: Float[Array, "T E"]) -> None:
        recorder = _LayerRecorder(self.layer(-1, hidden))
        recorder.tap(TAPPED[0], lambda: hidden)
        self.buffer = recorder.data.buffer


class _Recording(Traced):
    def __init__(self, recorder: _Recorder):
        self._recorder = recorder

    def hand(self, meta: StepMetadata) -> Hand:
        return self._recorder

    def out(self) -> Float[Array, "N T W"]:
        assert self._recorder.buffer is not None, "the model has run"
        return self._recorder.buffer


def _written(buffer: Float[Array, "N T W"], place: Int[Array, ""], value: Float[Array, "T _"]) -> Float[Array, "N T W"]:
    return lax.dynamic_update_slice(buffer, value[None].astype(buffer.dtype), (place, 0, 0))
