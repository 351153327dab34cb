"""What one request takes of what its key may use."""

from __future__ import annotations

import logging
import math
import time
from typing import NamedTuple

from jaxllm.serving.access.rate_limits import Metered, RateLimits, Window, refused
from jaxllm.serving.access.tenant import OTHERS, Tenant
from jaxllm.serving.access.usage import Ledger, Used
from jaxllm.serving.http.api_error import APIError

logger = logging.getLogger(__name__)


class Reservation(NamedTuple):
    """Tokens that were counted before it was known how many a request uses."""

    tokens: int
    limit: int
    window: Window


class Meter:
    """Of one request: in whose name it comes, and what it has taken."""

    def __init__(
        self,
        tenant: Tenant = OTHERS,
        limits: RateLimits | None = None,
        ledger: Ledger | None = None,
        headers: dict[str, str] | None = None,
    ):
        """Without `limits` nothing is refused, without a `ledger` nothing is told of; `headers` are the answer's."""
        self.tenant = tenant
        self._limits = limits
        self._ledger = ledger
        self._headers = {} if headers is None else headers

    async def count_request(self, model: str) -> None:
        """Raises 429 where the key has used its requests a minute."""
        limit = self.tenant.requests_per_minute
        if limit is not None:
            await self._take("requests", limit, 1, f"this API key may send {limit} requests a minute")
        self._note(model, Used(requests=1))

    async def reserve(self, tokens: int) -> Reservation | None:
        """Count the most tokens that something may use, before it begins; None where the key has no limit of tokens.

        What needs more than a minute's tokens takes all of one: `settle` counts the rest. Raises 429 where they are not
        left.
        """
        limit = self.tenant.tokens_per_minute
        if limit is None:
            return None
        wanted = min(tokens, limit)
        problem = f"this API key may use {limit} tokens a minute, and the request may use {tokens}, max_tokens included"
        window = await self._take("tokens", limit, wanted, problem)
        return None if window is None else Reservation(wanted, limit, window)

    async def settle(self, reservation: Reservation | None, model: str, used: Used) -> None:
        """Count what was used in the place of what was reserved. A store that does not answer leaves it as it is."""
        self._note(model, used)
        if reservation is None or self._limits is None or self.tenant.name is None:
            return
        difference = used.tokens - reservation.tokens
        try:
            await self._limits.correct("tokens", self.tenant.name, reservation.limit, difference, reservation.window)
        except APIError as error:
            logger.error("API key %s is counted %d tokens too many: %s", self.tenant.name, -difference, error)

    def _note(self, model: str, used: Used) -> None:
        if self._ledger is not None and used != Used():
            self._ledger.add(self.tenant.name, model, used)

    async def _take(self, kind: Metered, limit: int, cost: int, problem: str) -> Window | None:
        if self._limits is None or self.tenant.name is None:
            return None
        taken, window = await self._limits.take(kind, self.tenant.name, limit, cost)
        seconds = max(window.resets - time.time(), 0.0)
        self._headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        self._headers[f"x-ratelimit-remaining-{kind}"] = str(window.remaining)
        self._headers[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(seconds)}s"
        if not taken:
            message = f"{problem}; {window.remaining} are left, and the next minute begins in {math.ceil(seconds)} s"
            raise refused(message, seconds)
        return window
