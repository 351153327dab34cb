"""One token of each sequence through layers that keep a state, on NVIDIA GPUs: each is read once and written once.

By the gated delta rule a program has some columns of a value head's state, in a state-space layer some rows of a
head's. Longer chunks run in plain XLA. No step writes a row that it reads for another sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.delta_rule import EPS, prefill, tokens_of
from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata
from jaxllm.pallas_kernels.ssd import SSDInputs

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
    read, buffer = _delta_step(*decodes, buffer, meta.num_decodes, rows, key_heads, interpret)
    if meta.decode_only:
        return read, buffer
    tokens = tokens_of(qkv, decay, beta, key_heads, buffer.shape[2])
    return prefill(tokens, jnp.zeros_like(tokens.v).at[:first].set(read), buffer, meta)


def _delta_step(
    qkv: Float[Array, "n C"], decay: Float[Array, "n H"], beta: Float[Array, "n H"],
    buffer: Float[Array, "N H Dk Dv"], count: Int[Array, ""], rows: StateRows, key_heads: int, interpret: bool,
) -> tuple[Float[Array, "n H Dv"], Float[Array, "N H Dk Dv"]]:  # fmt: skip
    """The first `count` sequences, each of which has one token; zero after the last of them."""
    _, heads, key_dim, value_dim = buffer.shape
    columns = min(COLUMNS, pl.next_power_of_2(value_dim))
    numbers = [rows.read, rows.begins.astype(jnp.int32), rows.written, rows.kept, rows.kept_tokens]
    arrays = [count.reshape(1), *numbers, qkv, decay, beta, buffer.reshape(-1, value_dim)]
    out, states = pl.pallas_call(
        functools.partial(
            _delta_kernel, heads=heads, groups=heads // key_heads, key_dim=key_dim, value_dim=value_dim, columns=columns
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


def _delta_kernel(
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


BLOCK = 4096
"""Numbers of a state in a program of four warps: 32 a thread, and as many again of what they become."""


def ssd_decode(
    inputs: SSDInputs, buffer: Float[Array, "B H P N"], meta: StepMetadata, *, interpret: bool = False
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    """As `pallas_kernels.ssd.recurrent` of a step of decodes alone; padding reads zeros, and writes nothing."""
    rows = meta.states
    assert rows is not None and meta.decode_only, "a step of decodes, with the rows of their states"
    tokens, heads, dim = inputs.x.shape
    size, groups = buffer.shape[3], inputs.b.shape[1]
    columns = pl.next_power_of_2(size)
    together = min(pl.next_power_of_2(dim), max(1, BLOCK // columns))
    parts = pl.cdiv(dim, together)
    flat = buffer.reshape(-1, size)
    shapes = jax.ShapeDtypeStruct((tokens * heads, dim), jnp.float32), jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    sizes = {"groups": groups, "heads": heads, "dim": dim, "size": size, "together": together, "columns": columns}
    y, flat = pl.pallas_call(
        functools.partial(_ssd_kernel, **sizes),
        out_shape=shapes,
        grid=(tokens, heads, parts),
        input_output_aliases={12: 1},
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=1),
        name="ssd_decode",
    )(
        meta.num_decodes.reshape(1), rows.read, rows.begins.astype(jnp.int32), rows.written, rows.kept,
        rows.kept_tokens, inputs.a, inputs.skip, inputs.dt.reshape(-1), inputs.x.reshape(-1, dim),
        inputs.b.reshape(-1, size), inputs.c.reshape(-1, size), flat,
    )  # fmt: skip
    return y.reshape(inputs.x.shape), flat.reshape(buffer.shape)


def _ssd_kernel(
    live_ref: Any, read_ref: Any, begins_ref: Any, written_ref: Any, kept_ref: Any, kept_tokens_ref: Any, a_ref: Any,
    skip_ref: Any, dt_ref: Any, x_ref: Any, b_ref: Any, c_ref: Any, states_ref: Any, y_ref: Any, moved_ref: Any, *,
    groups: int, heads: int, dim: int, size: int, together: int, columns: int,
) -> None:  # fmt: skip
    seq, head = pl.program_id(0), pl.program_id(1)
    row = pl.program_id(2) * together + jnp.arange(together)
    column = jnp.arange(columns)
    inside = row < dim
    both = inside[:, None] & (column < size)[None, :]
    is_live = seq < live_ref[0]

    def states_at(ref: Any, which: Any) -> Any:
        return ref.at[(which * heads + head) * dim + row[:, None], column[None, :]]

    out_at = y_ref.at[seq * heads + head, row]

    @pl.when(is_live)
    def _() -> None:
        group = seq * groups + head // (heads // groups)
        dt = dt_ref[seq * heads + head]
        x = triton_load(x_ref.at[seq * heads + head, row], mask=inside, other=0)
        b = triton_load(b_ref.at[group, column], mask=column < size, other=0)
        c = triton_load(c_ref.at[group, column], mask=column < size, other=0)
        state = triton_load(states_at(states_ref, read_ref[seq]), mask=both & (begins_ref[seq] == 0), other=0)
        moved = state * jnp.exp(dt * a_ref[head]) + (dt * x)[:, None] * b[None, :]
        triton_store(states_at(moved_ref, written_ref[seq]), moved, mask=both)
        keeps = both & (kept_tokens_ref[seq] > 0)
        triton_store(states_at(moved_ref, kept_ref[seq]), moved, mask=keeps)
        triton_store(out_at, jnp.sum(moved * c[None, :], axis=1) + skip_ref[head] * x, mask=inside)

    @pl.when(jnp.logical_not(is_live))
    def _() -> None:
        triton_store(out_at, jnp.zeros(row.shape, jnp.float32), mask=inside)
