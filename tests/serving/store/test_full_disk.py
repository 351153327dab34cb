"""What is stored on a disk that is full: requests are told so, and batches wait until there is room."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import DBAPIError, OperationalError

from jaxllm.errors import StorageFullError
from jaxllm.serving.batches import run
from jaxllm.serving.batches.journal import Journal
from jaxllm.serving.http.api_error import telling_full
from tests.serving.batches.running import CHAT, Running, chat, questions
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine
from tests.serving.responses.shared import parse_events, types

LINES = 30


class Disk(Protocol):
    """Holds the folder `data`."""

    folder: Path

    def fill(self) -> None: ...

    def free(self) -> None: ...


class SmallDisk:
    """One of 4 MB, which only root can mount."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (65536, 1024, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        self._ballast.unlink()


class RefusingDisk:
    """Raises what writing to a full one raises."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self.folder = folder
        self._full = False
        open_file, full = Path.open, OSError(errno.ENOSPC, "No space left on device")

        def open_some(path: Path, mode: str = "r", *others: Any, **named: Any) -> Any:
            if self._full and mode[0] in "wa" and folder in path.parents:
                raise full
            return open_file(path, mode, *others, **named)

        patch.setattr(Path, "open", open_some)

    def refuse(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if self._full and statement.startswith(("INSERT", "UPDATE", "DELETE")):
            cause = sqlite3.OperationalError("database or disk is full")
            cause.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise OperationalError(statement, {}, cause)

    def fill(self) -> None:
        self._full = True

    def free(self) -> None:
        self._full = False


@pytest.fixture(params=["refusing", "small"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(run, "ROOM_SECONDS", 0.1)
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "refusing":
        refusing = RefusingDisk(folder, monkeypatch)
        event.listen(Engine, "before_cursor_execute", refusing.refuse)
        yield refusing
        event.remove(Engine, "before_cursor_execute", refusing.refuse)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a disk")
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def server(disk: Disk) -> Iterator[Running]:
    running = Running(FakeEngine(), disk.folder / "data")
    yield running
    running.stop()


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=20)


@pytest.mark.parametrize("body", [{}, {"conversation": True, "store": False}], ids=["response", "conversation"])
def test_a_stream_that_cannot_be_stored_ends_with_an_event(
    server: Running, disk: Disk, caplog: pytest.LogCaptureFixture, body: dict[str, Any]
) -> None:
    if "conversation" in body:
        body = body | {"conversation": post(server, "/conversations").json()["id"]}
    else:
        post(server, "/responses", input="Hi")  # so that the database is there
    disk.fill()
    events = parse_events(post(server, "/responses", input="Hi", stream=True, **body).text)
    assert types(events)[-4:] == ["content_part.done", "output_item.done", "error", "failed"]
    assert events[-2]["code"] == "insufficient_storage" and "no room" in events[-2]["message"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert response["status"] == "failed" and "completed_at" not in response
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "could not be stored: the server has no room" in record.getMessage() and not record.exc_info
    disk.free()
    events = parse_events(post(server, "/responses", input="Hi", stream=True, **body).text)
    assert types(events)[-1] == "completed"


def test_what_stores_answers_507(server: Running, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    file = server.client.files.create(file=("in.jsonl", b'{"custom_id": "a"}'), purpose="batch")
    conversation = post(server, "/conversations").json()["id"]
    message = {"type": "message", "role": "user", "content": "Hi"}
    disk.fill()
    answers = [
        post(server, "/responses", input="Hi"),
        post(server, "/responses", input="Hi", background=True),
        post(server, "/responses", input="Hi", background=True, stream=True),
        post(server, "/conversations"),
        post(server, f"/conversations/{conversation}/items", items=[message]),
        post(server, "/batches", input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
        httpx.post(f"{server.url}/files", data={"purpose": "batch"}, files={"file": b"{}"}),
        httpx.delete(f"{server.url}/conversations/{conversation}"),
    ]
    assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(507, "insufficient_storage")] * 8
    assert httpx.get(f"{server.url}/files/{file.id}").status_code == 200
    assert "Traceback" not in caplog.text
    disk.free()
    assert post(server, "/responses", input="Hi").status_code == 200
    assert [one.id for one in server.client.files.list()] == [file.id]
    assert [one.id for one in server.client.batches.list()] == []
    assert not list((disk.folder / "data" / "batches").glob("*"))  # which nobody would ever remove


def test_a_background_response_that_cannot_be_stored_has_a_stream_that_ends(server: Running, disk: Disk) -> None:
    server.engine.delay = 0.02
    body = {"input": "Hi", "background": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/responses", json=body, timeout=20) as response:
        arriving = response.iter_text()
        text = next(arriving)
        disk.fill()
        text += "".join(arriving)
    events = parse_events(text)
    assert types(events)[-2:] == ["error", "failed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    disk.free()


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/responses"])
def test_a_batch_goes_on_once_there_is_room(
    server: Running, disk: Disk, caplog: pytest.LogCaptureFixture, endpoint: str
) -> None:
    caplog.set_level("INFO")
    lines = [chat(number) for number in range(LINES)]
    if endpoint != CHAT:
        lines = [line | {"url": endpoint, "body": {"input": f"Question {at}"}} for at, line in enumerate(lines)]
    server.engine.delay = 0.02
    batch_id = server.submit(lines, endpoint)
    wait_for(lambda: len(server.engine.seen) >= 10)
    disk.fill()
    wait_for(lambda: f"batch {batch_id} waits: the server has no room" in caplog.text)
    wait_for(lambda: not server.engine.active or endpoint != CHAT)
    assert server.client.batches.retrieve(batch_id).status == "in_progress"
    disk.free()
    batch = server.finished(batch_id)
    assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
    assert server.results(batch.output_file_id).keys() == {f"line-{number}" for number in range(LINES)}
    assert f"batch {batch_id} goes on" in caplog.text and "Traceback" not in caplog.text
    if endpoint == CHAT:  # what was answered is kept in memory; a response that could not be stored is made anew
        assert sorted(questions(server.engine), key=int) == [str(number) for number in range(LINES)]


def test_a_server_stops_while_a_batch_waits_for_room(
    disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ROOM_SECONDS", 1000.0)
    server = Running(FakeEngine(delay=0.02), disk.folder / "data")
    batch_id = server.submit([chat(number) for number in range(LINES)])
    wait_for(lambda: bool(server.engine.active))
    disk.fill()
    wait_for(lambda: f"batch {batch_id} waits" in caplog.text)
    server.stop()
    disk.free()
    server = Running(FakeEngine(), disk.folder / "data")
    assert server.finished(batch_id).request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
    server.stop()


def test_files_are_deleted_to_make_room(server: Running, disk: Disk) -> None:
    if not isinstance(disk, SmallDisk):
        pytest.skip("it takes a disk that gets room")
    file = server.client.files.create(file=("in.jsonl", bytes(500_000)), purpose="batch")
    disk.fill()
    assert post(server, "/responses", input="Hi").status_code == 507
    server.client.files.delete(file.id)
    assert post(server, "/responses", input="Hi").status_code == 200


def test_a_journal_keeps_whole_lines_only(tmp_path: Path) -> None:
    """What found no room is written again, once, after what was there before."""
    journal = Journal(tmp_path)
    journal.start("first")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageFullError):
        patch.setattr("jaxllm.serving.batches.journal._append_to", _half)
        journal.start("second")
    journal.start("second")
    assert journal.recover().crashes == {"first": 1, "second": 1}


def _half(path: Path, content: bytes, *, synced: bool) -> None:
    with path.open("ab") as file:
        file.write(content[: len(content) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


class _PostgresError(Exception):
    sqlstate = "53100"


@pytest.mark.parametrize("error", [OSError(errno.EDQUOT, "quota"), DBAPIError("INSERT", {}, _PostgresError())])
def test_a_quota_and_a_database_elsewhere_are_full_too(error: Exception) -> None:
    with pytest.raises(StorageFullError), telling_full():
        raise error
