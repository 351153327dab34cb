"""One token of each sequence by the gated delta rule, on NVIDIA GPUs: its state is read once and written once.

One program per (sequence, value head, some columns of its state). Longer chunks run in plain XLA.
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
from jaxllm.pallas_kernels.delta_rule import EPS, tokens_of
from jaxllm.pallas_kernels.delta_windows import prefill
from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata

COLUMNS = 32
"""Of a state, that a program has."""


def delta_rule(
    qkv: Float[Array, "T C"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    buffer: Float[Array, "N H Dk Dv"],
    meta: StepMetadata,
    *,
    key_heads: int,
    interpret: bool = False,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "N H Dk Dv"]]:
    """See `pallas_kernels.delta_rule`. No row that one sequence reads may be one that another writes, but padding's."""
    rows = meta.states
    assert rows is not None, "a model with states is run with their rows"
    first = min(len(qkv), len(meta.context_len))
    decodes = qkv[:first], decay[:first], beta[:first]
    read, buffer = _step(*decodes, buffer, meta.num_decodes, rows, key_heads, interpret)
    if meta.decode_only:
        return read, buffer
    tokens = tokens_of(qkv, decay, beta, key_heads, buffer.shape[2])
    return prefill(tokens, jnp.zeros_like(tokens.v).at[:first].set(read), buffer, meta)


def _step(
    qkv: Float[Array, "n C"],
    decay: Float[Array, "n H"],
    beta: Float[Array, "n H"],
    buffer: Float[Array, "N H Dk Dv"],
    count: Int[Array, ""],
    rows: StateRows,
    key_heads: int,
    interpret: bool,
) -> tuple[Float[Array, "n H Dv"], Float[Array, "N H Dk Dv"]]:
    """The first `count` sequences, each of which has one token; zero after the last of them."""
    _, heads, key_dim, value_dim = buffer.shape
    columns = min(COLUMNS, pl.next_power_of_2(value_dim))
    numbers = [rows.read, rows.begins.astype(jnp.int32), rows.written, rows.kept, rows.kept_tokens]
    arrays = [count.reshape(1), *numbers, qkv, decay, beta, buffer.reshape(-1, value_dim)]
    out, states = pl.pallas_call(
        functools.partial(
            _kernel, heads=heads, groups=heads // key_heads, key_dim=key_dim, value_dim=value_dim, columns=columns
        ),
        out_shape=[
            jax.ShapeDtypeStruct((len(qkv), heads * value_dim), jnp.float32),
            jax.ShapeDtypeStruct(arrays[-1].shape, buffer.dtype),
        ],
        grid=(len(qkv), heads, pl.cdiv(value_dim, columns)),
        input_output_aliases={len(arrays) - 1: 1},
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=1),
        name="delta_rule_step",
    )(*arrays)
    return out.reshape(-1, heads, value_dim), states.reshape(buffer.shape)


def _kernel(
    count_ref: Any, read_ref: Any, begins_ref: Any, written_ref: Any, kept_ref: Any, kept_tokens_ref: Any, qkv_ref: Any,
    decay_ref: Any, beta_ref: Any, before_ref: Any, out_ref: Any, states_ref: Any,
    *, heads: int, groups: int, key_dim: int, value_dim: int, columns: int,
) -> None:  # fmt: skip
    seq, head = pl.program_id(0), pl.program_id(1)
    keys = heads // groups * key_dim
    row = jnp.arange(pl.next_power_of_2(key_dim))
    column = pl.program_id(2) * columns + jnp.arange(columns)
    there, inside = row < key_dim, column < value_dim
    whole = there[:, None] & inside[None, :]
    at_out = out_ref.at[seq, head * value_dim + column]

    def load(at: Array, mask: Array) -> Array:
        return triton_load(qkv_ref.at[seq, at], mask=mask, other=0).astype(jnp.float32)

    def unit(first: Array) -> Array:
        x = load(first + row, there)
        return x * lax.rsqrt(jnp.sum(x * x) + EPS)

    def state_at(number: Array) -> tuple[Array, Array]:
        return (number * heads + head) * key_dim + row[:, None], column[None, :]

    @pl.when(seq >= count_ref[0])
    def _() -> None:
        triton_store(at_out, jnp.zeros(columns, jnp.float32), mask=inside)

    @pl.when(seq < count_ref[0])
    def _() -> None:
        key_head = lax.div(head, groups) * key_dim
        q, k = unit(key_head) * key_dim**-0.5, unit(keys + key_head)
        v = load(2 * keys + head * value_dim + column, inside)
        known = whole & (begins_ref[seq] == 0)
        state = triton_load(before_ref.at[state_at(read_ref[seq])], mask=known, other=0)
        state = state * jnp.exp(decay_ref[seq, head])
        change = (v - jnp.sum(k[:, None] * state, axis=0)) * beta_ref[seq, head]
        state = state + k[:, None] * change[None, :]
        triton_store(at_out, jnp.sum(q[:, None] * state, axis=0), mask=inside)
        triton_store(states_ref.at[state_at(written_ref[seq])], state, mask=whole)

        @pl.when(kept_tokens_ref[seq] > 0)
        def _() -> None:
            triton_store(states_ref.at[state_at(kept_ref[seq])], state, mask=whole)
