from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from fastapi.testclient import TestClient

from tests.serving.anthropic.shared import FORMATS, ScriptedEngine

if TYPE_CHECKING:
    import anthropic  # takes a second to load, which most of the processes that collect tests can spare


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def url(listen: Callable[..., str], engine: ScriptedEngine) -> str:
    return listen(engine, **FORMATS)


@pytest.fixture
def sdk(url: str) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def client(make_client: Callable[..., TestClient], engine: ScriptedEngine) -> TestClient:
    return make_client(engine, **FORMATS)
