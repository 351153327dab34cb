"""Commands about servers: `jaxllm serve`, those that run, the keys that they ask for, and what they have stored."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from jaxllm.cli.settings import Json, Switch, documented, takes_settings
from jaxllm.cli.terminal import agrees, print_found, print_table
from jaxllm.config import ServeConfig
from jaxllm.config.values import format_bytes, parse_seconds
from jaxllm.errors import ConfigError, one_line

if TYPE_CHECKING:
    from jaxllm.serving.store.database import Database


@takes_settings(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Every setting is a flag, a JAXLLM_… variable (JAXLLM_MAX_MODEL_LEN) and a YAML key (max_model_len); a flag wins over
    a variable, a variable over the file.
    """
    if config.ray:
        try:
            from jaxllm.ray import run_on_ray as run_server
        except ImportError as error:
            raise ConfigError(
                f"ray is true, and Ray Serve cannot be imported ({one_line(error)}): pip install 'jaxllm[ray]'"
            ) from None
    else:
        from jaxllm.serving.server import serve as run_server
    run_server(config)


@documented
def ps(*, json_output: Json = False) -> None:
    """List the jaxllm servers that you run on this machine: process, models, address, memory.

    Args:
        json_output: Print a JSON array instead of a table.
    """
    from jaxllm.serving.running import running_servers

    servers = running_servers()
    rows = [(str(one.pid), ", ".join(one.models), one.address, format_bytes(one.nbytes)) for one in servers]
    facts = [one._asdict() for one in servers]
    print_found(facts, json_output, ("pid", "models", "address", "memory"), rows, none="no server runs")


@documented
def stop(
    model: str,
    *,
    url: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="JAXLLM_API_KEY")] = None,
) -> None:
    """Unload a model of a server that you run on this machine; a server that has no other is ended.

    Args:
        model: A name that `jaxllm ps` lists.
        url: The address of the server, where several have the model.
        api_key: The key that the server asks for.
    """
    from jaxllm.serving.running import running_servers

    has_it = [one for one in running_servers() if model in one.models and url in (None, one.address)]
    if len(has_it) != 1:
        which = ": choose one with --url, " + ", ".join(one.address for one in has_it) if has_it else ""
        raise ConfigError(
            f"{len(has_it) or 'no'} servers of yours on this machine have {model!r}{which}; see `jaxllm ps`"
        )
    if asyncio.run(_unload(has_it[0].address, model, api_key)):
        print(f"unloaded {model}")
    else:
        os.kill(has_it[0].pid, signal.SIGTERM)
        print(f"the server of {model} ends (process {has_it[0].pid})")


async def _unload(url: str, model: str, api_key: str | None) -> bool:
    """False where the server has no other model. Raises ServerError where it is busy."""
    from jaxllm.cli.client import ServerClient

    async with ServerClient(url, api_key) as client:
        if len({one["root"] for one in await client.models() if one["parent"] is None}) == 1:
            return False
        await client.ask("POST", "/v1/models/unload", {"model": model})
    return True


keys = App(name="keys", help="Make API keys for `jaxllm serve --api-key-file`.")


@keys.command
@documented
def new(name: str, *, json_output: Json = False) -> None:
    """Make a key and print it, this once, and the line that goes into the file of keys, which holds only its hash.

    The line is on standard output and the key on standard error: `jaxllm keys new alice >> keys.yaml` adds the one and
    shows the other.

    Args:
        name: What metrics, logs and the owners of stored objects call the key.
        json_output: Print name, key and hash as one JSON object on standard output instead.
    """
    from jaxllm.serving.access.keys import NAME, hash_of, new_key

    if not re.fullmatch(NAME, name):
        raise ConfigError(f"NAME is {name!r}: it must have 1 to 64 letters, digits, '.', '_' and '-'")
    key = new_key()
    if json_output:
        print(json.dumps({"name": name, "key": key, "hash": hash_of(key)}))
        return
    print(f'"{name}": {{hash: "{hash_of(key)}"}}')
    print(f"The key of {name}, which is shown this once: {key}", file=sys.stderr)


WHERE = ("data_dir", "database_url")
_takes_place = takes_settings(ServeConfig, only=WHERE, positional_model=False)

store = App(name="store", help="Look at what servers have stored, delete what is old, bring its tables forward.")


@store.command
@_takes_place
async def info(config: ServeConfig, *, json_output: Json = False) -> None:
    """Say where the store is, which version its tables are, and how much is in it. Nothing is changed.

    Args:
        json_output: Print a JSON object instead of a table.
    """
    from jaxllm.serving.batches.stores import files_of
    from jaxllm.serving.stored import counted

    async with _opened(config, "null" if json_output else None, checks=False) as database:
        layout = await database.layout()
        counts = await counted(database) if layout.version == layout.newest else {}
    files = files_of(config.data_dir)
    nbytes = sum(file.stat().st_size for file in files.iterdir() if file.is_file()) if files.is_dir() else 0
    if json_output:
        kinds = {name: count._asdict() for name, count in counts.items()}
        print(json.dumps({"place": database.place, **layout._asdict(), "file_bytes": nbytes, "kinds": kinds}))
        return
    print(f"{database.place}: tables of version {layout.version}, and this jaxllm makes {layout.newest}")
    if layout.version != layout.newest:
        print("`jaxllm store migrate`, or the next start of a server, brings them forward; more is known then")
        return
    print(f"{files}: {format_bytes(nbytes)} of files")
    rows = [(name, f"{count.number:,}", _day(count.oldest), _day(count.newest)) for name, count in counts.items()]
    if rows:
        print_table(("kind", "count", "oldest", "newest"), rows)
    else:
        print("nothing is stored")


@store.command(name="list")
@_takes_place
async def list_stored(
    config: ServeConfig,
    *,
    kind: Literal["responses", "conversations", "batches", "files"] = "responses",
    limit: int = 20,
    json_output: Json = False,
) -> None:
    """List the newest stored objects of a kind.

    Args:
        kind: What to list.
        limit: At most so many.
        json_output: Print a JSON array instead of a table.
    """
    from jaxllm.serving.stored import listed

    if limit < 1:
        raise ConfigError(f"--limit is {limit}; it must be 1 or more")
    async with _opened(config, "[]" if json_output else None) as database:
        entries = await listed(database, kind, limit)
    rows = [
        (entry.id, f"{datetime.fromtimestamp(entry.time_of, UTC):%Y-%m-%d %H:%M:%S}", entry.owner or "–", entry.detail)
        for entry in entries
    ]
    headings = ("id", "used" if kind == "conversations" else "made", "key", "detail")
    print_found([entry._asdict() for entry in entries], json_output, headings, rows, none="nothing is stored")


@store.command
@_takes_place
async def clean(config: ServeConfig, *, older_than: str, yes: Switch = False) -> None:
    """Delete stored responses, conversations, files and ended batches that are older than a time.

    Servers may run meanwhile. A response that a newer one continues stays, and of a conversation its last use counts.

    Args:
        older_than: A time such as 30d, 12h, or a number of seconds.
        yes: Do not ask.
    """
    from jaxllm.serving.stored import delete_old, deleters

    try:
        seconds = parse_seconds(older_than)
    except ValueError as error:
        raise ConfigError(f"--older-than is {older_than!r}: {error}") from None
    if not 0 < seconds < time.time():
        raise ConfigError(f"--older-than is {older_than!r}; it must be above 0, and not before 1970")
    async with _opened(config) as database:
        if not yes and not agrees("clean", f"Delete what is older than {older_than} from {database.place}? [y/N] "):
            print("kept")
            return
        deleted = await delete_old(deleters(database, config.data_dir), int(time.time() - seconds))
    print("deleted " + ", ".join(f"{count} {kind}" for kind, count in deleted.items()))


@store.command
@_takes_place
async def migrate(config: ServeConfig) -> None:
    """Bring the tables to the version of this jaxllm, as the start of a server does.

    A database that cannot be brought back is worth a copy first: there is no way to an older version.
    """
    async with _opened(config, checks=False) as database:
        before = await database.open()
    assert before is not None, "it was opened here"
    if before.version == before.newest:
        print(f"{database.place}: the tables are of version {before.newest}, the newest")
    else:
        print(f"{database.place}: the tables went from version {before.version} to {before.newest}")


@asynccontextmanager
async def _opened(config: ServeConfig, nothing: str | None = None, *, checks: bool = True) -> AsyncIterator[Database]:
    """The store that is meant. Raises ConfigError where `checks` find tables of another version.

    Ends the command where there is no store, since nothing has been stored then; `nothing` says so instead of a line.
    """
    from jaxllm.serving.store.database import Database, sqlite_url

    database = Database(config.database_url or sqlite_url(config.data_dir))
    if not database.exists:
        print(nothing or f"nothing has been stored in {database.place}; see --data-dir and --database-url")
        sys.exit(0)
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


def _day(seconds: int | None) -> str:
    return "–" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"
