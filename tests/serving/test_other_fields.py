"""Fields of which no other test speaks: what each does, or why a value is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.anthropic.request import MessagesRequest
from jaxllm.serving.anthropic.translate import conversation, messages
from jaxllm.serving.conversation import NamedTool, Tool
from jaxllm.serving.openai.completion_types import CompletionRequest
from tests.serving.api_surface import BODIES
from tests.serving.fake_engine import BOS, ByteTokenizer, FakeEngine

HELLO = [{"role": "user", "content": "Hi"}]


def prompt(engine: FakeEngine) -> str:
    return bytes(token for token in engine.seen[-1][0] if token < 256).decode()


def send(client: TestClient, path: str, status: int = 200, **fields: Any) -> Any:
    response = client.post(path, json=BODIES[path] | fields)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.covers("GenerationRequest", "model")
@pytest.mark.covers("TokenizeRequest", "model")
@pytest.mark.covers("DetokenizeRequest", "model")
@pytest.mark.covers("PromptFields", "model")
@pytest.mark.covers("CountTokensRequest", "model")
@pytest.mark.covers("PoolingFields", "model")
@pytest.mark.parametrize(
    "path",
    [path for path in BODIES if "{" not in path and path not in ("/v1/conversations", "/v1/files", "/v1/batches")],
)
def test_model_is_a_name_that_is_served(client: TestClient, path: str) -> None:
    error = send(client, path, 404, model="other")["error"]
    assert "'other'" in error["message"] and "fake" in error["message"]


@pytest.mark.covers("CompletionRequest", "add_special_tokens")
def test_completions_add_special_tokens(client: TestClient, engine: FakeEngine) -> None:
    for asked, expected in ((True, [BOS, 72, 105]), (False, [72, 105])):
        send(client, "/v1/completions", add_special_tokens=asked)
        assert engine.seen[-1][0] == expected


@pytest.mark.covers("GenerationRequest", "early_stopping")
def test_early_stopping_reaches_the_search() -> None:
    body = CompletionRequest(prompt="x", use_beam_search=True, early_stopping=True)
    search = body.generation_settings().beam_search_params(4)
    assert search is not None and search.early_stopping


class TestMessages:
    @pytest.fixture
    def engine(self) -> FakeEngine:
        engine = FakeEngine()
        engine.tokenizer = ByteTokenizer(
            "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}"
            "{% if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}]{{ m.content }}{% endfor %}[assistant]"
        )
        return engine

    @pytest.mark.covers("Message", "role", "content", "name", "refusal", "reasoning_content", "reasoning")
    @pytest.mark.covers("TextPart", "text")
    @pytest.mark.covers("RefusalPart", "refusal")
    @pytest.mark.parametrize(
        ("message", "shown"),
        [
            ({"role": "developer", "content": "d"}, "[system]d"),
            ({"role": "user", "name": "Ann", "content": "d"}, "[user Ann]d"),
            ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "[user]a\nb"),
            ({"role": "assistant", "refusal": "No."}, "[assistant]No."),
            ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "[assistant]No."),
            ({"role": "assistant", "content": "d", "reasoning_content": "hm"}, "[assistant (hm)]d"),
            ({"role": "assistant", "content": "d", "reasoning": "hm"}, "[assistant (hm)]d"),
        ],
    )
    def test_what_a_template_sees(
        self, client: TestClient, engine: FakeEngine, message: dict[str, Any], shown: str
    ) -> None:
        send(client, "/v1/chat/completions", messages=[message])
        assert prompt(engine) == f"{shown}[assistant]"


class TestResponses:
    @pytest.mark.covers(
        "SamplingFields",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "skip_special_tokens",
        "stop_token_ids",
        "temperature",
    )
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
    def test_means_the_same_as_in_a_chat(self, client: TestClient, engine: FakeEngine, field: str, value: Any) -> None:
        send(client, "/v1/responses", **{field: value})
        assert getattr(engine.seen[-1][1], field) == value

    @pytest.mark.covers("PromptFields", "chat_template_kwargs")
    def test_chat_template_kwargs(self, client: TestClient, engine: FakeEngine) -> None:
        send(client, "/v1/responses", chat_template_kwargs={"enable_thinking": False})
        assert "(enable_thinking=False)" in prompt(engine)

    @pytest.mark.covers("ResponseRequest", "stream_options")
    @pytest.mark.covers("ResponseStreamOptions", "include_obfuscation")
    def test_nothing_is_padded(self, client: TestClient) -> None:
        body = BODIES["/v1/responses"] | {"stream": True}
        fine = client.post("/v1/responses", json=body | {"stream_options": {"include_obfuscation": False}})
        assert fine.status_code == 200 and "obfuscation" not in fine.text
        options = {"stream": True, "stream_options": {"include_obfuscation": True}}
        assert "include_obfuscation" in send(client, "/v1/responses", 400, **options)["error"]["message"]
        alone = send(client, "/v1/responses", 400, stream_options={"include_obfuscation": False})
        assert alone["error"]["param"] == "stream_options"

    @pytest.mark.covers("TextConfig", "verbosity")
    def test_verbosity_has_its_default_only(self, client: TestClient) -> None:
        send(client, "/v1/responses", text={"verbosity": "medium"})
        assert send(client, "/v1/responses", 400, text={"verbosity": "low"})["error"]["param"] == "text.verbosity"

    @pytest.mark.covers("ReasoningConfig", "generate_summary")
    def test_generate_summary_is_summary(self, make_client: Callable[..., TestClient]) -> None:
        client = make_client(FakeEngine(reply="<think>hm</think>yes"), reasoning_parser="think")
        send_all = {"max_output_tokens": 100}
        texts = [
            send(client, "/v1/responses", reasoning={name: "auto"}, **send_all)["output"][0]["summary"]
            for name in ("summary", "generate_summary")
        ]
        assert texts == [[{"type": "summary_text", "text": "hm"}]] * 2

    @pytest.mark.covers("ReasoningItem", "encrypted_content")
    def test_encrypted_content_alone_cannot_be_read(self, client: TestClient) -> None:
        item = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
        error = send(client, "/v1/responses", 400, input=[item])["error"]
        assert error["param"] == "input[0].encrypted_content"
        readable = item | {"content": [{"type": "reasoning_text", "text": "hm"}]}
        send(client, "/v1/responses", input=[readable, {"role": "user", "content": "Hi"}])

    @pytest.mark.covers("TextSchemaFormat", "schema")
    def test_text_follows_a_schema(self, client: TestClient, engine: FakeEngine) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        send(client, "/v1/responses", text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
        assert json.loads(engine.seen[-1][1].structured_outputs.json) == schema

    @pytest.mark.covers("GET /v1/responses/{response_id}", "include[]", "include_obfuscation")
    @pytest.mark.covers("GET /v1/responses/{response_id}/input_items", "include[]")
    @pytest.mark.covers("POST /v1/conversations/{conversation_id}/items", "include[]")
    @pytest.mark.covers("GET /v1/conversations/{conversation_id}/items", "include[]")
    @pytest.mark.covers("GET /v1/conversations/{conversation_id}/items/{item_id}", "include[]")
    def test_include_changes_nothing(self, client: TestClient) -> None:
        names = {"include[]": ["message.output_text.logprobs"]}
        response = "/v1/responses/" + send(client, "/v1/responses")["id"]
        conversation = "/v1/conversations/" + client.post("/v1/conversations", json={}).json()["id"]
        added = client.post(f"{conversation}/items", json={"items": HELLO}, params=names).json()["data"]
        item = f"{conversation}/items/{added[0]['id']}"
        for path in (response, f"{response}/input_items", f"{conversation}/items", item):
            plain = client.get(path)
            assert plain.status_code == 200 and client.get(path, params=names).json() == plain.json()
        assert client.get(response, params={"include_obfuscation": True}).json() == client.get(response).json()

    @pytest.mark.covers("InputItem", "id")
    @pytest.mark.covers("MessageItem", "status")
    @pytest.mark.covers("OutputTextPart", "text", "annotations", "logprobs")
    @pytest.mark.covers("RefusalContent", "refusal")
    @pytest.mark.covers("FunctionCallItem", "call_id", "status")
    @pytest.mark.covers("FunctionCallOutputItem", "status")
    @pytest.mark.covers("ReasoningItem", "status")
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
    def test_items_come_back_as_they_were(self, client: TestClient, item: dict[str, Any]) -> None:
        conversation = client.post("/v1/conversations", json={"items": [item]}).json()["id"]
        assert client.get(f"/v1/conversations/{conversation}/items").json()["data"] == [item]

    @pytest.mark.covers("ReasoningItem", "summary", "content")
    @pytest.mark.covers("SummaryTextPart", "text")
    @pytest.mark.covers("ReasoningTextPart", "text")
    def test_reasoning_is_shown_to_templates_again(self, client: TestClient, engine: FakeEngine) -> None:
        engine.tokenizer = ByteTokenizer("{% for m in messages %}{{ m.reasoning_content }}{% endfor %}")
        for item in (
            {"summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"summary": [{"type": "summary_text", "text": "hm"}]},
        ):
            answer = {"role": "assistant", "content": "a"}
            send(client, "/v1/responses", input=[{"type": "reasoning", **item}, answer])
            assert prompt(engine) == "hm"

    @pytest.mark.covers("FunctionDefinition", "name", "description", "parameters")
    def test_tools_reach_the_template(self, client: TestClient, engine: FakeEngine) -> None:
        engine.tokenizer = ByteTokenizer("{{ tools | tojson }}")
        tool = {"name": "f", "description": "Does f", "parameters": {"type": "object", "properties": {"a": {}}}}
        send(client, "/v1/responses", tools=[{"type": "function", "strict": True, **tool}])
        assert '"name": "f"' in prompt(engine) and '"a": {}' in prompt(engine) and "Does f" in prompt(engine)


class TestAnthropic:
    def chat(self, **fields: Any) -> Any:
        return conversation(MessagesRequest.model_validate({"max_tokens": 9, "messages": HELLO} | fields))

    @pytest.mark.covers(
        "ToolParam", "type", "name", "description", "input_schema", "allowed_callers", "eager_input_streaming"
    )
    @pytest.mark.covers("ToolChoiceTool", "name", "disable_parallel_tool_use")
    def test_a_tool(self) -> None:
        tool = {
            "type": "custom", "name": "f", "description": "Does f", "input_schema": {"type": "object"},
            "allowed_callers": ["direct"], "eager_input_streaming": True,
        }  # fmt: skip
        choice = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
        chat = self.chat(tools=[tool], tool_choice=choice)
        assert chat.tools == [Tool("f", "Does f", {"type": "object"})]
        assert chat.tool_choice == NamedTool("f") and not chat.parallel_tool_calls
        for wrong in ({"type": "bash_20250124"}, {"allowed_callers": ["code"]}, {"eager_input_streaming": False}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                self.chat(tools=[tool | wrong])

    @pytest.mark.covers("ToolUseBlockParam", "caller")
    def test_an_earlier_call_has_a_direct_caller(self) -> None:
        call = {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
        sent = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        body = MessagesRequest.model_validate({"max_tokens": 9, "messages": sent})
        assert [message.role for message in messages(body)] == ["user", "assistant", "tool"]
        call["caller"] = {"type": "code_execution"}
        with pytest.raises(ValueError, match="caller"):
            MessagesRequest.model_validate({"max_tokens": 9, "messages": sent})


CACHE = {"cache_control": {"type": "ephemeral"}}


def schema_format(**inert: Any) -> dict[str, Any]:
    return {"schema": {"type": "object"}, **inert}


def history(**inert: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **inert}
    answer = {"role": "assistant", "tool_calls": [call]}
    return {"messages": [*HELLO, answer, {"role": "tool", "tool_call_id": "c", "content": "x"}]}


def tool_use(**inert: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}, **inert}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x", **inert}
    tool = {"name": "f", "input_schema": {"type": "object"}, **inert}
    messages = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return {"messages": messages, "tools": [tool]}


SCHEMA_EXTRAS = {"name": "x", "description": "d", "strict": True}


@pytest.mark.covers("JSONSchema", "name", "description", "strict")
@pytest.mark.covers("HistoryToolCall", "index")
@pytest.mark.covers("TextSchemaFormat", "name", "description", "strict")
@pytest.mark.covers("ToolUseBlockParam", "cache_control")
@pytest.mark.covers("ToolResultBlockParam", "cache_control")
@pytest.mark.covers("ToolParam", "cache_control")
@pytest.mark.parametrize(
    ("path", "without", "with_them"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": schema_format()}},
            {"response_format": {"type": "json_schema", "json_schema": schema_format(**SCHEMA_EXTRAS)}},
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", **schema_format(name="y")}}},
            {"text": {"format": {"type": "json_schema", **schema_format(**SCHEMA_EXTRAS)}}},
        ),
        ("/v1/chat/completions", history(), history(index=0)),
        ("/v1/messages", tool_use(), tool_use(**CACHE)),
    ],
)
def test_inert_parts_of_a_body_change_nothing(
    client: TestClient, engine: FakeEngine, path: str, without: dict[str, Any], with_them: dict[str, Any]
) -> None:
    engine.info.max_model_len = 4096
    for fields in (without, with_them):
        send(client, path, **fields)
    first, second = engine.seen
    assert first == second


@pytest.mark.covers("BatchRequest", "output_expires_after")
@pytest.mark.covers("OutputExpiresAfter", "anchor", "seconds")
def test_output_of_a_batch_may_expire(client: TestClient) -> None:
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
