"""The experts of an MoE layer on NVIDIA GPUs, from logits to what is summed: three kernels of a step of few tokens.

Tokens are routed (`route`, or by whoever calls `chosen_experts`), then multiplied by their experts' matrices where
these and the tokens lie (`matmul`), with the activation at the end of the first product. The sum is left to the kernel
that adds the residual (`norm`). Biases, and gates other than an activation, are XLA's, between the products and after
them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.gpu import packed
from jaxllm.pallas_kernels.gpu.few_rows import code_product
from jaxllm.pallas_kernels.gpu.matmul import Nonlinearity, choose_tile_rows
from jaxllm.pallas_kernels.gpu.route import RowLists, groups_of_rows, list_rows, route
from jaxllm.pallas_kernels.matrices import ROWS, KernelMatrix, PackedMatrix
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.products import Late, Mixture, RootMeanSquare, Unsummed, late_sum

Matrices = tuple[KernelMatrix | PackedMatrix, ...]
"""A weight: several where the parts of a fused one were not joined."""


def experts(
    x: Float[Array, "T E"],
    logits: Float[Array, "T X"],
    bias: Float[Array, "X"] | None,
    gate_up: Any,
    down: Any,
    *,
    first: Int[Array, ""] | int,
    here: int,
    routing: Any,
    meta: StepMetadata,
    interpret: bool = False,
    **options: Any,
) -> Mixture | None:
    """See `Kernels.experts`; None for experts of a kind that no kernel knows."""
    if gate_up.kernel_matrices is None or down.kernel_matrices is None:
        return None
    tokens = x.shape[0]
    rows = tokens * routing.top_k
    tile_rows = choose_tile_rows(rows, here)
    weights, lists = route(logits, bias, first, here, routing, tile_rows, meta, interpret=interpret)
    matrices = gate_up.kernel_matrices, down.kernel_matrices
    outputs = _products(x, lists, rows, tile_rows, *matrices, interpret, **options)
    return Mixture(weights, outputs.reshape(tokens, routing.top_k, -1))


def chosen_experts(
    x: Float[Array, "T E"], group: Int[Array, "P"], gate_up: Any, down: Any, *, interpret: bool = False, **options: Any
) -> Float[Array, "P E"] | None:
    """See `Kernels.chosen_experts`; None for experts of a kind that no kernel knows."""
    if gate_up.kernel_matrices is None or down.kernel_matrices is None:
        return None
    count, matrices = down.shape[0], (gate_up.kernel_matrices, down.kernel_matrices)
    (rows,) = group.shape
    tile_rows = choose_tile_rows(rows, count)
    lists = list_rows(group, count, x.shape[0], tile_rows, interpret=interpret)
    outputs = _products(x, lists, rows, tile_rows, *matrices, interpret, **options)
    return jnp.where((group < count)[:, None], outputs, 0)


def _products(
    x: Float[Array, "T E"], lists: RowLists, rows: int, tile_rows: int, gate_up: Matrices, down: Matrices,
    interpret: bool, *, activation: Nonlinearity, gate: Nonlinearity | None = None,
    biases: tuple[Float[Array, "X n"], Float[Array, "X E"]] | None = None,
) -> Float[Array, "P E"]:  # fmt: skip
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
        if gate is None:
            first, second = jnp.split(both, 2, axis=-1)
            hidden = activation(first) * second
        else:
            hidden = gate(both)
    outputs = jnp.concatenate([multiply(hidden, part) for part in down], axis=-1)
    return outputs if biases is None else outputs + biases[1][group]


def _in_their_order(x: Float[Array, "n i"], order: Int[Array, "X i"], group: Int[Array, "N"]) -> Float[Array, "N i"]:
    """Every row as its group's columns lie; rows side by side share one of `x`, but each has an order of its own."""
    rows = jnp.repeat(x, group.shape[0] // x.shape[0], axis=0)
    return jnp.take_along_axis(rows, order[group], axis=1, mode="promise_in_bounds")


def _gates(matrix: KernelMatrix | PackedMatrix) -> bool:
    """A kernel finds gates and what they are for beside each other: in tiles, both halves are whole ones."""
    return isinstance(matrix, KernelMatrix) or matrix.shape[-2] % (2 * ROWS) == 0


def _is_lowered(activation: Nonlinearity) -> bool:
    """Triton knows no error function, which exact GELU is made of."""
    return "erf" not in str(jax.make_jaxpr(activation)(jnp.float32(0)))


def add_norm(
    x: Float[Array, "T E"], out: Late, norm: RootMeanSquare, *, interpret: bool = False
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """`x + out`, and the norm of it; what is yet to be summed is, on the way."""
    tokens, size = x.shape
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # With fewer than 16 channels a thread the compiler aims at 32 registers, and spills.
    warps = max(1, min(8, pl.next_power_of_2(size) // (16 * 32)))
    if isinstance(out, Mixture):
        added = (out.weights, out.outputs, *(() if out.shared is None else (out.shared,)))
    elif isinstance(out, Unsummed):
        added = (out.parts,)
    else:
        added = (out.astype(x.dtype),)
    return pl.pallas_call(
        functools.partial(_norm_kernel, size=size, eps=norm.eps),
        out_shape=(shape, shape),
        grid=(tokens,),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=warps, num_stages=1),
        name="add_norm",
    )(norm.weight, x, *added)


def _norm_kernel(weight_ref: Any, x_ref: Any, *refs: Any, size: int, eps: float) -> None:
    *added_refs, sum_ref, normed_ref = refs
    row, channel = pl.program_id(0), jnp.arange(pl.next_power_of_2(size))
    mask = channel < size

    def load(ref: Any, *part: int) -> Array:
        return triton_load(ref.at[*part, row, channel], mask=mask, other=0).astype(jnp.float32)

    x = load(x_ref)  # before what is added to it: after that, sums of two parts would be spilled
    out = jnp.zeros(channel.shape, jnp.float32)
    if len(added_refs) > 1:
        mixed_ref, outputs_ref, *added_refs = added_refs
        for index in range(outputs_ref.shape[1]):
            mixed = mixed_ref[row, index]
            output = triton_load(outputs_ref.at[row, index, channel], mask=mask & (mixed != 0), other=0)
            out += mixed * output.astype(jnp.float32)
    for ref in added_refs:
        for part in [(index,) for index in range(ref.shape[0])] if len(ref.shape) == 3 else [()]:
            out += load(ref, *part)
    total = (x + out.astype(sum_ref.dtype).astype(jnp.float32)).astype(sum_ref.dtype)
    triton_store(sum_ref.at[row, channel], total, mask=mask)
    total = total.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(total * total) / size + eps)
    weight = triton_load(weight_ref.at[channel], mask=mask, other=0)
    triton_store(normed_ref.at[row, channel], (total * factor * weight).astype(normed_ref.dtype), mask=mask)
