"""PDFs and texts that come as parts of messages are read by the model, or refused in one line."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.http import documents
from tests.serving.fake_engine import FakeEngine
from tests.support.covers import covers
from tests.support.pdf import ENCRYPT, pdf, said

pytest.importorskip("pypdfium2")
PAPER = pdf(said("Gr\\374\\337e", "from page 1"), "0 0 50 50 re f", said("page 3"))
TEXT = "[Page 1]\nGrüße\nfrom page 1\n\n[Page 3]\npage 3"
LARGE = PAPER + b"%" * 100_000
URL = "data:application/pdf;base64,"


def base64(data: bytes) -> str:
    return b64encode(data).decode()


def shown(engine: FakeEngine) -> str:
    """The last prompt, whose tokens are bytes here."""
    return bytes(engine.seen[-1][0]).decode()


def chat(*parts: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}]}


def response(*parts: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [{"role": "user", "content": list(parts)}], "store": False}


def message(*parts: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4}


def asked(client: TestClient, request: tuple[str, dict[str, Any]]) -> Any:
    path, body = request
    return client.post(path, json={"model": "fake"} | body)


FILE = {"type": "file", "file": {"filename": "paper.pdf", "file_data": URL + base64(PAPER)}}
SOURCE = {"type": "base64", "media_type": "application/pdf", "data": base64(PAPER)}
TOLD = [
    chat(FILE, {"type": "text", "text": "And?"}),
    chat(FILE | {"file": {"filename": "paper.pdf", "file_data": base64(LARGE)}}, {"type": "text", "text": "And?"}),
    response(
        {"type": "input_file", "filename": "paper.pdf", "file_data": URL + base64(PAPER)},
        {"type": "input_text", "text": "And?"},
    ),
    message(
        {"type": "document", "title": "paper.pdf", "source": SOURCE, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "And?"},
    ),
]


@pytest.mark.parametrize("request_", TOLD, ids=["chat", "large", "responses", "anthropic"])
def test_the_model_reads_a_pdf(client: TestClient, engine: FakeEngine, request_: Any) -> None:
    answer = asked(client, request_)
    assert answer.status_code == 200, answer.text
    assert f"paper.pdf:\n{TEXT}\nAnd?" in shown(engine)


def test_the_model_reads_files_by_their_ids_and_plain_texts(client: TestClient, engine: FakeEngine) -> None:
    sent = {"paper.pdf": PAPER, "notes.txt": "Grüße".encode()}
    ids = {
        name: client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "user_data"}).json()["id"]
        for name, data in sent.items()
    }
    for name, text in (("paper.pdf", TEXT), ("notes.txt", "Grüße")):
        for request in (
            chat({"type": "file", "file": {"file_id": ids[name]}}),
            response({"type": "input_file", "file_id": ids[name]}),
            message({"type": "document", "source": {"type": "file", "file_id": ids[name]}}),
        ):
            assert asked(client, request).status_code == 200
            assert f"{name}:\n{text}" in shown(engine)
    text = {"type": "text", "media_type": "text/plain", "data": "as it is"}
    asked(client, message({"type": "document", "source": text, "context": "Read this."}))
    assert "Read this.\ndocument:\nas it is" in shown(engine)
    refused = asked(client, chat({"type": "file", "file": {"file_id": "file-none"}}))
    assert refused.status_code == 404 and "file-none" in refused.json()["error"]["message"]


def test_documents_in_a_tools_result_are_read(client: TestClient, engine: FakeEngine) -> None:
    data = base64(pdf(said("found")))
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": data}}
    turns = [
        {"role": "user", "content": "Read"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [document]}]},
    ]
    body = {"messages": turns, "max_tokens": 4}
    answer = asked(client, ("/v1/messages", body))
    assert answer.status_code == 200, answer.text
    assert "document:\n[Page 1]\nfound" in shown(engine)


REFUSED = [
    (pdf("0 0 50 50 re f"), "has no text: its pages are pictures, such as scans"),
    (b"%PDF-1.7\n1 0 obj", "is a damaged PDF"),
    (b"", f"is empty, or larger than {documents.MAX_BYTES} bytes"),
    (b"\0\xff", "is neither a PDF nor text in UTF-8"),
    (pdf(said("secret"), encrypt=ENCRYPT), "is encrypted and needs a password"),
    (pdf(*[said("a" * 30_000)] * 80), "has more than 2000 pages or 2097152 characters"),
    (pdf(*[""] * 2001), "has more than 2000 pages or 2097152 characters"),
]


@pytest.mark.parametrize(
    ("data", "problem"), REFUSED, ids=["scan", "damaged", "empty", "binary", "encrypted", "long", "many"]
)
def test_what_cannot_be_read_is_refused_in_one_line(client: TestClient, data: bytes, problem: str) -> None:
    answer = asked(client, chat({"type": "text", "text": "a"}, {"type": "file", "file": {"file_data": base64(data)}}))
    error = answer.json()["error"]
    place = "messages[0].content[1]"
    assert (answer.status_code, error["param"], error["message"]) == (400, place, f"{place} {problem}")
    uploaded = client.post("/v1/files/text", files={"file": ("it.pdf", data)})
    assert (uploaded.status_code, uploaded.json()["error"]["message"]) == (400, problem)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "input_file", "file_url": "http://localhost/a"}, "has neither file_data nor file_id"),
        ({"type": "input_file", "file_data": "abc"}, "is no base64"),
        ({"type": "input_file", "file_data": base64(PAPER), "frobnicate": 1}, "frobnicate"),
        ({"type": "file", "file": "x"}, "has neither file_data nor file_id"),
    ],
    ids=str,
)
def test_parts_of_another_form_are_refused(client: TestClient, part: dict[str, Any], problem: str) -> None:
    answer = asked(client, response(part))
    assert answer.status_code == 400 and problem in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("input[0].content[0]")


def test_a_request_has_so_many_files_at_most(client: TestClient) -> None:
    answer = asked(client, chat(*[{"type": "file", "file": {"file_data": "eA=="}}] * 101))
    assert answer.status_code == 400 and "may have 100 files" in answer.json()["error"]["message"]


def test_a_calls_input_is_no_file(client: TestClient) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"type": "file", "file": "x"}}
    body = {"messages": [{"role": "assistant", "content": [use, {"type": "text", "text": "a"}]}]}
    assert not list(documents.file_parts(body))


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    problem, text = documents._read(PAPER)
    assert problem.endswith("pip install 'jaxllm[pdf]'") and not text
    assert documents._read(b"a text") == ("", "a text")


@covers("POST /v1/files/text")
@covers("POST /v1/files/text", "file")
def test_the_page_gets_the_text_of_a_file(client: TestClient) -> None:
    answer = client.post("/v1/files/text", files={"file": ("paper.pdf", PAPER)})
    assert (answer.status_code, answer.text) == (200, TEXT)
    assert json.loads(client.get("/v1/files").text)["data"] == []


def test_a_crash_of_the_reader_fails_one_request(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SECONDS", 0.001)
    answer = client.post("/v1/files/text", files={"file": ("paper.pdf", pdf(*[said("x" * 5000)] * 1000))})
    assert answer.status_code == 400 and "takes more than" in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert client.post("/v1/files/text", files={"file": ("paper.pdf", PAPER)}).text == TEXT
