"""The same hold on an engine loop that runs in a process of its own, over a pipe."""

from __future__ import annotations

import itertools
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from jaxllm import errors, logs
from jaxllm.config import EngineConfig
from jaxllm.engine.doors import engine_process
from jaxllm.engine.doors.engine_process import (
    BEAT_SECONDS,
    Abort,
    Add,
    Admit,
    Answered,
    Beat,
    Began,
    Do,
    Doing,
    Failed,
    FromEngine,
    Keep,
    Look,
    Outputs,
    Planned,
    ProcessSettings,
    Started,
    Stop,
    encode,
    from_engine,
    to_engine,
)
from jaxllm.engine.doors.share import Keeper, Share
from jaxllm.engine.messages import EngineRequest, EngineStats, LookAt, MemoryRoom, Order, TokenDelta
from jaxllm.errors import EngineDeadError, InvalidRequestError
from jaxllm.looking import What
from jaxllm.own_process import PipedProcess
from jaxllm.progress import tell

logger = logging.getLogger(__name__)

SILENT_SECONDS = 15.0
"""A process that says nothing for so long is taken for dead. Compiles and long steps leave its heartbeat alone; C code
that keeps Python from running, such as a tokenizer that reads its vocabulary, holds it up for a few seconds at most."""
SILENT_START_SECONDS = 120.0
"""The same until it has started: it may load libraries and wake devices without a word."""
OVERWRITTEN = ": a file that it had mapped, most likely the model's, was written into or cut; replace files by rename"
STOP_SECONDS = 5.0
KEEP_SECONDS = 600.0
"""For the weights of a large model to be copied; a process that hangs is ended sooner, when it says nothing."""
KILL_SECONDS = 5.0
LOOK_SECONDS = 60.0
"""Seconds that an answer about the process may take beyond the time that was asked for: a trace is written out after
its time.
"""


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
        main: Callable[..., None] = engine_process.main,
        given_up: threading.Event | None = None,
        room: MemoryRoom | None = None,
        keeper: Keeper | None = None,
        share: Share | None = None,
    ):
        """`main` runs in the process; benchmarks of the front door alone give another one. `given_up` ends the wait.

        For `room` and `keeper` see `start_client`; `share` is the engine's part of the machine.
        """
        kept_in = () if keeper is None else (keeper.fd,)
        surroundings = ProcessSettings(
            share=share,
            kept_in=None if keeper is None else keeper.fd,
            asks=room is not None,
            budget=None if room is None else room.budget,
        )
        self._process = PipedProcess(main, config, logs.settings(), surroundings, inherited=kept_in)
        self._pipe = self._process.pipe
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stats = EngineStats()
        self.last_turn = 0.0
        self._begun: set[str] = set()
        self._gone: str | None = None
        """Why nothing more can be sent."""
        self._killed: str | None = None
        self._silent_beats = 0
        self._numbers = itertools.count()
        self._asked: dict[int, queue.SimpleQueue[Answered | None]] = {}
        """The queues of callers that wait for an answer, by its number."""
        self._starting = True
        self._asking = False
        """The process waits for us."""
        self._ending, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._write, name="requests", daemon=True).start()
        threading.Thread(target=self._watch, args=(given_up or threading.Event(),), name="watch", daemon=True).start()
        try:
            self.info = self._first_word(room).info
        except BaseException:
            self._end(0)
            raise
        self._starting = False

    @property
    def pipe(self) -> Connection:
        """Readable where `outputs` has something to say."""
        return self._pipe

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
        self._begun.difference_update(request_ids)
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
        if isinstance(message, Began):
            self._begun.update(message.request_ids)
        if isinstance(message, Answered) and (asked := self._asked.get(message.number)) is not None:
            asked.put(message)
        if not isinstance(message, Outputs):
            return []
        self._begun.difference_update(delta.request_id for delta in message.deltas if delta.finish_reason is not None)
        self._stats = message.stats or self._stats
        self.last_turn = time.monotonic()
        return message.deltas

    def has_begun(self, request_id: str) -> bool:
        return request_id in self._begun

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def processes(self) -> dict[str, LookAt]:
        return {"": self.look}

    def look(self, what: What, seconds: float) -> bytes:
        """See jaxllm.looking. It waits for the answer.

        Raises:
            InvalidRequestError: that cannot be had of the process.
            EngineDeadError: the process has ended, or did not answer.
        """
        return self._ask(Look(what, seconds), seconds + LOOK_SECONDS)

    def order(self, order: Order) -> None:
        self._ask(order, None)

    def _ask(self, order: Look | Order, timeout: float | None) -> bytes:
        """The process's answer; raises the error that it answers, and EngineDeadError if it ends or answers nothing."""
        number, answer = next(self._numbers), queue.SimpleQueue[Answered | None]()
        self._asked[number] = answer
        try:
            if self._gone is not None or self._ended.is_set():
                raise EngineDeadError(self._gone or "the engine process has ended")
            self._outbox.put(encode(Do(number, order)))
            found = answer.get(timeout=timeout)
        except queue.Empty:
            raise EngineDeadError(f"the engine process did not answer within {timeout:g} s") from None
        finally:
            del self._asked[number]
        if found is None:
            raise EngineDeadError(self._gone or "the engine process has ended")
        if found.problem:
            raise getattr(errors, found.kind)(found.problem)
        return found.data

    def keep_weights(self) -> None:
        self._gone = self._gone or "the engine is asleep"
        self._outbox.put(encode(Keep()))
        self._end(KEEP_SECONDS)
        if self._process.exit_code != 0:
            raise EngineDeadError(
                f"the engine process ended (exit code {self._process.exit_code}) before its weights were in the host's "
                "memory"
            )

    def shutdown(self) -> None:
        self._gone = self._gone or "the engine was shut down"
        self._outbox.put(encode(Stop()))
        self._end(STOP_SECONDS)

    def _first_word(self, room: MemoryRoom | None) -> Started:
        while isinstance(message := self._receive(), Beat | Doing | Planned):
            if isinstance(message, Doing):
                tell(message.doing, message.done, message.total)
            elif isinstance(message, Planned):
                assert room is not None
                self._asking = True
                room.ask(message.nbytes)
                self._asking = False
                self._outbox.put(encode(Admit()))
        if isinstance(message, Failed):
            raise getattr(errors, message.kind, EngineDeadError)(message.message)
        assert isinstance(message, Started)
        return message

    def _receive(self) -> FromEngine:
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
        """The error to raise now that nothing more will come."""
        self._end(1.0 if self._gone is None else 0)
        code = self._process.exit_code
        why = OVERWRITTEN if code == -signal.SIGBUS else ""
        self._gone = self._gone or self._killed or f"the engine process is gone (exit code {code}){why}"
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
            self._silent_beats = 0 if self._asking else self._silent_beats + 1
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
                for asked in list(self._asked.values()):
                    asked.put(None)
