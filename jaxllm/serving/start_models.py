"""From the settings of a server to its models: one that is loaded at the start, or several that wait for requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from jaxllm.chat.parsing.formats import detect_formats
from jaxllm.config import ModelConfig, ServeConfig
from jaxllm.config.values import format_bytes
from jaxllm.engine.start.room import MemoryRoom
from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.serving.catalog import read_catalog
from jaxllm.serving.loadable import LoadableModel
from jaxllm.serving.pooling.pairs import score_method
from jaxllm.serving.registry import Registry
from jaxllm.serving.served_model import read_chat_template

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import AsyncLLM


class ServerModels:
    """The models of a server before, while and after it runs.

    Raises ConfigError for settings that are wrong whatever a model's files hold.
    """

    def __init__(self, config: ServeConfig):
        catalog = read_catalog(config)
        self._any_name = config.serve_any_model_name
        self._are_several = bool(catalog)
        self._max_loaded = config.most_loaded_models if catalog else None
        self._memory = config.model_memory
        self._min_seconds = config.model_min_seconds
        self._models = [
            LoadableModel(
                entry.of_model, _start_engine, preload=entry.preload, pinned=entry.pinned, hidden=entry.hidden,
                ttl=entry.ttl, budget=config.model_memory,
            )
            for entry in catalog
        ]  # fmt: skip
        if not catalog:
            only = config.of_model.model_copy(update={"engine_process": config.engine_process is not False})
            self._models.append(LoadableModel(only, _start_only_engine, preload=True, pinned=True))
        for model in self._models:
            with self._naming(model):
                read_chat_template(model.config)
                detect_formats(None, model.config.tool_call_parser, model.config.reasoning_parser)

    @property
    def names(self) -> list[str]:
        """What the server is called by, in listings of servers."""
        return [name for model in self._models if not model.hidden for name in model.names]

    def start(self) -> Registry:
        """Load what is loaded at the start, one after the other. Raises what keeps one from loading."""
        for model in self._models:
            if model.awaited:
                with self._naming(model):
                    model.load(partial(self._check_memory, model))
        return Registry(
            self._models,
            any_name=self._any_name,
            max_loaded=self._max_loaded,
            memory=self._memory,
            min_seconds=self._min_seconds,
        )

    def shutdown(self) -> None:
        """Stop the engines of all that is loaded, when the server has ended."""
        for model in self._models:
            if model.served is not None:
                model.served.engine.shutdown()

    def _check_memory(self, model: LoadableModel, nbytes: int | None) -> None:
        """Raises ConfigError where a model does not fit beside those that were loaded before it at the start."""
        others = sum(other.planned_bytes or 0 for other in self._models if other.served is not None)
        if self._memory is not None and others + (nbytes or 0) > self._memory:
            raise ConfigError(
                f"it takes {format_bytes(nbytes or 0)} of memory, and those preloaded before it "
                f"{format_bytes(others)}; model_memory is {format_bytes(self._memory)}: raise it, or preload fewer"
            )

    @contextmanager
    def _naming(self, model: LoadableModel) -> Iterator[None]:
        """Where there are several models an error says which of them it is about."""
        try:
            yield
        except JaxLLMError as error:
            if not self._are_several:
                raise
            raise ConfigError(f"model {model.name!r}: {error}") from None


def _start_only_engine(config: ModelConfig, given_up: threading.Event, room: MemoryRoom) -> AsyncLLM:
    """Without a question for room, for which it would be planned twice: nobody else has any."""
    return _start_engine(config, given_up, None)


def _start_engine(config: ModelConfig, given_up: threading.Event, room: MemoryRoom | None) -> AsyncLLM:
    from jaxllm.engine.doors.async_llm import AsyncLLM  # takes a second, in which probes are answered

    engine = AsyncLLM(config, given_up=given_up, room=room)
    try:
        score_method(config, engine.info.tasks)
    except BaseException:
        engine.shutdown()
        raise
    return engine
