"""Events of a prefix cache, in vLLM's format: which pages of prompts can be found, and which no longer."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.config.parts import KVEventsConfig
from jaxllm.engine.core.feature import Feature
from jaxllm.engine.core.pages import NO_TOKEN, PagePool, PrefixNode
from jaxllm.errors import ConfigError
from jaxllm.threads import start_thread

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How often a subscriber is noticed that asks for what it has missed, while nothing is published."""
END = (-1).to_bytes(8, "big", signed=True)
"""Instead of a number: there is nothing more to be had again."""
MEDIUM = "GPU"
"""vLLM's word for memory of the devices, whichever they are."""


class BlockStored(msgspec.Struct):
    """Pages, one after the other, that can be found by their tokens from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct):
    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct):
    """No page that was stored before can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def as_map(event: KVEvent) -> dict[str, Any]:
    """As vLLM writes events since 0.26."""
    return {"type": type(event).__name__, **msgspec.structs.asdict(event)}


def as_array(event: KVEvent) -> list[Any]:
    """As vLLM wrote them before."""
    return [type(event).__name__, *msgspec.structs.astuple(event)]


class KVEvents(Feature):
    """Gathers what becomes of the pages of a pool, and hands it to `publish` once a step.

    A page is known by a hash of all tokens up to its end, which is the same in every engine. Nothing is told of prompts
    with a `cache_salt`, an adapter or steering, which no other request shares, and from an image on.
    """

    name = "kv_events"

    def __init__(self, pool: PagePool, publish: Callable[[list[KVEvent]], None], close: Callable[[], None]):
        self._publish, self._close, self._page_size = publish, close, pool.page_size
        self._root: PrefixNode = None
        self._hashes: dict[PrefixNode, int] = {}
        self._events: list[KVEvent] = []
        registered, given_away = pool.on_register, pool.on_give_away

        def on_register(page: int, node: PrefixNode, parent: PrefixNode, tokens: Sequence[int]) -> None:
            registered(page, node, parent, tokens)
            self._stored(node, parent, tokens)

        def on_give_away(page: int, node: PrefixNode) -> None:
            given_away(page, node)
            self._removed(node)

        pool.on_register, pool.on_give_away = on_register, on_give_away

    def reset(self, root: PrefixNode) -> None:
        """Nothing that was stored so far is found any more; what others may know of begins with `root` from now on."""
        self._root = root
        self._hashes.clear()
        self._events.append(AllBlocksCleared())
        self.turned()

    def close(self) -> None:
        self._close()

    def turned(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _stored(self, node: PrefixNode, parent: PrefixNode, tokens: Sequence[int]) -> None:
        if (parent != self._root and parent not in self._hashes) or max(tokens) >= NO_TOKEN:
            return
        before = self._hashes.get(parent)
        own = self._hashes[node] = hash_of(before, tokens)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == before:
            last.block_hashes.append(own)
            last.token_ids += tokens
        else:
            self._events.append(BlockStored([own], before, list(tokens), self._page_size))

    def _removed(self, node: PrefixNode) -> None:
        own = self._hashes.pop(node, None)
        if own is None:
            return
        if self._events and isinstance(last := self._events[-1], BlockRemoved):
            last.block_hashes.append(own)
        else:
            self._events.append(BlockRemoved([own]))


def hash_of(before: int | None, tokens: Sequence[int]) -> int:
    start = b"" if before is None else before.to_bytes(8, "big")
    content = start + array("q", tokens).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


class EventPublisher:
    """A thread that owns the sockets. A batch has the next number, also one that has to be left out.

    Raises ConfigError: pyzmq is missing, or an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig):
        self._config = config
        self._write: Callable[[KVEvent], Any] = as_map if config.event_format == "map" else as_array
        self._number = 0
        self._complained = False
        self._queue: queue.Queue[tuple[int, bytes]] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._ending = threading.Event()
        self._sockets = _Sockets(config)
        self._thread = start_thread("kv events", self._run)

    def publish(self, events: list[KVEvent]) -> None:
        """Queue a batch; never waits."""
        batch = [time.time(), [self._write(event) for event in events], self._config.data_parallel_rank]
        number, self._number = self._number, self._number + 1
        try:
            self._queue.put_nowait((number, msgspec.msgpack.encode(batch)))
        except queue.Full:
            if not self._complained:
                self._complained = True
                logger.warning("KV events come faster than they are published: subscribers miss some from now on")

    def close(self) -> None:
        """Publish what waits, and close the sockets. Idempotent."""
        self._ending.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1)

    def _run(self) -> None:
        while not (self._ending.is_set() and self._queue.empty()):
            try:
                number, batch = self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                pass
            else:
                self._sockets.events.send_multipart((self._config.topic.encode(), number.to_bytes(8, "big"), batch))
                self._sent.append((number, batch))
            self._answer()
        self._sockets.close()

    def _answer(self) -> None:
        replay = self._sockets.replay
        while replay is not None and replay.poll(0):
            asker, *asked = replay.recv_multipart()
            if len(asked) != 2 or len(asked[1]) != 8:
                continue
            first = int.from_bytes(asked[1], "big")
            for number, batch in self._sent:
                if number >= first:
                    replay.send_multipart((asker, b"", number.to_bytes(8, "big"), batch))
            replay.send_multipart((asker, b"", END, b""))


class _Sockets:
    def __init__(self, config: KVEventsConfig):
        try:
            import zmq
        except ImportError:
            missing = "kv_events_config is set, which needs the package pyzmq: pip install 'jaxllm[kv-events]'"
            raise ConfigError(missing) from None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.events: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self.events.set_hwm(config.hwm)
        address = config.address(config.endpoint)
        listens = "*" in address or "::" in address or address.startswith("ipc://")
        self.replay: zmq.Socket[bytes] | None = None
        try:
            (self.events.bind if listens else self.events.connect)(address)
            if config.replay_endpoint is not None:
                address = config.address(config.replay_endpoint)
                self.replay = context.socket(zmq.ROUTER)
                self.replay.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"kv_events_config: {address} cannot be used: {error}") from None

    def close(self) -> None:
        for socket in (self.events, self.replay):
            if socket is not None:
                socket.close(linger=500)
