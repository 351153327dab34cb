"""The socket that a server listens on, an address and a port or a file, and the TLS of its connections."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError, reason
from jaxllm.folders import in_home

logger = logging.getLogger(__name__)

WAITING_CONNECTIONS = 2048
"""Connections that the system keeps while the model loads, or the event loop is busy."""
UNSENT_BYTES = 128 * 1024
"""Of a connection, that the system keeps beside what is on its way; by default it keeps megabytes."""


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
    """Its address for clients, as http://127.0.0.1:8000 or unix:/run/jaxllm.sock."""
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
    """A listening Unix domain socket; it replaces the file of a server that has ended. Raises ConfigError."""
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


def scheme(config: ServerConfig) -> str:
    return "http" if config.ssl_certfile is None else "https"


def make_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context that encrypts connections; None without a certificate. Raises ConfigError naming the setting."""
    if config.ssl_certfile is None:
        others = {"ssl_keyfile": config.ssl_keyfile, "ssl_ca_certs": config.ssl_ca_certs}
        for name, value in (others | {"ssl_cert_reqs": config.ssl_cert_reqs or None}).items():
            if value is not None:
                raise ConfigError(f"{name} is for TLS, which needs ssl_certfile too")
        return None
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise ConfigError(f"ssl_cert_reqs is {config.ssl_cert_reqs}, which needs ssl_ca_certs too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load(context, config, config.ssl_certfile)
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(in_home(config.ssl_ca_certs))
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_ca_certs is {str(config.ssl_ca_certs)!r}: {_said(error)}") from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def reload_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Use what the files hold now for new connections; where they are wrong nothing changes but the log."""
    try:
        make_context(config)  # a wrong key would leave the context without a certificate
        assert config.ssl_certfile is not None
        _load(context, config, config.ssl_certfile)
    except ConfigError as error:
        logger.error("the certificate stays as it is: %s", error)
    else:
        logger.info("the certificate was read again from %s", config.ssl_certfile)


def _load(context: ssl.SSLContext, config: ServerConfig, certificate: Path) -> None:
    key = config.ssl_keyfile
    try:
        context.load_cert_chain(in_home(certificate), None if key is None else in_home(key), _no_password)
    except (OSError, ValueError) as error:
        named = f"ssl_certfile is {str(certificate)!r}" + ("" if key is None else f" and ssl_keyfile {str(key)!r}")
        raise ConfigError(f"{named}: {_said(error)}") from None


def _no_password() -> NoReturn:
    """OpenSSL would ask for it on the terminal."""
    raise ValueError("the key is encrypted; it must be one without a password")


def _said(error: Exception) -> str:
    match error:
        case ssl.SSLError(reason="KEY_VALUES_MISMATCH"):
            return "the key is not the certificate's"
        case ssl.SSLError():
            return "it must hold a certificate and its key in PEM"
        case _:
            return reason(error)
