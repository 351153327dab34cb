from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.mcp.conftest import Listening
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import ByteTokenizer, FakeEngine
from tests.serving.openai.test_tools import TEMPLATE

KEY = "Bearer sk-the-key-of-a-tool-server"


@pytest.fixture(scope="session")
def tool_server() -> Iterator[Listening]:
    """A server of tests/mcp/tool_server.py, that wants a key."""
    listening = Listening("http", KEY)
    wait_for(listening.listens, 30)
    yield listening
    listening.end()


@pytest.fixture
def mcp_config(tool_server: Listening, tmp_path: Path) -> Path:
    path = tmp_path / "mcp.json"
    server = {"url": f"{tool_server.url}?token=s3cret-in-a-url", "auth": KEY, "instructions": "Sums."}
    path.write_text(json.dumps({"mcpServers": {"maths": server}}))
    return path


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(TEMPLATE)
    engine.info.max_model_len = 32_000
    return engine


@pytest.fixture
def make_ready(make_client: Callable[..., TestClient], mcp_config: Path) -> Callable[..., TestClient]:
    """A client of a server whose tool servers are ready."""

    def make(engine: FakeEngine, **settings: Any) -> TestClient:
        client = make_client(engine, **{"mcp_config": mcp_config} | settings)
        wait_for(lambda: all(one["status"] == "ready" for one in servers(client)), 20)
        return client

    return make


@pytest.fixture
def client(make_ready: Callable[..., TestClient], engine: FakeEngine) -> TestClient:
    return make_ready(engine)


def servers(client: TestClient) -> list[dict[str, Any]]:
    return client.get("/v1/mcp/servers").json()["data"]


def call(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
