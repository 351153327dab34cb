"""What clients of llama.cpp, SageMaker and vLLM ask for besides, and the fingerprint of a server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient

from jaxllm.requests.outputs import ModelTasks
from jaxllm.requests.sampling import SamplingDefaults
from tests.serving.api_surface import BODIES
from tests.serving.fake_engine import CONTEXT, REPLY, TEMPLATE, FakeEngine
from tests.serving.openai.test_chat import HELLO, PROMPT, events
from tests.serving.sending import send
from tests.support.covers import covers

PATHS = ("/v1/chat/completions", "/v1/completions")


@covers("POST /v1/apply-template")
@covers("ApplyTemplateRequest", "messages")
def test_apply_template(client: TestClient, engine: FakeEngine) -> None:
    assert client.post("/apply-template", json={"messages": HELLO}).json() == {"prompt": PROMPT}
    closed = {"messages": HELLO, "add_generation_prompt": False, "model": "fake"}
    assert client.post("/apply-template", json=closed).json() == {"prompt": "[user]Hi"}
    assert client.post("/apply-template", json=closed | {"model": "other"}).status_code == 404
    assert client.post("/apply-template", json={"messages": []}).json()["error"]["param"] == "messages"
    assert not engine.seen


@covers("GET /v1/props")
def test_props(make_client: Any, engine: FakeEngine) -> None:
    props = make_client(engine, model="org/name", served_model_name="short").get("/props").json()
    assert (props["model_path"], props["model_alias"], props["total_slots"]) == ("org/name", "short", 8)
    assert (props["chat_template"], props["bos_token"], props["eos_token"]) == (TEMPLATE, "<s>", "</s>")
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == CONTEXT
    assert (settings["params"]["temperature"], settings["params"]["top_k"]) == (0.5, 40)
    assert props["modalities"] == {"vision": False, "audio": False}


@covers("GET /v1/server_info")
def test_server_info_tells_settings_but_no_secret(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, api_key="sesame", database_url="sqlite+aiosqlite:////tmp/elsewhere.db", seed=7)
    assert client.get("/server_info").status_code == 401
    response = client.get("/server_info", headers={"Authorization": "Bearer sesame"})
    info = response.json()
    assert info["settings"]["seed"] == 7 and info["engine"]["max_model_len"] == CONTEXT
    assert info["models"] == ["fake"] and info["version"] == client.get("/version").json()["version"]
    for secret in ("sesame", "elsewhere", "data_dir", "compile_cache_dir"):
        assert secret not in response.text


@covers("GET /ping")
@covers("POST /ping")
def test_ping_is_health(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, api_key="sesame")
    assert client.get("/ping").json() == client.post("/ping").json() == {"status": "ok"}
    engine.die()
    assert client.get("/ping").status_code == client.post("/ping").status_code == 503


@covers("POST /v1/invocations")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, BODIES[path]) for path in (*PATHS, "/v1/embeddings", "/v1/rerank", "/v1/score")),
        ("/v1/score", {"queries": "a", "documents": ["b", "c"]}),
        ("/v1/rerank", {"query": "a", "texts": ["b", "c"]}),
    ],
)
def test_invocations_answer_as_the_route_would(client: TestClient, path: str, body: dict[str, Any]) -> None:
    def answer(path: str) -> Any:
        found = client.post(path, json=body)
        assert found.status_code == 200, found.text
        if isinstance(found.json(), list):
            return found.json()
        return {name: value for name, value in found.json().items() if name not in ("id", "created")}

    assert answer("/invocations") == answer(path)


def test_invocations_of_a_classifier_give_its_classes(make_client: Any) -> None:
    client = make_client(FakeEngine(tasks=ModelTasks(labels=("bad", "good"))))
    for fields in ({}, {"use_activation": False}):
        body = {"input": ["a", "b"], **fields}
        given, expected = (client.post(path, json=body).json() for path in ("/invocations", "/classify"))
        assert given["data"] == expected["data"] and given["data"][0]["label"] in ("bad", "good")
    error = client.post("/invocations", json={"input": "a", "dimensions": 4}).json()["error"]
    assert error["param"] == "dimensions" and "is for vectors; model 'fake' classifies" in error["message"]


def test_invocations_stream_and_refuse(client: TestClient) -> None:
    chunks = events(client, "/invocations", max_tokens=100)  # a prompt
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == REPLY
    error = client.post("/invocations", json={"messages": HELLO, "n": 0}).json()["error"]
    assert (error["param"], error["message"]) == ("n", "n is 0; it must be 1 or more")
    for body in ({}, {"model": "fake"}):
        error = client.post("/invocations", json=body).json()["error"]
        assert error["param"] is None and error["message"].startswith("the body has none of messages, prompt, input")
    assert client.post("/invocations", json={"query": "a"}).json()["error"]["param"] == "documents"


def test_fingerprint_is_of_model_settings_and_version(make_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(**settings: Any) -> str:
        client = make_client(FakeEngine(), **settings)
        found = {send(client, path)["system_fingerprint"] for path in PATHS}
        for path in PATHS:
            found |= {chunk["system_fingerprint"] for chunk in events(client, path)}
        found.add(client.get("/server_info").json()["system_fingerprint"])
        (only,) = found
        return only

    first = fingerprint()
    assert first.startswith("fp_")
    assert fingerprint() == first == fingerprint(port=9, log_level="error", max_num_waiting=5)
    others = {fingerprint(model="other"), fingerprint(seed=1), fingerprint(dtype="float32")}
    others |= {fingerprint(default_chat_template_kwargs={"a": 1}), fingerprint(chat_template_content_format="openai")}
    monkeypatch.setattr("jaxllm.serving.served_model.version", lambda _: "9.9")
    assert len({first, *others, fingerprint()}) == 7


def test_any_model_name(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, serve_any_model_name=True)
    for path in (*PATHS, "/v1/embeddings"):
        assert send(client, path, model="gpt-4o")["model"] == "gpt-4o"
        assert send(client, path)["model"] == "fake"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["fake"]
    assert client.get("/v1/models/gpt-4o").json()["id"] == "gpt-4o"
    assert send(client, "/v1/messages", model="claude")["model"] == "claude"


def test_a_server_has_defaults_of_lengths_and_penalties(client: TestClient, engine: FakeEngine) -> None:
    defaults = SamplingDefaults(max_tokens=3, presence_penalty=0.5)
    engine.client.info = msgspec.structs.replace(engine.info, default_sampling=defaults)
    for body in ({}, {"max_tokens": 2, "presence_penalty": 0}):
        assert client.post("/v1/chat/completions", json={"messages": HELLO} | body).status_code == 200
    assert [(params.max_tokens, params.presence_penalty) for _, params, _ in engine.seen] == [(3, 0.5), (2, 0)]
