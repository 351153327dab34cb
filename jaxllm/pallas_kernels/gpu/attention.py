"""Paged attention for NVIDIA GPUs: a Pallas kernel for what stands before it, one for decode rows, one for prefill.

`store`, `decode` and `prefill` say how each works and what it should cost; `tile` is the inner loop
that the last two share.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.gpu.decode import decode_attention
from jaxllm.pallas_kernels.gpu.prefill import prefill_attention
from jaxllm.pallas_kernels.gpu.store import rotate_and_store
from jaxllm.pallas_kernels.gpu.tile import NOTHING_PER_HEAD, AttentionSpec, PerHead
from jaxllm.pallas_kernels.late import Unsummed
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.norms import RootMeanSquare
from jaxllm.pallas_kernels.pages import QUANTIZED, Pages, write_pages


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"] | None,
    pages: Pages,
    meta: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    slopes: Float[Array, "H"] | None = None,
    value_dim: int | None = None,
    angles: Any = None,
    norms: tuple[RootMeanSquare, RootMeanSquare] | None = None,
    unsummed: Unsummed | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H Dv"], Pages]:
    """Norms and rotates heads where that is asked for, writes the pages, then attends; see `kernels.PagedAttention`.

    Queries that come without new keys are neither normed nor rotated. Where queries, keys and values are one product by
    parts of its inputs, `unsummed`, the kernel that rotates them adds these up.

    Accumulates in float32; the dots take the query's dtype (bfloat16, float16 or float32), and pages of another dtype
    are cast to it as they are read. `interpret` runs the kernels as XLA operations, on any platform.
    """
    _, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = pages[0].shape
    latent_dim = None if v is not None else value_dim or head_dim
    quantized = pages[0].dtype in QUANTIZED.values()
    spec = AttentionSpec(
        heads, kv_heads, head_dim, page_size, q.dtype, scale, window, softcap, latent_dim, quantized, chunked
    )
    per_head = PerHead(sinks, slopes)
    if v is None:
        pages = write_pages(pages, k, v, meta)
    elif k.shape[1]:
        q, pages = rotate_and_store(q, k, v, pages, meta, spec, angles, norms, unsummed, interpret=interpret)
    return attend_to_pages(q, pages, meta, spec, per_head, interpret=interpret), pages


def attend_to_pages(
    q: Float[Array, "T H D"],
    pages: Pages,
    meta: StepMetadata,
    spec: AttentionSpec,
    per_head: PerHead = NOTHING_PER_HEAD,
    *,
    interpret: bool = False,
) -> Float[Array, "T H Dv"]:
    """Attention once all that is new lies in the pages."""
    tokens = q.shape[0]
    # Decode rows are the first rows: in a mixed batch row i < num_decodes is still sequence i's.
    rows = min(tokens, meta.context_len.shape[0])
    decoded = decode_attention(q[:rows], pages, meta, spec, per_head, interpret=interpret)
    if meta.decode_only:
        return decoded

    token = jnp.arange(tokens)[:, None, None]
    prefilled = prefill_attention(q, pages, meta, spec, per_head, interpret=interpret)
    decoded = jnp.pad(decoded, ((0, tokens - rows), (0, 0), (0, 0)))
    is_prefill = meta.seq_ids[:, None, None] < meta.context_len.shape[0]
    return jnp.where(token < meta.num_decodes, decoded, jnp.where(is_prefill, prefilled, 0))
