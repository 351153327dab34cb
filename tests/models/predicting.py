"""Modules that predict further tokens, run by themselves over one sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm.models.caches import CacheLayout
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import ModelSpec, abstract_model
from jaxllm.pallas_kernels import REFERENCE
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import load_parameters
from tests.models.harness import metadata

PAGE = 8


class Found(NamedTuple):
    """What a module gives of each token: what the head reads, and what takes the place of the model's state."""

    hidden: np.ndarray
    state: np.ndarray


def predicted(
    checkpoint: Checkpoint, spec: ModelSpec, embeddings: np.ndarray, states: np.ndarray, cuts: list[int]
) -> Found:
    """What the module of `spec` gives of one sequence, which runs in steps that end at the `cuts`."""
    model, params = abstract_model(spec, BuildOptions(jnp.float32, 1, REFERENCE))
    mesh = build_meshes(1)[0]
    loaded = load_parameters(checkpoint, params, spec.names, mesh, ignored=spec.ignored)
    graph, state = nnx.split(model)
    tree, (cache,) = jax.tree.structure(state), spec.config.caches
    buffers = CacheLayout(REFERENCE.page_dtype(jnp.float32), PAGE, 1, REFERENCE.page_layout).buffers(cache, 5, 1)
    caches: Any = (tuple(jnp.zeros(b.shape, b.dtype) for b in buffers),)

    def step(weights: Any, embeddings: Any, states: Any, caches: Any, meta: Any) -> Any:
        module = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        return tuple(module.predict(embeddings, module.read(states), caches, meta))

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    found, begin = [], 0
    for end in cuts:
        count, table = end - begin, np.array([[2, 4, 1, 3]], np.int32)
        one, zeros = np.int32(1), np.zeros(count, np.int32)
        at = np.arange(begin, end, dtype=np.int32)
        decodes, starts = np.int32(count == 1), np.array([0, count], np.int32)
        fields = at, zeros, np.array([end], np.int32), starts, table, decodes, one, at + 1
        meta = metadata(*fields, decode_only=False)
        weights = tuple(jax.tree.leaves(loaded))
        *out, caches = run(weights, embeddings[begin:end], states[begin:end], caches, meta)
        found.append([np.asarray(part) for part in out])
        begin = end
    return Found(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
