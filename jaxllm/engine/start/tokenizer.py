"""The tokenizer that a config means."""

from __future__ import annotations

from jaxllm.config import EngineConfig
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.weights import source


def resolve_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """None where it is to be left out. Raises ModelNotFoundError, CheckpointError."""
    if config.skip_tokenizer_init:
        return None
    name = config.tokenizer or config.model
    return load_tokenizer(source.resolve_tokenizer(name, revision=config.revision, download_dir=config.download_dir))
