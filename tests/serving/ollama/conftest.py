from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from tests.serving.anthropic.shared import FORMATS, ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def client(make_client: Callable[..., TestClient], engine: ScriptedEngine) -> TestClient:
    return make_client(engine, **FORMATS)


@pytest.fixture
def url(listen: Callable[..., str], engine: ScriptedEngine) -> str:
    return listen(engine, **FORMATS)
