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
from jaxllm.pallas_kernels.products import Late, Mixture, RootMeanSquare, Unsummed


def add_norm(
    x: Float[Array, "T E"], out: Late, norm: RootMeanSquare, *, interpret: bool = False
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """`x + out`, and the norm of it; what is yet to be summed is, on the way."""
    tokens, size = x.shape
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    if isinstance(out, Mixture):
        added = (out.weights, out.outputs, *(() if out.shared is None else (out.shared,)))
    elif isinstance(out, Unsummed):
        added = (out.parts,)
    else:
        added = (out,)
    return pl.pallas_call(
        functools.partial(_kernel, size=size, eps=norm.eps),
        out_shape=(shape, shape),
        grid=(tokens,),
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=_warps(size), num_stages=1),
        name="add_norm",
    )(norm.weight, x, *added)


def _warps(size: int) -> int:
    """Of no fewer than 16 channels a thread: with 8 the compiler aims at 32 registers, and spills."""
    return max(1, min(8, pl.next_power_of_2(size) // (16 * 32)))


def _kernel(weight_ref: Any, x_ref: Any, *refs: Any, size: int, eps: float) -> None:
    *added_refs, sum_ref, normed_ref = refs
    row, channel = pl.program_id(0), jnp.arange(pl.next_power_of_2(size))
    mask = channel < size

    def load(ref: Any, *part: int) -> Array:
        return triton_load(ref.at[*part, row, channel], mask=mask, other=0).astype(jnp.float32)

    x = load(x_ref)  # before what is added to it: behind that, sums of two parts would be spilled
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
