"""States of sequences in a step of which some tokens may be refused.

A state cannot forget a token. So such a step runs its tokens over copies of the states of its sequences, one layer's at
a time, and what the kernel was given of each token is kept: kilobytes, where a state is megabytes. Once it is known
which tokens stay, the kernel runs those again, over the states themselves. To keep the state after each token instead
would take that many times the states' memory, and as much more traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata

StateKernel = Callable[..., tuple[jax.Array, jax.Array]]
"""`(*tokens, *constants, buffer, meta) -> (out, buffer)`: what one step's tokens read of their sequences' states, and
the states after them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tentative:
    """States as they were before a step, and what its tokens would make of them."""

    buffer: Float[Array, "N *n"]
    tokens: tuple[jax.Array, ...]
    """What the kernel was given of each token, `[T, ...]`."""
    constants: tuple[Any, ...]
    kernel: StateKernel = field(metadata={"static": True})

    def settled(self, stay: Int[Array, "T"], meta: StepMetadata) -> Float[Array, "N *n"]:
        """The states after the tokens that `stay`, of which `meta` tells as of a step of their own."""
        return self.kernel(*(part[stay] for part in self.tokens), *self.constants, self.buffer, meta)[1]


def run_states(
    kernel: StateKernel,
    tokens: tuple[jax.Array, ...],
    constants: tuple[Any, ...],
    buffer: Float[Array, "N *n"],
    meta: StepMetadata,
) -> tuple[jax.Array, jax.Array | Tentative]:
    """What the tokens read, and the states after them, or in a tentative step what becomes of these once it is known
    which of the tokens stay.
    """
    if not meta.tentative:
        return kernel(*tokens, *constants, buffer, meta)
    assert meta.states is not None, "a model with states is run with their rows"
    count = len(meta.states.read)
    own, nowhere = jnp.arange(count, dtype=jnp.int32), jnp.full(count, count, jnp.int32)
    rows = StateRows(own, meta.states.begins, own, kept=nowhere, kept_tokens=jnp.zeros_like(own))
    out, _ = kernel(*tokens, *constants, buffer[meta.states.read], replace(meta, states=rows))
    return out, Tentative(buffer, tokens, constants, kernel)


def staying(tried: StepMetadata, stays: StepMetadata) -> Int[Array, "T"]:
    """Where the tokens of `stays` are in `tried`: the same step with fewer tokens of each sequence, its first ones."""
    seq = jnp.minimum(stays.seq_ids, len(stays.context_len) - 1)
    place = jnp.arange(len(stays.seq_ids)) - stays.query_start[seq]
    return jnp.clip(tried.query_start[seq] + place, 0, len(place) - 1)


def settle(caches: Any, stay: Int[Array, "T"], stays: StepMetadata) -> Any:
    """The caches after a step of which only the tokens that `stay` do, of which `stays` tells."""

    def is_tentative(cache: Any) -> bool:
        return isinstance(cache, Tentative)

    return jax.tree.map(
        lambda cache: cache.settled(stay, stays) if is_tentative(cache) else cache, caches, is_leaf=is_tentative
    )
