"""X-Request-Id: the caller's own in the response and in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import FakeEngine

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
OWN = {"X-Request-Id": "trace 42/a"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", HELLO),
        ("POST", "/v1/chat/completions", HELLO | {"stream": True}),
        ("POST", "/v1/chat/completions", {"messages": 3}),
        ("POST", "/v1/embeddings", {"input": "Hi"}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/nowhere", None),
    ],
)
def test_the_callers_own_comes_back(client: TestClient, method: str, path: str, body: object) -> None:
    assert client.request(method, path, json=body, headers=OWN).headers["x-request-id"] == "trace 42/a"
    others = [client.request(method, path, json=body).headers["x-request-id"] for _ in range(2)]
    assert others[0] != others[1] and all(others)


def test_without_one_it_is_the_answers_id(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json=HELLO)
    assert response.headers["x-request-id"] == response.json()["id"]


def test_two_requests_may_have_the_same(client: TestClient) -> None:
    ids = [client.post("/v1/chat/completions", json=HELLO, headers=OWN).json()["id"] for _ in range(2)]
    assert ids[0] != ids[1]


def test_the_log_has_it(make_client: Callable[..., TestClient], engine: FakeEngine, caplog) -> None:
    client = make_client(engine, enable_request_logging=True)
    with caplog.at_level(logging.INFO, "jaxllm.requests"):
        client.post("/v1/chat/completions", json=HELLO, headers=OWN)
        client.get("/v1/no%0Awhere")
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxllm.requests"]
    assert '"POST /v1/chat/completions" 200, request trace 42/a, ' in lines[0]
    assert '"GET /v1/no%0Awhere" 404, request ' in lines[1] and len(lines) == 2


@pytest.mark.parametrize("sent", ["x" * 257, " ", "caf\xe9"])
def test_one_that_no_header_should_hold_is_refused(client: TestClient, sent: str) -> None:
    response = client.get("/v1/models", headers={"X-Request-Id": sent.encode("latin-1")})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("X-Request-Id is ")
    assert response.headers["x-request-id"] != sent
