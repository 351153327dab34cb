"""What JAX's ragged paged attention for TPUs can be asked for, as compiling it for them has shown."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.pages import LANES, Lacks, PageUse

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
