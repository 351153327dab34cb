"""What leaves the layers of a step, and what changes the residual stream between them, for single tokens of requests.

The choice of tokens and layers is data: a step is compiled for a number of activations or patches, not for a choice of
them, and layers that are alike are traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.engine.core.device_state import StateShapes
from jaxllm.engine.core.feature import Feature, Fields, Ran, Reading, Traced, TracedStep
from jaxllm.engine.core.keys import Key, room
from jaxllm.engine.core.packing import SETTING_INTS
from jaxllm.engine.core.request import Chunk, Request, Status
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.messages import CapturedRows, EngineRequest, TokenDelta
from jaxllm.models.layers.hands import Hand, LayerHand, Product
from jaxllm.pallas_kernels import StepMetadata
from jaxllm.requests.captures import FINAL, TAPPED, CaptureParams, Tap
from jaxllm.requests.steering import EMBEDDINGS, Patching, Steering


@dataclass
class _CaptureState:
    params: CaptureParams
    rows: list[CapturedRows] = field(default_factory=list)


class CapturesFeature(Feature):
    """A step with it is told of each layer, and of the last norm, where in its buffer each activation goes."""

    name = "captures"
    on = ("backbone",)
    rare = gives = True
    asked_by = ("capture",)
    rooms = (1, 4, 16, 64, 256, 1024)

    def __init__(self, widest: int):
        self._widest = widest

    def prepare(self, request: Request, asked: EngineRequest) -> _CaptureState | None:
        return None if asked.capture is None else _CaptureState(asked.capture)

    def amount(self, extra: _CaptureState) -> int:
        return len(extra.params.taps)

    def first_read(self, request: Request, extra: _CaptureState) -> int:
        return extra.params.first(request.num_prompt)

    def apart(self, request: Request, extra: _CaptureState, tokens: range) -> bool:
        return True

    def needed(self, chunks: Sequence[Chunk]) -> int:
        return len(self._taps(chunks))

    def _positions(self, chunk: Chunk) -> list[int]:
        extra = chunk.request.extras.get(self.name)
        tokens = range(chunk.start, chunk.start + chunk.length)
        return [] if extra is None else extra.params.among(tokens, chunk.request.num_prompt)

    def _taps(self, chunks: Sequence[Chunk]) -> list[Tap]:
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
        return _Recording(step.x["taps"], room(step.variant, self.name), self._widest)


@jax.jit
def _rows(found: Float[Array, "N T E"], rows: Int[Array, "R"]) -> Float[Array, "N R E"]:
    return jnp.take(found, rows, axis=1)


class _LayerTaps(NamedTuple):
    """The place in the buffer of a layer's activation at each of TAPPED; after the buffer's end if it is not wanted."""

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


class _Recording(Traced, Hand):
    layers = _LayerRecorder

    def __init__(self, places: Int[Array, "L n"], count: int, width: int):
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

    def hand(self, meta: StepMetadata) -> Hand:
        return self

    def out(self) -> Float[Array, "N T W"]:
        assert self.buffer is not None, "the model has run"
        return self.buffer


def _written(buffer: Float[Array, "N T W"], place: Int[Array, ""], value: Float[Array, "T _"]) -> Float[Array, "N T W"]:
    return lax.dynamic_update_slice(buffer, value[None].astype(buffer.dtype), (place, 0, 0))


class SteeringFeature(Feature):
    """Its part of the state: `vectors` [slots, L, E], and `ranges` [slots, 2] of positions, the last excluded."""

    name = "steering"
    on = ("decode", "verify", "backbone")
    rare = has_part = True
    asked_by = ("steering",)

    def part(self, state: StateShapes) -> Any:
        rows, layers = state.sizes.num_slots + 1, len(state.sizes.caches)
        return {"ranges": state.ints(rows, 2), "vectors": state.hidden(rows, layers)}

    def prepare(self, request: Request, asked: EngineRequest) -> Steering | None:
        return asked.steering

    def needs(self, request: Request, extra: Steering) -> Iterable[Key]:
        return [Key("put", 0, frozenset({self.name}))]

    def salt(self, extra: Steering) -> str:
        return extra.digest

    def seat(self, request: Request, extra: Steering) -> None:
        sizes, device = self.around.sizes, self.around.device
        vectors = np.zeros((len(sizes.caches), sizes.hidden_size), device.hidden_dtype)
        vectors[list(extra.layers)] = extra.rows()
        ends = np.array([extra.start, extra.stop], np.int32)
        device.run(Key("put", 0, frozenset({self.name})), np.array([request.slot], np.int32), ends, vectors)

    def traced(self, step: TracedStep) -> Traced:
        return _Steering(step, self.name, self.bit)


class _LayerVectors(NamedTuple):
    vectors: Float[Array, "slots E"]
    rows: Int[Array, "T"]


class _LayerSteering(LayerHand):
    data: _LayerVectors

    def end(self, x: jax.Array) -> jax.Array:
        return x + self.data.vectors[self.data.rows].astype(x.dtype)


class _Steering(Traced, Hand):
    layers = _LayerSteering

    def __init__(self, step: TracedStep, name: str, bit: int):
        self._state, self._bit = step.parts[name], bit
        self._settings = step.parts["slots"].setting_ints

    def hand(self, meta: StepMetadata) -> Hand:
        """The row of padding is zero, and stands for every token that is not steered."""
        assert meta.slots is not None, "steering is by slot"
        slots = meta.slots[jnp.minimum(meta.seq_ids, len(meta.slots) - 1)]
        first, end = self._state["ranges"][slots].T
        uses = SETTING_INTS.unpack(self._settings[slots])["uses"] & self._bit > 0
        steered = uses & meta.live & (first <= meta.positions) & (meta.positions < end)
        self._rows = jnp.where(steered, slots, len(self._state["ranges"]) - 1)
        return self

    def layer(self, index: int, x: jax.Array) -> _LayerVectors:
        return _LayerVectors(self._state["vectors"][:, index], self._rows)


NO_LAYER = -2
"""What stands for one where there are fewer patches than room for them."""


class _RowPatch(NamedTuple):
    row: int
    layer: int
    value: np.ndarray


class PatchingFeature(Feature):
    """A step with it is sent the layer and the row of each patch, and the values, float32 `[n, E]`."""

    name = "patching"
    on = ("backbone",)
    rare = True
    asked_by = ("patching",)
    rooms = (4, 32, 256, 2048, 16384, 131072, 1048576)

    def prepare(self, request: Request, asked: EngineRequest) -> Patching | None:
        return asked.patching

    def amount(self, extra: Patching) -> int:
        return len(extra.places)

    def salt(self, extra: Patching) -> str:
        return extra.digest

    def apart(self, request: Request, extra: Patching, tokens: range) -> bool:
        return any(position in tokens for position, _ in extra.places)

    def needed(self, chunks: Sequence[Chunk]) -> int:
        return len(self._patches(chunks))

    def _patches(self, chunks: Sequence[Chunk]) -> list[_RowPatch]:
        found, row = [], 0
        for chunk in chunks:
            patches = chunk.request.extras.get(self.name)
            if patches is not None:
                for index in patches.among(range(chunk.start, chunk.start + chunk.length)):
                    position, layer = patches.places[index]
                    found.append(_RowPatch(row + position - chunk.start, layer, patches.rows[index]))
            row += chunk.length
        return found

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        count = room(key.variant, self.name)
        return {"patch_layers": (count,), "patch_rows": (count,)}

    def sent(self, key: Key, state: StateShapes) -> tuple[Any, ...]:
        return (state.replicated((room(key.variant, self.name), state.sizes.hidden_size), jnp.float32),)

    def padding(self, key: Key, x: Fields) -> None:
        x["patch_layers"][:] = NO_LAYER

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> tuple[np.ndarray, ...]:
        patches = self._patches(chunks)
        self.padding(key, x)
        x["patch_layers"][: len(patches)] = [patch.layer for patch in patches]
        x["patch_rows"][: len(patches)] = [patch.row for patch in patches]
        values = np.zeros((room(key.variant, self.name), len(patches[0].value)), np.float32)
        values[: len(patches)] = [patch.value for patch in patches]
        return (values,)

    def traced(self, step: TracedStep) -> Traced:
        return _Patching(step)


class _LayerPatches(NamedTuple):
    """One layer's: the row of each patch, which is after the last where the patch is another layer's."""

    rows: Int[Array, "n"]
    values: Float[Array, "n E"]


class _LayerPatching(LayerHand):
    whole = True
    data: _LayerPatches

    def end(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return x.at[self.data.rows].set(self.data.values.astype(x.dtype), mode="drop")


class _Patching(Traced, Hand):
    layers = _LayerPatching

    def __init__(self, step: TracedStep):
        self._layers, self._rows, (self._values,) = step.x["patch_layers"], step.x["patch_rows"], step.sent

    def hand(self, meta: StepMetadata) -> Hand:
        return self

    def begin(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return _LayerPatching(self.layer(EMBEDDINGS, x)).end(x)

    def layer(self, index: int, x: jax.Array) -> _LayerPatches:
        return _LayerPatches(jnp.where(self._layers == index, self._rows, len(x)), self._values)
