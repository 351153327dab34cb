"""One token of each sequence through a state-space layer on NVIDIA GPUs: states are moved on where they lie.

A program has some rows of one head's state. No step writes a row that it reads for another sequence.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxllm.compat import triton_compiler_params, triton_load, triton_store
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.ssd import SSDInputs

BLOCK = 4096
"""Numbers of a state in a program of four warps: 32 a thread, and as many again of what they become."""


def decode(
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
        functools.partial(_kernel, **sizes),
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


def _kernel(
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
