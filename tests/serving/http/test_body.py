"""Bodies of hostile shapes, and of honest ones that look like them."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.json_body import MAX_STRUCTURE, MAX_VALUES, check_structure
from tests.serving.conftest import quickly

JSON = {"Content-Type": "application/json"}
HUGE = "9" * 30
CHAT = '"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2'


def post(client: TestClient, path: str, body: str) -> tuple[int, dict[str, Any]]:
    response = client.post(path, content=body.encode(), headers=JSON)
    return response.status_code, response.json()["error"]


@pytest.mark.parametrize("number", [HUGE, f"-{HUGE}", "1e400", "-1E+400"])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", f'{{{CHAT}, "seed": NUMBER}}', "seed"),
        ("/v1/chat/completions", f'{{{CHAT}, "priority": NUMBER}}', "priority"),
        ("/v1/chat/completions", f'{{{CHAT}, "temperature": NUMBER}}', "temperature"),
        ("/v1/chat/completions", f'{{{CHAT}, "stop_token_ids": [1, NUMBER]}}', "stop_token_ids[1]"),
        ("/v1/chat/completions", f'{{{CHAT}, "chat_template_kwargs": {{"a": [NUMBER]}}}}', "chat_template_kwargs.a[0]"),
        (
            "/v1/chat/completions",
            f'{{{CHAT}, "structured_outputs": {{"json": {{"maximum": NUMBER}}}}}}',
            "structured_outputs.json.maximum",
        ),
        ("/v1/completions", '{"prompt": [NUMBER]}', "prompt[0]"),
        ("/v1/embeddings", '{"input": [[1], [NUMBER]]}', "input[1][0]"),
        ("/v1/responses", '{"input": "Hi", "max_output_tokens": NUMBER}', "max_output_tokens"),
        ("/detokenize", '{"tokens": [NUMBER]}', "tokens[0]"),
    ],
)
def test_numbers_beyond_64_bits_are_refused_by_name(
    client: TestClient, path: str, body: str, param: str, number: str
) -> None:
    status, error = post(client, path, body.replace("NUMBER", number))
    assert (status, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param} is ") and "64-bit" in error["message"]


@pytest.mark.parametrize("name", ["top_k", "repeat_last_n", "max_tokens", "min_tokens", "truncate_prompt_tokens"])
def test_integers_that_the_device_cannot_hold_are_refused_by_name(client: TestClient, name: str) -> None:
    body = {"prompt": "Hi", name: 2**31}
    response = client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_digits_in_a_text_are_no_numbers(client: TestClient) -> None:
    assert client.post("/v1/completions", json={"prompt": HUGE + " 1e400", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", '{"max_tokens": 3, "messages": [' + '{"role": "user", "content": "a"},' * 300_000 + "{}]}"),
        ("/v1/completions", "{" + ",".join(f'"k{i}": 1' for i in range(300_000)) + "}"),
        ("/v1/chat/completions", '{"messages": [' + "{}," * 1_000_000 + "{}]}"),
        ("/v1/embeddings", '{"input": [' + "[1.5]," * 1_000_000 + "[1]]}"),
        ("/v1/chat/completions", f'{{{CHAT}, "metadata": ' + "[" * 5_000_000 + "]" * 5_000_000 + "}"),
        ("/detokenize", '{"tokens": [' + "1.5," * 1_000_000 + "1]}"),
        ("/v1/score", '{"text_1": "a", "text_2": [' + "1," * 1_000_000 + "1]}"),
        ("/v1/chat/completions", f'{{{CHAT}, "allowed_token_ids": [' + "1.5," * 1_000_000 + "1]}"),
    ],
    ids=["messages", "keys", "objects", "lists", "depth", "floats", "texts", "ids"],
)
def test_a_million_of_anything_is_refused_quickly(client: TestClient, path: str, body: str) -> None:
    with quickly(2):
        status, error = post(client, path, body)
    assert status == 400, error


def test_structure_is_counted_outside_of_texts_only() -> None:
    quoted = ['[{"a":1},' * 50_000, "\\" * 65_535 + '"[[', '\\"{,' * 99_999]
    check_structure(json.dumps({"input": quoted}).encode())
    check_structure(json.dumps({"prompt": list(range(MAX_VALUES - 1))}).encode())
    with pytest.raises(APIError, match=str(MAX_STRUCTURE)):
        check_structure(json.dumps({"input": quoted, "more": [[]] * MAX_STRUCTURE}).encode())
    with pytest.raises(APIError, match=str(MAX_VALUES)):
        check_structure(json.dumps({"prompt": [1] * (MAX_VALUES + 2)}).encode())


@pytest.mark.parametrize("place", ["the temporary file", "the file", "the row"])
def test_a_full_disk_is_507_and_leaves_nothing(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    broken = {
        "the temporary file": "starlette.datastructures.UploadFile.write",
        "the file": "jaxllm.serving.batches.stores.os.fsync",
        "the row": "sqlalchemy.ext.asyncio.AsyncSession.add",
    }[place]
    with monkeypatch.context() as patch:
        patch.setattr(broken, full)
        answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}" * 1000)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
    assert [path for path in (tmp_path / "data").rglob("*") if "file-" in path.name] == []
    assert client.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": None, "truncate_prompt_tokens": 5}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages"),
        ("/v1/embeddings", {"input": None}, "input"),
        ("/tokenize", {"prompt": None}, "prompt"),
    ],
)
def test_megabytes_of_text_are_refused_without_being_encoded(
    client: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    text = json.dumps(body).replace("null", json.dumps("a bc" * 2_000_000))
    with quickly(3):  # 8 MB would take 14 s
        status, error = post(client, path, text)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)


def test_a_long_text_is_encoded_and_decoded_as_a_short_one_is(client: TestClient) -> None:
    text = "wörld 🤖 " * 5000
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert tokens == list(text.encode())
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text
