"""Layers that keep something of each sequence, called while tracing: attention over live pages, and states in rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    visible_until: Int[Array, "T"] | None = None,
    value_dim: int | None = None,
    rotary: Rotary | None = None,
    norms: HeadNorms | None = None,
) -> tuple[Float[Array, "T H Dv"], PageBuffers]:
    """`pallas_kernels.reference.paged_attention`, with what is done to queries and keys first.

    Args:
        q, k, v: float32 or bfloat16, all the same.
        pages: `[N, K, page_size, D]`, float32, or uint16 for the bits of bfloat16; or `[N, K, page_size, D + 4]`, int8
            or uint8 (the bits of e4m3), of codes and then the bytes of their float32 scale. Updated in place when
            donated. What is not finite is stored as zero.
        positions, seq_ids, page_table: as in `StepMetadata`. Tokens of one sequence that follow each other go together;
            a token whose `seq_id` is S or more is padding: nothing is written, and its output is zero.
        norms, rotary: of queries and keys, in float32: norms, then rotation.

    Returns:
        The output in `q`'s dtype and the new pages. Sums run in float32; with pages of 16 or 8 bits and BF16
        instructions, queries and weights are rounded to bfloat16. A token's output does not depend on the batch around
        it.

    Raises ValueError: a dtype that is not served, or `value_dim` beside `v`.
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
    arguments += [] if visible_until is None else [visible_until]
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
        looks_ahead=visible_until is not None,
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


def run_states(
    target: str, out: tuple[int, ...], arrays: Sequence[Array], buffer: Array, runs: Runs, *more: Array,
    **attributes: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """A layer's kernel `target`, token by token: a result does not depend on the batch around it.

    Args:
        out: the shape of the output, float32; zero for padding.
        arrays: what each token gives, and constants.
        buffer: a state a row; updated in place when donated.
    """
    shapes = ShapeDtypeStruct(out, jnp.float32), ShapeDtypeStruct(buffer.shape, buffer.dtype)
    integers = (field.astype(jnp.int32) for field in runs)
    made: tuple[Array, Array] = call(target, shapes, input_output_aliases={len(arrays): 1})(
        *arrays, buffer, *integers, *more, **attributes
    )
    return made
