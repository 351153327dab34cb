"""What has been kept for long enough is deleted, and nothing that is still needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Update, update

from jaxllm.serving import stored
from jaxllm.serving.batches.stores import BatchRow, FileRow
from jaxllm.serving.responses.stores import ConversationRow, ResponseRow
from jaxllm.serving.store.database import Database, sqlite_url
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine

DAY = 86_400


def change(directory: Path, *changes: Update) -> None:
    async def main() -> None:
        database = Database(sqlite_url(directory))
        async with database.transaction() as session:
            for one in changes:
                await session.execute(one)
        await database.close()

    asyncio.run(main())


def respond(client: TestClient, **fields: object) -> str:
    answer = client.post("/v1/responses", json={"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def is_there(client: TestClient, path: str) -> bool:
    return client.get(f"/v1/{path}").status_code == 200


@pytest.fixture
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(stored, "AT_ONCE", 2)
    monkeypatch.setattr(stored, "PAUSE_SECONDS", 0.0)


def test_what_is_old_is_deleted_while_the_server_runs(
    make_client: Callable[..., TestClient], engine: FakeEngine, tmp_path: Path, looking_often: None
) -> None:
    client = make_client(engine, data_dir=tmp_path / "data", store_retention="10d")
    past = int(time.time()) - 11 * DAY
    old = [respond(client) for _ in range(5)]
    new = respond(client)
    conversations = [client.post("/v1/conversations", json={"items": []}).json()["id"] for _ in range(2)]
    files = [
        client.post("/v1/files", files={"file": (name, b"{}")}, data={"purpose": "batch"}).json()["id"]
        for name in ("old", "new")
    ]
    change(
        tmp_path / "data",
        update(ResponseRow).where(ResponseRow.id.in_(old)).values(created_at=past),
        update(ConversationRow).where(ConversationRow.id == conversations[0]).values(used_at=past),
        update(ConversationRow).where(ConversationRow.id == conversations[1]).values(created_at=past),
        update(FileRow).where(FileRow.id == files[0]).values(created_at=past),
    )
    wait_for(lambda: not any(is_there(client, f"responses/{name}") for name in old))
    wait_for(lambda: not is_there(client, f"files/{files[0]}"))
    assert not is_there(client, f"conversations/{conversations[0]}")
    assert is_there(client, f"responses/{new}") and is_there(client, f"files/{files[1]}")
    assert is_there(client, f"conversations/{conversations[1]}"), "it was made long ago, and used since"
    assert [file.name for file in (tmp_path / "data" / "files").iterdir()] == [files[1]]


def test_nothing_is_deleted_unless_asked_for(
    make_client: Callable[..., TestClient], engine: FakeEngine, tmp_path: Path, looking_often: None
) -> None:
    client = make_client(engine, data_dir=tmp_path / "data")
    name = respond(client)
    change(tmp_path / "data", update(ResponseRow).values(created_at=0))
    time.sleep(0.3)
    assert is_there(client, f"responses/{name}")


def delete_old(directory: Path, days: int) -> dict[str, int]:
    from jaxllm.serving.stored import deleters

    async def main() -> dict[str, int]:
        database = Database(sqlite_url(directory))
        deleted = await stored.delete_old(deleters(database, directory), int(time.time()) - days * DAY)
        await database.close()
        return deleted

    return asyncio.run(main())


def test_a_response_stays_as_long_as_one_that_continues_it(client: TestClient, tmp_path: Path) -> None:
    first = respond(client)
    second = respond(client, previous_response_id=first)
    third = respond(client, previous_response_id=second)
    past = int(time.time()) - 11 * DAY
    change(tmp_path / "data", update(ResponseRow).where(ResponseRow.id.in_([first, second])).values(created_at=past))
    assert delete_old(tmp_path / "data", 10)["responses"] == 0
    assert respond(client, previous_response_id=third)
    change(tmp_path / "data", update(ResponseRow).values(created_at=past))
    assert delete_old(tmp_path / "data", 10)["responses"] == 4


def test_what_still_runs_stays(client: TestClient, tmp_path: Path) -> None:
    running, abandoned = respond(client), respond(client)
    alive = update(ResponseRow).values(created_at=0, status="in_progress", alive_until=time.time() + 60)
    dead = update(ResponseRow).where(ResponseRow.id == abandoned).values(alive_until=1.0)
    batch = BatchRow(
        id="batch_1", endpoint="/v1/completions", input_file_id="file-1", completion_window="24h", served_model="fake",
        status="in_progress", created_at=0, expires_at=0,
    )  # fmt: skip

    async def main() -> None:
        database = Database(sqlite_url(tmp_path / "data"))
        async with database.transaction() as session:
            session.add(batch)
        await database.close()

    asyncio.run(main())
    change(tmp_path / "data", alive, dead)
    assert delete_old(tmp_path / "data", 10) == {"responses": 1, "conversations": 0, "batches": 0, "files": 0}
    assert is_there(client, f"responses/{running}") and is_there(client, "batches/batch_1")
    change(tmp_path / "data", update(BatchRow).values(status="completed"))
    assert delete_old(tmp_path / "data", 10)["batches"] == 1


def test_a_conversation_s_last_item_counts(client: TestClient, tmp_path: Path) -> None:
    name = client.post("/v1/conversations", json={"items": []}).json()["id"]
    change(tmp_path / "data", update(ConversationRow).values(used_at=0))
    respond(client, conversation=name)
    assert delete_old(tmp_path / "data", 10)["conversations"] == 0
    assert is_there(client, f"conversations/{name}")
