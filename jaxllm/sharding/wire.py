"""Messages with arrays between the processes of a group over TCP, and the secret by which these know each other.

A frame is the lengths of its two parts, a header in msgpack, and the bytes of its arrays one after the other. Input is
bounded before it is read and checked before it is used, and none of it is ever run. Several threads use the sockets:
connections are accepted as they come, and a wait at one can be interrupted.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import socket
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from jaxllm.config.server import DATA_DIR
from jaxllm.errors import ConfigError, reason

_LENGTHS = struct.Struct("<IQ")
MOST_HEADER = 2**20
MOST_BODY = 2**30  # bytes; the largest arrays are those of an adapter

_DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (np.int32, np.uint32, np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.bool_)
}

Message = TypeVar("Message")


class ArrayForm(NamedTuple):
    """The type and shape of an array that is sent."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size. Raises WireError for a type or shape that no array has."""
        if self.dtype not in _DTYPES or any(size < 0 for size in self.shape):
            raise WireError(f"an array of {self.dtype} {self.shape} was sent, which there is not")
        return _DTYPES[self.dtype].itemsize * math.prod(self.shape)


class WireError(Exception):
    """The received bytes are no frame of ours."""


class _Header(msgspec.Struct, array_like=True):
    message: msgspec.Raw
    arrays: list[ArrayForm]


_encode = msgspec.msgpack.Encoder().encode


def frame(message: Any, arrays: Sequence[Any] = ()) -> bytes:
    """A message and arrays of the host in the form in which they are sent."""
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
            WireError: it is none of the messages that may come.
        """
        self._connection.settimeout(timeout)
        of_header, of_body = _LENGTHS.unpack(_receive(self._connection, _LENGTHS.size))
        if of_header > MOST_HEADER or of_body > MOST_BODY:
            raise WireError(f"a frame of {of_header} and {of_body} bytes was sent; at most {MOST_HEADER}, {MOST_BODY}")
        try:
            header = self._headers.decode(_receive(self._connection, of_header))
            message = self._messages.decode(header.message)
        except msgspec.MsgspecError as error:
            raise WireError(f"a message was sent that cannot be read: {error}") from None
        if sum(form.nbytes for form in header.arrays) != of_body:
            raise WireError("the arrays that were sent are not as long as they say")
        body, arrays, at = _receive(self._connection, of_body), [], 0
        for form in header.arrays:
            found = np.frombuffer(body, _DTYPES[form.dtype], math.prod(form.shape), at)
            arrays.append(found.reshape(form.shape))
            at += form.nbytes
        return message, arrays

    @property
    def own_host(self) -> str:
        host: str = self._connection.getsockname()[0]
        return host

    def close(self) -> None:
        """End the connection; receivers at both sides get ConnectionError."""
        interrupt(self._connection)
        self._connection.close()


def accept_each(listener: socket.socket, most: int, name: str, serve: Callable[[socket.socket, str], None]) -> None:
    """Call `serve` with each connection and the address that it comes from, on a daemon thread of that name.

    At most `most` run at a time; further connections are closed at once. Returns when the listener is closed.
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
    """A port that is free at this moment; an empty address means all."""
    with socket.create_server((address, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def interrupt(waited_at: socket.socket) -> None:
    """End all waiting at a socket, with an OSError or at the end of the data."""
    with suppress(OSError):  # it has ended meanwhile
        waited_at.shutdown(socket.SHUT_RDWR)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> tuple[str, str]:
    """The host's name, and a text that is unique among hosts of that name; a container has a name of its own."""
    host = socket.gethostname()
    return host, f"{host} {BOOT_ID.read_text().strip()}" if BOOT_ID.exists() else host


SECRET_FILE = DATA_DIR / "cluster-secret"
_GREETING = b"jaxllm 1"
_NONCE = _PROOF = 32  # bytes


def group_secret(stated: str | None, file: Path = SECRET_FILE) -> bytes:
    """The given `cluster_secret`, or this user's file, made if missing. Raises ConfigError if others may read it."""
    if stated is not None:
        return stated.encode()
    try:
        if not file.exists():
            _make(file)
        status = file.stat()
        if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)):
            raise ConfigError(f"{file} holds the secret of this user's processes, and others may use it: chmod 600")
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cluster_secret is not set, and {file} cannot be used: {reason(error)}") from None


def _make(file: Path) -> None:
    """Make the file whole and once: other processes of the group may be making it at this moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    own = file.with_name(f"{file.name}-{secrets.token_hex(8)}")
    with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
        written.write(secrets.token_urlsafe(32))
    try:
        os.link(own, file)
    except FileExistsError:
        pass
    finally:
        own.unlink()


def admit(connection: socket.socket, secret: bytes) -> bool:
    """Let the other side prove that it has the secret, and prove it in turn; returns whether it has.

    Nothing but a fixed number of bytes is read before that. Raises OSError where it does not answer.
    """
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(_GREETING + ours)
    answer = _receive(connection, _NONCE + _PROOF)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"follows", ours, theirs)):
        return False
    connection.sendall(_proof(secret, b"leads", ours, theirs))
    return True


def introduce(connection: socket.socket, secret: bytes) -> bool:
    """The other side of `admit`: whether both have the same secret. Raises OSError where it does not answer."""
    begun = _receive(connection, len(_GREETING) + _NONCE)
    if not begun.startswith(_GREETING):
        raise OSError("what answers there is no jaxllm of this kind")
    theirs, ours = begun[len(_GREETING) :], secrets.token_bytes(_NONCE)
    connection.sendall(ours + _proof(secret, b"follows", theirs, ours))
    try:
        proof = _receive(connection, _PROOF)
    except ConnectionError:
        return False
    return hmac.compare_digest(proof, _proof(secret, b"leads", theirs, ours))


def _proof(secret: bytes, role: bytes, leads: bytes | bytearray, follows: bytes | bytearray) -> bytes:
    return hmac.digest(secret, role + leads + follows, "sha256")


def _receive(connection: socket.socket, count: int) -> bytearray:
    received = bytearray(count)
    view, at = memoryview(received), 0
    while at < count:
        more = connection.recv_into(view[at:])
        if not more:
            raise ConnectionResetError("the connection was closed")
        at += more
    return received
