"""Publishes events over ZeroMQ as vLLM does: `[topic, number, batch]`, and again to whoever asks for what it missed."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.config.parts import KVEventsConfig
from jaxllm.engine.scale.kv_events.events import KVEvent, as_array, as_map
from jaxllm.errors import ConfigError
from jaxllm.threads import start_thread

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How often a subscriber is noticed that asks for what it has missed, while nothing is published."""
END = (-1).to_bytes(8, "big", signed=True)
"""Instead of a number: there is nothing more to be had again."""


class EventPublisher:
    """A thread that owns the sockets. A batch has the next number, also one that has to be left out.

    Raises:
        ConfigError: pyzmq is missing, or an address cannot be used.
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
        """Send batches again that somebody has missed, from a number on."""
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
            raise ConfigError(
                "kv_events_config is set, which needs the package pyzmq: pip install 'jaxllm[kv-events]'"
            ) from None
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
