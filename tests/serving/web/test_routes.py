"""The page's files over HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.web import STATIC
from tests.serving.fake_engine import FakeEngine

TYPES = {
    ".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml", ".txt": "text/plain; charset=utf-8", ".woff2": "font/woff2",
}  # fmt: skip
FILES = sorted(path for path in STATIC.rglob("*") if path.is_file())


@pytest.fixture
def client(client: TestClient) -> TestClient:
    """A browser."""
    client.headers["Accept"] = "text/html,application/xhtml+xml,*/*;q=0.8"
    return client


def address(path) -> str:
    name = path.relative_to(STATIC).as_posix()
    return "/" if name == "index.html" else f"/{name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_served_as_it_was_built(client: TestClient, path):
    response = client.get(address(path))
    assert (response.status_code, response.headers["content-type"]) == (200, TYPES[path.suffix])
    assert response.content == path.read_bytes()
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    assert client.head(address(path)).headers["etag"] == response.headers["etag"]


def test_a_browser_that_has_a_file_is_not_sent_it_again(client: TestClient):
    tag = client.get("/").headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = client.get("/", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.get("/assets/index.js").headers["etag"] != tag


def test_scripts_are_compressed_for_those_who_can_read_that(client: TestClient):
    packed, plain = (
        client.get("/assets/index.js", headers={"Accept-Encoding": coding}) for coding in ("gzip", "identity")
    )
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 2
    assert packed.content == plain.content


def test_nothing_but_own_files_may_run_or_be_asked(client: TestClient):
    rules = dict(rule.split(" ", 1) for rule in client.get("/").headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["connect-src"] == rules["font-src"] == "'self'"
    html = client.get("/").text
    assert not re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|style=|https?://", html)


def test_what_the_page_names_is_there(client: TestClient):
    for name in re.findall(r'(?:src|href)="\./([^"]+)"', client.get("/").text):
        assert client.get(f"/{name}").status_code == 200
    for font in re.findall(r"url\(\./([^)]+)\)", client.get("/assets/katex.css").text):
        assert font.endswith(".woff2") and client.get(f"/assets/{font}").status_code == 200


def test_no_key_is_needed_to_be_asked_for_one(make_client: Callable[..., TestClient], engine: FakeEngine):
    client = make_client(engine, api_key="secret")
    assert (client.get("/").status_code, client.get("/v1/models").status_code) == (200, 401)


def test_other_paths_stay_the_apis(client: TestClient):
    for path in (
        "/nothing",
        "/assets/nothing.js",
        "/assets/../routes.py",
        "/assets/%2e%2e/%2e%2e/routes.py",
        "/assets",
    ):
        response = client.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    assert client.post("/").status_code == 405
    assert not [path for path in client.get("/openapi.json").json()["paths"] if path == "/" or "assets" in path]


def test_no_web_serves_none_of_it(make_client: Callable[..., TestClient], engine: FakeEngine):
    client = make_client(engine, web=False)
    assert {client.get(address(path)).status_code for path in FILES if path.name != "index.html"} == {404}
    assert "<html" not in client.get("/", headers={"Accept": "text/html"}).text


def test_the_files_are_small_enough_for_a_wheel():
    assert sum(path.stat().st_size for path in FILES) < 3 * 2**20
    assert {path.suffix for path in FILES} == set(TYPES)
