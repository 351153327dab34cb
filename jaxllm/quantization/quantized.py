"""What all quantized weights share: rows of the matrix are rows of its arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.quantization.weight import Weight, product

TILE = 1 << 20
"""Weights that are expanded at a time: a tile of them stays in a CPU's cache between its expansion and its product."""


class Quantized(Weight):
    """A matrix whose arrays are all `[*stack, o, …]`: expanded a few rows at a time, never whole in a product."""

    def matmul(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """`x @ self.T`, accumulated and returned in float32; a tile of rows is expanded, multiplied and forgotten."""
        rows, inputs = self.shape
        tile = min(rows, max(8, TILE // inputs))
        if tile == rows:
            return self.product(x)

        def body(index: jax.Array, out: jax.Array) -> jax.Array:
            start = jnp.minimum(index * tile, rows - tile)  # the last tile may do some rows again
            part = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, start, tile), self)
            return lax.dynamic_update_slice_in_dim(out, part.product(x), start, 1)

        return lax.fori_loop(0, -(-rows // tile), body, jnp.zeros((x.shape[0], rows), jnp.float32))

    def product(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """`matmul` of a tile that may be expanded at once."""
        return product(x, self.dequantize().astype(x.dtype))

    def rows(self, ids: Int[Array, "T"]) -> Float[Array, "T i"]:
        """The rows `ids` of a matrix; no other is expanded."""
        return self.take(ids).dequantize()

    def take(self, ids: Int[Array, "T"]) -> Quantized:
        """The rows `ids`, as they are kept."""
        return jax.tree.map(lambda array: array[ids], self)

    def _heads(self, per_head: int, rows: slice) -> Float[Array, "H o i"]:
        def of_heads(array: jax.Array) -> jax.Array:
            return rearrange(array, "(head row) ... -> head row ...", row=per_head)[:, rows]

        return jax.tree.map(of_heads, self).dequantize()
