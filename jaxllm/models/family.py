"""What the registry knows of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxllm.models.config import DecoderConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.gguf import GgufFile, Table
from jaxllm.models.hf_fields import LAYER_TYPES
from jaxllm.models.options import BuildOptions
from jaxllm.weights.fields import FieldKinds
from jaxllm.weights.names import NameMap, Pattern

Names = Callable[[DecoderConfig], dict[str, Pattern]]


def _nothing(config: DecoderConfig) -> dict[str, Pattern]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: how its config is read, and which of its tensors have names of their own.

    Attributes:
        models: what people call the models that it serves.
        architectures: `architectures` in config.json.
        model_types: `model_type` in config.json.
        wrappers: `model_type` of multimodal models whose `text_config` is of this family where it does not say its own.
        layer_types: what the entries of `layer_types` in config.json may be.
        fields: what keys of config.json must be, where that is not what `HF_FIELDS` has of them.
        from_hf: config.json's content -> the config. KeyError: a key is missing.
        gguf_architectures: `general.architecture` in a GGUF file; empty where llama.cpp does not have the family. It
            makes one architecture of several families: one of them reads the files that no other one `owns`.
        gguf: what is read of such a file for the keys of config.json; None where another family reads it.
        owns: whether a file is of this family, where others have the same architecture.
        module: what it builds of the config; another than Decoder where its decoder has another shape. Encoders are
            all built by `Encoder`.
        ignored: tensors that its checkpoints have besides those of the model that is served.
        hf_names, gguf_names: tensors that the standard tables (`models/hf.py`, `models/gguf_names.py`) name otherwise.
        mtp_names: tensors of the module that predicts further tokens, of its config and the number of the model's
            layers; None where none is supported.
    """

    name: str
    models: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    from_hf: Callable[[dict[str, Any]], DecoderConfig]
    layer_types: tuple[str, ...] = LAYER_TYPES
    fields: FieldKinds = field(default_factory=dict)
    gguf_architectures: tuple[str, ...] = ()
    gguf: Table | None = None
    owns: Callable[[GgufFile], bool] | None = None
    module: Callable[[DecoderConfig, BuildOptions], Decoder] = Decoder
    ignored: tuple[str, ...] = ()
    hf_names: Names = _nothing
    gguf_names: Names = _nothing
    mtp_names: Callable[[DecoderConfig, int], NameMap] | None = None
