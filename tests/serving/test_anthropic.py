"""/v1/messages through the real anthropic SDK over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from fastapi.testclient import TestClient

from jaxllm.engine.front.messages import TokenDelta
from jaxllm.serving.protocol.anthropic.request import CountTokensRequest, MessagesRequest
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY, ByteTokenizer, FakeEngine

CONTEXT = 4096
HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "get_weather", "description": "Weather now", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}(tools={{ tools | tojson }}){% endif %}"
    "{% if enable_thinking is defined %}(enable_thinking={{ enable_thinking }}){% endif %}"
    "{% if thinking_budget is defined %}(thinking_budget={{ thinking_budget }}){% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORMATS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}


class ScriptedEngine(FakeEngine):
    """Says `reply`, and ends with `stop_reason`, or with finish_reason "abort"."""

    stop_reason: str | None = None
    aborts = False

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.info.max_model_len = CONTEXT
        self.tokenizer = ByteTokenizer(TEMPLATE)

    def _delta(self, *args: Any) -> TokenDelta:
        delta = super()._delta(*args)
        if delta.finish_reason == "stop":
            delta.stop_reason = self.stop_reason
            delta.finish_reason = "abort" if self.aborts else "stop"
        return delta

    @property
    def last_prompt(self) -> str:
        return ByteTokenizer().decode(self.seen[-1][0])

    @property
    def last_params(self) -> Any:
        return self.seen[-1][1]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def url(listen: Callable[..., str], engine: ScriptedEngine) -> str:
    return listen(engine, **FORMATS)


@pytest.fixture
def sdk(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


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


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop(sdk: anthropic.Anthropic, engine: ScriptedEngine, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]

    def ask() -> anthropic.types.Message:
        fields: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": messages, "tools": [WEATHER]}
        if not stream:
            return sdk.messages.create(**fields)
        with sdk.messages.stream(**fields) as events:
            return events.get_final_message()

    engine.reply = f"Let me look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"
    answer = ask()
    assert answer.stop_reason == "tool_use"
    text, *calls = answer.content
    assert text.type == "text" and text.text.strip() == "Let me look."
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "get_weather", {"city": "Paris"}),
        ("tool_use", "get_weather", {"city": "Rome"}),
    ]
    assert "get_weather" in engine.last_prompt
    messages += [
        answer.to_param(),
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "12 C"}]},
                {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no such city", "is_error": True},
            ],
        },
    ]
    engine.reply = "It is 12 C."
    answer = ask()
    assert answer.stop_reason == "end_turn" and answer.content[0].to_dict()["text"] == "It is 12 C."
    assert engine.last_prompt.endswith("[tool]12 C[tool]Error: no such city[assistant]")


def test_input_streams_as_it_comes(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.reply = CALL
    with sdk.messages.stream(model="fake", max_tokens=500, messages=HELLO, tools=[WEATHER]) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
    assert len(parts) > 3 and json.loads("".join(parts)) == {"city": "Paris"}


def test_one_call_at_most(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.reply = f"{CALL}\n{CALL}"
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = sdk.messages.create(model="fake", max_tokens=500, messages=HELLO, tools=[WEATHER], tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]


@pytest.mark.parametrize(("end", "reason"), [(40, "max_tokens"), (1000, "end_turn")])
def test_a_call_that_was_not_finished_is_not_to_be_made(
    sdk: anthropic.Anthropic, engine: ScriptedEngine, end: int, reason: str
) -> None:
    """Whether max_tokens cuts it off or the model stops in it."""
    engine.reply = CALL if reason == "max_tokens" else CALL[:-20]
    answer = sdk.messages.create(model="fake", max_tokens=end, messages=HELLO, tools=[WEATHER])
    assert [block.type for block in answer.content] == ["tool_use"]
    assert answer.stop_reason == reason


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=lambda choice: choice["type"]
)
def test_forced_calls_are_constrained(sdk: anthropic.Anthropic, engine: ScriptedEngine, choice: Any) -> None:
    engine.reply = CALL
    answer = sdk.messages.create(model="fake", max_tokens=500, messages=HELLO, tools=[WEATHER], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    assert engine.last_params.structured_outputs is not None


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


def test_count_tokens_is_exact(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    fields: dict[str, Any] = {"model": "fake", "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    count = sdk.messages.count_tokens(**fields).input_tokens
    usage = sdk.messages.create(max_tokens=50, **fields).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(engine.seen[-1][0])


def test_keys(listen: Callable[..., str], engine: ScriptedEngine) -> None:
    url = listen(engine, api_key="secret")

    def ask(**credentials: Any) -> anthropic.types.Message:
        with anthropic.Anthropic(base_url=url, max_retries=0, **credentials) as client:
            return client.messages.create(model="fake", max_tokens=5, messages=HELLO)

    assert ask(api_key="secret").content and ask(auth_token="secret").content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(api_key="wrong")
    assert caught.value.type == "authentication_error"
    assert httpx.post(f"{url}/v1/chat/completions", headers={"x-api-key": "secret"}, json={}).status_code == 401


ALONE = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "x"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


def turns(*contents: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]}


REFUSALS = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"messages": []}, "messages is []"),
    ({"n": 2}, "unknown field 'n'"),
    ({"stop": ["a"]}, "unknown field 'stop'"),
    ({"container": "c"}, "container is not supported"),
    ({"mcp_servers": []}, "mcp_servers is not supported"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"temperature": -1}, "temperature is -1"),
    ({"top_k": 1.5}, "top_k is 1.5"),
    ({"top_p": 0}, "top_p is 0"),
    ({"metadata": {"team": "x"}}, "metadata.team"),
    (turns([IMAGE]), "messages[0].content[0].type: blocks of type 'image'"),
    (turns([{"type": "document"}]), "messages[0].content[0].type: blocks of type 'document'"),
    (turns([{"type": "poem"}]), "messages[0].content[0]"),
    (turns([{"type": "text"}]), "messages[0].content[0].text is required"),
    (turns("x", [RESULT]), "messages[1].content[0].type: messages of role 'assistant'"),
    (turns([RESULT]), "no call awaits"),
    (turns("x", [ALONE]), "c1"),
    (turns("x", [ALONE], "y"), "messages[2] must begin with tool_result blocks for c1"),
    (turns("x", [ALONE], [{"type": "text", "text": "y"}, RESULT]), "must come first"),
    (turns("x", [ALONE, ALONE], [RESULT]), "ids must differ"),
    (turns("x", [ALONE], [RESULT | {"content": [IMAGE]}]), "blocks of type 'image'"),
    (turns("x", [{"type": "redacted_thinking", "data": "x"}], "y"), "redacted_thinking"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "names must differ"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name is 'f'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "'auto'"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 99}}, "less than max_tokens"),
    ({"thinking": {"type": "between_tools"}}, "'adaptive'"),
    ({"thinking": {"type": "adaptive"}, **turns("x", "y")}, "the last message is the assistant's"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
    ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, "thinking is disabled"),
    ({"service_tier": "gold"}, "service_tier is 'gold'"),
]


def error_of(response: Any, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == kind
    assert "\n" not in body["error"]["message"]
    return body["error"]["message"]


@pytest.fixture
def client(make_client: Callable[..., TestClient], engine: ScriptedEngine) -> TestClient:
    return make_client(engine, **FORMATS)


@pytest.mark.parametrize(("fields", "says"), REFUSALS, ids=lambda value: str(value)[:40])
def test_refusals(client: TestClient, fields: dict[str, Any], says: str) -> None:
    response = client.post("/v1/messages", json={"max_tokens": 50, "messages": HELLO} | fields)
    assert says in error_of(response, 400, "invalid_request_error")


def test_error_shapes(make_client: Callable[..., TestClient], engine: ScriptedEngine) -> None:
    client = make_client(engine, max_body_size=1000)
    body = {"max_tokens": 50, "messages": HELLO}

    def post(**fields: Any) -> Any:
        return client.post("/v1/messages", json=body | fields)

    assert "'gpt'" in error_of(post(model="gpt"), 404, "not_found_error")
    error_of(post(system="x" * 2000), 413, "request_too_large")
    error_of(client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}), 400,
             "invalid_request_error")  # fmt: skip
    error_of(client.post("/v1/messages", content=b"{}"), 415, "invalid_request_error")
    error_of(client.get("/v1/messages"), 405, "invalid_request_error")
    engine.queue_limit = 0
    for stream in (False, True):
        response = post(stream=stream)
        error_of(response, 429, "rate_limit_error")
        assert response.headers["retry-after"]
    engine.die()
    for stream in (False, True):
        error_of(post(stream=stream), 529, "overloaded_error")


def test_prompt_longer_than_the_context(client: TestClient) -> None:
    response = client.post("/v1/messages", json={"max_tokens": 50, **turns("x" * 5000)})
    message = error_of(response, 400, "invalid_request_error")
    assert "50" in message and str(CONTEXT) in message


def test_error_in_mid_stream(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.fail_after = 5
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        sdk.messages.stream(model="fake", max_tokens=50, messages=HELLO) as stream,
    ):
        stream.get_final_message()
    assert caught.value.type == "api_error" and "caught fire" in str(caught.value)
    with pytest.raises(anthropic.InternalServerError):
        sdk.messages.create(model="fake", max_tokens=50, messages=HELLO)


def test_an_answer_that_the_server_cut_short_is_an_error(client: TestClient, engine: ScriptedEngine) -> None:
    engine.aborts = True
    body = {"max_tokens": 50, "messages": HELLO}
    assert "stopped" in error_of(client.post("/v1/messages", json=body), 529, "overloaded_error")
    last = client.post("/v1/messages", json=body | {"stream": True}).text.rstrip("\n").split("\n\n")[-1]
    assert last.startswith("event: error\n") and "overloaded_error" in last


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
