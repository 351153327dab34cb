"""What each key has used, by day and model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple


class Account(NamedTuple):
    """What usage is counted by: `owner` is the name of a key, empty for whoever has none, and `day` one in UTC."""

    owner: str
    day: str
    model: str


class Used(NamedTuple):
    """Requests for a model, and tokens: cached ones are part of the prompts'."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Of prompts and answers together."""
        return self.prompt_tokens + self.completion_tokens

    def plus(self, other: Used) -> Used:
        return Used(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Ledger:
    """Usage as it is counted in this process, until it is taken away to be kept elsewhere."""

    def __init__(self) -> None:
        self._pending: dict[Account, Used] = {}
        self._totals: dict[tuple[str, str], Used] = {}

    @property
    def totals(self) -> Mapping[tuple[str, str], Used]:
        """By owner and model, since the start."""
        return self._totals

    @property
    def pending(self) -> Mapping[Account, Used]:
        """What has been counted since it was last taken away."""
        return self._pending

    def add(self, owner: str | None, model: str, used: Used) -> None:
        """Count what a request has used, today."""
        name = owner or ""
        day = datetime.fromtimestamp(time.time(), UTC).date().isoformat()
        self._totals[name, model] = self._totals.get((name, model), Used()).plus(used)
        self.put_back({Account(name, day, model): used})

    def take(self) -> dict[Account, Used]:
        """Take away what is pending."""
        taken, self._pending = self._pending, {}
        return taken

    def put_back(self, usage: Mapping[Account, Used]) -> None:
        """Make pending what could not be kept elsewhere."""
        for account, used in usage.items():
            self._pending[account] = self._pending.get(account, Used()).plus(used)
