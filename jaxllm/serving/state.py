"""What every route of one server shares."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from jaxllm.config import ServeConfig
from jaxllm.engine.detokenizer import special_token_ids
from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxllm.serving.http.errors import APIError, unavailable
from jaxllm.serving.metrics import RequestMetrics
from jaxllm.serving.parsing.formats import OutputFormats, detect_formats
from jaxllm.serving.parsing.grammar import special_tokens
from jaxllm.serving.store.database import Database, sqlite_url
from jaxllm.serving.template_process import TemplateProcesses

if TYPE_CHECKING:
    from jaxllm.engine.front.async_llm import AsyncLLM
    from jaxllm.serving.generation import Generation
    from jaxllm.serving.pooling.run import PoolingBatch
    from jaxllm.text.tokenizer import Tokenizer

P = ParamSpec("P")
R = TypeVar("R")


class ServerState:
    """The engine, the settings, and the requests now running; `draining` turns true when the server is stopping."""

    def __init__(self, config: ServeConfig, engine: AsyncLLM):
        self.config = config
        self.engine = engine
        self.model_names = _comma_separated(config.served_model_name) or [config.model]
        self.api_keys = [key.encode() for key in _comma_separated(config.api_key)]
        self.chat_template = read_chat_template(config)
        detect_formats(None, config.tool_call_parser, config.reasoning_parser)  # refuses unknown names at the start
        self.templates = TemplateProcesses()
        self.created = int(time.time())
        self.metrics = RequestMetrics(self.model_names[0])
        self.database = Database(config.database_url or sqlite_url(config.data_dir))
        self.running: set[Generation | PoolingBatch] = set()
        self.draining = False
        self._workers = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="jaxllm-tokenize")

    def resolve_model(self, name: str | None) -> str:
        """The served name a request asked for, the first one by default. Raises 404 for any other."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            message = f"model {name!r} is not served here; this server has {served}"
            raise APIError(404, message, param="model", code="model_not_found")
        return name

    def check_accepting(self) -> None:
        """Raises 503 when no new generation can start."""
        if self.engine.is_dead:
            raise EngineDeadError("the engine has stopped")
        if self.draining:
            raise unavailable("the server is shutting down", code="shutting_down")

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError when the server was started without one."""
        if self.engine.tokenizer is None:
            raise InvalidRequestError(
                "this server runs without a tokenizer (skip_tokenizer_init): send token ids to /v1/completions"
            )
        return self.engine.tokenizer

    def formats(self, chat_template: str) -> OutputFormats:
        """How tool calls and reasoning look in answers to prompts of this template."""
        return _detect(chat_template, self.config.tool_call_parser, self.config.reasoning_parser)

    def token_text(self, token_id: int) -> str:
        """One token's text for log-probabilities; its number when there is no tokenizer."""
        tokenizer = self.engine.tokenizer
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The tokenizer's special tokens, by text, as grammars need them."""
        return special_tokens(self.tokenizer.backend)

    def marker_ids(self, formats: OutputFormats, *, with_tools: bool) -> list[int]:
        """Special tokens that a parser must see in the text."""
        if not with_tools:
            formats = replace(formats, tools=None)
        backend = self.tokenizer.backend
        special = special_token_ids(backend)
        ids = map(backend.token_to_id, formats.markers)
        return [token for token in ids if token in special]

    async def offload(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run tokenizer or template work on a thread, so that nobody's stream waits for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, lambda: function(*args, **kwargs))

    async def close(self) -> None:
        await self.templates.close()
        await self.database.close()
        self._workers.shutdown(wait=False, cancel_futures=True)


@lru_cache(maxsize=32)
def _detect(chat_template: str, tool_call_parser: str, reasoning_parser: str) -> OutputFormats:
    return detect_formats(chat_template, tool_call_parser, reasoning_parser)


def read_chat_template(config: ServeConfig) -> str | None:
    """The text of config.chat_template, if one is set. Raises ConfigError when it cannot be read."""
    if config.chat_template is None:
        return None
    try:
        return config.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template is {str(config.chat_template)!r}, which cannot be read: {error}") from None


def _comma_separated(value: str | None) -> list[str]:
    return [part for item in (value or "").split(",") if (part := item.strip())]
