"""The gated delta rule over packed sequences (Yang et al. 2024, arXiv:2412.06464), in plain XLA.

Each value head keeps a matrix `S [Dk, Dv]` of its sequence, in float32. A token changes it, and then reads it:

    S <- exp(decay) S
    S <- S + k^T (beta (v - k S))
    out = q S
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.delta_windows import Tokens, einsum, prefill
from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata
from jaxllm.pallas_kernels.states import read_state

EPS = 1e-6
"""Added to the sum of a head's squares."""


def delta_rule(
    qkv: Float[Array, "T C"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    buffer: Float[Array, "N H Dk Dv"],
    meta: StepMetadata,
    *,
    key_heads: int,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "N H Dk Dv"]]:
    """What each token reads of its sequence's state, and the buffer with the states after this step.

    Args:
        qkv: queries and keys of `K = key_heads` heads each, of any length, for they are normed here; then the values.
            Value head `h` uses head `h // (H // K)` of queries and keys.
        decay: the logarithm of what the state is multiplied by, at most 0.
        beta: how much of the difference is written, 0 … 1.
        buffer: one sequence's state a row.
    """
    tokens = tokens_of(qkv, decay, beta, key_heads, buffer.shape[2])
    first = min(len(qkv), len(meta.context_len))
    read, buffer = _decodes(Tokens(*(x[:first] for x in tokens)), buffer, meta)
    if meta.decode_only:
        return read, buffer
    return prefill(tokens, jnp.zeros_like(tokens.v).at[:first].set(read), buffer, meta)


def tokens_of(
    qkv: Float[Array, "T C"], decay: Float[Array, "T H"], beta: Float[Array, "T H"], key_heads: int, key_dim: int
) -> Tokens:
    """Queries and keys at length one, queries over the root of the head size as well."""
    (count, heads), keys = decay.shape, key_heads * key_dim
    q, k, v = jnp.split(qkv.astype(jnp.float32), [keys, 2 * keys], axis=-1)
    q, k = (_unit(x.reshape(count, key_heads, key_dim)) for x in (q, k))
    q, k = (jnp.repeat(x, heads // key_heads, axis=1) for x in (q * key_dim**-0.5, k))
    return Tokens(q, k, v.reshape(count, heads, -1), decay, beta)


def step(x: Tokens, state: Float[Array, "S H Dk Dv"]) -> tuple[Float[Array, "S H Dv"], Float[Array, "S H Dk Dv"]]:
    """One token of each sequence: what it reads, and the states after it."""
    state = state * jnp.exp(x.decay)[..., None, None]
    change = (x.v - einsum("shk,shkv->shv", x.k, state)) * x.beta[..., None]
    state = state + x.k[..., None] * change[..., None, :]
    return einsum("shk,shkv->shv", x.q, state), state


def _decodes(
    x: Tokens, buffer: Float[Array, "N H Dk Dv"], meta: StepMetadata
) -> tuple[Float[Array, "n H Dv"], Float[Array, "N H Dk Dv"]]:
    """The sequences of one token, which are the first, and of which `x` has the tokens; zero after the last of them."""
    assert meta.states is not None, "a model with states is run with their rows"
    rows: StateRows = jax.tree.map(lambda numbers: numbers[: len(x.v)], meta.states)
    live, nowhere = jnp.arange(len(x.v)) < meta.num_decodes, len(buffer)
    read, after = step(x, read_state(buffer, rows))
    for where, wanted in ((rows.written, live), (rows.kept, live & (rows.kept_tokens > 0))):
        buffer = buffer.at[jnp.where(wanted, where, nowhere)].set(after, mode="drop")
    return jnp.where(live[:, None, None], read, 0), buffer


def _unit(x: Float[Array, "T K Dk"]) -> Float[Array, "T K Dk"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)
