"""What a module is that predicts further tokens of the model's own states."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from jaxllm.models.caches import Cache
from jaxllm.models.decoder import Decoder
from jaxllm.pallas_kernels import Kernels, StepMetadata


@runtime_checkable
class Head(Protocol):
    """What scores tokens: a Decoder, or what stands for one."""

    @property
    def kernels(self) -> Kernels: ...

    def most_likely(self, hidden: jax.Array) -> jax.Array | None:
        """The token with the highest score of each row, where the kernels find it without the scores."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 scores over the vocabulary."""


class Predicted(NamedTuple):
    """What a module gives: what the head reads, what takes the place of the model's state, and its pages."""

    hidden: Float[Array, "T E"]
    state: Float[Array, "T E"]
    caches: tuple[Cache, ...]


@runtime_checkable
class Predictor(Protocol):
    """A module that drafts."""

    def read(self, states: Float[Array, "T n"]) -> Float[Array, "T E"]:
        """What it makes of the model's states of some tokens; it is kept until the token after each is known."""

    def embed_for(self, model: Decoder, tokens: jax.Array) -> Float[Array, "T E"]:
        """The embeddings that it reads."""

    def predict(
        self,
        embeddings: Float[Array, "T E"],
        hidden: Float[Array, "T E"],
        caches: tuple[Cache, ...],
        meta: StepMetadata,
    ) -> Predicted:
        """What comes after tokens with these `embeddings`, which are behind those whose states are `hidden`; `meta` has
        the positions of the latter.
        """

    def head_for(self, model: Decoder) -> Head:
        """What scores all tokens of the model's vocabulary."""
