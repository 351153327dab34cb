"""Callers: their names by API keys, their rights and limits, and the file of keys that grants these."""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Collection, Iterable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from fastapi import Request
from limits import RateLimitItemPerMinute
from limits.aio.strategies import FixedWindowRateLimiter
from limits.errors import ConfigurationError, StorageError
from limits.storage import storage_from_string
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from jaxllm.config.server import ServerConfig
from jaxllm.config.sources import read_mapping
from jaxllm.config.values import comma_separated, of_text
from jaxllm.errors import ConfigError, InvalidRequestError, one_line
from jaxllm.folders import in_home
from jaxllm.serving.http.api_error import APIError, unavailable
from jaxllm.serving.http.route import TENANT
from jaxllm.wording import did_you_mean, shown, wrong_setting

logger = logging.getLogger(__name__)

FLAG = "--api-key-file"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_HASH = "sha256:"

T = TypeVar("T")
Metered = Literal["requests", "tokens"]
Positive = Annotated[int, Field(ge=1)]

ANSWER_SECONDS = 2.0  # the longest that a Redis may take to answer
_SAME_SECONDS = 5.0
"""Two windows of a key begin a minute or more apart; Redis tells their ends in whole seconds."""


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

    def check(self, sent: str) -> Tenant:
        """The tenant of a request with this key. Raises 401. The time of an answer says nothing of the keys."""
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
        """The tenant of work that was begun with a key. Raises 401 when the key is gone or has expired."""
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


class Tenant(BaseModel):
    """What requests of one name may do; by default all that a server without a file of keys lets everybody do."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str | None = None
    """The key's in the file of keys; null for whoever has a key of `--api-key`, or needs none."""
    models: Annotated[frozenset[str] | None, of_text(comma_separated)] = None
    """Names of the models that it may use (default: all). It is not told of others."""
    priority_ceiling: int | None = None
    """The lowest `priority` that its requests may ask for: lower runs earlier. Null allows any."""
    max_concurrency: Positive | None = None
    """Most of its requests that may be under way at once (default: any number)."""
    requests_per_minute: Positive | None = None
    """Most requests that it may send in a minute (default: any number)."""
    tokens_per_minute: Positive | None = None
    """Most tokens that its requests may use in a minute, of prompts and answers together (default: any number)."""
    own_cache: bool = False
    """Share cached prefixes of prompts only among its own requests, so that times tell nobody what others have sent."""
    admin: bool = False
    """Whether it may unload models, put them to sleep, and change adapters and weights. Any request wakes one up."""

    @property
    def group(self) -> str:
        """The name of its requests' group in the engine: see FairQueue."""
        return self.name or ""

    def may_use(self, names: Iterable[str]) -> bool:
        return self.models is None or not self.models.isdisjoint(names)

    def cache_salt(self, asked: str | None) -> str | None:
        """The salt of a request that brings one: only requests with the same share cached prefixes."""
        return asked

    def priority(self, asked: int) -> int:
        """The priority of a request; 0, which says nothing, is raised to the ceiling. Raises InvalidRequestError."""
        ceiling = self.priority_ceiling
        if ceiling is None or asked >= ceiling:
            return asked
        if asked:
            raise InvalidRequestError(
                f"priority is {asked}; with this API key it must be {ceiling} or more", "priority"
            )
        return ceiling


OTHERS = Tenant(admin=True)
"""Whoever calls a server without keys, or with one of `--api-key`."""


def tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.scope[TENANT]
    return tenant


def check_admin(request: Request, what: str = "unload models or put them to sleep") -> None:
    """Raises 403 where a request may not do `what` only some keys may do."""
    if not tenant_of(request).admin:
        message = f"this API key may not {what}; that needs `admin: true` in the file of keys"
        raise APIError(403, message, type="permission_error", code="not_admin")


def _in_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


class ApiKey(Tenant):
    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    """What metrics, logs and the owners of stored objects call it."""
    hash: Annotated[str, Field(pattern=f"^{_HASH}[0-9a-f]{{64}}$")]
    """The SHA-256 of the key, as `jaxllm keys new` prints it."""
    expires: Annotated[datetime, AfterValidator(_in_utc)] | None = None
    """When the key ends to be taken: a day, at whose beginning in UTC, or a time (default: never)."""
    priority_ceiling: int | None = 0
    """The lowest `priority` that its requests may ask for: lower runs earlier. Null allows any."""

    def cache_salt(self, asked: str | None) -> str | None:
        """With the hash, which no other can send, where the key has a cache of its own."""
        return f"{self.hash}:{asked or ''}" if self.own_cache else asked

    @cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.removeprefix(_HASH))


def new_key() -> str:
    return "jaxllm-" + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """A random key has nothing that could be guessed, so that one fast hash protects it; passwords need slow ones."""
    return hashlib.sha256(key.encode()).digest()


def hash_of(key: str) -> str:
    return _HASH + digest_of(key).hex()


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file, in its order. Raises ConfigError, whose one line says where, and never shows a hash."""
    keys: list[ApiKey] = []
    for name, fields in read_mapping(in_home(path), FLAG, "names to keys").items():
        where = f"{path}: key {shown(name)}"
        if not isinstance(fields, dict):
            raise ConfigError(f"{where} must be a mapping of setting: value, and have at least a hash")
        key = _key(where, name, fields)
        if same := next((other for other in keys if other.digest == key.digest), None):
            raise ConfigError(f"{where}: its hash is that of key {same.name!r}; each needs a key of its own")
        keys.append(key)
    return keys


def _unexpired(key: ApiKey) -> ApiKey:
    if key.expires is not None and datetime.now(UTC) >= key.expires:
        raise _refused(f"API key {key.name!r} has expired, at {key.expires.isoformat()}")
    return key


def _refused(problem: str) -> APIError:
    headers = {"WWW-Authenticate": "Bearer"}
    return APIError(401, problem, type="authentication_error", code="invalid_api_key", headers=headers)


def _key(where: str, name: str, fields: dict[Any, Any]) -> ApiKey:
    settings = [name for name in ApiKey.model_fields if name != "name"]
    if unknown := next((name for name in fields if name not in settings), None):
        raise ConfigError(f"{where}: unknown setting {shown(unknown)}{did_you_mean(str(unknown), settings)}")
    try:
        return ApiKey(name=name, **fields)
    except ValidationError as error:
        first = error.errors()[0]
    setting = str(first["loc"][0])
    if setting == "name":
        raise ConfigError(f"{where}: a name must have 1 to 64 letters, digits, '.', '_' and '-'")
    if setting == "hash":  # somebody may have put the key itself there
        raise ConfigError(f"{where}: hash must be sha256: and 64 hexadecimal digits, as `jaxllm keys new` prints them")
    raise ConfigError(f"{where}: {setting} is {shown(first['input'])}: {wrong_setting(first)}")


class Window(NamedTuple):
    """A key's minute, from the first thing that is counted in it to `resets`, in seconds since 1970."""

    remaining: int
    resets: float


class RateLimits:
    """Counts by key. Raises ConfigError where `url`, a Redis, cannot be used; None counts in this process."""

    def __init__(self, url: str | None):
        self._url = url
        if url is not None and not url.startswith(("redis://", "rediss://")):
            raise ConfigError("rate_limit_store must be redis://HOST:PORT/NUMBER, or rediss:// for TLS")
        storage = storage_from_string("async+memory://") if url is None else _redis(url)
        self._limiter = FixedWindowRateLimiter(storage)

    async def check(self) -> None:
        """Raises ConfigError where the store does not answer."""
        try:
            answers = await self._limiter.storage.check()
        except StorageError as error:
            raise ConfigError(f"rate_limit_store does not answer: {one_line(error.storage_error)}") from None
        if not answers:
            raise ConfigError("rate_limit_store does not answer: see that the server it names runs")

    async def take(self, kind: Metered, name: str, limit: int, cost: int) -> tuple[bool, Window]:
        """Count `cost` unless that exceeds `limit`; True if it was counted. Raises 503 if the store is silent."""
        item = RateLimitItemPerMinute(limit, namespace="jaxllm")
        taken = await self._asked(self._limiter.test(item, kind, name, cost=cost))
        if taken and not await self._asked(self._limiter.hit(item, kind, name, cost=cost)):
            await self._asked(self._limiter.hit(item, kind, name, cost=-cost))  # another server was faster
            taken = False
        return taken, await self._window(item, kind, name)

    async def correct(self, kind: Metered, name: str, limit: int, difference: int, window: Window) -> None:
        """Count more than was taken in a window, or less if it has not ended. Raises 503 if the store is silent."""
        item = RateLimitItemPerMinute(limit, namespace="jaxllm")
        if difference < 0:
            now = await self._window(item, kind, name)
            if time.time() >= window.resets or abs(now.resets - window.resets) > _SAME_SECONDS:
                return
        if difference:
            await self._asked(self._limiter.hit(item, kind, name, cost=difference))

    async def _window(self, item: RateLimitItemPerMinute, kind: Metered, name: str) -> Window:
        stats = await self._asked(self._limiter.get_window_stats(item, kind, name))
        return Window(stats.remaining, stats.reset_time)

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except StorageError as error:
            logger.error("rate_limit_store does not answer: %s", one_line(error.storage_error))
            message = "the store of this server's rate limits does not answer"
            raise unavailable(message, code="rate_limits_unavailable") from None


def _redis(url: str) -> Any:
    """Each command is tried once more at once, for connections that a server which was started again has forgotten."""
    try:
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        options: dict[str, Any] = {"socket_timeout": ANSWER_SECONDS, "socket_connect_timeout": ANSWER_SECONDS}
        options |= {"implementation": "redispy", "wrap_exceptions": True, "retry": Retry(NoBackoff(), 1)}
        return storage_from_string(f"async+{url}", **options)
    except ImportError:
        raise ConfigError("rate_limit_store is a Redis, which needs `pip install jaxllm[redis]`") from None
    except (ConfigurationError, ValueError) as error:
        raise ConfigError(f"rate_limit_store cannot be used: {one_line(error)}") from None


def refused(message: str, seconds: float) -> APIError:
    """429: the same request may be sent again in so many seconds."""
    again = {"Retry-After": str(max(math.ceil(seconds), 1))}
    return APIError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=again)
