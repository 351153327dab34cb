"""What the GPU decode and prefill kernels share: one tile of queries attending to one sequence's pages.

The pages are flattened to rows, [N * K * page_size, D]: the key at position p of a sequence is row
`(page * K + kv_head) * page_size + p % page_size`, with `page = page_table[seq, p // page_size]`. A block of keys is
gathered row by row, so that it may span several pages or part of one. Softmax is online and in base 2: exp(x) =
exp2(x * log2(e)), with log2(e) folded into the logits' scale (Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from jaxllm.compat import triton_load
from jaxllm.pallas_kernels.matrices import from_e4m3
from jaxllm.pallas_kernels.pages import SCALE_BYTES

LOG2E = math.log2(math.e)
MASKED = -1e30
"""A masked logit. Finite, so that a row masked so far has exp2(MASKED - MASKED) = 1, which the first real key's
correction exp2(MASKED - m) = 0 then wipes out, where infinities would leave NaN."""

KV_BLOCK_BYTES = 16 * 1024
"""Size of one block of keys (or values). Three of K and V then take 96 KiB of the 99 KiB (sm_86, sm_89) to 227 KiB
(sm_90) of shared memory that a block of threads can have. Half of it where registers, which the query tile and the
sums fill, are what is short: with 256 channels, and with codes to be expanded."""
MAX_BLOCK_K = 64
"""Keys of a block: with more, the logits of 128 query rows leave an A100 too few registers."""
LATENT_HEADS = 16
"""Query heads of a tile over latent pages, whose values have 512 channels: their sums are what fills registers."""
LATENT_BLOCK_BYTES = 40 * 1024
"""Size of one block of latents, which are keys and values at once."""


def cdiv(a: Array | int, b: Array | int) -> Any:
    return lax.div(a + b - 1, b) if isinstance(a, jax.Array) else -(-a // b)


class Part(NamedTuple):
    """Channels of a key that are multiplied together, `padded` to what a tile may have."""

    start: int
    size: int

    @property
    def padded(self) -> int:
        """Triton arrays have power-of-two sizes, and a tensor-core dot needs 16 along each axis."""
        return max(16, pl.next_power_of_2(self.size))


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is static about one attention call; see `paged_attention` for the meaning of the last four fields.

    `latent_dim` is given where pages are latent: how many channels of a key are its value.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    latent_dim: int | None = None
    quantized: bool = False
    """Pages hold codes and then the bytes of their scale; see `pages.py`."""
    chunked: bool = False
    """A query sees keys from the last multiple of `window` on."""
    interpret: bool = False
    """The kernels run as XLA operations, on any platform."""

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def tile_heads(self) -> int:
        return self.group if self.latent_dim is None else min(self.group, LATENT_HEADS)

    @property
    def head_tiles(self) -> int:
        return self.kv_heads * cdiv(self.group, self.tile_heads)

    def heads_of(self, head_tile: Array, row: Array) -> tuple[Array, Array, Array]:
        """The KV head of a tile, the query heads of its rows, and which of those there are."""
        tiles = cdiv(self.group, self.tile_heads)
        kv_head = lax.div(head_tile, tiles)
        in_group = lax.rem(head_tile, tiles) * self.tile_heads + row
        return kv_head, kv_head * self.group + in_group, (row < self.tile_heads) & (in_group < self.group)

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def parts(self) -> tuple[Part, ...]:
        """The channels of a key; the first part's are also the value's where pages are latent."""
        if self.latent_dim is None or self.latent_dim == self.head_dim:
            return (Part(0, self.head_dim),)
        return (Part(0, self.latent_dim), Part(self.latent_dim, self.head_dim - self.latent_dim))

    @property
    def decode_warps(self) -> int:
        """More of them where a block of keys and what becomes of its codes would not fit into registers."""
        size = self.parts[0].padded << self.quantized
        if size > 512 and self.latent_dim is None:
            return 16
        return 8 if size > 256 else 4

    @property
    def block_k(self) -> int:
        size = sum(part.padded for part in self.parts) * jnp.dtype(self.dtype).itemsize
        if self.latent_dim is not None:
            budget = LATENT_BLOCK_BYTES
        else:
            budget = KV_BLOCK_BYTES // 2 if self.quantized or self.parts[0].padded > 128 else KV_BLOCK_BYTES
        fitting = budget // (size * (1 + self.quantized))  # codes and what they become are in registers at once
        return min(MAX_BLOCK_K >> self.quantized, max(16, 1 << (max(fitting, 1).bit_length() - 1)))


class PerHead(NamedTuple):
    """Numbers of each query head, where an attention has them: arrays `[H]`."""

    sinks: Any = None
    slopes: Any = None


class OnlineSoftmax(NamedTuple):
    """The running state: `acc` is the sum of exp2(logit - m) * value and `l` the sum of exp2(logit - m)."""

    acc: Float[Array, "M D"]
    m: Float[Array, "M"]
    l: Float[Array, "M"]  # noqa: E741

    def normalized(self) -> Float[Array, "M D"]:
        return self.acc / self.l[:, None]


def _start_softmax(rows: int, spec: AttentionSpec, sinks: Float[Array, "M"] | None) -> OnlineSoftmax:
    """The state before any key. A sink is a key that was seen first and had a zero value."""
    acc = jnp.zeros((rows, spec.parts[0].padded), jnp.float32)
    if sinks is None:
        return OnlineSoftmax(acc, jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32))
    return OnlineSoftmax(acc, sinks.astype(jnp.float32) * LOG2E, jnp.ones((rows,), jnp.float32))


def first_key(position: Array, spec: AttentionSpec) -> Array:
    """The first position that the query at `position` sees."""
    if spec.window is None:
        return jnp.zeros_like(position)
    if spec.chunked:
        return lax.div(position, spec.window) * spec.window
    return jnp.maximum(position - spec.window + 1, 0)


class Tile(NamedTuple):
    """The queries of a program: rows of the flattened ones, of one sequence and KV head; only `live` ones are read."""

    seq: Array
    kv_head: Array
    row: Int[Array, "M"]
    head: Int[Array, "M"]
    live: Bool[Array, "M"]
    position: Int[Array, "M"]


def attend(
    tile: Tile,
    refs: Mapping[str, Any],
    key_range: tuple[Array, Array],
    block_range: tuple[Array, Array],
    spec: AttentionSpec,
    counts_sinks: Array | None = None,
) -> OnlineSoftmax:
    """The softmax of a tile over keys `key_range` (start, stop) of the blocks `block_range` (first, end).

    Block i holds positions `i * block_k … (i + 1) * block_k - 1`; nothing outside `key_range` is read. `refs` are of
    the page table, of queries and pages flattened to rows, and of `PerHead`. Sinks only count where `counts_sinks`.
    """
    names = [name for name in PerHead._fields if name in refs]
    own = {name: triton_load(refs[name].at[tile.head], mask=tile.live, other=0) for name in names}
    slopes, positions = own.get("slopes"), tile.position
    page_refs = [ref for name, ref in refs.items() if name.startswith("pages")]
    start = _start_softmax(len(positions), spec, own.get("sinks"))
    if counts_sinks is not None:
        start = start._replace(l=jnp.where(counts_sinks, start.l, 0.0))
    q = [_load_part(refs["q"], tile.row, tile.live, part) for part in spec.parts]
    key_start, key_stop = key_range

    def body(block: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        keys = block * spec.block_k + jnp.arange(spec.block_k)
        live = (keys >= key_start) & (keys < key_stop)
        page_ids = triton_load(refs["page_table"].at[tile.seq, lax.div(keys, spec.page_size)], mask=live, other=0)
        rows = (page_ids * spec.kv_heads + tile.kv_head) * spec.page_size + lax.rem(keys, spec.page_size)

        k = [_load_codes(page_refs[0], rows, live, part, spec) for part in spec.parts]
        logits: Any = sum(_dot(a, b, contract_rhs=1) for a, b in zip(q, k, strict=True))
        if spec.quantized:
            logits = logits * _load_scale(page_refs[0], rows, live, spec)[None, :]
        if spec.softcap is None:
            logits = logits * (spec.scale * LOG2E)
        else:
            logits = jnp.tanh(logits * (spec.scale / spec.softcap)) * (spec.softcap * LOG2E)
        if slopes is not None:
            # From the block's first key on, and to there: a matrix of distances would take an A100 too many registers.
            slope = slopes * LOG2E
            to_block = slope * (block * spec.block_k - positions).astype(jnp.float32)
            logits = logits + slope[:, None] * jnp.arange(spec.block_k, dtype=jnp.float32)[None, :] + to_block[:, None]
        visible = live[None, :] & (keys[None, :] <= positions[:, None])
        if spec.chunked:
            visible &= keys[None, :] >= first_key(positions, spec)[:, None]
        elif spec.window is not None:
            visible &= keys[None, :] > positions[:, None] - spec.window
        logits = jnp.where(visible, logits, MASKED)

        m = jnp.maximum(state.m, jnp.max(logits, axis=1))
        correction = jnp.exp2(state.m - m)
        weights = jnp.exp2(logits - m[:, None])
        total = state.l * correction + jnp.sum(weights, axis=1)
        if spec.quantized:
            weights = weights * _load_scale(page_refs[-1], rows, live, spec)[None, :]
        v = k[0] if len(page_refs) == 1 else _load_codes(page_refs[1], rows, live, spec.parts[0], spec)
        acc = state.acc * correction[:, None] + _dot(weights.astype(v.dtype), v, contract_rhs=0)
        return OnlineSoftmax(acc, m, total)

    return lax.fori_loop(block_range[0], block_range[1], body, start)


def _load_part(ref: Any, rows: Array, live: Array, part: Part) -> Array:
    """Some channels of the rows of a flattened `[n, D]`; rows that are not `live` are zero."""
    dims = jnp.arange(part.padded)
    mask = live[:, None] & (dims < part.size)[None, :]
    return triton_load(ref.at[rows[:, None], part.start + dims[None, :]], mask=mask, other=0)


def _load_codes(ref: Any, rows: Array, live: Array, part: Part, spec: AttentionSpec) -> Array:
    """Keys or values in the query's type, those of quantized pages without their scale."""
    codes = _load_part(ref, rows, live, part)
    return (from_e4m3(codes.astype(jnp.int32)) if ref.dtype == jnp.uint8 else codes).astype(spec.dtype)


def _load_scale(ref: Any, rows: Array, live: Array, spec: AttentionSpec) -> Array:
    """The float32 whose bytes follow the codes, lowest first."""
    bits = jnp.zeros(rows.shape, jnp.int32)
    for index in range(SCALE_BYTES):
        byte = triton_load(ref.at[rows, spec.head_dim + index], mask=live, other=0).astype(jnp.int32) & 255
        bits = bits | byte << (8 * index)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _dot(lhs: Array, rhs: Array, *, contract_rhs: int) -> Array:
    # HIGHEST keeps float32 out of TF32; for bf16 and f16 inputs the tensor cores accumulate in float32 either way.
    numbers, precision = (((1,), (contract_rhs,)), ((), ())), lax.Precision.HIGHEST
    return lax.dot_general(lhs, rhs, numbers, precision=precision, preferred_element_type=jnp.float32)
