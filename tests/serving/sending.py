"""Requests to a test's server, one field changed."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient

from tests.serving.api_surface import BODIES
from tests.serving.fake_engine import FakeEngine

HELLO = [{"role": "user", "content": "Hi"}]


def prompt(engine: FakeEngine) -> str:
    return bytes(token for token in engine.seen[-1][0] if token < 256).decode()


def send(client: TestClient, path: str, status: int = 200, **fields: Any) -> Any:
    response = client.post(path, json=BODIES[path] | fields)
    assert response.status_code == status, response.text
    return response.json()
