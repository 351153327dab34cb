"""Paged attention: one entry, several implementations, and the table that chooses between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels.metadata import AttentionMetadata
from jaxllm.pallas_kernels.pages import Pages


def _reference(*args: Any, **kwargs: Any) -> Any:
    from jaxllm.pallas_kernels.reference import paged_attention

    return paged_attention(*args, **kwargs)


def _gpu(*args: Any, **kwargs: Any) -> Any:
    from jaxllm.pallas_kernels.gpu import paged_attention

    return paged_attention(*args, **kwargs)


ATTENTION: dict[str, Callable[..., Any]] = {"reference": _reference, "gpu": _gpu}
"""Implementations by name."""

PLATFORM_ATTENTION: dict[str, str] = {"cpu": "reference", "gpu": "gpu", "cuda": "gpu", "tpu": "reference"}
"""What "auto" means on each platform; a platform not listed takes the reference."""

PLATFORMS_OF: dict[str, tuple[str, ...]] = {"reference": (), "gpu": ("gpu", "cuda")}
"""Platforms an implementation is bound to; empty is any."""


def choose_attention(backend: str, platform: str) -> str:
    """The implementation that `--attention-backend backend` means on `platform`.

    Raises:
        ConfigError: the backend is unknown or cannot run there.
    """
    if backend == "auto":
        return PLATFORM_ATTENTION.get(platform, "reference")
    if backend not in ATTENTION:
        raise ConfigError(f"attention_backend is {backend!r}; accepted are auto, {', '.join(ATTENTION)}")
    if PLATFORMS_OF[backend] and platform not in PLATFORMS_OF[backend]:
        raise ConfigError(f"attention_backend is {backend!r}, which needs a GPU; this machine runs on {platform}")
    return backend


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: Pages,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "T H D"], Pages]:
    """Write new keys and values into their pages, then attend to everything each token may see.

    Args:
        q, k, v: the new tokens' queries, keys and values; query head `h` uses KV head `h // (H // K)`.
        pages: `(k_pages, v_pages)`, each `[N, K, page_size, D]`; updated in place when donated.
        meta: which token belongs where; see AttentionMetadata.
        scale: factor on the logits.
        window: a token at position `i` sees positions `j` with `i - window < j <= i`.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        sinks: one more logit a head that takes softmax mass and has no value.
        backend: an implementation of `ATTENTION`, or "auto".

    Returns:
        The attention output in `q`'s dtype (padding rows are zero) and the new pages. Sums run in float32.
    """
    name = choose_attention(backend, jax.default_backend())
    return ATTENTION[name](q, k, v, pages, meta, scale=scale, window=window, softcap=softcap, sinks=sinks)


__all__ = ["ATTENTION", "AttentionMetadata", "Pages", "choose_attention", "paged_attention"]
