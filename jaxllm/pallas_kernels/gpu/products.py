"""A layer's products on NVIDIA GPUs: the compiler's own where it reads weights as they are, else a Pallas kernel.

XLA multiplies by floats and by codes whose scale can follow the product (int8, fp8) without a copy of the weight. Codes
of fewer bits, and those with several scales a row, would be expanded in memory first: `packed` expands those that lie
in tiles in registers, and `few_rows` and `matmul` others. Weights that no kernel knows are expanded whole, or some rows
at a time where they are large: that writes and reads each number again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.matrices import KernelMatrix, PackedMatrix, arranged
from jaxllm.pallas_kernels.products import Late, Later, Mixture, Norm, Residual, RootMeanSquare, Unsummed, dot, late_sum
from jaxllm.pallas_kernels.products import linear as reference_linear


def linear(
    x: Float[Array, "T i"],
    weight: Any,
    norm: Norm | None = None,
    residual: Residual = None,
    dtype: Any = jnp.float32,
    *,
    interpret: bool = False,
) -> Late:
    """`norm(x) @ weight.T + residual`, of which norm and residual may be None; summed in float32, given in `dtype`.

    A library rounds its sums to `dtype` itself; converting them afterwards would be one more kernel. With `LATER` for a
    residual, a product that a kernel makes by parts of the inputs stays `Unsummed`.
    """
    matrices = weight.kernel_matrices
    if matrices is None:
        return reference_linear(x, weight, norm, None if isinstance(residual, Later) else residual, dtype)
    x = x if norm is None else norm(x)
    given = dtype if residual is None or isinstance(residual, Later) else residual.dtype
    if len(matrices) == 1:
        out = _product(x, matrices[0], given, interpret)
    elif all(isinstance(matrix, PackedMatrix) and matrix.order is None for matrix in matrices):
        from jaxllm.pallas_kernels.gpu import packed

        out = packed.late_matmul(x, matrices, dtype=given, interpret=interpret)
    else:
        parts = [late_sum(_product(x, matrix, given, interpret)).astype(given) for matrix in matrices]
        out = jnp.concatenate(parts, axis=-1)
    if isinstance(residual, Later):
        return out
    out = late_sum(out).astype(given)
    return out if residual is None else (residual + out).astype(dtype)


def experts(
    x: Float[Array, "T E"], logits: Float[Array, "T X"], bias: jax.Array | None, gate_up: Any, down: Any, **options: Any
) -> Mixture | None:
    """See `Kernels.experts`; None for experts of a kind that no kernel knows."""
    from jaxllm.pallas_kernels.gpu import experts as kernel  # Pallas takes half a second to import

    if gate_up.kernel_matrices is None or down.kernel_matrices is None:
        return None
    return kernel.experts(x, logits, bias, gate_up.kernel_matrices, down.kernel_matrices, **options)


def chosen_experts(
    x: Float[Array, "T E"], group: jax.Array, gate_up: Any, down: Any, **options: Any
) -> Float[Array, "P E"] | None:
    """See `Kernels.chosen_experts`; None for experts of a kind that no kernel knows."""
    from jaxllm.pallas_kernels.gpu import experts as kernel

    if gate_up.kernel_matrices is None or down.kernel_matrices is None:
        return None
    return kernel.chosen_experts(x, group, gate_up.kernel_matrices, down.kernel_matrices, **options)


def add_norm(
    x: Float[Array, "T E"], out: Late, norm: RootMeanSquare
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """`x + out`, and the norm of it."""
    from jaxllm.pallas_kernels.gpu import experts as kernel

    return kernel.add_norm(x, out if isinstance(out, Mixture | Unsummed) else out.astype(x.dtype), norm)


def _product(x: jax.Array, matrix: KernelMatrix | PackedMatrix, dtype: Any, interpret: bool) -> Late:
    x = x if matrix.order is None else arranged(x, matrix.order, matrix.divided)
    if isinstance(matrix, PackedMatrix):
        from jaxllm.pallas_kernels.gpu import packed

        return packed.late_matmul(x, [matrix], dtype=dtype, interpret=interpret)
    if matrix.rounds or matrix.planes > 1 or not (matrix.scale is None or matrix.scales_whole_rows):
        from jaxllm.pallas_kernels.gpu.few_rows import code_product

        return code_product(x, matrix, dtype=dtype, interpret=interpret)
    factors = matrix.dtype if matrix.scale is None else x.dtype
    given = dtype if matrix.scale is None and dtype == factors else jnp.float32
    product = dot(x.astype(factors), matrix.codes.astype(factors), dtype=given)
    return (product if matrix.scale is None else product * matrix.scale[:, 0]).astype(dtype)
