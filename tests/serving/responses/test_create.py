"""/v1/responses through the openai package and over plain HTTP, on a canned engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jsonschema
from fastapi.testclient import TestClient
from openai.types.responses import Response
from pydantic import BaseModel

from tests.serving.fake_engine import REPLY, FakeEngine
from tests.serving.responses.shared import CALL, PARSERS, WEATHER, prompt_text
from tests.support.covers import covers


@covers("POST /v1/responses")
@covers("MetadataFields", "metadata")
def test_answers_with_a_response_that_the_sdk_knows(post: Callable[..., Any]) -> None:
    answer = post(input="hi", instructions="Be brief.", metadata={"k": "v"}, temperature=0.25, user="u")
    assert answer.status_code == 200
    response = Response.model_validate(answer.json())
    assert response.output_text == REPLY
    assert response.status == "completed" and response.error is None and response.incomplete_details is None
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
    assert (response.temperature, response.instructions, response.metadata) == (0.25, "Be brief.", {"k": "v"})
    assert response.usage.input_tokens == len("[system]Be brief.[user]hi[assistant]")
    assert response.usage.output_tokens == len(REPLY)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert abs(response.completed_at - time.time()) < 60


@covers("PromptFields", "input")
@covers("MessageItem", "role", "content")
@covers("InputText", "text")
def test_items_become_the_messages_of_a_chat(sdk: Callable[..., Any]) -> None:
    client, engine = sdk()
    client.responses.create(
        model="fake",
        input=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"role": "assistant", "content": "c2"},
            {"role": "user", "content": "e"},
        ],
    )
    assert prompt_text(engine) == "[system]d[user]a\nb[assistant]c[assistant]c2[user]e[assistant]"


@covers("ResponseRequest", "max_output_tokens")
def test_length_is_incomplete(post: Callable[..., Any]) -> None:
    response = Response.model_validate(post(input="hi", max_output_tokens=5).json())
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == REPLY[:5] and response.output[0].status == "incomplete"


@covers("ResponseRequest", "include", "top_logprobs")
def test_log_probabilities_when_included(post: Callable[..., Any]) -> None:
    body = post(input="hi", include=["message.output_text.logprobs"], top_logprobs=2).json()
    logprobs = Response.model_validate(body).output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == list(REPLY)
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    assert post(input="hi").json()["output"][0]["content"][0]["logprobs"] == []


def test_the_last_token_has_a_log_probability_though_it_says_nothing(post: Callable[..., Any]) -> None:
    """As one that ends the answer, in a step of its own or not."""
    body = post(input="hi", include=["message.output_text.logprobs"], stop=REPLY[-1]).json()
    said = Response.model_validate(body).output[0].content[0]
    assert said.text == REPLY[: REPLY.index(REPLY[-1])]
    assert [entry.token for entry in said.logprobs] == list(REPLY[: REPLY.index(REPLY[-1]) + 1])


def test_parts_of_a_character_have_their_own_bytes(sdk: Callable[..., Any]) -> None:
    client, _ = sdk(reply="é🤖")
    asked: list[Any] = ["message.output_text.logprobs"]
    content = client.responses.create(model="fake", input="hi", include=asked).output[0].content[0]
    assert bytes(byte for entry in content.logprobs for byte in entry.bytes).decode() == content.text == "é🤖"
    assert [entry.token for entry in content.logprobs][:2] == [r"\xc3", r"\xa9"]


def test_a_schema_constrains_the_text(sdk: Callable[..., Any]) -> None:
    class City(BaseModel):
        name: str
        country: Literal["France", "Italy"]

    client, engine = sdk(reply='{"name": "Paris", "country": "France"}')
    response = client.responses.parse(model="fake", input="where?", text_format=City)
    assert response.output_parsed == City(name="Paris", country="France")
    constraint = engine.seen[-1][1].structured_outputs
    assert json.loads(constraint.json)["properties"].keys() == {"name", "country"}
    assert response.text.format.type == "json_schema" and response.text.format.name == "City"


@covers("PromptFields", "text")
@covers("TextConfig", "format")
def test_json_object(sdk: Callable[..., Any]) -> None:
    client, engine = sdk(reply="{}")
    client.responses.create(model="fake", input="x", text={"format": {"type": "json_object"}})
    assert engine.seen[-1][1].structured_outputs.json_object


@covers("SamplingFields", "logit_bias")
@covers("CommonSampling", "seed", "stop", "top_k", "top_p")
@covers("ScheduledFields", "cache_salt", "priority")
def test_sampling_fields_reach_the_engine(post: Callable[..., Any], sdk: Callable[..., Any]) -> None:
    client, engine = sdk()
    extra = {"top_k": 7, "seed": 3, "stop": ["zz"], "logit_bias": {"65": -1}, "priority": 4, "cache_salt": "s"}
    client.responses.create(model="fake", input="x", top_p=0.5, max_output_tokens=9, extra_body=extra)
    _, params, others = engine.seen[-1]
    assert (params.top_p, params.top_k, params.seed, params.max_tokens) == (0.5, 7, 3, 9)
    assert list(params.stop) == ["zz"] and dict(params.logit_bias) == {65: -1.0}
    assert others == {"priority": 4, "cache_salt": "s"}


def test_unknown_fields_are_listed_where_the_server_only_warns(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    client = make_client(roomy(), data_dir=tmp_path, unknown_fields="warn")
    body = {"input": [{"role": "user", "content": "x", "caller": {"type": "direct"}}], "colour": "red"}
    warnings = client.post("/v1/responses", json=body).json()["warnings"]
    assert len(warnings) == 2 and "caller" in "".join(warnings) and "colour" in "".join(warnings)
    assert "warnings" not in client.post("/v1/responses", json={"input": "x"}).json()


@covers("POST /v1/responses/input_tokens")
def test_input_tokens(sdk: Callable[..., Any]) -> None:
    client, engine = sdk()
    counted = client.responses.input_tokens.count(model="fake", input="hi", instructions="x" * 5000)
    assert counted.input_tokens == len("[system]" + "x" * 5000 + "[user]hi[assistant]") and not engine.seen
    used = client.responses.create(model="fake", input="hi").usage.input_tokens
    assert client.responses.input_tokens.count(model="fake", input="hi").input_tokens == used


def test_openapi_describes_what_is_sent(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    client = make_client(roomy(reply=f"<think>hm</think>Let me see. {CALL}"), data_dir=tmp_path, **PARSERS)
    schema = client.get("/openapi.json").json()

    def check(name: str, value: dict[str, Any]) -> None:
        jsonschema.validate(value, schema | {"$ref": f"#/components/schemas/{name}"})

    response = client.post("/v1/responses", json={"input": "hi", "tools": [WEATHER]}).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    check("Response", response)
    output = {"type": "function_call_output", "call_id": response["output"][2]["call_id"], "output": "rain"}
    later = client.post("/v1/responses", json={"input": [output], "previous_response_id": response["id"]}).json()
    items = client.get(f"/v1/responses/{later['id']}/input_items").json()
    assert len(items["data"]) == 5
    check("ItemList", items)
    check("DeletedResponse", client.delete(f"/v1/responses/{later['id']}").json())
