"""Experts in host memory, and the places on a device that those have which tokens chose last.

A step runs its tokens' experts in turns, as many at once as there are places. Experts that have a place are not
fetched again; the others take the places that were unused for longest. A decode mostly needs one turn. What places hold
stays there between steps, beside the layer's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.models.caches import Buffer, Cache
from jaxllm.quantization.weight import PartlyOnHost
from jaxllm.sharding.mesh import TENSOR, Axes


class ExpertPlaces(NamedTuple):
    """A layer's places on a device; as shapes, those of all devices of a batch."""

    first: tuple[Any, ...]  # the arrays of a Weight `[C, o, i]`: the gate and the projection up
    down: tuple[Any, ...]
    expert: Any  # 1 + the number of each place's expert among those in host memory; 0 where there is none
    order: Any  # the places' order of use: 0 is that of the one unused for longest


class Turn(NamedTuple):
    """Up to as many experts as there are places.

    Attributes:
        experts: their numbers: `num_found` that have a place, then those to fetch, up to `num_run`.
        places: of each expert its place.
        now: the number of the expert that runs in each place, and one more; 0 of places that are not used.
    """

    experts: Int[Array, "C"]
    places: Int[Array, "C"]
    num_found: Int[Array, ""]
    num_run: Int[Array, ""]
    now: Int[Array, "C"]

    def place_of(self, num_experts: int) -> Int[Array, "N"]:
        """The place of each expert; as many as there are places of those that have another turn."""
        return _find(self.now, num_experts)

    def after(self, places: ExpertPlaces) -> ExpertPlaces:
        used = self.now > 0
        recent = places.order + used * len(used)
        return places._replace(
            expert=jnp.where(used, self.now, places.expert), order=_rank(recent, jnp.ones_like(used))
        )


def next_turn(places: ExpertPlaces, waiting: Bool[Array, "N"]) -> Turn:
    """The experts to run next of those that are `waiting`.

    Worked example: of four experts 0, 2 and 3 are waiting, and two places hold 3 and 1, of which 3 was used last. Then
    3 and 0 are next: 3 stays where it is, and 0 is fetched into the place of 1.

    Numbers are found by comparing all with all, which a compiler makes one loop of; a sort would be many.
    """
    num_experts, num_places = len(waiting), len(places.expert)
    place_of = _find(places.expert, num_experts)
    found = waiting & (place_of < num_places)
    num_found, num_run = jnp.sum(found), jnp.minimum(jnp.sum(waiting), num_places)
    turn = jnp.where(found, jnp.cumsum(found), num_found + jnp.cumsum(waiting & ~found)) - 1
    nth = jnp.arange(num_places)
    mine = nth < num_run
    experts = _pick(waiting & (turn == nth[:, None]), jnp.arange(num_experts))
    free = (places.expert == 0) | ~waiting[jnp.maximum(places.expert - 1, 0)]
    given_up = _pick(free & (_rank(places.order, free) == (nth - num_found)[:, None]), nth)
    into = jnp.where(nth < num_found, place_of[experts], given_up)
    now = _pick(mine & (into == nth[:, None]), experts + 1)
    return Turn(experts, into, num_found, num_run, now)


def _find(expert: Int[Array, "C"], num_experts: int) -> Int[Array, "N"]:
    """The place of each expert, of which `expert` has the numbers and one more; `C` of those in none."""
    num_places = len(expert)
    holds = expert == jnp.arange(1, num_experts + 1)[:, None]
    return jnp.min(jnp.where(holds, jnp.arange(num_places), num_places), axis=1).astype(jnp.int32)


def _rank(order: Int[Array, "C"], among: Bool[Array, "C"]) -> Int[Array, "C"]:
    """The number of places `among` those before each one; of two alike the one with the lower number comes first."""
    at = jnp.arange(len(order))
    before = (order < order[:, None]) | ((order == order[:, None]) & (at < at[:, None]))
    return jnp.sum(before & among, axis=1).astype(jnp.int32)


def _pick(which: Bool[Array, "m n"], values: Int[Array, "n"]) -> Int[Array, "m"]:
    """In each row the value that it names, or 0 if it names none."""
    return jnp.sum(jnp.where(which, values, 0), axis=1).astype(jnp.int32)


def run_in_turns(
    first: PartlyOnHost, down: PartlyOnHost, places: ExpertPlaces, waiting: Bool[Array, "N"],
    run: Callable[[ExpertPlaces, Int[Array, "N"]], Float[Array, "P E"]], out: Float[Array, "P E"],
) -> tuple[Float[Array, "P E"], ExpertPlaces]:  # fmt: skip
    """`out` with what all experts that are `waiting` add to it, and the places as they are then.

    `run` is told which experts the places hold, and the place of each expert: it computes those that have one.
    """
    num_experts, num_places = len(waiting), len(places.expert)

    def turn(carry: Any) -> Any:
        places, waiting, out = carry
        now = next_turn(places, waiting)

        def fetch(index: jax.Array, kept: Any) -> Any:
            expert, place = now.experts[index], now.places[index]
            return first.fetch(expert, kept[0], place), down.fetch(expert, kept[1], place)

        kept = lax.fori_loop(now.num_found, now.num_run, fetch, (places.first, places.down))
        places = now.after(places._replace(first=kept[0], down=kept[1]))
        place_of = now.place_of(num_experts)
        return places, waiting & (place_of == num_places), out + run(places, place_of)

    places, _, out = lax.while_loop(lambda carry: carry[1].any(), turn, (places, waiting, out))
    return out, places


def places_for(first: PartlyOnHost, down: PartlyOnHost, axes: tuple[Axes, Axes], num_places: int, tp: int) -> Any:
    """Buffers for `num_places` places of a layer whose weights, as shapes over all devices, lie along `axes`.

    Each of `tp` devices has places of its own where they share the experts, and else a part of each.
    """
    own = axes[0][0] is not None
    count, along = (tp * num_places, TENSOR) if own else (num_places, None)

    def buffers(weight: PartlyOnHost, axes: Axes) -> tuple[Buffer, ...]:
        arrays = zip(jax.tree.leaves(weight.host), weight.dtypes, weight.host.axes(axes), strict=True)
        return tuple(Buffer((count, *array.shape[1:]), dtype, (along, *lies[1:])) for array, dtype, lies in arrays)

    numbers = Buffer((count,), jnp.dtype(jnp.int32), (along,))
    return ExpertPlaces(buffers(first, axes[0]), buffers(down, axes[1]), numbers, numbers)


def forgotten(caches: Any) -> Any:
    """Caches whose places hold no expert: the weights are others now."""

    def emptied(found: Any) -> Any:
        if not isinstance(found, ExpertPlaces):
            return found
        return found._replace(expert=jnp.zeros_like(found.expert, device=found.expert.sharding))

    return jax.tree.map(emptied, caches, is_leaf=lambda found: isinstance(found, ExpertPlaces))


def split_places(caches: Sequence[Cache]) -> tuple[list[Cache], list[ExpertPlaces | None]]:
    """Each layer's cache without its places, and those where it has any: they come last in its cache."""
    places = [cache[-1] if cache and isinstance(cache[-1], ExpertPlaces) else None for cache in caches]
    own = [cache if there is None else cache[:-1] for cache, there in zip(caches, places, strict=True)]
    return own, places


def with_places(caches: Sequence[Cache], places: Sequence[ExpertPlaces | None]) -> tuple[Cache, ...]:
    return tuple((*cache,) if there is None else (*cache, there) for cache, there in zip(caches, places, strict=True))
