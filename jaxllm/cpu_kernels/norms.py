"""Norms that stand by themselves, each row in one order of summation; to be called while tracing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float

from jaxllm.cpu_kernels.library import call


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
