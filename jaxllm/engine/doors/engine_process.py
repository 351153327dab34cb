"""The engine process: what goes over the pipe between it and its front door, and its side of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import msgspec

from jaxllm import logs, machine
from jaxllm.config import EngineConfig, ModelConfig
from jaxllm.engine.doors.share import Share
from jaxllm.engine.doors.thread_client import Inbox, Question, carry_out
from jaxllm.engine.messages import EngineInfo, EngineRequest, EngineStats, MemoryRoom, Order, TokenDelta
from jaxllm.engine.start.leave import leave as leave_now
from jaxllm.errors import ConfigError, EngineDeadError, JaxLLMError, one_line
from jaxllm.logs import LogSettings
from jaxllm.looking import What, look
from jaxllm.progress import watched_by
from jaxllm.sharding import nvidia

if TYPE_CHECKING:
    from jaxllm.engine.scale.data_parallel import Core
    from jaxllm.engine.scale.lockstep.leader import Leader
    from jaxllm.engine.scale.lockstep.meeting import Group

logger = logging.getLogger(__name__)

STATS_SECONDS = 0.25
LOST_SECONDS = 2.0
"""Seconds that an engine which fails waits to hear that another process of its group has died of the same."""
BEAT_SECONDS = 1.0
"""Seconds after which the process says again that it lives, whatever its loop is waiting for."""


class Started(msgspec.Struct, tag=True):
    """The loop is up."""

    info: EngineInfo


class Doing(msgspec.Struct, tag=True):
    """The progress of the start; see jaxllm.progress."""

    doing: str
    done: int
    total: int


class Planned(msgspec.Struct, tag=True):
    """It will take `nbytes`, or does not know, and waits until it may; see `MemoryRoom.ask`."""

    nbytes: int | None


class Failed(msgspec.Struct, tag=True):
    """It could not start, or it died: `kind` is an error type of jaxllm.errors where it was one."""

    kind: str
    message: str


class Outputs(msgspec.Struct, tag=True):
    """One turn's deltas, and now and then statistics."""

    deltas: list[TokenDelta]
    stats: EngineStats | None = None


class Began(msgspec.Struct, tag=True):
    """Sequences that the next step computes for the first time: said before it, which may end the process."""

    request_ids: list[str]


class Beat(msgspec.Struct, tag=True):
    """The process lives."""


class Answered(msgspec.Struct, tag=True):
    """What came of `Do`: data, or the problem that prevented it, whose `kind` is an error type of jaxllm.errors."""

    number: int
    data: bytes = b""
    kind: str = ""
    problem: str = ""


class Admit(msgspec.Struct, tag=True):
    """There is room."""


class Add(msgspec.Struct, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class Stop(msgspec.Struct, tag=True):
    pass


class Look(msgspec.Struct, tag=True):
    """Look at the process, see jaxllm.looking."""

    what: What
    seconds: float


class Do(msgspec.Struct, tag=True):
    """Look at the process, or do something between two steps; the answer has the same number."""

    number: int
    order: Look | Order


class Keep(msgspec.Struct, tag=True):
    """Leave the weights in the file that was inherited for that, and end."""


to_engine = msgspec.msgpack.Decoder(Admit | Add | Abort | Do | Keep | Stop)
FromEngine = Started | Doing | Planned | Failed | Began | Outputs | Answered | Beat
from_engine = msgspec.msgpack.Decoder(FromEngine)
encode = msgspec.msgpack.Encoder().encode


class FrontDoor:
    """The engine's end of the pipe.

    Threads of its own beat and listen from the start, so that they do while a model loads, a step is compiled, or a
    long one runs. The process ends at once when it is told to, or when the other end is closed.
    """

    def __init__(self, pipe: Connection):
        self.inbox = Inbox()
        self._pipe = pipe
        self._sending = threading.Lock()
        self._admitted = threading.Event()
        self.is_to_keep = False
        """The process is to leave its weights to the next one, and end."""
        self.leader: Leader | None = None
        """Its hold on other processes that run the model with it."""
        for target in (self._beat, self._listen):
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True).start()

    def ask_for_room(self, nbytes: int | None) -> None:
        """Returns when there is room for the engine; without any the process is ended."""
        self.send(Planned(nbytes))
        self._admitted.wait()

    def send(self, message: FromEngine) -> None:
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

    def _answer(self, asked: Do) -> None:
        """In a thread of its own: a look works whatever the loop does, and an order waits for the loop's part of it."""

        def ask(ask: Callable[[Core], Any]) -> Any:
            question = Question(ask)
            self.inbox.put(question)
            return question.answer.result()

        order, data, name = asked.order, b"", type(asked.order).__name__
        try:
            if isinstance(order, Look):
                data = look(order.what, order.seconds)
            else:
                carry_out(order, ask)
            self.send(Answered(asked.number, data))
        except JaxLLMError as error:
            self.send(Answered(asked.number, kind=type(error).__name__, problem=str(error)))
        except Exception as error:
            logger.exception("%s failed", name)
            problem = f"{name} failed: {type(error).__name__}: {one_line(error)}"
            self.send(Answered(asked.number, kind=JaxLLMError.__name__, problem=problem))

    def _listen(self) -> None:
        """Hand what comes to the loop; a message that cannot be read ends it, for no later one would be heard."""
        try:
            while not isinstance(message := to_engine.decode(self._pipe.recv_bytes()), Stop):
                if isinstance(message, Admit):
                    self._admitted.set()
                elif isinstance(message, Do):
                    threading.Thread(target=self._answer, args=(message,), name="answer", daemon=True).start()
                elif isinstance(message, Keep):
                    self.is_to_keep = True
                    self.inbox.put(None)
                else:
                    self.inbox.put(message.request if isinstance(message, Add) else message.request_ids)
        except (EOFError, OSError):
            leave("the front door is gone")
        except Exception as error:
            self.inbox.put(error)
        else:
            if self.leader is not None:
                self.leader.end()
            leave("told to stop")

    def lead(self, group: Group) -> None:
        """The process leads others, which are to end in order with it."""
        self.leader = group.leader

    def fail_to_gather(self, kind: str, message: str) -> None:
        """Another process of the group has ended. Its Leader says so, and why, once there is one."""
        if self.leader is None:
            self.send(Failed(kind, message))
            leave(message, 1)

    def end_group(self, reason: str) -> NoReturn:
        """The group is over, and this process with it. Any thread may call this."""
        self.send(Failed(EngineDeadError.__name__, reason))
        leave(reason, 1)


def leave(reason: str, status: int = 0) -> NoReturn:
    """End the process now: a compile that has begun cannot be stopped, and an ordinary exit would wait for it."""
    logger.debug("the engine process ends: %s", reason)
    leave_now(status)


@dataclass(frozen=True)
class ProcessSettings:
    """Instructions for an engine's process besides its settings.

    Attributes:
        share: its part of the machine, where it is one of several.
        kept_in: an open file, by its number: weights that another process has left there are not read from the model's
            files again, and this one leaves its own there when it is told to. Several engines share it.
        asks: whether it waits for room before it touches a device, within `budget` bytes, if there is one.
    """

    share: Share | None = None
    kept_in: int | None = None
    asks: bool = False
    budget: int | None = None


def main(pipe: Connection, config: EngineConfig, log: LogSettings, around: ProcessSettings) -> None:
    """Build the engine, then turn its loop over until the process is ended."""
    name = process_name(config, around.share)
    logs.configure(log, name)
    front_door = FrontDoor(pipe)
    file = None if around.kept_in is None else open(around.kept_in, "r+b")  # noqa: SIM115  until the process ends
    try:
        share = around.share
        if config.numa_node is not None:
            share = take_node(config.numa_node, share)
        if share is not None:
            share.take(config.num_devices)
        if config.multi_process:
            from jaxllm.engine.doors.local_group import start_followers

            config = start_followers(config, name, front_door.fail_to_gather)
        from jaxllm.compat import under_own_settings  # JAX comes with it, which the front door can do without
        from jaxllm.engine.core.device_state import Kept
        from jaxllm.engine.start.build import build_core

        kept = None if file is None else Kept(file, shared=around.share is not None)
        with watched_by(lambda *stage: front_door.send(Doing(*stage))):
            core, info = build_core(
                config,
                MemoryRoom(around.budget, front_door.ask_for_room) if around.asks else None,
                kept,
                front_door.lead,
                front_door.end_group,
            )
        front_door.send(Started(info))
        under_own_settings(run_loop)(front_door, core, file)
    except JaxLLMError as error:
        front_door.send(Failed(type(error).__name__, str(error)))
        leave("it cannot go on")
    except Exception as error:
        said = f"the engine died: {type(error).__name__}: {error}"
        if front_door.leader is not None:
            if lost := front_door.leader.reason(LOST_SECONDS):
                front_door.end_group(lost)
            front_door.leader.fail(one_line(said))
        logger.exception("the engine died")
        front_door.send(Failed("", said))
        leave("it died", 1)


def take_node(asked: int | str, share: Share | None) -> Share | None:
    """Keep this process to a NUMA node; returns its part of that node, where several engines share it.

    Raises:
        ConfigError: there is no such node, or the engine runs on GPUs.
    """
    if nvidia.used_cards():
        raise ConfigError(f"numa_node is {asked}, which is for CPUs, and this engine runs on GPUs; leave it out")
    known = machine.nodes()
    number = 0 if share is None else share.number
    node = machine.choose_node(asked, number, known)
    here = [n for n in range(1 if share is None else share.count) if machine.choose_node(asked, n, known) == node]
    machine.keep_to_node(node, known)
    logger.info("on the %d cores and the memory of NUMA node %d", len(known[node]), node)
    return Share(here.index(number), len(here), "data_parallel_size") if len(here) > 1 else None


def process_name(config: EngineConfig, share: Share | None) -> str:
    """The name of an engine's process in logs: engine/smollm2-135m, or engine/smollm2-135m/1 of several."""
    name = config.names[0] if isinstance(config, ModelConfig) else config.model
    return f"engine/{name}" + ("" if share is None else f"/{share.number}")


REST_SECONDS = 5.0
"""Seconds without work after which what the work has freed is given back to the system."""


class Rest:
    """Gives freed memory back once: when the last executable is there, and when there has been nothing to do."""

    def __init__(self) -> None:
        self._compiles = False
        self._busy_until: float | None = None

    def note(self, works: bool, compiles: bool) -> None:
        now = time.monotonic()
        ended, self._compiles = self._compiles and not compiles, compiles
        if works:
            self._busy_until = now
        rested = self._busy_until is not None and now - self._busy_until > REST_SECONDS
        if ended or rested:
            machine.return_freed_memory()
            logger.debug("gave freed memory back in %.3f s", time.monotonic() - now)
            self._busy_until = None if rested else self._busy_until


def run_loop(front_door: FrontDoor, core: Core, kept: BinaryIO | None = None) -> NoReturn:
    """Call `core` for as long as the process lives. Raises what ends it."""
    core.when_prepared(lambda: front_door.inbox.put(None))
    core.on_begin = lambda request_ids: front_door.send(Began(request_ids))
    last, load, rest = 0.0, (0, 0), Rest()
    while True:
        front_door.inbox.drain(core, wait=not core.has_work)
        if front_door.is_to_keep:
            assert kept is not None, "who says so has a file for it"
            core.keep_weights(kept)
            leave("its weights are kept")
        deltas = core.turn() if core.has_work else []
        due = core.load != load or time.monotonic() - last > STATS_SECONDS
        stats = core.stats() if due else None
        if deltas or due:
            front_door.send(Outputs(deltas, stats))
        if stats is not None:
            last, load = time.monotonic(), core.load
            rest.note(core.has_work, stats.compiles_pending > 0)
