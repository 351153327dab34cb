"""A sampler's sums over rows of logits, in an order that no other row changes; to be called while tracing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float

from jaxllm.cpu_kernels.library import call


def log_sum_exp(logits: Float[Array, "R V"]) -> Float[Array, "R"]:
    """`log(sum(exp(logits)))` of each row."""
    most = logits.max(-1)
    most = jnp.where(most == -jnp.inf, 0, most)
    return call("jaxllm_log_sum_exp", ShapeDtypeStruct(most.shape, jnp.float32))(logits, most)


def running_weights(
    logits: Float[Array, "R V"], most: Float[Array, "R"], threshold: Float[Array, "R"], block: int
) -> Float[Array, "R n"]:
    """Running sums over blocks of logits of `exp(logit - most)`, of those from `threshold` on.

    Worked example, a block of 2: logits [0, 0, 1, 0, 0] with a `most` of 0 and a threshold of 0 give [2, 2 + e + 1, …].
    """
    shape = (logits.shape[0], -(-logits.shape[1] // block))
    return call("jaxllm_running_weights", ShapeDtypeStruct(shape, jnp.float32))(
        logits, most, threshold, block=np.int64(block)
    )
