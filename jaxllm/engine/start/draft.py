"""The draft model or module of an engine's model: found, planned beside it, and loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.engine.features.drafts.rules import DraftRule, ModuleDrafts
from jaxllm.engine.start.options import build_options, choose_kinds
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.errors import CheckpointError, ConfigError, ModelNotFoundError
from jaxllm.models.caches import CacheLayout
from jaxllm.models.config import DecoderConfig, check_parallel
from jaxllm.models.decoder import Decoder
from jaxllm.models.options import BuildOptions
from jaxllm.models.predictor import Eagle3Spec, eagle3_spec, mtp_spec, names_a_head
from jaxllm.models.registry import ModelSpec, abstract_model, model_spec
from jaxllm.progress import Progress
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.weights import source
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import ParamSpec, dummy_parameters, load_parameters

_OF_THE_MODEL_ALONE: dict[str, Any] = {
    "tokenizer": None, "hf_overrides": None, "quantization": None, "isq_map": None, "imatrix": None,
    "generation_config": "vllm", "override_generation_config": None, "speculative_config": None, "enable_lora": False,
}  # fmt: skip
"""Settings that say nothing about a draft model; the others (dtype, isq, kernels, devices) hold for it as well."""


@dataclass(frozen=True)
class DraftBlueprint:
    """The facts that building a draft model needs."""

    config: EngineConfig
    path: Path
    spec: ModelSpec
    model: Decoder
    params: list[ParamSpec]


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """The settings that a draft model is opened with; None where there is none."""
    asked = config.speculative_config
    if asked is None or asked.model is None:
        return None
    load_format = "dummy" if config.load_format == "dummy" else "auto"
    named = {"model": asked.model, "revision": asked.revision, "load_format": load_format}
    return config.model_copy(update=_OF_THE_MODEL_ALONE | named)


def draft_blueprint(
    config: EngineConfig,
    platform: Platform,
    model: DecoderConfig,
    layout: CacheLayout,
    max_num_seqs: int,
    pages_per_seq: int,
) -> DraftBlueprint | None:
    """Plan the draft model, or the EAGLE-3 head, that `config` names; None where it names none.

    `layout` is how the caches of the `model` that it serves lie on the devices, which its own lie beside.

    Raises:
        ConfigError: it is no model that can draft, or cannot be run as the other is.
        ModelNotFoundError, CheckpointError: as of any model.
    """
    own = draft_config(config)
    if own is None:
        return None
    try:
        path = source.resolve_model(own.model, revision=own.revision, download_dir=own.download_dir)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"speculative_config.model: {error}") from None
    checkpoint = open_model(own, path)
    try:
        if names_a_head(checkpoint.config) and not _is_head(config):
            raise ConfigError(
                f"speculative_config.model is {own.model!r}, an EAGLE-3 head; set speculative_config.method to 'eagle3'"
            )
        spec = _eagle3(config, checkpoint, model) if _is_head(config) else model_spec(checkpoint)
        if spec.config.encoder is not None or spec.config.has_states:
            kept = "is an encoder" if spec.config.encoder is not None else "keeps a state of each sequence"
            raise ConfigError(
                f"speculative_config.model is {own.model!r}, which {kept}; a draft model is a decoder with attention"
            )
        check_parallel(spec.config, own.tensor_parallel_size, own.enable_expert_parallel)
        options = build_options(own, spec.config, platform, max_num_seqs, pages_per_seq)
        kernels = options.kernels
        if (kernels.page_layout, kernels.page_dtype(options.dtype)) != (layout.page_layout, layout.page_dtype):
            raise ConfigError(
                f"speculative_config.model is {own.model!r}, whose attention runs with other kernels ({kernels.name}) "
                "and pages than the model's; set attention_backend to one that both run with"
            )
        drafting, params = abstract_model(spec, options, choose_kinds(own, checkpoint, spec, options, platform))
    finally:
        checkpoint.close()
    assert isinstance(drafting, Decoder)
    return DraftBlueprint(own, path, spec, drafting, params)


def _is_head(config: EngineConfig) -> bool:
    return config.speculative_config is not None and config.speculative_config.source == "eagle3"


def _eagle3(config: EngineConfig, checkpoint: Checkpoint, model: DecoderConfig) -> Eagle3Spec:
    try:
        return eagle3_spec(checkpoint, model)
    except CheckpointError as error:
        raise ConfigError(f"speculative_config.method is 'eagle3': {error}") from None


def mtp_blueprint(
    config: EngineConfig, platform: Platform, checkpoint: Checkpoint, spec: ModelSpec, options: BuildOptions
) -> DraftBlueprint | None:
    """Plan the module of the model's own checkpoint; None where `config` does not ask for it.

    Raises:
        ConfigError: the checkpoint has none that is supported.
    """
    asked = config.speculative_config
    if asked is None or asked.source != "mtp":
        return None
    try:
        own = mtp_spec(checkpoint, spec)
    except CheckpointError as error:
        raise ConfigError(f"speculative_config.method is 'mtp': {error}") from None
    model, params = abstract_model(own, options, choose_kinds(config, checkpoint, own, options, platform))
    assert isinstance(model, Decoder)
    return DraftBlueprint(config, checkpoint.path, own, model, params)


def with_states(drafts: DraftRule | None, draft: DraftBlueprint | None) -> DraftRule | None:
    """Drafts that know which of the model's states the module reads that makes them, if one does."""
    if draft is None or not isinstance(drafts, ModuleDrafts):
        return drafts
    layers = draft.spec.eagle.layers if isinstance(draft.spec, Eagle3Spec) else ()
    return replace(drafts, layers=layers, size=draft.spec.config.hidden_size)


def load_draft(draft: DraftBlueprint, mesh: Mesh, on_progress: Progress | None) -> tuple[Any, ...]:
    """The draft model's parameters on the devices."""
    if draft.config.load_format == "dummy":
        return dummy_parameters(draft.params, mesh, draft.config.seed)
    checkpoint = open_model(draft.config, draft.path)
    try:
        names, ignored = draft.spec.names, draft.spec.ignored
        return load_parameters(checkpoint, draft.params, names, mesh, ignored=ignored, on_progress=on_progress)
    finally:
        checkpoint.close()


def check_draft_vocabulary(config: EngineConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where a draft model's tokens mean other texts than those of the model that it serves."""
    own = draft_config(config)
    if own is None or _is_head(config):  # a head has no tokenizer
        return
    files = source.resolve_tokenizer(own.model, revision=own.revision, download_dir=own.download_dir)
    expected = {token: text for text, token in tokenizer.backend.get_vocab().items()}
    for text, token in sorted(load_tokenizer(files).backend.get_vocab().items(), key=lambda item: item[1]):
        if expected.get(token, text) != text:
            raise ConfigError(
                f"speculative_config.model is {own.model!r}, whose vocabulary is another: its token {token} is "
                f"{text!r}, and {config.model}'s is {expected[token]!r}; a draft model must have the same"
            )
