"""Process 0's hold on those that follow it."""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm import compat
from jaxllm.engine.core.device import Device
from jaxllm.engine.core.keys import Key
from jaxllm.engine.scale.lockstep import messages
from jaxllm.engine.scale.lockstep.messages import BEAT_SECONDS, CHECKED_STEPS, SILENT_SECONDS, SILENT_START_SECONDS
from jaxllm.engine.scale.staged_device import StagedDevice
from jaxllm.errors import EngineDeadError
from jaxllm.sharding.wire import Wire, WireError, frame

logger = logging.getLogger(__name__)

END_SECONDS = 3.0
"""For the others to leave when the group ends."""
KEPT_OUTPUTS = 64
"""Steps whose tokens are kept until the others have said what theirs were."""


class Member:
    """A process that follows. `str` is what messages call it."""

    def __init__(self, hello: messages.Hello, wire: Wire[messages.FromFollower]):
        self.hello = hello
        self.wire = wire
        self.answers: queue.SimpleQueue[messages.MemberAnswer | None] = queue.SimpleQueue()
        self.leaves = ""
        self.has_left = False
        self.heard_of_end, self.gone = threading.Event(), threading.Event()
        """Both are set where it is gone without having heard of the end."""

    def __str__(self) -> str:
        return f"process {self.hello.number} on {self.hello.host}"


class Leader:
    """Sends steps to all members, and watches that they live and keep up.

    Where one dies, falls silent or comes to other results, `on_broken` is called once with the reason, in any thread:
    the group is over then, and JAX itself would end the process a little later.
    """

    def __init__(self, members: Sequence[Member], on_broken: Callable[[str], None]):
        self.on_broken = on_broken
        self.starting = True
        self._members = list(members)
        self._steps = self._sampled = 0
        self._outputs: deque[tuple[int, Any]] = deque(maxlen=KEPT_OUTPUTS)
        self.makers: Callable[[Key], Mapping[Key, int]] = lambda key: {key: len(self._members)}
        self._have: dict[Key, int] = {}
        self._changed = threading.Condition()
        self._broken = ""
        self._failed = False
        self._ended = threading.Event()
        for member in self._members:
            name = f"member-{member.hello.number}"
            threading.Thread(target=self._listen, args=(member,), name=name, daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    @property
    def own_hosts(self) -> list[str]:
        return [member.wire.own_host for member in self._members]

    def collect(self, kind: type) -> dict[str, Any]:
        """The next answer of each member, by what messages call it. Raises EngineDeadError where the group is over."""
        found = {}
        for member in self._members:
            answer = member.answers.get()
            if answer is None:
                raise self._ending
            if not isinstance(answer, kind):
                self._break(f"{member} sent {type(answer).__name__} where {kind.__name__} was due")
                raise EngineDeadError(self._broken)
            found[str(member)] = answer
        return found

    def tell(self, message: Any) -> None:
        self._send(frame(message))

    def send(self, key: Key, vectors: Sequence[Any]) -> None:
        """Have all others run a step; call it before the step is run here, on one thread."""
        self._steps += 1
        self._send(frame(messages.RunStep(self._steps, key), vectors))

    def note(self, output: Any) -> None:
        """What the last step gave here, if it gave tokens: now and then they are compared with the others'."""
        tokens = getattr(output, "tokens", None)
        self._sampled += tokens is not None
        if tokens is not None and self._sampled % CHECKED_STEPS == 0:
            with self._changed:
                self._outputs.append((self._steps, tokens))

    def has(self, key: Key) -> bool:
        """Whether all others have what they run of a step."""
        return all(self._have.get(part, 0) == count for part, count in self.makers(key).items())

    def wait_for(self, keys: Iterable[Key]) -> None:
        """Have all others get these executables ready, and wait. Raises EngineDeadError where the group is over."""
        for key in keys:
            if not self.has(key):
                self.tell(messages.CompileNow(key))
                with self._changed:
                    self._changed.wait_for(lambda: self.has(key) or self._is_over)  # noqa: B023
                if not self.has(key):
                    raise self._ending

    @property
    def _is_over(self) -> bool:
        return bool(self._broken) or self._ended.is_set()

    @property
    def _ending(self) -> EngineDeadError:
        return EngineDeadError(self._broken or "the group has ended")

    def begin(self, keys: Iterable[Key]) -> None:
        """Wait until all others have these executables and can run steps: the start is over."""
        self.collect(messages.Follows)
        self.wait_for(keys)
        self.starting = False

    def reason(self, patience: float) -> str:
        """Why the group is over, if that is found out within `patience` seconds; else empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._broken), patience)
        return self._broken

    def fail(self, reason: str) -> None:
        """Tell the others that this process cannot go on. Any thread may call it."""
        if self._begin_to_end():
            self._failed = True
            self._tell_rest(reason)

    def end(self) -> None:
        """Tell the others that the group ends, and wait until they have left. Any thread may call it; idempotent."""
        if not self._begin_to_end():
            return
        deadline = time.monotonic() + END_SECONDS
        self._tell_rest("")
        for member in self._members:
            if not member.heard_of_end.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("%s has not left", member)
        if all(member.has_left for member in self._members):
            compat.leave_processes()  # which holds up this whole process until the others do so too
            for member in self._members:
                member.gone.wait(max(0.0, deadline - time.monotonic()))

    def _begin_to_end(self) -> bool:
        with self._changed:
            if self._is_over:
                return False
            self._ended.set()
            self._changed.notify_all()
            return True

    def _send(self, data: bytes) -> None:
        if self._is_over:
            raise self._ending
        for member in self._members:
            try:
                member.wire.send_frame(data)
            except OSError as error:
                self._lose(member, error)
                raise EngineDeadError(self._broken) from error

    def _tell_rest(self, reason: str) -> None:
        for member in self._members:
            try:
                member.wire.send(messages.End(reason))
            except OSError:
                logger.debug("%s is gone", member)

    def _beat(self) -> None:
        while not (self._ended.wait(BEAT_SECONDS) or self._broken):
            for member in self._members:
                try:
                    member.wire.send(messages.Pulse())
                except OSError as error:
                    self._lose(member, error)
                    return

    def _listen(self, member: Member) -> None:
        try:
            while True:
                message, _ = member.wire.receive(SILENT_START_SECONDS if self.starting else SILENT_SECONDS)
                self._take(member, message)
        except (OSError, WireError) as error:
            self._lose(member, error)
        finally:
            member.gone.set()
            member.heard_of_end.set()
            member.answers.put(None)

    def _take(self, member: Member, message: messages.FromFollower) -> None:
        match message:
            case messages.HasExecutable(key):
                with self._changed:
                    self._have[key] = self._have.get(key, 0) + 1
                    self._changed.notify_all()
            case messages.TokenDigest(number, digest):
                self._compare(member, number, digest)
            case messages.MemberFailed(reason):
                self._break(f"{member} has failed: {reason}")
            case messages.Leaving(reason):
                member.leaves = reason
                logger.warning("%s was told to stop (%s)", member, reason)
            case messages.MemberMemory() | messages.TransferAddress() | messages.MemberPlan() | messages.Follows():
                member.answers.put(message)
            case messages.Hello():
                self._break(f"{member} introduced itself twice")
            case messages.Left():
                member.has_left = True
                member.heard_of_end.set()
            case messages.Pulse():
                pass

    def _compare(self, member: Member, number: int, digest: int) -> None:
        with self._changed:
            tokens = next((tokens for step, tokens in self._outputs if step == number), None)
        try:
            differs = tokens is not None and digest_of(tokens) != digest
        except jax.errors.JaxRuntimeError:
            return  # the step has failed here, which the engine's loop is about to find as well
        if differs:
            self._break(f"{member} came to other tokens at step {number}, so that the group no longer is one")

    def _lose(self, member: Member, error: Exception) -> None:
        if self._failed or member.has_left:
            return
        if member.leaves:
            self._break(f"{member} was told to stop ({member.leaves}) and has left")
        elif isinstance(error, TimeoutError):
            silent = SILENT_START_SECONDS if self.starting else SILENT_SECONDS
            self._break(f"{member} has said nothing for {silent:g} seconds")
        elif isinstance(error, WireError):
            self._break(f"{member} cannot be understood: {error}")
        else:
            self._break(f"{member} is gone")

    def _break(self, reason: str) -> None:
        with self._changed:
            if self._broken:
                return
            self._broken = f"{reason}; the group has ended"
            self._changed.notify_all()
        self._tell_rest(self._broken)
        self.on_broken(self._broken)


def is_there(tokens: Any) -> bool:
    """Whether a step has run, so that its tokens can be read without waiting."""
    return not isinstance(tokens, jax.Array) or tokens.is_ready()  # type: ignore[attr-defined]


def digest_of(tokens: Any) -> int:
    """Of the tokens of a step, which every process has; waits until the step has run."""
    return zlib.crc32(np.asarray(tokens).tobytes())


class LeadingDevice(Device):
    """Each step is sent to the other processes before it runs here."""

    def __init__(self, leader: Leader, *parts: Any):
        super().__init__(*parts)
        self._leader = leader
        self._between_steps = threading.Lock()

    def run(self, key: Key, *vectors: Any) -> Any:
        with self._between_steps:
            self._leader.send(key, vectors)
            output = super().run(key, *vectors)
            self._leader.note(output)
            return output

    def compile(self, key: Key) -> None:
        super().compile(key)
        self._leader.wait_for([key])

    def close(self) -> None:
        super().close()
        free = self._between_steps.acquire(timeout=END_SECONDS)  # a step that others run and this one does not hangs
        try:
            self._leader.end()
        finally:
            if free:
                self._between_steps.release()


class LeadingStages(LeadingDevice, StagedDevice):
    """The same of a model in stages, of which other processes have some or parts."""
