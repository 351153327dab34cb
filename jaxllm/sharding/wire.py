"""Messages with arrays between the processes of a group, over TCP, and the sockets that they go through.

A frame is the lengths of its two parts, a header in msgpack, and the bytes of its arrays one after the other. What
comes is bounded before it is read and checked before it is used, and nothing of it is ever run. Sockets are used by
several threads: connections are taken as they come, and what waits at one can be interrupted."""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import ml_dtypes
import msgspec
import numpy as np

_LENGTHS = struct.Struct("<IQ")
MOST_HEADER = 2**20
MOST_BODY = 2**30
"""Bytes; the largest arrays are those of an adapter."""

_DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (np.int32, np.uint32, np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.bool_)
}

Message = TypeVar("Message")


class ArrayForm(NamedTuple):
    """What the bytes of an array are."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes they are. Raises WireError for what no array has."""
        if self.dtype not in _DTYPES or any(size < 0 for size in self.shape):
            raise WireError(f"an array of {self.dtype} {self.shape} was sent, which there is not")
        return _DTYPES[self.dtype].itemsize * math.prod(self.shape)


class WireError(Exception):
    """What was received is no frame of ours."""


class _Header(msgspec.Struct, array_like=True):
    message: msgspec.Raw
    arrays: list[ArrayForm]


_encode = msgspec.msgpack.Encoder().encode


def frame(message: Any, arrays: Sequence[Any] = ()) -> bytes:
    """A message and arrays of the host as they are sent."""
    sent = [np.asarray(array) for array in arrays]
    forms = [ArrayForm(array.dtype.name, array.shape) for array in sent]
    header = _encode(_Header(msgspec.Raw(_encode(message)), forms))
    body = b"".join(array.tobytes() for array in sent)
    return _LENGTHS.pack(len(header), len(body)) + header + body


class Wire(Generic[Message]):
    """One end of a connection. Any thread may send; one at a time receives."""

    def __init__(self, connection: socket.socket, receives: Any):
        """`receives` is the type of the messages that may come, a union of structs with tags."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()
        self._headers = msgspec.msgpack.Decoder(_Header)
        self._messages = msgspec.msgpack.Decoder(receives)

    def send(self, message: Any) -> None:
        """Send a message without arrays. Raises OSError where the other side is gone."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send what `frame` has made. Raises OSError where the other side is gone."""
        with self._sending:
            self._connection.sendall(data)

    def receive(self, timeout: float | None) -> tuple[Message, list[np.ndarray]]:
        """The next message and its arrays, which are the caller's own.

        Raises:
            TimeoutError: nothing came for `timeout` seconds.
            ConnectionError: the other side has closed the connection.
            WireError: it is none of those that may come.
        """
        self._connection.settimeout(timeout)
        of_header, of_body = _LENGTHS.unpack(self._take(_LENGTHS.size))
        if of_header > MOST_HEADER or of_body > MOST_BODY:
            raise WireError(f"a frame of {of_header} and {of_body} bytes was sent; at most {MOST_HEADER}, {MOST_BODY}")
        try:
            header = self._headers.decode(self._take(of_header))
            message = self._messages.decode(header.message)
        except msgspec.MsgspecError as error:
            raise WireError(f"a message was sent that cannot be read: {error}") from None
        if sum(form.nbytes for form in header.arrays) != of_body:
            raise WireError("the arrays that were sent are not as long as they say")
        body, arrays, at = self._take(of_body), [], 0
        for form in header.arrays:
            found = np.frombuffer(body, _DTYPES[form.dtype], math.prod(form.shape), at)
            arrays.append(found.reshape(form.shape))
            at += form.nbytes
        return message, arrays

    @property
    def own_host(self) -> str:
        """The address at which the other side reaches this one."""
        host: str = self._connection.getsockname()[0]
        return host

    def close(self) -> None:
        """End the connection; whoever receives at either side gets ConnectionError."""
        interrupt(self._connection)
        self._connection.close()

    def _take(self, count: int) -> bytearray:
        taken = bytearray(count)
        view, at = memoryview(taken), 0
        while at < count:
            received = self._connection.recv_into(view[at:])
            if not received:
                raise ConnectionResetError("the connection was closed")
            at += received
        return taken


def accept_each(listener: socket.socket, most: int, name: str, serve: Callable[[socket.socket, str], None]) -> None:
    """Have `serve` called with each connection and the address that it comes from, on a daemon thread of that name.

    At most so many run at a time; further connections are closed at once. Returns when the listener is closed.
    """
    free = threading.Semaphore(most)

    def run(connection: socket.socket, source: str) -> None:
        try:
            serve(connection, source)
        finally:
            free.release()

    while True:
        try:
            connection, source = listener.accept()
        except OSError:
            return
        if not free.acquire(blocking=False):
            connection.close()
            continue
        threading.Thread(target=run, args=(connection, source[0]), name=name, daemon=True).start()


def free_port(address: str = "127.0.0.1") -> int:
    """One that nobody listens on at this moment; an empty address is all of them."""
    with socket.create_server((address, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def interrupt(waited_at: socket.socket) -> None:
    """Whoever accepts, receives or sends there stops waiting, with an OSError or at the end of what comes."""
    with suppress(OSError):  # it has ended meanwhile
        waited_at.shutdown(socket.SHUT_RDWR)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> tuple[str, str]:
    """The host's name, and what no other host of that name says; a container has a name of its own."""
    host = socket.gethostname()
    return host, f"{host} {BOOT_ID.read_text().strip()}" if BOOT_ID.exists() else host
