"""The model families, one row each, and how a checkpoint finds its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxllm.errors import CheckpointError
from jaxllm.models.checks import check_decoder, check_direction
from jaxllm.models.config import DecoderConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.encoder import Encoder
from jaxllm.models.families import (
    baichuan,
    bert,
    bloom,
    cohere,
    deepseek,
    ernie4_5,
    exaone4,
    falcon_h1,
    gemma,
    gemma4,
    glm,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granite4,
    hunyuan,
    internlm3,
    lfm2,
    llama,
    llama4,
    mamba2,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    modernbert,
    mpt,
    nemotron_h,
    nomic_bert,
    olmo2,
    olmo3,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen_delta,
    qwen_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from jaxllm.models.family import Family
from jaxllm.models.gguf import GGUF_NAMES, gguf_further_layers
from jaxllm.models.hf import hf_linear, hf_names, hf_renaming
from jaxllm.models.hf_fields import check_hf
from jaxllm.models.options import BuildOptions
from jaxllm.models.sentence_files import read_sentence_files
from jaxllm.models.tasks import GGUF_HEAD, class_labels
from jaxllm.weights.checkpoint import Checkpoint, MergedCheckpoint
from jaxllm.weights.fields import shown
from jaxllm.weights.names import NameMap, Pattern, expand, renamed
from jaxllm.weights.packings import PackedCheckpoint
from jaxllm.weights.saved import SavedCheckpoint
from jaxllm.wording import did_you_mean

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    llama4.FAMILY,
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
    qwen_delta.NEXT,
    qwen_delta.DENSE,
    qwen_delta.MOE,
    stablelm.FAMILY,
    gemma.GEMMA1,
    gemma.GEMMA2,
    gemma.GEMMA3,
    gemma4.GEMMA4,
    gemma4.UNIFIED,
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
    granite4.FAMILY,
    mamba2.FAMILY,
    falcon_h1.FAMILY,
    nemotron_h.FAMILY,
    ernie4_5.DENSE,
    ernie4_5.MOE,
    hunyuan.FAMILY,
    hunyuan.MOE,
    internlm3.FAMILY,
    baichuan.FAMILY,
    bloom.FAMILY,
    mpt.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    gpt_oss.FAMILY,
    glm4_moe.MOE,
    glm4_moe.LITE,
    mistral4.FAMILY,
    minimax_m2.FAMILY,
    bert.BERT,
    bert.ROBERTA,
    modernbert.FAMILY,
    nomic_bert.FAMILY,
)

WRAPPERS = {
    "mistral3": "mistral", "gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text", "kimi_k25": "deepseek_v3", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""Multimodal `model_type`s whose `text_config` is served, and the type of one that does not say."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""`model_type`s of models that are another family's under a name of their own."""

IGNORED_TENSORS: tuple[str, ...] = (
    "*rotary_emb.inv_freq", "rope_freqs.weight", "rope_factors_*.weight", "*.k_scale", "*.v_scale", "model.mtp_*",
    "*.masked_bias", "h.*.attn.bias", "transformer.h.*.attn.bias", "gpt_neox.layers.*.attention.bias", "mtp.*",
)  # fmt: skip
"""Tensors that say nothing the config does not, or something of quantized keys and values: those are scaled by row.

Those of ERNIE's, Nemotron's and Qwen's modules that predict further tokens are among them, and the masks of GPT-2
and GPT-NeoX.
"""

IMAGE_TENSORS = (
    "*vision_tower.*", "*multi_modal_projector.*", "*mm_projector.*", "*audio_tower.*", "*embed_vision.*",
    "*embed_audio.*", "*vision_embedder.*", "vision_model.*", "*.visual.*",
)  # fmt: skip
"""What a wrapper has besides its language model, for images and sounds."""


@dataclass(frozen=True)
class ModelSpec:
    """A checkpoint's model: its family, its parsed config, and where its tensors are."""

    family: Family
    config: DecoderConfig
    names: NameMap
    ignored: tuple[str, ...]

    def build(self, options: BuildOptions) -> Decoder | Encoder:
        """The module, with abstract weights."""
        return (self.family.module if self.config.encoder is None else Encoder)(self.config, options)

    @property
    def shape(self) -> Any:
        """All that it builds depends on."""
        return self.config


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
        config = _classifier(config, len(labels))
        patterns |= {"head.weight": GGUF_HEAD} if config.encoder is None else {}
    further = tuple(f"blk.{config.num_layers + i}.*" for i in range(gguf_further_layers(checkpoint)))
    ignored = (*IGNORED_TENSORS, *further, *_unused("blk.{}.attn_{}*", config))
    return ModelSpec(family, config, expand(patterns, config.num_layers), ignored)


def _unused(pattern: str, config: DecoderConfig) -> list[str]:
    """Keys and values of layers that attend to those of others: files have some all the same."""
    sharing = [index for index, layer in enumerate(config.layers) if layer.shares_kv_of is not None]
    return [pattern.format(index, part) for index in sharing for part in ("k", "v")]


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
        check_hf(c, family.layer_types, family.fields)
        if c.get("sliding_window") == 0:  # as transformers saves a model without windows
            c = c | {"sliding_window": None}
        config = family.from_hf(c)
        check_direction(c, config)
        check_decoder(config)
        labels = class_labels(checkpoint)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path}: its config.json has no {shown(error.args[0])}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    ignored += family.ignored
    if isinstance(checkpoint, PackedCheckpoint | MergedCheckpoint):
        ignored += checkpoint.zero_biases
    rename = hf_renaming(checkpoint.tensors)
    patterns = hf_names(config) | family.hf_names(config)
    if labels:
        config = _classifier(config, len(labels))
        score = {"head.weight": "score.weight"}
        patterns = (
            patterns | score if config.encoder is None else {"classifier.output.weight": "score.weight"} | patterns
        )
    config, more = with_projections(config, checkpoint.path)
    patterns |= more
    names = renamed(expand(patterns, config.num_layers), rename)
    head = rename("lm_head.weight")
    if config.tie_word_embeddings and head in checkpoint.tensors:
        embeddings = [source.name for (source,) in names["embed.weight"] if source.name in checkpoint.tensors]
        if embeddings and _same(checkpoint, head, embeddings[0]):
            ignored += (head,)
        else:
            config = replace(config, tie_word_embeddings=False)
    # Layers past the last predict further tokens (DeepSeek V3's MTP), which is a module of its own.
    further = c.get("num_nextn_predict_layers") or 0
    ignored += tuple(rename(f"model.layers.{config.num_layers + i}.*") for i in range(further))
    ignored += tuple(map(rename, _unused("model.layers.{}.self_attn.{}_*", config)))
    return ModelSpec(family, config, names, ignored)


def adapter_names(spec: ModelSpec) -> dict[str, NameMap]:
    """By the format of an adapter, where a checkpoint of that format has the model's parameters."""
    config, family = spec.config, spec.family
    patterns = {
        "peft": hf_names(config) | family.hf_names(config),
        "gguf": GGUF_NAMES | family.gguf_names(config),
    }
    return {format: expand(found, config.num_layers) for format, found in patterns.items()}


def _classifier(config: DecoderConfig, num_labels: int) -> DecoderConfig:
    """The same decoder under a classification head, which transformers gives no bias, softcap or scale."""
    return replace(
        config, num_labels=num_labels, tie_word_embeddings=False, head_bias=False, logit_softcap=None, logit_scale=1.0
    )


def with_projections(config: DecoderConfig, path: Path) -> tuple[DecoderConfig, dict[str, Pattern]]:
    """The same model with the Dense modules that sentence-transformers' files put behind it, and their tensors.

    Raises:
        CheckpointError: it is no encoder.
    """
    files = read_sentence_files(path)
    if not files.projections:
        return config, {}
    if config.encoder is None or files.pooling is None:
        raise CheckpointError(f"{path / 'modules.json'}: has Dense modules, which are supported behind encoders only")
    projections = tuple(projection for _, projection in files.projections)
    encoder = replace(config.encoder, pooling=files.pooling, projections=projections)
    names: dict[str, Pattern] = {}
    for index, (folder, _) in enumerate(files.projections):
        names |= hf_linear(f"projections.products.{index}", f"{folder}.linear")
    return replace(config, encoder=encoder), names


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
