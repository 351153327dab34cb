"""The page at /docs, without a network."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin

import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import FakeEngine


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_all_that_the_page_needs_comes_from_the_server(make_client: Any, engine: FakeEngine, prefix: str) -> None:
    client: TestClient = make_client(engine, root_path=prefix or None)
    page = client.get(f"{prefix}/docs")
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    files = [name for name in named if not name.startswith("data:")]
    assert len(files) == 2 and "://" not in page.text
    for name in files:
        file = client.get(urljoin(f"http://localhost{prefix}/docs", name))
        assert file.status_code == 200 and len(file.content) > 10_000, name
    assert client.get(re.findall(r"url: '([^']+)'", page.text)[0]).json()["openapi"].startswith("3.")


def test_the_browser_asks_nobody_else(client: TestClient) -> None:
    rules = dict(rule.split(" ", 1) for rule in client.get("/docs").headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert '"validatorUrl": null' in client.get("/docs").text


def test_there_is_one_page(client: TestClient) -> None:
    assert client.get("/redoc").status_code == 404
