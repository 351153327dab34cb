"""/v1/messages through the real anthropic SDK over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pydantic
import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.anthropic.request import CountTokensRequest, MessagesRequest
from tests.serving.anthropic.shared import CONTEXT, HELLO, WEATHER, ScriptedEngine
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY
from tests.support.covers import covers

if TYPE_CHECKING:
    import anthropic


@covers("POST /v1/messages")
@covers("MessagesRequest", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k")
@covers("Metadata", "user_id")
def test_create(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    message = sdk.messages.create(
        model="fake",
        max_tokens=100,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=HELLO,
        stop_sequences=["###"],
        metadata={"user_id": "u1"},
        service_tier="auto",
        extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7},
    )
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": REPLY}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id == message.id
    prompt = "[system]Be brief.[user]What is the capital of France?[assistant]"
    assert engine.last_prompt == prompt
    usage = message.usage
    assert usage.cache_read_input_tokens == 3 and usage.cache_creation_input_tokens == 0
    assert usage.input_tokens + 3 == len(prompt) and usage.output_tokens == len(REPLY)
    params = engine.last_params
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 7)
    assert (params.max_tokens, params.stop) == (100, ("###",))


@covers("MessagesRequest", "stream")
def test_stream_finishes_cleanly_and_equals_create(sdk: anthropic.Anthropic) -> None:
    whole = sdk.messages.create(model="fake", max_tokens=100, messages=HELLO)
    with sdk.messages.stream(model="fake", max_tokens=100, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == REPLY
    ours, theirs = final.to_dict(), whole.to_dict()
    assert ours.pop("id") != theirs.pop("id")
    assert ours.pop("stop_details") is None
    assert ours == theirs


def test_events_on_the_wire(url: str) -> None:
    body = {"model": "fake", "max_tokens": 5, "messages": HELLO, "stream": True}
    response = httpx.post(f"{url}/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"]
    pairs = [event.split("\n") for event in response.text.rstrip("\n").split("\n\n")]
    names = [first.removeprefix("event: ") for first, _ in pairs]
    data = [json.loads(second.removeprefix("data: ")) for _, second in pairs]
    assert names == [event["type"] for event in data]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert data[0]["message"]["content"] == [] and data[0]["message"]["stop_reason"] is None
    assert data[0]["message"]["usage"]["input_tokens"] > 0
    assert data[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert data[-2]["usage"]["output_tokens"] == 5


def test_stop_sequence(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.stop_reason = "###"
    ask: dict[str, Any] = {"model": "fake", "max_tokens": 99, "messages": HELLO, "stop_sequences": ["###"]}
    with sdk.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (sdk.messages.create(**ask), streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "###")


def test_max_tokens_beyond_the_context_end_there(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.reply = "x" * CONTEXT
    message = sdk.messages.create(model="fake", max_tokens=10**6, messages=HELLO)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == CONTEXT - len(engine.last_prompt)
    assert sdk.messages.create(model="fake", max_tokens=7, messages=HELLO).stop_reason == "max_tokens"


def test_prefill(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    sdk.messages.create(
        model="fake", max_tokens=100, messages=[*HELLO, {"role": "assistant", "content": "The answer is"}]
    )
    assert engine.last_prompt.endswith("[assistant]The answer is")


@covers("ThinkingEnabled", "display")
@covers("ThinkingAdaptive", "display")
@pytest.mark.parametrize("display", [None, "omitted"])
def test_thinking(sdk: anthropic.Anthropic, engine: ScriptedEngine, display: Any) -> None:
    engine.reply = "<think>\nCapitals, capitals.\n</think>\n\nParis."
    shown = {"display": display} if display else {}
    ask: dict[str, Any] = {
        "model": "fake",
        "max_tokens": 2000,
        "messages": HELLO,
        "thinking": {"type": "enabled", "budget_tokens": 1024, **shown},
    }
    whole = sdk.messages.create(**ask)
    with sdk.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in whole.content] == [block.to_dict() for block in streamed.content]
    thinking, text = whole.content
    assert thinking.type == "thinking" and thinking.signature
    assert thinking.thinking.strip() == ("" if display else "Capitals, capitals.")
    assert text.type == "text" and text.text.strip() == "Paris."
    assert whole.usage.output_tokens_details and whole.usage.output_tokens_details.thinking_tokens > 10
    assert "(enable_thinking=True)" in engine.last_prompt and "(thinking_budget=1024)" in engine.last_prompt
    sdk.messages.create(**ask | {"messages": [*HELLO, whole.to_param(), *HELLO]})
    sdk.messages.create(**ask | {"thinking": {"type": "disabled"}})
    assert "(enable_thinking=False)" in engine.last_prompt


def test_parse_into_a_class(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    class City(pydantic.BaseModel):
        name: str

    engine.reply = '{"name": "Paris"}'
    answer = sdk.messages.parse(model="fake", max_tokens=100, messages=HELLO, output_format=City)
    assert answer.parsed_output == City(name="Paris")
    assert engine.last_params.structured_outputs.kind == "json"


@covers("POST /v1/messages/count_tokens")
def test_count_tokens_is_exact(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    fields: dict[str, Any] = {"model": "fake", "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    count = sdk.messages.count_tokens(**fields).input_tokens
    usage = sdk.messages.create(max_tokens=50, **fields).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(engine.seen[-1][0])


def test_keys(listen: Callable[..., str], engine: ScriptedEngine) -> None:
    import anthropic

    url = listen(engine, api_key="secret")

    def ask(**credentials: Any) -> anthropic.types.Message:
        with anthropic.Anthropic(base_url=url, max_retries=0, **credentials) as client:
            return client.messages.create(model="fake", max_tokens=5, messages=HELLO)

    assert ask(api_key="secret").content and ask(auth_token="secret").content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(api_key="wrong")
    assert caught.value.type == "authentication_error"
    assert httpx.post(f"{url}/v1/chat/completions", headers={"x-api-key": "secret"}, json={}).status_code == 401


def test_silence_is_filled_with_pings(listen: Callable[..., str]) -> None:
    url = listen(ScriptedEngine(delay=0.3), sse_keep_alive=0.05)
    body = {"max_tokens": 2, "messages": HELLO, "stream": True}
    assert httpx.post(f"{url}/v1/messages", json=body).text.count("event: ping\n") > 3


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_engine(listen: Callable[..., str], stream: bool) -> None:
    engine = ScriptedEngine(delay=0.1)
    url = listen(engine)
    body = {"max_tokens": 50, "messages": HELLO, "stream": stream}
    if stream:
        with httpx.Client() as http, http.stream("POST", f"{url}/v1/messages", json=body) as response:
            parts = response.iter_bytes()
            next(parts)
            wait_for(lambda: len(engine.active) == 1)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/messages", json=body, timeout=0.5)
    wait_for(lambda: not engine.active)


def test_beta_headers_no_prefix_and_async(url: str) -> None:
    import anthropic

    async def ask() -> str:
        headers = {"anthropic-beta": "interleaved-thinking-2025-05-14"}
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="none", default_headers=headers) as client,
            client.messages.stream(model="fake", max_tokens=50, messages=HELLO) as stream,
        ):
            return await stream.get_final_text()

    assert asyncio.run(ask()) == REPLY
    assert httpx.post(f"{url}/messages", json={"max_tokens": 50, "messages": HELLO}).json()["type"] == "message"
    count = httpx.post(f"{url}/messages/count_tokens", json={"messages": HELLO}).json()
    assert count["input_tokens"] > 0


def test_unknown_fields_may_be_warned_of(make_client: Callable[..., TestClient], engine: ScriptedEngine) -> None:
    client = make_client(engine, unknown_fields="warn")
    body = {"max_tokens": 50, "messages": HELLO, "container": "c"}
    answer = client.post("/v1/messages", json=body).json()
    assert answer["content"][0]["text"] == REPLY and "container" in answer["warnings"][0]
    assert "container" in client.post("/v1/messages", json=body | {"stream": True}).text


def test_every_field_of_the_sdk_is_known() -> None:
    """Honoured or refused by name: none is merely unknown."""
    from anthropic.types import MessageCountTokensParams, message_create_params

    created = message_create_params.MessageCreateParamsStreaming.__annotations__
    for theirs, ours in ((created, MessagesRequest), (MessageCountTokensParams.__annotations__, CountTokensRequest)):
        assert theirs.keys() <= ours.model_fields.keys() | ours.unsupported


def test_openapi_knows_the_routes(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    operation = schema["paths"]["/v1/messages"]["post"]
    content = operation["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "text/event-stream"}
    for reference in (content, operation["responses"]["4XX"]["content"]):
        name = reference["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert name in schema["components"]["schemas"]
