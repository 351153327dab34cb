"""`jaxllm store` looks at what servers have stored, deletes what is old, and brings the tables forward."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.serving.store import test_layout

FIRST = Path(test_layout.__file__).parent / "first_layout.sql"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A data directory that the first version has made, with an object of each kind."""
    with closing(sqlite3.connect(tmp_path / "jaxllm.db")) as connection:
        connection.executescript(FIRST.read_text())
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file-1").write_bytes(b"{}\n")
    return tmp_path


def test_info_says_what_is_there_and_changes_nothing(cli: Callable[..., Any], stored: Path) -> None:
    before = (stored / "jaxllm.db").read_bytes()
    said = cli("store", "info", "--data-dir", str(stored))
    assert said.code == 0 and "tables of version 1, and this jaxllm makes 4" in said.out
    assert "`jaxllm store migrate`" in said.out and (stored / "jaxllm.db").read_bytes() == before


def test_migrate_brings_the_tables_forward_once(cli: Callable[..., Any], stored: Path) -> None:
    assert "the tables went from version 1 to 4" in cli("store", "migrate", "--data-dir", str(stored)).out
    assert "of version 4, the newest" in cli("store", "migrate", "--data-dir", str(stored)).out
    found = json.loads(cli("store", "info", "--json", "--data-dir", str(stored)).out)
    assert (found["version"], found["newest"], found["file_bytes"]) == ("4", "4", 3)
    assert found["kinds"]["responses"] == {"number": 1, "oldest": 1700000005, "newest": 1700000005}
    table = cli("store", "info", "--data-dir", str(stored)).out
    assert "conversations" in table and "2023-11-14" in table


def test_list_shows_the_newest(cli: Callable[..., Any], stored: Path) -> None:
    refused = cli("store", "list", "--data-dir", str(stored))
    assert refused.code == 2 and "`jaxllm store migrate` brings them to version 4" in refused.err
    cli("store", "migrate", "--data-dir", str(stored))
    for kind, name, detail in (
        ("responses", "resp_1", "completed"),
        ("conversations", "conv_1", '{"topic":"capitals"}'),
        ("batches", "batch_1", "completed"),
        ("files", "file-1", "in.jsonl"),
    ):
        (entry,) = json.loads(cli("store", "list", "--kind", kind, "--json", "--data-dir", str(stored)).out)
        assert (entry["id"], entry["kind"], entry["owner"], entry["detail"]) == (name, kind, None, detail)
        assert name in cli("store", "list", "--kind", kind, "--data-dir", str(stored)).out


def test_clean_deletes_what_is_old(cli: Callable[..., Any], stored: Path) -> None:
    cli("store", "migrate", "--data-dir", str(stored))
    asked = cli("store", "clean", "--older-than", "30d", "--data-dir", str(stored))
    assert asked.code == 2 and "say --yes" in asked.err
    gone = cli("store", "clean", "--older-than", "30d", "--yes", "--data-dir", str(stored))
    assert gone.out == "deleted 1 responses, 1 conversations, 1 batches, 1 files\n"
    assert not list((stored / "files").iterdir())
    assert cli("store", "list", "--data-dir", str(stored)).out == "nothing is stored\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["clean", "--older-than", "soon"], "--older-than is 'soon': it must be a time, such as 30d"),
        (["clean", "--older-than", "0"], "--older-than is '0'; it must be above 0"),
        (["clean", "--older-than", "nan"], "--older-than is 'nan'; it must be above 0"),
        (["list", "--limit", "0"], "--limit is 0; it must be 1 or more"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    cli: Callable[..., Any], stored: Path, arguments: list[str], said: str
) -> None:
    result = cli("store", *arguments, "--data-dir", str(stored))
    assert result.code == 2 and said in result.err and result.err.count("\n") == 1


def test_a_store_that_is_not_there_is_not_made(cli: Callable[..., Any], stored: Path) -> None:
    shutil.rmtree(stored / "files")
    (stored / "jaxllm.db").unlink()
    for command in (["info"], ["list"], ["migrate"], ["clean", "--older-than", "30d"]):
        result = cli("store", *command, "--data-dir", str(stored))
        assert (result.code, result.err) == (0, "") and result.out.startswith("nothing has been stored in")
    for command, shown in (("info", "null\n"), ("list", "[]\n")):
        assert cli("store", command, "--json", "--data-dir", str(stored)).out == shown
    assert not list(stored.iterdir())
