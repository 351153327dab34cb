"""The same hold on an engine loop that runs in a process of its own, over a pipe."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import msgspec

from jaxllm import errors
from jaxllm.config import EngineConfig
from jaxllm.engine.front import engine_process
from jaxllm.engine.front.engine_process import (
    BEAT_SECONDS,
    Abort,
    Add,
    Beat,
    Doing,
    Failed,
    Outputs,
    Started,
    Stop,
    encode,
    from_engine,
    to_engine,
)
from jaxllm.engine.messages import EngineRequest, EngineStats, TokenDelta
from jaxllm.errors import EngineDeadError, InvalidRequestError
from jaxllm.own_process import PipedProcess
from jaxllm.progress import tell

logger = logging.getLogger(__name__)

SILENT_SECONDS = 15.0
"""A process that says nothing for so long is taken for dead. Compiles and long steps leave its heartbeat alone; C code
that keeps Python from running, such as a tokenizer that reads its vocabulary, holds it up for a few seconds at most."""
SILENT_START_SECONDS = 120.0
"""The same until it has started: it may load libraries and wake devices without a word."""
STOP_SECONDS = 5.0
KILL_SECONDS = 5.0


class ProcessClient:
    """Starts the process and waits until its engine is ready. No method but `outputs` and `shutdown` waits for it.

    A thread writes what the process is to hear, for it may have stopped reading; another kills it where it is silent
    for SILENT_SECONDS. However it ends, `outputs` says so.

    Raises:
        JaxLLMError: what kept the engine from starting, as if it had been raised here.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_level: int = logging.INFO,
        main: Callable[..., None] = engine_process.main,
        given_up: threading.Event | None = None,
    ):
        """`main` runs in the process; benchmarks of the front door alone give another one. `given_up` ends the wait."""
        self._process = PipedProcess(main, config, log_level)
        self._pipe = self._process.pipe
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stats = EngineStats()
        self._gone: str | None = None
        """Why nothing more can be sent."""
        self._killed: str | None = None
        self._silent_beats = 0
        self._starting = True
        self._ending, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._write, name="requests", daemon=True).start()
        threading.Thread(target=self._watch, args=(given_up or threading.Event(),), name="watch", daemon=True).start()
        try:
            self.info = self._first_word().info
        except BaseException:
            self._end(0)
            raise
        self._starting = False

    def add(self, request: EngineRequest) -> None:
        message = encode(Add(request))
        try:
            to_engine.decode(message)  # what the engine could not read would end it, and everybody's requests with it
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"request {request.request_id} is malformed: {error}") from None
        if self._gone is not None:
            raise EngineDeadError(self._gone)
        self._outbox.put(message)

    def abort(self, request_ids: list[str]) -> None:
        self._outbox.put(encode(Abort(request_ids)))

    def outputs(self, timeout: float) -> list[TokenDelta]:
        try:
            if not self._pipe.poll(timeout):
                return []
        except OSError as error:
            raise self._dead() from error
        message = self._receive()
        if isinstance(message, Failed):
            self._gone = message.message
            raise self._dead()
        if not isinstance(message, Outputs):
            return []
        self._stats = message.stats or self._stats
        return message.deltas

    def stats(self) -> EngineStats:
        return self._stats

    def shutdown(self) -> None:
        self._gone = self._gone or "the engine was shut down"
        self._outbox.put(encode(Stop()))
        self._end(STOP_SECONDS)

    def _first_word(self) -> Started:
        while isinstance(message := self._receive(), Beat | Doing):
            if isinstance(message, Doing):
                tell(message.doing, message.done, message.total)
        if isinstance(message, Failed):
            raise getattr(errors, message.kind, EngineDeadError)(message.message)
        assert isinstance(message, Started)
        return message

    def _receive(self) -> Started | Doing | Failed | Outputs | Beat:
        try:
            message = from_engine.decode(self._pipe.recv_bytes())
        except (OSError, EOFError) as error:
            raise self._dead() from error
        except msgspec.DecodeError as error:
            self._gone = f"a message of the engine cannot be read: {error}"
            raise self._dead() from error
        self._silent_beats = 0
        return message

    def _dead(self) -> EngineDeadError:
        """What to raise now that nothing more will come."""
        self._end(1.0 if self._gone is None else 0)
        code = self._process.exit_code
        self._gone = self._gone or self._killed or f"the engine process is gone (exit code {code})"
        return EngineDeadError(self._gone)

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._pipe.send_bytes(message)
        except OSError:
            return  # the process is gone, as `outputs` is going to say

    def _watch(self, given_up: threading.Event) -> None:
        """Count silence in turns of this thread: where both processes have stood still, nothing was missed."""
        while not self._ended.wait(BEAT_SECONDS):
            self._silent_beats += 1
            silent = self._silent_beats * BEAT_SECONDS
            if silent > (SILENT_START_SECONDS if self._starting else SILENT_SECONDS):
                self._killed = f"the engine process said nothing for {silent:.0f} seconds and was killed"
            elif self._starting and given_up.is_set():
                self._killed = "the engine was shut down while it started"
            if self._killed is not None:
                logger.error(self._killed)
                self._process.kill()
                return

    def _end(self, patience: float) -> None:
        """Wait `patience` seconds for the process to end, then kill it; end our threads."""
        with self._ending:
            try:
                self._process.wait(patience)
            finally:
                if self._process.exit_code is None:
                    if patience:
                        logger.warning("the engine process did not stop within %g seconds and was killed", patience)
                    self._process.kill()
                    self._process.wait(KILL_SECONDS)
                self._ended.set()
                self._outbox.put(None)
