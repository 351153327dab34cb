"""Modules that predict further tokens of the model's own states, and those of checkpoints (MTP, arXiv:2412.19437).

From the model's hidden state of one token and the embedding of the next, such a module says what comes after that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.errors import CheckpointError
from jaxllm.models.caches import Cache
from jaxllm.models.config import DecoderConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.layers.linear import Linear
from jaxllm.models.layers.norm import norm_of_kind
from jaxllm.models.names import hf_renaming
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import FAMILIES, ModelSpec
from jaxllm.pallas_kernels import Kernels, StepMetadata
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.names import renamed


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


class MTPModule(Decoder):
    """`norm(layer(join(norm(embedding), norm(hidden))))`: the hidden state that the head reads, and that can take the
    place of the model's for the token after it.

    Its layer keeps pages of its own: in the row of token `t` what it makes of that token's state and of token `t + 1`.
    """

    def __init__(self, config: DecoderConfig, options: BuildOptions):
        super().__init__(config, options)
        del self.embed, self.head
        size = config.hidden_size
        self.token_norm = norm_of_kind(config.norm, size, config.norm_eps, options.kernels)
        self.hidden_norm = norm_of_kind(config.norm, size, config.norm_eps, options.kernels)
        self.join = Linear(2 * size, size, options, adaptable=False)

    def predict(
        self,
        embeddings: Float[Array, "T E"],
        hidden: Float[Array, "T E"],
        caches: tuple[Cache, ...],
        meta: StepMetadata,
    ) -> Predicted:
        """The hidden states of the module, which take the place of the model's as well, and its pages.

        `embeddings` are of the tokens behind those whose states are `hidden`; `meta` has the positions of these.
        """
        both = [self.token_norm(embeddings), self.hidden_norm(hidden.astype(embeddings.dtype))]
        joined = self.join(jnp.concatenate(both, axis=-1).astype(embeddings.dtype))
        found, kept = self(meta.positions, caches, meta, joined)
        return Predicted(found, found, kept)

    def read(self, states: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The model's hidden states, as they are."""
        return states

    def embed_for(self, model: Decoder, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The model's embeddings."""
        return model.embed(tokens)

    def head_for(self, model: Decoder) -> Head:
        """The model's own."""
        return model


@dataclass(frozen=True)
class MTPSpec(ModelSpec):
    """The module of a checkpoint."""

    def build(self, options: BuildOptions) -> MTPModule:
        """The module, with abstract weights."""
        return MTPModule(self.config, options)


def mtp_spec(checkpoint: Checkpoint, spec: ModelSpec) -> MTPSpec:
    """The module that a checkpoint has beside its model.

    Raises:
        CheckpointError: it has none, or one that is made otherwise.
    """
    family, config = spec.family, spec.config
    if family.mtp_names is None or checkpoint.format != "safetensors":
        supported = ", ".join(family.name for family in FAMILIES if family.mtp_names is not None)
        found = f"a checkpoint of {family.name} in the format {checkpoint.format}"
        raise CheckpointError(
            f"{checkpoint.path}: is {found}; modules that predict further tokens (MTP) are supported in safetensors "
            f"checkpoints of {supported}"
        )
    attends = next(layer for layer in reversed(config.layers) if layer.attends)
    layer = replace(attends, sparse=any(layer.sparse for layer in config.layers))
    own = replace(config, layers=(layer,), conv=None, delta=None, ssd=None, num_labels=0)
    names = renamed(family.mtp_names(own, config.num_layers), hf_renaming(checkpoint.tensors))
    first = names["join.weight"][0][0].name
    if checkpoint.tensors and first not in checkpoint.tensors:  # a model of random weights has none
        raise CheckpointError(
            f"{checkpoint.path}: has no tensor {first!r}; accepted is a checkpoint with the module that predicts "
            "further tokens"
        )
    return MTPSpec(family, own, names, ("*",))
