"""What a sampler adds up over rows of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxllm import cpu_kernels


class SoftmaxSums(NamedTuple):
    """Sums of weights `exp(logit - most)`, where `most` is at least each row's greatest logit.

    Attributes:
        log_sum_exp: `(logits [R, V]) -> [R]`.
        mass: `(logits [R, V], most [R], threshold [R]) -> [R]`: the sum of the weights of logits from a threshold on.
        running: `(logits [R, V], most [R], threshold [R], block) -> [R, -(-V // block)]`: that sum, up to the end of
            each block of logits.
    """

    log_sum_exp: Callable[[jax.Array], jax.Array]
    mass: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    running: Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]


def _mass(logits: Float[Array, "R V"], most: Float[Array, "R"], threshold: Float[Array, "R"]) -> Float[Array, "R"]:
    return _weights(logits, most, threshold).sum(-1)


def _running(
    logits: Float[Array, "R V"], most: Float[Array, "R"], threshold: Float[Array, "R"], block: int
) -> Float[Array, "R n"]:
    weights = _weights(logits, most, threshold)
    sums = jnp.pad(weights, ((0, 0), (0, -logits.shape[1] % block))).reshape(len(logits), -1, block).sum(-1)
    # Kept by themselves: GPUs would sum them once more inside of what follows, which spills registers.
    return lax.optimization_barrier(jnp.cumsum(sums, axis=1))


def _weights(logits: jax.Array, most: jax.Array, threshold: jax.Array) -> Float[Array, "R V"]:
    return jnp.where(logits >= threshold[:, None], jnp.exp(logits - most[:, None]), 0)


PLAIN = SoftmaxSums(lambda logits: jax.nn.logsumexp(logits, axis=-1), _mass, _running)
"""In plain XLA, whose order of summation is its own affair."""

CPU_BLOCK = 256


def _cpu_mass(logits: Float[Array, "R V"], most: Float[Array, "R"], threshold: Float[Array, "R"]) -> Float[Array, "R"]:
    return cpu_kernels.running_weights(logits, most, threshold, CPU_BLOCK)[:, -1]


CPU = SoftmaxSums(cpu_kernels.log_sum_exp, _cpu_mass, cpu_kernels.running_weights)
"""By the C++ kernels, in an order that does not depend on the number of rows."""
