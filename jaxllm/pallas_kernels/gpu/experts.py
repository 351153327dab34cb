"""The experts of an MoE layer on NVIDIA GPUs, from logits to what is summed: three kernels of a step of few tokens.

Tokens are routed (`route`, or by whoever calls `chosen_experts`), then multiplied by their experts' matrices where
these and the tokens lie (`matmul`), with the activation at the end of the first product. The sum is left to the kernel
that adds the residual (`norm`). Biases, and gates other than an activation, are XLA's, between the products and after
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.gpu import packed
from jaxllm.pallas_kernels.gpu.few_rows import code_product
from jaxllm.pallas_kernels.gpu.matmul import choose_tile_rows
from jaxllm.pallas_kernels.gpu.route import RowLists, groups_of_rows, list_rows, route
from jaxllm.pallas_kernels.matrices import KernelMatrix, PackedMatrix
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.products import Mixture, late_sum


def experts(
    x: Float[Array, "T E"],
    logits: Float[Array, "T X"],
    bias: Float[Array, "X"] | None,
    gate_up: tuple[KernelMatrix | PackedMatrix, ...],
    down: tuple[KernelMatrix | PackedMatrix, ...],
    *,
    first: Int[Array, ""] | int,
    here: int,
    routing: Any,
    activation: Callable[[jax.Array], jax.Array],
    gate: Callable[[jax.Array], jax.Array] | None = None,
    biases: tuple[Float[Array, "X n"], Float[Array, "X E"]] | None = None,
    meta: StepMetadata,
    interpret: bool = False,
) -> Mixture:
    """See `Kernels.experts`; weights are given as matrices, several where the parts of a fused one were not joined."""
    tokens = x.shape[0]
    rows = tokens * routing.top_k
    tile_rows = choose_tile_rows(rows, here)
    weights, lists = route(logits, bias, first, here, routing, tile_rows, meta, interpret=interpret)
    matrices: dict[str, Any] = {
        "gate_up": gate_up,
        "down": down,
        "activation": activation,
        "gate": gate,
        "biases": biases,
    }
    outputs = _products(x, lists, rows, tile_rows, **matrices, interpret=interpret)
    return Mixture(weights, outputs.reshape(tokens, routing.top_k, -1))


def chosen_experts(
    x: Float[Array, "T E"], group: Int[Array, "P"], count: int, *, interpret: bool = False, **matrices: Any
) -> Float[Array, "P E"]:
    """See `Kernels.chosen_experts`; `count` is how many experts there are, and `matrices` are as of `experts`."""
    (rows,) = group.shape
    tile_rows = choose_tile_rows(rows, count)
    lists = list_rows(group, count, x.shape[0], tile_rows, interpret=interpret)
    outputs = _products(x, lists, rows, tile_rows, **matrices, interpret=interpret)
    return jnp.where((group < count)[:, None], outputs, 0)


def _products(
    x: Float[Array, "T E"], lists: RowLists, rows: int, tile_rows: int, *,
    gate_up: tuple[KernelMatrix | PackedMatrix, ...], down: tuple[KernelMatrix | PackedMatrix, ...],
    activation: Callable[[jax.Array], jax.Array], gate: Callable[[jax.Array], jax.Array] | None,
    biases: tuple[Float[Array, "X n"], Float[Array, "X E"]] | None, interpret: bool,
) -> Float[Array, "P E"]:  # fmt: skip
    """What each of `rows` pairs gives, in float32, and anything for those that are on no list."""
    sorted_ = any(matrix.order is not None for matrix in (*gate_up, *down))
    group = groups_of_rows(lists, rows, tile_rows) if sorted_ or biases is not None else None

    def multiply(x: jax.Array, matrix: KernelMatrix | PackedMatrix, **options: Any) -> jax.Array:
        if matrix.order is not None:
            assert group is not None
            x = _in_their_order(x, matrix.order, group)
        if isinstance(matrix, PackedMatrix):
            return packed.grouped_matmul(x, matrix, lists, rows, tile_rows, interpret=interpret, **options)
        return late_sum(code_product(x, matrix, lists, rows, tile_rows, interpret=interpret, **options))

    if len(gate_up) == 1 and biases is None and gate is None and _is_lowered(activation) and _gates(gate_up[0]):
        hidden = multiply(x, gate_up[0], activation=activation, dtype=down[0].dtype)
    else:
        both = jnp.concatenate([multiply(x, part) for part in gate_up], axis=-1)
        both = both if biases is None else both + biases[0][group]
        hidden = _gated(both, activation) if gate is None else gate(both)
    outputs = jnp.concatenate([multiply(hidden, part) for part in down], axis=-1)
    return outputs if biases is None else outputs + biases[1][group]


def _in_their_order(x: Float[Array, "n i"], order: Int[Array, "X i"], group: Int[Array, "N"]) -> Float[Array, "N i"]:
    """Every row as its group's columns lie; rows side by side share one of `x`, but each has an order of its own."""
    rows = jnp.repeat(x, group.shape[0] // x.shape[0], axis=0)
    return jnp.take_along_axis(rows, order[group], axis=1, mode="promise_in_bounds")


def _gated(both: Float[Array, "N n"], activation: Callable[[jax.Array], jax.Array]) -> Float[Array, "N n//2"]:
    gate, up = jnp.split(both, 2, axis=-1)
    return activation(gate) * up


def _gates(matrix: KernelMatrix | PackedMatrix) -> bool:
    """Whether a kernel finds gates and what they are for beside each other."""
    return isinstance(matrix, KernelMatrix) or packed.gates(matrix)


def _is_lowered(activation: Callable[[jax.Array], jax.Array]) -> bool:
    """Triton knows no error function, which exact GELU is made of."""
    return "erf" not in str(jax.make_jaxpr(activation)(jnp.float32(0)))
