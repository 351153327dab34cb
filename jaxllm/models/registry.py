"""The model families, one row each, and how a checkpoint finds its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from jaxllm.config import did_you_mean
from jaxllm.errors import CheckpointError
from jaxllm.models.checks import check_decoder
from jaxllm.models.config import DecoderConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.families import (
    cohere,
    deepseek,
    ernie4_5,
    exaone4,
    gemma,
    glm,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    olmo2,
    olmo3,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from jaxllm.models.family import Family
from jaxllm.models.gguf import GGUF_NAMES, gguf_further_layers
from jaxllm.models.hf import hf_names, hf_renaming
from jaxllm.models.hf_fields import check_hf
from jaxllm.models.options import BuildOptions
from jaxllm.models.tasks import GGUF_HEAD, class_labels
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.fields import shown
from jaxllm.weights.names import NameMap, expand
from jaxllm.weights.packed_file import PackedCheckpoint
from jaxllm.weights.saved import SavedCheckpoint

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    smollm3.FAMILY,
    mistral.FAMILY,
    ministral3.FAMILY,
    mixtral.FAMILY,
    phi.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen_moe.QWEN2_MOE,
    qwen_moe.QWEN3_MOE,
    stablelm.FAMILY,
    gemma.GEMMA1,
    gemma.GEMMA2,
    gemma.GEMMA3,
    deepseek.V2,
    deepseek.V3,
    glm.GLM,
    glm.GLM4,
    lfm2.LFM2,
    lfm2.LFM2_MOE,
    olmo2.FAMILY,
    olmo3.FAMILY,
    exaone4.FAMILY,
    seed_oss.FAMILY,
    cohere.COHERE,
    cohere.COHERE2,
    starcoder2.FAMILY,
    granite.FAMILY,
    ernie4_5.DENSE,
    ernie4_5.MOE,
    hunyuan.FAMILY,
    gpt_oss.FAMILY,
    glm4_moe.MOE,
    glm4_moe.LITE,
    mistral4.FAMILY,
    minimax_m2.FAMILY,
)

WRAPPERS = {"mistral3": "mistral", "gemma3": "gemma3_text", "kimi_k25": "deepseek_v3"}
"""Multimodal `model_type`s whose `text_config` is served, and the type of one that does not say."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""`model_type`s of models that are another family's under a name of their own."""

IGNORED_TENSORS: tuple[str, ...] = (
    "*rotary_emb.inv_freq", "rope_freqs.weight", "rope_factors_*.weight", "*.k_scale", "*.v_scale", "model.mtp_*",
)  # fmt: skip
"""Tensors that say nothing the config does not, or something of quantized keys and values: those are scaled by row.

Those of ERNIE's module that predicts further tokens are among them.
"""

IMAGE_TENSORS = ("*vision_tower.*", "*multi_modal_projector.*", "*mm_projector.*")
"""What a wrapper has besides its language model."""


@dataclass(frozen=True)
class ModelSpec:
    """A checkpoint's model: its family, its parsed config, and where its tensors are."""

    family: Family
    config: DecoderConfig
    names: NameMap
    ignored: tuple[str, ...]

    def build(self, options: BuildOptions) -> Decoder:
        """The module, with abstract weights."""
        return self.family.module(self.config, options)


def model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Find the family of a checkpoint and parse its config.

    Raises:
        CheckpointError: the architecture is unknown (the supported ones are named), or its config lacks a key.
    """
    if isinstance(checkpoint, SavedCheckpoint):
        return _saved_spec(checkpoint)
    return _gguf_spec(checkpoint) if checkpoint.format == "gguf" else _hf_spec(checkpoint)


def _saved_spec(checkpoint: SavedCheckpoint) -> ModelSpec:
    """What `jaxllm convert` saved names its family and has the config whole."""
    c = checkpoint.config
    family = _find(checkpoint, "family", c["family"], {family.name: family for family in FAMILIES})
    try:
        config = msgspec.convert(c["decoder"], DecoderConfig)
        check_decoder(config)
    except (msgspec.ValidationError, CheckpointError) as error:
        raise CheckpointError(f"{checkpoint.path}: decoder: {error}") from None
    return ModelSpec(family, config, checkpoint.names, ())


def _gguf_spec(checkpoint: Checkpoint) -> ModelSpec:
    known = {name: family for family in FAMILIES if family.from_gguf for name in family.gguf_architectures}
    family = _find(checkpoint, "general.architecture", checkpoint.config.get("general.architecture"), known)
    assert family.from_gguf is not None
    try:
        config = family.from_gguf(checkpoint)
        check_decoder(config)
        labels = class_labels(checkpoint)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path}: its metadata have no {shown(error.args[0])}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    patterns = GGUF_NAMES | family.gguf_names(config)
    if labels:
        config, patterns = _classifier(config, len(labels)), patterns | {"head.weight": GGUF_HEAD}
    further = tuple(f"blk.{config.num_layers + i}.*" for i in range(gguf_further_layers(checkpoint)))
    return ModelSpec(family, config, expand(patterns, config.num_layers), IGNORED_TENSORS + further)


def _hf_spec(checkpoint: Checkpoint) -> ModelSpec:
    c, ignored = checkpoint.config, IGNORED_TENSORS
    kind = c.get("model_type")
    if "text_config" in c and isinstance(kind, str) and kind in WRAPPERS:
        if not isinstance(c["text_config"], dict):
            raise CheckpointError(f"{checkpoint.path}: text_config is {shown(c['text_config'])}; accepted is an object")
        ignored += IMAGE_TENSORS
        tied = {"tie_word_embeddings": c["tie_word_embeddings"]} if "tie_word_embeddings" in c else {}
        c = {"model_type": WRAPPERS[kind]} | c["text_config"] | tied
    known = {name: family for family in FAMILIES for name in family.model_types}
    known |= {alias: known[name] for alias, name in ALIASES.items()}
    family = _find(checkpoint, "model_type", c.get("model_type"), known)
    try:
        check_hf(c, family.layer_types)
        if c.get("sliding_window") == 0:  # as transformers saves a model without windows
            c = c | {"sliding_window": None}
        config = family.from_hf(c)
        check_decoder(config)
        labels = class_labels(checkpoint)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path}: its config.json has no {shown(error.args[0])}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    if isinstance(checkpoint, PackedCheckpoint):
        ignored += checkpoint.zero_biases
    rename = hf_renaming(checkpoint.tensors)
    patterns = hf_names(config) | family.hf_names(config)
    if labels:
        config, patterns = _classifier(config, len(labels)), patterns | {"head.weight": "score.weight"}
    names = {
        path: tuple(tuple(source.renamed(rename) for source in sources) for sources in options)
        for path, options in expand(patterns, config.num_layers).items()
    }
    head, embedding = rename("lm_head.weight"), rename("model.embed_tokens.weight")
    if config.tie_word_embeddings and head in checkpoint.tensors:
        if _same(checkpoint, head, embedding):
            ignored += (head,)
        else:
            config = replace(config, tie_word_embeddings=False)
    # Layers past the last predict further tokens (DeepSeek V3's MTP), which is a module of its own.
    further = c.get("num_nextn_predict_layers") or 0
    ignored += tuple(rename(f"model.layers.{config.num_layers + i}.*") for i in range(further))
    return ModelSpec(family, config, names, ignored)


def _classifier(config: DecoderConfig, num_labels: int) -> DecoderConfig:
    """The same decoder under a classification head, which transformers gives no bias, softcap or scale."""
    return replace(
        config, num_labels=num_labels, tie_word_embeddings=False, head_bias=False, logit_softcap=None, logit_scale=1.0
    )


def _find(checkpoint: Checkpoint, key: str, kind: Any, known: dict[str, Family]) -> Family:
    if not isinstance(kind, str) or kind not in known:
        supported = [*known, *(WRAPPERS if key == "model_type" else ())]
        hint = did_you_mean(str(kind)[:60], supported)
        raise CheckpointError(f"{checkpoint.path}: {key} is {shown(kind)}; supported are {', '.join(supported)}{hint}")
    return known[kind]


def _same(checkpoint: Checkpoint, a: str, b: str) -> bool:
    return checkpoint.tensors[a] == checkpoint.tensors[b] and np.array_equal(
        checkpoint.read(a).expand().view(np.uint8), checkpoint.read(b).expand().view(np.uint8)
    )
