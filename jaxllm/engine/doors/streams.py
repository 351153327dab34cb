"""The requests under way in one engine: the one reader of its outputs, and the streams it fills."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import msgspec

from jaxllm.engine.doors.deaths import RESTART_PAUSES, Suspects, start_again
from jaxllm.engine.doors.eyes import Eyes
from jaxllm.engine.doors.sequences import failure, name_tokens, rank_vocabulary, settled, split_request
from jaxllm.engine.messages import INITIAL_VERSION, EngineClient, EngineInfo, EngineRequest, TokenDelta
from jaxllm.errors import EngineDeadError, EnginePausedError, Field, InvalidRequestError, QueueFullError
from jaxllm.progress import has_widgets
from jaxllm.text.tokenizer import Tokenizer

POLL_SECONDS = 1.0

Gain = tuple[int, TokenDelta]
"""(index of the sequence in its stream, what it gained)"""


class Place(NamedTuple):
    """The destination of one sequence's deltas."""

    stream: Stream
    sequence: int
    request: EngineRequest
    """As its caller has named it; several may bear the same name."""


class Streams:
    """Reads what the engine says, on a thread of its own, and hands each delta to the stream that waits for it.

    An engine that dies is started again, where it is to be `revived`, or by `restart`: `is_dead` until then, and the
    streams that were open end with EngineDeadError. One that `is_asleep` has ended, and is started by `wake_up`. The
    thread keeps this object alive until `shutdown`, but not its holders, which call that when they are forgotten.

    Attributes:
        limit: sequences that may run or wait at once; None is any number.
        tokenizer: what names the tokens of log-probabilities.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        *,
        limit: int | None = None,
        start: Callable[..., EngineClient],
        revived: bool = False,
        open_eyes: Callable[[EngineInfo], Eyes] | None = None,
    ):
        """`start` starts another engine like `client`: its first argument is an event that ends a start under way."""
        self.client = client
        self.paused: str | None = None
        """The mode in which the engine was told to pause; see `Controls`."""
        self.refuses = False
        """No request is taken, because it is paused."""
        self.weight_version = INITIAL_VERSION
        self.num_updates = 0
        """The number of times that its weights were exchanged."""
        self.tokenizer = tokenizer
        self.limit = limit
        self.is_dead = False
        self.death: str | None = None
        """Why the engine died the last time, if it did."""
        self.is_asleep = False
        self._start = start
        self._open_eyes = open_eyes
        self._revived = revived
        self._pid = os.getpid()
        self._serials = itertools.count()
        self._lock = threading.Lock()
        self._places: dict[str, Place] = {}
        self._busy_since = 0.0
        self._suspects: Suspects | None = None
        """There are some once an engine has died."""
        self._closing = threading.Event()
        self._begin_reading()

    @cached_property
    def eyes(self) -> Eyes:
        """What prepares images for the model. Raises InvalidRequestError: it sees none."""
        assert self._open_eyes is not None, "whoever opens an engine says how"
        return self._open_eyes(self.client.info)

    def check_process(self) -> None:
        """Raises EngineDeadError in a process forked from the engine's: nothing runs there that could answer."""
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"this process was forked from {self._pid}, in which the engine runs, and cannot use it; one that is "
                "to generate must be spawned (multiprocessing.get_context('spawn')) and start an engine of its own"
            )

    def add(self, stream: Stream, sequences: Sequence[tuple[int, EngineRequest]], *, room: int = 0) -> None:
        """Queue sequences of a stream under names of their own.

        Raises:
            InvalidRequestError: the engine has died of it before.
            QueueFullError: there is no room for `room` sequences; none is queued then.
            EnginePausedError: it was told to pause.
            EngineDeadError: the engine has stopped.
        """
        self.check_process()
        if self.is_asleep:
            raise EngineDeadError("the engine is asleep")
        if self.refuses:
            raise EnginePausedError("the engine is paused, and takes no requests until it is told to resume")
        if self._suspects is not None:
            for _, request in sequences:
                self._suspects.check(request)
        if self.limit and room > self.limit:
            problem = f" asks for {room} sequences at once; this server runs and queues at most {self.limit}"
            raise InvalidRequestError([Field("n"), problem])
        named = [
            msgspec.structs.replace(request, request_id=f"{request.request_id}-{next(self._serials)}")
            for _, request in sequences
        ]
        with self._lock:
            if room and self.limit is not None and len(self._places) + room > self.limit:
                raise QueueFullError(
                    f"{len(self._places)} requests are running or waiting; at most {self.limit} are accepted. Retry "
                    "later"
                )
            if not self._places:
                self._busy_since = time.monotonic()
            for (index, request), sequence in zip(sequences, named, strict=True):
                self._places[sequence.request_id] = Place(stream, index, request)
        client = self.client
        for sequence in named:
            stream.names.append(sequence.request_id)
            try:
                client.add(sequence)
            except EngineDeadError:
                self._end_of(client)
                raise

    @property
    def step_age(self) -> float | None:
        """Seconds since the last step, or since there are requests; None without any."""
        return time.monotonic() - max(self.client.last_turn, self._busy_since) if self._places else None

    def close(self, stream: Stream) -> None:
        """Drop what of a stream has not finished; nothing more comes."""
        self._drop(stream.names)

    def abort(self, which: Stream | str) -> None:
        """End what has not finished of a stream, or of all requests of a name, with finish_reason "abort"."""
        if isinstance(which, Stream):
            names = which.names
        else:
            with self._lock:
                names = [name for name, place in self._places.items() if place.request.request_id == which]
        self._abort(names)

    def abort_all(self) -> None:
        """End all that has not finished, with finish_reason "abort"."""
        with self._lock:
            names = list(self._places)
        self._abort(names)

    def _abort(self, names: list[str]) -> None:
        dropped = self._drop(names)
        arrivals: dict[Stream, list[Gain]] = defaultdict(list)
        for stream, sequence, request in dropped:
            arrivals[stream].append((sequence, TokenDelta(request_id=request.request_id, finish_reason="abort")))
        _deliver(arrivals)

    def shutdown(self) -> None:
        """Stop the engine; streams still open end with EngineDeadError. Idempotent; no forked process does it."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        self.client.shutdown()
        if self._reader is not threading.current_thread():
            self._reader.join(POLL_SECONDS * 2)
        if self.tokenizer is not None:
            self.tokenizer.close()

    def restart(self) -> None:
        """Stop the engine, if it runs, and start it again with the same sizes. Raises what kept it from starting."""
        self.check_process()
        self.shutdown()
        self._reader.join()
        self._closing.clear()
        self._begin_with(self._start(self._closing))
        self.is_dead = False
        self._begin_reading()

    def sleep(self, *, keep: bool) -> None:
        """End the engine until `wake_up`; with `keep` it leaves its weights. Its streams end with EngineDeadError.

        Raises as `EngineClient.keep_weights`; it is asleep all the same where it has ended.
        """
        self.check_process()
        self._closing.set()
        try:
            if keep:
                self.client.keep_weights()
        finally:
            self.shutdown()
            self._reader.join()
            self.is_dead, self.is_asleep = False, True

    def wake_up(self, given_up: threading.Event, *arguments: object) -> None:
        """Start the engine again: `start(given_up, *arguments)`. Raises what kept it from starting."""
        self._begin_with(self._start(given_up, *arguments))
        self._closing.clear()
        self.is_dead = self.is_asleep = False
        self._begin_reading()

    def _begin_with(self, client: EngineClient) -> None:
        """A new engine, which is as every engine is at its start."""
        self.client = client
        self.paused, self.refuses, self.weight_version = None, False, INITIAL_VERSION

    def _end_of(self, client: EngineClient) -> None:
        """Say so at once, whoever noticed first: who is told of a death must not find the engine alive."""
        with self._lock:
            if client is self.client:
                self.is_dead = True

    def _begin_reading(self) -> None:
        self._reader = threading.Thread(target=self._read, name="outputs", daemon=True)
        self._reader.start()

    def _drop(self, names: list[str]) -> list[Place]:
        with self._lock:
            dropped = {name: self._places.pop(name) for name in names if name in self._places}
        if dropped:
            self.client.abort(list(dropped))
        return list(dropped.values())

    def _read(self) -> None:
        while True:
            try:
                self._hand_out(self.client.outputs(timeout=POLL_SECONDS))
            except EngineDeadError as error:
                self._note_death(error)
                if not (self._revived and self._revive()):
                    return

    def _hand_out(self, deltas: list[TokenDelta]) -> None:
        arrivals: dict[Stream, list[Gain]] = defaultdict(list)
        with self._lock:
            for delta in deltas:
                place = self._places.get(delta.request_id)
                if place is None:
                    continue  # its stream was closed
                if delta.finish_reason is not None:
                    del self._places[delta.request_id]
                    if delta.is_dead and delta.had_begun:
                        self._suspect([place.request])
                    elif not delta.is_dead and self._suspects is not None:
                        self._suspects.clear(place.request)
                arrivals[place.stream].append((place.sequence, delta))
        _deliver(arrivals)

    def _note_death(self, error: EngineDeadError) -> None:
        self.is_dead, self.death = True, str(error)
        with self._lock:
            streams = {place.stream for place in self._places.values()}
            self._suspect([place.request for name, place in self._places.items() if self.client.has_begun(name)])
            self._places.clear()
        for stream in streams:
            stream.failure = error
        _deliver({stream: [] for stream in streams})

    def _suspect(self, requests: Iterable[EngineRequest]) -> None:
        self._suspects = self._suspects or Suspects()
        self._suspects.note(requests)

    def _revive(self) -> bool:
        """A new engine in place of one that died; False where there is none to be had."""

        def take(client: EngineClient) -> None:
            with self._lock:
                self._begin_with(client)

        if not start_again("the engine", self._start, take, self._closing, RESTART_PAUSES):
            return False
        self.is_dead = False
        return True


class Stream:
    """The deltas of some requests, merged in the order they come, in lists of as many as there are.

    A context manager: entering queues the requests, leaving aborts what has not finished. A request with n choices is
    n sequences, which are numbered through all the requests. Made with the running event loop it is read with `next`
    or `arrivals` there; without one it is iterated over, on a thread.

    Args:
        requests: what an engine's limits let pass.
        at_once: how many sequences the engine may hold at a time; by default all.

    Raises:
        QueueFullError: on entering.
        EngineDeadError: on entering and on reading.
    """

    def __init__(
        self,
        streams: Streams,
        requests: Iterable[EngineRequest],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        at_once: int | None = None,
    ):
        ready = [settled(request, streams.client.info, streams.tokenizer) for request in requests]
        sequences = [sequence for request in ready for sequence in split_request(request)]
        self.loop = loop
        self.bell = threading.Event() if loop is None else asyncio.Event()
        """Rung when there is something to read."""
        self.inbox: deque[list[Gain]] = deque()
        self.failure: Exception | None = None
        """The error that ends the stream once its inbox is empty."""
        self.names: list[str] = []
        """The engine's names for its sequences."""
        self.num_unfinished = len(sequences)
        self._streams = streams
        self._waiting = deque(enumerate(sequences))
        self._at_once = at_once or len(sequences)

    def __enter__(self) -> Stream:
        try:
            self._begin()
        except BaseException:
            self._streams.close(self)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.close(self)

    def abort(self) -> None:
        """End what has not finished: each such sequence gets a last delta with finish_reason "abort"."""
        waiting, self._waiting = self._waiting, deque()
        self.inbox.append([(i, TokenDelta(request_id=r.request_id, finish_reason="abort")) for i, r in waiting])
        self._streams.abort(self)

    def __iter__(self) -> Iterator[list[Gain]]:
        assert isinstance(self.bell, threading.Event)
        while self.num_unfinished:
            if gains := self._take():
                yield gains
            else:
                self.bell.wait()
                self.bell.clear()  # before the inbox is looked at again: what comes now is found there

    def drive(self, take: Callable[[int, TokenDelta], bool], total: int, use_tqdm: bool) -> None:
        """Read to the end on this thread, under a progress bar of `total` requests.

        `take` is handed each delta and its sequence, and says whether that completes a request. Raises what a delta
        says is wrong.
        """
        if has_widgets():
            from tqdm.auto import tqdm
        else:
            from tqdm.std import tqdm

        generated = 0
        with self, tqdm(total=total, desc="Requests", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
            for events in self:
                for sequence, delta in events:
                    if delta.error is not None:
                        raise failure(delta)
                    generated += len(delta.token_ids)
                    if take(sequence, delta):
                        if generated:
                            speed = generated / max(bar.format_dict["elapsed"], 1e-9)
                            bar.set_postfix_str(f"{speed:,.0f} tok/s", refresh=False)
                        bar.update()

    async def arrivals(self) -> AsyncIterator[list[Gain]]:
        """All of them until everything has finished."""
        while self.num_unfinished:
            yield await self._arrival()

    async def next(self, timeout: float | None = None) -> list[Gain]:
        """The next of them; empty after `timeout` seconds without one."""
        if timeout is None:
            return await self._arrival()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self._arrival()
        return []

    async def _arrival(self) -> list[Gain]:
        assert isinstance(self.bell, asyncio.Event)
        while not (gains := self._take()):
            await self.bell.wait()
            self.bell.clear()
        return gains

    def _begin(self) -> None:
        first = self._next_waiting(self._at_once)
        self._streams.add(self, first, room=len(first))

    def _drain(self) -> list[Gain]:
        """All that has come; raises what ended the stream when there is nothing more."""
        failure, tokenizer = self.failure, self._streams.tokenizer
        gains = self.inbox.popleft() if self.inbox else []
        while self.inbox:
            gains += self.inbox.popleft()
        if failure is not None and not gains:
            raise failure
        for _, delta in gains:
            rank_vocabulary(delta)
            if tokenizer is not None:
                name_tokens(delta, tokenizer)
        return gains

    def _take(self) -> list[Gain]:
        gains = self._drain()
        finished = 0
        for _, delta in gains:
            if delta.finish_reason is not None:
                finished += 1
        self.num_unfinished -= finished
        if finished and self._waiting:
            self._streams.add(self, self._next_waiting(finished))
        return gains

    def _next_waiting(self, count: int) -> list[tuple[int, EngineRequest]]:
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]


def _deliver(arrivals: Mapping[Stream, list[Gain]]) -> None:
    """Fill the streams and wake their readers, each event loop in one hop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = defaultdict(list)
    for stream, gains in arrivals.items():
        stream.inbox.append(gains)
        if stream.loop is None:
            stream.bell.set()
        else:
            by_loop[stream.loop].append(stream.bell)  # type: ignore[arg-type]
    for loop, bells in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed, and its streams with it
            loop.call_soon_threadsafe(_set_all, bells)


def _set_all(bells: list[asyncio.Event]) -> None:
    for bell in bells:
        bell.set()
