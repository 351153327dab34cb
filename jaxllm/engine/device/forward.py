"""One model over one batch, beside the caches of another."""

from __future__ import annotations

import jax

from jaxllm.models.caches import Cache
from jaxllm.models.decoder import Decoder
from jaxllm.models.layers.gathering import gathering
from jaxllm.models.layers.steering import Steered
from jaxllm.pallas_kernels import StepMetadata


def forward(
    model: Decoder | Steered, tokens: jax.Array, caches: tuple[Cache, ...], meta: StepMetadata, first: int = 0
) -> tuple[jax.Array, tuple[Cache, ...]]:
    """The model's hidden states, and all caches: its own begin with the `first`, and the others stay as they are."""
    end = first + len(model.config.caches)
    hidden, kept = model(tokens, caches[first:end], meta)
    return hidden, (*caches[:first], *kept, *caches[end:])


def forward_read(
    model: Decoder | Steered, tokens: jax.Array, caches: tuple[Cache, ...], meta: StepMetadata, layers: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, tuple[Cache, ...]]:
    """The model's hidden states, its states in front of `layers` side by side, and all caches.

    Without `layers` the former are given twice.
    """
    with gathering(layers) as gathered:
        hidden, caches = forward(model, tokens, caches, meta)
    return hidden, hidden if gathered is None else gathered.joined, caches
