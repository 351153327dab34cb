"""The version of a database's tables, and the way from any earlier one to the newest."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from jaxllm.errors import ConfigError

logger = logging.getLogger(__name__)

_A_TABLE = "responses"
"""One that every version has."""


class TableLayout(NamedTuple):
    """Which version a database's tables are; None where there are none yet. `newest` is the last that we know."""

    version: str | None
    newest: str


def layout_of(connection: Connection) -> TableLayout:
    """What is there, changing nothing.

    Raises:
        ConfigError: a version that we do not know, of a newer jaxllm.
    """
    newest = _versions().get_current_head()
    assert newest is not None, "there is one line of versions"
    context = MigrationContext.configure(connection)
    found = context.get_current_revision()
    if found is None:
        return TableLayout(_unversioned(connection), newest)
    if found not in {one.revision for one in _versions().walk_revisions()}:
        raise ConfigError(
            f"the database of stored objects has tables of version {found}, which a newer jaxllm has made; this one "
            f"knows versions up to {newest}: use the newer one, or another data_dir or database_url"
        )
    return TableLayout(found, newest)


def upgrade(connection: Connection) -> TableLayout:
    """Bring the tables to the newest version, inside the caller's transaction; what was there. Raises as `layout_of`.

    Whoever calls this holds a lock: two of them at once would both change the same tables.
    """
    before, versions = layout_of(connection), _versions()
    if before.version == before.newest:
        return before
    context = MigrationContext.configure(
        connection, opts={"fn": lambda revision, _: versions._upgrade_revs("head", revision)}
    )
    if before.version is not None and context.get_current_revision() is None:
        context.stamp(versions, before.version)
    context.run_migrations(op=Operations(context))
    if before.version is not None:
        logger.info("the tables of stored objects went from version %s to %s", before.version, before.newest)
    return before


def _unversioned(connection: Connection) -> str | None:
    """The version of a database that says none, as those do that were made before there were versions."""
    inspector = inspect(connection)
    if not inspector.has_table(_A_TABLE):
        return None
    return "2" if "owner" in {column["name"] for column in inspector.get_columns(_A_TABLE)} else "1"


@cache
def _versions() -> ScriptDirectory:
    return ScriptDirectory(str(Path(__file__).parent))
