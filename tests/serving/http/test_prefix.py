"""Behind a proxy that puts a path before the routes, whether it cuts it off or not."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import urljoin

import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import FakeEngine

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


@pytest.fixture(params=["setting", "header"])
def client(request: pytest.FixtureRequest, make_client: Callable[..., TestClient], engine: FakeEngine) -> TestClient:
    if request.param == "setting":
        return make_client(engine, root_path="/a/llm/")
    client = make_client(engine)
    client.headers["X-Forwarded-Prefix"] = "/a/llm"
    return client


@pytest.mark.parametrize("before", ["", "/a/llm"])
def test_every_route_is_there_with_the_prefix_and_without(client: TestClient, before: str) -> None:
    assert client.get(f"{before}/v1/models").status_code == 200
    assert client.post(f"{before}/v1/chat/completions", json=HELLO).status_code == 200
    assert client.get(f"{before}/health").status_code == 200
    assert client.get(f"{before}/v1/nowhere").status_code == 404
    assert client.get(f"/other{before}/v1/models").status_code == 404


def test_the_documentation_is_reached_by_the_addresses_in_it(client: TestClient) -> None:
    page = client.get("/docs").text
    assert "'/a/llm/openapi.json'" in page
    assert client.get("/a/llm/openapi.json").json()["servers"][0]["url"] == "/a/llm"


def test_the_page_and_its_files_are_reached_by_the_addresses_in_it(client: TestClient) -> None:
    gone_to = client.get("/a/llm", follow_redirects=False)
    assert (gone_to.status_code, gone_to.headers["location"]) == (308, "/a/llm/")
    page = client.get("/a/llm/", headers={"Accept": "text/html"})
    files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert any(file.endswith(".js") for file in files) and any(file.endswith(".css") for file in files)
    for file in files:
        assert client.get(urljoin("http://localhost/a/llm/", file)).status_code == 200


@pytest.mark.parametrize("prefix", ["llm", "//evil.example", "/a'b", "/a/../b c", "/<script>"])
def test_a_header_that_is_no_plain_path_is_refused(make_client, engine: FakeEngine, prefix: str) -> None:
    response = make_client(engine).get("/docs", headers={"X-Forwarded-Prefix": prefix})
    assert response.status_code == 400
    assert "X-Forwarded-Prefix is" in response.json()["error"]["message"]


def test_the_setting_wins_over_the_header(make_client, engine: FakeEngine) -> None:
    client = make_client(engine, root_path="/ours")
    assert "'/ours/openapi.json'" in client.get("/docs", headers={"X-Forwarded-Prefix": "/theirs"}).text
