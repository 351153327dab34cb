"""One model over one batch, beside the caches of another."""

from __future__ import annotations

import jax

from jaxllm.models.caches import Cache
from jaxllm.models.decoder import Decoder
from jaxllm.models.layers.gathering import gathering
from jaxllm.models.layers.steering import Steered
from jaxllm.pallas_kernels import StepMetadata


def forward(
    model: Decoder | Steered,
    tokens: jax.Array,
    caches: tuple[Cache, ...],
    meta: StepMetadata,
    first: int = 0,
    handed: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, tuple[Cache, ...]]:
    """The model's hidden states, and all caches: its own begin with the `first`, and the others stay as they are.

    `handed` is what the stage before has given, where the model is a later one.
    """
    end = first + len(model.config.caches)
    hidden, kept = model(tokens, caches[first:end], meta, *handed)
    return hidden, (*caches[:first], *kept, *caches[end:])


def forward_read(
    model: Decoder | Steered,
    tokens: jax.Array,
    caches: tuple[Cache, ...],
    meta: StepMetadata,
    layers: tuple[int, ...],
    handed: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array, tuple[Cache, ...]]:
    """The model's hidden states, its states in front of `layers` side by side, and all caches.

    Without `layers` the former are given twice. `handed` is as in `forward`.
    """
    with gathering(layers) as gathered:
        hidden, caches = forward(model, tokens, caches, meta, handed=handed)
    return hidden, hidden if gathered is None else gathered.joined, caches
