"""How keys and values lie in their pages, and the write half of paged attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxllm.pallas_kernels.metadata import StepMetadata

Pages = tuple[Shaped[Array, "N _ _ _"], ...]
"""One layer's buffers, in the layout that its kernels want; see `PageLayout`.

Of a float type, of its bits (see `stored_as_bits`), or quantized: D codes, and then in `SCALE_BYTES` channels the scale
of one token's head.
"""

QUANTIZED = {"int8": np.dtype(np.int8), "fp8": np.dtype(np.uint8)}
"""The types of quantized pages, which say how codes are read: as integers, or as the bits of e4m3 floats."""

SCALE_BYTES = 4
"""Of a float32."""


class PageLayout(NamedTuple):
    """How a layer's pages lie in its buffers."""

    shapes: Callable[[int, int, int, Sequence[int]], tuple[tuple[int, ...], ...]]
    """`(pages, page_size, KV heads, channels)` -> each buffer's shape; channels of key and value, or of a latent."""
    heads_axis: int
    """The axis along which devices share a buffer."""
    zeros: Callable[[Sequence[int], Any], jax.Array] = jnp.zeros
    """Makes a device's part of a buffer, while tracing."""


BY_HEAD = PageLayout(lambda pages, size, heads, dims: tuple((pages, heads, size, dim) for dim in dims), heads_axis=1)
"""`(k_pages, v_pages)`, each `[N, K, page_size, D]`; or `(latent_pages,)`, with values in the keys' first channels."""


class PageUse(NamedTuple):
    """What a model keeps in one device's pages, and how many may be looked up in a step."""

    heads: int
    dims: Sequence[int]
    """Channels of a key and a value, or of a latent."""
    sequences: int
    pages_per_seq: int
    sinks: bool = False
    chunked: bool = False
    alibi: bool = False


class Lacks(NamedTuple):
    """What an attention cannot do, and what it can instead; empty if no setting changes that."""

    what: str
    instead: str = ""


LANES = 128
"""Channels that a TPU's registers, and its memory's tiles, have beside each other."""


INTERLEAVED = PageLayout(
    lambda pages, size, heads, dims: ((pages, size, 2 * heads, -(-max(dims) // LANES) * LANES),), heads_axis=2
)
"""`(kv_pages,)`, `[N, page_size, 2 K, D']`: each head's key and then its value, filled up to `LANES` channels."""

_CODES = {QUANTIZED["int8"]: jnp.dtype(jnp.int8), QUANTIZED["fp8"]: jnp.dtype(jnp.float8_e4m3fn)}
LARGEST_CODE = {QUANTIZED["int8"]: 127.0, QUANTIZED["fp8"]: float(jnp.finfo(jnp.float8_e4m3fn).max)}


def stored_as_bits(dtype: Any) -> np.dtype:
    """Pages keep the bits of 16-bit floats.

    XLA:CPU computes 16-bit floats in float32, even when it only moves them: a scatter would convert the whole buffer
    there and back. Their bits, as integers, are moved as they are.
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.uint16) if dtype.itemsize == 2 else dtype


def to_storage(x: Float[Array, "..."], dtype: Any) -> Shaped[Array, "..."]:
    """Values as pages of `dtype` keep them: cast, quantized, or as bits where `dtype` is another integer type."""
    if jnp.dtype(dtype) in _CODES:
        return _quantize(x.astype(jnp.float32), jnp.dtype(dtype))
    return lax.bitcast_convert_type(x, dtype) if jnp.issubdtype(dtype, jnp.integer) else x.astype(dtype)


def from_storage(x: Shaped[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """What `to_storage` kept, as floats; `dtype` is the type that bits stand for, or that quantized ones become."""
    if x.dtype in _CODES:
        return _dequantize(x).astype(dtype)
    return lax.bitcast_convert_type(x, dtype) if jnp.issubdtype(x.dtype, jnp.integer) else x


def _quantize(x: Float[Array, "*n D"], dtype: np.dtype) -> Shaped[Array, "*n _"]:
    """Codes, the largest number of a row being the largest code, then the bytes of the row's scale."""
    scale = jnp.abs(x).max(-1, keepdims=True) / LARGEST_CODE[dtype]
    codes = x / jnp.where(scale > 0, scale, 1)
    codes = jnp.round(codes) if _CODES[dtype] == jnp.int8 else codes
    parts = [codes.astype(_CODES[dtype]), lax.bitcast_convert_type(scale[..., 0], dtype)]
    return jnp.concatenate([lax.bitcast_convert_type(part, dtype) for part in parts], axis=-1)


def _dequantize(rows: Shaped[Array, "*n _"]) -> Float[Array, "*n D"]:
    codes = lax.bitcast_convert_type(rows[..., :-SCALE_BYTES], _CODES[rows.dtype])
    scale = lax.bitcast_convert_type(rows[..., -SCALE_BYTES:], jnp.float32)
    return codes.astype(jnp.float32) * scale[..., None]


def write_pages(pages: Pages, k: Float[Array, "T K D"], v: Float[Array, "T K D"] | None, meta: StepMetadata) -> Pages:
    """Stores each token's key and value at its place in pages laid out `BY_HEAD`.

    Latent pages hold keys alone: `v` is None. Updates in place when the pages are donated. What is not finite is
    stored as zero: a masked key has a weight of zero, and zero times a NaN left in a reused page would spoil the next
    owner's output.
    """
    page, row = places(meta, pages[0].shape[2])
    new = (k,) if v is None else (k, v)
    return tuple(
        buffer.at[page, :, row].set(to_storage(finite(x), buffer.dtype)) for buffer, x in zip(pages, new, strict=True)
    )


def places(meta: StepMetadata, page_size: int) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """The page of each token and its row there; padding tokens go to page 0."""
    num_seqs = meta.page_table.shape[0]
    seq = jnp.minimum(meta.seq_ids, num_seqs - 1)
    page = jnp.where(meta.seq_ids < num_seqs, meta.page_table[seq, meta.positions // page_size], 0)
    return page, meta.positions % page_size


def finite(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x`, with zero for what is not finite."""
    return jnp.where(jnp.isfinite(x), x, 0)
