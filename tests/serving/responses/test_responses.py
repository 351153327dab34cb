"""/v1/responses through the openai package and over plain HTTP, on a canned engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from fastapi.testclient import TestClient
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from jaxllm.serving.store.database import Database
from jaxllm.serving.store.responses import ResponseStore
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY, FakeEngine

EVENT = TypeAdapter(ResponseStreamEvent)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": None,
}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}


@pytest.fixture
def roomy() -> Callable[..., FakeEngine]:
    """An engine whose context holds the prompts of these tests, one token a byte."""

    def make(**settings: Any) -> FakeEngine:
        engine = FakeEngine(**settings)
        engine.info.max_model_len = 4096
        return engine

    return make


@pytest.fixture
def post(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> Callable[..., Any]:
    """Post one response; returns the HTTP response. Keyword arguments are the body."""
    client = make_client(roomy(), data_dir=tmp_path)

    def send(**body: Any) -> Any:
        return client.post("/v1/responses", json=body)

    send.client = client  # type: ignore[attr-defined]
    return send


@pytest.fixture
def sdk(
    listen: Callable[..., str], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> Callable[..., tuple[OpenAI, FakeEngine]]:
    def start(serving: dict[str, Any] | None = None, **engine_settings: Any) -> tuple[OpenAI, FakeEngine]:
        engine = roomy(**engine_settings)
        url = listen(engine, data_dir=tmp_path, **serving or {})
        return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), engine

    return start


def prompt_text(engine: FakeEngine, at: int = -1) -> str:
    return bytes(token for token in engine.seen[at][0] if token < 256).decode()


def events_of(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which must be one that the openai package knows, field by field."""
    answer = client.post("/v1/responses", json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return parse_events(answer.text)


def parse_events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            EVENT.validate_python(event, extra="ignore")
            events.append(event)
    return events


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


class TestCreate:
    @pytest.mark.covers("POST /v1/responses")
    @pytest.mark.covers("MetadataFields", "metadata")
    def test_answers_with_a_response_that_the_sdk_knows(self, post: Callable[..., Any]) -> None:
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

    @pytest.mark.covers("PromptFields", "input")
    @pytest.mark.covers("MessageItem", "role", "content")
    @pytest.mark.covers("InputText", "text")
    def test_items_become_the_messages_of_a_chat(self, sdk: Callable[..., Any]) -> None:
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

    @pytest.mark.covers("ResponseRequest", "max_output_tokens")
    def test_length_is_incomplete(self, post: Callable[..., Any]) -> None:
        response = Response.model_validate(post(input="hi", max_output_tokens=5).json())
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == REPLY[:5] and response.output[0].status == "incomplete"

    @pytest.mark.covers("ResponseRequest", "include", "top_logprobs")
    def test_log_probabilities_when_included(self, post: Callable[..., Any]) -> None:
        body = post(input="hi", include=["message.output_text.logprobs"], top_logprobs=2).json()
        logprobs = Response.model_validate(body).output[0].content[0].logprobs
        assert [entry.token for entry in logprobs] == list(REPLY)
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
        assert post(input="hi").json()["output"][0]["content"][0]["logprobs"] == []

    def test_a_schema_constrains_the_text(self, sdk: Callable[..., Any]) -> None:
        class City(BaseModel):
            name: str
            country: Literal["France", "Italy"]

        client, engine = sdk(reply='{"name": "Paris", "country": "France"}')
        response = client.responses.parse(model="fake", input="where?", text_format=City)
        assert response.output_parsed == City(name="Paris", country="France")
        constraint = engine.seen[-1][1].structured_outputs
        assert json.loads(constraint.json)["properties"].keys() == {"name", "country"}
        assert response.text.format.type == "json_schema" and response.text.format.name == "City"

    @pytest.mark.covers("PromptFields", "text")
    @pytest.mark.covers("TextConfig", "format")
    def test_json_object(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk(reply="{}")
        client.responses.create(model="fake", input="x", text={"format": {"type": "json_object"}})
        assert engine.seen[-1][1].structured_outputs.json_object

    @pytest.mark.covers("SamplingFields", "cache_salt", "logit_bias", "priority", "seed", "stop", "top_k", "top_p")
    def test_sampling_fields_reach_the_engine(self, post: Callable[..., Any], sdk: Callable[..., Any]) -> None:
        client, engine = sdk()
        extra = {"top_k": 7, "seed": 3, "stop": ["zz"], "logit_bias": {"65": -1}, "priority": 4, "cache_salt": "s"}
        client.responses.create(model="fake", input="x", top_p=0.5, max_output_tokens=9, extra_body=extra)
        _, params, others = engine.seen[-1]
        assert (params.top_p, params.top_k, params.seed, params.max_tokens) == (0.5, 7, 3, 9)
        assert list(params.stop) == ["zz"] and dict(params.logit_bias) == {65: -1.0}
        assert others == {"priority": 4, "cache_salt": "s"}


class TestStream:
    def test_text_events_in_order(self, post: Callable[..., Any]) -> None:
        events = events_of(post.client, input="hi")
        deltas = types(events).count("output_text.delta")
        assert deltas > 1
        assert types(events) == [
            "created", "in_progress", "output_item.added", "content_part.added",
            *["output_text.delta"] * deltas,
            "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        text = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
        assert text == events[-4]["text"] == REPLY
        assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
        assert events[0]["response"]["output"] == [] and events[2]["item"]["content"] == []
        final = events[-1]["response"]
        assert final["status"] == "completed" and final["output"] == [events[-2]["item"]]
        assert post.client.get(f"/v1/responses/{final['id']}").json() == final

    @pytest.mark.covers("ResponseRequest", "stream")
    def test_the_sdk_helper_finishes(self, sdk: Callable[..., Any]) -> None:
        client, _ = sdk()
        with client.responses.stream(model="fake", input="hi") as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text == REPLY

    def test_log_probabilities_come_with_their_text(self, post: Callable[..., Any]) -> None:
        events = events_of(post.client, input="hi", include=["message.output_text.logprobs"])
        for event in events:
            if event["type"] == "response.output_text.delta":
                assert "".join(entry["token"] for entry in event["logprobs"]) == event["delta"]

    @pytest.mark.parametrize("reply", [REPLY, CALL, f"<think>hm</think>{REPLY}", f"ok\n{CALL}\n{CALL}", "  \n", " x"])
    def test_says_what_the_whole_response_says(
        self,
        reply: str,
        make_client: Callable[..., TestClient],
        roomy: Callable[..., FakeEngine],
        tmp_path: Path,
    ) -> None:
        client = make_client(roomy(reply=reply), data_dir=tmp_path, **PARSERS)
        body = {"input": "hi", "tools": [WEATHER]}
        streamed = events_of(client, **body)[-1]["response"]
        whole = client.post("/v1/responses", json=body).json()

        def said(response: dict[str, Any]) -> list[Any]:
            return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]

        assert said(streamed) == said(whole)
        assert streamed["usage"] == whole["usage"]
        Response.model_validate(whole)

    def test_an_error_in_mid_stream_is_told_and_stored(
        self, make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
    ) -> None:
        engine = roomy()
        engine.fail_after = 4
        client = make_client(engine, data_dir=tmp_path)
        events = events_of(client, input="hi")
        assert types(events)[-3:] == ["output_item.done", "error", "failed"]
        assert "the pages caught fire" in events[-2]["message"]
        response = events[-1]["response"]
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert response["output"][0]["status"] == "incomplete"
        assert client.get(f"/v1/responses/{response['id']}").json() == response
        whole = client.post("/v1/responses", json={"input": "hi"})
        assert whole.status_code == 500 and "the pages caught fire" in whole.json()["error"]["message"]

    def test_silence_is_filled(
        self, make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
    ) -> None:
        client = make_client(roomy(delay=0.15, reply="ab"), data_dir=tmp_path, sse_keep_alive=0.05)
        for background in (False, True):
            text = client.post("/v1/responses", json={"input": "x", "stream": True, "background": background}).text
            assert ": keep-alive\n\n" in text and types(parse_events(text))[-1] == "completed"

    def test_a_full_queue_is_a_status_of_its_own(
        self, make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
    ) -> None:
        client = make_client(roomy(queue_limit=0), data_dir=tmp_path)
        for body in ({}, {"stream": True}, {"background": True}, {"background": True, "stream": True}):
            answer = client.post("/v1/responses", json={"input": "hi"} | body)
            assert answer.status_code == 429 and answer.headers["Retry-After"]

    def test_a_client_that_goes_away_frees_the_engine(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk(delay=0.02)
        stream = client.responses.create(model="fake", input="hi", stream=True)
        next(iter(stream))
        assert engine.active
        stream.close()
        wait_for(lambda: not engine.active)
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).responses.create(model="fake", input="hi")
        wait_for(lambda: not engine.active)


class TestTools:
    @pytest.mark.covers("PromptFields", "tools")
    @pytest.mark.covers("FunctionCallOutputItem", "call_id", "output")
    def test_a_call_and_its_output(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk(PARSERS, reply=CALL)
        first = client.responses.create(model="fake", input="weather?", tools=[WEATHER])
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Paris"})
        assert call.id.startswith("fc_") and call.call_id and call.status == "completed"
        engine.reply = REPLY
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = client.responses.create(model="fake", input=[output], previous_response_id=first.id, tools=[WEATHER])
        assert second.output_text == REPLY
        assert "rain" in prompt_text(engine)
        sent_back = [{"role": "user", "content": "weather?"}, *first.output, output]
        client.responses.create(model="fake", input=sent_back, tools=[WEATHER])
        assert prompt_text(engine) == prompt_text(engine, -2)

    def test_call_events(
        self, make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
    ) -> None:
        client = make_client(roomy(reply=f"Let me see. {CALL}"), data_dir=tmp_path, **PARSERS)
        events = events_of(client, input="hi", tools=[WEATHER])
        seen = list(dict.fromkeys(types(events)))
        assert seen == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "function_call_arguments.delta",
            "function_call_arguments.done", "completed",
        ]  # fmt: skip
        fragments = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
        done = next(event for event in events if event["type"].endswith("arguments.done"))
        assert len(fragments) > 1 and "".join(fragments) == done["arguments"]
        assert json.loads(done["arguments"]) == {"city": "Paris"} and done["output_index"] == 1
        item = events[-2]["item"]
        assert item["id"] == done["item_id"] and item["arguments"] == done["arguments"]

    def test_the_sdk_helper_parses_arguments(self, sdk: Callable[..., Any]) -> None:
        class Weather(BaseModel):
            city: str

        client, _ = sdk(PARSERS, reply=CALL)
        tool = openai.pydantic_function_tool(Weather, name="weather")
        tools = [{"type": "function", **tool["function"]}]
        with client.responses.stream(model="fake", input="hi", tools=tools) as stream:
            final = stream.get_final_response()
        assert final.output[0].parsed_arguments == {"city": "Paris"}

    @pytest.mark.covers("PromptFields", "tool_choice", "parallel_tool_calls")
    @pytest.mark.covers("ChosenFunction", "name")
    @pytest.mark.covers("AllowedFunctions", "mode", "tools")
    def test_choices_are_shown_as_they_were_sent(
        self, make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
    ) -> None:
        client = make_client(roomy(reply=CALL), data_dir=tmp_path, **PARSERS)
        for choice in (
            "auto", "none", "required", {"type": "function", "name": "weather"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
        ):  # fmt: skip
            body = {"input": "hi", "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
            response = client.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            shown = response.json()
            assert shown["tool_choice"] == choice and shown["tools"] == [WEATHER]
            assert [item["type"] for item in shown["output"]] == ["message" if choice == "none" else "function_call"]
            Response.model_validate(shown)


class TestReasoning:
    REPLY = f"<think>Paris, surely.</think>\n\n{REPLY}"

    def test_text(
        self, make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
    ) -> None:
        client = make_client(roomy(reply=self.REPLY), data_dir=tmp_path, **PARSERS)
        events = events_of(client, input="hi")
        told = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
        response = Response.model_validate(events[-1]["response"])
        reasoning, message = response.output
        assert told == reasoning.content[0].text == "Paris, surely." and reasoning.summary == []
        assert message.content[0].text.strip() == REPLY
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < len(self.REPLY)
        assert types(events)[2:4] == ["output_item.added", "content_part.added"]

    @pytest.mark.covers("ReasoningConfig", "summary")
    def test_as_a_summary(
        self, make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
    ) -> None:
        client = make_client(roomy(reply=self.REPLY), data_dir=tmp_path, **PARSERS)
        events = events_of(client, input="hi", reasoning={"summary": "auto"})
        told = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta")
        item = Response.model_validate(events[-1]["response"]).output[0]
        assert told == item.summary[0].text == "Paris, surely." and item.content == []
        assert "reasoning_text.delta" not in types(events)

    @pytest.mark.covers("PromptFields", "reasoning")
    @pytest.mark.covers("ReasoningConfig", "effort")
    def test_effort_reaches_the_template(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk()
        client.responses.create(model="fake", input="hi", reasoning={"effort": "low"})
        assert "(reasoning_effort=low)" in prompt_text(engine)


class TestChain:
    @pytest.mark.covers("PromptFields", "instructions", "previous_response_id")
    def test_continues_what_was_said_without_its_instructions(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk()
        first = client.responses.create(model="fake", input="one", instructions="first only")
        second = client.responses.create(model="fake", input="two", previous_response_id=first.id)
        third = client.responses.create(model="fake", input="three", previous_response_id=second.id, instructions="now")
        assert prompt_text(engine) == (
            f"[system]now[user]one[assistant]{REPLY}[user]two[assistant]{REPLY}[user]three[assistant]"
        )
        assert third.previous_response_id == second.id

    @pytest.mark.covers("GET /v1/responses/{response_id}/input_items")
    @pytest.mark.covers("GET /v1/responses/{response_id}/input_items", "after", "limit", "order")
    @pytest.mark.covers("GET /v1/conversations/{conversation_id}/items", "after", "limit", "order")
    def test_input_items_in_pages(self, sdk: Callable[..., Any]) -> None:
        client, _ = sdk()
        response = client.responses.create(model="fake", input=[{"role": "user", "content": str(i)} for i in range(5)])
        listed = [item.content[0].text for item in client.responses.input_items.list(response.id, limit=2)]
        assert listed == ["4", "3", "2", "1", "0"]
        page = client.responses.input_items.list(response.id, limit=3, order="asc")
        assert [item.content[0].text for item in page.data] == ["0", "1", "2"] and page.has_more
        rest = client.responses.input_items.list(response.id, order="asc", after=page.data[-1].id)
        assert [item.content[0].text for item in rest.data] == ["3", "4"] and not rest.has_more
        later = client.responses.create(model="fake", input="more", previous_response_id=response.id)
        whole = [item.content[0].text for item in client.responses.input_items.list(later.id, order="asc")]
        assert whole == ["0", "1", "2", "3", "4", REPLY, "more"]
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(response.id, after="msg_nobody")

    @pytest.mark.covers("ItemReference", "id")
    def test_an_item_is_referred_to(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk()
        first = client.responses.create(model="fake", input="one")
        reference = {"type": "item_reference", "id": first.output[0].id}
        client.responses.create(model="fake", input=[reference, {"role": "user", "content": "and?"}])
        assert prompt_text(engine) == f"[assistant]{REPLY}[user]and?[assistant]"

    @pytest.mark.covers("ResponseRequest", "store")
    def test_what_is_not_stored_cannot_be_continued(self, sdk: Callable[..., Any]) -> None:
        client, _ = sdk()
        kept = client.responses.create(model="fake", input="x")
        later = client.responses.create(model="fake", input="y", previous_response_id=kept.id)
        client.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept.id)
        assert client.responses.retrieve(later.id).id == later.id
        unstored = client.responses.create(model="fake", input="x", store=False)
        for response_id in (unstored.id, kept.id, later.id):
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(model="fake", input="z", previous_response_id=response_id)
            assert caught.value.code == "previous_response_not_found"
            assert caught.value.param == "previous_response_id"

    def test_survives_a_restart(
        self, make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
    ) -> None:
        before = make_client(roomy(), data_dir=tmp_path).post("/v1/responses", json={"input": "one"}).json()
        engine = roomy()
        after = make_client(engine, data_dir=tmp_path)
        assert after.get(f"/v1/responses/{before['id']}").json() == before
        after.post("/v1/responses", json={"input": "two", "previous_response_id": before["id"]})
        assert prompt_text(engine) == f"[user]one[assistant]{REPLY}[user]two[assistant]"

    @pytest.mark.covers("PromptFields", "truncation")
    def test_truncation_auto_drops_the_oldest_turns(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk()
        engine.info.max_model_len = 256
        turns = [{"role": "system", "content": "S"}]
        for i in range(8):
            turns += [{"role": "user", "content": f"{i}" * 30}, {"role": "assistant", "content": "ok"}]
        turns.append({"role": "user", "content": "last"})
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="fake", input=turns)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
        client.responses.create(model="fake", input=turns, truncation="auto", max_output_tokens=20)
        prompt = prompt_text(engine)
        assert prompt.startswith("[system]S[user]") and prompt.endswith("[user]last[assistant]")
        assert 256 - 20 - len("[user]" + "0" * 30 + "[assistant]ok") < len(prompt) <= 256 - 20


class TestBackground:
    @pytest.mark.covers("ResponseRequest", "background")
    def test_runs_until_it_is_polled_as_completed(self, sdk: Callable[..., Any]) -> None:
        client, _ = sdk(delay=0.005)
        response = client.responses.create(model="fake", input="hi", background=True)
        assert response.status in ("queued", "in_progress") and response.output == []
        wait_for(lambda: client.responses.retrieve(response.id).status == "completed")
        assert client.responses.retrieve(response.id).output_text == REPLY
        later = client.responses.create(model="fake", input="more", previous_response_id=response.id)
        assert later.status == "completed"

    @pytest.mark.covers("POST /v1/responses/{response_id}/cancel")
    def test_cancel_frees_the_engine(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk(delay=0.05)
        response = client.responses.create(model="fake", input="hi", background=True)
        with pytest.raises(openai.BadRequestError, match="still"):
            client.responses.create(model="fake", input="z", previous_response_id=response.id)
        wait_for(lambda: bool(engine.active))
        assert client.responses.cancel(response.id).status == "cancelled"
        wait_for(lambda: not engine.active)
        assert client.responses.retrieve(response.id).status == "cancelled"
        assert client.responses.cancel(response.id).status == "cancelled"
        plain = client.responses.create(model="fake", input="hi", max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(plain.id)

    @pytest.mark.covers("DELETE /v1/responses/{response_id}")
    def test_delete_stops_it(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk(delay=0.05)
        response = client.responses.create(model="fake", input="hi", background=True)
        client.responses.delete(response.id)
        wait_for(lambda: not engine.active)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)

    @pytest.mark.covers("GET /v1/responses/{response_id}")
    @pytest.mark.covers("GET /v1/responses/{response_id}", "stream", "starting_after")
    def test_its_stream_can_be_followed_again(self, sdk: Callable[..., Any]) -> None:
        client, engine = sdk(delay=0.01)
        stream = client.responses.create(model="fake", input="hi", background=True, stream=True)
        first = [next(stream) for _ in range(6)]
        assert [event.type.removeprefix("response.") for event in first[:3]] == ["created", "queued", "in_progress"]
        stream.close()
        response_id = first[0].response.id
        live = list(client.responses.retrieve(response_id, stream=True, starting_after=5))
        again = list(client.responses.retrieve(response_id, stream=True, starting_after=5))
        assert live == again and live[-1].type == "response.completed"
        numbers = [event.sequence_number for event in [*first, *live]]
        assert numbers == list(range(len(numbers)))
        assert live[-1].response.output_text == REPLY and not engine.active
        plain = client.responses.create(model="fake", input="hi")
        with pytest.raises(openai.BadRequestError, match="no stream"):
            client.responses.retrieve(plain.id, stream=True)

    def test_a_server_that_stops_fails_what_runs(
        self, make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
    ) -> None:
        client = make_client(roomy(delay=0.5), data_dir=tmp_path)
        response = client.post("/v1/responses", json={"input": "hi", "background": True}).json()
        client.__exit__()
        after = make_client(roomy(), data_dir=tmp_path).get(f"/v1/responses/{response['id']}").json()
        assert after["status"] == "failed" and "stopped" in after["error"]["message"]

    def test_a_lost_one_fails_when_its_lease_ends(
        self,
        post: Callable[..., Any],
        make_client: Callable[..., TestClient],
        roomy: Callable[..., FakeEngine],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As after a crash: the row says queued, and nobody renews it."""
        response = post(input="hi").json()
        lost = Response.model_validate(response).id.replace("resp_", "resp_0")
        monkeypatch.setattr("jaxllm.serving.store.responses.LEASE_SECONDS", 0.0)
        asyncio.run(_begin(tmp_path, response | {"id": lost, "status": "queued", "background": True, "output": []}))
        time.sleep(0.01)
        found = post.client.get(f"/v1/responses/{lost}").json()
        assert found["status"] == "failed" and "stopped" in found["error"]["message"]
        assert post(input="on", previous_response_id=lost).status_code == 200

    def test_another_server_can_cancel_it(
        self,
        make_client: Callable[..., TestClient],
        roomy: Callable[..., FakeEngine],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("jaxllm.serving.responses.background.LEASE_SECONDS", 0.3)
        engine = roomy(delay=0.2)
        client, other = make_client(engine, data_dir=tmp_path), make_client(roomy(), data_dir=tmp_path)
        response_id = client.post("/v1/responses", json={"input": "hi", "background": True}).json()["id"]
        wait_for(lambda: bool(engine.active))
        assert other.post(f"/v1/responses/{response_id}/cancel").json()["status"] == "cancelled"
        wait_for(lambda: not engine.active)
        assert client.get(f"/v1/responses/{response_id}").json()["status"] == "cancelled"


async def _begin(data_dir: Path, response: dict[str, Any]) -> None:
    import msgspec

    from jaxllm.serving.responses.objects import Response as Stored

    database = Database(f"sqlite+aiosqlite:///{data_dir / 'jaxllm.db'}")
    await ResponseStore(database).begin(msgspec.convert(response, Stored), [])
    await database.close()


def test_unknown_fields_are_listed_where_the_server_only_warns(
    make_client: Callable[..., TestClient], roomy: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    client = make_client(roomy(), data_dir=tmp_path, unknown_fields="warn")
    body = {"input": [{"role": "user", "content": "x", "phase": "commentary"}], "colour": "red"}
    warnings = client.post("/v1/responses", json=body).json()["warnings"]
    assert len(warnings) == 2 and "phase" in "".join(warnings) and "colour" in "".join(warnings)
    assert "warnings" not in client.post("/v1/responses", json={"input": "x"}).json()


@pytest.mark.covers("POST /v1/responses/input_tokens")
def test_input_tokens(sdk: Callable[..., Any]) -> None:
    client, engine = sdk()
    counted = client.responses.input_tokens.count(model="fake", input="hi", instructions="x" * 5000)
    assert counted.input_tokens == len("[system]" + "x" * 5000 + "[user]hi[assistant]") and not engine.seen
    used = client.responses.create(model="fake", input="hi").usage.input_tokens
    assert client.responses.input_tokens.count(model="fake", input="hi").input_tokens == used


CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
OTHER_CALL, OTHER_OUTPUT = CALL_ITEM | {"call_id": "d"}, OUTPUT | {"call_id": "d"}
REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "required"),
    ({"input": []}, "input", "required"),
    ({"input": 3}, "input", "string"),
    ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type", "function_call_output"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "input_text"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
    ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id", "stored"),
    ({"input": [CALL_ITEM]}, "input", "no output found for function call c"),
    ({"input": [CALL_ITEM, {"role": "user", "content": "x"}]}, "input", "no output found"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "'c'"),
    ({"input": [CALL_ITEM | {"arguments": "3"}]}, "input[0].arguments", "JSON"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    ({"input": "x", "tools": [WEATHER, WEATHER]}, "tools[1].name", "twice"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "tools is empty"),
    ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice.type", "'file_search'"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "f"),
    ({"input": [CALL_ITEM, OTHER_CALL, OUTPUT, CALL_ITEM, OTHER_OUTPUT, OUTPUT]}, "input[3]", "the calls d await"),
    ({"input": "x", "model": "response_format"}, "model", "'response_format' is not served"),
    ({"input": "x", "min_tokens": 5, "max_output_tokens": 4}, "min_tokens", "at most max_output_tokens (4)"),
    ({"input": "x", "temperature": -1.0}, "temperature", "0 or more"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "greater"),
    ({"input": "x", "max_output_tokens": 5000}, "max_output_tokens", "at most"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs", "include"),
    ({"input": "x", "include": ["file_search_call.results"]}, "include[0]", "logprobs"),
    ({"input": "x", "background": True, "store": False}, "background", "store"),
    ({"input": "x", "previous_response_id": "a", "conversation": "b"}, "previous_response_id", "conversation"),
    ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id", "no stored response"),
    ({"input": "x", "conversation": "conv_0"}, "conversation_id", "conv_0"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity", "medium"),
    ({"input": "x", "text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
    ({"input": "x", "reasoning": {"summary": "concise"}}, "reasoning.summary", "detailed"),
    ({"input": "x", "stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
    ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata", "512"),
    ({"input": "x", "max_tokens": 5}, "max_tokens", "unknown field"),
    ({"input": "x" * 5000}, "input", "4096"),
]


@pytest.mark.parametrize(("body", "param", "told"), REFUSALS, ids=[str(body)[:60] for body, _, _ in REFUSALS])
def test_refusals_name_the_field(post: Callable[..., Any], body: dict[str, Any], param: str, told: str) -> None:
    answer = post(**body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and told in error["message"], error
    assert "messages" not in error["message"] and "completion_tokens" not in error["message"]


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/responses/resp_0", 404, "response_id"),
        ("/v1/responses/resp_0/input_items", 404, "response_id"),
        ("/v1/responses/resp_0/input_items?limit=0", 400, "limit"),
        ("/v1/responses/resp_0/input_items?order=up", 400, "order"),
        ("/v1/responses/resp_0?starting_after=1", 400, "starting_after"),
        ("/v1/responses/resp_0?stream=maybe", 400, "stream"),
    ],
)
def test_wrong_paths_and_queries(post: Callable[..., Any], path: str, status: int, param: str) -> None:
    answer = post.client.get(path)
    assert answer.status_code == status and answer.json()["error"]["param"] == param, answer.text


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
