"""How tokens choose their experts on NVIDIA GPUs, and each expert's list of those that did.

In a small step one kernel of one program goes from logits to lists and tiles: the rounds of top-k cost some
microseconds, which XLA's softmax, sort, mask and the rest take for each of their launches. With more tokens blocks
choose beside each other, then each expert looks through all choices for its own, then lists are cut.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.metadata import StepMetadata

BLOCK = 1024
"""Rows that a program looks at together."""


class RowLists(NamedTuple):
    """The rows of each group, in order and with room for as many as there may be, and tiles of one group's rows.

    Worked example, groups [2, 0, 2, 3, 2] of three, at most 4 rows each, tiles of 2:

        rows     [1, _, _, _,  _, _, _, _,  0, 2, 4, _]    group 0's, 1's and 2's; row 3 has none
        tiles    [0, 0, 1], [2, 8, 2], [2, 10, 1]
    """

    rows: Int[Array, "M"]
    tiles: Int[Array, "tiles 3"]
    """(group, its first place in `rows`, rows); those left over have 0 rows."""


def most_tiles(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """The most that rows may be cut into."""
    return num_rows // tile_rows + min(num_groups, num_rows)


def list_rows(
    group: Int[Array, "N"], num_groups: int, most: int, tile_rows: int, *, interpret: bool = False
) -> RowLists:
    """The rows of groups that have at most `most` rows each; rows of group `num_groups` are unused.

    A program has a group, and looks through all rows for its own.
    """
    num_rows = group.shape[0]
    rows, sizes = pl.pallas_call(
        functools.partial(_list_kernel, num_rows=num_rows, most=most),
        out_shape=tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (num_groups * most, num_groups)),
        grid=(num_groups,),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=8, num_stages=2),
        name="list_rows",
    )(group)

    def cut(sizes_ref: Any, tiles_ref: Any) -> None:
        number = jnp.arange(pl.next_power_of_2(num_groups))
        own = triton_load(sizes_ref.at[number], mask=number < num_groups, other=0)
        store_tiles(tiles_ref, number, own, most, tile_rows)

    tiles = pl.pallas_call(
        cut,
        out_shape=jax.ShapeDtypeStruct((most_tiles(num_rows, num_groups, tile_rows), 3), jnp.int32),
        grid=(1,),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=1),
        name="row_tiles",
    )(sizes)
    return RowLists(rows, tiles)


def _list_kernel(group_ref: Any, rows_ref: Any, sizes_ref: Any, *, num_rows: int, most: int) -> None:
    group = pl.program_id(0)
    lane = jnp.arange(min(BLOCK, pl.next_power_of_2(num_rows)))

    def body(block: Array, size: Array) -> Array:
        row = block * len(lane) + lane
        mine = triton_load(group_ref.at[row], mask=row < num_rows, other=-1) == group
        count = mine.astype(jnp.int32)
        scatter(rows_ref, group * most + size + jnp.cumsum(count) - count, row, mine)
        return size + jnp.sum(count)

    sizes_ref[group] = lax.fori_loop(0, pl.cdiv(num_rows, len(lane)), body, jnp.int32(0))


def groups_of_rows(lists: RowLists, num_rows: int, tile_rows: int) -> Int[Array, "N"]:
    group, first, count = lists.tiles.T
    at = jnp.arange(tile_rows)
    row = lists.rows.at[first[:, None] + at].get(mode="clip")
    row = jnp.where(at < count[:, None], row, num_rows)
    return jnp.zeros((num_rows,), jnp.int32).at[row].set(group[:, None], mode="drop")


def store_tiles(tiles_ref: Any, group: Array, sizes: Array, most: int, tile_rows: int) -> None:
    """Cuts the lists of groups, `sizes` long and `most` at most, into tiles: `RowLists.tiles`."""
    counts = lax.div(sizes + tile_rows - 1, tile_rows)
    ends = jnp.cumsum(counts)

    def body(index: Array, carry: Array) -> Array:
        begin, left = index * tile_rows, sizes - index * tile_rows
        tile = jnp.where(left > 0, ends - counts + index, tiles_ref.shape[0])
        for column, values in enumerate((group, group * most + begin, jnp.minimum(left, tile_rows))):
            triton_store(tiles_ref.at[tile, column], values, mask=left > 0)
        return carry

    lax.fori_loop(0, pl.cdiv(most, tile_rows), body, 0)
    tile = jnp.arange(pl.next_power_of_2(tiles_ref.shape[0]))
    unused = (tile >= jnp.sum(counts)) & (tile < tiles_ref.shape[0])
    triton_store(tiles_ref.at[tile, 2], jnp.zeros_like(tile), mask=unused)


def scatter(ref: Any, at: Array, values: Array, mask: Array) -> None:
    """Stores the values in the mask; the others go outside, as an interpreted store would write back old values."""
    triton_store(ref.at[jnp.where(mask, at, ref.shape[0])], values, mask=mask)


BLOCK_SCORES = 2048
"""Scores that a program looks at together."""
WARP_SCORES = 256
"""Eight a thread."""
MOST_SCORES = 4096
"""Of a step whose tokens are routed by one program."""
LARGEST = float(jnp.finfo(jnp.float32).max)


class Routed(NamedTuple):
    """Which experts compute which tokens. Pair `t * k + j` is token `t` with the expert that it likes `j`th best."""

    weights: Float[Array, "T k"]
    """float32; zero for tokens that are padding and experts that are not here."""
    pairs: RowLists


def route(
    logits: Float[Array, "T X"],
    bias: Float[Array, "X"] | None,
    first: Int[Array, ""] | int,
    here: int,
    config: Any,
    tile_rows: int,
    meta: StepMetadata,
    *,
    interpret: bool = False,
) -> Routed:
    """What `models.layers.experts.route` chooses by `config`, as lists of the experts `first … first + here - 1`."""
    tokens, experts = logits.shape
    lanes = pl.next_power_of_2(experts)
    rows = max(1, min(pl.next_power_of_2(tokens), BLOCK_SCORES // lanes))
    pairs = tokens * config.top_k
    weights_shape = jax.ShapeDtypeStruct((pairs,), jnp.float32)
    static = {"config": config, "num_seqs": meta.page_table.shape[0], "here": here, "rows": rows}

    def launch(name: str, kernel: Any, programs: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
        return pl.pallas_call(
            functools.partial(kernel, **static),
            out_shape=(weights_shape, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)),
            grid=(programs,),
            interpret=interpret,
            compiler_params=triton_compiler_params(num_warps=max(1, rows * lanes // WARP_SCORES), num_stages=1),
            name=name,
        )(meta.seq_ids, jnp.asarray(first, jnp.int32).reshape(1), logits, *(() if bias is None else (bias,)))

    if pl.next_power_of_2(tokens) * lanes <= MOST_SCORES:
        kernel = functools.partial(_route_kernel, tile_rows=tile_rows)
        weights, lists, tiles = launch("route", kernel, 1, (here * tokens,), (most_tiles(pairs, here, tile_rows), 3))
        found = RowLists(lists, tiles)
    else:
        weights, chosen = launch("choose_experts", _choose_kernel, pl.cdiv(tokens, rows), (pairs,))
        found = list_rows(chosen, here, tokens, tile_rows, interpret=interpret)
    return Routed(weights.reshape(tokens, -1), found)


def _choose_kernel(
    seq_ids_ref: Any, first_ref: Any, logits_ref: Any, *refs: Any, config: Any, num_seqs: int, here: int, rows: int
) -> None:
    *bias_refs, weights_ref, experts_ref = refs
    expert = jnp.arange(pl.next_power_of_2(logits_ref.shape[1]))
    token = pl.program_id(0) * rows + jnp.arange(rows)
    place, used = _chosen(seq_ids_ref, first_ref, logits_ref, bias_refs, weights_ref, token, config, num_seqs, here)
    group = jnp.where(used, expert[None, :] - first_ref[0], here)
    pair = token[:, None] * config.top_k + place
    inside = (place < config.top_k) & (token < logits_ref.shape[0])[:, None]
    scatter(experts_ref, pair, group, inside)


def _route_kernel(
    seq_ids_ref: Any, first_ref: Any, logits_ref: Any, *refs: Any, config: Any, num_seqs: int, here: int, rows: int,
    tile_rows: int,
) -> None:  # fmt: skip
    *bias_refs, weights_ref, lists_ref, tiles_ref = refs
    tokens, experts = logits_ref.shape
    group = jnp.arange(pl.next_power_of_2(experts)) - first_ref[0]

    def body(block: Array, sizes: Array) -> Array:
        token = block * rows + jnp.arange(rows)
        place, used = _chosen(seq_ids_ref, first_ref, logits_ref, bias_refs, weights_ref, token, config, num_seqs, here)
        count = used.astype(jnp.int32)
        at = group[None, :] * tokens + sizes[None, :] + jnp.cumsum(count, axis=0) - count
        scatter(lists_ref, at, token[:, None] * config.top_k + place, used)
        return sizes + jnp.sum(count, axis=0)

    sizes = lax.fori_loop(0, pl.cdiv(tokens, rows), body, jnp.zeros_like(group))
    store_tiles(tiles_ref, group, sizes, tokens, tile_rows)


def _chosen(
    seq_ids_ref: Any, first_ref: Any, logits_ref: Any, bias_refs: Any, weights_ref: Any, token: Array, config: Any,
    num_seqs: int, here: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Stores weights; the places `[R, X]` of a token's experts (`top_k`: unused), and which are computed here."""
    tokens, experts = logits_ref.shape
    expert = jnp.arange(pl.next_power_of_2(experts))
    known = expert < experts
    inside = token < tokens
    logits = triton_load(logits_ref.at[token[:, None], expert[None, :]], mask=inside[:, None] & known[None, :], other=0)
    bias = triton_load(bias_refs[0].at[expert], mask=known, other=0) if bias_refs else None
    weights, place = _choose(logits, bias, expert, config)
    live = triton_load(seq_ids_ref.at[token], mask=inside, other=num_seqs) < num_seqs
    first = first_ref[0]
    chosen = place < config.top_k
    used = chosen & live[:, None] & ((expert >= first) & (expert < first + here))[None, :]
    pair = token[:, None] * config.top_k + place
    scatter(weights_ref, pair, jnp.where(used, weights, 0), chosen & inside[:, None])
    return place, used


def _choose(logits: Array, bias: Array | None, expert: Array, config: Any) -> tuple[Array, Array]:
    known = (expert < config.num_experts)[None, :]
    if config.scoring == "softmax":
        exp = jnp.where(known, jnp.exp(logits - jnp.max(jnp.where(known, logits, -LARGEST), axis=1)[:, None]), 0)
        scores = exp / jnp.sum(exp, axis=1)[:, None]
    else:
        scores = 1 / (1 + jnp.exp(-logits))
    choice = scores if bias is None else scores + bias[None, :]
    # What is not a number is greatest, as it is for `lax.top_k`; minus infinity is left to what may not be chosen.
    choice = jnp.where(choice != choice, jnp.inf, jnp.maximum(choice, -LARGEST))
    choice = jnp.where(known, choice, -jnp.inf)
    if config.top_groups < config.num_groups:
        choice = _best_groups_only(choice, expert, config)

    def body(place: Array, places: Array) -> Array:
        left = jnp.where(places == config.top_k, choice, -jnp.inf)
        return jnp.where(expert[None, :] == _greatest(left, expert)[:, None], place, places)

    places = lax.fori_loop(0, config.top_k, body, jnp.full(logits.shape, config.top_k, jnp.int32))
    weights = scores
    if config.renormalize:
        total = jnp.sum(jnp.where(places < config.top_k, scores, 0), axis=1)
        weights = scores / (total + config.renormalize_eps)[:, None]
    return weights * config.scale, places


def _best_groups_only(choice: Array, expert: Array, config: Any) -> Array:
    group = lax.div(expert, config.num_experts // config.num_groups)
    scores = []
    for index in range(config.num_groups):
        own = jnp.where((group == index)[None, :], choice, -jnp.inf)
        score = jnp.max(own, axis=1)
        if config.group_score == "top2_sum":
            score += jnp.max(jnp.where(expert[None, :] == _greatest(own, expert)[:, None], -jnp.inf, own), axis=1)
        scores.append(score)
    allowed = jnp.zeros(choice.shape, jnp.bool_)
    for index, score in enumerate(scores):
        better = [(other > score) if at > index else (other >= score) for at, other in enumerate(scores) if at != index]
        best = sum(which.astype(jnp.int32) for which in better) < config.top_groups
        allowed |= best[:, None] & (group == index)[None, :]
    return jnp.where(allowed, choice, -jnp.inf)


def _greatest(values: Array, expert: Array) -> Array:
    best = jnp.max(values, axis=1)[:, None]
    return jnp.min(jnp.where(values == best, expert[None, :], expert.shape[0]), axis=1)
