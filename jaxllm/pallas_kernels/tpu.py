"""Paged attention for TPUs: JAX's own ragged paged attention, over our pages and batches, and what it does not take."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import LANES, Lacks, PageUse, finite, places

QUERIES_PER_BLOCK = 32
PAGES_PER_BLOCK = 16
"""The kernel starts the copy of each page by itself, from ids in 32 scalar registers."""
KEYS_PER_BLOCK = 512
"""More would not fit into vector memory with pages of 128 tokens.

All three are common in the table that comes with the kernel. It cannot be asked: it goes by the device, and steps are
compiled for devices that need not be there."""


def arguments(meta: StepMetadata) -> tuple[jax.Array, ...]:
    """A step's batch as the kernel takes it, except that one without sequences has one, of one token in page 0.

    The kernel fetches the first sequence's keys before it looks whether there is one, and would never wait for them.

    Returns:
        How many keys each sequence has `[S]`, its pages `[S, P]`, the first query of each `[S + 1]`, and how many
        sequences have tokens `[1]`.
    """
    return (
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
    """See `reference.paged_attention`, over pages laid out `INTERLEAVED`; `lacks` says what it does not take."""
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as tpu_kernel  # Pallas takes half a second

    (tokens, _, dim), (_, page_size, _, lanes) = q.shape, pages[0].shape
    buffer = pages[0]
    if k.shape[1]:
        new = jnp.stack((k, v), axis=2).reshape(tokens, -1, dim)
        page, row = places(meta, page_size)
        buffer = buffer.at[page, row].set(_filled_up(finite(new), lanes).astype(buffer.dtype))
    # Where nothing is said of precision, a TPU multiplies float32 rounded to bfloat16.
    with jax.default_matmul_precision("highest") if q.dtype == jnp.float32 else nullcontext():
        out = tpu_kernel.ragged_paged_attention(
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
    return jnp.pad(x, ((0, 0), (0, 0), (0, lanes - x.shape[-1])))


TABLE_BYTES = 896 * 1024
"""What a page table may take of the 1 MiB of scalar memory that a core has, where the kernel reads it from."""
TABLE_ROWS = 8
"""Rows of a table take as much as their next multiple; columns as their next multiple of `LANES`."""


def most_sequences(pages_per_seq: int) -> int:
    """How many rows a page table of so many columns may have; 0 if none."""
    columns = -(-pages_per_seq // LANES) * LANES
    return TABLE_BYTES // (4 * columns) // TABLE_ROWS * TABLE_ROWS


def lacks(kv_cache_dtype: str, dtype: np.dtype, use: PageUse | None) -> Lacks | None:
    """What JAX's kernel does not take of these types and, where it is known, of this use; None if it takes all."""
    if kv_cache_dtype != "auto":
        return Lacks(f"kv_cache_dtype {kv_cache_dtype!r}", "kv_cache_dtype 'auto'")
    if dtype not in (jnp.bfloat16, jnp.float32):
        return Lacks(f"dtype {dtype.name!r}", "dtype 'bfloat16' or 'float32'")
    if use is None:
        return None
    if use.sinks:
        return Lacks("attention sinks")
    if use.chunked:
        return Lacks("attention in chunks")
    if use.alibi:
        return Lacks("attention biases by distance (ALiBi)")
    if len(use.dims) == 1:
        return Lacks("latent attention")
    if max(use.dims) > LANES:
        return Lacks(f"heads of {max(use.dims)} channels")
    # They lie along the rows of a tile; where float32 ones fill more than one, queries may not.
    if use.heads not in (1, 2, 4) and (use.heads % 8 or dtype == np.float32):
        return Lacks(f"{use.heads} KV heads a device in {dtype.name}")
    if use.sequences > most_sequences(use.pages_per_seq):
        return Lacks(
            f"a page table of {use.sequences:,} sequences and {use.pages_per_seq:,} pages of each",
            "a greater block_size, or less of max_model_len or max_num_seqs",
        )
    return None
