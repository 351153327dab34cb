"""Products of hundreds of rows with weights of a few bits in tiles, on NVIDIA GPUs: those are expanded in memory first.

A library multiplies floats at four times the rate of a kernel that expands them for each tile of rows, which pays for
writing them once and reading them again. Large weights are expanded in parts.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_store
from jaxllm.pallas_kernels.gpu.walk import Tiling, Walk, arrays_by_name, step_of
from jaxllm.pallas_kernels.matrices import EXPANDED_BYTES, ROWS, PackedMatrix

TILING = Tiling(warps=4, step=256, stages=1)


def matmul(
    x: Float[Array, "T i"], matrix: PackedMatrix, *, dtype: Any = jnp.float32, interpret: bool = False
) -> Float[Array, "T o"]:
    """`x @ matrix.T`, summed in float32."""
    outputs, inputs = matrix.shape
    tiles = outputs // ROWS
    some = min(tiles, max(1, EXPANDED_BYTES // (ROWS * inputs * matrix.dtype.itemsize)))
    x = x.astype(matrix.dtype)
    found = []
    for first in range(0, tiles, some):
        weights = expand_tiles(matrix, first, min(some, tiles - first), interpret=interpret)
        found.append(
            lax.dot_general(
                x,
                weights,
                (((1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
                preferred_element_type=dtype if dtype == x.dtype else jnp.float32,
            ).astype(dtype)
        )
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)


def expand_tiles(matrix: PackedMatrix, first: int, count: int, *, interpret: bool = False) -> Float[Array, "o i"]:
    """The rows of `count` tiles in the model's type."""
    inputs = matrix.shape[-1]
    step = step_of(inputs, matrix, TILING.step)
    given = arrays_by_name(matrix)
    return pl.pallas_call(
        functools.partial(
            _kernel, names=tuple(given), matrix=jax.tree.map(lambda _: None, matrix), first=first, step=step,
            plain=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((count * ROWS, inputs), matrix.dtype),
        grid=(pl.cdiv(count, TILING.warps), pl.cdiv(inputs, step)),
        interpret=interpret,
        compiler_params=triton_compiler_params(TILING.warps, TILING.stages),
        name="expand_tiles",
    )(*given.values())  # fmt: skip


def _kernel(*refs: Any, names: tuple[str, ...], matrix: PackedMatrix, first: int, step: int, plain: bool) -> None:
    *arrays, out_ref = refs
    rows, inputs = out_ref.shape
    block, index = pl.program_id(0), pl.program_id(1)
    row = block * (ROWS * TILING.warps) + jnp.arange(ROWS * TILING.warps)
    inside = row < rows
    place = first + lax.div(jnp.minimum(row, rows - 1), ROWS)
    walk = Walk(dict(zip(names, arrays, strict=True)), matrix, TILING, step, [place], plain)
    (scales,) = walk.scales(index)
    (low,), (high,) = walk.codes("low", index), walk.codes("high", index)
    width = matrix.format.width
    for number in range(step // width):
        begin = index * step + number * width
        column = begin + jnp.arange(width)
        there = inside if number * width < (inputs % step or step) else inside & (begin < inputs)
        triton_store(
            out_ref.at[row[:, None], column[None, :]],
            walk.scaled(low, high, scales, number),
            mask=jnp.broadcast_to(there[:, None], (len(row), width)),
        )
