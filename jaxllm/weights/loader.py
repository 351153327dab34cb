"""Checkpoint tensors onto the mesh, one parameter at a time: the model is never in memory twice."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import did_you_mean
from jaxllm.errors import CheckpointError
from jaxllm.sharding.layout import Layout
from jaxllm.sharding.mesh import Axes, named_sharding
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.names import NameMap, Source

READ_AHEAD = 2
"""Parameters read (and dequantized) while an earlier one is on its way to the device."""


class ParamSpec(NamedTuple):
    """What a model says of one of its parameters: `shape` is global, `layout` describes axis 0."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: Axes
    layout: Layout | None


def load_parameters(
    checkpoint: Checkpoint,
    specs: Sequence[ParamSpec],
    names: NameMap,
    mesh: Mesh,
    *,
    ignored: Iterable[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[jax.Array, ...]:
    """Read every parameter of `specs` in order and place it on `mesh`.

    Args:
        names: where each parameter comes from.
        ignored: patterns of tensors that the model knowingly leaves unread.
        on_progress: called with (parameters done, parameters in all).

    Raises:
        CheckpointError: a tensor is missing, has the wrong shape, or is stored and not used; the message names it.
    """
    _check_coverage(checkpoint, specs, names, ignored)
    arrays = []
    with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="load") as pool:
        pending = [pool.submit(_assemble, checkpoint, s, names[s.path]) for s in specs[:READ_AHEAD]]
        for index, spec in enumerate(specs):
            value = pending.pop(0).result()
            if index + READ_AHEAD < len(specs):
                ahead = specs[index + READ_AHEAD]
                pending.append(pool.submit(_assemble, checkpoint, ahead, names[ahead.path]))
            arrays.append(jax.device_put(value, named_sharding(mesh, spec.axes)))
            if on_progress:
                on_progress(index + 1, len(specs))
    return tuple(arrays)


def dummy_parameters(specs: Sequence[ParamSpec], mesh: Mesh, seed: int) -> tuple[jax.Array, ...]:
    """Random weights of the right shapes, drawn on the devices; vectors are ones, so that norms stay norms."""

    @functools.cache
    def drawing(shape: tuple[int, ...], dtype: np.dtype, axes: Axes) -> Callable[[jax.Array], jax.Array]:
        def draw(key: jax.Array) -> jax.Array:
            if len(shape) == 1:
                return jnp.ones(shape, dtype)
            return (jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)

        return jax.jit(draw, out_shardings=named_sharding(mesh, axes))  # compiled once for all layers

    keys = jax.random.split(jax.random.key(seed), len(specs))
    return tuple(drawing(s.shape, s.dtype, s.axes)(key) for s, key in zip(specs, keys, strict=True))


def _assemble(checkpoint: Checkpoint, spec: ParamSpec, sources: tuple[Source, ...]) -> np.ndarray:
    tensors = []
    for index, source in enumerate(sources):
        tensor = checkpoint.read(source.name)
        if source.transform is not None:
            tensor = source.transform(tensor)
        rows = spec.layout.segments[index].rows if spec.layout else spec.shape[0]
        expected = (rows, *spec.shape[1:])
        if tensor.shape != expected:
            raise CheckpointError(f"{checkpoint.path}: tensor {source.name!r} is {tensor.shape}; expected {expected}")
        tensors.append(tensor.astype(spec.dtype, copy=False))
    return spec.layout.assemble(tensors) if spec.layout else tensors[0]


def _check_coverage(checkpoint: Checkpoint, specs: Sequence[ParamSpec], names: NameMap, ignored: Iterable[str]) -> None:
    used = set()
    for spec in specs:
        for source in names[spec.path]:
            if source.name not in checkpoint.tensors:
                hint = did_you_mean(source.name, checkpoint.tensors)
                raise CheckpointError(f"{checkpoint.path}: tensor {source.name!r} is missing{hint}")
            used.add(source.name)
    patterns = tuple(ignored)
    for name in checkpoint.tensors:
        if name not in used and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            raise CheckpointError(f"{checkpoint.path}: tensor {name!r} is stored there, but this model does not use it")
