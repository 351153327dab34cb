"""Paged attention for TPUs: JAX's own ragged paged attention, over our pages and batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jaxtyping import Array, Float, Int, Shaped

from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import finite, places

QUERIES_PER_BLOCK = 32
PAGES_PER_BLOCK = 16
"""The kernel starts the copy of each page by itself, from ids in 32 scalar registers."""
KEYS_PER_BLOCK = 512
"""More would not fit into vector memory with pages of 128 tokens.

All three are common in the table that comes with the kernel. It cannot be asked: it goes by the device, and steps are
compiled for devices that need not be there."""


class Arguments(NamedTuple):
    """A step's batch as the kernel takes it: `S` sequences, of which the first `num_seqs` have tokens."""

    kv_lens: Int[Array, "S"]
    page_indices: Int[Array, "S P"]
    cu_q_lens: Int[Array, "S+1"]
    num_seqs: Int[Array, "1"]


def arguments(meta: StepMetadata) -> Arguments:
    """The same batch, except that one without sequences has one, of one token in page 0.

    The kernel fetches the first sequence's keys before it looks whether there is one, and would never wait for them.
    """
    return Arguments(
        jnp.maximum(meta.context_len, 1),
        meta.page_table,
        jnp.maximum(meta.query_start, jnp.arange(len(meta.query_start)) > 0).astype(jnp.int32),
        jnp.maximum(meta.num_seqs, 1)[None],
    )


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: tuple[Shaped[Array, "N page_size K*2 _"]],
    meta: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "T H D"], tuple[Shaped[Array, "N page_size K*2 _"]]]:
    """See `kernels.PagedAttention`, over pages laid out `INTERLEAVED`; `tpu_limits` says what it does not take."""
    (tokens, _, dim), (_, page_size, _, lanes) = q.shape, pages[0].shape
    buffer = pages[0]
    if k.shape[1]:
        new = jnp.stack((k, v), axis=2).reshape(tokens, -1, dim)
        page, row = places(meta, page_size)
        buffer = buffer.at[page, row].set(_filled_up(finite(new), lanes).astype(buffer.dtype))
    # Where nothing is said of precision, a TPU multiplies float32 rounded to bfloat16.
    with jax.default_matmul_precision("highest") if q.dtype == jnp.float32 else nullcontext():
        out = ragged_paged_attention(
            _filled_up(q, lanes),
            buffer,
            *arguments(meta),
            sm_scale=scale,
            sliding_window=window,
            soft_cap=softcap,
            num_kv_pages_per_block=min(meta.page_table.shape[1], PAGES_PER_BLOCK, KEYS_PER_BLOCK // page_size),
            num_queries_per_block=min(tokens, QUERIES_PER_BLOCK),
        )
    return jnp.where(meta.live[:, None, None], out[..., :dim], 0), (buffer,)


def _filled_up(x: Float[Array, "T _ D"], lanes: int) -> Float[Array, "T _ lanes"]:
    """More channels, of zeros."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, lanes - x.shape[-1])))
