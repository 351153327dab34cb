"""The secret by which the processes of a group know each other, and how they prove that they have it."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
from pathlib import Path

from jaxllm.config.server import DATA_DIR
from jaxllm.errors import ConfigError, reason

SECRET_FILE = DATA_DIR / "cluster-secret"
_GREETING = b"jaxllm 1"
_NONCE = _PROOF = 32
"""Bytes."""


def group_secret(stated: str | None, file: Path = SECRET_FILE) -> bytes:
    """What `cluster_secret` says, or else what this user's file holds, which is made where there is none.

    Raises:
        ConfigError: the file cannot be made or read, or others may read it.
    """
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
    """Whole, and once: other processes of the group may be making it at this moment."""
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
    """Let the other side prove that it has the secret, and prove it in turn; whether it has.

    Nothing is read before that but a fixed number of bytes. Raises OSError where it does not answer.
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


def _proof(secret: bytes, role: bytes, leads: bytes, follows: bytes) -> bytes:
    return hmac.digest(secret, role + leads + follows, "sha256")


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received
