from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai import OpenAI

from tests.serving.fake_engine import FakeEngine


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
