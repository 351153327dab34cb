"""Compressed request bodies."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.http.middleware import PIECE
from tests.serving.fake_engine import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
JSON = {"Content-Type": "application/json"}


def zipped(body: object) -> bytes:
    return gzip.compress(json.dumps(body).encode(), mtime=0)  # the same in every process that collects tests


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
def test_gzip_is_decoded(client: TestClient, encoding: str) -> None:
    answer = client.post("/v1/chat/completions", content=zipped(CHAT), headers={**JSON, "Content-Encoding": encoding})
    assert answer.status_code == 200
    assert answer.json()["usage"] == client.post("/v1/chat/completions", json=CHAT).json()["usage"]


def test_members_that_follow_one_another_are_one_body(client: TestClient) -> None:
    text = json.dumps(CHAT).encode()
    body = gzip.compress(text[:10]) + gzip.compress(text[10:])
    assert client.post("/v1/chat/completions", content=body, headers={**JSON, "Content-Encoding": "gzip"}).is_success


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_bodies_of_several_pieces_are_whole(client: TestClient, size: int) -> None:
    body = json.dumps({"prompt": "Hi"}).encode().ljust(size)
    answer = client.post("/tokenize", content=gzip.compress(body), headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.json() == client.post("/tokenize", json={"prompt": "Hi"}).json()


def test_a_file_is_decoded(client: TestClient) -> None:
    plain = client.build_request("POST", "/v1/files", data={"purpose": "batch"}, files={"file": b"{}\n" * 1000})
    headers = {"Content-Type": plain.headers["content-type"], "Content-Encoding": "gzip"}
    answer = client.post("/v1/files", content=gzip.compress(plain.read()), headers=headers)
    assert answer.status_code == 200 and answer.json()["bytes"] == 3000


def test_the_limit_is_of_what_it_becomes(make_client: Callable[..., TestClient], engine: FakeEngine) -> None:
    client = make_client(engine, max_body_size=PIECE)
    body = gzip.compress(b" " * 100 * PIECE)
    assert len(body) < PIECE
    answer = client.post("/v1/chat/completions", content=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("body", [b"{}", zipped(CHAT)[:-9], zipped(CHAT) + b"more", zipped(CHAT)[:-8] + bytes(8)])
def test_what_is_no_gzip_is_said(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/chat/completions", content=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_encoding"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
def test_other_encodings_are_refused(client: TestClient, path: str) -> None:
    kind = JSON if "chat" in path else {"Content-Type": "multipart/form-data; boundary=a"}
    answer = client.post(path, content=b"abc", headers={**kind, "Content-Encoding": "br"})
    assert answer.status_code == 415 and answer.headers["accept-encoding"] == "gzip"
    assert answer.json()["error"]["message"] == "Content-Encoding is 'br'; it must be gzip or left out"


def test_identity_is_no_encoding(client: TestClient) -> None:
    assert client.post("/v1/chat/completions", json=CHAT, headers={"Content-Encoding": "identity"}).is_success
