"""Images in a prompt: their rows stand where the embeddings of their tokens would.

A thread for each request finds room for its images in a store of rows on the devices, prepares what is not there
yet, and waits. The loop runs the tower for one piece a turn, so that decodes go on between pieces; once all pieces of a
request have been enqueued it is scheduled like any other.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxllm.engine.core.device_state import StateShapes
from jaxllm.engine.core.feature import Built, Errand, Feature, Fields, Plan, Traced, TracedStep
from jaxllm.engine.core.jobs import Jobs
from jaxllm.engine.core.keys import Key, Uses
from jaxllm.engine.core.pages import PrefixNode
from jaxllm.engine.core.request import Chunk, Request
from jaxllm.engine.core.sizes import Buckets, StepSizes, smallest_covering
from jaxllm.engine.core.slots import Slots
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features.images.store import RowStore, StoredImage, Waiter
from jaxllm.engine.messages import EngineRequest, EngineStats, PlacedImages, SeenImage
from jaxllm.errors import InvalidRequestError
from jaxllm.models.vision.packing import pack, packed_patches
from jaxllm.models.vision.processor import Grid, Processor
from jaxllm.models.vision.tower import Tower, TowerBatch
from jaxllm.pallas_kernels import ImageRows, StepMetadata
from jaxllm.weights.loader import ParamSpec

THREADS = 8
"""Requests whose images are prepared at a time."""


class AbstractTower(NamedTuple):
    """A tower without its memory, how images are prepared for it, and how many rows and patches there is room for."""

    model: Tower
    params: list[ParamSpec]
    processor: Processor
    num_rows: int
    buckets: dict[int, tuple[range, ...]]
    """Patches that a batch of the tower is padded to, ascending, and the layers that then run together: decodes go on
    between these parts."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what is kept on the devices; see `ImagesFeature`."""
        config, most = self.model.config, max(self.buckets)
        return {
            "rows": (self.num_rows, config.row_size),
            "patches": (most, config.blocks.hidden_size),
            "deep": (len(config.deepstack), most // config.patches_per_row, config.merger.products[-1].size),
        }


class TowerPiece(NamedTuple):
    """One batch of the tower."""

    size: int
    to: Int[np.ndarray, "R"]
    batch: TowerBatch
    image: StoredImage
    filled: int
    """The rows of the image that are filled then."""
    user: Waiter


@dataclass(eq=False)
class SeenByRequest(Waiter):
    """A request's images.

    Attributes:
        rows: as in PlacedImages, as are the others.
        end: the first token after the last row.
        keys: the tokens, with a number in the place of each row that no other row of any image has.
        table: the store's row of each row of its images.
    """

    images: tuple[SeenImage, ...]
    rows: Int[np.ndarray, "T"]
    visible_until: Int[np.ndarray, "T"] | None
    places: Int[np.ndarray, "3 T"] | None
    end: int
    keys: list[int]
    table: Int[np.ndarray, "R"] = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def of(cls, placed: PlacedImages, token_ids: list[int]) -> SeenByRequest:
        rows = np.frombuffer(placed.rows, np.int32)
        visible = None if placed.visible_until is None else np.frombuffer(placed.visible_until, np.int32)
        places = None if placed.places is None else np.frombuffer(placed.places, np.int32).reshape(3, -1)
        bases = [int.from_bytes(image.digest) << 32 for image in placed.images]
        of_row = [base + row for base, image in zip(bases, placed.images, strict=True) for row in range(image.num_rows)]
        keys = [of_row[row] if row >= 0 else token for row, token in zip(rows, token_ids, strict=False)]
        return cls(placed.images, rows, visible, places, int(np.flatnonzero(rows >= 0)[-1]) + 1, keys)


class ImagesFeature(Feature):
    """Its part of the state: `rows` [N, n], of all images that are there, and the batch that is in the tower: `patches`
    after its last part, and `deep`, what the layers so far add to rows.
    """

    name = "images"
    on = ("backbone",)
    rare = has_part = True
    asked_by = ("images",)
    rooms = (1,)

    def __init__(self, tower: AbstractTower):
        self._tower, self._config = tower, tower.model.config
        self.words = tuple(f"tower{part}" for part in range(max(map(len, tower.buckets.values()))))
        self._graph, state = nnx.split(tower.model)
        leaves, self._tree = jax.tree.flatten(state)
        self._num_leaves = len(leaves)
        self._batch_tree = jax.tree.structure(pack(self._config, [], min(tower.buckets)))

    def plan(self, buckets: Buckets) -> Plan:
        towers = [key for size in self._tower.buckets for key in self._keys(size)]
        return Plan(late=[*towers, *(Key("backbone", size, frozenset({f"{self.name}1"})) for size in buckets.prefill)])

    def part(self, state: StateShapes) -> Any:
        dtypes = {"rows": state.sizes.dtype, "patches": state.hidden_dtype, "deep": state.sizes.dtype}
        return {name: state.replicated(shape, dtypes[name]) for name, shape in self._tower.shapes.items()}

    def uses(self, key: Key, uses: Uses) -> Uses:
        if key.kind == "put":
            return Uses(("weights", self.name), (self.name,), output=False)
        return super().uses(key, uses)

    def build(self, key: Key, maker: StepFunctions) -> Built:
        """`(parts, to, *batch) -> (images,)`: `size` patches go through a part of the tower. After its last they are
        rows, which go to the places `to` of the store.
        """
        (word,) = key.variant
        layers = self._tower.buckets[key.size][self.words.index(word)]
        arrays = jax.tree.leaves(pack(self._config, [], key.size))
        sent = [maker.state.replicated(array.shape, array.dtype) for array in arrays]

        def step(parts: dict[str, Any], to: jax.Array, *arrays: jax.Array) -> tuple[Any, ...]:
            own = maker.further(parts)[-self._num_leaves :]
            tower = nnx.merge(self._graph, jax.tree.unflatten(self._tree, own))
            batch, found = jax.tree.unflatten(self._batch_tree, arrays), dict(parts[self.name])
            x = found["patches"][: key.size] if layers.start else tower.begin(batch)
            x, new = tower.through(x, batch, layers)
            done = sum(layer < layers.start for layer in self._config.deepstack)
            deep = [*found["deep"][:done, : len(to)], *new]
            if layers.stop == len(tower.layers):
                rows = tower.end(x, batch, deep)
                found["rows"] = found["rows"].at[to].set(rows.astype(found["rows"].dtype), mode="drop")
            else:
                found["patches"] = found["patches"].at[: key.size].set(x.astype(found["patches"].dtype))
                for index, array in enumerate(deep[done:], done):
                    found["deep"] = found["deep"].at[index, : len(to)].set(array.astype(found["deep"].dtype))
            return (found,)

        return Built(step, [maker.state.ints(key.size // self._config.patches_per_row), *sent])

    def attach(self) -> None:
        self._store = RowStore(self._tower.num_rows)
        self._pieces: queue.SimpleQueue[TowerPiece] = queue.SimpleQueue()
        self._in_tower: tuple[TowerPiece, int] | None = None
        self._jobs = Jobs("images", urgent_threads=THREADS)

    def prepare(self, request: Request, asked: EngineRequest) -> SeenByRequest:
        assert asked.images is not None
        found = SeenByRequest.of(asked.images, request.token_ids)
        if found.visible_until is not None:
            longest = max(np.bincount(found.visible_until).tolist())
            if longest > (most := self.around.sizes.max_num_batched_tokens):
                problem = f"an image has {longest} tokens that see each other, and a step runs {most} at most"
                raise InvalidRequestError(f"{problem} (max_num_batched_tokens, image_max_tokens)")
        return found

    def keys(self, request: Request, extra: SeenByRequest, start: int, stop: int) -> list[int]:
        return extra.keys[start:stop] + request.token_ids[max(start, len(extra.keys)) : stop]

    def job(self, request: Request, extra: SeenByRequest) -> Errand:
        return Errand(lambda: self._make_ready(extra), self._jobs)

    def _make_ready(self, extra: SeenByRequest) -> None:
        self._store.take(extra.images, extra)
        extra.table = np.concatenate([image.rows for image in extra.held])
        for image, seen in zip(extra.held, extra.images, strict=True):
            if not self._store.claim(image, extra):
                continue
            for piece in self._pieces_of(image, seen, extra):
                for key in self._keys(piece.size):
                    self.around.device.compile(key)
                self._pieces.put(piece)
                self.around.core.wake()
                self._store.wait(image, piece.filled, extra)

    def _pieces_of(self, image: StoredImage, seen: SeenImage, user: Waiter) -> Iterator[TowerPiece]:
        """As many tiles together as the largest batch holds, without those that are filled."""
        config, processor, most = self._config, self._tower.processor, max(self._tower.buckets)
        side = processor.patch
        pixels = np.frombuffer(seen.pixels, np.uint8).reshape(-1, side, side, 3)
        waiting, end = deque(seen.tiles), 0
        while waiting:
            tiles = [waiting.popleft()]
            while waiting and packed_patches(config, Grid((*tiles, waiting[0]))) <= most:
                tiles.append(waiting.popleft())
            grid = Grid(tuple(tiles))
            begin, end = end, end + grid.patches
            rows = image.rows[begin // config.patches_per_row : end // config.patches_per_row]
            filled = end // config.patches_per_row
            if filled <= image.filled:
                continue
            size = smallest_covering(tuple(self._tower.buckets), packed_patches(config, grid))
            to = np.full(size // config.patches_per_row, self._tower.num_rows, np.int32)
            to[: len(rows)] = rows
            batch = pack(config, [(processor.normalized(pixels[begin:end]), grid)], size)
            yield TowerPiece(size, to, batch, image, filled, user)

    def _keys(self, size: int) -> list[Key]:
        """The parts of the tower for a batch of this size, in order."""
        return [Key("put", size, frozenset({word})) for word in self.words[: len(self._tower.buckets[size])]]

    def begin_step(self) -> None:
        """Run one part of the tower for one piece: the step that follows waits for no more."""
        if self._in_tower is None and not self._pieces.empty():
            self._in_tower = self._pieces.get(), 0
        if self._in_tower is None:
            return
        (piece, part), self._in_tower = self._in_tower, None
        if piece.user.is_over:
            return
        keys = self._keys(piece.size)
        self.around.device.run(keys[part], piece.to, *jax.tree.leaves(piece.batch))
        if part + 1 < len(keys):
            self._in_tower = piece, part + 1
        else:
            self._store.fill(piece.image, piece.filled)

    @property
    def has_idle_work(self) -> bool:
        return self._in_tower is not None or not self._pieces.empty()

    def idle(self) -> None:
        """A turn without requests begins a step too."""

    def forget(self, request: Request, extra: SeenByRequest) -> None:
        self._store.give_back(extra)

    def reset(self, root: PrefixNode) -> None:
        self._store.forget()

    def close(self) -> None:
        self._store.close()
        self._jobs.close()

    def check(self) -> None:
        assert not self._store.num_held, "images are held although there is no request"

    def stats(self, stats: EngineStats, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        stats.num_images_encoded, stats.num_images_found = self._store.num_encoded, self._store.num_found

    def needed(self, chunks: Sequence[Chunk]) -> int:
        return int(any(self._touches(chunk) for chunk in chunks))

    def _touches(self, chunk: Chunk) -> bool:
        """It has rows of images, or tokens before the last one whose places are not their positions."""
        extra = chunk.request.extras.get(self.name)
        if extra is None or chunk.start >= extra.end:
            return False
        return extra.places is not None or bool((extra.rows[chunk.start : chunk.start + chunk.length] >= 0).any())

    def cut(self, request: Request, extra: SeenByRequest, start: int, length: int, most: int) -> int:
        """Tokens that see each other are run together."""
        until, last = extra.visible_until, start + length - 1
        if until is None or not length or last >= len(until) or until[last] == last:
            return length
        before = int(np.flatnonzero(until[start : last + 1] == until[last])[0])
        whole = int(until[last]) + 1 - start
        return whole if not before and whole <= most else before

    def fields(self, key: Key, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"image_row": (key.size,)}
        if self._tower.processor.axes:
            found["image_places"] = (3, key.size)
        if self._tower.processor.both_ways:
            found["visible_until"] = (key.size,)
        return found

    def padding(self, key: Key, x: Fields) -> None:
        for name in self.fields(key, self.around.sizes):
            x[name][...] = -1

    def pack(self, key: Key, x: Fields, chunks: Sequence[Chunk]) -> tuple[np.ndarray, ...]:
        self.padding(key, x)
        row = 0
        for chunk in chunks:
            extra: SeenByRequest | None = chunk.request.extras.get(self.name)
            if extra is not None:
                begin, end = chunk.start, max(chunk.start, min(chunk.start + chunk.length, len(extra.rows)))
                places = slice(row, row + end - begin)
                own = extra.rows[begin:end]
                x["image_row"][places] = np.where(own >= 0, extra.table[own], -1)
                if extra.places is not None:
                    x["image_places"][:, places] = extra.places[:, begin:end]
                if extra.visible_until is not None:
                    x["visible_until"][places] = extra.visible_until[begin:end]
            row += chunk.length
        return ()

    def traced(self, step: TracedStep) -> Traced:
        return _Placed(step, self.name)


class _Placed(Traced):
    def __init__(self, step: TracedStep, name: str):
        self._x, self._rows = step.x, step.parts[name]["rows"]

    def metadata(self, meta: StepMetadata, slots: Slots) -> StepMetadata:
        x = self._x
        meta = replace(meta, images=ImageRows(self._rows, x["image_row"]))
        if "image_places" in x:
            assert meta.rope_places is not None, "the RopeShiftFeature is asked first"
            meta = replace(meta, rope_places=jnp.where(x["image_places"] >= 0, x["image_places"], meta.rope_places))
        if "visible_until" in x:
            until = jnp.where(x["visible_until"] >= 0, x["visible_until"], meta.positions)
            meta = replace(meta, visible_until=until)
        return meta


PUT_SHIFT = Key("put", 0, frozenset({"rope_shift"}))


class RopeShiftFeature(Feature):
    """Models that rotate tokens by time, height and width: after an image a token's place is not its position."""

    name = "rope_shift"
    on = ("decode", "verify", "backbone")
    always = True
    asked_by = ("images",)

    def slot(self, sizes: StepSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {"delta": ((), jnp.int32)}

    def begun(self, own: dict[str, jax.Array], slot: jax.Array, position: jax.Array) -> dict[str, jax.Array]:
        return {"delta": own["delta"].at[slot].set(0)}

    def prepare(self, request: Request, asked: EngineRequest) -> int | None:
        return asked.images.delta if asked.images is not None and asked.images.delta else None

    def needs(self, request: Request, extra: int) -> Iterable[Key]:
        return [PUT_SHIFT]

    def seat(self, request: Request, extra: int) -> None:
        self.around.device.run(PUT_SHIFT, np.array([request.slot], np.int32), np.int32(extra))

    def traced(self, step: TracedStep) -> Traced:
        return _Shifted(self.name)


class _Shifted(Traced):
    def __init__(self, name: str):
        self._name = name

    def metadata(self, meta: StepMetadata, slots: Slots) -> StepMetadata:
        assert meta.slots is not None, "places are by slot"
        slot = meta.slots[jnp.minimum(meta.seq_ids, len(meta.slots) - 1)]
        places = meta.positions + slots.of[self._name]["delta"][slot]
        return replace(meta, rope_places=jnp.broadcast_to(places, (3, len(places))))
