"""Experts in host memory: turns against a plain list of what was used last, and layers against those without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm.models.layers.hands import Told, telling
from jaxllm.models.layers.host_experts import ExpertPlaces, next_turn
from jaxllm.models.layers.moe import MoE, places_of_layer
from jaxllm.models.options import BuildOptions
from jaxllm.pallas_kernels import REFERENCE, Kernels
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.stored import Stored
from jaxllm.quantization.tiles import TiledKind
from jaxllm.quantization.weight import DenseKind, HostShare, WeightKind
from jaxllm.sharding.mesh import build_meshes, named_sharding
from tests.models.test_moe import (
    EXPERTS,
    INTERPRETED,
    LAYERS,
    SIZE,
    layer_oracle,
    metadata,
    random_params,
    random_tokens,
)

BFLOAT16, FLOAT32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


class UsedLast:
    """What each place holds, and the places by their use, the one unused for longest first."""

    def __init__(self, num_places: int):
        self.held: list[int | None] = [None] * num_places
        self.order = list(range(num_places))

    def turn(self, waiting: set[int]) -> tuple[set[int], set[int]]:
        """Run as many as there are places; those that were found, and those that were fetched."""
        found = {expert for expert in self.held if expert in waiting}
        fetched = sorted(waiting - found)[: len(self.held) - len(found)]
        for expert in fetched:
            place = next(place for place in self.order if self.held[place] not in found | set(fetched))
            self.held[place] = expert
        used = [place for place in self.order if self.held[place] in found | set(fetched)]
        self.order = [place for place in self.order if place not in used] + used
        return found, set(fetched)


@pytest.mark.parametrize(("num_experts", "num_places"), [(1, 1), (4, 1), (7, 3), (16, 5), (16, 16)])
def test_turns_keep_what_was_used_last(num_experts: int, num_places: int) -> None:
    random, expected = np.random.default_rng(num_experts), UsedLast(num_places)
    zeros = jnp.zeros(num_places, jnp.int32)
    places = ExpertPlaces((), (), zeros, zeros)

    @jax.jit
    def step(places: ExpertPlaces, waiting: jax.Array) -> Any:
        turn = next_turn(places, waiting)
        return turn, turn.place_of(num_experts), turn.after(places)

    for _ in range(40):
        waiting = random.random(num_experts) < random.choice([0.1, 0.5, 1.0])
        while waiting.any():
            found, fetched = expected.turn(set(np.flatnonzero(waiting).tolist()))
            turn, place_of, places = step(places, waiting)
            experts = np.asarray(turn.experts)[: turn.num_run].tolist()
            assert set(experts[: turn.num_found]) == found
            assert set(experts[turn.num_found :]) == fetched
            assert np.asarray(places.expert - 1).tolist() == [-1 if one is None else one for one in expected.held]
            assert np.argsort(places.order).tolist() == expected.order
            for expert in range(num_experts):
                runs = expert in found | fetched
                assert int(place_of[expert]) == (expected.held.index(expert) if runs else num_places)
            waiting[experts] = False


def steps(
    name: str, params: dict[str, Any], xs: list[np.ndarray], count: int, num_places: int, kernels: Kernels
) -> tuple[list[np.ndarray], Any]:
    """What a layer with `count` experts in host memory gives in one step after the other, and its places at the end."""
    options = BuildOptions(jnp.float32, kernels=kernels, host_experts=count)
    layer = MoE(SIZE, LAYERS[name], "silu", options)
    graph, state = nnx.split(layer)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    mesh = build_meshes(1)[0]
    host = named_sharding(mesh, (), on_host=True)
    values = []
    for path, variable in leaves:
        tensors, told = params[".".join(str(key.key) for key in path)], variable.get_metadata()
        whole = told["layout"].assemble(tensors) if isinstance(tensors, tuple) else tensors
        value = jax.tree.map(lambda leaf, whole=whole: np.asarray(whole, leaf.dtype), variable.get_value())
        if told.get("host") is not None:
            parted = told["host"].split(value)
            value = replace(parted, host=jax.device_put(parted.host, host))
            variable.set_value(told["host"].split(variable.get_value()))
        values.append(variable.replace(jax.tree.map(jnp.asarray, value) if told.get("host") is None else value))
    nnx.update(layer, jax.tree.unflatten(tree, [variable for _, variable in leaves]))
    buffers = places_of_layer(layer, num_places, 1)
    places = jax.tree.map(lambda b: jnp.zeros(b.shape, b.dtype), buffers, is_leaf=lambda b: hasattr(b, "axes"))

    def step(filled: Any, places: Any, x: jax.Array) -> Any:
        meta = metadata(np.ones(len(x), bool))
        with telling(Told(meta, places=places)) as kept:
            out = nnx.merge(graph, filled)(x, meta)
        return out, kept.places

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    outputs = []
    for x in xs:
        out, places = run(jax.tree.unflatten(tree, values), places, x)
        outputs.append(np.asarray(out))
    return outputs, places


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_the_same_to_the_bit(name: str) -> None:
    params, xs = random_params(LAYERS[name]), [random_tokens(13), random_tokens(1), random_tokens(13)]
    expected = steps(name, params, xs, 0, 1, REFERENCE)[0]
    for count, num_places in ((1, 1), (5, 2), (EXPERTS, 3)):
        outputs, places = steps(name, params, xs, count, num_places, REFERENCE)
        for one, other in zip(expected, outputs, strict=True):
            np.testing.assert_array_equal(one, other)
        held = [int(one) for one in places.expert if one > 0]
        assert len(held) == len(set(held)) and max(held, default=1) <= count


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss"])
def test_kernels_of_gpus_give_the_same(name: str) -> None:
    params, xs = random_params(LAYERS[name]), [random_tokens(13), random_tokens(13)]
    outputs = steps(name, params, xs, EXPERTS, 3, INTERPRETED)[0]
    for one, other, x in zip(outputs, steps(name, params, xs, 5, 2, INTERPRETED)[0], xs, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, layer_oracle(name, params, x), rtol=1e-5, atol=1e-5)


KINDS: dict[str, WeightKind] = {
    "bfloat16": DenseKind(BFLOAT16),
    "float32": DenseKind(FLOAT32),
    "q4_K": GgufKind("Q4_K", FLOAT32),
    "tiles of q8_0": TiledKind(GgufKind("Q8_0", BFLOAT16), joins=True),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize(("count", "devices"), [(1, 1), (3, 2), (4, 2), (8, 1)])
def test_a_stack_in_two_places_is_the_same_stack(kind: WeightKind, count: int, devices: int) -> None:
    """Each device's part of it, as `shard_map` shows it; and the shapes are those that were said before."""
    drawn = np.random.default_rng(0).standard_normal((8, 32, 256)).astype(np.float32)
    stack = kind.pack([Stored(drawn, "F32", drawn.shape)], None)
    share = HostShare(count, devices)
    parted, abstract = share.split(stack), share.split(kind.abstract((8, 32, 256)))
    said = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(abstract)]
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(parted)] == said
    assert parted.on_host == [False] * (0 if count * devices == 8 else len(parted.dtypes)) + [True] * len(parted.dtypes)
    whole = np.asarray(jax.tree.map(jnp.asarray, stack).dequantize(), np.float32)
    for device in range(devices):
        part = jax.tree.map(lambda leaf, at=device: jnp.asarray(np.split(leaf, devices)[at]), parted)
        mine = np.split(whole, devices)[device]
        assert part.shape == mine.shape and part.num_resident == len(mine) - count
        np.testing.assert_array_equal(np.asarray(part.dequantize(), np.float32), mine)
        arrays = tuple(jnp.zeros((2, *leaf.shape[1:]), dtype) for leaf, dtype in _of_host(part))
        fetched = part.stack_of(part.fetch(jnp.int32(count - 1), arrays, jnp.int32(1)))
        np.testing.assert_array_equal(np.asarray(fetched.dequantize()[1], np.float32), mine[-1])


def _of_host(part: Any) -> Any:
    return zip(jax.tree.leaves(part.host), part.dtypes, strict=True)
