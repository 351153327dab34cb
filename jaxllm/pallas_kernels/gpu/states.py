"""One token of each sequence through layers that keep a state, on NVIDIA GPUs: each is read once and written once.

By the gated delta rule a program has some columns of a value head's state, in a state-space layer some rows of a
head's. Longer chunks run in plain XLA. No step writes a row that it reads for another sequence, except padding's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.delta_rule import EPS, prefill, tokens_of
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.ssd import SSDInputs, chunked


class _Rows(NamedTuple):
    count: Any
    read: Any
    begins: Any
    written: Any
    kept: Any
    kept_tokens: Any


def _launch(
    name: str, kernel: Callable[..., None], arrays: list[Array], buffer: Float[Array, "N H _ _"],
    out_shape: tuple[int, int], grid: tuple[int, ...], meta: StepMetadata, interpret: bool,
) -> tuple[Float[Array, "_ _"], Float[Array, "N H _ _"]]:  # fmt: skip
    """Runs `kernel(_Rows, refs of arrays and the states before, output, states after)`: the output and the states."""
    rows = meta.state_rows
    numbers = [rows.read, rows.begins.astype(jnp.int32), rows.written, rows.kept, rows.kept_tokens]
    given = [meta.num_decodes.reshape(1), *numbers, *arrays, buffer.reshape(-1, buffer.shape[-1])]
    out, states = pl.pallas_call(
        lambda *refs: kernel(_Rows(*refs[:6]), *refs[6:]),
        out_shape=[jax.ShapeDtypeStruct(out_shape, jnp.float32), jax.ShapeDtypeStruct(given[-1].shape, buffer.dtype)],
        grid=grid,
        input_output_aliases={len(given) - 1: 1},
        interpret=interpret,
        compiler_params=triton_compiler_params(num_warps=4, num_stages=1),
        name=name,
    )(*given)
    return out, states.reshape(buffer.shape)


COLUMNS = 32
"""Of a state by the delta rule, in a program."""


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
    first = min(len(qkv), len(meta.context_len))
    _, heads, key_dim, value_dim = buffer.shape
    columns = min(COLUMNS, pl.next_power_of_2(value_dim))
    sizes: dict[str, Any] = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "columns": columns}
    kernel = functools.partial(_delta_kernel, groups=heads // key_heads, **sizes)
    arrays, shape = [qkv[:first], decay[:first], beta[:first]], (first, heads * value_dim)
    grid = (first, heads, pl.cdiv(value_dim, columns))
    read, buffer = _launch("delta_rule_step", kernel, arrays, buffer, shape, grid, meta, interpret)
    read = read.reshape(-1, heads, value_dim)
    if meta.decode_only:
        return read, buffer
    tokens = tokens_of(qkv, decay, beta, key_heads, key_dim)
    return prefill(tokens, jnp.zeros_like(tokens.v).at[:first].set(read), buffer, meta)


def _delta_kernel(
    rows: _Rows, qkv_ref: Any, decay_ref: Any, beta_ref: Any, before_ref: Any, out_ref: Any, states_ref: Any, *,
    heads: int, groups: int, key_dim: int, value_dim: int, columns: int,
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

    @pl.when(seq >= rows.count[0])
    def _() -> None:
        triton_store(at_out, jnp.zeros(columns, jnp.float32), mask=inside)

    @pl.when(seq < rows.count[0])
    def _() -> None:
        key_head = lax.div(head, groups) * key_dim
        q, k = unit(key_head) * key_dim**-0.5, unit(keys + key_head)
        v = load(2 * keys + head * value_dim + column, inside)
        known = whole & (rows.begins[seq] == 0)
        state = triton_load(before_ref.at[state_at(rows.read[seq])], mask=known, other=0)
        state = state * jnp.exp(decay_ref[seq, head])
        change = (v - jnp.sum(k[:, None] * state, axis=0)) * beta_ref[seq, head]
        state = state + k[:, None] * change[None, :]
        triton_store(at_out, jnp.sum(q[:, None] * state, axis=0), mask=inside)
        triton_store(states_ref.at[state_at(rows.written[seq])], state, mask=whole)

        @pl.when(rows.kept_tokens[seq] > 0)
        def _() -> None:
            triton_store(states_ref.at[state_at(rows.kept[seq])], state, mask=whole)


BLOCK = 4096
"""Numbers of a state in a program of four warps: 32 a thread, and as many again of what they become."""


def ssd(
    inputs: SSDInputs, buffer: Float[Array, "B H P N"], meta: StepMetadata, *, interpret: bool = False
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    """Decodes by a kernel; chunks are products of matrices, which XLA has kernels for."""
    return ssd_decode(inputs, buffer, meta, interpret=interpret) if meta.decode_only else chunked(inputs, buffer, meta)


def ssd_decode(
    inputs: SSDInputs, buffer: Float[Array, "B H P N"], meta: StepMetadata, *, interpret: bool = False
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    """As `pallas_kernels.ssd.recurrent` of a step of decodes alone; padding reads zeros, and writes nothing."""
    assert meta.decode_only
    tokens, heads, dim = inputs.x.shape
    size, groups = buffer.shape[3], inputs.b.shape[1]
    columns = pl.next_power_of_2(size)
    together = min(pl.next_power_of_2(dim), max(1, BLOCK // columns))
    sizes: dict[str, Any] = {
        "groups": groups,
        "heads": heads,
        "dim": dim,
        "size": size,
        "together": together,
        "columns": columns,
    }
    arrays = [
        inputs.a, inputs.skip, inputs.dt.reshape(-1), inputs.x.reshape(-1, dim), inputs.b.reshape(-1, size),
        inputs.c.reshape(-1, size),
    ]  # fmt: skip
    kernel, shape = functools.partial(_ssd_kernel, **sizes), (tokens * heads, dim)
    grid = (tokens, heads, pl.cdiv(dim, together))
    y, buffer = _launch("ssd_decode", kernel, arrays, buffer, shape, grid, meta, interpret)
    return y.reshape(inputs.x.shape), buffer


def _ssd_kernel(
    rows: _Rows, a_ref: Any, skip_ref: Any, dt_ref: Any, x_ref: Any, b_ref: Any, c_ref: Any, states_ref: Any,
    y_ref: Any, moved_ref: Any, *, groups: int, heads: int, dim: int, size: int, together: int, columns: int,
) -> None:  # fmt: skip
    seq, head = pl.program_id(0), pl.program_id(1)
    row = pl.program_id(2) * together + jnp.arange(together)
    column = jnp.arange(columns)
    inside = row < dim
    both = inside[:, None] & (column < size)[None, :]
    is_live = seq < rows.count[0]

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
        state = triton_load(states_at(states_ref, rows.read[seq]), mask=both & (rows.begins[seq] == 0), other=0)
        moved = state * jnp.exp(dt * a_ref[head]) + (dt * x)[:, None] * b[None, :]
        triton_store(states_at(moved_ref, rows.written[seq]), moved, mask=both)
        keeps = both & (rows.kept_tokens[seq] > 0)
        triton_store(states_at(moved_ref, rows.kept[seq]), moved, mask=keeps)
        triton_store(out_at, jnp.sum(moved * c[None, :], axis=1) + skip_ref[head] * x, mask=inside)

    @pl.when(jnp.logical_not(is_live))
    def _() -> None:
        triton_store(out_at, jnp.zeros(row.shape, jnp.float32), mask=inside)
