"""Paged attention for NVIDIA GPUs: the page write in XLA, then one Pallas kernel for decode rows and one for prefill.

`gpu_decode` and `gpu_prefill` say how each works and what it should cost; `gpu_tile` is the inner loop they share.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.gpu_decode import decode_attention
from jaxllm.pallas_kernels.gpu_prefill import prefill_attention
from jaxllm.pallas_kernels.gpu_tile import AttentionSpec
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import Pages, write_pages


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: Pages,
    meta: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H D"], Pages]:
    """Writes the new keys and values into the pages, then attends; see `kernels.PagedAttention`.

    Accumulates in float32; the dots take the query's dtype (bfloat16, float16 or float32), and pages of another dtype
    are cast to it as they are read. `interpret` runs the kernels as XLA operations, on any platform.
    """
    tokens, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = pages[0].shape
    spec = AttentionSpec(heads, kv_heads, head_dim, page_size, q.dtype, scale, window, softcap, sinks is not None)
    pages = write_pages(pages, k, v, meta)

    # Decode rows are the first rows: in a mixed batch row i < num_decodes is still sequence i's.
    rows = min(tokens, meta.context_len.shape[0])
    decoded = decode_attention(q[:rows], pages, meta, spec, sinks, interpret=interpret)
    token = jnp.arange(tokens)[:, None, None]
    is_decode = token < meta.num_decodes
    if meta.decode_only:
        return jnp.where(is_decode, decoded, 0), pages

    prefilled = prefill_attention(q, pages, meta, spec, sinks, interpret=interpret)
    decoded = jnp.pad(decoded, ((0, tokens - rows), (0, 0), (0, 0)))
    is_prefill = meta.seq_ids[:, None, None] < meta.context_len.shape[0]
    return jnp.where(is_decode, decoded, jnp.where(is_prefill, prefilled, 0)), pages
