"""Messages arrive as they were sent, and what is no message is refused before it is used."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from jaxllm.engine.core.keys import SAMPLED, Key
from jaxllm.engine.scale.lockstep.messages import FromLeader, Pulse, RunStep
from jaxllm.sharding.wire import MOST_BODY, MOST_HEADER, Wire, WireError, frame


@pytest.fixture
def ends() -> Iterator[tuple[Wire[Any], socket.socket]]:
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    theirs.connect(ours.getsockname())
    connection, _ = ours.accept()
    with ours, theirs, connection:
        yield Wire(connection, FromLeader), theirs


def test_a_step_arrives_with_its_arrays(ends: tuple[Wire[Any], socket.socket]) -> None:
    wire, theirs = ends
    arrays = [
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        np.int32(7),
        np.array([[0.5, -2]], ml_dtypes.bfloat16),
        np.zeros((0, 3), np.float32),
        np.array([2**32 - 1], np.uint32),
    ]
    sent = RunStep(3, Key("head", 8, SAMPLED | {"grammar"}))
    theirs.sendall(frame(Pulse()) + frame(sent, arrays))
    assert wire.receive(5) == (Pulse(), [])
    message, received = wire.receive(5)
    assert message == sent
    for one, other in zip(arrays, received, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one, other)


def parts(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", len(header), len(body)) + header + body


def header(message: Any, arrays: Any) -> bytes:
    return msgspec.msgpack.encode([message, arrays])


STEP = {"type": "RunStep", "number": 1, "key": ["decode", 4]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("<IQ", MOST_HEADER + 1, 0), "at most"),
        (struct.pack("<IQ", 1, MOST_BODY + 1), "at most"),
        (parts(pickle.dumps(Pulse)), "cannot be read"),
        (parts(header({"type": "Shell", "command": "ls"}, [])), "cannot be read"),
        (parts(header(STEP | {"key": ["rm", 4]}, [])), "cannot be read"),
        (parts(header(STEP, [["object", [1]]]), bytes(8)), "which there is not"),
        (parts(header(STEP, [["int32", [-1]]]), bytes(4)), "which there is not"),
        (parts(header(STEP, [["int32", [2]]]), bytes(4)), "not as long as they say"),
    ],
)
def test_what_is_no_message_is_refused(ends: tuple[Wire[Any], socket.socket], data: bytes, said: str) -> None:
    wire, theirs = ends
    theirs.sendall(data)
    with pytest.raises(WireError, match=said):
        wire.receive(5)


def test_silence_and_an_end_are_told_apart(ends: tuple[Wire[Any], socket.socket]) -> None:
    wire, theirs = ends
    with pytest.raises(TimeoutError):
        wire.receive(0.05)
    theirs.sendall(frame(Pulse())[:-1])
    theirs.close()
    with pytest.raises(ConnectionError):
        wire.receive(5)
