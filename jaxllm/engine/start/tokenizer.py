"""The tokenizer that a config means."""

from __future__ import annotations

from jaxllm.config import EngineConfig
from jaxllm.engine.start.generation import generation_eos
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.weights import source


def resolve_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """None where it is to be left out. Raises ModelNotFoundError, CheckpointError, ConfigError."""
    if config.skip_tokenizer_init:
        return None
    name = config.tokenizer or config.model
    tokenizer = load_tokenizer(
        source.resolve_tokenizer(name, revision=config.revision, download_dir=config.download_dir)
    )
    tokenizer.eos_token_ids = list(dict.fromkeys([*tokenizer.eos_token_ids, *generation_eos(config)]))
    return tokenizer
