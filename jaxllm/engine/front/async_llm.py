"""The asyncio front door: what the server stands on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from jaxllm.config import EngineConfig, make_config
from jaxllm.engine.front.frontend import (
    Collector,
    Prompt,
    check_pooling,
    check_request,
    name_tokens,
    pooling_request,
    prompt_ids,
    split_request,
)
from jaxllm.engine.front.messages import EngineClient, EngineInfo, EngineRequest, EngineStats, TokenDelta
from jaxllm.engine.start.launch import start_engine
from jaxllm.errors import EngineDeadError, JaxLLMError, QueueFullError
from jaxllm.requests.outputs import PooledOutput, RequestOutput
from jaxllm.requests.pooling import PoolingParams
from jaxllm.requests.sampling import SamplingParams
from jaxllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
RESTART_PAUSES = (0.0, 1.0, 5.0, 30.0, 60.0)
"""Seconds to wait before each attempt to start an engine that died."""


class Sink(NamedTuple):
    """Where the deltas of one sequence go: a queue of its stream, in the loop that reads it."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[tuple[int, TokenDelta | Exception]]
    choice: int
    family: str
    """The request_id its caller gave."""

    def put(self, item: TokenDelta | Exception) -> None:
        self.queue.put_nowait((self.choice, item))


class AsyncLLM:
    """An engine for asyncio programs. Several event loops may use it.

    An engine that runs in a process of its own and dies is started again: `is_dead` until then, and streams that were
    open end with EngineDeadError.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: the engine could not start.
    """

    def __init__(self, config: EngineConfig | None = None, **fields: Any):
        self.config: EngineConfig = config if config is not None else make_config(EngineConfig, **fields)
        client, tokenizer = start_engine(self.config)
        self._client: EngineClient = client
        self.info: EngineInfo = client.info
        self.tokenizer: Tokenizer | None = tokenizer
        self.is_dead = False
        self._lock = threading.Lock()
        self._sinks: dict[str, Sink] = {}
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, name="outputs", daemon=True)
        self._reader.start()

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises InvalidRequestError where the engine could not honour the request."""
        check_request(self.info, self.tokenizer, prompt_token_ids, params)

    async def stream(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[tuple[int, TokenDelta], None]:
        """Yield (choice, delta) as they come. Closing the iterator aborts what is not finished.

        Raises:
            InvalidRequestError, QueueFullError, EngineDeadError.
        """
        self.check(prompt_token_ids, params)
        request_id = request_id or uuid.uuid4().hex
        requests = split_request(prompt_token_ids, params, request_id, priority, cache_salt)
        async with contextlib.aclosing(self._run(requests, request_id)) as deltas:
            async for choice, delta in deltas:
                yield choice, delta

    async def pool(
        self,
        prompt_token_ids: list[int],
        pooling: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> PooledOutput:
        """Read values off the hidden states of one prompt. Cancelling aborts it.

        Raises:
            InvalidRequestError, QueueFullError, EngineDeadError; JaxLLMError when the request failed.
        """
        pooling = pooling or PoolingParams()
        check_pooling(self.info, prompt_token_ids, pooling)
        request = pooling_request(prompt_token_ids, pooling, request_id, priority, cache_salt)
        async with contextlib.aclosing(self._run([request], request.request_id)) as deltas:
            async for _, delta in deltas:
                if delta.pooled is None:
                    raise JaxLLMError(f"request {request.request_id} failed: {delta.error or delta.finish_reason}")
                return PooledOutput.from_bytes(delta.pooled, delta.num_cached_tokens)
        raise JaxLLMError(f"request {request.request_id} ended without a result")

    async def _run(self, requests: list[EngineRequest], family: str) -> AsyncGenerator[tuple[int, TokenDelta], None]:
        """Yield (index of the request, delta) until all of `requests` have finished."""
        queue: asyncio.Queue[tuple[int, TokenDelta | Exception]] = asyncio.Queue()
        with self._lock:
            limit = self.info.max_num_seqs + self.config.max_num_waiting
            if len(self._sinks) + len(requests) > limit:
                raise QueueFullError(
                    f"{len(self._sinks)} requests are running or waiting; at most {limit} are accepted. Retry later"
                )
            for choice, request in enumerate(requests):
                self._sinks[request.request_id] = Sink(asyncio.get_running_loop(), queue, choice, family)
        unfinished = {request.request_id for request in requests}
        try:
            for request in requests:
                self._client.add(request)
            while unfinished:
                choice, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                name_tokens(item, self.tokenizer)
                if item.finish_reason is not None:
                    unfinished.discard(item.request_id)
                yield choice, item
        finally:
            with self._lock:
                for request in requests:
                    self._sinks.pop(request.request_id, None)
            if unfinished:
                self._client.abort(list(unfinished))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the same RequestOutput again and again as it grows; the last one is finished."""
        params = sampling_params or SamplingParams(**self.info.default_sampling.fields())
        text, ids = prompt_ids(prompt, self.tokenizer)
        request_id = request_id or uuid.uuid4().hex
        collector = Collector(request_id, text, ids, params)
        stream = self.stream(ids, params, request_id=request_id, priority=priority, cache_salt=cache_salt)
        async with contextlib.aclosing(stream) as deltas:
            async for choice, delta in deltas:
                collector.add(choice, delta)
                yield collector.output

    async def abort(self, request_id: str) -> None:
        """End a request, all its choices: its stream gets a last delta with finish_reason "abort"."""
        with self._lock:
            sinks = {i: s for i, s in self._sinks.items() if s.family == request_id}
        self._client.abort(list(sinks))
        for child, sink in sinks.items():
            sink.put(TokenDelta(request_id=child, finish_reason="abort"))

    def stats(self) -> EngineStats:
        """The engine's newest statistics."""
        return self._client.stats()

    def shutdown(self) -> None:
        """Stop the engine; streams still open end with EngineDeadError. Idempotent."""
        self._closing.set()
        self._client.shutdown()
        if self._reader is not threading.current_thread():
            self._reader.join(POLL_SECONDS * 2)

    def _read(self) -> None:
        """The one reader of the engine's outputs: hands each delta to the loop that waits for it."""
        while True:
            try:
                deltas = self._client.outputs(timeout=POLL_SECONDS)
            except EngineDeadError as error:
                self._note_death(error)
                if not self._start_again():
                    return
                continue
            by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Sink, TokenDelta | Exception]]] = defaultdict(list)
            with self._lock:
                for delta in deltas:
                    sink = self._sinks.get(delta.request_id)
                    if sink is not None:  # else its stream was closed
                        by_loop[sink.loop].append((sink, delta))
            for loop, items in by_loop.items():
                _deliver(loop, items)

    def _note_death(self, error: EngineDeadError) -> None:
        self.is_dead = True
        with self._lock:
            sinks = list(self._sinks.values())
        for sink in sinks:
            _deliver(sink.loop, [(sink, error)])

    def _start_again(self) -> bool:
        """A new engine process in place of one that died; False where there is none to be had."""
        if not self.config.engine_process:
            return False
        for pause in RESTART_PAUSES:
            if self._closing.wait(pause):
                return False
            logger.warning("the engine died; starting it again")
            try:
                client, _ = start_engine(self.config)
            except JaxLLMError as error:
                logger.error("the engine did not start: %s", error)
                continue
            self._client = client
            if self._closing.is_set():  # while it was starting
                client.shutdown()
                return False
            self.is_dead = False
            return True
        logger.error("the engine did not start in %d attempts; giving up", len(RESTART_PAUSES))
        return False


def _deliver(loop: asyncio.AbstractEventLoop, items: list[tuple[Sink, TokenDelta | Exception]]) -> None:
    """Fill the sinks in their own loop, in one hop."""

    def deliver() -> None:
        for sink, item in items:
            sink.put(item)

    with contextlib.suppress(RuntimeError):  # the loop was closed, and its streams with it
        loop.call_soon_threadsafe(deliver)
