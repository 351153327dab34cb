"""The engine process: what goes over the pipe between it and its front door, and its side of it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.engine.front.thread_client import Inbox
from jaxllm.engine.messages import EngineInfo, EngineRequest, EngineStats, TokenDelta
from jaxllm.errors import JaxLLMError
from jaxllm.progress import watched_by

if TYPE_CHECKING:
    from jaxllm.engine.core import EngineCore

logger = logging.getLogger(__name__)

STATS_SECONDS = 0.25
BEAT_SECONDS = 1.0
"""How often the process says that it lives, whatever its loop is waiting for."""


class Started(msgspec.Struct, tag=True):
    """The loop is up."""

    info: EngineInfo


class Doing(msgspec.Struct, tag=True):
    """How far the start is; see jaxllm.progress."""

    doing: str
    done: int
    total: int


class Failed(msgspec.Struct, tag=True):
    """It could not start, or it died: `kind` is an error type of jaxllm.errors where it was one."""

    kind: str
    message: str


class Outputs(msgspec.Struct, tag=True):
    """One turn's deltas, and now and then statistics."""

    deltas: list[TokenDelta]
    stats: EngineStats | None = None


class Beat(msgspec.Struct, tag=True):
    """The process lives."""


class Add(msgspec.Struct, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class Stop(msgspec.Struct, tag=True):
    pass


to_engine = msgspec.msgpack.Decoder(Add | Abort | Stop)
from_engine = msgspec.msgpack.Decoder(Started | Doing | Failed | Outputs | Beat)
encode = msgspec.msgpack.Encoder().encode


class FrontDoor:
    """The engine's end of the pipe.

    Threads of its own beat and listen from the start, so that they do while a model loads, a step is compiled, or a
    long one runs. The process ends at once when it is told to, or when nobody is at the other end.
    """

    def __init__(self, pipe: Connection):
        self.inbox = Inbox()
        self._pipe = pipe
        self._sending = threading.Lock()
        for target in (self._beat, self._listen):
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True).start()

    def send(self, message: Started | Doing | Failed | Outputs | Beat) -> None:
        """Any thread may call this."""
        data = encode(message)
        try:
            with self._sending:
                self._pipe.send_bytes(data)
        except OSError:
            leave("the front door is gone")

    def _beat(self) -> None:
        while True:
            self.send(Beat())
            time.sleep(BEAT_SECONDS)

    def _listen(self) -> None:
        """Hand what comes to the loop; what cannot be read ends it, for nobody would hear more."""
        try:
            while not isinstance(message := to_engine.decode(self._pipe.recv_bytes()), Stop):
                self.inbox.put(message.request if isinstance(message, Add) else message.request_ids)
        except (EOFError, OSError):
            leave("the front door is gone")
        except Exception as error:
            self.inbox.put(error)
        else:
            leave("told to stop")


def leave(reason: str, status: int = 0) -> NoReturn:
    """End the process now: a compile that has begun cannot be stopped, and an ordinary exit would wait for it."""
    logger.debug("the engine process ends: %s", reason)
    logging.shutdown()
    os._exit(status)


def main(pipe: Connection, config: EngineConfig, log_level: int) -> None:
    """Build the engine, then turn its loop over until the process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front door decides when to stop
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    front_door = FrontDoor(pipe)
    try:
        from jaxllm.compat import under_own_settings  # JAX comes with it, which the front door can do without
        from jaxllm.engine.start.build import build_core

        with watched_by(lambda *stage: front_door.send(Doing(*stage))):
            core, info = build_core(config)
        front_door.send(Started(info))
        under_own_settings(run_loop)(front_door, core)
    except JaxLLMError as error:
        front_door.send(Failed(type(error).__name__, str(error)))
        leave("it cannot go on")
    except Exception as error:
        logger.exception("the engine died")
        front_door.send(Failed("", f"the engine died: {type(error).__name__}: {error}"))
        leave("it died", 1)


def run_loop(front_door: FrontDoor, core: EngineCore) -> NoReturn:
    """Call `core` for as long as the process lives. Raises what ends it."""
    core.on_prepared = lambda: front_door.inbox.put(None)
    last, load = 0.0, (0, 0)
    while True:
        front_door.inbox.drain(core, wait=not core.has_work)
        deltas = core.turn() if core.has_work else []
        due = core.load != load or time.monotonic() - last > STATS_SECONDS
        if deltas or due:
            front_door.send(Outputs(deltas, core.stats() if due else None))
        if due:
            last, load = time.monotonic(), core.load
