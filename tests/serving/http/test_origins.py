"""What pages of other sites may make a browser send here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.fake_engine import FakeEngine

UPLOAD: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"{}")}}
KEY = {"Authorization": "Bearer sesame"}


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://localhost:80"])
def test_foreign_pages_may_not_call_a_server_without_a_key(make_client: Any, engine: FakeEngine, origin: str) -> None:
    client = make_client(engine)
    headers = {"Origin": origin, "Host": "localhost:8000"}
    answers = [client.post("/v1/files", headers=headers, **UPLOAD), client.get("/v1/files", headers=headers)]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
    assert client.get("/v1/files").json()["data"] == []


def test_own_and_allowed_pages_may(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, allowed_origins="https://chat.example, http://localhost:3000")
    for origin in ("http://localhost:8000", "https://chat.example", "http://localhost:3000"):
        headers = {"Origin": origin, "Host": "localhost:8000"}
        assert client.post("/v1/files", headers=headers, **UPLOAD).status_code == 200, origin
    for everybody in ("*", '["*"]'):
        anyone = make_client(engine, allowed_origins=everybody)
        assert anyone.get("/v1/models", headers={"Origin": "https://evil.example"}).status_code == 200


def test_a_key_is_what_lets_in_where_there_is_one(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, api_key="sesame", host="0.0.0.0")
    headers = {"Origin": "https://chat.example", "Host": "gpu7.example:8000"}
    assert client.get("/v1/models", headers=headers).status_code == 401
    assert client.get("/v1/models", headers=headers | KEY).status_code == 200


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("evil.example", {}, 421),
        ("evil.example:8000", {}, 421),
        ("localhost.evil.example", {}, 421),
        ("[::1", {}, 421),
        ("localhost:8000", {}, 200),
        ("LOCALHOST", {}, 200),
        ("127.0.0.1:8000", {}, 200),
        ("[::1]:8000", {}, 200),
        ("192.0.2.7", {}, 200),
        ("gpu7.example", {"allowed_hosts": "gpu7.example, other"}, 200),
        ("evil.example", {"allowed_hosts": "gpu7.example"}, 421),
        ("evil.example", {"allowed_hosts": "*"}, 200),
        ("gpu7.example", {"api_key": "sesame"}, 200),
        ("jaxllm.sock", {"uds": "/tmp/jaxllm.sock"}, 200),
        ("jaxllm.sock", {"uds": "/tmp/jaxllm.sock", "allowed_hosts": "gpu7.example"}, 421),
        ("gpu7.example", {"api_key": "sesame", "allowed_hosts": "gpu8.example"}, 421),
    ],
)
def test_the_server_answers_to_its_own_names(
    make_client: Any, engine: FakeEngine, host: str, settings: dict[str, str], status: int
) -> None:
    assert make_client(engine, **settings).get("/v1/models", headers=KEY | {"Host": host}).status_code == status
