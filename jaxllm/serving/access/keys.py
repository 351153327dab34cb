"""Who is let in: the keys of `--api-key` and those of `--api-key-file`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection
from datetime import UTC, datetime

from jaxllm.config.server import ServerConfig
from jaxllm.config.values import comma_separated
from jaxllm.errors import ConfigError
from jaxllm.serving.access.api_key import ApiKey, digest_of, read_keys
from jaxllm.serving.access.tenant import OTHERS, Tenant
from jaxllm.serving.http.api_error import APIError

logger = logging.getLogger(__name__)


class Keys:
    """Every key of a server. Raises ConfigError when the file of keys cannot be used."""

    def __init__(self, config: ServerConfig, models: Collection[str]):
        """`models` are the names of all that there are: a key that names another is told of in the log."""
        self._asks = config.asks_for_key
        self._shared = [digest_of(key) for key in comma_separated(config.api_key)]
        self._path = config.api_key_file
        self._models = models
        self._own: list[ApiKey] = []
        if self._path is not None:
            self._take(read_keys(self._path))

    @property
    def have_names(self) -> bool:
        """Whether there is a file of keys, which names them."""
        return self._path is not None

    def check(self, sent: str) -> Tenant:
        """In whose name a request comes that brings this key. Raises 401.

        Every key is compared, and each in constant time, so that the answer's time says nothing of them.
        """
        if not self._asks:
            return OTHERS
        digest = digest_of(sent)
        own = [key for key in self._own if secrets.compare_digest(digest, key.digest)]
        shared = [known for known in self._shared if secrets.compare_digest(digest, known)]
        if own:
            return _unexpired(own[0])
        if shared:
            return OTHERS
        raise _refused("the API key is wrong" if sent else "no API key; send it as 'Authorization: Bearer KEY'")

    def named(self, name: str | None) -> Tenant:
        """In whose name something goes on that was begun with a key. Raises 401 when that is gone or has expired."""
        if name is None:
            return OTHERS
        for key in self._own:
            if key.name == name:
                return _unexpired(key)
        raise _refused(f"API key {name!r} is no longer in the file of keys")

    def reload(self) -> None:
        """Read the file again; one that is wrong changes nothing but the log."""
        if self._path is None:
            return
        try:
            self._take(read_keys(self._path))
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)

    def _take(self, keys: list[ApiKey]) -> None:
        self._own = keys
        logger.info("API keys from %s: %s", self._path, ", ".join(key.name for key in keys) or "none")
        for key in keys:
            if unknown := sorted((key.models or frozenset()) - {*self._models}):
                logger.warning("API key %s may use %s, which is not served here", key.name, ", ".join(unknown))


def _unexpired(key: ApiKey) -> ApiKey:
    if key.expires is not None and datetime.now(UTC) >= key.expires:
        raise _refused(f"API key {key.name!r} has expired, at {key.expires.isoformat()}")
    return key


def _refused(problem: str) -> APIError:
    headers = {"WWW-Authenticate": "Bearer"}
    return APIError(401, problem, type="authentication_error", code="invalid_api_key", headers=headers)
