"""The OpenAPI document is complete and true: what it describes is sent, and the answers are held against it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxllm.engine.messages import EngineRequest
from jaxllm.serving.batches.caller import BATCH_PRIORITY
from jaxllm.serving.http.answers import RESPONSES
from tests.serving.api_surface import BODIES, EveryTask, Route, addresses, described_app, make_app, models, routes


class Engine(EveryTask):
    """Takes its time over batches, so that they can be cancelled."""

    def until_next(self, request: EngineRequest, step: int) -> float:
        return 1.0 if request.priority == BATCH_PRIORITY and step == 0 else 0.0


DOCUMENT = described_app().openapi()
OPERATIONS = [(method, path) for path, item in DOCUMENT["paths"].items() for method in item]
APART = {("get", "/v1/models/sse"), ("delete", "/api/delete")}
"""A stream that ends with the server only, and what removes files: tests of their own ask for them."""
ANSWERED = [operation for operation in OPERATIONS if operation not in APART]
ALONE = [("post", path) for path in ("/v1/sleep", "/v1/pause", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")]
"""What changes a server, or is answered otherwise when it has been changed: each is sent to one of its own."""
STREAMED = [
    path for path in BODIES if "text/event-stream" in DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
]


class Server:
    """A running server with its document, in which no answer may have a field that is not described."""

    def __init__(self, client: TestClient):
        import schemathesis  # here: half a second that only these tests need
        from schemathesis.checks import not_a_server_error
        from schemathesis.specs.openapi import checks

        self.checks = [
            not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
            checks.response_headers_conformance, checks.response_schema_conformance,
        ]  # fmt: skip
        self.client = client
        app: Any = client.app
        for schema in app.openapi()["components"]["schemas"].values():
            if "properties" in schema:
                schema.setdefault("additionalProperties", False)
        self.schema = schemathesis.openapi.from_dict(app.openapi())

    def operation(self, method: str, path: str) -> Any:
        return self.schema[path][method.upper()]

    def check(self, case: Any, *, bare: bool = False) -> Any:
        """Send a case, perhaps to the path without /v1, and hold the answer against the document."""
        sent = case.as_transport_kwargs()
        if case.media_type == "multipart/form-data" and isinstance(case.body, dict):
            sent["files"] = form_parts(case.body)
            sent["headers"].pop("Content-Type", None)
        url = sent["url"].removeprefix("/v1") if bare else sent["url"]
        options = {name: sent[name] for name in ("params", "headers", "json", "data", "files") if sent.get(name)}
        response = self.client.request(sent["method"], url, **options)
        response.request.read()  # a form is streamed, and the checks want to see it
        case.validate_response(response, checks=self.checks)
        return response

    def good_case(self, method: str, path: str, ids: dict[str, str]) -> Any:
        body = BODIES[path] if method == "post" and path in BODIES else None
        if path == "/v1/batches" and body is not None:
            body = body | {"input_file_id": ids["file_id"]}
        media_type = "multipart/form-data" if path.startswith("/v1/files") else "application/json"
        fields = {} if body is None else {"body": body, "media_type": media_type}
        return self.operation(method, path).Case(path_parameters=path_parameters(path, ids), **fields)


def path_parameters(path: str, ids: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in ids.items() if f"{{{name}}}" in path}


def form_parts(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, ("name.jsonl", value) if name == "file" and isinstance(value, bytes) else (None, str(value)))
        for name, value in fields.items()
    ]  # fmt: skip


@contextmanager
def running_server(folder: Path) -> Iterator[Server]:
    with TestClient(make_app(folder, Engine()), base_url="http://localhost", raise_server_exceptions=False) as client:
        yield Server(client)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("data")) as server:
        yield server


LISTED = {"/v1/files": "{file_id}", "/v1/batches": "{batch_id}"}
"""Paths without a parameter, and what there must be for them to list."""


@pytest.fixture
def ids(server: Server, path: str) -> dict[str, str]:
    """One object of each kind that a request to the path is about, by the name of its path parameter."""
    post = server.client.post
    about = path + LISTED.get(path, "")
    found = {"model": "fake", "name": "a_tool"}
    if "{file_id}" in about or "{batch_id}" in about:
        found["file_id"] = post("/v1/files", files=form_parts(BODIES["/v1/files"])).json()["id"]
    if "{batch_id}" in about:
        body = BODIES["/v1/batches"] | {"input_file_id": found["file_id"]}
        found["batch_id"] = post("/v1/batches", json=body).json()["id"]
    if "{conversation_id}" in about:
        found["conversation_id"] = post("/v1/conversations", json=BODIES["/v1/conversations"]).json()["id"]
    if "{item_id}" in about:
        items = server.client.get(f"/v1/conversations/{found['conversation_id']}/items").json()
        found["item_id"] = items["data"][0]["id"]
    if "{response_id}" in about:
        found["response_id"] = post("/v1/responses", json=BODIES["/v1/responses"] | {"background": True}).json()["id"]
    return found


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(("method", "path"), [operation for operation in ANSWERED if operation not in ALONE])
def test_a_good_request_is_answered_as_described(
    server: Server, ids: dict[str, str], method: str, path: str, bare: bool
) -> None:
    response = server.check(server.good_case(method, path, ids), bare=bare)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(("method", "path"), ALONE)
def test_what_changes_a_server_is_answered_as_described(tmp_path: Path, method: str, path: str, bare: bool) -> None:
    """No work of another test, in the background, wakes a model meanwhile that is put to sleep."""
    with running_server(tmp_path) as server:
        response = server.check(server.good_case(method, path, {}), bare=bare)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_is_as_described(server: Server, path: str) -> None:
    case = server.good_case("post", path, {})
    case.body = case.body | {"stream": True}
    response = server.check(case)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    assert len(response.text.split("\n\n")) > 4


@pytest.mark.parametrize(("method", "path"), ANSWERED)
@pytest.mark.parametrize("examples", [8, pytest.param(400, marks=pytest.mark.slow)])
def test_any_request_is_answered_as_described(
    server: Server, ids: dict[str, str], method: str, path: str, examples: int
) -> None:
    good = server.good_case(method, path, ids)

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=server.operation(method, path).as_strategy(), data=st.data())
    def check(case: Any, data: st.DataObject) -> None:
        """Half of the bodies are good ones with a few random fields: random ones alone are refused early."""
        if case.path_parameters and data.draw(st.booleans()):
            case.path_parameters = good.path_parameters
        if isinstance(case.body, dict) and data.draw(st.booleans()):
            changed = data.draw(st.sets(st.sampled_from(sorted(case.body)), max_size=3)) if case.body else ()
            case.body = good.body | {name: case.body[name] for name in changed}
        server.check(case)

    check()
    if path == "/v1/pause":  # what other tests ask would be answered never
        server.client.post("/v1/resume")


def test_every_route_is_described_and_answers_without_v1() -> None:
    answering = addresses(described_app())
    described = {(method.upper(), path) for method, path in OPERATIONS}
    bare = {(method, path.removeprefix("/v1")) for method, path in described if path.startswith("/v1/")}
    assert described | bare <= answering.keys()
    other_names = {answering[address] for address in answering.keys() - described - bare}
    assert other_names <= {answering[address] for address in described}


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_has_a_schema(method: str, path: str) -> None:
    operation = DOCUMENT["paths"][path][method]
    assert operation["description"] and operation["tags"]
    for answer in operation["responses"].values():
        assert all(content.get("schema") or content["itemSchema"] for content in answer["content"].values())
    names = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(operation))
    assert set(names) <= DOCUMENT["components"]["schemas"].keys()


@pytest.mark.parametrize("route", [route for route in routes() if route.models], ids=str)
def test_every_field_of_a_body_is_described(route: Route) -> None:
    content = DOCUMENT["paths"][route.path][route.method.lower()]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    kinds = schema.get("oneOf", [schema])  # /invocations takes bodies of several kinds
    for model, kind in zip(route.models, kinds, strict=True):
        kind = kind.get("items", kind)  # a list is described by what is in it
        described = DOCUMENT["components"]["schemas"][kind["$ref"].rsplit("/", 1)[1]]["properties"]
        assert described.keys() == model.field_names().keys()
        assert all(field.get("description") for field in described.values())


def test_names_of_requests_and_responses_differ() -> None:
    """One description may not overwrite another."""
    sent = {model.__name__ for model in models()}
    assert len(sent) == len(models())
    _, answered = msgspec.json.schema_components(RESPONSES, ref_template="{name}")
    assert not sent & answered.keys()


def test_the_document_is_not_encoded_for_each_who_asks(client: TestClient) -> None:
    """Anybody may ask, and the event loop encodes a quarter of a megabyte in milliseconds."""

    def quickest(path: str) -> float:
        times = []
        for _ in range(20):
            started = time.process_time()
            assert client.get(path).status_code == 200
            times.append(time.process_time() - started)
        return min(times)

    client.get("/openapi.json")
    assert quickest("/openapi.json") < quickest("/version") + 0.002
