"""`jaxllm store`: look at what servers have stored, delete what is old, bring the tables forward."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from jaxllm.cli.settings import COMMAND_GROUP, takes_settings
from jaxllm.cli.terminal import agrees, print_table
from jaxllm.config import ServeConfig
from jaxllm.config.values import parse_seconds
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.serving.store.database import Database

WHERE = ("data_dir", "database_url")
"""The settings that say which store is meant."""
Json = Annotated[bool, Parameter(name="--json", negative=(), group=COMMAND_GROUP)]
StoredName = Literal["responses", "conversations", "batches", "files"]

store = App(name="store", help="Look at what servers have stored, delete what is old, bring its tables forward.")


def _takes_place(command: Any) -> Any:
    return takes_settings(ServeConfig, only=WHERE, positional_model=False)(command)


@store.command
@_takes_place
def info(config: ServeConfig, *, json_output: Json = False) -> None:
    """Say where the store is, which version its tables are, and how much is in it. Nothing is changed.

    Args:
        json_output: Print a JSON object instead of a table.
    """
    asyncio.run(_info(config, json_output))


async def _info(config: ServeConfig, json_output: bool) -> None:
    from jaxllm.serving.batches.stores import files_of
    from jaxllm.serving.stored import counted

    async with _opened(config, checks=False) as database:
        layout = await database.layout()
        counts = await counted(database) if layout.version == layout.newest else {}
    files = files_of(config.data_dir)
    nbytes = sum(file.stat().st_size for file in files.iterdir() if file.is_file()) if files.is_dir() else 0
    if json_output:
        kinds = {name: count._asdict() for name, count in counts.items()}
        print(json.dumps({"place": database.place, **layout._asdict(), "file_bytes": nbytes, "kinds": kinds}))
        return
    from jaxllm.config.values import format_bytes

    print(f"{database.place}: tables of version {layout.version}, and this jaxllm makes {layout.newest}")
    if layout.version != layout.newest:
        print("`jaxllm store migrate`, or the next start of a server, brings them forward; more is known then")
        return
    print(f"{files}: {format_bytes(nbytes)} of files")
    _print_table(
        ("kind", "count", "oldest", "newest"),
        [(name, f"{count.number:,}", _day(count.oldest), _day(count.newest)) for name, count in counts.items()],
    )


@store.command(name="list")
@_takes_place
def list_stored(
    config: ServeConfig,
    *,
    kind: Annotated[StoredName, Parameter(group=COMMAND_GROUP)] = "responses",
    limit: Annotated[int, Parameter(group=COMMAND_GROUP)] = 20,
    json_output: Json = False,
) -> None:
    """List the newest stored objects of a kind.

    Args:
        kind: What to list.
        limit: At most so many.
        json_output: Print a JSON array instead of a table.
    """
    if limit < 1:
        raise ConfigError(f"--limit is {limit}; it must be 1 or more")
    asyncio.run(_list(config, kind, limit, json_output))


async def _list(config: ServeConfig, kind: StoredName, limit: int, json_output: bool) -> None:
    from jaxllm.serving.stored import listed

    async with _opened(config) as database:
        entries = await listed(database, kind, limit)
    if json_output:
        print(json.dumps([entry._asdict() for entry in entries]))
        return
    rows = [(entry.id, _moment(entry.time_of), entry.owner or "–", entry.detail) for entry in entries]
    _print_table(("id", "used" if kind == "conversations" else "made", "key", "detail"), rows)


@store.command
@_takes_place
def clean(
    config: ServeConfig,
    *,
    older_than: Annotated[str, Parameter(group=COMMAND_GROUP)],
    yes: Annotated[bool, Parameter(negative=(), group=COMMAND_GROUP)] = False,
) -> None:
    """Delete stored responses, conversations, files and ended batches that are older than a time.

    Servers may run meanwhile. A response that a newer one continues stays, and of a conversation its last use counts.

    Args:
        older_than: A time such as 30d, 12h, or a number of seconds.
        yes: Do not ask.
    """
    try:
        seconds = parse_seconds(older_than)
    except ValueError as error:
        raise ConfigError(f"--older-than is {older_than!r}: {error}") from None
    if not 0 < seconds < time.time():
        raise ConfigError(f"--older-than is {older_than!r}; it must be above 0, and not before 1970")
    asyncio.run(_clean(config, int(time.time() - seconds), older_than, yes))


async def _clean(config: ServeConfig, time_of: int, older_than: str, yes: bool) -> None:
    from jaxllm.serving.stored import delete_old, deleters

    async with _opened(config) as database:
        if not yes and not agrees("clean", f"Delete what is older than {older_than} from {database.place}? [y/N] "):
            print("kept")
            return
        deleted = await delete_old(deleters(database, config.data_dir), time_of)
    print("deleted " + ", ".join(f"{count} {kind}" for kind, count in deleted.items()))


@store.command
@_takes_place
def migrate(config: ServeConfig) -> None:
    """Bring the tables to the version of this jaxllm, as the start of a server does.

    A database that cannot be brought back is worth a copy first: there is no way to an older version.
    """
    asyncio.run(_migrate(config))


async def _migrate(config: ServeConfig) -> None:
    async with _opened(config, checks=False) as database:
        before = await database.open()
    assert before is not None, "it was opened here"
    if before.version == before.newest:
        print(f"{database.place}: the tables are of version {before.newest}, the newest")
    else:
        print(f"{database.place}: the tables went from version {before.version} to {before.newest}")


@asynccontextmanager
async def _opened(config: ServeConfig, *, checks: bool = True) -> AsyncIterator[Database]:
    """The store that is meant.

    Raises ConfigError where there is none, or `checks` find tables that must be brought forward first.
    """
    from jaxllm.serving.store.database import Database, sqlite_url

    database = Database(config.database_url or sqlite_url(config.data_dir))
    if not database.exists:
        raise ConfigError(f"nothing has been stored in {database.place}; see --data-dir and --database-url")
    try:
        if checks:
            layout = await database.layout()
            if layout.version != layout.newest:
                raise ConfigError(
                    f"{database.place} has tables of version {layout.version}; `jaxllm store migrate` brings them to "
                    f"version {layout.newest}"
                )
        yield database
    finally:
        await database.close()


def _print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if rows:
        print_table(columns, rows)
    else:
        print("nothing is stored")


def _day(seconds: int | None) -> str:
    return "–" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"


def _moment(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
