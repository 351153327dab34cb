"""How the processes of a group find each other: before JAX starts, so that whatever is wrong is said in one line."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from jaxllm.config import EngineConfig
from jaxllm.engine.scale.lockstep import messages
from jaxllm.engine.scale.lockstep.follower import Follower, connected
from jaxllm.engine.scale.lockstep.leader import Leader, Member
from jaxllm.engine.scale.lockstep.messages import BEAT_SECONDS, MEETING_SECONDS, SILENT_SECONDS
from jaxllm.errors import ConfigError, reason
from jaxllm.progress import tell
from jaxllm.sharding.clusters import split_address
from jaxllm.sharding.wire import (
    Wire,
    WireError,
    accept_each,
    admit,
    free_port,
    group_secret,
    interrupt,
    introduce,
    machine_name,
)

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
MOST_STRANGERS = 64


@dataclass(frozen=True)
class Group:
    """A process's place among the others, all of whom have come."""

    hold: Leader | Follower
    number: int
    count: int
    address: str
    place: int
    """Among the `neighbours` on its machine."""
    neighbours: int

    @property
    def leader(self) -> Leader | None:
        return self.hold if isinstance(self.hold, Leader) else None


def meet(config: EngineConfig, agreement: dict[str, str], on_broken: Callable[[str], None]) -> Group:
    """Wait until all processes of `config` have come and agree.

    `agreement` must be the same in all, in words, by its name. `on_broken` is called with a reason when the group is
    over, in any thread; it ends the process. Raises ConfigError: one does not come in time, has another secret, or
    differs.
    """
    if config.process_id == 0:
        return _Meeting(config, agreement).wait(on_broken)
    return _join(config, agreement, on_broken)


class _Meeting:
    """Process 0 while it waits for the others: strangers are turned away, and do not disturb it."""

    def __init__(self, config: EngineConfig, agreement: dict[str, str]):
        assert config.num_processes is not None and config.coordinator_address is not None
        self._count = config.num_processes
        self._host, port = split_address(config.coordinator_address)
        self._agreement = agreement
        self._secret = group_secret(config.cluster_secret)
        self._members: dict[int, Member] = {}
        self._problem: str | None = None
        self._changed = threading.Condition()
        self._listener = _listen(self._host, port)
        self._address = config.coordinator_address

    def wait(self, on_broken: Callable[[str], None]) -> Group:
        accept = partial(accept_each, self._listener, MOST_STRANGERS, "hello", self._receive)
        threading.Thread(target=accept, name="meeting", daemon=True).start()
        logger.info("waiting for %d other processes at %s", self._count - 1, self._address)
        tell("Waiting for the other processes")
        try:
            with self._changed:
                for _ in range(int(MEETING_SECONDS / BEAT_SECONDS) + 1):
                    if self._changed.wait_for(lambda: self._problem or not self._missing(), BEAT_SECONDS):
                        break
                    self._say(messages.Pulse())
        finally:
            interrupt(self._listener)  # and with it the thread that accepts
            self._listener.close()
        if self._problem is None and (missing := self._missing()):
            self._problem = (
                f"num_processes is {self._count}, and process {missing[0]} has not come to {self._address} within "
                f"{MEETING_SECONDS:g} seconds"
            )
        if self._problem is not None:
            self._say(messages.Refused(self._problem))
            raise ConfigError(self._problem)
        return self._begin(on_broken)

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._count) if number not in self._members]

    def _say(self, message: messages.FromLeader) -> None:
        for member in self._members.values():
            with suppress(OSError):  # it has gone meanwhile, as the Leader is about to find out
                member.wire.send(message)

    def _begin(self, on_broken: Callable[[str], None]) -> Group:
        machine = machine_name()[1]
        members = [self._members[number] for number in range(1, self._count)]
        machines = [machine, *(member.hello.machine for member in members)]
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{free_port('')}"
        for number, member in enumerate(members, 1):
            place = machines[:number].count(machines[number])
            with suppress(OSError):  # it has gone meanwhile, as the Leader is about to find out
                member.wire.send(messages.Welcome(address, place, machines.count(machines[number])))
        leader = Leader(members, on_broken)
        return Group(leader, 0, self._count, address, 0, machines.count(machine))

    def _receive(self, connection: socket.socket, source: str) -> None:
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            if not admit(connection, self._secret):
                logger.warning("a process at %s was turned away: its cluster_secret is another", source)
                connection.close()
                return
            wire: Wire[messages.FromFollower] = Wire(connection, messages.FromFollower)
            hello, _ = wire.receive(HANDSHAKE_SECONDS)
            if isinstance(hello, messages.Hello):
                self._take(Member(hello, wire))
        except (OSError, WireError) as error:
            logger.warning("a connection from %s was closed before it said who it is: %s", source, error)
            connection.close()

    def _take(self, member: Member) -> None:
        with self._changed:
            number, is_there = member.hello.number, member.hello.number in self._members
            if not 0 < number < self._count or is_there:
                found = "there is one already" if is_there else f"accepted is 1 to {self._count - 1}"
                member.wire.send(messages.Refused(f"process_id is {number}, and {found}"))
                member.wire.close()
                return
            self._members[number] = member
            self._problem = self._problem or messages.difference(self._agreement, member.hello.agreement, str(member))
            self._changed.notify_all()


def _join(config: EngineConfig, agreement: dict[str, str], on_broken: Callable[[str], None]) -> Group:
    assert config.num_processes is not None and config.process_id is not None
    assert config.coordinator_address is not None
    where = f"process 0 at {config.coordinator_address}"
    secret = group_secret(config.cluster_secret)
    logger.info("process %d of %d looks for %s", config.process_id, config.num_processes, where)
    deadline = time.monotonic() + MEETING_SECONDS
    try:
        connection = connected(split_address(config.coordinator_address), deadline)
        connection.settimeout(HANDSHAKE_SECONDS)
        if not introduce(connection, secret):
            raise ConfigError(f"cluster_secret is not that of {where}")
    except OSError as error:
        raise ConfigError(f"{where} cannot be reached: {reason(error)}") from None
    wire: Wire[messages.FromLeader] = Wire(connection, messages.FromLeader)
    host, machine = machine_name()
    try:
        wire.send(messages.Hello(config.process_id, host, machine, agreement))
        answer: messages.FromLeader = messages.Pulse()
        while isinstance(answer, messages.Pulse):
            answer, _ = wire.receive(SILENT_SECONDS)
    except (OSError, WireError) as error:
        raise ConfigError(f"{where} has stopped before all processes came: {error}") from None
    if isinstance(answer, messages.Refused):
        raise ConfigError(answer.reason)
    if not isinstance(answer, messages.Welcome):
        raise ConfigError(f"{where} sent {type(answer).__name__} where Welcome was due")
    follower = Follower(wire, on_broken)
    return Group(follower, config.process_id, config.num_processes, answer.address, answer.place, answer.neighbours)


def _listen(host: str, port: int) -> socket.socket:
    """On the loopback interface alone where the others are to reach it there."""
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        loopback = str(address) == "::1" or str(address).startswith("127.")
        return socket.create_server((str(address) if loopback else "", port), family=family)
    except OSError as error:
        why = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else reason(error)
        raise ConfigError(f"coordinator_address is {host}:{port}, where process 0 cannot listen: {why}") from None
