"""Fields of a response that no other test speaks of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.serving.api_surface import BODIES
from tests.serving.fake_engine import ByteTokenizer, FakeEngine
from tests.serving.responses.shared import events_of
from tests.serving.sending import HELLO, prompt, send
from tests.support.covers import covers


@covers("CommonSampling", "frequency_penalty", "min_p", "presence_penalty", "temperature")
@covers("SamplingFields", "ignore_eos", "include_stop_str_in_output", "min_tokens", "repetition_penalty")
@covers("SamplingFields", "skip_special_tokens", "stop_token_ids")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5),
        ("ignore_eos", True),
        ("include_stop_str_in_output", True),
        ("min_p", 0.25),
        ("min_tokens", 2),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("skip_special_tokens", False),
        ("stop_token_ids", (5,)),
        ("temperature", 0.25),
    ],
)
def test_means_the_same_as_in_a_chat(client: TestClient, engine: FakeEngine, field: str, value: Any) -> None:
    send(client, "/v1/responses", **{field: value})
    assert getattr(engine.seen[-1][1], field) == value


@covers("PromptFields", "chat_template_kwargs")
def test_chat_template_kwargs(client: TestClient, engine: FakeEngine) -> None:
    send(client, "/v1/responses", chat_template_kwargs={"enable_thinking": False})
    assert "(enable_thinking=False)" in prompt(engine)


@covers("ResponseRequest", "stream_options")
@covers("ResponseStreamOptions", "include_obfuscation")
def test_deltas_are_padded_where_that_is_asked_for(client: TestClient) -> None:
    for asked in (False, True):
        events = events_of(client, **BODIES["/v1/responses"], stream_options={"include_obfuscation": asked})
        padded = [event for event in events if "obfuscation" in event]
        assert padded == [event for event in events if asked and "delta" in event]
        assert len({len(event["delta"]) + len(event["obfuscation"]) for event in padded}) <= 1
    alone = send(client, "/v1/responses", 400, stream_options={"include_obfuscation": False})
    assert alone["error"]["param"] == "stream_options"


@covers("TextConfig", "verbosity")
@covers("ChatRequest", "verbosity")
def test_a_verbosity_is_told_to_the_template(client: TestClient, engine: FakeEngine) -> None:
    engine.tokenizer = ByteTokenizer("{{ verbosity }}")
    assert send(client, "/v1/responses", text={"verbosity": "low"})["text"]["verbosity"] == "low"
    assert prompt(engine) == "low"
    send(client, "/v1/chat/completions", verbosity="high")
    assert prompt(engine) == "high"
    assert send(client, "/v1/responses", 400, text={"verbosity": "huge"})["error"]["param"] == "text.verbosity"


@covers("ReasoningConfig", "generate_summary")
def test_generate_summary_is_summary(make_client: Callable[..., TestClient]) -> None:
    client = make_client(FakeEngine(reply="<think>hm</think>yes"), reasoning_parser="think")
    send_all = {"max_output_tokens": 100}
    texts = [
        send(client, "/v1/responses", reasoning={name: "auto"}, **send_all)["output"][0]["summary"]
        for name in ("summary", "generate_summary")
    ]
    assert texts == [[{"type": "summary_text", "text": "hm"}]] * 2


@covers("ReasoningItem", "encrypted_content")
def test_encrypted_content_alone_cannot_be_read(client: TestClient) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    error = send(client, "/v1/responses", 400, input=[item])["error"]
    assert error["param"] == "input[0].encrypted_content"
    readable = item | {"content": [{"type": "reasoning_text", "text": "hm"}]}
    send(client, "/v1/responses", input=[readable, {"role": "user", "content": "Hi"}])


@covers("ResponseRequest", "include")
def test_reasoning_goes_along_in_the_field_that_stateless_clients_send_back(
    make_client: Callable[..., TestClient],
) -> None:
    engine = FakeEngine(reply="<think>hm</think>yes")
    client = make_client(engine, reasoning_parser="think")
    plain = send(client, "/v1/responses", max_output_tokens=100)["output"][0]
    assert "encrypted_content" not in plain
    asked = {"include": ["reasoning.encrypted_content"], "max_output_tokens": 100}
    item = send(client, "/v1/responses", **asked)["output"][0]
    engine.tokenizer = ByteTokenizer("{% for m in messages %}{{ m.reasoning_content }}{% endfor %}")
    alone = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    send(client, "/v1/responses", input=[alone, {"role": "assistant", "content": "a"}])
    assert prompt(engine) == "hm"


@covers("TextSchemaFormat", "schema")
def test_text_follows_a_schema(client: TestClient, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    send(client, "/v1/responses", text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert json.loads(engine.seen[-1][1].structured_outputs.json) == schema


@covers("GET /v1/responses/{response_id}", "include[]", "include_obfuscation")
@covers("GET /v1/responses/{response_id}/input_items", "include[]")
@covers("POST /v1/conversations/{conversation_id}/items", "include[]")
@covers("GET /v1/conversations/{conversation_id}/items", "include[]")
@covers("GET /v1/conversations/{conversation_id}/items/{item_id}", "include[]")
def test_include_changes_nothing(client: TestClient) -> None:
    names = {"include[]": ["message.output_text.logprobs"]}
    response = "/v1/responses/" + send(client, "/v1/responses")["id"]
    conversation = "/v1/conversations/" + client.post("/v1/conversations", json={}).json()["id"]
    added = client.post(f"{conversation}/items", json={"items": HELLO}, params=names).json()["data"]
    item = f"{conversation}/items/{added[0]['id']}"
    for path in (response, f"{response}/input_items", f"{conversation}/items", item):
        plain = client.get(path)
        assert plain.status_code == 200 and client.get(path, params=names).json() == plain.json()
    assert client.get(response, params={"include_obfuscation": True}).json() == client.get(response).json()


@covers("InputItem", "id")
@covers("MessageItem", "status")
@covers("OutputTextPart", "text", "annotations", "logprobs")
@covers("RefusalContent", "refusal")
@covers("FunctionCallItem", "call_id", "status")
@covers("FunctionCallOutputItem", "status")
@covers("ReasoningItem", "status")
@pytest.mark.parametrize(
    "item",
    [
        {
            "id": "msg_1", "type": "message", "role": "assistant", "status": "incomplete",
            "content": [
                {"type": "output_text", "text": "a", "annotations": [{"type": "x"}], "logprobs": [{"token": "a"}]},
                {"type": "refusal", "refusal": "No."},
            ],
        },
        {
            "id": "rs_1", "type": "reasoning", "status": "incomplete",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        {
            "id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}',
            "status": "in_progress",
        },
        {"id": "o_1", "type": "function_call_output", "call_id": "c", "output": "x", "status": "incomplete"},
        {
            "id": "o_2", "type": "function_call_output", "call_id": "c", "status": "completed",
            "output": [{"type": "input_text", "text": "x"}],
        },
    ],
    ids=lambda item: item["id"],
)  # fmt: skip
def test_items_come_back_as_they_were(client: TestClient, item: dict[str, Any]) -> None:
    conversation = client.post("/v1/conversations", json={"items": [item]}).json()["id"]
    assert client.get(f"/v1/conversations/{conversation}/items").json()["data"] == [item]


@covers("ReasoningItem", "summary", "content")
@covers("SummaryTextPart", "text")
@covers("ReasoningTextPart", "text")
def test_reasoning_is_shown_to_templates_again(client: TestClient, engine: FakeEngine) -> None:
    engine.tokenizer = ByteTokenizer("{% for m in messages %}{{ m.reasoning_content }}{% endfor %}")
    for item in (
        {"summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"summary": [{"type": "summary_text", "text": "hm"}]},
    ):
        answer = {"role": "assistant", "content": "a"}
        send(client, "/v1/responses", input=[{"type": "reasoning", **item}, answer])
        assert prompt(engine) == "hm"


@covers("FunctionDefinition", "name", "description", "parameters")
def test_tools_reach_the_template(client: TestClient, engine: FakeEngine) -> None:
    engine.tokenizer = ByteTokenizer("{{ tools | tojson }}")
    tool = {"name": "f", "description": "Does f", "parameters": {"type": "object", "properties": {"a": {}}}}
    send(client, "/v1/responses", tools=[{"type": "function", "strict": True, **tool}])
    assert '"name": "f"' in prompt(engine) and '"a": {}' in prompt(engine) and "Does f" in prompt(engine)
