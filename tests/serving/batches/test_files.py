"""/v1/files with the openai SDK over a socket."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import FakeEngine
from tests.support.covers import covers

LINE = b'{"custom_id": "a"}\n'


@pytest.fixture
def url(listen: Callable[..., str], engine: FakeEngine) -> str:
    return listen(engine, max_file_size=1 << 20)


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@covers("POST /v1/files")
@covers("GET /v1/files/{file_id}")
@covers("DELETE /v1/files/{file_id}")
@covers("GET /v1/files/{file_id}/content")
@covers("POST /v1/files", "file", "purpose")
def test_a_file_comes_back_as_it_was(client: openai.OpenAI, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    made = client.files.create(file=("lines é.jsonl", content), purpose="batch")
    assert (made.object, made.bytes, made.filename) == ("file", len(content), "lines é.jsonl")
    assert (made.purpose, made.status, made.expires_at) == ("batch", "processed", None)
    assert client.files.retrieve(made.id) == made
    response = client.files.content(made.id)
    assert response.read() == content
    assert response.response.headers["content-disposition"].startswith("attachment")
    assert client.files.delete(made.id).model_dump() == {"id": made.id, "object": "file", "deleted": True}
    assert list((tmp_path / "data" / "files").iterdir()) == []
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=made.id):
            gone(made.id)
    assert client.files.list().data == []


@covers("GET /v1/files")
@covers("GET /v1/files", "purpose", "limit", "after", "order")
def test_lists_by_purpose_order_and_page(client: openai.OpenAI) -> None:
    purposes: list[Any] = ["batch", "user_data", "batch", "batch", "evals"]
    ids = [client.files.create(file=(f"{i}", LINE), purpose=p).id for i, p in enumerate(purposes)]
    assert [file.id for file in client.files.list()] == ids[::-1]
    assert [file.id for file in client.files.list(order="asc", purpose="batch")] == [ids[0], ids[2], ids[3]]
    page = client.files.list(limit=2)
    assert page.has_more and [file.id for file in page.data] == [ids[4], ids[3]]
    assert [file.id for file in client.files.list(limit=2, after=ids[3]).data] == [ids[2], ids[1]]
    last = client.files.list(limit=2, after=ids[1])
    assert not last.has_more and [file.id for file in last.data] == [ids[0]]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]  # the SDK turns the pages
    with pytest.raises(openai.BadRequestError, match="after is 'file-none'"):
        client.files.list(after="file-none")


def test_expired_files_are_gone(client: openai.OpenAI, tmp_path: Path) -> None:
    made = client.files.create(
        file=("x", LINE), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    with sqlite3.connect(tmp_path / "data" / "jaxllm.db") as connection:
        connection.execute("update files set expires_at = created_at - 1")
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)
    assert client.files.list().data == []
    kept = client.files.create(file=("y", LINE), purpose="user_data")
    assert [path.name for path in (tmp_path / "data" / "files").iterdir()] == [kept.id]


def test_too_large_is_413_whether_declared_or_streamed(url: str, tmp_path: Path) -> None:
    def upload(body: Any) -> httpx.Response:
        return httpx.post(f"{url}/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})

    def form(size: int) -> bytes:
        parts = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        parts += b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * size
        return parts + b"\r\n--b--\r\n"

    assert upload(form(1 << 20)).json()["bytes"] == 1 << 20
    for body in (form((1 << 20) + 1), form(2 << 20), iter([form(2 << 20)])):
        refused = upload(body)
        assert refused.status_code == 413 and refused.json()["error"]["code"] == "file_too_large"
    assert len(list((tmp_path / "data" / "files").iterdir())) == 1


PURPOSE = ("purpose", (None, "batch"))
FILE = ("file", ("f", LINE))
ANCHOR = ("expires_after[anchor]", (None, "created_at"))


@covers("POST /v1/files", "expires_after[anchor]", "expires_after[seconds]")
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([FILE], "purpose is required"),
        ([PURPOSE], "file is required"),
        ([FILE, ("purpose", (None, "fun"))], "purpose is 'fun'; .*'batch'"),
        ([FILE, PURPOSE, ("expires_after[seconds]", (None, "9999"))], r"expires_after\[anchor\] is required"),
        ([FILE, PURPOSE, ANCHOR, ("expires_after[seconds]", (None, "1"))], r"expires_after\[seconds\] is '1'; .*3600"),
        ([FILE, PURPOSE, ("porpose", (None, "x"))], "unknown field 'porpose'; did you mean 'purpose'"),
        ([FILE, PURPOSE, PURPOSE], "purpose is given 2 times"),
        ([PURPOSE, ("file", (None, "text"))], "file is 'text'"),
        ([PURPOSE, FILE, FILE], "[Tt]oo many files"),
    ],
)
def test_wrong_forms(url: str, parts: Any, message: str) -> None:
    refused = httpx.post(f"{url}/v1/files", files=parts)
    assert refused.status_code == 400, refused.text
    assert re.search(message, refused.json()["error"]["message"]), refused.text


def test_other_bodies_and_queries_are_refused(url: str) -> None:
    assert httpx.post(f"{url}/v1/files", json={"purpose": "batch"}).status_code == 415
    broken = httpx.post(f"{url}/v1/files", content=b"--x", headers={"Content-Type": "multipart/form-data"})
    assert broken.status_code == 400 and "boundary" in broken.json()["error"]["message"]
    for query in ("limit=0", "limit=x", "order=up", "colour=red"):
        refused = httpx.get(f"{url}/v1/files?{query}")
        assert refused.status_code == 400 and query.partition("=")[0] in refused.json()["error"]["message"]


def test_key_is_needed(listen: Callable[..., str], engine: FakeEngine) -> None:
    url = listen(engine, api_key="sesame")
    for method, path in (("POST", ""), ("GET", ""), ("GET", "/x"), ("GET", "/x/content"), ("DELETE", "/x")):
        assert httpx.request(method, f"{url}/v1/files{path}").status_code == 401
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sesame") as client:
        assert client.files.create(file=("f", LINE), purpose="batch").bytes == len(LINE)


@covers("BatchRequest", "output_expires_after")
@covers("OutputExpiresAfter", "anchor", "seconds")
def test_output_of_a_batch_may_expire(make_client: Callable[..., TestClient]) -> None:
    client = make_client(FakeEngine())
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n'
    file = client.post("/v1/files", files={"file": ("a.jsonl", line)}, data={"purpose": "batch"}).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    expiry = {"anchor": "created_at", "seconds": 3600}
    made = client.post("/v1/batches", json=batch | {"output_expires_after": expiry}).json()
    while made["status"] not in ("completed", "failed"):
        made = client.get(f"/v1/batches/{made['id']}").json()
    output = client.get(f"/v1/files/{made['output_file_id']}").json()
    assert output["expires_at"] == output["created_at"] + 3600
    soon = client.post("/v1/batches", json=batch | {"output_expires_after": expiry | {"seconds": 60}})
    assert soon.status_code == 400 and soon.json()["error"]["param"] == "output_expires_after.seconds"
