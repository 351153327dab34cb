"""Modules that predict further tokens of a model: those in checkpoints (MTP) and EAGLE-3 heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.errors import CheckpointError
from jaxllm.models.caches import Cache
from jaxllm.models.config import DecoderConfig, check_decoder
from jaxllm.models.decoder import Decoder, without_padding
from jaxllm.models.families import llama
from jaxllm.models.hf_fields import check_hf, check_only
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.linear import Linear, VocabEmbedding, param
from jaxllm.models.layers.mlp import GatedMLP
from jaxllm.models.layers.norm import RMSNorm, norm_of_kind
from jaxllm.models.layers.rope import Angles, rope_angles
from jaxllm.models.names import hf_names, hf_renaming
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import FAMILIES, ModelSpec, read_of
from jaxllm.pallas_kernels import Kernels, StepMetadata
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import FLAG, NULL, OBJECT, FieldKinds, check_fields, either, several, shown, whole
from jaxllm.weights.names import NameMap, Source, Transform, expand, renamed


@runtime_checkable
class Head(Protocol):
    """Scores tokens: a Decoder, or a stand-in for one."""

    @property
    def kernels(self) -> Kernels: ...

    def most_likely(self, hidden: jax.Array) -> jax.Array | None:
        """The token with the highest score of each row, where the kernels find it without the scores."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 scores over the vocabulary."""


class Predicted(NamedTuple):
    """A module's output: states for the head, states that take the place of the model's, and its pages."""

    hidden: Float[Array, "T E"]
    state: Float[Array, "T E"]
    caches: tuple[Cache, ...]


class Predictor(Decoder):
    """A module that drafts. Unless it does otherwise, it has the model's states, embeddings and head."""

    def read(self, states: Float[Array, "T n"]) -> Float[Array, "T E"]:
        """The module's form of the model's states of tokens; it is kept until the token after each is known."""
        return states

    def embed_for(self, model: Decoder, tokens: jax.Array) -> Float[Array, "T E"]:
        return model.embed(tokens)

    def predict(
        self, embeddings: Float[Array, "T E"], hidden: Float[Array, "T E"], caches: tuple[Cache, ...],
        meta: StepMetadata,
    ) -> Predicted:  # fmt: skip
        """Predict the tokens after those of these `embeddings`, each after one of `hidden` (at `meta.positions`)."""
        raise NotImplementedError

    def head_for(self, model: Decoder) -> Head:
        """The head that scores all tokens of the model's vocabulary."""
        return model


class MTPModule(Predictor):
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
        self, embeddings: Float[Array, "T E"], hidden: Float[Array, "T E"], caches: tuple[Cache, ...],
        meta: StepMetadata,
    ) -> Predicted:  # fmt: skip
        both = [self.token_norm(embeddings), self.hidden_norm(hidden.astype(embeddings.dtype))]
        joined = self.join(jnp.concatenate(both, axis=-1).astype(embeddings.dtype))
        found, kept = self(meta.positions, caches, meta, joined)
        return Predicted(found, found, kept)


@dataclass(frozen=True)
class MTPSpec(ModelSpec):
    """The module of a checkpoint."""

    def build(self, options: BuildOptions) -> MTPModule:
        return MTPModule(self.config, options)


def mtp_spec(checkpoint: Checkpoint, spec: ModelSpec) -> MTPSpec:
    """The module that a checkpoint has beside its model. Raises CheckpointError if there is none that is supported."""
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


@dataclass(frozen=True)
class Eagle3Config:
    """The properties of a head that a Llama of one layer does not have.

    Attributes:
        layers: it reads the states in front of these layers of the model, in ascending order.
        target_size: of the model's states.
        num_outputs: how many tokens its output head has.
        reduced: these are not all tokens, so that it says which they are.
        own_embedding: it has one, and does not use the model's.
        norm_before_residual: what attention is added to is the normed state.
    """

    layers: tuple[int, ...]
    target_size: int
    num_outputs: int
    reduced: bool
    own_embedding: bool
    norm_before_residual: bool


class Eagle3Layer(nnx.Module):
    """Llama's layer, but for attention, which reads the norms of an embedding and of a state side by side."""

    def __init__(self, config: DecoderConfig, eagle: Eagle3Config, options: BuildOptions):
        size, eps, kernels = config.hidden_size, config.norm_eps, options.kernels
        self.attention_norm = RMSNorm(size, eps, kernels)
        self.hidden_norm = RMSNorm(size, eps, kernels)
        self.attention = Attention(
            size, config.num_heads, config.num_kv_heads, config.head_dim, options, input_size=2 * size,
            bias=config.qkv_bias, output_bias=config.output_bias,
        )  # fmt: skip
        self.mlp_norm = RMSNorm(size, eps, kernels)
        self.mlp = GatedMLP(size, config.intermediate_size, config.hidden_act, options, config.mlp_bias)
        self.norm_before_residual = eagle.norm_before_residual

    def __call__(
        self, embeddings: Float[Array, "T E"], hidden: Float[Array, "T E"], angles: Angles, pages: Any,
        meta: StepMetadata,
    ) -> tuple[Float[Array, "T E"], Any]:  # fmt: skip
        normed = self.hidden_norm(hidden)
        both = jnp.concatenate([self.attention_norm(embeddings), normed], axis=-1)
        residual = normed if self.norm_before_residual else hidden
        x, pages = self.attention(both, angles, pages, meta, residual=residual)
        return self.mlp(x, meta, norm=self.mlp_norm.traced, residual=x), pages


class Eagle3Head(Predictor):
    """A layer that was trained to say what a given model will say next (EAGLE-3, arXiv:2503.01840).

    It reads states from between the model's layers, joined by a product to one of its own size, and the embedding of
    the token after them. Its layer's state is normed for its output head, and is the next token's state. Its output
    head has the most frequent tokens alone. Checkpoints are as SpecForge and others publish them, or as speculators.
    """

    def __init__(self, config: DecoderConfig, eagle: Eagle3Config, options: BuildOptions):
        super().__init__(config, options)
        del self.layers
        if not eagle.own_embedding:
            del self.embed
        self.layer = Eagle3Layer(config, eagle, options)
        self.join = Linear(len(eagle.layers) * eagle.target_size, config.hidden_size, options, adaptable=False)
        self.head = VocabEmbedding(eagle.num_outputs, config.hidden_size, options)
        self.targets = param((eagle.num_outputs,), jnp.int32) if eagle.reduced else None
        self.own_embedding = eagle.own_embedding

    def read(self, states: Float[Array, "T n"]) -> Float[Array, "T E"]:
        return self.join(states)

    def embed_for(self, model: Decoder, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        return self.embed(tokens) if self.own_embedding else model.embed(tokens)

    def predict(
        self, embeddings: Float[Array, "T E"], hidden: Float[Array, "T E"], caches: tuple[Cache, ...],
        meta: StepMetadata,
    ) -> Predicted:  # fmt: skip
        (pages,), (rope,) = caches, self.config.ropes
        angles = rope_angles(rope, meta.positions, meta.rotary_lengths, meta.rope_places)
        hidden = without_padding(hidden.astype(embeddings.dtype), meta, self.kernels)
        embeddings = without_padding(embeddings, meta, self.kernels)
        state, pages = self.layer(embeddings, hidden, angles, pages, meta)
        return Predicted(self.norm(state), state, (pages,))

    def head_for(self, model: Decoder) -> Head:
        return self if self.targets is None else _ReducedHead(self, model.config.num_outputs)


class _ReducedHead:
    """A head that has some of a vocabulary's tokens; the others are impossible."""

    def __init__(self, head: Eagle3Head, vocab_size: int):
        assert head.targets is not None
        self._head = head
        self._targets = head.targets[...]
        self._vocab_size = vocab_size

    @property
    def kernels(self) -> Kernels:
        return self._head.kernels

    def most_likely(self, hidden: Any) -> Any:
        found = self._head.most_likely(hidden)
        return None if found is None else self._targets[found]

    def logits(self, hidden: Any) -> Any:
        scores = self._head.logits(hidden)
        everything = jnp.full((len(scores), self._vocab_size), -jnp.inf, scores.dtype)
        return everything.at[:, self._targets].set(scores)


ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
JOIN = "fc.weight"  # the product that joins the model's states, which no other checkpoint has under this name
PREFIXES = ("", "model.")  # of all names but those of the output head
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NUM_STATES = 3
_SIZE, _LAYERS = whole(1, 2**24), several(whole(0, 2**12), NUM_STATES)

FIELDS: FieldKinds = {
    "transformer_layer_config": OBJECT,
    "eagle_config": either(OBJECT, NULL),
    "draft_vocab_size": either(_SIZE, NULL),
    "target_hidden_size": either(_SIZE, NULL),
    "norm_before_residual": either(FLAG, NULL),
    LAYER_IDS: either(_LAYERS, NULL),
}
OTHERWISE: dict[str, tuple[Any, ...]] = {  # keys that some heads have unsupported values of
    "use_aux_hidden_state": (None, True), "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True), "use_mtp_layernorm": (None, False), "norm_before_fc": (None, False),
    "fc_norm": (None, False), "parallel_draft_step": (None, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Eagle3Spec(ModelSpec):
    """A head's checkpoint."""

    eagle: Eagle3Config

    def build(self, options: BuildOptions) -> Eagle3Head:
        return Eagle3Head(self.config, self.eagle, options)

    @property
    def shape(self) -> Any:
        return self.config, self.eagle


def names_a_head(c: dict[str, Any]) -> bool:
    """True for the config.json of such a head."""
    named = c.get("architectures")
    return isinstance(named, list) and any(name in ARCHITECTURES for name in named)


def eagle3_spec(checkpoint: Checkpoint, model: DecoderConfig) -> Eagle3Spec:
    """The EAGLE-3 head of a checkpoint for `model`. Raises CheckpointError if it is none, or for another model."""
    with read_of(checkpoint.path, "its config.json has no"):
        return _eagle3_spec(checkpoint, model)


def _eagle3_spec(checkpoint: Checkpoint, model: DecoderConfig) -> Eagle3Spec:
    if checkpoint.format != "safetensors":
        raise CheckpointError(f"is in the format {checkpoint.format}; accepted is an EAGLE-3 head in safetensors")
    c, tensors = _flat(checkpoint.config), checkpoint.tensors
    prefix = next((before for before in PREFIXES if f"{before}{JOIN}" in tensors), "")
    if tensors and f"{prefix}{JOIN}" not in tensors:  # a head of random weights has none
        raise CheckpointError(f"has no tensor {JOIN!r}; accepted is an EAGLE-3 head")
    config = llama.llama_from_hf(c | {"tie_word_embeddings": False})
    check_decoder(config)
    vocab = c.get("draft_vocab_size") or config.vocab_size
    eagle = Eagle3Config(
        layers=_layers(c, model.num_layers), target_size=model.hidden_size, num_outputs=vocab,
        reduced="d2t" in tensors if tensors else vocab != config.vocab_size,
        own_embedding=f"{prefix}embed_tokens.weight" in tensors,
        norm_before_residual=bool(c.get("norm_before_residual")),
    )  # fmt: skip
    size = c.get("target_hidden_size") or (model.hidden_size if eagle.own_embedding else config.hidden_size)
    if size != model.hidden_size:
        raise CheckpointError(f"is a head for a model with states of {size} channels; accepted is {model.hidden_size}")
    if config.vocab_size != model.vocab_size:
        raise CheckpointError(f"vocab_size is {config.vocab_size}; accepted is the model's, {model.vocab_size}")
    layer = "layers.0" if f"{prefix}layers.0.hidden_norm.weight" in tensors else "midlayer"
    ignored = ("t2d", "*rotary_emb.inv_freq")
    return Eagle3Spec(llama.LLAMA, config, _names(config, prefix, f"{prefix}{layer}"), ignored, eagle)


def _flat(c: dict[str, Any]) -> dict[str, Any]:
    if not names_a_head(c):
        raise CheckpointError(
            f"architectures is {shown(c.get('architectures'))}; accepted are {', '.join(ARCHITECTURES)}"
        )
    check_fields(c, FIELDS)
    if "transformer_layer_config" in c:  # speculators'
        c = {"norm_before_residual": True} | c["transformer_layer_config"] | c
    if c.get("model_type", "llama") not in ("llama", "eagle3"):
        raise CheckpointError(f"model_type is {shown(c['model_type'])}; accepted is llama")
    check_only(c | (c.get("eagle_config") or {}), OTHERWISE)
    check_hf(c, llama.LLAMA.layer_types, llama.LLAMA.fields)
    if c["num_hidden_layers"] != 1:
        raise CheckpointError(f"num_hidden_layers is {shown(c['num_hidden_layers'])}; accepted is 1")
    return c


def _layers(c: dict[str, Any], count: int) -> tuple[int, ...]:
    """The layers of the model before which a head reads states.

    The file's own key names these, as vLLM reads it; the one in `eagle_config` the ones before, as SpecForge writes it.
    """
    nested = c.get("eagle_config") or {}
    check_fields(nested, {LAYER_IDS: FIELDS[LAYER_IDS]}, "eagle_config.")
    found = c.get(LAYER_IDS) or [layer + 1 for layer in nested.get(LAYER_IDS) or ()] or [2, count // 2, count - 3]
    layers = tuple(sorted(set(found)))
    if len(layers) != NUM_STATES or layers[0] < 0 or layers[-1] >= count:
        raise CheckpointError(
            f"reads states in front of the layers {', '.join(map(str, found))}; accepted are {NUM_STATES} of the "
            f"{count} layers of the model"
        )
    return layers


def _names(config: DecoderConfig, prefix: str, layer: str) -> NameMap:
    def rename(name: str) -> str:
        for ours, theirs in (("model.layers.0.", f"{layer}."), ("model.", prefix)):
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    own = {"join.weight": f"model.{JOIN}", "layers.*.hidden_norm.weight": "model.layers.*.hidden_norm.weight"}
    names = {path.replace("layers.0.", "layer."): ways for path, ways in expand(hf_names(config) | own, 1).items()}
    return renamed(names, rename) | {"targets": ((Source("d2t", _tokens(config.vocab_size)),),)}


def _tokens(vocab_size: int) -> Transform:
    """The tokens of the output head's rows, from the offsets between the numbers of both."""

    def transform(offsets: np.ndarray) -> np.ndarray:
        tokens: np.ndarray = offsets + np.arange(len(offsets))
        first, last = int(np.min(tokens)), int(np.max(tokens))
        if not 0 <= first <= last < vocab_size:
            raise CheckpointError(f"tensor 'd2t' names tokens {first} … {last}; accepted are 0 … {vocab_size - 1}")
        return tokens

    return transform
