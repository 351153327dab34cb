"""/api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.serving.ollama.types import INERT, OFF
from tests.serving.anthropic.shared import CALL, SCHEMA, ScriptedEngine
from tests.serving.fake_engine import BOS, REPLY, ByteTokenizer, FakeEngine
from tests.support.covers import covers

HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Now", "parameters": SCHEMA}}
THOUGHT = "<think>\nHm.</think>\n\nYes."


def lines(client: TestClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of a streamed answer."""
    response = client.post(path, json={"model": "fake"} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def whole(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json={"model": "fake", "stream": False} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, path: str, **fields: Any) -> str:
    response = client.post(path, json={"model": "fake"} | fields)
    assert response.status_code in (400, 404, 409) and response.json().keys() == {"error"}
    return response.json()["error"]


@covers("POST /api/chat")
@covers("OllamaFields", "model", "options")
@covers("AnswerFields", "stream")
@covers("OllamaChatRequest", "messages")
@covers("OllamaMessage", "role", "content")
def test_a_chat_streams_lines_and_the_last_one_has_the_times(client: TestClient, engine: ScriptedEngine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    *texts, last = lines(client, "/api/chat", messages=messages, options={})
    assert "".join(line["message"]["content"] for line in texts) == REPLY
    assert {(line["model"], line["done"], line["message"]["role"]) for line in texts} == {("fake", False, "assistant")}
    assert engine.last_prompt == "[system]Be brief.[user]Hi[assistant]"
    assert last["done"] and last["done_reason"] == "stop" and last["message"] == {"role": "assistant", "content": ""}
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(engine.seen[0][0]), len(REPLY))
    durations = [last[f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")]
    assert all(isinstance(duration, int) for duration in durations) and durations[0] >= sum(durations[1:]) > 0
    answer = whole(client, "/api/chat", messages=messages)
    assert answer["message"]["content"] == REPLY and answer["created_at"].endswith("Z")
    assert answer.keys() == last.keys()


@covers("POST /api/generate")
@covers("GenerateRequest", "prompt", "system", "raw")
def test_a_prompt_is_a_users_message_unless_it_is_raw(client: TestClient, engine: ScriptedEngine) -> None:
    *texts, last = lines(client, "/api/generate", prompt="Hi", system="Be brief.")
    assert "".join(line["response"] for line in texts) == REPLY and last["response"] == ""
    assert engine.last_prompt == "[system]Be brief.[user]Hi[assistant]"
    answer = whole(client, "/api/generate", prompt="[user]Hi", raw=True)
    assert answer["response"] == REPLY and "context" not in answer
    assert engine.seen[-1][0] == [BOS, *b"[user]Hi"]
    assert "system is not available with raw" in refused(client, "/api/generate", prompt="a", raw=True, system="b")


def test_a_base_model_continues_the_prompt(make_client: Callable[..., TestClient]) -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(None)
    client = make_client(engine)
    answer = whole(client, "/api/generate", prompt="Hi")
    assert answer["response"] == REPLY and engine.seen[-1][0] == [BOS, *b"Hi"]
    whole(client, "/api/generate", prompt=" And?", context=answer["context"])
    assert engine.seen[-1][0] == [BOS, *f"Hi{REPLY} And?".encode()]
    assert "system needs a model with a chat template" in refused(client, "/api/generate", prompt="a", system="b")


@covers("GenerateRequest", "context", "template")
def test_a_context_goes_on_and_a_template_takes_the_models_place(client: TestClient, engine: ScriptedEngine) -> None:
    first = whole(client, "/api/generate", prompt="Hi")
    assert bytes(first["context"]).decode() == f"[user]Hi[assistant]{REPLY}"
    lines(client, "/api/generate", prompt="And?", context=first["context"])
    assert engine.last_prompt == f"[user]Hi[assistant]{REPLY}[user]And?[assistant]"
    too_long = refused(client, "/api/generate", prompt="And?", context=[65] * 5000)
    assert "context has 5021 tokens; the context holds 4096" in too_long
    whole(client, "/api/generate", prompt="Hi", template="Q: {{ messages[0].content }} A:")
    assert engine.last_prompt == "Q: Hi A:"
    for template in ("{{ .Prompt }}", "{{- if .System }}{{ .System }}{{ end }}"):
        assert "in Go's notation" in refused(client, "/api/generate", prompt="Hi", template=template)


@covers("GenerateRequest", "suffix")
def test_a_suffix_has_the_middle_filled_in(client: TestClient, engine: ScriptedEngine) -> None:
    assert "suffix is set, but this model's tokenizer has no tokens" in refused(
        client, "/api/generate", prompt="a", suffix="b"
    )
    for other, value in (("system", "c"), ("raw", True)):
        assert "is not available with" in refused(client, "/api/generate", prompt="a", suffix="b", **{other: value})
    assert client.post("/api/show", json={"model": "fake"}).json()["capabilities"] == [
        "completion", "tools", "thinking",
    ]  # fmt: skip
    marks = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    engine.tokenizer.backend.add_special_tokens(marks)
    assert whole(client, "/api/generate", prompt="a", suffix="b")["response"] == REPLY
    prefix, suffix, middle = map(engine.tokenizer.backend.token_to_id, marks)
    assert engine.seen[-1][0] == [BOS, prefix, *b"a", suffix, *b"b", middle]
    assert "insert" in client.post("/api/show", json={"model": "fake"}).json()["capabilities"]


@covers("Options", "num_predict", "repeat_penalty")
@covers("CommonSampling", "repeat_last_n", "presence_penalty", "frequency_penalty")
def test_options_reach_the_sampler(client: TestClient, engine: ScriptedEngine) -> None:
    options = {
        "num_predict": 11, "temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["#"],
        "repeat_penalty": 1.5, "repeat_last_n": 64, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "typical_p": 0.75,
    }  # fmt: skip
    *texts, last = lines(client, "/api/chat", messages=HELLO, options=options)
    assert "".join(line["message"]["content"] for line in texts) == "The capital" and last["done_reason"] == "length"
    params = engine.last_params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (11, 0.25, 7, 0.5, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty, params.repeat_last_n) == (3, ("#",), 1.5, 64)
    assert (params.presence_penalty, params.frequency_penalty, params.typical_p) == (0.5, -0.5, 0.75)
    for unlimited in (-2, -1, 0, 100_000):
        whole(client, "/api/chat", messages=HELLO, options={"num_predict": unlimited, "stop": "#"})
        assert engine.last_params.max_tokens == 4096 - len(engine.seen[-1][0])
    problem = refused(client, "/api/chat", messages=HELLO, options={"repeat_penalty": -1})
    assert problem.startswith("options.repeat_penalty is -1")


VALUES = dict.fromkeys(INERT, 7) | {"numa": True, "low_vram": True, "use_mmap": False, "mirostat_tau": 5.0}
ON = {"tfs_z": 0.5, "mirostat": 2, "penalize_newline": False, "vocab_only": True}


def test_options_about_loading_change_nothing_and_others_are_refused(
    client: TestClient, engine: ScriptedEngine
) -> None:
    for options in ({}, VALUES | dict(OFF)):
        whole(client, "/api/chat", messages=HELLO, options=options)
    assert engine.seen[0] == engine.seen[1] and ON.keys() == OFF.keys()
    for name, value in ON.items():
        assert f"{name} is {json.dumps(value)}; it must be {json.dumps(OFF[name])}" in refused(
            client, "/api/chat", messages=HELLO, options={name: value}
        )
    assert "unknown field 'temprature'; did you mean 'temperature'?" in refused(
        client, "/api/chat", messages=HELLO, options={"temprature": 0}
    )
    assert "here it is 'options.temperature'" in refused(client, "/api/chat", messages=HELLO, temperature=0)


@covers("AnswerFields", "format")
@pytest.mark.parametrize(("said", "meant"), [("json", None), (SCHEMA, SCHEMA)])
def test_a_format_constrains_the_answer(client: TestClient, engine: ScriptedEngine, said: Any, meant: Any) -> None:
    for path, asked in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "a", "raw": True})):
        engine.reply = '{"city": "Paris"}'
        whole(client, path, format=said, **asked)
        outputs = engine.last_params.structured_outputs
        assert (outputs.json and json.loads(outputs.json)) == meant and bool(outputs.json_object) == (meant is None)
        whole(client, path, format="", **asked)
        assert engine.last_params.structured_outputs is None
        assert refused(client, path, format={"type": "odd"}, **asked).startswith("format")


@covers("AnswerFields", "think")
@covers("OllamaMessage", "thinking")
def test_thoughts_come_apart_from_the_answer(client: TestClient, engine: ScriptedEngine) -> None:
    engine.reply = THOUGHT
    *texts, _ = lines(client, "/api/chat", messages=HELLO, think=True)
    assert engine.last_prompt.startswith("(enable_thinking=True)")
    assert "".join(line["message"].get("thinking", "") for line in texts) == "Hm."
    assert "".join(line["message"]["content"] for line in texts) == "Yes."
    answer = whole(client, "/api/generate", prompt="Hi", think="low")
    assert (answer["thinking"], answer["response"]) == ("Hm.", "Yes.")
    assert engine.last_params.max_thinking_tokens == 2048
    whole(client, "/api/chat", think=False, messages=[*HELLO, {"role": "assistant", "content": "A", "thinking": "B"}])
    assert engine.last_prompt.startswith("(enable_thinking=False)")


def test_a_model_that_shows_no_thoughts_is_not_asked_for_them(make_client: Callable[..., TestClient]) -> None:
    client = make_client(FakeEngine(), reasoning_parser="none")
    assert "'fake' does not support thinking" in refused(client, "/api/chat", messages=HELLO, think=True)
    assert whole(client, "/api/chat", messages=HELLO, think=False)["done"]


def test_calls_come_whole_and_with_objects(client: TestClient, engine: ScriptedEngine) -> None:
    engine.reply = f"Let me see.\n{CALL}\n{CALL}"
    *texts, last = lines(client, "/api/chat", messages=HELLO, tools=[WEATHER])
    calls = [call for line in texts for call in line["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == [
        {"index": number, "name": "get_weather", "arguments": {"city": "Paris"}} for number in (0, 1)
    ]
    assert last["done_reason"] == "stop"
    message = whole(client, "/api/chat", messages=HELLO, tools=[WEATHER])["message"]
    assert message["content"] == "Let me see." and len(message["tool_calls"]) == 2
    cut = whole(client, "/api/chat", messages=HELLO, tools=[WEATHER], options={"num_predict": 60})
    assert cut["done_reason"] == "length" and "tool_calls" not in cut["message"]


@covers("OllamaMessage", "tool_calls", "tool_name", "tool_call_id")
@covers("OllamaToolCall", "function", "id", "type")
@covers("OllamaFunctionCall", "name", "arguments", "index")
def test_results_find_the_calls_that_they_answer(client: TestClient, engine: ScriptedEngine) -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}, "index": 0}} | more

    asked = {"role": "assistant", "tool_calls": [call("a"), call("b", id="mine", type="function")]}
    results = [{"role": "tool", "content": "B", "tool_name": "b"}, {"role": "tool", "content": "A"}]
    for order in (results, [{"role": "tool", "content": "B", "tool_call_id": "mine"}, results[1]]):
        whole(client, "/api/chat", messages=[*HELLO, asked, *order])
        assert engine.last_prompt.endswith("[assistant][tool]B[tool]A[assistant]")
    lost = refused(client, "/api/chat", messages=[*HELLO, {"role": "tool", "content": "A", "tool_name": "a"}])
    assert lost == "messages[1].tool_call_id is 'a'; no call is open there"
    assert "tool_name belongs to messages of role 'tool'" in refused(
        client, "/api/chat", messages=[{"role": "user", "content": "a", "tool_name": "b"}]
    )


def test_the_assistants_last_message_is_continued(client: TestClient, engine: ScriptedEngine) -> None:
    whole(client, "/api/chat", messages=[*HELLO, {"role": "assistant", "content": "The"}])
    assert engine.last_prompt == "[user]Hi[assistant]The"


@covers("AnswerFields", "logprobs", "top_logprobs")
def test_logprobs_of_every_token_come_with_the_lines(client: TestClient) -> None:
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    found = [entry for line in lines(client, "/api/chat", **asked) for entry in line.get("logprobs", [])]
    assert "".join(entry["token"] for entry in found) == REPLY
    assert all(len(entry["top_logprobs"]) == 2 for entry in found)
    assert len(whole(client, "/api/chat", **asked)["logprobs"]) == len(REPLY)
    assert "needs logprobs" in refused(client, "/api/chat", messages=HELLO, top_logprobs=2)


def test_a_prompt_that_does_not_fit_is_refused(client: TestClient) -> None:
    long = refused(client, "/api/chat", messages=[{"role": "user", "content": "a" * 5000}])
    assert long.startswith("messages has")
    for name in ("truncate", "shift"):
        assert f"{name} is not supported" in refused(client, "/api/generate", prompt="Hi", **{name: True})


def test_pictures_are_refused_where_the_model_sees_none(client: TestClient) -> None:
    picture = {"images": ["iVBORw0KGgo="]}
    assert "images[0] is an image, and" in refused(client, "/api/generate", prompt="a", **picture)
    assert "messages[0].images[0] is" in refused(client, "/api/chat", messages=[HELLO[0] | picture])
    assert whole(client, "/api/chat", messages=[HELLO[0] | {"images": []}])["done"]


def test_an_error_in_mid_stream_is_a_line(client: TestClient, engine: ScriptedEngine) -> None:
    engine.fail_after, engine.delay = 3, 0.05
    *texts, last = lines(client, "/api/chat", messages=HELLO)
    assert texts and last == {"error": "the request failed: the pages caught fire"}


def test_a_body_is_json_whatever_it_is_said_to_be_but_not_of_a_page(client: TestClient) -> None:
    """As in ollama's own documentation, whose curl names no type."""
    body = json.dumps({"model": "fake", "messages": HELLO, "stream": False})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert client.post("/api/chat", content=body, headers=form).json()["message"]["content"] == REPLY
    page = form | {"Origin": "http://localhost"}
    assert client.post("/api/chat", content=body, headers=page).status_code == 415


@covers("POST /api/embed")
@covers("OllamaEmbedRequest", "input", "truncate", "dimensions")
def test_vectors_are_of_unit_length(client: TestClient, engine: ScriptedEngine) -> None:
    answer = client.post("/api/embed", json={"model": "fake", "input": ["Paris", "Rome"], "dimensions": 4}).json()
    assert [len(vector) for vector in answer["embeddings"]] == [4, 4]
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in answer["embeddings"])
    assert answer["model"] == "fake" and answer["prompt_eval_count"] == len("<Paris<Rome")
    assert len(client.post("/api/embed", json={"model": "fake", "input": "Paris"}).json()["embeddings"]) == 1
    long = {"model": "fake", "input": "a" * 5000}
    assert client.post("/api/embed", json=long).status_code == 200 and len(engine.pooled[-1][0]) == 4096
    assert "input has 5001 tokens" in refused(client, "/api/embed", input="a" * 5000, truncate=False)
    assert client.post("/api/embed", json={"model": "fake"}).json()["embeddings"] == []


@covers("POST /api/embeddings")
@covers("OllamaEmbeddingsRequest", "prompt")
def test_the_older_route_gives_the_vector_as_it_is(client: TestClient) -> None:
    vector = client.post("/api/embeddings", json={"model": "fake", "prompt": "Paris"}).json()["embedding"]
    unit = client.post("/api/embed", json={"model": "fake", "input": "Paris"}).json()["embeddings"][0]
    length = math.hypot(*vector)
    assert not math.isclose(length, 1, rel_tol=0.01)
    assert vector == pytest.approx([length * value for value in unit], rel=1e-4)
    assert client.post("/api/embeddings", json={"model": "fake"}).json() == {"embedding": []}
