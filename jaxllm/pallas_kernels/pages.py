"""The write half of paged attention: new keys and values go into their pages."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.metadata import AttentionMetadata

Pages = tuple[Float[Array, "N K page_size D"], Float[Array, "N K page_size D"]]


def write_pages(pages: Pages, k: Float[Array, "T K D"], v: Float[Array, "T K D"], meta: AttentionMetadata) -> Pages:
    """Stores token `t`'s key and value in row `positions[t] % page_size` of its page; padding tokens go to page 0.

    `pages` is (k_pages, v_pages), each [N, K, page_size, D]; keys and values are cast to their dtype. Updates in place
    when the pages are donated.
    """
    page_size = pages[0].shape[2]
    num_seqs = meta.page_table.shape[0]
    seq = jnp.minimum(meta.seq_ids, num_seqs - 1)
    page = jnp.where(meta.seq_ids < num_seqs, meta.page_table[seq, meta.positions // page_size], 0)
    row = meta.positions % page_size
    k_pages, v_pages = pages
    return (
        k_pages.at[page, :, row].set(k.astype(k_pages.dtype)),
        v_pages.at[page, :, row].set(v.astype(v_pages.dtype)),
    )
