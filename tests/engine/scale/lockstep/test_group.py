"""Processes meet, agree, run the same steps, and say why where they no longer can; each one here is a thread."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxllm import compat
from jaxllm.config import EngineConfig
from jaxllm.engine.core.keys import Key
from jaxllm.engine.scale.lockstep import follower, leader, meeting
from jaxllm.engine.scale.lockstep.follower import Follower
from jaxllm.engine.scale.lockstep.leader import Leader
from jaxllm.engine.scale.lockstep.meeting import Group, meet
from jaxllm.engine.scale.lockstep.messages import CHECKED_STEPS, Agreed, Follows, MemberPlan, Pulse, RunStep
from jaxllm.errors import ConfigError, EngineDeadError
from jaxllm.sharding.wire import frame
from tests.sharding.ports import free_port

PATIENCE = 10.0
DECODE = Key("decode", 4)


class Tokens(NamedTuple):
    tokens: np.ndarray


class EchoDevice:
    """Gives the tokens that it is sent, and keeps them."""

    def __init__(self) -> None:
        self.run_so_far: list[tuple[Key, list[int]]] = []

    def run(self, key: Key, tokens: np.ndarray) -> Tokens:
        self.run_so_far.append((key, tokens.tolist()))
        return Tokens(tokens)

    def wait(self) -> None:
        pass

    def compile(self, key: Key) -> None:
        self.run_so_far.append((key, []))


@pytest.fixture(autouse=True)
def no_jax_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "leave_processes", lambda: None)


def config_of(number: int, port: int, count: int = 2, **fields: Any) -> EngineConfig:
    place = {"num_processes": count, "process_id": number, "coordinator_address": f"127.0.0.1:{port}"}
    return EngineConfig(**({"tensor_parallel_size": count, "cluster_secret": "s"} | place | fields))


class Met(NamedTuple):
    groups: list[Group]
    ends: list[list[str]]
    """Of each process why its group is over."""

    @property
    def leader(self) -> Leader:
        assert isinstance(self.groups[0].hold, Leader)
        return self.groups[0].hold

    def follower(self, number: int = 1) -> Follower:
        hold = self.groups[number].hold
        assert isinstance(hold, Follower)
        return hold


@contextmanager
def met(count: int = 2) -> Iterator[Met]:
    port, ends = free_port(), [[] for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        coming = [
            pool.submit(meet, config_of(number, port, count), {"a": "1"}, ends[number].append)
            for number in reversed(range(count))
        ]
        group = Met([one.result(PATIENCE) for one in reversed(coming)], ends)
    yield group
    group.leader.fail("the test is over")


def following(group: Met, device: Any, number: int = 1) -> Future[str]:
    """What a follower's loop comes to, in a thread."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(group.follower(number).follow(device))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def soon(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_all_run_the_steps_in_their_order_until_the_end() -> None:
    with met(3) as group:
        devices = [EchoDevice(), EchoDevice()]
        ends = [following(group, device, number) for number, device in enumerate(devices, 1)]
        assert [(one.number, one.count, one.place, one.neighbours) for one in group.groups] == [
            (0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3),
        ]  # fmt: skip
        for number in range(40):
            group.leader.send(DECODE, [np.full(4, number, np.int32)])
        group.leader.end()
        assert [end.result(PATIENCE) for end in ends] == ["", ""]
        for device in devices:
            assert device.run_so_far == [(DECODE, [number] * 4) for number in range(40)]
        with pytest.raises(EngineDeadError):
            group.leader.send(DECODE, [])


def test_an_end_that_one_does_not_live_to_see_is_none_in_order() -> None:
    """What one process has died of may end the other's loop before it hears that it is gone."""
    with met() as group:
        group.follower()._wire.close()
        group.leader.end()
        (reason,) = soon(lambda: group.ends[0])
        assert re.fullmatch(r"process 1 on \S+ is gone; the group has ended", reason)


def test_only_what_all_have_is_ready() -> None:
    with met(3) as group:
        device = EchoDevice()
        following(group, device)
        group.follower(1).have(DECODE)
        soon(lambda: group.leader._have.get(DECODE))
        assert not group.leader.has(DECODE)
        waiting = ThreadPoolExecutor(1).submit(group.leader.wait_for, [DECODE])
        soon(lambda: device.run_so_far == [(DECODE, [])])  # who waits for it has the others hurry
        assert not waiting.done()
        group.follower(2).have(DECODE)
        waiting.result(PATIENCE)
        assert group.leader.has(DECODE)


def test_what_each_says_is_collected_and_answered() -> None:
    with met() as group, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(group.follower().ask, MemberPlan({"a": "b"}), Agreed)
        (planned,) = group.leader.collect(MemberPlan).values()
        assert planned.manifest == {"a": "b"} and not answer.done()
        group.leader.tell(Agreed())
        assert answer.result(PATIENCE) == Agreed()
        group.follower().say(Follows())
        group.leader.begin([])


@pytest.mark.parametrize("alike", [True, False])
def test_other_tokens_end_the_group(alike: bool) -> None:
    class Wrong(EchoDevice):
        def run(self, key: Key, tokens: np.ndarray) -> Tokens:
            return super().run(key, tokens if alike else tokens + 1)

    with met() as group:
        following(group, Wrong())
        for number in range(CHECKED_STEPS):
            tokens = np.full(4, number, np.int32)
            group.leader.send(DECODE, [tokens])
            group.leader.note(Tokens(tokens))
        if alike:
            soon(lambda: group.follower()._unchecked is None and group.follower()._sampled == CHECKED_STEPS)
            group.leader.end()
            assert group.ends == [[], []]
        else:
            (reason,) = soon(lambda: group.ends[0])
            assert re.fullmatch(
                r"process 1 on \S+ came to other tokens at step 16, so that the group no longer is one; the group has "
                r"ended",
                reason,
            )


def test_a_gap_between_steps_is_noticed() -> None:
    with met() as group:
        end = following(group, EchoDevice())
        group.leader.tell(RunStep(2, DECODE))
        with pytest.raises(EngineDeadError, match="process 0 sent step 2 where step 1 was due"):
            end.result(PATIENCE)


def test_who_cannot_go_on_says_why() -> None:
    with met(3) as group:
        other = following(group, EchoDevice(), 2)
        group.follower().fail("no memory is left")
        (reason,) = soon(lambda: group.ends[0])
        assert re.fullmatch(r"process 1 on \S+ has failed: no memory is left; the group has ended", reason)
        assert other.result(PATIENCE) == reason
        with pytest.raises(EngineDeadError, match="no memory is left"):
            group.leader.send(DECODE, [])
        assert group.leader.reason(0) == reason


def test_an_executable_that_one_cannot_compile_ends_the_group() -> None:
    """The request that waits for it would wait for ever."""

    class Unable(EchoDevice):
        def compile(self, key: Key) -> None:
            raise MemoryError("too large")

    with met() as group:
        following(group, Unable())
        with pytest.raises(EngineDeadError, match="decode-4 cannot be compiled: MemoryError: too large"):
            group.leader.wait_for([DECODE])
        assert soon(lambda: group.ends[1]) == ["decode-4 cannot be compiled: MemoryError: too large"]


def test_a_process_that_is_gone_ends_the_group() -> None:
    with met() as group:
        group.follower()._wire.close()
        (reason,) = soon(lambda: group.ends[0])
        assert re.fullmatch(r"process 1 on \S+ is gone; the group has ended", reason)
        with pytest.raises(EngineDeadError, match="is gone"):
            group.leader.wait_for([DECODE])


def test_a_silent_follower_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "SILENT_START_SECONDS", 0.4)
    monkeypatch.setattr(follower, "BEAT_SECONDS", 60)
    with met() as group:
        end = following(group, EchoDevice())
        (reason,) = soon(lambda: group.ends[0])
        assert "has said nothing for 0.4 seconds" in reason and end.result(PATIENCE) == reason


def test_a_silent_leader_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENT_START_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(follower, name, 0.4)
    monkeypatch.setattr(leader, "BEAT_SECONDS", 60)
    with met() as group:
        end = following(group, EchoDevice())
        silent = "process 0 has said nothing for 0.4 seconds"
        assert str(end.exception(PATIENCE)) == silent and soon(lambda: group.ends[1]) == [silent]


def test_a_leader_that_is_silent_while_its_coordinator_answers_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(follower, "SILENT_START_SECONDS", 0.7)
    monkeypatch.setattr(leader, "BEAT_SECONDS", 60)
    monkeypatch.setattr(compat, "coordinator_answers", lambda seconds: True)
    with met() as group:
        assert soon(lambda: group.ends[1]) == ["process 0 has said nothing for 0.8 seconds"]


def test_process_0_beats_while_it_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SILENT_SECONDS", 0.5)
    port, ends = free_port(), [[], []]
    with ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(meeting, "MEETING_SECONDS", 1.5)
        monkeypatch.setattr(meeting, "BEAT_SECONDS", 0.1)
        both = [threads.submit(meet, config_of(n, port, 3), {}, ends[n].append) for n in range(2)]
        for one in both:
            with pytest.raises(ConfigError, match="process 2 has not come"):
                one.result(PATIENCE)
        monkeypatch.setattr(meeting, "MEETING_SECONDS", 2.0)
        monkeypatch.setattr(meeting, "BEAT_SECONDS", 1.0)
        both = [threads.submit(meet, config_of(n, port, 3), {}, ends[n].append) for n in range(2)]
        with pytest.raises(ConfigError, match=r"process 0 at \S+ has stopped before all processes came: timed out"):
            both[1].result(PATIENCE)


@pytest.mark.parametrize(
    ("silent", "reason"), [(True, "process 0 has said nothing for 0.4 seconds"), (False, "is gone")]
)
def test_a_process_leaves_without_its_leader_while_a_step_hangs(
    monkeypatch: pytest.MonkeyPatch, silent: bool, reason: str
) -> None:
    """A collective waits for a process 0 that was stopped."""
    for module in (leader, follower):
        monkeypatch.setattr(module, "BEAT_SECONDS", 60)
    for name in ("SILENT_START_SECONDS", "SILENT_SECONDS") if silent else ():
        monkeypatch.setattr(follower, name, 0.4)
    hangs = threading.Event()

    class Hangs(EchoDevice):
        def run(self, key: Key, tokens: np.ndarray) -> Tokens:
            hangs.wait(PATIENCE)
            return super().run(key, tokens)

    with met() as group:
        end = following(group, Hangs())
        group.leader.send(DECODE, [np.zeros(4, np.int32)])
        if not silent:
            group.leader._members[0].wire.close()
        (said,) = soon(lambda: group.ends[1])
        assert reason in said and not end.done()
        hangs.set()


def test_beats_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (leader, follower):
        monkeypatch.setattr(module, "SILENT_SECONDS", 5.0)
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    with met() as group:
        end = following(group, EchoDevice())
        heard: list[Any] = []
        take = group.leader._take
        group.leader._take = lambda member, message: (heard.append(message), take(member, message))[1]  # type: ignore[method-assign]
        soon(lambda: heard.count(Pulse()) > 2)
        assert not end.done() and group.ends == [[], []]


def test_who_is_told_to_stop_says_so_and_leaves_in_time() -> None:
    with met() as group:
        group.follower().stop_within(0.1, "SIGTERM")
        assert soon(lambda: group.ends[1]) == ["told to stop (SIGTERM)"]
        group.follower()._wire.close()
        (reason,) = soon(lambda: group.ends[0])
        assert re.fullmatch(r"process 1 on \S+ was told to stop \(SIGTERM\) and has left; the group has ended", reason)


def refused(*others: tuple[EngineConfig, dict[str, str]]) -> list[str]:
    """Why there is no group of these."""
    with ThreadPoolExecutor(len(others)) as pool:
        coming = [pool.submit(meet, config, agreement, lambda reason: None) for config, agreement in others]
        return [str(one.exception(PATIENCE)) for one in coming]


def test_a_difference_is_said_on_both_sides() -> None:
    port = free_port()
    said = refused((config_of(0, port), {"dtype": "'float32'"}), (config_of(1, port), {"dtype": "'auto'"}))
    assert len(set(said)) == 1
    assert re.fullmatch(
        r"dtype is 'auto' in process 1 on \S+ and 'float32' in process 0: all must have the same", said[0]
    )


def test_a_wrong_secret_is_turned_away_and_the_right_one_still_comes_in(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, config_of(0, port), {}, lambda reason: None)
        (said,) = refused((config_of(1, port, cluster_secret="guessed"), {}))
        assert said == f"cluster_secret is not that of process 0 at 127.0.0.1:{port}"
        meet(config_of(1, port), {}, lambda reason: None)
        hold = first.result(PATIENCE).leader
    assert hold is not None
    hold.fail("the test is over")
    assert "a process at 127.0.0.1 was turned away: its cluster_secret is another" in caplog.text


def test_strangers_do_not_disturb_a_meeting() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, config_of(0, port), {}, lambda reason: None)
        idle = follower.connected(("127.0.0.1", port), time.monotonic() + PATIENCE)
        with idle, follower.connected(("127.0.0.1", port), time.monotonic() + PATIENCE) as loud:
            loud.sendall(b"GET / HTTP/1.1\r\n\r\n" + frame(Pulse()) * 9)
            meet(config_of(1, port), {}, lambda reason: None)
            hold = first.result(PATIENCE).leader
    assert hold is not None
    hold.fail("the test is over")


def test_nobody_takes_the_place_of_another() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, config_of(0, port, 3), {}, lambda reason: None)
        twice = [pool.submit(meet, config_of(1, port, 3), {}, lambda reason: None) for _ in range(2)]
        refused_one = soon(lambda: next((one for one in twice if one.done()), None))
        assert str(refused_one.exception()) == "process_id is 1, and there is one already"
        meet(config_of(2, port, 3), {}, lambda reason: None)
        hold = first.result(PATIENCE).leader
    assert hold is not None
    hold.fail("the test is over")


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 0.3)
    port = free_port()
    (alone,) = refused((config_of(0, port), {}))
    assert alone == f"num_processes is 2, and process 1 has not come to 127.0.0.1:{port} within 0.3 seconds"
    (lost,) = refused((config_of(1, port), {}))
    assert lost == f"process 0 at 127.0.0.1:{port} cannot be reached: connection refused"


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (said,) = refused((config_of(0, port), {}))
    assert said == (f"coordinator_address is 127.0.0.1:{port}, where process 0 cannot listen: address already in use")
