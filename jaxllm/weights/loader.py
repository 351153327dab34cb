"""Loads checkpoint tensors onto the mesh, one parameter at a time: the model is never in memory twice."""

from __future__ import annotations

import fnmatch
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxllm.errors import CheckpointError
from jaxllm.quantization.gguf_decode import FORMATS
from jaxllm.quantization.stored import Stored, stack, transformed, with_moved_blocks
from jaxllm.quantization.weight import DenseKind, HostShare, PartlyOnHost, Weight, WeightKind, fuse
from jaxllm.sharding.mesh import Axes, Layout, named_sharding, place, put
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.names import NameMap, Source, Sources
from jaxllm.wording import did_you_mean

logger = logging.getLogger(__name__)

READ_AHEAD = 2  # parameters read (and dequantized) while an earlier one is on its way to the device

Value = Weight | Any  # a parameter: a Weight, or a plain array (norms, biases)


class Leaf(NamedTuple):
    """One of a parameter's arrays, how it is divided, and whether it is in the hosts' memory."""

    array: jax.ShapeDtypeStruct
    axes: Axes
    on_host: bool = False

    def sharding(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        return named_sharding(mesh, self.axes, on_host=self.on_host)


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as its model describes it; `shape` is global.

    Attributes:
        kinds: how a weight is kept: one kind, or one for each segment of its layout. Empty: a plain array of `dtype`.
        host: the part of a stack that is in host memory, if any.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: Axes
    layout: Layout | None
    kinds: tuple[WeightKind, ...] = ()
    host: HostShare | None = None

    @property
    def runs(self) -> list[tuple[WeightKind, Layout | None]]:
        """Neighbouring segments of one kind, which are one weight if that kind joins them."""
        if not self.kinds or self.layout is None or len(self.layout.segments) == 1:
            return [(kind, self.layout) for kind in self.kinds]
        segments = self.layout.segments
        kinds = self.kinds if len(self.kinds) > 1 else self.kinds * len(segments)
        numbered = enumerate(zip(kinds, segments, strict=True))
        runs = [
            (kind, tuple(segment for _, (_, segment) in run))
            for (kind, _), run in groupby(numbered, key=lambda n: (n[1][0], None if n[1][0].joins else n[0]))
        ]
        return [(kind, replace(self.layout, segments=found)) for kind, found in runs]

    def abstract(self) -> Value:
        """The parameter as `jax.ShapeDtypeStruct`s."""
        if not self.kinds:
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        axis = self.layout.axis if self.layout else 0
        parts = []
        for kind, layout in self.runs:
            rows = layout.rows if layout else self.shape[axis]
            parts.append(kind.abstract((*self.shape[:axis], rows, *self.shape[axis + 1 :])))
        return self.parted(fuse(parts))

    def parted(self, value: Weight) -> Weight:
        return value if self.host is None else self.host.split(value)

    def leaves(self) -> list[Leaf]:
        value = self.abstract()
        arrays = jax.tree.leaves(value)
        axes = value.axes(self.axes) if isinstance(value, Weight) else [self.axes]
        on_host = value.on_host if isinstance(value, PartlyOnHost) else [False] * len(arrays)
        return [Leaf(*leaf) for leaf in zip(arrays, axes, on_host, strict=True)]

    def check_shards(self, tp: int) -> None:
        """Raises CheckpointError if dividing the inputs by `tp` would separate numbers that are stored together."""
        inputs = self.shape[-1]
        for kind in self.kinds if self.axes[-1] is not None else ():
            if inputs % (tp * kind.block):
                raise CheckpointError(
                    f"{self.path}: {inputs} inputs on {tp} devices part a block of {kind.block}; "
                    f"accepted is a tensor_parallel_size that divides {inputs // kind.block}, or dequantize"
                )


def load_parameters(
    checkpoint: Checkpoint, specs: Sequence[ParamSpec], names: NameMap, mesh: Mesh, *, ignored: Iterable[str] = (),
    every: Sequence[ParamSpec] = (), on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Value, ...]:  # fmt: skip
    """Read every parameter of `specs` in order and place its arrays on `mesh`.

    Args:
        names: where each parameter comes from.
        ignored: patterns of tensors that the model knowingly leaves unread.
        every: all of the model's parameters, if `specs` are some of them: their tensors are used too, elsewhere.
        on_progress: called with (parameters done, parameters in all).

    Raises:
        CheckpointError: a tensor is missing, has the wrong shape, or is stored and not used; the message names it.
    """
    values = []
    for spec, value in zip(specs, read_parameters(checkpoint, specs, names, ignored, every), strict=True):
        values.append(_put(spec, value, mesh))
        if on_progress:
            on_progress(len(values), len(specs))
    return tuple(values)


def read_parameters(
    checkpoint: Checkpoint, specs: Sequence[ParamSpec], names: NameMap, ignored: Iterable[str] = (),
    every: Sequence[ParamSpec] = (),
) -> Iterator[Value]:  # fmt: skip
    """Read every parameter of `specs` in order into host memory, a few of them ahead. Raises as `load_parameters`."""
    chosen = _choose_sources(checkpoint, specs, names, ignored, every)
    with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="load") as pool:
        ahead = iter(zip(specs, chosen, strict=True))
        pending = deque(pool.submit(_assemble, checkpoint, *pair) for pair in islice(ahead, READ_AHEAD))
        while pending:
            value = pending.popleft().result()
            pending.extend(pool.submit(_assemble, checkpoint, *pair) for pair in islice(ahead, 1))
            yield value


def read_rows(checkpoint: Checkpoint, spec: ParamSpec, names: NameMap) -> np.ndarray:
    """A parameter in its tensors' order, float32, not laid out for devices. Raises as `load_parameters`."""
    tensors = _read_segments(checkpoint, spec, find_sources(checkpoint, spec, names))
    axis = spec.layout.axis if spec.layout else 0
    return np.concatenate([np.asarray(tensor.expand(), np.float32) for tensor in tensors], axis)


def dummy_parameters(
    specs: Sequence[ParamSpec], mesh: Mesh, seed: int, every: Sequence[ParamSpec] = ()
) -> tuple[Value, ...]:
    """Random weights of the right shapes, drawn on the devices; vectors are ones, so that norms stay norms.

    `every` are all of the model's parameters, if `specs` are some of them, whose values do not depend on that.
    """

    @functools.cache
    def drawing(shape: tuple[int, ...], dtype: np.dtype, axes: Axes) -> Callable[[jax.Array], jax.Array]:
        def draw(key: jax.Array) -> jax.Array:
            if len(shape) == 1:
                return jnp.ones(shape, dtype)
            return (jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)

        return jax.jit(draw, out_shardings=named_sharding(mesh, axes))  # compiled once for all layers

    @functools.cache
    def quantized(shape: tuple[int, ...], kinds: tuple[WeightKind, ...], layout: Layout | None) -> Value:
        """One weight for all that are alike, because encoding takes longer than drawing."""
        spec = ParamSpec("", shape, np.dtype(np.float32), (), layout, kinds)
        rng, axis = np.random.default_rng(seed), layout.axis if layout else 0
        rows = [s.rows for s in layout.segments] if layout else [shape[0]]
        drawn = [rng.standard_normal((*shape[:axis], n, *shape[axis + 1 :]), np.float32) for n in rows]
        return _pack(spec, [Stored(array * shape[-1] ** -0.5, "F32", array.shape) for array in drawn])

    values, named = [], every or specs
    keys = dict(zip((spec.path for spec in named), jax.random.split(jax.random.key(seed), len(named)), strict=True))
    for spec in specs:
        key = keys[spec.path]
        if all(isinstance(kind, DenseKind) for kind in spec.kinds):
            whole = replace(spec, host=None)
            drawn = [drawing(leaf.array.shape, leaf.array.dtype, leaf.axes)(key) for leaf in whole.leaves()]
            value = jax.tree.unflatten(jax.tree.structure(whole.abstract()), drawn)
            if spec.host is not None:
                value = _put(spec, spec.parted(jax.tree.map(np.asarray, value)), mesh)
            values.append(value)
        else:
            drawn = jax.tree.map(np.array, quantized(spec.shape, spec.kinds, spec.layout))  # a CPU would share them
            values.append(_put(spec, spec.parted(drawn), mesh))
    return tuple(values)


def _put(spec: ParamSpec, value: Value, mesh: Mesh) -> Value:
    leaves, tree = jax.tree.flatten(value)
    shardings = [leaf.sharding(mesh) for leaf in spec.leaves()]
    return jax.tree.unflatten(tree, [put(*pair) for pair in zip(leaves, shardings, strict=True)])


def _assemble(checkpoint: Checkpoint, spec: ParamSpec, sources: Sources) -> Value:
    """A parameter in host memory: its tensors laid out for the mesh, each run of segments packed as its kind."""
    tensors = _read_segments(checkpoint, spec, sources)
    if not spec.kinds:
        return place(spec.layout, (tensor.expand() for tensor in tensors), spec.dtype)
    packed = _pack(spec, tensors)
    checkpoint.release(name for source in sources for name in source.tensors)
    return packed


def _pack(spec: ParamSpec, tensors: list[Stored]) -> Weight:
    parts = []
    for kind, layout in spec.runs:
        if layout is None or len(spec.runs) == 1:
            mine = tensors
        else:
            mine, tensors = tensors[: len(layout.segments)], tensors[len(layout.segments) :]
        parts.append(kind.pack(mine, layout))
    return spec.parted(fuse(parts))


def _read_segments(checkpoint: Checkpoint, spec: ParamSpec, sources: Sources) -> list[Stored]:
    """One tensor for each segment, or one that holds all; it is cut up if the segments are of several kinds."""
    axis = spec.layout.axis if spec.layout else 0
    segments = [s.rows for s in spec.layout.segments] if spec.layout else [spec.shape[0]]
    rows = segments if len(sources) == len(segments) else [sum(segments)]
    tensors = []
    for source, size in zip(sources, rows, strict=True):
        tensor = _read(checkpoint, source)
        expected = (*spec.shape[:axis], size, *spec.shape[axis + 1 :])
        if tensor.shape != expected:
            raise CheckpointError(f"{checkpoint.path}: tensor {source.name!r} is {tensor.shape}; expected {expected}")
        tensors.append(tensor)
    if len(spec.runs) > 1 and len(tensors) == 1:
        return tensors[0].split(segments, axis)
    return tensors


def _read(checkpoint: Checkpoint, source: Source) -> Stored:
    """A segment, still packed if only whole rows were moved on the way."""
    tensors = [checkpoint.read(name) for name in source.tensors]
    if source.stack:
        odd = next((n for n, t in zip(source.tensors, tensors, strict=True) if t.shape != tensors[0].shape), None)
        if odd is not None:
            shape, first = checkpoint.tensors[odd].shape, tensors[0].shape
            raise CheckpointError(f"{checkpoint.path}: tensor {odd!r} is {shape}; expected {first}, as the others have")
        tensors = [stack(tensors)]
    if source.transform is None:
        return tensors[0]
    whole = tensors[0]
    elements = FORMATS[whole.dtype].elements if whole.packed and whole.dtype in FORMATS else 0
    if source.column_runs and elements and source.moves_blocks(elements):
        return with_moved_blocks(whole, source.transform, elements)
    return transformed(tensors, source.transform, by_rows=source.by_rows)


def _choose_sources(
    checkpoint: Checkpoint, specs: Sequence[ParamSpec], names: NameMap, ignored: Iterable[str],
    every: Sequence[ParamSpec],
) -> list[Sources]:  # fmt: skip
    found = {spec.path: find_sources(checkpoint, spec, names) for spec in every or specs}
    used = {name for sources in found.values() for source in sources for name in source.tensors}
    patterns, skipped = tuple(ignored), []
    for name in checkpoint.tensors:
        if name in used or 0 in checkpoint.tensors[name].shape:
            continue
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            raise CheckpointError(f"{checkpoint.path}: tensor {name!r} is stored there, but this model does not use it")
        skipped.append(name)
    if skipped:
        others = f" and {len(skipped) - 8} more" if len(skipped) > 8 else ""
        logger.info("%d tensors are not used: %s%s", len(skipped), ", ".join(skipped[:8]), others)
    return [found[spec.path] for spec in specs]


def whole_parameters(checkpoint: Checkpoint, specs: Sequence[ParamSpec], names: NameMap) -> list[ParamSpec]:
    """The parameters that an incomplete checkpoint has. Raises CheckpointError if one is there in part."""
    found = []
    for spec in specs:
        _, there, missing = _nearest_option(checkpoint, spec, names)
        if not missing:
            found.append(spec)
        elif there:
            absent = ", ".join(map(repr, missing[:4]))
            raise CheckpointError(f"{there[0]!r} and {absent} are kept in one array, so they must be given together")
    return found


def find_sources(checkpoint: Checkpoint, spec: ParamSpec, names: NameMap) -> Sources:
    sources, _, missing = _nearest_option(checkpoint, spec, names)
    if missing:
        hint = did_you_mean(missing[0], checkpoint.tensors)
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]!r} is missing{hint}")
    return sources


def _nearest_option(
    checkpoint: Checkpoint, spec: ParamSpec, names: NameMap
) -> tuple[Sources, Sequence[str], Sequence[str]]:
    """The sources that the checkpoint has, or else has most of; the tensors that are there; those that are missing."""
    found: list[tuple[Sources, list[str], list[str]]] = []
    for sources in names.get(spec.path) or ((Source(spec.path),),):
        wanted = [name for source in sources for name in source.tensors]
        missing = [name for name in wanted if name not in checkpoint.tensors]
        found.append((sources, [name for name in wanted if name in checkpoint.tensors], missing))
        if not missing:
            return found[-1]
    return max(found, key=lambda option: len(option[1]))
