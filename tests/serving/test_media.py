"""Images that a request names: only allowed hosts and folders are read, at public addresses, and no more than fits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.mcp import http
from jaxllm.serving import media
from tests.serving.access.conftest import write_keys
from tests.serving.fake_engine import SeeingEngine
from tests.serving.test_images import MakeClient, asked, ok, part, png, prompt_of, refused

HOST = "pictures.example"
PRIVATE = [
    "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "fd00:ec2::254",
]  # fmt: skip


class Pictures(BaseHTTPRequestHandler):
    """What it sends is named by the path."""

    asked: list[tuple[str, str]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Host"]))
        assert self.headers.get("Authorization") is None and self.headers.get("Cookie") is None
        match self.path.split("/")[1:]:
            case ["red.png"]:
                self._send(200, png())
            case ["to", *place]:
                self._send(302, b"", Location="/".join(place).replace("_", "/"))
            case ["round"]:
                self._send(302, b"", Location="/round")
            case ["large"]:
                self._send(200, b"x" * 100_000)
            case ["packed"]:
                self._send(200, png(), **{"Content-Encoding": "gzip"})
            case ["slow"]:
                self.send_response(200)
                self.end_headers()
                for _ in range(100):
                    self.wfile.write(b"x")
                    threading.Event().wait(0.05)
            case _:
                self._send(404, png())

    def _send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server whose address passes for a public one, and for that of every host."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    async def address(host: str, port: int) -> str:
        return "127.0.0.1"

    monkeypatch.setattr(http, "public_address", address)
    Pictures.asked.clear()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def engine() -> SeeingEngine:
    return SeeingEngine()


@pytest.fixture
def fetch(make_client: MakeClient, engine: SeeingEngine, tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "pictures").mkdir()
    client = make_client(
        engine, allowed_media_domains=f"a.example, {HOST}", allowed_local_media_path=tmp_path / "pictures"
    )

    def post(*urls: str) -> Any:
        return client.post("/v1/chat/completions", json={"messages": asked("A", *map(part, urls))})

    return post


def test_an_allowed_host_is_asked(fetch: Callable[..., Any], engine: SeeingEngine, site: str) -> None:
    ok(fetch(f"{site}/red.png", f"{site}/to/red.png".replace("to/", "to//"), f"{site}/red.png"))
    assert prompt_of(engine) == "[user]A(#8)(#8)(#8)[assistant]"
    assert [path for path, _ in Pictures.asked] == ["/red.png", "/to//red.png", "/red.png"]  # the third is the first
    assert {host for _, host in Pictures.asked} == {site.removeprefix("http://")}


def test_nothing_is_fetched_by_default(client: TestClient, site: str) -> None:
    for url in (f"{site}/red.png", "https://a.example/b.png", "file:///etc/hosts", "file:///tmp"):
        body = {"messages": asked("A", part(url))}
        refused(client.post("/v1/chat/completions", json=body), "messages[0].content[1]:", "allowed_")
    assert not Pictures.asked


@pytest.mark.parametrize("url", [
    "http://other.example:{port}/red.png", "http://user:word@{host}:{port}/red.png", "http://[::1]:{port}/red.png",
    "http://{host}@other.example:{port}/red.png", "http://other.example:{port}\\@{host}/red.png", "ftp://{host}/a",
    "http://other.example:{port}#@{host}/", "http://{host}.other.example:{port}/red.png", "gopher://{host}/",
    "http://127.0.0.1:{port}/red.png", "http://localhost:{port}/red.png", "//{host}/a", "http:{host}",
    "http://2130706433:{port}/red.png", "http://0x7f.1:{port}/red.png", "http://{host}:99999/", "http://{host}:0x50/",
    "http://{host}%00.other.example:{port}/red.png", "http://{host}\r\nX: y/", "http://\uff50ictures.other:{port}/",
    "javascript:alert(1)",
])  # fmt: skip
def test_other_hosts_are_not_asked(fetch: Callable[..., Any], site: str, url: str) -> None:
    refused(fetch(url.replace("{host}", HOST).replace("{port}", site.rpartition(":")[2])), "messages[0].content[1]")
    assert not Pictures.asked


@pytest.mark.parametrize("place", [
    "http:__127.0.0.1:{port}_red.png", "http:__other.example:{port}_red.png", "file:___etc_hosts", "ftp:__{host}_a",
    "http:__user:word@{host}:{port}_red.png", "data:image", "http:__[", "gopher:__{host}", "round",
])  # fmt: skip
def test_redirects_are_checked(fetch: Callable[..., Any], site: str, place: str) -> None:
    to = place.replace("{host}", HOST).replace("{port}", site.rpartition(":")[2])
    refused(fetch(f"{site}/round" if place == "round" else f"{site}/to/{to}"), "messages[0].content[1]:")
    assert len(Pictures.asked) == (1 + media.MOST_REDIRECTS if place == "round" else 1)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_refused(
    fetch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    async def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", ("93.184.215.14", 80)), (0, 0, 0, "", (address, 80))]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", resolve)
    for scheme in ("http", "https"):
        told = refused(fetch(f"{scheme}://{HOST}/red.png"), "cannot be read")
        assert address not in told  # whoever asks learns nothing of this network


def test_sizes_and_times_are_bounded(
    fetch: Callable[..., Any], site: str, monkeypatch: pytest.MonkeyPatch, engine: SeeingEngine
) -> None:
    monkeypatch.setattr(media, "MOST_BYTES", 1000)
    refused(fetch(f"{site}/large"), "too large", "1,000 bytes")
    monkeypatch.setattr(media, "MOST_TOGETHER", len(png()) * 3 // 2)
    refused(fetch(f"{site}/red.png", f"{site}/red.png#2"), "content[2]", "too large")
    refused(fetch(f"{site}/packed"), "or compresses it")
    refused(fetch(f"{site}/nothing"), "answers 404")
    monkeypatch.setattr(media, "FETCH_SECONDS", 0.3)
    refused(fetch(f"{site}/slow"), "messages[0].content[1]")
    ok(fetch(f"{site}/red.png"))
    assert prompt_of(engine) == "[user]A(#8)[assistant]"


def test_files_of_one_folder(fetch: Callable[..., Any], engine: SeeingEngine, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "a b.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    ok(fetch(f"file://{folder}/a%20b.png"))
    assert prompt_of(engine) == "[user]A(#8)[assistant]"
    for place in (
        f"{folder}/../secret.png", f"{folder}/link.png", f"{folder}", f"{folder}/none.png", f"{folder}-other/a.png",
        "/dev/zero", f"{folder}/a%00b.png", f"host{folder}/a%20b.png", f"{folder}/%2e%2e/secret.png",
    ):  # fmt: skip
        told = refused(fetch(f"file://{place}"), "messages[0].content[1]:")
        assert "No such file" not in told


def test_an_owners_files_are_its_own(make_client: MakeClient, engine: SeeingEngine, tmp_path: Path) -> None:
    client = make_client(engine, api_key_file=write_keys(tmp_path / "keys.yaml", one={}, two={}))
    one, two = ({"Authorization": f"Bearer key-of-{name}"} for name in ("one", "two"))
    sent = client.post("/v1/files", files={"file": ("a.png", png())}, data={"purpose": "vision"}, headers=one)
    content = [{"type": "input_image", "file_id": ok(sent)["id"]}]
    body = {"input": [{"role": "user", "content": content}]}
    ok(client.post("/v1/responses", json=body, headers=one))
    refused(client.post("/v1/responses", json=body, headers=two), "input[0].content[0]:", "no file has the id")
