"""Paged attention from its definition, in float64 NumPy, and random ragged batches to try implementations on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.metadata import StepMetadata


def attention_oracle(
    q: Any,
    k: Any,
    v: Any,
    pages: tuple[Any, ...],
    meta: StepMetadata,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Any = None,
    slopes: Any = None,
    visible_until: Any = None,
    value_dim: int | None = None,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Output [T, H, Dv] in float64 and the new pages in their own dtype; page 0, which padding writes, is left alone.

    Latent pages are one buffer: `v` is None, and a key's first `value_dim` channels are its value. Without heads in `k`
    and `v` the pages have the new ones already.
    """
    dtype = pages[0].dtype
    buffers = [np.array(buffer, np.float64) for buffer in pages]
    new = [np.asarray(x, np.float64) for x in (k, v) if x is not None and x.shape[1]]
    q = np.asarray(q, np.float64)
    positions, seq_ids, table = (np.asarray(x) for x in (meta.positions, meta.seq_ids, meta.page_table))
    heads, kv_heads, page_size = q.shape[1], buffers[0].shape[1], buffers[0].shape[2]
    real_tokens = [t for t in range(len(q)) if seq_ids[t] < len(table)]

    for t in real_tokens if new else ():
        page, row = table[seq_ids[t], positions[t] // page_size], positions[t] % page_size
        for buffer, x in zip(buffers, new, strict=True):
            buffer[page, :, row] = np.where(np.isfinite(x[t]), x[t], 0).astype(dtype)

    kv_head = np.arange(heads) // (heads // kv_heads)
    out = np.zeros((*q.shape[:2], value_dim or q.shape[2]))
    for t in real_tokens:
        last = positions[t]
        until = last if visible_until is None else int(visible_until[t])
        seen = np.arange(first_seen(last, window, chunked), until + 1)
        page, row = table[seq_ids[t], seen // page_size], seen % page_size
        keys = buffers[0][page, :, row][:, kv_head]
        values = buffers[-1][page, :, row][:, kv_head, :value_dim]
        logits = scale * np.einsum("nhd,hd->hn", keys, q[t])
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        if slopes is not None:
            logits = logits + np.asarray(slopes, np.float64)[:, None] * (seen - last)
        top = np.maximum(logits.max(1), -np.inf if sinks is None else np.asarray(sinks, np.float64))
        weights = np.exp(logits - top[:, None])
        mass = weights.sum(1) + (0.0 if sinks is None else np.exp(np.asarray(sinks, np.float64) - top))
        out[t] = np.einsum("hn,nhd->hd", weights, values) / mass[:, None]
    return out, tuple(buffer.astype(dtype) for buffer in buffers)


def with_numbers_of_heads(batch: RaggedBatch, options: dict[str, Any]) -> dict[str, Any]:
    """A case's options, with numbers for the heads where it says that they have sinks or slopes, and spans of so many
    tokens of a chunk that see each other.
    """
    heads = batch.q.shape[1]
    if length := options.get("visible_until"):
        options = options | {"visible_until": jnp.asarray(ends_of_spans(batch.meta, length))}
    numbers = {"sinks": jnp.linspace(-3.0, 3.0, heads), "slopes": jnp.linspace(1.0, 0.02, heads)}
    return options | {name: numbers[name] for name in numbers if options.get(name)}


def ends_of_spans(meta: StepMetadata, length: int) -> np.ndarray:
    """The last position that each token sees: every second span of `length` tokens of a chunk is seen whole."""
    positions, starts = np.asarray(meta.positions), np.asarray(meta.query_start)
    found = positions.copy()
    for begin, end in itertools.pairwise(starts):
        for first in range(begin + 1, end, 2 * length):
            found[first : min(first + length, end)] = positions[min(first + length, end) - 1]
    return found


def first_seen(position: int, window: int | None, chunked: bool) -> int:
    """The first position that the token at `position` sees."""
    if window is None:
        return 0
    return position // window * window if chunked else max(0, position - window + 1)


@dataclasses.dataclass
class RaggedBatch:
    q: Any
    k: Any
    v: Any
    pages: tuple[Any, ...]
    meta: StepMetadata
    value_dim: int | None = None

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
    chunked: bool = False,
    stored: bool = False,
    value_dim: int | None = None,
    seed: int = 0,
) -> RaggedBatch:
    """A random batch: `decodes` are context lengths, `prefills` are (cached tokens, chunk length).

    Padded to `tokens` and `seqs`. Pages are handed out in random order. Everything that no query may see (page 0, rows
    past a context, and with `window` those before every query's window) holds `unused`. With `value_dim` the pages are
    latent: one buffer, and no `v`. With `stored` the pages hold the new keys and values too; `k` and `v` have no heads.
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
    table = np.zeros((seqs, max(num_pages, default=0) + 1), np.int32)
    shape = (len(order) + 1, kv_heads, page_size, head_dim)
    buffers = [np.full(shape, unused, np.float64) for _ in range(1 if value_dim else 2)]
    positions, seq_ids = np.zeros(tokens, np.int32), np.full(tokens, seqs, np.int32)
    query_start = np.full(seqs + 1, live_tokens, np.int32)
    taken = start = 0
    for s, (cached, n) in enumerate(chunks):
        table[s, : num_pages[s]] = order[taken : taken + num_pages[s]]
        taken += num_pages[s]
        for position in range(first_seen(cached, window, chunked), cached + n if stored else cached):
            at = (table[s, position // page_size], slice(None), position % page_size)
            for buffer, row in zip(buffers, rng.normal(size=(len(buffers), kv_heads, head_dim)), strict=True):
                buffer[at] = row
        positions[start : start + n] = np.arange(cached, cached + n)
        seq_ids[start : start + n] = s
        query_start[s] = start
        start += n

    meta = StepMetadata(
        positions=jnp.asarray(positions),
        seq_ids=jnp.asarray(seq_ids),
        query_start=jnp.asarray(query_start),
        context_len=jnp.asarray(np.array(contexts + [0] * (seqs - len(chunks)), np.int32)),
        page_table=jnp.asarray(table),
        num_decodes=jnp.int32(len(decodes)),
        num_seqs=jnp.int32(len(chunks)),
        rotary_lengths=jnp.asarray(positions + 1),
        decode_only=decode_only,
    )
    new_heads = 0 if stored else kv_heads
    q, k, v = (jnp.asarray(rng.normal(size=(tokens, n, head_dim)), dtype) for n in (heads, new_heads, new_heads))
    pages = tuple(jnp.asarray(buffer, dtype) for buffer in buffers)
    return RaggedBatch(q, k, None if value_dim else v, pages, meta, value_dim)
