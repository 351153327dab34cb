"""Matrix products with weights in tiles and what surrounds them; norms, and a sampler's sums: called while tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jaxtyping import Array, BFloat16, Float, Float32, Int, Int32, UInt8

from jaxllm.cpu_kernels.library import call
from jaxllm.cpu_kernels.tiles import IN_BF16, number, tile_inputs

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")
"""Of a gated MLP; `gelu` is the exact one, `relu2` the square of relu."""


class Tiles(NamedTuple):
    tiles: UInt8[Array, "groups blocks bytes"]
    format: str
    rows: int
    scales: Float[Array, "groups runs 16"] | None = None
    """Of formats whose tiles have none."""
    in_bf16: bool = False
    """Products with a format of integers round weights and inputs to bfloat16; only where the CPU multiplies those."""

    @property
    def number(self) -> np.int64:
        return np.int64(number(self.format) + IN_BF16 * self.in_bf16)

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return (self.tiles,) if self.scales is None else (self.tiles, self.scales)

    @property
    def inputs(self) -> int:
        return self.tiles.shape[-2] * tile_inputs(self.format)


class RowNorm(NamedTuple):
    """An RMS norm: `x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight)`, in float32."""

    weight: Float[Array, "i"]
    epsilon: float = 1e-6
    weight_offset: float = 0.0


def linears(
    x: Float[Array, "... i"],
    weights: Sequence[Tiles],
    *,
    norm: RowNorm | None = None,
    residual: Float[Array, "... o"] | None = None,
    adapters: tuple[AdapterArrays, AdapterUses] | None = None,
) -> tuple[Float[Array, "... o"], ...]:
    """`x @ w.T` for each of some matrices of any formats, float32 `[..., rows]`; of the normalised `x` with `norm`.

    `x` is float32 or bfloat16. With integer formats activations are quantized to int8 with a scale per 32 inputs,
    unless the weights are `in_bf16`; with bf16 weights they are rounded to bf16 where the CPU multiplies those. Sums
    are float32, and a row's result does not depend on the other rows. A row that holds a NaN or an infinity comes out
    NaN. Rows of zeros at the end, which pad a batch, are not multiplied: their products are zeros, whatever the weights
    hold.

    One matrix alone may have a `residual`, to which its product is added. What the tokens' `adapters` give for the
    normalised `x` is added, as `low_rank` would: the matrices are the parts.
    """
    if residual is not None and len(weights) != 1:
        raise ValueError(f"a residual goes with one matrix, not {len(weights)}")
    shapes = tuple(ShapeDtypeStruct((*x.shape[:-1], w.rows), jnp.float32) for w in weights)
    return tuple(_products("jaxllm_linear", shapes, x, weights, norm, residual, adapters))


def _products(
    target: str, shapes: Any, x: jax.Array, weights: Sequence[Tiles], norm: RowNorm | None,
    residual: jax.Array | None, adapters: Sequence[Sequence[jax.Array]] | None, **attributes: Any,
) -> Any:  # fmt: skip
    more = () if residual is None else (residual.astype(jnp.float32),)
    return call(target, shapes)(
        x,
        *(operand for w in weights for operand in w.operands),
        *_norm_arguments(norm),
        *more,
        *(array for arrays in adapters or () for array in arrays),
        formats=np.array([w.number for w in weights], np.int64),
        residual=residual is not None,
        adapters=adapters is not None,
        **_norm_attributes(norm),
        **attributes,
    )


def mlp(
    x: Float[Array, "... i"],
    gate: Tiles,
    up: Tiles,
    down: Tiles,
    activation: str,
    *,
    norm: RowNorm | None = None,
    residual: Float[Array, "... o"] | None = None,
    adapters: tuple[AdapterArrays, AdapterArrays, AdapterUses] | None = None,
) -> Float[Array, "... o"]:
    """`(activation(x @ gate.T) * (x @ up.T)) @ down.T + residual`, float32, as two calls of `linears` would have it.

    `activation` is one of `ACTIVATIONS`. What is between the products lies in memory as `down` takes it: with integer
    formats as codes, a quarter of the floats. `adapters` add to gate and up, with the first tables, and to down, with
    the second.
    """
    if activation not in ACTIVATIONS or gate.rows != up.rows:
        raise ValueError(
            f"activation {activation!r} of {gate.rows} by {up.rows} rows; there are {', '.join(ACTIVATIONS)}"
        )
    if down.inputs != gate.rows:
        raise ValueError(f"down takes {down.inputs} inputs, and gate and up have {gate.rows} rows")
    shape = ShapeDtypeStruct((*x.shape[:-1], down.rows), jnp.float32)
    hidden, kind = np.int64(gate.rows), np.int64(ACTIVATIONS.index(activation))
    weights = (gate, up, down)
    return _products("jaxllm_mlp", shape, x, weights, norm, residual, adapters, hidden=hidden, activation=kind)


def grouped_matmul(x: Float[Array, "N i"], weights: Tiles, group_sizes: Int[Array, "X"]) -> Float[Array, "N o"]:
    """`x[r] @ w[g].T` for rows sorted by group, float32: reads the weights of groups that have rows, and no others.

    `weights.tiles` is `[X, groups, blocks, bytes]`. Rows past the last group's come out zero.
    """
    return call("jaxllm_grouped", ShapeDtypeStruct((len(x), weights.rows), jnp.float32))(
        x, group_sizes.astype(jnp.int32), *weights.operands, format=weights.number
    )


def argmax(x: Float[Array, "... i"], head: Tiles, *, norm: RowNorm | None = None) -> Int[Array, "..."]:
    """The index of each row's greatest product, int32, without the products ever lying in memory; as `jnp.argmax`."""
    return call("jaxllm_argmax", ShapeDtypeStruct(x.shape[:-1], jnp.int32))(
        x,
        *head.operands,
        *_norm_arguments(norm),
        format=head.number,
        rows=np.int64(head.rows),
        **_norm_attributes(norm),
    )


def embed(ids: Int[Array, "..."], table: Tiles, inputs: int) -> Float[Array, "... i"]:
    """Rows of a matrix by their numbers, float32 `[..., inputs]`. A number outside takes the nearest row there is."""
    return call("jaxllm_rows", ShapeDtypeStruct((*ids.shape, inputs), jnp.float32))(
        ids.astype(jnp.int32), *table.operands, format=np.int64(number(table.format)), rows=np.int64(table.rows)
    )


def _norm_arguments(norm: RowNorm | None) -> tuple[jax.Array, ...]:
    return () if norm is None else (norm.weight.astype(jnp.float32),)


def _norm_attributes(norm: RowNorm | None) -> dict[str, object]:
    epsilon, offset = (0.0, 0.0) if norm is None else (norm.epsilon, norm.weight_offset)
    return {"norm": norm is not None, "epsilon": np.float32(epsilon), "weight_offset": np.float32(offset)}


class AdapterArrays(NamedTuple):
    """All adapters of one product: `a` holds `r` rows for each of its parts, one after the other.

    `gain` is what the product itself is multiplied by and added: that of an adapter with magnitudes (DoRA). `ranks` are
    the adapters' own, up to `r`: 0 for parts that an adapter leaves alone, which are not read.
    """

    a: BFloat16[Array, "N k i"]
    b: BFloat16[Array, "N r o"]
    gain: BFloat16[Array, "N o"]
    ranks: Int32[Array, "N p"]


class AdapterUses(NamedTuple):
    """How much of each adapter each token has, and 1 for adapters that have gains."""

    scales: Float32[Array, "T N"]
    gains: Int32[Array, "N"]


def low_rank(
    parts: Sequence[Float32[Array, "T _"]], x: Float[Array, "T i"], arrays: AdapterArrays, uses: AdapterUses
) -> tuple[jax.Array, ...]:
    """The parts of a product `p`, with `sum over n of scales[t, n] * (b[n].T @ (a[n] @ x[t]) + gain[n] * p[t])` added.

    See `pallas_kernels/products.py`. Only adapters with a scale that is not 0 are read, and of these the rows up to
    their own ranks, and gains where they have some. Sums are float32, and a token's result does not depend on the
    others.
    """
    shapes = tuple(ShapeDtypeStruct(part.shape, jnp.float32) for part in parts)
    given = (x.astype(jnp.float32), *arrays, *uses)
    aliases = {len(given) + index: index for index in range(len(parts))}
    return tuple(call("jaxllm_low_rank", shapes, input_output_aliases=aliases)(*given, *parts))


def normalise(
    x: Float[Array, "... n"],
    weight: Float[Array, "*groups n"],
    bias: Float[Array, "n"] | None,
    epsilon: float,
    centred: bool,
) -> Float[Array, "... n"]:
    """`x / sqrt(mean(x^2) + epsilon) * weight + bias`, computed in float32; `centred` takes the mean off `x` first.

    `x` is float32 or bfloat16, and so is the result. With a weight of `[H, n]` the last axis of `x` but one is of `H`.
    """
    more = () if bias is None else (bias.astype(jnp.float32),)
    return call("jaxllm_normalise", ShapeDtypeStruct(x.shape, x.dtype))(
        x,
        weight.astype(jnp.float32).reshape(-1, x.shape[-1]),
        *more,
        centred=centred,
        bias=bias is not None,
        epsilon=np.float32(epsilon),
    )


def log_sum_exp(logits: Float[Array, "R V"]) -> Float[Array, "R"]:
    most = logits.max(-1)
    most = jnp.where(most == -jnp.inf, 0, most)
    return call("jaxllm_log_sum_exp", ShapeDtypeStruct(most.shape, jnp.float32))(logits, most)


def running_weights(
    logits: Float[Array, "R V"], most: Float[Array, "R"], threshold: Float[Array, "R"], block: int
) -> Float[Array, "R n"]:
    """A sampler's running sums over blocks of logits of `exp(logit - most)`, of those from `threshold` on.

    Worked example, a block of 2: logits [0, 0, 1, 0, 0] with a `most` of 0 and a threshold of 0 give [2, 2 + e + 1, …].
    """
    shape = (logits.shape[0], -(-logits.shape[1] // block))
    return call("jaxllm_running_weights", ShapeDtypeStruct(shape, jnp.float32))(
        logits, most, threshold, block=np.int64(block)
    )
