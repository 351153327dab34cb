from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai import OpenAI

from tests.serving.fake_engine import FakeEngine
from tests.serving.responses.fake_tools import TEMPLATE, FakeServer, FakeServers
from tests.serving.responses.shared import PARSERS


@pytest.fixture
def roomy() -> Callable[..., FakeEngine]:
    """An engine whose context holds the prompts of these tests, one token a byte."""

    def make(**settings: Any) -> FakeEngine:
        engine = FakeEngine(**settings)
        engine.info.max_model_len = 4096
        return engine

    return make


@pytest.fixture
def post(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> Callable[..., Any]:
    """Post one response; returns the HTTP response. Keyword arguments are the body."""
    client = make_client(roomy(), data_dir=tmp_path)

    def send(**body: Any) -> Any:
        return client.post("/v1/responses", json=body)

    send.client = client  # type: ignore[attr-defined]
    return send


@pytest.fixture
def sdk(
    listen: Callable[..., str], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> Callable[..., tuple[OpenAI, FakeEngine]]:
    def start(serving: dict[str, Any] | None = None, **engine_settings: Any) -> tuple[OpenAI, FakeEngine]:
        engine = roomy(**engine_settings)
        url = listen(engine, data_dir=tmp_path, **serving or {})
        return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), engine

    return start


@pytest.fixture
def tools(
    listen: Callable[..., str], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> Callable[..., tuple[OpenAI, FakeEngine]]:
    """A server in front of tool servers, whose model says `script`, a request at a time, and then REPLY."""

    def start(*servers: FakeServer, script: Sequence[str] = (), serving: dict[str, Any] | None = None, **settings: Any):
        engine = roomy(**settings)
        engine.info.max_model_len = 40_000
        engine.script.extend(script)
        elsewhere = next((server for server in servers if server.label == "elsewhere"), None)
        fakes = FakeServers(*(server for server in servers if server is not elsewhere), elsewhere=elsewhere)
        template = tmp_path / "template.jinja"
        template.write_text(TEMPLATE)
        url = listen(engine, fakes, data_dir=tmp_path, chat_template=template, **PARSERS, **serving or {})
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)
        client.fakes = fakes  # type: ignore[attr-defined]
        return client, engine

    return start
