"""A layer's products in plain XLA, norms before them, sums that are left to the next kernel, and a sampler's sums.

Grouped products multiply rows, sorted by group, each by its own group's weight (the experts of an MoE layer):
`(x [N, i], weights [X, o, i], group_sizes [X]) -> [N, o]`, `x[r] @ weight[g].T` for every row `r` of group `g`, in
float32. With `group_sizes` [2, 0, 1] and N = 5, rows 0 and 1 are of group 0 and row 2 is of group 2; rows 3 and 4 are
of none, and come out zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm import cpu_kernels
from jaxllm.cpu_kernels import AdapterArrays, AdapterUses

Matrix: TypeAlias = Any
"""A weight `[o, i]`, or a stack of them; see `quantization.weight`."""
Norm: TypeAlias = Any
"""Any norm over the last axis: called with `x`, it gives as much. `RootMeanSquare` is the one that kernels know."""


def precision(x: jax.Array) -> lax.Precision | None:
    """Of products of such numbers: accelerators would round float32 first."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def dot(x: Float[Array, "n i"], weights: Array, contract: int = 1, dtype: Any = jnp.float32) -> Float[Array, "n o"]:
    """`x @ weights.T`, or `x @ weights` where axis 0 is contracted; summed in float32."""
    return lax.dot_general(
        x, weights, (((1,), (contract,)), ((), ())), precision=precision(weights), preferred_element_type=dtype
    )


def linear(
    x: Float[Array, "T i"],
    weight: Matrix,
    norm: Norm | None = None,
    residual: Float[Array, "T o"] | None = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "T o"]:
    out = weight.matmul(x if norm is None else norm(x))
    return (out if residual is None else residual + out.astype(residual.dtype)).astype(dtype)


def normalise(
    x: Float[Array, "... n"],
    weight: Float[Array, "*groups n"],
    bias: Float[Array, "n"] | None,
    epsilon: float,
    centred: bool,
) -> Float[Array, "... n"]:
    """`x / sqrt(mean(x^2) + epsilon) * weight + bias`, computed in float32; `centred` takes the mean off `x` first."""
    y = x.astype(jnp.float32)
    if centred:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon) * weight
    return (y if bias is None else y + bias).astype(x.dtype)


class RootMeanSquare(NamedTuple):
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467), in float32."""

    weight: jax.Array
    eps: float
    run: Callable[..., jax.Array] = normalise
    """What computes it where it stands by itself: `Kernels.normalise`."""

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        return self.run(x, self.weight, None, self.eps, False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unsummed:
    """A product by parts of its inputs: the sum of the parts, float32, is the product."""

    parts: Float[Array, "P T E"]

    def summed(self) -> Float[Array, "T E"]:
        return jnp.sum(self.parts, axis=0)


class Later:
    """What is given in place of a residual by one who will add it, and takes what is yet to be summed."""


LATER = Later()

Late: TypeAlias = Any
"""What is yet to be added to the residual stream: `[T, E]`, or for one who adds later `Unsummed` or a `Mixture`."""
Residual = Float[Array, "T E"] | Later | None


def late_sum(late: Late) -> Float[Array, "T E"]:
    """What is yet to be added, as one array."""
    found: jax.Array = late if isinstance(late, jax.Array) else late.summed()
    return found


def with_late(x: Float[Array, "T E"], late: Late | None) -> Float[Array, "T E"]:
    """The residual stream with what is yet to be added to it, if there is anything."""
    return x if late is None else (x + late_sum(late)).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mixture:
    """Outputs of each token's experts, and what every token gets beside them.

    Attributes:
        weights: of a token's experts, float32. Where one is zero the output counts as zero, whatever it holds.
        outputs: float32.
        shared: what is added to the weighted sum.
    """

    weights: Float[Array, "T k"]
    outputs: Float[Array, "T k E"]
    shared: Float[Array, "T E"] | None = None

    def summed(self) -> Float[Array, "T E"]:
        weights = self.weights[:, :, None]
        out = jnp.where(weights == 0, 0, weights * self.outputs).sum(axis=1)
        return out if self.shared is None else out + self.shared


def low_rank(
    parts: Sequence[Float[Array, "T _"]], x: Float[Array, "T i"], arrays: AdapterArrays, uses: AdapterUses
) -> tuple[jax.Array, ...]:
    """The parts of a product `p`, with `sum over n of scales[t, n] * (b[n].T @ (a[n] @ x[t]) + gain[n] * p[t])` added.

    `parts` are what the product has of each tensor that it is fused of, float32 as the result. Each goes with `r` of
    the `k` rows of `a`, and with as many columns of `b` and `gain` as it has, all in the same order. Rows past an
    adapter's own rank of a part, `ranks[n, part]`, are zeros, and so are the gains of one that has none. All adapters
    are computed for all tokens in two products.
    """
    a, b, gain, _ = arrays
    places, rank, _ = b.shape
    inner = dot(x.astype(a.dtype), a.reshape(-1, a.shape[-1])).reshape(len(x), places, len(parts), rank)
    inner = inner * uses.scales[:, :, None, None]
    factor = 1 + jnp.matmul(uses.scales, gain.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    added, first = [], 0
    for index, part in enumerate(parts):
        end = first + part.shape[1]
        matrix = b[:, :, first:end].reshape(places * rank, -1)
        own = inner[:, :, index].reshape(len(x), -1).astype(b.dtype)
        added.append(part * factor[:, first:end] + dot(own, matrix, contract=0))
        first = end
    return tuple(added)


MIN_TILE, MAX_TILE = 2, 64
"""The fewest and the most rows that are multiplied at a time: as many as an average group has, in powers of two.

XLA:CPU leaves its fast path for a single row."""


def sort_by_group(group: Int[Array, "N"], num_groups: int) -> tuple[Int[Array, "N"], Int[Array, "N"], Int[Array, "X"]]:
    """The rows in the order of their groups, each row's place in that order, and how many rows each group has.

    Rows whose group is `num_groups` are unused and come last.

    Worked example: groups [2, 0, 1, 0] of two  ->  [1, 3, 2, 0], [3, 0, 2, 1], [2, 1]
    """
    order = jnp.argsort(group, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    return order, place, jnp.bincount(group, length=num_groups)


def tiles(x: Float[Array, "N i"], weight: Matrix, group_sizes: Int[Array, "X"]) -> Float[Array, "N o"]:
    """Group by group, a tile of rows at a time: reads the weights of groups that have rows, once, and no others."""
    num_rows, (num_groups, out_features, _) = x.shape[0], weight.shape
    average = -(-num_rows // num_groups)
    tile = min(max(MIN_TILE, min(MAX_TILE, 1 << (average - 1).bit_length())), num_rows)
    ends = jnp.cumsum(group_sizes)
    used = jnp.cumsum(group_sizes > 0)

    def group_body(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.sum(used <= i)  # the i-th group that has rows
        size, end = group_sizes[group], ends[group]
        matrix = weight.select(group)

        def tile_body(j: jax.Array, out: jax.Array) -> jax.Array:
            begin = end - size + j * tile
            at = jnp.minimum(begin, num_rows - tile)
            product = matrix.matmul(lax.dynamic_slice_in_dim(x, at, tile))
            row = at + jnp.arange(tile)
            mine = (row >= begin) & (row < end)
            merged = jnp.where(mine[:, None], product, lax.dynamic_slice_in_dim(out, at, tile))
            return lax.dynamic_update_slice_in_dim(out, merged, at, 0)

        return lax.fori_loop(0, (size + tile - 1) // tile, tile_body, out)

    return lax.fori_loop(0, used[-1], group_body, jnp.zeros((num_rows, out_features), jnp.float32))


def ragged_dot(x: Float[Array, "N i"], weight: Matrix, group_sizes: Int[Array, "X"]) -> Float[Array, "N o"]:
    """The compiler's own, where it has one that does not multiply every row by every weight."""
    matrices = weight.dequantize()
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    out = lax.ragged_dot_general(
        x.astype(matrices.dtype), matrices, group_sizes, numbers, precision=precision(matrices),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    grouped = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(grouped[:, None], out, 0)


class SoftmaxSums(NamedTuple):
    """Sums of weights `exp(logit - most)`, where `most` is at least each row's greatest logit.

    Attributes:
        log_sum_exp: `(logits [R, V]) -> [R]`.
        mass: `(logits [R, V], most [R], threshold [R]) -> [R]`: the sum of the weights of logits from a threshold on.
        running: `(logits [R, V], most [R], threshold [R], block) -> [R, -(-V // block)]`: that sum, up to the end of
            each block of logits.
    """

    log_sum_exp: Callable[[jax.Array], jax.Array]
    mass: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    running: Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]


def _running(
    logits: Float[Array, "R V"], most: Float[Array, "R"], threshold: Float[Array, "R"], block: int
) -> Float[Array, "R n"]:
    weights = _weights(logits, most, threshold)
    sums = jnp.pad(weights, ((0, 0), (0, -logits.shape[1] % block))).reshape(len(logits), -1, block).sum(-1)
    # Kept by themselves: GPUs would sum them once more inside of what follows, which spills registers.
    return lax.optimization_barrier(jnp.cumsum(sums, axis=1))


def _weights(logits: jax.Array, most: jax.Array, threshold: jax.Array) -> Float[Array, "R V"]:
    return jnp.where(logits >= threshold[:, None], jnp.exp(logits - most[:, None]), 0)


PLAIN_SUMS = SoftmaxSums(
    lambda logits: jax.nn.logsumexp(logits, axis=-1),
    lambda logits, most, threshold: _weights(logits, most, threshold).sum(-1),
    _running,
)
"""In plain XLA, whose order of summation is its own affair."""

CPU_SUMS = SoftmaxSums(
    cpu_kernels.log_sum_exp,
    lambda logits, most, threshold: cpu_kernels.running_weights(logits, most, threshold, 256)[:, -1],
    cpu_kernels.running_weights,
)
"""By the C++ kernels, in an order that does not depend on the number of rows."""
