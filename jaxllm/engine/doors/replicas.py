"""Engines of one model behind one front door, in a thread here or in processes of their own on parts of the machine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import chain, repeat
from multiprocessing.connection import wait

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.engine.doors.deaths import RESTART_PAUSES, start_again
from jaxllm.engine.doors.process_client import ProcessClient
from jaxllm.engine.doors.share import Keeper
from jaxllm.engine.messages import EngineClient, EngineRequest, EngineStats, LookAt, MemoryRoom, Order, TokenDelta
from jaxllm.engine.scale.routing import Policy, Replica, ReplicaRouter, counted, prefix_first, together
from jaxllm.engine.start.tokenizer import resolve_tokenizer
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.requests.logits_processors import LogitsProcessor
from jaxllm.sharding.clusters import settled
from jaxllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Seconds until an engine that has been started again is noticed."""

StartReplica = Callable[[int, threading.Event], ProcessClient]
"""Starts the engine of a number; the event ends the start."""


class Replicas:
    """An EngineClient of `count` engines. One that dies takes its own requests with it, and is started again.

    If all have died, `outputs` raises EngineDeadError. `info` is that of one engine with the sequences and the pages
    of all.

    Raises:
        JaxLLMError: what kept one from starting; none runs then.
    """

    def __init__(
        self, count: int, start: StartReplica, *, given_up: threading.Event | None = None, policy: Policy = prefix_first
    ):
        self._start = start
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._clients: dict[int, ProcessClient] = _start_all(count, start, given_up or threading.Event())
        one = self._clients[0].info
        self.info = msgspec.structs.replace(one, max_num_seqs=count * one.max_num_seqs, num_pages=count * one.num_pages)
        rooms = {"num_pages": one.num_pages, "page_size": one.page_size}
        step = one.max_num_batched_tokens
        replicas = [Replica(number, **rooms, step_tokens=step) for number in range(count)]
        self._router = ReplicaRouter(replicas, policy)
        self._ended = EngineStats()
        """The counts of engines that have died."""

    @property
    def loads(self) -> list[float]:
        """The work that each engine has to do, see Replica."""
        return [replica.load for replica in self._router.replicas]

    @property
    def last_turn(self) -> float:
        """The last turn of the engine that has work and has said nothing for longest."""
        with self._lock:
            busy = [
                self._clients[number].last_turn
                for number in set(self._router.owners.values())
                if number in self._clients
            ]
        return min(busy, default=0.0)

    def add(self, request: EngineRequest) -> None:
        with self._lock:
            alive = [self._router.replicas[number] for number in self._clients]
            while alive:
                chosen = self._router.choose(request, alive)
                try:
                    self._clients[chosen.number].add(request)
                except EngineDeadError:
                    alive.remove(chosen)  # `outputs` is going to hear of it
                    continue
                self._router.begin(request, chosen)
                return
        raise EngineDeadError("all engines of the model have stopped")

    def abort(self, request_ids: list[str]) -> None:
        with self._lock:
            for number, client in self._clients.items():
                if mine := self._router.of(number, request_ids):
                    client.abort(mine)
            self._router.forget(request_ids)

    def outputs(self, timeout: float) -> list[TokenDelta]:
        with self._lock:
            pipes = {client.pipe: number for number, client in self._clients.items()}
            least = timeout if len(pipes) == len(self._router.replicas) else min(timeout, LOOK_SECONDS)
        try:
            ready = wait(list(pipes), least)
        except OSError:  # one was closed meanwhile; which one is told when it is read
            ready = list(pipes)
        deltas: list[TokenDelta] = []
        for pipe in ready:
            number = pipes[pipe]  # type: ignore[index]
            try:
                deltas += self._clients[number].outputs(0)
            except EngineDeadError as error:
                deltas += self._lose(number, error)
        with self._lock:
            self._router.note(deltas)
        return deltas

    @property
    def each(self) -> list[EngineStats]:
        """The statistics of each engine that runs."""
        with self._lock:
            return [self._clients[number].stats() for number in sorted(self._clients)]

    def stats(self) -> EngineStats:
        return together(self._ended, self.each)

    def has_begun(self, request_id: str) -> bool:
        with self._lock:
            client = self._clients.get(self._router.owners.get(request_id, -1))
            return client is not None and client.has_begun(request_id)

    @property
    def processes(self) -> dict[str, LookAt]:
        with self._lock:
            return {str(number): client.look for number, client in sorted(self._clients.items())}

    def order(self, order: Order) -> None:
        with self._lock:
            clients = list(self._clients.values())
        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(lambda client: client.order(order), clients))

    def keep_weights(self) -> None:
        """One engine leaves the weights, which all have alike; `shutdown` ends the others."""
        self._closing.set()
        with self._lock:
            client = next(iter(self._clients.values()))
        client.keep_weights()

    def shutdown(self) -> None:
        self._closing.set()
        with self._lock:
            clients = list(self._clients.values())
        with ThreadPoolExecutor(len(self._router.replicas)) as pool:
            list(pool.map(lambda client: client.shutdown(), clients))

    def _lose(self, number: int, error: EngineDeadError) -> list[TokenDelta]:
        """End the requests of an engine that has died, and start it again. Raises the error if it was the last."""
        with self._lock:
            if self._closing.is_set():
                raise error
            if len(self._clients) == 1:
                self._closing.set()  # others are started in our place, not by us
                raise error
            client = self._clients.pop(number)
            lost = self._router.lose(number)
            self._ended = counted(self._ended, client.stats())
        logger.error("engine %d of %d died: %s", number, len(self._router.replicas), error)
        threading.Thread(target=self._revive, args=(number,), name=f"revive {number}", daemon=True).start()
        return [
            TokenDelta(
                request_id=name, finish_reason="error", error=str(error), is_dead=True, had_begun=client.has_begun(name)
            )
            for name in lost
        ]

    def _revive(self, number: int) -> None:
        def take(client: ProcessClient) -> None:
            with self._lock:
                self._clients[number] = client

        pauses = chain(RESTART_PAUSES, repeat(RESTART_PAUSES[-1]))
        start_again(f"engine {number}", lambda closing: self._start(number, closing), take, self._closing, pauses)


def _start_all(count: int, start: StartReplica, given_up: threading.Event) -> dict[int, ProcessClient]:
    """The first one alone: what it compiles the others find. The others start side by side."""
    started = {0: start(0, given_up)}
    try:
        with ThreadPoolExecutor(max(count - 1, 1)) as pool:
            starting = {number: pool.submit(copy_context().run, start, number, given_up) for number in range(1, count)}
            failures = [error for one in starting.values() if (error := one.exception()) is not None]
            started |= {number: one.result() for number, one in starting.items() if one.exception() is None}
            if failures:
                raise failures[0]
    except BaseException:
        for client in started.values():
            client.shutdown()
        raise
    return started


def start_engine(
    config: EngineConfig,
    given_up: threading.Event | None = None,
    room: MemoryRoom | None = None,
    keeper: Keeper | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> tuple[EngineClient, Tokenizer | None]:
    """A running engine, and the tokenizer its front door needs; see `start_client`.

    In a process that follows another it does not return: the process ends when the other does.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: it could not start.
    """
    config = settled(config)
    if config.process_id:
        from jaxllm.engine.start.follow import follow

        follow(config)
    client = start_client(config, given_up, room, keeper, processors)
    try:
        return client, resolve_tokenizer(config)
    except BaseException:
        client.shutdown()
        raise


def start_client(
    config: EngineConfig,
    given_up: threading.Event | None = None,
    room: MemoryRoom | None = None,
    keeper: Keeper | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> EngineClient:
    """A running engine; in a process of its own, `given_up` ends a start under way. Raises as `start_engine`.

    With `room` it asks for its place in memory, see there. `keeper` is where it may leave its weights, and find those
    of an engine before it. `processors` are functions of logits that requests may use.
    """
    if processors and (config.engine_process or config.num_engines > 1 or config.in_group):
        raise ConfigError(
            "logits_processors are functions, which reach only an engine in this process: engine_process must be "
            "False, and data_parallel_size and num_processes 1"
        )
    if config.num_engines > 1:
        return start_replicas(config, given_up, keeper)
    if config.engine_process:
        from jaxllm.engine.doors.process_client import ProcessClient

        return ProcessClient(config, given_up=given_up, room=room, keeper=keeper)
    if config.numa_node is not None:
        raise ConfigError(
            f"numa_node is {config.numa_node}: a process keeps to a node, and this engine has none of its own; set "
            "engine_process to true"
        )
    from jaxllm.engine.doors.thread_client import ThreadClient
    from jaxllm.engine.start.build import build_core

    core, info = build_core(config, room, processors=processors)
    return ThreadClient(core, info)


def start_replicas(
    config: EngineConfig,
    given_up: threading.Event | None = None,
    keeper: Keeper | None = None,
    policy: Policy = prefix_first,
) -> Replicas:
    """Running engines, config.data_parallel_size of them; `policy` says which request goes where.

    All of them take the weights that `keeper` has, which is empty afterwards.
    """
    from jaxllm.engine.doors.process_client import ProcessClient
    from jaxllm.engine.doors.share import Share

    count = config.data_parallel_size
    if not config.engine_process:
        raise ConfigError(f"data_parallel_size is {count}: each engine has a process of its own, see engine_process")

    def start(number: int, given_up: threading.Event) -> ProcessClient:
        events = config.kv_events_config
        share = Share(number, count)
        own = {"data_parallel_size": 1, "kv_events_config": None if events is None else events.of_rank(number)}
        one = config.model_copy(update=own | {"threads": share.threads(config.threads)})
        return ProcessClient(one, given_up=given_up, keeper=keeper, share=share)

    replicas = Replicas(count, start, given_up=given_up, policy=policy)
    if keeper is not None:
        keeper.clear()
    return replicas
