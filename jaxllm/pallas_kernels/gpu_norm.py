"""The sum of a residual stream and what a layer adds to it, with the norm of that sum: one kernel, a row a program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.norms import RootMeanSquare


def add_norm(
    x: Float[Array, "T E"], out: Float[Array, "T E"], norm: RootMeanSquare, *, interpret: bool = False
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """`x + out`, and the norm of it."""
    tokens, size = x.shape
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, size=size, eps=norm.eps),
        out_shape=(shape, shape),
        grid=(tokens,),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=8, num_stages=1),
        name="add_norm",
    )(x, out, norm.weight)


def _kernel(x_ref: Any, out_ref: Any, weight_ref: Any, sum_ref: Any, normed_ref: Any, *, size: int, eps: float) -> None:
    row, channel = pl.program_id(0), jnp.arange(pl.next_power_of_2(size))
    mask = channel < size
    x, out = (triton_load(ref.at[row, channel], mask=mask, other=0).astype(jnp.float32) for ref in (x_ref, out_ref))
    total = (x + out).astype(sum_ref.dtype)
    triton_store(sum_ref.at[row, channel], total, mask=mask)
    total = total.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(total * total) / size + eps)
    weight = triton_load(weight_ref.at[channel], mask=mask, other=0)
    triton_store(normed_ref.at[row, channel], (total * factor * weight).astype(normed_ref.dtype), mask=mask)
