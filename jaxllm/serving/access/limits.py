"""How much each name may ask for: requests and tokens a minute, and requests at once."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable
from typing import Any, Literal, NamedTuple, TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.strategies import FixedWindowRateLimiter
from limits.errors import ConfigurationError, StorageError
from limits.storage import storage_from_string

from jaxllm.errors import ConfigError, one_line
from jaxllm.serving.http.api_error import APIError, unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

Metered = Literal["requests", "tokens"]

SCHEMES = ("redis://", "rediss://")
ANSWER_SECONDS = 2.0
"""How long a Redis may take to answer."""
_SAME_SECONDS = 5.0
"""Two windows of a key begin a minute or more apart; Redis tells their ends in whole seconds."""


class Window(NamedTuple):
    """The minute that is being counted for a key; it begins with the first thing that is counted in it."""

    remaining: int
    resets: float
    """When it ends, in seconds since 1970."""


class RateLimits:
    """Counts by key. Raises ConfigError where `url`, a Redis, cannot be used; None counts in this process."""

    def __init__(self, url: str | None):
        self._url = url
        if url is not None and not url.startswith(SCHEMES):
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
        """Count `cost` for a key unless that would be more than its `limit`; whether it was counted.

        Raises 503 where the store does not answer.
        """
        item = RateLimitItemPerMinute(limit, namespace="jaxllm")
        taken = await self._asked(self._limiter.test(item, kind, name, cost=cost))
        if taken and not await self._asked(self._limiter.hit(item, kind, name, cost=cost)):
            await self._asked(self._limiter.hit(item, kind, name, cost=-cost))  # another server was faster
            taken = False
        return taken, await self._window(item, kind, name)

    async def correct(self, kind: Metered, name: str, limit: int, difference: int, window: Window) -> None:
        """Count more than was taken in a window, or with a negative `difference` less, if that has not ended.

        Raises 503 where the store does not answer.
        """
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
            raise unavailable(
                "the store of this server's rate limits does not answer", code="rate_limits_unavailable"
            ) from None


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
