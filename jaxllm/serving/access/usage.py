"""The usage of each name in tokens: counted, stored, and told at /metrics and /usage."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Query, Request, Response
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import BigInteger, String, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Mapped, mapped_column

from jaxllm.errors import StorageFullError
from jaxllm.serving.access.keys import Tenant, tenant_of
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.store.database import Base, Database

logger = logging.getLogger(__name__)

router = APIRouter(route_class=JSONRoute, tags=["status"])

NO_KEY = "-"  # the name of requests without a key of the file: no key is called that
COUNTERS = {
    "key_requests": ("Requests for a model, by API key.", lambda used: used.requests),
    "key_prompt_tokens": ("Prompt tokens, by API key.", lambda used: used.prompt_tokens),
    "key_prompt_tokens_cached": ("Those of them that the prefix cache held.", lambda used: used.cached_tokens),
    "key_generation_tokens": ("Tokens generated, by API key.", lambda used: used.completion_tokens),
}
WRITE_SECONDS = 10.0  # between two writes: a server that dies loses the usage since the last one
DAYS_SHOWN = 30


class Account(NamedTuple):
    """A key's usage of a model on a day in UTC; `owner` is the key's name, empty without one."""

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
        return self.prompt_tokens + self.completion_tokens

    def plus(self, other: Used) -> Used:
        return Used(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Ledger:
    """Usage of this process: `totals` by owner and model since the start, `pending` since it was last taken away."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str], Used] = {}
        self.pending: dict[Account, Used] = {}

    def add(self, owner: str | None, model: str, used: Used) -> None:
        """Count what a request has used, today."""
        name = owner or ""
        day = datetime.fromtimestamp(time.time(), UTC).date().isoformat()
        self.totals[name, model] = self.totals.get((name, model), Used()).plus(used)
        self.put_back({Account(name, day, model): used})

    def take(self) -> dict[Account, Used]:
        taken, self.pending = self.pending, {}
        return taken

    def put_back(self, usage: Mapping[Account, Used]) -> None:
        _add_up(self.pending, usage)


class Collected(Collector):
    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def usage_by_key(ledger: Ledger, reader: Tenant) -> bytes:
    """In Prometheus' format, what keys have used since the start: all of them for an admin, for another its own."""
    metrics = []
    for name, (text, read) in COUNTERS.items():
        metric = CounterMetricFamily(f"jaxllm:{name}", text, labels=["api_key", "model_name"])
        for (owner, model), used in sorted(ledger.totals.items()):
            if reader.admin or owner == reader.group:
                metric.add_metric([owner or NO_KEY, model], read(used))
        metrics.append(metric)
    return generate_latest(Collected(metrics))


class UsageRow(Base):
    """A day is written as 2027-01-31, in UTC."""

    __tablename__ = "usage_by_day"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    """The name of a key; empty for whoever has none, or one of `--api-key`."""
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    model: Mapped[str] = mapped_column(String(512), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)


class UsageStore:
    """Writes what a ledger counts into the database, where servers add up; nothing without `keeps`."""

    def __init__(self, ledger: Ledger, database: Database, *, keeps: bool):
        self._ledger = ledger
        self._database = database
        self._keeps = keeps
        self._writing: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._keeps:
            self._writing = asyncio.create_task(self._write_again_and_again(), name="write usage")

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            await self.write()

    async def write(self) -> None:
        """Add what the ledger has counted to the database; it counts on with what could not be written."""
        usage = self._ledger.take()
        if not usage:
            return
        try:
            async with self._database.transaction() as session:
                dialect = session.get_bind().dialect.name
                for account, used in sorted(usage.items()):  # servers in the same order, so that none locks another out
                    await session.execute(addition(dialect, account, used))
        except BaseException as error:
            self._ledger.put_back(usage)
            if not isinstance(error, SQLAlchemyError | OSError | StorageFullError):
                raise
            known = isinstance(error, StorageFullError)
            logger.error("the usage of API keys could not be written; it is tried again: %s", error, exc_info=not known)

    async def of(self, owner: str | None, since: str, until: str) -> list[tuple[Account, Used]]:
        """An owner's usage from one day to another, both included, by day and model."""
        name = owner or ""
        found: dict[Account, Used] = {}
        if self._keeps:
            days = UsageRow.day.between(since, until)
            async with self._database.session() as session:
                for row in await session.scalars(select(UsageRow).where(UsageRow.owner == name, days)):
                    used = Used(row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
                    found[Account(row.owner, row.day, row.model)] = used
        pending = self._ledger.pending.items()
        _add_up(found, {one: used for one, used in pending if one.owner == name and since <= one.day <= until})
        return sorted(found.items())

    async def _write_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()


def addition(dialect: str, account: Account, used: Used) -> Any:
    """A statement that adds to a row, or makes it: atomic, so that servers which write at once lose nothing."""
    table = UsageRow.__table__
    insert: Any = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert(table).values(**account._asdict(), **used._asdict())
    sums = {name: table.c[name] + statement.excluded[name] for name in Used._fields}
    return statement.on_conflict_do_update(index_elements=list(Account._fields), set_=sums)


class UsageOfDay(msgspec.Struct, kw_only=True):
    """In the words of OpenAI's usage API."""

    object: Literal["usage"] = "usage"
    date: str
    model: str
    num_model_requests: int
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int


class UsageList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    api_key: str | None
    """The name of the key that asks; null where it has none."""
    data: list[UsageOfDay]


@router.get("/usage", responses=returns(UsageList))
async def usage(
    request: Request,
    since: Annotated[date | None, Query(description="The first day, as 2027-01-31; by default 30 days ago.")] = None,
    until: Annotated[date | None, Query(description="The last day; by default today. Days are those of UTC.")] = None,
) -> Response:
    """What the key that asks has used, by day and model; without a file of keys what all have used since the start."""
    store: UsageStore = request.app.state.usage
    owner = tenant_of(request).name
    last = until or datetime.now(UTC).date()
    first = since or last - timedelta(days=DAYS_SHOWN)
    if first > last:
        raise APIError(400, f"since is {first} and until is {last}: since may not be the later day", param="since")
    found = await store.of(owner, first.isoformat(), last.isoformat())
    data = [
        UsageOfDay(
            date=account.day,
            model=account.model,
            num_model_requests=used.requests,
            input_tokens=used.prompt_tokens,
            input_cached_tokens=used.cached_tokens,
            output_tokens=used.completion_tokens,
        )
        for account, used in found
    ]
    return json_response(UsageList(api_key=owner, data=data))


def _add_up(sums: dict[Account, Used], usage: Mapping[Account, Used]) -> None:
    for account, used in usage.items():
        sums[account] = sums.get(account, Used()).plus(used)
