"""A PostgreSQL of our own, where the machine has one."""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

OTHER_USER = "postgres"
"""PostgreSQL does not run as root; where the tests do, its package's own user runs it."""


def programs() -> Path | None:
    """The folder of PostgreSQL's own programs, which Debian keeps off PATH."""
    found = shutil.which("pg_ctl")
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin")), *([Path(found).resolve().parent] if found else [])]
    return next((place for place in reversed(places) if (place / "initdb").exists()), None)


class Postgres:
    """A server with an empty data directory, on a free port of this machine."""

    def __init__(self, folder: Path, where: Path):
        self._folder, self._where = folder, where
        self._user: dict[str, Any] = {}
        if os.getuid() == 0:
            self._user = {"user": OTHER_USER, "group": pwd.getpwnam(OTHER_USER).pw_gid}
            os.chown(folder, pwd.getpwnam(OTHER_USER).pw_uid, -1)
        command = ["initdb", "-D", folder / "data", "--auth=trust", "--username=jaxllm", "--no-sync", "--encoding=UTF8"]
        self._run(*command)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._names = itertools.count()
        self.start()

    def start(self) -> None:
        options = f"-c listen_addresses=127.0.0.1 -p {self.port} -k {self._folder} -c fsync=off"
        self._run("pg_ctl", "-D", self._folder / "data", "-w", "-l", self._folder / "log", "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._folder / "data", "-m", "immediate", "stop")

    def empty_database(self) -> str:
        """The URL of a new database."""
        name = f"store{next(self._names)}"
        asyncio.run(self._create(name))
        return f"postgresql://jaxllm@127.0.0.1:{self.port}/{name}"

    async def _create(self, name: str) -> None:
        import asyncpg

        connection = await asyncpg.connect(host="127.0.0.1", port=self.port, user="jaxllm", database="postgres")
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()

    def _run(self, program: str, *arguments: Any) -> None:
        command = [self._where / program, *arguments]
        with tempfile.TemporaryFile("w+") as out:  # no pipe, which the server would keep open
            result = subprocess.run(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd="/", timeout=60, **self._user
            )
            out.seek(0)
            assert result.returncode == 0, out.read()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    pytest.importorskip("asyncpg", reason="needs `pip install jaxllm[postgres]`")
    where = programs()
    if where is None:
        pytest.skip("needs PostgreSQL: initdb is neither on PATH nor in /usr/lib/postgresql")
    with tempfile.TemporaryDirectory(prefix="jaxllm-postgres-") as folder:  # pytest's own is for nobody else to enter
        server = Postgres(Path(folder), where)
        yield server
        server.stop()


@pytest.fixture
def database_url(postgres: Postgres) -> str:
    return postgres.empty_database()


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A data directory whose database the first version made."""
    directory = tmp_path / "data"
    directory.mkdir()
    with closing(sqlite3.connect(directory / "jaxllm.db")) as connection:
        connection.executescript((Path(__file__).parent / "first_layout.sql").read_text())
    return directory
