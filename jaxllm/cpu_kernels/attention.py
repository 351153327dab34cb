"""Layers that keep something of each sequence, called while tracing: attention over live pages, and states in rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Int, Shaped

from jaxllm.cpu_kernels.library import call

PageBuffers = tuple[Shaped[Array, "N K page_size D"], ...]

PAGE_DTYPES = tuple(map(np.dtype, (np.uint16, np.float32, np.int8, np.uint8)))
"""Pages of these types are served: the bits of bfloat16, float32, and codes: integers, or the bits of e4m3."""
DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float32))
"""And queries, keys and values of these."""


class Rotary(NamedTuple):
    """Each token's angles: the first `2 * half` channels of every head of queries and keys are rotated by them."""

    cos: Float[Array, "T half"]
    sin: Float[Array, "T half"]
    interleaved: bool = False
    """Pairs of channels are neighbours; otherwise they lie `half` apart."""


class HeadNorms(NamedTuple):
    """RMS norms of every head of queries and of keys, before they are rotated; see `products.RowNorm`."""

    q: Float[Array, "D"]
    k: Float[Array, "D"]
    epsilon: float = 1e-6
    weight_offset: float = 0.0


def attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K Dv"] | None,
    pages: PageBuffers,
    positions: Int[Array, "T"],
    seq_ids: Int[Array, "T"],
    page_table: Int[Array, "S P"],
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    slopes: Float[Array, "H"] | None = None,
    value_dim: int | None = None,
    rotary: Rotary | None = None,
    norms: HeadNorms | None = None,
) -> tuple[Float[Array, "T H Dv"], PageBuffers]:
    """Write new keys and values into their pages, then attend to what each token may see.

    Args:
        q, k, v: float32 or bfloat16, all the same. Without `v` pages are `(latent,)` and a value is the first
            `value_dim` channels of a key. With no heads in `k` and `v` nothing is written.
        pages: `[N, K, page_size, D]`, float32, or uint16 for the bits of bfloat16; or `[N, K, page_size, D + 4]`, int8
            or uint8 (the bits of e4m3), of codes with the bytes of their float32 scale behind them. Updated in place
            when donated. What is not finite is stored as zero.
        positions, seq_ids, page_table: as in `StepMetadata`. Tokens of one sequence that follow each other go together;
            a token whose `seq_id` is S or more is padding: nothing is written, and its output is zero.
        rotary, norms: what is done to queries and keys first, in float32: norms, then rotation.

    Returns:
        The output in `q`'s dtype and the new pages. Sums run in float32; with pages of 16 or 8 bits and BF16
        instructions, queries and weights are rounded to bfloat16. A token's output does not depend on the batch around
        it.

    Raises:
        ValueError: a dtype that is not served, or `value_dim` beside `v`.
    """
    if v is not None and value_dim is not None:
        raise ValueError(f"value_dim is {value_dim}, but the values come by themselves, in v")
    if q.dtype not in DTYPES or pages[0].dtype not in PAGE_DTYPES:
        raise ValueError(
            f"q is {q.dtype} and pages are {pages[0].dtype}; CPU kernels serve q of float32 and bfloat16, "
            "pages of float32, uint16 (the bits of bfloat16), int8 and uint8 (the bits of e4m3)"
        )
    latent = v is None
    width = (value_dim or k.shape[-1]) if v is None else v.shape[-1]
    arguments: list[jax.Array] = [q, k, positions, seq_ids, page_table, pages[0]]
    aliases = {5: 1}
    if v is not None:
        arguments += [v, pages[1]]
        aliases[7] = 2
    extra = [x for x in (sinks, slopes) if x is not None]
    extra += [] if rotary is None else [rotary.cos, rotary.sin]
    extra += [] if norms is None else [norms.q, norms.k]
    arguments += [x.astype(jnp.float32) for x in extra]
    epsilon, offset = (0.0, 0.0) if norms is None else (norms.epsilon, norms.weight_offset)
    shapes = (ShapeDtypeStruct((*q.shape[:2], width), q.dtype), *(ShapeDtypeStruct(p.shape, p.dtype) for p in pages))
    out, *new_pages = call("jaxllm_attention", shapes, input_output_aliases=aliases)(
        *arguments,
        scale=np.float32(scale),
        softcap=np.float32(softcap or 0),
        window=np.int64(window or 0),
        chunked=chunked,
        latent=latent,
        sinks=sinks is not None,
        slopes=slopes is not None,
        rotary=rotary is not None,
        interleaved=rotary is not None and rotary.interleaved,
        norms=norms is not None,
        epsilon=np.float32(epsilon),
        weight_offset=np.float32(offset),
    )
    return out, tuple(new_pages)


class Runs(NamedTuple):
    """The tokens of each sequence in a step, one run after the other, and the rows of its state.

    Attributes:
        sequences: how many there are.
        start: the first token of each, and where the last one ends.
        read, begins: the row that holds the state before the run; 1 where that is zero, whatever the row holds.
        written: the row that it is brought into, and that holds the state after the run.
        kept, kept_length: the row that another state is kept in, and after how many of the run's tokens; 0 is nothing.
    """

    sequences: Int[Array, "1"]
    start: Int[Array, "S+1"]
    read: Int[Array, "S"]
    begins: Int[Array, "S"]
    written: Int[Array, "S"]
    kept: Int[Array, "S"]
    kept_length: Int[Array, "S"]


def causal_conv(
    x: Float[Array, "T C"],
    taps: Float[Array, "C k"],
    bias: Float[Array, "C"] | None,
    buffer: Float[Array, "N r C"],
    runs: Runs,
    silu: bool,
) -> tuple[Float[Array, "T C"], Float[Array, "N r C"]]:
    """A depthwise convolution over each run and the inputs before it, with silu behind it or not; float32.

    `x` is float32 or bfloat16. The buffer, of the last `r = k - 1` inputs, is updated in place when donated. Padding
    gives zero.
    """
    shapes = ShapeDtypeStruct(x.shape, jnp.float32), ShapeDtypeStruct(buffer.shape, buffer.dtype)
    more = () if bias is None else (bias.astype(jnp.float32),)
    return call("jaxllm_causal_conv", shapes, input_output_aliases={2: 1})(
        x, taps.astype(jnp.float32), buffer, *_integers(runs), *more, bias=bias is not None, silu=silu
    )


def delta_rule(
    qkv: Float[Array, "T C"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    buffer: Float[Array, "N H Dk Dv"],
    runs: Runs,
    *,
    key_heads: int,
    epsilon: float,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "N H Dk Dv"]]:
    """The gated delta rule of float32, token by token: a result does not depend on the batch around it.

    `epsilon` is added to the sum of a query's or key's squares. The buffer is updated in place when donated. Padding
    gives zero.
    """
    _, heads, _, value_dim = buffer.shape
    shapes = ShapeDtypeStruct((len(qkv), heads, value_dim), jnp.float32), ShapeDtypeStruct(buffer.shape, buffer.dtype)
    return call("jaxllm_delta_rule", shapes, input_output_aliases={3: 1})(
        qkv, decay, beta, buffer, *_integers(runs), key_heads=np.int64(key_heads), epsilon=np.float32(epsilon)
    )


def ssd(
    x: Float[Array, "T H P"],
    dt: Float[Array, "T H"],
    a: Float[Array, "H"],
    b: Float[Array, "T G N"],
    c: Float[Array, "T G N"],
    skip: Float[Array, "H"],
    buffer: Float[Array, "B H P N"],
    runs: Runs,
) -> tuple[Float[Array, "T H P"], Float[Array, "B H P N"]]:
    """State-space duals of float32 (see `pallas_kernels/ssd.py`), token by token: a result does not depend on the batch
    around it.

    The buffer is updated in place when donated. Padding gives zero.
    """
    shapes = ShapeDtypeStruct(x.shape, jnp.float32), ShapeDtypeStruct(buffer.shape, buffer.dtype)
    return call("jaxllm_ssd", shapes, input_output_aliases={6: 1})(x, dt, a, b, c, skip, buffer, *_integers(runs))


def _integers(runs: Runs) -> tuple[Array, ...]:
    return tuple(field.astype(jnp.int32) for field in runs)
