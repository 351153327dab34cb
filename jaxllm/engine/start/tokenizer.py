"""The tokenizer that a config means."""

from __future__ import annotations

from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.start.generation import generation_eos
from jaxllm.text.tokenizer import Tokenizer, has_chat_template, load_tokenizer
from jaxllm.weights import source


def resolve_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """None where it is to be left out. Raises ModelNotFoundError, CheckpointError, ConfigError."""
    if config.skip_tokenizer_init:
        return None
    tokenizer = load_tokenizer(_tokenizer_files(config))
    tokenizer.eos_token_ids = list(dict.fromkeys([*tokenizer.eos_token_ids, *generation_eos(config)]))
    return tokenizer


def answers_chats(config: EngineConfig) -> bool:
    """Whether the model has a chat template, found out without loading anything. Raises as above."""
    return has_chat_template(_tokenizer_files(config))


def _tokenizer_files(config: EngineConfig) -> Path:
    name = config.tokenizer or config.model
    return source.resolve_tokenizer(name, revision=config.revision, download_dir=config.download_dir)
