"""Attention over whole sequences that also gives what it attends by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from einops import repeat
from jaxtyping import Array, Float

from jaxllm.pallas_kernels import whole
from jaxllm.pallas_kernels.metadata import StepMetadata
from jaxllm.pallas_kernels.pages import Pages
from jaxllm.pallas_kernels.reference import Options


def attention(
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
) -> tuple[Float[Array, "T H D"], Pages]:
    """As `whole.attention`, of one sequence. Behind the keys and values its pages have queries `[1, T, H, D]` and
    weights `[1, H, T, T]`: of the layer itself, and then of each later layer that shares its keys.
    """
    rules: dict[str, Any] = {"scale": scale, "window": window, "chunked": chunked, "softcap": softcap}
    assert value_dim is None, "latents are not watched"
    earlier = pages[2:]
    out, pages = whole.attention(q, k, v, pages[:2], meta, **rules, sinks=sinks, slopes=slopes)
    options = Options(scale, window, softcap, None, pages[-1].shape[-1], chunked, slopes)
    keys = repeat(pages[0][0], "t kv dim -> (kv group) t dim", group=q.shape[1] // pages[0].shape[2])
    place = jnp.arange(len(q))
    scores = options.logits(q.swapaxes(0, 1), keys)
    by_head = None if slopes is None else slopes[:, None]
    scores = options.mask(scores, place[:, None], place, by_head)
    if sinks is not None:  # they take a part of each token's attention, and give nothing
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)[..., : len(q)]
    return out, (*pages, *earlier, q[None], weights[None])


WATCHED = replace(whole.WHOLE, name="watched", attention=attention)
"""Plain XLA, for `whole_sequences` of one sequence."""
