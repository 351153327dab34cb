"""The socket that a server listens on: an address and a port, or a file."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.folders import in_home

WAITING_CONNECTIONS = 2048
"""That the system keeps while the model loads, or the event loop is busy."""
UNSENT_BYTES = 128 * 1024
"""That the system keeps of a connection beside what is on its way: megabytes otherwise for each client that does not
read."""


@contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """The socket that config names, closed at the end; a file is removed then. Raises ConfigError."""
    if config.uds is None:
        with bind(config.host, config.port) as listener:
            yield listener
        return
    path = in_home(config.uds)
    with bind_file(path) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def address(listener: socket.socket, scheme: str = "http") -> str:
    """How clients reach it, as http://127.0.0.1:8000 or unix:/run/jaxllm.sock."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def bind(host: str, port: int, prefix: str = "") -> socket.socket:
    """A listening TCP socket. Raises ConfigError naming the host or the port, as settings whose names have the prefix.

    With SO_REUSEADDR alone Linux gives an address to all who bind it and to the first who listens: only that takes it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"{prefix}host is {host!r}, which is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # connections inherit it
    try:
        listener.bind(address)
        listener.listen(WAITING_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, prefix, error) from None
    return listener


def _cannot_listen(host: str, port: int, prefix: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        flag = f"--{prefix}port".replace("_", "-")
        return ConfigError(f"port {port} on {host} is in use; choose another with {flag}, or 0 for any free one")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{prefix}host is {host!r}, which is no address of this machine")
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}")


def bind_file(path: Path) -> socket.socket:
    """A listening Unix domain socket. The file of a server that has ended is replaced.

    Raises ConfigError naming the file.
    """
    try:
        if path.exists():
            _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(path))
            listener.listen(WAITING_CONNECTIONS)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"uds is {str(path)!r}: {error.strerror or error}") from None
    return listener


def _remove_stale(path: Path) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"uds is {str(path)!r}, which is a file of another kind; name one that does not exist")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"uds is {str(path)!r}, where another server listens")
