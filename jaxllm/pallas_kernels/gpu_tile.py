"""What the GPU decode and prefill kernels share: one tile of queries attending to one sequence's pages.

The pages are seen flattened to rows, [N * K * page_size, D]: the key at position p of a sequence is row
`(page * K + kv_head) * page_size + p % page_size`, with `page = page_table[seq, p // page_size]`. A block of keys is
gathered row by row, so that a block may span several pages or part of one, and page_size need not divide anything.

Softmax is online and in base 2: exp(x) = exp2(x * log2(e)), with log2(e) folded into the logits' scale (Milakov and
Gimelshein 2018; Dao 2023, FlashAttention-2).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxllm.compat import triton_load

LOG2E = math.log2(math.e)
MASKED = -1e30
"""A masked logit. Finite, so that a row masked so far has exp2(MASKED - MASKED) = 1, which the first real key's
correction exp2(MASKED - m) = 0 then wipes out, where infinities would leave NaN."""

KV_BLOCK_BYTES = 16 * 1024
"""Size of one block of keys (or values). Double-buffered K and V then take 64 KiB of the 99 KiB (sm_86, sm_89) to
227 KiB (sm_90) of shared memory that a block of threads can have."""


def cdiv(a: Array | int, b: int) -> Any:
    return lax.div(a + b - 1, b) if isinstance(a, jax.Array) else -(-a // b)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is static about one attention call; see `paged_attention` for the meaning of the last four fields."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def padded_dim(self) -> int:
        """Triton arrays have power-of-two sizes, and a tensor-core dot needs 16 along each axis."""
        return max(16, pl.next_power_of_2(self.head_dim))

    @property
    def block_k(self) -> int:
        """Keys per iteration."""
        fitting = KV_BLOCK_BYTES // (self.padded_dim * jnp.dtype(self.dtype).itemsize)
        return min(128, max(16, fitting))


class OnlineSoftmax(NamedTuple):
    """The running state: `acc` is the sum of exp2(logit - m) * value and `l` the sum of exp2(logit - m)."""

    acc: Float[Array, "M D"]
    m: Float[Array, "M"]
    l: Float[Array, "M"]  # noqa: E741

    def normalized(self) -> Float[Array, "M D"]:
        return self.acc / self.l[:, None]


def start_softmax(rows: int, spec: AttentionSpec, sinks: Float[Array, "M"] | None) -> OnlineSoftmax:
    """The state before any key. A sink is a key that was seen first and had a zero value."""
    acc = jnp.zeros((rows, spec.padded_dim), jnp.float32)
    if sinks is None:
        return OnlineSoftmax(acc, jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32))
    return OnlineSoftmax(acc, sinks.astype(jnp.float32) * LOG2E, jnp.ones((rows,), jnp.float32))


def first_key(position: Array, window: int | None) -> Array:
    """The first position that the query at `position` sees."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)


def attend(
    q: Float[Array, "M D"],
    positions: Int[Array, "M"],
    kv_head: Int[Array, ""],
    page_ids_of: Any,
    k_ref: Any,
    v_ref: Any,
    key_range: tuple[Array, Array],
    block_range: tuple[Array, Array],
    state: OnlineSoftmax,
    spec: AttentionSpec,
) -> OnlineSoftmax:
    """Folds keys `key_range` (start, stop) of the blocks `block_range` (first, end) into the softmax of a query tile.

    Block i holds positions `i * block_k … (i + 1) * block_k - 1`. `page_ids_of(index, mask)` reads the sequence's row
    of the page table; `k_ref` and `v_ref` are the flattened pages. Nothing outside `key_range` is read.
    """
    key_start, key_stop = key_range
    dims = jnp.arange(spec.padded_dim)

    def body(block: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        keys = block * spec.block_k + jnp.arange(spec.block_k)
        live = (keys >= key_start) & (keys < key_stop)
        page_ids = page_ids_of(lax.div(keys, spec.page_size), live)
        rows = (page_ids * spec.kv_heads + kv_head) * spec.page_size + lax.rem(keys, spec.page_size)
        row_mask = live[:, None] & (dims < spec.head_dim)[None, :]

        k = triton_load(k_ref.at[rows[:, None], dims[None, :]], mask=row_mask, other=0).astype(q.dtype)
        logits = _dot(q, k, contract_rhs=1)
        if spec.softcap is None:
            logits = logits * (spec.scale * LOG2E)
        else:
            logits = jnp.tanh(logits * (spec.scale / spec.softcap)) * (spec.softcap * LOG2E)
        visible = live[None, :] & (keys[None, :] <= positions[:, None])
        if spec.window is not None:
            visible &= keys[None, :] > positions[:, None] - spec.window
        logits = jnp.where(visible, logits, MASKED)

        m = jnp.maximum(state.m, jnp.max(logits, axis=1))
        correction = jnp.exp2(state.m - m)
        weights = jnp.exp2(logits - m[:, None])
        v = triton_load(v_ref.at[rows[:, None], dims[None, :]], mask=row_mask, other=0).astype(q.dtype)
        acc = state.acc * correction[:, None] + _dot(weights.astype(q.dtype), v, contract_rhs=0)
        return OnlineSoftmax(acc, m, state.l * correction + jnp.sum(weights, axis=1))

    return lax.fori_loop(block_range[0], block_range[1], body, state)


def _dot(lhs: Array, rhs: Array, *, contract_rhs: int) -> Array:
    # HIGHEST keeps float32 out of TF32; for bf16 and f16 inputs the tensor cores accumulate in float32 either way.
    return lax.dot_general(
        lhs,
        rhs,
        (((1,), (contract_rhs,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
