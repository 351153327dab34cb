"""/v1/chat/completions: shapes of responses and chunks, and what reaches the engine."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.engine.messages import Pause, Resume
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import CONTEXT, REPLY, FakeEngine
from tests.support.covers import covers

HELLO = [{"role": "user", "content": "Hi"}]
PROMPT = "[user]Hi[assistant]"


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={"messages": HELLO} | fields)


def events(client: TestClient, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
    """The parsed data of each event; the last must be [DONE]."""
    base = {"messages": HELLO} if "chat" in path else {"prompt": "Hi"}
    response = client.post(path, json=base | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


@covers("POST /v1/chat/completions")
def test_whole_response(client: TestClient) -> None:
    body = post(client, model="fake").json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": REPLY, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": len(REPLY),
        "total_tokens": len(PROMPT) + len(REPLY),
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert "prompt_logprobs" not in body


@covers("ChatRequest", "prediction")
@covers("Prediction", "content")
@pytest.mark.parametrize(
    "content", ["bcd", [{"type": "text", "text": "b"}, {"type": "text", "text": "cd"}]], ids=["text", "parts"]
)
def test_a_prediction_reaches_the_engine_and_what_came_of_it_the_caller(
    client: TestClient, engine: FakeEngine, content: Any
) -> None:
    prediction = {"type": "content", "content": content}
    body = post(client, n=2, prediction=prediction).json()
    assert all(params.predicted_token_ids == tuple(b"bcd") for _, params, _ in engine.seen)
    details = body["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 10, "rejected_prediction_tokens": 4}
    post(client, prediction={"type": "content", "content": ""})
    assert engine.seen[-1][1].predicted_token_ids == ()


@pytest.mark.parametrize("prediction", [{"type": "image", "content": "a"}, {"type": "content"}, {"content": 5}, "abc"])
def test_what_predicts_nothing_is_refused(client: TestClient, prediction: Any) -> None:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, "prediction": prediction})
    assert response.status_code == 400 and "prediction" in response.json()["error"]["param"]


def test_a_prediction_longer_than_the_context_is_refused(client: TestClient) -> None:
    prediction = {"type": "content", "content": "a" * (1000 * CONTEXT)}
    response = client.post("/v1/chat/completions", json={"messages": HELLO, "prediction": prediction})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prediction"


def test_same_route_without_v1(client: TestClient) -> None:
    response = client.post("/chat/completions", json={"messages": HELLO})
    assert response.json()["choices"][0]["message"]["content"] == REPLY


@covers("GenerationRequest", "stream_options")
@covers("StreamOptions", "include_usage")
def test_stream_is_role_then_content_then_finish_then_usage(client: TestClient) -> None:
    chunks = events(client, stream_options={"include_usage": True})
    role, *content, finish, usage = chunks
    assert role["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(c["choices"][0]["delta"]["content"] for c in content) == REPLY
    assert all(list(c["choices"][0]["delta"]) == ["content"] and c["usage"] is None for c in content)
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(REPLY)
    assert len({c["id"] for c in chunks}) == 1


def test_stream_has_no_usage_unless_asked(client: TestClient) -> None:
    chunks = events(client)
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@covers("StreamOptions", "continuous_usage_stats")
def test_continuous_usage_grows_to_the_total(client: TestClient) -> None:
    counts = [c["usage"]["completion_tokens"] for c in events(client, stream_options={"continuous_usage_stats": True})]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == len(REPLY)


def test_held_back_text_sends_no_empty_chunk_and_keeps_its_logprobs(client: TestClient, engine: FakeEngine) -> None:
    engine.hold_back = {0, 1, 5, len(REPLY) - 1}
    chunks = events(client, logprobs=True)
    choices = [c["choices"][0] for c in chunks[1:]]
    assert all(c["delta"].get("content") != "" for c in choices)
    tokens = [entry["token"] for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert "".join(tokens) == REPLY
    assert [entry["token"] for entry in choices[0]["logprobs"]["content"]] == ["T", "h", "e"]


@covers("GenerationRequest", "n")
def test_n_choices_interleave_and_each_is_whole(client: TestClient, engine: FakeEngine) -> None:
    engine.client.order(Pause("keep"))
    with ThreadPoolExecutor(1) as pool:  # no choice may end before another has begun
        begun = pool.submit(wait_for, lambda: len(engine.active) == 3)
        begun.add_done_callback(lambda _: engine.client.order(Resume()))
        chunks = events(client, n=3)
        begun.result()
    indices = [c["choices"][0]["index"] for c in chunks]
    assert indices[:3] == [0, 1, 2]
    for index, other in itertools.permutations(range(3), 2):  # nobody waits until another is whole
        assert indices.index(index, 3) < len(indices) - 1 - indices[::-1].index(other)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == REPLY
        assert mine[-1]["finish_reason"] == "stop"
    whole = post(client, n=3).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 3 * len(REPLY)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


@covers("ChatRequest", "logprobs", "top_logprobs")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_top_logprobs_are_the_best_whether_or_not_chosen(client: TestClient, count: int) -> None:
    content = post(client, logprobs=True, top_logprobs=count, max_tokens=2).json()["choices"][0]["logprobs"]["content"]
    assert [(e["token"], e["logprob"], e["bytes"]) for e in content] == [("T", -1.0, [84]), ("h", -1.0, [104])]
    # the engine's candidates, best first: A at -0.5, the chosen token at -1, B at -2, C at -3
    expected = [("A", -0.5), ("T", -1.0), ("B", -2.0)][:count]
    assert [(e["token"], e["logprob"]) for e in content[0]["top_logprobs"]] == expected


@pytest.mark.parametrize("numbered", [False, True])
def test_parts_of_a_character_have_their_own_bytes(client: TestClient, engine: FakeEngine, numbered: bool) -> None:
    """OpenAI names such a token by its bytes."""
    engine.reply = "né🤖"
    asked = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": numbered}
    choice = post(client, **asked).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "né🤖"
    assert choice["message"]["content"] == "né🤖"
    names = [f"token_id:{byte}" for byte in "né🤖".encode()]
    escapes = ["n", r"\xc3", r"\xa9", r"\xf0", r"\x9f", r"\xa4", r"\x96"]
    assert [entry["token"] for entry in content] == (names if numbered else escapes)
    streamed = events(client, stream=True, **asked)
    entries = [e for c in streamed for e in (c["choices"][0].get("logprobs") or {}).get("content") or []]
    assert entries == content


@covers("GenerationRequest", "prompt_logprobs")
def test_prompt_logprobs(client: TestClient) -> None:
    entries = post(client, prompt_logprobs=1).json()["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(PROMPT)
    assert entries[1] == {
        str(ord("u")): {"logprob": -1.0, "rank": 2, "decoded_token": "u"},
        "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
    }


@covers("SamplingFields", "logit_bias")
@covers("CommonSampling", "seed", "temperature", "top_p", "top_k", "min_p")
def test_sampling_is_the_requests_then_the_models_then_openais(client: TestClient, engine: FakeEngine) -> None:
    post(client)
    post(client, temperature=0, top_k=None, top_p=0.5, seed=7, logit_bias={"5": -2}, min_p=0.1, ignore_eos=True)
    (_, default, _), (_, asked, _) = engine.seen
    assert (default.temperature, default.top_k, default.top_p) == (0.5, 40, 1.0)
    assert (asked.temperature, asked.top_k, asked.top_p, asked.seed) == (0, 40, 0.5, 7)
    assert (asked.logit_bias, asked.min_p, asked.ignore_eos) == ({5: -2.0}, 0.1, True)


@covers("ChatRequest", "max_tokens", "max_completion_tokens")
def test_max_tokens_is_the_rest_of_the_context_by_default(client: TestClient, engine: FakeEngine) -> None:
    post(client)
    post(client, max_completion_tokens=5)
    body = post(client, max_tokens=4).json()
    assert [params.max_tokens for _, params, _ in engine.seen] == [CONTEXT - len(PROMPT), 5, 4]
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("The ", "length")


@covers("CommonSampling", "stop")
@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ({"Single": "a"}, ("a",)),
        ({"Multi": ["a", "b"]}, ("a", "b")),
        (None, ()),
    ],
)
def test_stop_in_every_shape(client: TestClient, engine: FakeEngine, sent: Any, meant: tuple[str, ...]) -> None:
    assert post(client, stop=sent).status_code == 200
    assert engine.seen[0][1].stop == meant


@covers("GenerationRequest", "request_id")
@covers("ScheduledFields", "priority", "cache_salt")
def test_engine_extras_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    body = post(client, priority=-3, cache_salt="mine", request_id="abc").json()
    assert engine.seen[0][2] == {"priority": -3, "cache_salt": "mine"}
    assert body["id"] == "chatcmpl-abc"


@covers("ChatRequest", "messages")
@covers("GenerationRequest", "truncate_prompt_tokens")
@covers(
    "TemplateFields",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
)
@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"add_generation_prompt": False}, "[user]Hi"),
        ({"continue_final_message": True}, "[user]Hi"),
        ({"chat_template": "T:{{ messages[0].content }}"}, "T:Hi"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "(enable_thinking=False)" + PROMPT),
        ({"documents": [{"title": "x"}]}, "(documents=[{'title': 'x'}])" + PROMPT),
        ({"messages": [{"role": "developer", "content": "Be brief"}]}, "[system]Be brief[assistant]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"], "name": None}]},
            "[user]a\nb[assistant]",
        ),
        ({"truncate_prompt_tokens": 4}, "ant]"),
    ],
)
def test_rendering(client: TestClient, engine: FakeEngine, fields: dict[str, Any], prompt: str) -> None:
    assert post(client, **fields).status_code == 200
    assert bytes(engine.seen[0][0]).decode() == prompt


@covers("ChatRequest", "add_special_tokens")
def test_add_special_tokens(client: TestClient, engine: FakeEngine) -> None:
    post(client, add_special_tokens=True)
    assert engine.seen[0][0][0] == 256


def test_server_chat_template(make_client: Any, engine: FakeEngine, tmp_path: Any) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("S:{{ messages[0].content }}")
    client = make_client(engine, chat_template=template)
    post(client)
    post(client, chat_template="R:{{ messages[0].content }}")
    assert [bytes(ids[:2]) for ids, _, _ in engine.seen] == [b"S:", b"R:"]


def test_inert_fields_are_accepted(client: TestClient) -> None:
    inert = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "prompt_cache_retention": "in_memory", "spaces_between_special_tokens": False,
    }  # fmt: skip
    neutral = {
        "response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"], "tools": None,
        "parallel_tool_calls": True,
    }  # fmt: skip
    assert post(client, **inert, **neutral).status_code == 200


def test_keep_alive_comments_fill_silence(make_client: Any, engine: FakeEngine) -> None:
    engine.delay = 0.05
    client = make_client(engine, sse_keep_alive=0.01)
    text = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, "max_tokens": 2}).text
    assert ": keep-alive\n\n" in text and text.endswith("data: [DONE]\n\n")
