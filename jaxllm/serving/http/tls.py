"""TLS: the server's certificate, and whose certificates it takes of clients."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import NoReturn

from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError, reason
from jaxllm.folders import in_home

logger = logging.getLogger(__name__)


def scheme(config: ServerConfig) -> str:
    """http or https."""
    return "http" if config.ssl_certfile is None else "https"


def make_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What connections are encrypted by; None without a certificate. Raises ConfigError naming the setting."""
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
