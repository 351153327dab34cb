"""Start an engine the way its config asks: in a thread here, or in a process of its own."""

from __future__ import annotations

import threading

from jaxllm.config import EngineConfig
from jaxllm.engine.messages import EngineClient
from jaxllm.engine.start.tokenizer import resolve_tokenizer
from jaxllm.text.tokenizer import Tokenizer


def start_engine(
    config: EngineConfig, given_up: threading.Event | None = None
) -> tuple[EngineClient, Tokenizer | None]:
    """A running engine, and the tokenizer its front door needs; see `start_client`.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: it could not start.
    """
    client = start_client(config, given_up)
    try:
        return client, resolve_tokenizer(config)
    except BaseException:
        client.shutdown()
        raise


def start_client(config: EngineConfig, given_up: threading.Event | None = None) -> EngineClient:
    """A running engine; in a process of its own, `given_up` ends a start under way. Raises as `start_engine`."""
    if config.engine_process:
        from jaxllm.engine.front.process_client import ProcessClient

        return ProcessClient(config, given_up=given_up)
    from jaxllm.engine.front.thread_client import ThreadClient
    from jaxllm.engine.start.build import build_core

    core, info = build_core(config)
    return ThreadClient(core, info)
