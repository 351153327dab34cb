"""The same hold on an engine loop that runs in a process of its own, over a pipe."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

from jaxllm import errors
from jaxllm.config import EngineConfig
from jaxllm.engine.front.messages import EngineInfo, EngineRequest, EngineStats, TokenDelta
from jaxllm.engine.front.thread_client import Inbox
from jaxllm.errors import EngineDeadError, InvalidRequestError, JaxLLMError

if TYPE_CHECKING:
    from jaxllm.engine.core import EngineCore

logger = logging.getLogger(__name__)

STATS_SECONDS = 0.25
JOIN_SECONDS = 10.0


class Started(msgspec.Struct, tag=True):
    """The loop is up."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    """It could not start, or it died: `kind` is an error type of jaxllm.errors where it was one."""

    kind: str
    message: str


class Outputs(msgspec.Struct, tag=True):
    """One turn's deltas, and now and then statistics."""

    deltas: list[TokenDelta]
    stats: EngineStats | None = None


class Add(msgspec.Struct, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class Stop(msgspec.Struct, tag=True):
    pass


_to_engine = msgspec.msgpack.Decoder(Add | Abort | Stop)
_from_engine = msgspec.msgpack.Decoder(Started | Failed | Outputs)
_encode = msgspec.msgpack.Encoder().encode


class ProcessClient:
    """Starts the process and waits until its engine is ready.

    Raises:
        JaxLLMError: what kept the engine from starting, as if it had been raised here.
    """

    def __init__(self, config: EngineConfig, log_level: int = logging.INFO, main: Callable[..., None] | None = None):
        """`main` runs in the process instead of an engine; benchmarks of the front door alone give one."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, config, log_level)
        self._process = context.Process(target=main or _engine_main, args=arguments, name="jaxllm-engine", daemon=True)
        self._process.start()
        theirs.close()
        self._write_lock = threading.Lock()
        self._stats = EngineStats()
        self._closed = False
        first = self._receive()
        if isinstance(first, Failed):
            self._process.join()
            kind = getattr(errors, first.kind, None)
            raise (kind or EngineDeadError)(first.message)
        assert isinstance(first, Started)
        self.info = first.info

    def add(self, request: EngineRequest) -> None:
        message = _encode(Add(request))
        try:
            _to_engine.decode(message)  # what the engine could not read would end it, and everybody's requests with it
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"request {request.request_id} is malformed: {error}") from None
        self._send(message)

    def abort(self, request_ids: list[str]) -> None:
        with contextlib.suppress(EngineDeadError):  # its pages are gone with it
            self._send(_encode(Abort(request_ids)))

    def outputs(self, timeout: float | None = None) -> list[TokenDelta]:
        if not self._poll(timeout):
            return []
        message = self._receive()
        if isinstance(message, Failed):
            self._closed = True
            raise EngineDeadError(message.message)
        assert isinstance(message, Outputs)
        self._stats = message.stats or self._stats
        return message.deltas

    def stats(self) -> EngineStats:
        return self._stats

    def shutdown(self) -> None:
        if not self._closed:
            with contextlib.suppress(EngineDeadError):
                self._send(_encode(Stop()))
            self._closed = True
        self._process.join(JOIN_SECONDS)
        if self._process.is_alive():
            logger.warning("the engine process did not stop within %.0f s and was killed", JOIN_SECONDS)
            self._process.kill()
            self._process.join()

    def _poll(self, timeout: float | None) -> bool:
        try:
            return self._pipe.poll(timeout)
        except (OSError, EOFError) as error:
            raise self._dead() from error

    def _receive(self) -> Started | Failed | Outputs:
        try:
            return _from_engine.decode(self._pipe.recv_bytes())
        except (OSError, EOFError) as error:
            raise self._dead() from error
        except msgspec.DecodeError as error:
            self._process.kill()
            raise EngineDeadError(f"a message of the engine cannot be read: {error}") from error

    def _send(self, message: bytes) -> None:
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        try:
            with self._write_lock:
                self._pipe.send_bytes(message)
        except (OSError, BrokenPipeError) as error:
            raise self._dead() from error

    def _dead(self) -> EngineDeadError:
        self._process.join(1.0)
        return EngineDeadError(f"the engine process is gone (exit code {self._process.exitcode})")


def _engine_main(pipe: Connection, config: EngineConfig, log_level: int) -> None:
    """The engine process: build, then loop until told to stop or the front door is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front door decides when to stop
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    code = 0
    try:
        from jaxllm.engine.start.build import build_core

        core, info = build_core(config)
        pipe.send_bytes(_encode(Started(info)))
        run_loop(pipe, core)
    except JaxLLMError as error:
        pipe.send_bytes(_encode(Failed(type(error).__name__, str(error))))
    except BrokenPipeError:
        logger.info("the front door is gone; stopping")
    except Exception as error:
        logger.exception("the engine died")
        code = 1
        with contextlib.suppress(OSError):
            pipe.send_bytes(_encode(Failed("", f"the engine died: {type(error).__name__}: {error}")))
    logging.shutdown()
    os._exit(code)  # a compile that has begun cannot be stopped, and an ordinary exit would wait for it


def run_loop(pipe: Connection, core: EngineCore) -> None:
    """Call `core` until told to stop or the front door is gone."""
    inbox, stopping = Inbox(), threading.Event()
    core.on_prepared = lambda: inbox.put(None)
    threading.Thread(target=_listen, args=(pipe, inbox, stopping), name="inbox", daemon=True).start()
    last, load = 0.0, (0, 0)
    while not stopping.is_set():
        inbox.drain(core, wait=not core.has_work)
        deltas = core.turn() if core.has_work else []
        due = core.load != load or time.monotonic() - last > STATS_SECONDS
        if deltas or due:
            pipe.send_bytes(_encode(Outputs(deltas, core.stats() if due else None)))
        if due:
            last, load = time.monotonic(), core.load


def _listen(pipe: Connection, inbox: Inbox, stopping: threading.Event) -> None:
    """Hand what comes through the pipe to the loop; what cannot be read ends it, for nobody would hear more."""
    try:
        while not stopping.is_set():
            message = _to_engine.decode(pipe.recv_bytes())
            if isinstance(message, Add):
                inbox.put(message.request)
            elif isinstance(message, Abort):
                inbox.put(message.request_ids)
            else:
                break
    except (EOFError, OSError):
        pass  # the front door is gone
    except Exception as error:
        inbox.put(error)
        return
    stopping.set()
    inbox.put(None)
