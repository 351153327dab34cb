"""A model as a server uses it: what runs on it now, and the fingerprint of what decides its answers."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from jaxllm.chat.prompt import ChatModel
from jaxllm.config import EngineConfig, ModelConfig
from jaxllm.errors import ConfigError, EngineDeadError, reason
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import (
        AsyncLLM,  # imports JAX, which a command line that is wrong need not wait for
    )

OF_THE_MACHINE = frozenset({"download_dir", "compile_cache_dir", "engine_process", "max_num_waiting"})
"""Settings of the engine that say where and when it runs, not what it answers."""


class Running(Protocol):
    """A request under way."""

    def abort(self, error: APIError) -> None:
        """End it now; its client gets the error."""


def stopped() -> APIError:
    """What clients are told whose answers are not complete when the server ends."""
    return unavailable("the server stopped before the answer was complete", code="shutting_down")


class ServedModel(ChatModel):
    """A model that conversations are held with over HTTP.

    `running` are the requests under way; none begins once `draining` is true.

    Raises ConfigError when config.chat_template cannot be read; see ChatModel.
    """

    def __init__(self, config: ModelConfig, engine: AsyncLLM, metrics: RequestMetrics | None = None):
        """`metrics` are those to go on with, of the same model."""
        super().__init__(
            engine,
            chat_template=read_chat_template(config),
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            content_format=config.chat_template_content_format,
            variables=config.default_chat_template_kwargs,
        )
        self.engine: AsyncLLM
        self.config = config
        self.names = config.names
        """What requests may call it. The first is the one that metrics and notices use."""
        self.system_fingerprint = system_fingerprint(config, engine.info.max_model_len, self.chat_template)
        self.metrics = metrics or RequestMetrics(self.names[0], engine.info.max_model_len)
        self.running: set[Running] = set()
        self.draining = False

    def check_accepting(self, *, goes_on: bool = False) -> None:
        """Raises 503 when no request can start here. One that only `goes_on` may while the server is stopping."""
        if self.engine.is_dead:
            raise EngineDeadError(f"the engine has stopped; no request to {self.names[0]} can be answered")
        if self.draining and not goes_on:
            raise unavailable("the server is shutting down", code="shutting_down")


def read_chat_template(config: ModelConfig) -> str | None:
    """The text of config.chat_template, if one is set. Raises ConfigError when it cannot be read."""
    if config.chat_template is None:
        return None
    try:
        return config.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template is {str(config.chat_template)!r}, which cannot be read: {reason(error)}"
        ) from None


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
