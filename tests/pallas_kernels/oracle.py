"""Paged attention from its definition, in float64 NumPy, and random ragged batches to try implementations on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.metadata import AttentionMetadata


def attention_oracle(
    q: Any,
    k: Any,
    v: Any,
    pages: tuple[Any, Any],
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Output [T, H, D] in float64 and the new pages in their own dtype; page 0, which padding writes, is left alone."""
    dtype = pages[0].dtype
    k_pages, v_pages = (np.array(buffer, np.float64) for buffer in pages)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    positions, seq_ids, table = (np.asarray(x) for x in (meta.positions, meta.seq_ids, meta.page_table))
    heads, kv_heads, page_size = q.shape[1], k.shape[1], k_pages.shape[2]
    real_tokens = [t for t in range(len(q)) if seq_ids[t] < len(table)]

    for t in real_tokens:
        page, row = table[seq_ids[t], positions[t] // page_size], positions[t] % page_size
        k_pages[page, :, row] = k[t].astype(dtype)
        v_pages[page, :, row] = v[t].astype(dtype)

    kv_head = np.arange(heads) // (heads // kv_heads)
    out = np.zeros(q.shape)
    for t in real_tokens:
        last = positions[t]
        seen = np.arange(0 if window is None else max(0, last - window + 1), last + 1)
        page, row = table[seq_ids[t], seen // page_size], seen % page_size
        keys, values = (buffer[page, :, row][:, kv_head] for buffer in (k_pages, v_pages))
        logits = scale * np.einsum("nhd,hd->hn", keys, q[t])
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        top = np.maximum(logits.max(1), -np.inf if sinks is None else np.asarray(sinks, np.float64))
        weights = np.exp(logits - top[:, None])
        mass = weights.sum(1) + (0.0 if sinks is None else np.exp(np.asarray(sinks, np.float64) - top))
        out[t] = np.einsum("hn,nhd->hd", weights, values) / mass[:, None]
    return out, (k_pages.astype(dtype), v_pages.astype(dtype))


@dataclasses.dataclass
class RaggedBatch:
    q: Any
    k: Any
    v: Any
    pages: tuple[Any, Any]
    meta: AttentionMetadata

    @property
    def real(self) -> np.ndarray:
        """Which tokens are not padding."""
        return np.asarray(self.meta.seq_ids) < len(self.meta.context_len)


def ragged_batch(
    *,
    decodes: Sequence[int] = (),
    prefills: Sequence[tuple[int, int]] = (),
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    tokens: int | None = None,
    seqs: int | None = None,
    dtype: Any = jnp.float32,
    unused: float = 1e3,
    window: int | None = None,
    seed: int = 0,
) -> RaggedBatch:
    """A random batch: `decodes` are context lengths, `prefills` are (cached tokens, chunk length).

    Padded to `tokens` and `seqs`. Pages are handed out in random order. Everything that no query may see (page 0, rows
    past a context, and with `window` those before every query's window) holds `unused`.
    """
    rng = np.random.default_rng(seed)
    chunks = [(context - 1, 1) for context in decodes] + list(prefills)
    live_tokens = sum(n for _, n in chunks)
    decode_only = not prefills
    seqs = seqs or len(chunks)
    tokens = seqs if decode_only else tokens or live_tokens
    contexts = [cached + n for cached, n in chunks]
    num_pages = [-(-c // page_size) for c in contexts]

    order = rng.permutation(np.arange(1, sum(num_pages) + 3))
    table = np.zeros((seqs, max(num_pages) + 1), np.int32)
    shape = (len(order) + 1, kv_heads, page_size, head_dim)
    k_pages, v_pages = (np.full(shape, unused, np.float64) for _ in range(2))
    positions, seq_ids = np.zeros(tokens, np.int32), np.full(tokens, seqs, np.int32)
    query_start = np.full(seqs + 1, live_tokens, np.int32)
    taken = start = 0
    for s, (cached, n) in enumerate(chunks):
        table[s, : num_pages[s]] = order[taken : taken + num_pages[s]]
        taken += num_pages[s]
        for position in range(0 if window is None else max(0, cached - window + 1), cached):
            at = (table[s, position // page_size], slice(None), position % page_size)
            k_pages[at], v_pages[at] = rng.normal(size=(2, kv_heads, head_dim))
        positions[start : start + n] = np.arange(cached, cached + n)
        seq_ids[start : start + n] = s
        query_start[s] = start
        start += n

    meta = AttentionMetadata(
        positions=jnp.asarray(positions),
        seq_ids=jnp.asarray(seq_ids),
        query_start=jnp.asarray(query_start),
        context_len=jnp.asarray(np.array(contexts + [0] * (seqs - len(chunks)), np.int32)),
        page_table=jnp.asarray(table),
        num_decodes=jnp.int32(len(decodes)),
        num_seqs=jnp.int32(len(chunks)),
        decode_only=decode_only,
    )
    q, k, v = (jnp.asarray(rng.normal(size=(tokens, n, head_dim)), dtype) for n in (heads, kv_heads, kv_heads))
    return RaggedBatch(q, k, v, (jnp.asarray(k_pages, dtype), jnp.asarray(v_pages, dtype)), meta)
