"""The asyncio front door: what the server stands on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxllm.config import EngineConfig, make_config
from jaxllm.engine import messages
from jaxllm.engine.doors import sequences
from jaxllm.engine.doors.beams import BeamSearchParams, BeamStream
from jaxllm.engine.doors.controls import Controls
from jaxllm.engine.doors.eyes import Eyes
from jaxllm.engine.doors.replicas import start_client, start_engine
from jaxllm.engine.doors.sequences import Collector, Prompt, check_pooling, check_request, pooled_output, prompt_ids
from jaxllm.engine.doors.share import Keeper
from jaxllm.engine.doors.streams import Gain, Stream, Streams
from jaxllm.errors import CheckpointError, ConfigError, EngineDeadError
from jaxllm.requests.logits_processors import LogitsProcessor, read_processors
from jaxllm.requests.outputs import PooledOutput, PoolingParams, RequestOutput
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.steering import AdapterUse, LoRA, adapter_uses
from jaxllm.sharding.clusters import settled
from jaxllm.text.tokenizer import Tokenizer

POOLED_AHEAD = 2
"""Prompts of one call to `pool` that the engine holds at once, as a multiple of what it runs at once."""


class AsyncLLM(Controls):
    """An engine for asyncio programs. Several event loops may use it.

    An engine that runs in a process of its own and dies is started again, with the same sizes: `is_dead` until then,
    and streams that were open end with EngineDeadError. One that runs in a thread stays dead until `restart`.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: the engine could not start.
    """

    _waits_while_paused = True

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        given_up: threading.Event | None = None,
        room: messages.MemoryRoom | None = None,
        logits_processors: Sequence[Callable[..., Any]] = (),
        **fields: Any,
    ):
        """`given_up`, once it is set, ends the start of an engine in a process of its own; by `room` it asks first.

        `logits_processors` are functions that requests may use; see `LLM`.
        """
        self.config: EngineConfig = config if config is not None else make_config(EngineConfig, **fields)
        self._sleep_level = 0
        sleeps = self.config.engine_process and os.name == "posix" and not self.config.multi_process
        self._keeper = Keeper() if sleeps and not settled(self.config).in_group else None
        self._streams = open_streams(self.config, given_up, room, self._keeper, read_processors(logits_processors))
        self._streams.limit = self.info.max_num_seqs + self.config.max_num_waiting
        self.tokenizer: Tokenizer | None = self._streams.tokenizer
        weakref.finalize(self, self._streams.shutdown).atexit = False  # its threads see to a program's end

    @classmethod
    def sharing(cls, config: EngineConfig, streams: Streams) -> AsyncLLM:
        """Another door to an engine that is somebody else's to shut down."""
        shared = cls.__new__(cls)
        shared.config, shared._streams, shared.tokenizer = config, streams, streams.tokenizer
        shared._keeper, shared._sleep_level = None, 0
        return shared

    @property
    def info(self) -> messages.EngineInfo:
        """The facts that the engine settled on at its last start."""
        return self._streams.client.info

    @property
    def eyes(self) -> Eyes:
        """What prepares images for its model. Raises InvalidRequestError: it sees none."""
        return self._streams.eyes

    @property
    def is_dead(self) -> bool:
        """There is no engine to run requests now."""
        return self._streams.is_dead

    @property
    def death(self) -> str | None:
        """Why the engine died, if it has."""
        return self._streams.death

    @property
    def step_age(self) -> float | None:
        """Seconds since the engine's last step, or since it has requests to run; None where it has none."""
        return self._streams.step_age

    @property
    def is_asleep(self) -> bool:
        """It was told to sleep, and not to wake up yet."""
        return self._streams.is_asleep

    @property
    def sleep_level(self) -> int:
        """At which level it is asleep; 0 while it is awake."""
        return self._sleep_level if self.is_asleep else 0

    @property
    def can_sleep(self) -> bool:
        """Its engine has a process of its own, which inherits open files: not on Windows."""
        return self._keeper is not None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the host's memory that it holds while it is asleep."""
        return 0 if self._keeper is None else self._keeper.nbytes

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises InvalidRequestError where the engine could not honour the request."""
        check_request(self.info, self.tokenizer, prompt_token_ids, params)

    def end_thinking(self, sequences: list[str]) -> None:
        """End the reasoning of sequences that have a budget for it, by the names in Stream.names; waits until the
        engine knows. Raises EngineDeadError."""
        self._streams.client.order(messages.EndThinking(sequences))

    def run(
        self,
        requests: Sequence[messages.EngineRequest],
        *,
        searches: Sequence[BeamSearchParams] = (),
        at_once: int | None = None,
    ) -> Stream:
        """The merged deltas of many requests, which `check` has let pass, for the running event loop.

        Args:
            searches: what to search for, one a request; without them the requests are sampled.
            at_once: how many sequences the engine may hold at a time; by default all.
        """
        loop = asyncio.get_running_loop()
        if searches:
            return BeamStream(self._streams, requests, searches, self.info.eos_token_ids, loop=loop)
        return Stream(self._streams, requests, loop=loop, at_once=at_once)

    async def stream(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapters: tuple[AdapterUse, ...] = (),
        images: messages.PlacedImages | None = None,
    ) -> AsyncGenerator[Gain, None]:
        """Yield (choice, delta) as they come. Closing the iterator aborts what is not finished.

        Raises:
            InvalidRequestError: the request cannot be honoured.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine has stopped.
        """
        self.check(prompt_token_ids, params)
        request = messages.EngineRequest(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            priority=priority,
            cache_salt=cache_salt,
            adapters=adapters,
            images=images,
        )
        with self.run([request]) as stream:
            while stream.num_unfinished:
                for event in await stream.next():
                    yield event

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRA | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the same RequestOutput again and again as it grows; the last one is finished."""
        params = sampling_params or SamplingParams(**self.info.default_sampling.fields())
        text, ids = prompt_ids(prompt, self.tokenizer)
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt}
        if seen := await asyncio.to_thread(sequences.prompt_images, prompt, self):
            ids, options["images"] = self.eyes.place(ids, seen)
        request_id = request_id or uuid.uuid4().hex
        collector = Collector(request_id, text, ids, params, self.tokenizer)
        stream = self.stream(ids, params, request_id=request_id, adapters=adapter_uses(lora_request), **options)
        async with contextlib.aclosing(stream) as deltas:
            async for choice, delta in deltas:
                collector.add(choice, delta)
                yield collector.output

    async def pool(
        self,
        prompts: Sequence[list[int]],
        pooling: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        group: str = "",
        adapters: tuple[AdapterUse, ...] = (),
        second_texts: Sequence[int] = (),
    ) -> list[PooledOutput]:
        """Read values off the hidden states of each prompt; in their order. Cancelling aborts what is not finished.

        `group` is what they belong to: see FairQueue. `second_texts` says of each prompt that is a pair of texts where
        the second begins, for encoders that tell them apart.

        Raises:
            InvalidRequestError: a prompt, or what is asked of it, cannot be honoured.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine has stopped.
            JaxLLMError: a prompt failed.
        """
        asked = pooling or PoolingParams()
        await asyncio.to_thread(check_pooling, self.info, prompts, asked, second_texts)
        name = request_id or uuid.uuid4().hex
        requests = [
            messages.EngineRequest(
                request_id=name,
                prompt_token_ids=prompt,
                pooling=asked,
                priority=priority,
                cache_salt=cache_salt,
                group=group,
                adapters=adapters,
                second_text=second,
            )
            for prompt, second in zip(prompts, second_texts or [0] * len(prompts), strict=True)
        ]
        found: dict[int, PooledOutput] = {}
        with self.run(requests, at_once=POOLED_AHEAD * self.info.max_num_seqs) as stream:
            async for gains in stream.arrivals():
                found |= {index: pooled_output(delta) for index, delta in gains}
        return [found[index] for index in range(len(prompts))]

    async def abort(self, request_id: str) -> None:
        """End a request, all its choices: its stream gets a last delta with finish_reason "abort"."""
        self._streams.abort(request_id)

    def stats(self) -> messages.EngineStats:
        """The engine's newest statistics."""
        return self._streams.client.stats()

    @property
    def processes(self) -> dict[str, messages.LookAt]:
        """Functions that look at the processes of its engines, see EngineClient; none while there is no engine."""
        return {} if self.is_dead or self.is_asleep else self._streams.client.processes

    def sleep(self, level: int = 1) -> None:
        """Give the devices back until `wake_up`; blocks until they are free. Streams still open end.

        At level 1 the weights stay in the host's memory, at level 2 they are read from the model's files again.

        Raises:
            ConfigError: the engine runs in a thread of this process, which does not give its devices back.
            EngineDeadError: it ended before its weights were kept. It is asleep then as at level 2.
        """
        if self._keeper is None:
            raise ConfigError("only an engine in a process of its own (engine_process), and in one alone, can sleep")
        if self.is_asleep:
            return
        self._keeper.clear()
        self._sleep_level = level
        try:
            self._streams.sleep(keep=level == 1)
        except EngineDeadError:
            self._sleep_level = 2
            self._keeper.clear()
            raise

    def wake_up(self, given_up: threading.Event | None = None, room: messages.MemoryRoom | None = None) -> None:
        """Start an engine that is asleep again, with the same sizes; blocks until it can run requests.

        The arguments are those of the first start. Raises what keeps it from starting; it is asleep still.
        """
        if not self.is_asleep:
            return
        kept, version = self.kept_bytes, self.weight_version
        try:
            self._streams.wake_up(given_up or threading.Event(), room)
            if kept and version != messages.INITIAL_VERSION:
                self.name_weights(version)
        except BaseException as error:
            if self._keeper is not None and (self.kept_bytes != kept or isinstance(error, CheckpointError)):
                self._keeper.clear()  # some were taken before it failed, or are no use: the files have them all
            raise

    def shutdown(self) -> None:
        """Stop the engine; streams still open end with EngineDeadError. Idempotent."""
        self._streams.shutdown()
        if self._keeper is not None:
            self._keeper.clear()

    def restart(self) -> None:
        """Stop the engine, if it runs, and start it again with the same sizes; blocks until it can run requests."""
        self._streams.restart()


def open_streams(
    config: EngineConfig,
    given_up: threading.Event | None = None,
    room: messages.MemoryRoom | None = None,
    keeper: Keeper | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> Streams:
    """Start an engine and its reader; one that has a process of its own is started again when it dies.

    One that leads other processes is not: whatever started those starts all of them again.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: it could not start.
    """
    config = settled(config)
    client, tokenizer = start_engine(config, given_up, room, keeper, processors)
    info = client.info  # not what is free at the time of the next start
    sizes = {"kv_cache_memory": info.kv_cache_memory, "state_cache_memory": info.state_cache_memory}
    same = config.model_copy(update=sizes)
    taken = None if room is None else room.taken

    def start(given_up: threading.Event, wanted: messages.MemoryRoom | None = None) -> messages.EngineClient:
        if config.in_group:
            raise ConfigError("num_processes is set: an engine of several processes starts again with all of them")
        return start_client(same, given_up, wanted or taken, keeper, processors)

    revived = bool(config.engine_process) and not config.in_group
    return Streams(
        client, tokenizer, start=start, revived=revived, open_eyes=lambda info: Eyes.of(config, tokenizer, info)
    )
