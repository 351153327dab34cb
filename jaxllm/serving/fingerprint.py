"""A name for what decides an answer besides its request: the model, the engine's settings and this version."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any

from jaxllm.config import EngineConfig, ModelConfig

OF_THE_MACHINE = frozenset({"download_dir", "compile_cache_dir", "engine_process", "max_num_waiting"})
"""Settings of the engine that say where and when it runs, not what it answers."""


def engine_settings(config: EngineConfig) -> dict[str, Any]:
    """Those that may change an answer, as JSON has them."""
    fields = set(EngineConfig.model_fields) - OF_THE_MACHINE
    return config.model_dump(mode="json", include=fields)


def system_fingerprint(config: ModelConfig, max_model_len: int, chat_template: str | None) -> str:
    """The same as long as all of these are, over restarts too; `max_model_len` is what the engine settled on."""
    template = [chat_template, config.default_chat_template_kwargs, config.chat_template_content_format]
    described = [version("jaxllm"), engine_settings(config), max_model_len, template]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return f"fp_{digest[:12]}"
