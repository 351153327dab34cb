"""What a checkpoint says of an EAGLE-3 head: as SpecForge and others publish it, or as speculators does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.checks import check_decoder
from jaxllm.models.config import DecoderConfig
from jaxllm.models.eagle3 import Eagle3Config, Eagle3Head
from jaxllm.models.families import llama
from jaxllm.models.hf import hf_names
from jaxllm.models.hf_fields import check_hf
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import ModelSpec
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import FLAG, NULL, OBJECT, FieldKinds, check_fields, either, several, shown, whole
from jaxllm.weights.names import NameMap, Source, Transform, expand, renamed

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
JOIN = "fc.weight"
"""The product that joins the model's states, which no other checkpoint has under this name."""
PREFIXES = ("", "model.")
"""Of all names but those of the output head."""
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
OTHERWISE = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "norm_before_fc": False, "fc_norm": False, "parallel_draft_step": 1,
}  # fmt: skip
"""What some heads do otherwise, by keys of `eagle_config` or of the file itself, and what is supported."""


@dataclass(frozen=True)
class Eagle3Spec(ModelSpec):
    """A head's checkpoint."""

    eagle: Eagle3Config

    def build(self, options: BuildOptions) -> Eagle3Head:
        """The head, with abstract weights."""
        return Eagle3Head(self.config, self.eagle, options)

    @property
    def shape(self) -> Any:
        """All that it builds depends on."""
        return self.config, self.eagle


def names_a_head(c: dict[str, Any]) -> bool:
    """Whether a config.json is that of such a head."""
    named = c.get("architectures")
    return isinstance(named, list) and any(name in ARCHITECTURES for name in named)


def eagle3_spec(checkpoint: Checkpoint, model: DecoderConfig) -> Eagle3Spec:
    """The head of a checkpoint, which is to draft for `model`.

    Raises:
        CheckpointError: it is no such head, one that is made otherwise, or one for another model.
    """
    try:
        return _spec(checkpoint, model)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path}: its config.json has no {shown(error.args[0])}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None


def _spec(checkpoint: Checkpoint, model: DecoderConfig) -> Eagle3Spec:
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
        layers=_layers(c, model.num_layers),
        target_size=model.hidden_size,
        num_outputs=vocab,
        reduced="d2t" in tensors if tensors else vocab != config.vocab_size,
        own_embedding=f"{prefix}embed_tokens.weight" in tensors,
        norm_before_residual=bool(c.get("norm_before_residual")),
    )
    _check_pair(c, config, eagle, model)
    layer = "layers.0" if f"{prefix}layers.0.hidden_norm.weight" in tensors else "midlayer"
    ignored = ("t2d", "*rotary_emb.inv_freq")
    return Eagle3Spec(llama.LLAMA, config, _names(config, prefix, f"{prefix}{layer}"), ignored, eagle)


def _flat(c: dict[str, Any]) -> dict[str, Any]:
    """One table of all that a config.json says, looked at."""
    if not names_a_head(c):
        raise CheckpointError(
            f"architectures is {shown(c.get('architectures'))}; accepted are {', '.join(ARCHITECTURES)}"
        )
    check_fields(c, FIELDS)
    if "transformer_layer_config" in c:  # speculators'
        c = {"norm_before_residual": True} | c["transformer_layer_config"] | c
    if c.get("model_type", "llama") not in ("llama", "eagle3"):
        raise CheckpointError(f"model_type is {shown(c['model_type'])}; accepted is llama")
    stated = c | (c.get("eagle_config") or {})
    for key, accepted in OTHERWISE.items():
        if stated.get(key) not in (None, accepted):
            raise CheckpointError(f"{key} is {shown(stated[key])}; accepted is {shown(accepted)}")
    check_hf(c, llama.LLAMA.layer_types, llama.LLAMA.fields)
    if c["num_hidden_layers"] != 1:
        raise CheckpointError(f"num_hidden_layers is {shown(c['num_hidden_layers'])}; accepted is 1")
    return c


def _layers(c: dict[str, Any], count: int) -> tuple[int, ...]:
    """In front of which layers of the model the states are that a head reads.

    The file's own key names these layers, as vLLM reads it, and the one in `eagle_config` those before them, as
    SpecForge writes it.
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


def _check_pair(c: dict[str, Any], config: DecoderConfig, eagle: Eagle3Config, model: DecoderConfig) -> None:
    """Raises CheckpointError where the head is for another model."""
    size = c.get("target_hidden_size") or (model.hidden_size if eagle.own_embedding else config.hidden_size)
    if size != model.hidden_size:
        raise CheckpointError(f"is a head for a model with states of {size} channels; accepted is {model.hidden_size}")
    if config.vocab_size != model.vocab_size:
        raise CheckpointError(f"vocab_size is {config.vocab_size}; accepted is the model's, {model.vocab_size}")


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
    """What the output head's rows are, of how much is added to the number of each."""

    def transform(offsets: np.ndarray) -> np.ndarray:
        tokens: np.ndarray = offsets + np.arange(len(offsets))
        first, last = int(np.min(tokens)), int(np.max(tokens))
        if not 0 <= first <= last < vocab_size:
            raise CheckpointError(f"tensor 'd2t' names tokens {first} … {last}; accepted are 0 … {vocab_size - 1}")
        return tokens

    return transform
