"""A process that follows process 0: it runs the steps that it is sent, and says that it lives."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxllm import compat
from jaxllm.engine.core.device import Device
from jaxllm.engine.core.keys import Key
from jaxllm.engine.scale.lockstep import messages
from jaxllm.engine.scale.lockstep.leader import digest_of, is_there
from jaxllm.engine.scale.lockstep.messages import BEAT_SECONDS, CHECKED_STEPS, SILENT_SECONDS, SILENT_START_SECONDS
from jaxllm.engine.scale.staged_device import Stages
from jaxllm.errors import ConfigError, EngineDeadError, one_line
from jaxllm.sharding.wire import Wire, WireError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Follower:
    """The connection to process 0. A thread says that this process lives, and what its last tokens were; another hears
    process 0, and ends this process where that is gone or silent, also while a step waits for it in C++.
    """

    def __init__(self, wire: Wire[messages.FromLeader], leave: Callable[[str], None]):
        """`leave` ends the process with a reason, in any thread."""
        self._wire = wire
        self._leave = leave
        self._steps = self._sampled = 0
        self._unchecked: tuple[int, Any] | None = None
        self._has_ended = False
        self._leaving = ""
        self._deadline = float("inf")
        self._bell = threading.Event()
        self._starting = True
        self._heard: queue.SimpleQueue[tuple[messages.FromLeader, list[Any]] | EngineDeadError] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="leader", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    @property
    def own_hosts(self) -> list[str]:
        return [self._wire.own_host]

    def ask(self, message: Any, kind: type[Answer]) -> Answer:
        """Wait for an answer of a kind. Raises ConfigError: there can be no group; EngineDeadError: it is over."""
        self.say(message)
        while True:
            answer, _ = self._next()
            match answer:
                case messages.Pulse():
                    continue
                case messages.Refused(reason):
                    raise ConfigError(reason)
                case messages.End(reason):
                    raise EngineDeadError(reason or "process 0 was stopped while the group started")
            if not isinstance(answer, kind):
                raise EngineDeadError(f"process 0 sent {type(answer).__name__} where {kind.__name__} was due")
            return answer

    def say(self, message: Any) -> None:
        """Tell process 0 something. Any thread may call this."""
        try:
            self._wire.send(message)
        except OSError as error:
            raise EngineDeadError("process 0 is gone") from error

    def have(self, key: Key) -> None:
        """This process has an executable. Any thread may call this."""
        self.say(messages.HasExecutable(key))

    def fail(self, reason: str) -> None:
        self.say(messages.MemberFailed(reason))

    def stop_within(self, seconds: float, reason: str) -> None:
        """Leave when process 0 ends the group, or after that time. A signal's handler may call this."""
        self._leaving, self._deadline = reason, time.monotonic() + seconds
        self._bell.set()

    def lost(self, patience: float) -> str:
        """Why the group is over, if process 0 says so or is gone within `patience` seconds; else empty."""
        deadline = time.monotonic() + patience
        try:
            while (left := deadline - time.monotonic()) > 0:
                message, _ = self._next(left)
                if isinstance(message, messages.End):
                    return message.reason
        except EngineDeadError as error:
            return str(error)
        except queue.Empty:
            pass
        return ""

    def follow(self, device: Device | Stages) -> str:
        """Run steps until process 0 ends the group, and give its reason. Raises EngineDeadError: gone, silent, or a
        gap.
        """
        self._starting = False
        while True:
            message, arrays = self._next()
            match message:
                case messages.RunStep(number, key):
                    self._steps += 1
                    if number != self._steps:
                        raise EngineDeadError(f"process 0 sent step {number} where step {self._steps} was due")
                    self._note(device.run(key, *arrays))
                case messages.CompileNow(key):
                    threading.Thread(target=self._compile, args=(device, key), name="compile-now", daemon=True).start()
                case messages.End(reason):
                    self._has_ended = True
                    if not reason:
                        device.wait()
                        self.say(messages.Left())
                    return reason
                case messages.Pulse():
                    pass
                case _:
                    raise EngineDeadError(f"process 0 sent {type(message).__name__} where a step was due")

    def _compile(self, device: Device | Stages, key: Key) -> None:
        try:
            device.compile(key)
        except Exception as error:
            self._give_up(f"{key} cannot be compiled", error)

    def _give_up(self, what: str, error: Exception) -> None:
        reason = f"{what}: {type(error).__name__}: {one_line(error)}"
        with contextlib.suppress(EngineDeadError):  # process 0 is gone too, and this one ends either way
            self.fail(reason)
        self._leave(reason)

    def _note(self, output: Any) -> None:
        tokens = getattr(output, "tokens", None)
        self._sampled += tokens is not None
        if tokens is not None and self._sampled % CHECKED_STEPS == 0:
            self._unchecked = self._steps, tokens

    def _next(self, patience: float | None = None) -> tuple[messages.FromLeader, list[Any]]:
        """What process 0 has said next. Raises EngineDeadError where it says no more, and queue.Empty."""
        heard = self._heard.get(timeout=patience)
        if isinstance(heard, EngineDeadError):
            raise heard
        return heard

    def _listen(self) -> None:
        silent = 0.0
        while True:
            try:
                heard = self._wire.receive(SILENT_SECONDS)
            except TimeoutError:
                silent += SILENT_SECONDS
                if self._starting and silent < SILENT_START_SECONDS and compat.coordinator_answers(seconds=3):
                    continue  # it is busy; waiting is in all shorter than JAX's heartbeat, which aborts a process
                problem = f"process 0 has said nothing for {silent:g} seconds"
            except OSError:
                problem = "process 0 is gone"
            except WireError as error:
                problem = f"process 0 cannot be understood: {error}"
            else:
                silent = 0.0
                self._heard.put(heard)
                if isinstance(heard[0], messages.End | messages.Refused):
                    return
                continue
            self._heard.put(EngineDeadError(problem))
            self._leave(problem)
            return

    def _beat(self) -> None:
        said = False
        while True:
            self._bell.wait(BEAT_SECONDS)
            self._bell.clear()
            if self._has_ended:
                return
            try:
                if self._leaving and not said:
                    self.say(messages.Leaving(self._leaving))
                    said = True
                if self._unchecked is not None and is_there(self._unchecked[1]):
                    (number, tokens), self._unchecked = self._unchecked, None
                    self.say(messages.TokenDigest(number, digest_of(tokens)))
                self.say(messages.Pulse())
            except EngineDeadError as error:
                if not self._has_ended:
                    self._leave(str(error))
                return
            except jax.errors.JaxRuntimeError as error:
                self._give_up("a step has failed", error)
                return
            if time.monotonic() > self._deadline:
                self._leave(f"told to stop ({self._leaving})")


def connected(address: tuple[str, int], deadline: float) -> socket.socket:
    """A connection to process 0, which may not be there yet. Raises OSError where it does not come in time."""
    while True:
        try:
            return socket.create_connection(address, timeout=10)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
