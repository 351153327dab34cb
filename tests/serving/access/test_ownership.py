"""What a key has stored is there for that key alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from tests.serving.access.conftest import CHAT, Keyed, key, write_keys
from tests.serving.batches.running import Running, chat
from tests.serving.fake_engine import FakeEngine


@pytest.fixture
def server(keyed: Callable[..., Keyed]) -> Keyed:
    return keyed({"alice": {}, "bob": {}}, api_key="one,two")


def upload(server: Keyed, name: str) -> str:
    form = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    return server.client.post("/v1/files", headers=key(name), **form).json()["id"]  # type: ignore[arg-type]


def not_found(answer: Any) -> bool:
    return answer.status_code == 404 and "error" in answer.json()


def test_responses(server: Keyed) -> None:
    made = server.post("alice", "/v1/responses", {"input": "Hi"}).json()
    place = f"/v1/responses/{made['id']}"
    for path in (place, f"{place}/input_items", f"{place}?stream=true"):
        assert not_found(server.get("bob", path)), path
    assert not_found(server.post("bob", f"{place}/cancel")) and not_found(server.delete("bob", place))
    refused = server.post("bob", "/v1/responses", {"input": "And?", "previous_response_id": made["id"]})
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    item = made["output"][0]["id"]
    reference = {"input": [{"type": "item_reference", "id": item}, {"role": "user", "content": "And?"}]}
    assert not_found(server.post("bob", "/v1/responses", reference))
    assert server.post("alice", "/v1/responses", reference).status_code == 200
    followed = server.post("alice", "/v1/responses", {"input": "And?", "previous_response_id": made["id"]})
    assert followed.status_code == 200 and server.get("alice", place).json()["id"] == made["id"]
    assert server.delete("alice", place).status_code == 200


def test_responses_that_run_in_the_background(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {}, "bob": {}}, FakeEngine(delay=0.05))
    made = server.post("alice", "/v1/responses", {"input": "Hi", "background": True, "stream": True}).text
    response_id = made.split('"id":"')[1].split('"')[0]
    begun = server.post("alice", "/v1/responses", {"input": "Hi", "background": True}).json()["id"]
    for place in (f"/v1/responses/{response_id}", f"/v1/responses/{begun}"):
        assert not_found(server.get("bob", place)) and not_found(server.get("bob", f"{place}?stream=true"))
        assert not_found(server.post("bob", f"{place}/cancel")) and not_found(server.delete("bob", place))
    assert server.get("alice", f"/v1/responses/{begun}").json()["status"] in ("queued", "in_progress")
    assert server.post("alice", f"/v1/responses/{begun}/cancel").json()["status"] == "cancelled"


def test_conversations(server: Keyed) -> None:
    made = server.post("alice", "/v1/conversations", {"items": [{"role": "user", "content": "Hi"}]}).json()
    place = f"/v1/conversations/{made['id']}"
    [item] = server.get("alice", f"{place}/items").json()["data"]
    for answer in (
        server.get("bob", place),
        server.get("bob", f"{place}/items"),
        server.get("bob", f"{place}/items/{item['id']}"),
        server.post("bob", place, {"metadata": {"a": "b"}}),
        server.post("bob", f"{place}/items", {"items": [{"role": "user", "content": "!"}]}),
        server.delete("bob", f"{place}/items/{item['id']}"),
        server.delete("bob", place),
        server.post("bob", "/v1/responses", {"input": "Hi", "conversation": made["id"]}),
        server.post("bob", "/v1/responses/input_tokens", {"input": "Hi", "conversation": made["id"]}),
        server.post("bob", "/v1/responses", {"input": [{"type": "item_reference", "id": item["id"]}]}),
    ):
        assert not_found(answer), answer.request.url
    assert server.post("alice", "/v1/responses", {"input": "?", "conversation": made["id"]}).status_code == 200
    assert len(server.get("alice", f"{place}/items").json()["data"]) == 3
    assert server.get("alice", place).json()["metadata"] == {}


def test_files_and_their_list(server: Keyed) -> None:
    files = {name: [upload(server, name) for _ in range(2)] for name in ("alice", "bob")}
    place = f"/v1/files/{files['alice'][0]}"
    for answer in (server.get("bob", place), server.get("bob", f"{place}/content"), server.delete("bob", place)):
        assert not_found(answer)
    for name in ("alice", "bob"):
        listed = server.get(name, "/v1/files").json()
        assert [file["id"] for file in listed["data"]] == files[name][::-1] and not listed["has_more"]
    assert server.get("bob", f"/v1/files?after={files['alice'][0]}").json()["error"]["param"] == "after"
    body = {"input_file_id": files["alice"][0], "endpoint": "/v1/completions", "completion_window": "24h"}
    refused = server.post("bob", "/v1/batches", body).json()["error"]
    assert refused["code"] == "invalid_input_file" and "no file has the id" in refused["message"]
    assert server.get("alice", f"{place}/content").content == b"{}"


def test_batches_and_their_results(two_keys: Running) -> None:
    alice, bob = (two_keys.client.with_options(api_key=f"key-of-{name}") for name in ("alice", "bob"))
    two_keys.client = alice
    batch = two_keys.finished(two_keys.submit([chat(0), chat(1, temperature=-1)]))
    assert two_keys.results(batch.output_file_id).keys() == {"line-0"}
    assert two_keys.results(batch.error_file_id).keys() == {"line-1"}
    for ask, what in (
        (bob.batches.retrieve, batch.id),
        (bob.batches.cancel, batch.id),
        (bob.files.retrieve, batch.output_file_id),
        (bob.files.content, batch.output_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask(what)
    assert [one.id for one in alice.batches.list()] == [batch.id] and not [*bob.batches.list()]


@pytest.fixture
def two_keys(tmp_path: Path) -> Iterator[Running]:
    keys = write_keys(tmp_path / "keys.yaml", alice={}, bob={})
    server = Running(FakeEngine(), tmp_path / "data", api_key_file=keys)
    yield server
    server.stop()


def test_keys_of_the_command_line_share_what_they_store(server: Keyed) -> None:
    one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
    made = server.client.post("/v1/responses", json={"input": "Hi"}, headers=one).json()["id"]
    assert server.client.get(f"/v1/responses/{made}", headers=two).status_code == 200
    assert not_found(server.get("alice", f"/v1/responses/{made}"))
    own = server.post("alice", "/v1/responses", {"input": "Hi"}).json()["id"]
    assert not_found(server.client.get(f"/v1/responses/{own}", headers=one))


def test_a_server_without_a_file_of_keys_stores_as_before(client: TestClient, tmp_path: Path) -> None:
    made = client.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    assert client.get(f"/v1/responses/{made}").status_code == 200
    with closing(sqlite3.connect(tmp_path / "data" / "jaxllm.db")) as database:
        assert database.execute("SELECT owner FROM responses").fetchall() == [(None,)]


def test_a_cache_of_its_own(keyed: Callable[..., Keyed]) -> None:
    """What the engine is told is a salt that no request of another key can bring."""
    engine = FakeEngine()
    server = keyed({"alice": {"own_cache": True}, "bob": {"own_cache": True}, "carol": {}}, engine)
    salts: dict[tuple[str, str | None], Any] = {}
    for name in ("alice", "bob", "carol"):
        for asked in (None, "x"):
            body = {"cache_salt": asked} if asked else {}
            server.post(name, "/v1/chat/completions", CHAT | body).raise_for_status()
            salts[name, asked] = engine.seen[-1][2]["cache_salt"]
            server.post(name, "/v1/embeddings", {"input": "a"} | body).raise_for_status()
            assert engine.pooled[-1][2]["cache_salt"] == salts[name, asked]
    assert (salts.pop(("carol", None)), salts.pop(("carol", "x"))) == (None, "x")
    assert len(set(salts.values())) == 4 and all("sha256:" in salt for salt in salts.values())
