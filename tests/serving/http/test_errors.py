"""Bad input and bad moments: the status, the field named, and one shape of body everywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.config import ServeConfig
from jaxllm.errors import ConfigError
from tests.serving.fake_engine import CONTEXT, FakeEngine, app_of
from tests.support.covers import covers

HELLO = [{"role": "user", "content": "Hi"}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "f"}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def misused(kind: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": kind}}}
    return {"type": "function", "function": {"name": "misused", "parameters": parameters}}


def allowed(name: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named(name)]}}


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    return error


CHAT_REFUSALS = [
    ({"messages": None}, "messages", "required"),
    ({"messages": []}, "messages", "must have at least 1 entry"),
    ({"messages": [None]}, "messages[0]", "messages[0] is null; it must be an object"),
    ({"messages": [{"role": "user", "content": True}]}, "messages[0].content", "is true; it"),
    ({"stop": {"ü": [None, False, "\x07"]}}, "stop", 'stop is {"ü": [null, false, "\\u0007"]}; it'),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "is 5"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "assistant, tool, or"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "messages[0].content[0].text",
        "messages[0].content[0].text is required",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "audio", "text": ""}]}]},
        "messages[0].content[0]",
        "'text'",
    ),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls", "'assistant'"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}, *HELLO]}, "messages[1]", "await their results"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id", "no call"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON text of an object",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "colour": 1}]},
        "messages[0].colour",
        "messages[0]: unknown field 'colour'",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0]: content is required"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"frobnicate": 1}, "frobnicate", "unknown field"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ENDLESS}}},
        "response_format",
        "no finite value satisfies the schema",
    ),
    ({"tools": [], "tool_choice": "auto"}, "tool_choice", "tools is empty"),
    ({"tool_choice": "auto"}, "tool_choice", "no tools"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [TOOL], "tool_choice": named("g")}, "tool_choice", "tools has f"),
    ({"tools": [TOOL], "tool_choice": allowed("g")}, "tool_choice", "tools has f"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "'auto'"),
    ({"tools": [TOOL, TOOL]}, "tools", "two functions"),
    ({"tools": [TOOL] * 1025}, "tools", "1024"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    (
        {"tools": [TOOL, misused("nope")], "tool_choice": "required"},
        "tools[1].function.parameters",
        "tools[1].function.parameters (of 'misused') cannot be enforced: Invalid type: nope",
    ),
    ({"tools": [TOOL, misused("nope")], "tool_choice": named("misused")}, "tools[1].function.parameters", "nope"),
    (
        {"tools": [TOOL | {"function": {"name": "f", "parameters": {"type": "string"}}}], "tool_choice": "required"},
        "tools[0].function.parameters",
        "(of 'f') is a schema of type 'string'; arguments are an object",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"function_call": "auto"}, "function_call", "'none'"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "'low'"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display", "not supported"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens", "0"),
    ({"thinking": False, "reasoning_effort": "high"}, "reasoning_effort", "thinking is off"),
    ({"verbosity": "huge"}, "verbosity", "'low'"),
    ({"prompt_cache_retention": "48h"}, "prompt_cache_retention", "in_memory"),
    ({"modalities": ["audio"]}, "modalities[0]", "'text'"),
    ({"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json", "one setting"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "one"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
    ({"guided_regex": "("}, "guided_regex", "regex"),
    ({"regex": "("}, "regex", "regex"),
    ({"json_schema": "{"}, "json_schema", "json"),
    ({"grammar": "start: nothing"}, "grammar", "grammar"),
    ({"grammar": 'root ::= "a"', "regex": "a"}, "regex", "one setting"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}, "schema": {}}},
        "response_format.json_schema",
        "one",
    ),
    ({"truncation_side": "middle", "truncate_prompt_tokens": 5}, "truncation_side", "'left' or 'right'"),
    ({"guided_json": "{"}, "guided_json", "json"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "grammar"),
    ({"guided_grammar": 'root ::= a "b"'}, "guided_grammar", "there is no rule 'a'"),
    ({"guided_grammar": "root ::= " + "(" * 3000}, "guided_grammar", "groups lie more than 100 deep"),
    ({"guided_choice": []}, "guided_choice", "non-empty"),
    (
        {"structured_outputs": {"structural_tag": {"structures": [], "triggers": [""]}}},
        "structured_outputs",
        "non-empty",
    ),
    (
        {
            "structured_outputs": {
                "structural_tag": {"structures": [{"begin": 5, "schema": {}, "end": ""}], "triggers": ["a"]}
            }
        },
        "structured_outputs",
        "strings",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
        "response_format",
        "uniqueItems",
    ),
    ({"best_of": 1, "n": 2}, "best_of", "at least n"),
    ({"best_of": 2, "stream": True}, "best_of", "stream"),
    ({"length_penalty": 2.0}, "length_penalty", "use_beam_search"),
    ({"use_beam_search": True, "stream": True}, "use_beam_search", "stream"),
    ({"use_beam_search": True, "n": 11}, "n", "10"),
    ({"use_beam_search": True, "best_of": 11}, "best_of", "10"),
    ({"use_beam_search": True, "top_p": 0.5}, "top_p", "use_beam_search"),
    ({"use_beam_search": True, "guided_regex": "a"}, "guided_regex", "use_beam_search"),
    ({"repeat_last_n": -2}, "repeat_last_n", "-1"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"bad_words": [" "]}, "bad_words", "not blank"),
    ({"conversation_id": "a\nb"}, "conversation_id", "pattern"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": -1}, "temperature", "0 or more"),
    ({"top_p": -0.1}, "top_p", "from 0 to 1"),
    ({"max_tokens": -2}, "max_tokens", "1 or more"),
    ({"max_tokens": 2.5}, "max_tokens", "integer"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "one setting"),
    ({"n": 10**6}, "n", "128"),
    ({"best_of": 10**6}, "best_of", "128"),
    ({"stop": ["a"] * 10**6}, "stop", "1000000 entries"),
    ({"bad_words": ["a"] * 65}, "bad_words", "64"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "1024"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    ({"n": True}, "n", "integer"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"seed": 2**70}, "seed", "64-bit"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": {"Single": 5}}, "stop", "string"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 500}}, "logit_bias", "-100 to 100"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    (
        {"stream": True, "stream_options": {"include_usages": True}},
        "stream_options.include_usages",
        "did you mean 'include_usage'",
    ),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 20, "logprob_token_ids": [1]}, "top_logprobs", "at most 19 with 1 ids"),
    ({"logprobs": True, "logprob_token_ids": [1] * 21}, "logprob_token_ids", "it may have 20"),
    ({"logprobs": True, "logprob_token_ids": [300]}, "logprob_token_ids", "0 to 299"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "'tokenize'"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self'"),
    ({"chat_template": "{{ raise_exception('No.') }}"}, "messages", "No."),
    ({"chat_template": "{% for %}"}, None, "invalid at line 1"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or more"),
]


@covers("ChatRequest", "modalities")
@pytest.mark.parametrize(("fields", "param", "says"), CHAT_REFUSALS, ids=lambda value: str(value)[:40])
def test_chat_refusals(client: TestClient, fields: dict[str, Any], param: str, says: str) -> None:
    response = client.post("/v1/chat/completions", json={"messages": HELLO} | fields)
    error = error_of(response, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


COMPLETION_REFUSALS = [
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [1, "a"]}, "prompt", "token ids"),
    ({"prompt": [[1], []]}, "prompt", "token ids"),
    ({"prompt": [True]}, "prompt", "token ids"),
    ({"prompt": [1, 299, 300]}, "prompt", "300"),
    ({"prompt": ["a"] * 600, "n": 2}, "prompt", "1024"),
    ({"prompt": "", "add_special_tokens": False}, "prompt", "empty"),
    ({"suffix": "x"}, "suffix", "no tokens for filling in the middle"),
    ({"best_of": 1, "n": 2}, "best_of", "at least n"),
    ({"prompt": ["a"] * 600, "best_of": 2}, "prompt", "1024"),
    ({"use_beam_search": True, "stop": "a"}, "stop", "use_beam_search"),
    ({"guided_regex": "("}, "guided_regex", "regex"),
    ({"tools": []}, "tools", "unknown"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs, which may be 0"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"metadata": {}}, "metadata", "unknown"),
]


@pytest.mark.parametrize(("fields", "param", "says"), COMPLETION_REFUSALS, ids=lambda value: str(value)[:40])
def test_completion_refusals(client: TestClient, fields: dict[str, Any], param: str, says: str) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": "Hi"} | fields), 400)
    assert error["param"] == param and says in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context_says_both_numbers(client: TestClient, stream: bool) -> None:
    response = client.post("/v1/completions", json={"prompt": [7] * 1000, "stream": stream})
    error = error_of(response, 400)
    assert "1000" in error["message"] and str(CONTEXT) in error["message"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"messages": [\n  oops]}', "line 2 column 3"),
        (b"", "line 1 column 0"),
        (b'{"temperature": NaN}', "line 1"),
        (b'{"user": "\\ud800"}', "line 1"),
        (b'{"user": "\xff"}', "line 1"),
        (b"[" * 100_000, "the body is nested more than 201 deep"),
        (b"[" * 202, "nested more than 201 deep"),
        (b"[1]", "object"),
        (b"null", "object"),
    ],
)
def test_malformed_json(client: TestClient, raw: bytes, says: str) -> None:
    headers = {"content-type": "application/json"}
    error = error_of(client.post("/v1/chat/completions", content=raw, headers=headers), 400)
    assert says in error["message"] and error["code"] == "invalid_json"


def test_a_form_is_no_json(client: TestClient) -> None:
    error = error_of(client.post("/v1/completions", data={"prompt": "x"}), 415)
    assert "application/json" in error["message"]


def test_unknown_model(client: TestClient) -> None:
    error = error_of(client.post("/v1/completions", json={"model": "gpt-4", "prompt": "Hi"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-4'" in error["message"] and "fake" in error["message"]
    assert error_of(client.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"


def test_unknown_route_and_method(client: TestClient) -> None:
    assert "/v1/nowhere" in error_of(client.get("/v1/nowhere"), 404)["message"]
    error = error_of(client.get("/v1/chat/completions"), 405)
    assert error["code"] == "method_not_allowed" and error["message"].endswith("; this path takes POST")


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit(make_client: Any, engine: FakeEngine, chunked: bool) -> None:
    client = make_client(engine, max_body_size="1KiB")
    body = json.dumps({"prompt": "x" * 2000}).encode()
    content = iter([body[:500], body[500:]]) if chunked else body
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert "1024" in error_of(response, 413)["message"]
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    engine.queue_limit = 0
    response = client.post("/v1/completions", json={"prompt": "Hi", "stream": stream})
    assert error_of(response, 429)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1
    assert not engine.active


@pytest.mark.parametrize("stream", [False, True])
def test_more_sequences_than_the_queue_ever_holds_are_no_matter_of_time(
    client: TestClient, engine: FakeEngine, stream: bool
) -> None:
    engine.queue_limit, engine.delay = 2, 0.01
    response = client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "stream": stream})
    assert error_of(response, 400)["param"] == "n"
    assert "asks for 3 sequences at once; this server runs and queues at most 2" in response.text
    assert not engine.active


@pytest.mark.parametrize("stream", [False, True])
def test_dead_engine(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    engine.die()
    response = client.post("/v1/completions", json={"prompt": "Hi", "stream": stream})
    assert error_of(response, 503)["code"] == "engine_dead"
    error_of(client.get("/health"), 503)
    error_of(client.get("/ready"), 503)


def test_error_in_mid_stream_is_an_event(client: TestClient, engine: FakeEngine) -> None:
    engine.fail_after = 3
    response = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    *_, last, done, end = response.text.split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "caught fire" in error["message"] and error["code"] == "request_failed"
    assert (done, end) == ("data: [DONE]", "")
    assert not engine.active


def test_a_failed_request_fails_alone(client: TestClient, engine: FakeEngine) -> None:
    engine.fail_after = 3
    error = error_of(client.post("/v1/completions", json={"prompt": "Hi"}), 500)
    assert "caught fire" in error["message"]
    engine.fail_after = None
    assert client.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200


def test_a_request_that_is_itself_to_blame_is_told_so(client: TestClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.fail_invalid = 3, True
    error = error_of(client.post("/v1/completions", json={"prompt": "Hi"}), 400)
    assert error["message"] == "the pages caught fire" and error["type"] == "invalid_request_error"
    stream = client.post("/v1/completions", json={"prompt": "Hi", "stream": True})
    assert '"type":"invalid_request_error"' in stream.text
    failed = client.post("/v1/responses", json={"input": "Hi", "stream": True})
    assert '"code":"invalid_prompt"' in failed.text


def test_bug_is_a_500_without_details(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.chat.prompt.check_request", lambda *_: 1 / 0)
    error = error_of(client.post("/v1/completions", json={"prompt": "Hi"}), 500)
    assert error["type"] == "server_error" and "division" not in error["message"]


class TestKey:
    PROTECTED = (
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/completions"),
        ("POST", "/tokenize"),
    )

    @pytest.fixture
    def guarded(self, make_client: Any, engine: FakeEngine) -> TestClient:
        return make_client(engine, api_key="one, two")

    @pytest.mark.parametrize(("method", "path"), PROTECTED)
    @pytest.mark.parametrize("header", [None, "Bearer three", "Bearer ", "Basic one", "one"])
    def test_refused(self, guarded: TestClient, method: str, path: str, header: str | None) -> None:
        headers = {"authorization": header} if header is not None else {}
        response = guarded.request(method, path, headers=headers, content=b"{broken")
        assert error_of(response, 401)["code"] == "invalid_api_key"

    @pytest.mark.parametrize("key", ["one", "two"])
    def test_accepted(self, guarded: TestClient, key: str) -> None:
        assert guarded.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200

    @pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/openapi.json"])
    def test_probes_need_none(self, guarded: TestClient, path: str) -> None:
        assert guarded.get(path).status_code == 200


def test_cors(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, allowed_origins="https://a.example, https://b.example")
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    allowed = client.options("/v1/completions", headers={"Origin": "https://b.example"} | preflight)
    assert allowed.headers["access-control-allow-origin"] == "https://b.example"
    refused = client.options("/v1/completions", headers={"Origin": "https://c.example"} | preflight)
    assert "access-control-allow-origin" not in refused.headers


def test_unreadable_chat_template(tmp_path: Any, engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"chat_template is .*none\.jinja"):
        app_of(ServeConfig(chat_template=tmp_path / "none.jinja"), engine)
