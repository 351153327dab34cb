"""The fields beyond OpenAI's core, on both generation routes: each reaches the engine or shows in the response."""

from __future__ import annotations

import json
import time
from typing import Any, ClassVar

import pytest
from fastapi.testclient import TestClient

from jaxllm.requests.sampling import RepetitionDetectionParams
from tests.serving.conftest import quickly
from tests.serving.fake_engine import PADDING, REPLY, FakeEngine
from tests.serving.openai.test_chat import HELLO, events, post
from tests.support.covers import covers

ROUTES = ["/v1/chat/completions", "/v1/completions"]


def send(client: TestClient, path: str, **fields: Any) -> Any:
    base: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "Hi"}
    response = client.post(path, json=base | fields)
    assert response.status_code == 200, response.text
    return response


def text(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


@covers("CommonSampling", "repeat_last_n")
@covers("GenerationRequest", "allowed_token_ids", "bad_words")
@covers("CommonSampling", "frequency_penalty", "presence_penalty")
@covers("SamplingFields", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens")
@covers("SamplingFields", "include_stop_str_in_output", "skip_special_tokens")
@covers("SamplingFields", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "top_n_sigma")
@covers("CommonSampling", "typical_p")
@covers("SamplingFields", "dry_sequence_breakers", "xtc_probability", "xtc_threshold")
@covers("SamplingFields", "stop_regex", "repetition_detection")
@covers("RepetitionDetection", "max_pattern_size", "min_pattern_size", "min_count")
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids", (1, 2)),
        ({"bad_words": ["a b"]}, "bad_words", ("a b",)),
        ({"repeat_last_n": 5}, "repeat_last_n", 5),
        ({"repeat_last_n": 0}, "repeat_last_n", 0),
        ({"repeat_last_n": -1}, "repeat_last_n", None),
        ({"repeat_last_n": None}, "repeat_last_n", None),
        ({"stop_token_ids": [3]}, "stop_token_ids", (3,)),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", True),
        ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"dry_multiplier": 0.8}, "dry_multiplier", 0.8),
        ({"dry_base": 2}, "dry_base", 2),
        ({"dry_allowed_length": 3}, "dry_allowed_length", 3),
        ({"dry_penalty_last_n": -1}, "dry_penalty_last_n", None),
        ({"dry_penalty_last_n": 0}, "dry_penalty_last_n", 0),
        ({"dry_sequence_breakers": []}, "dry_sequence_breakers", ()),
        ({"dry_sequence_breakers": None}, "dry_sequence_breakers", ("\n", ":", '"', "*")),
        ({"top_n_sigma": -1}, "top_n_sigma", -1),
        ({"typical_p": 0.9}, "typical_p", 0.9),
        ({"xtc_probability": 0.5}, "xtc_probability", 0.5),
        ({"xtc_threshold": 0.2}, "xtc_threshold", 0.2),
        ({"stop_regex": "a+"}, "stop_regex", ("a+",)),
        ({"stop_regex": ["a+", "b"]}, "stop_regex", ("a+", "b")),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}},
            "repetition_detection",
            RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3),
        ),
        ({"n": 2}, "n", 2),
        ({"n": 2, "best_of": 3}, "n", 3),
    ],
)
def test_sampling_fields_reach_the_engine(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], name: str, value: Any
) -> None:
    send(client, path, **fields)
    assert getattr(engine.seen[0][1], name) == value


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


@covers(
    "StructuredFields",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "json_schema",
    "regex",
)
@covers("JSONObjectSchemaFormat", "schema")
@covers("JSONSchemaFormat", "json_schema", "schema")
@covers("JSONSchema", "schema")
@covers("StructuralTagFormat", "structures", "triggers")
@covers("Structure", "begin", "schema", "end")
@covers("StructuredOutputsFields", "json", "json_object", "regex", "choice", "grammar", "structural_tag")
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_object", True),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json",
            SCHEMA,
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tag", TAG),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", TAG),
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_schema": SCHEMA}, "json", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json", SCHEMA),
        ({"regex": "a+"}, "regex", "a+"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json", SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json", SCHEMA),
    ],
)
def test_constraints_reach_the_engine(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], kind: str, value: Any
) -> None:
    send(client, path, **fields)
    constraint = engine.seen[0][1].structured_outputs
    given = getattr(constraint, kind)
    assert constraint.kind == kind and constraint.after is None
    assert (json.loads(given) if kind in ("json", "structural_tag") else given) == value


@covers("GenerationRequest", "best_of")
@pytest.mark.parametrize("path", ROUTES)
def test_best_of_returns_the_likeliest_and_counts_all(client: TestClient, engine: FakeEngine, path: str) -> None:
    engine.replies = ["bad", "best", "good"]
    engine.logprobs = [-3.0, -0.5, -1.0]
    body = send(client, path, n=2, best_of=3).json()
    assert [(c["index"], text(c)) for c in body["choices"]] == [(0, "best"), (1, "good")]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == len("bad") + len("best") + len("good")


def test_best_of_with_several_prompts(client: TestClient, engine: FakeEngine) -> None:
    engine.replies, engine.logprobs = ["bad", "best"], [-3.0, -0.5]
    choices = send(client, "/v1/completions", prompt=["A ", "B "], best_of=2, echo=True, logprobs=0).json()["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [(0, "A best"), (1, "B best")]
    assert choices[1]["logprobs"]["tokens"] == ["<s>", "B", " ", "b", "e", "s", "t"]


@covers("GenerationRequest", "conversation_id", "resource_id")
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_labels_come_back(client: TestClient, path: str, stream: bool) -> None:
    fields = {"conversation_id": "mine", "stream": stream}
    base: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "Hi"}
    headers = {"x-conversation-id": "theirs", "x-resource-id": "r1"}
    response = client.post(path, json=base | fields, headers=headers)
    assert (response.headers["x-conversation-id"], response.headers["x-resource-id"]) == ("mine", "r1")
    if not stream:
        assert (response.json()["conversation_id"], response.json()["resource_id"]) == ("mine", "r1")


@covers("GenerationRequest", "return_token_ids")
def test_token_ids_come_back(client: TestClient, engine: FakeEngine) -> None:
    chat = send(client, ROUTES[0], return_token_ids=True, max_tokens=3, n=2).json()
    assert chat["prompt_token_ids"] == engine.seen[0][0]
    assert [c["token_ids"] for c in chat["choices"]] == [list(b"The")] * 2
    completion = send(client, ROUTES[1], prompt=["a", "b"], return_token_ids=True, max_tokens=3).json()
    assert [c["prompt_token_ids"] for c in completion["choices"]] == [ids for ids, _, _ in engine.seen[1:]]
    assert [c["token_ids"] for c in completion["choices"]] == [list(b"The")] * 2
    chunks = events(client, ROUTES[1], return_token_ids=True, max_tokens=3)
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[84], [104], [101]]
    assert ["prompt_token_ids" in c["choices"][0] for c in chunks] == [True, False, False]


@covers("GenerationRequest", "return_weight_versions")
@pytest.mark.parametrize("path", ROUTES)
def test_versions_of_the_weights_come_back(client: TestClient, engine: FakeEngine, path: str) -> None:
    engine.versions = ["step-1", "step-1", "step-2"]
    expected = [{"version": "step-1", "start": 0, "end": 2}, {"version": "step-2", "start": 2, "end": 5}]
    whole = send(client, path, return_weight_versions=True, max_tokens=5, n=2).json()
    assert [choice["weight_versions"] for choice in whole["choices"]] == [expected] * 2
    chunks = events(client, path, return_weight_versions=True, max_tokens=5)
    told = [choice.get("weight_versions") for chunk in chunks for choice in chunk["choices"]]
    assert told[-1] == expected and not any(told[:-1])
    plain = [send(client, path, max_tokens=5).json(), *events(client, path, max_tokens=5)]
    assert not any("weight_versions" in choice for answer in plain for choice in answer["choices"])


@covers("GenerationRequest", "return_tokens_as_token_ids")
def test_tokens_named_by_their_ids(client: TestClient) -> None:
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    chat = send(client, ROUTES[0], logprobs=True, top_logprobs=1, **fields).json()["choices"][0]["logprobs"]["content"]
    assert (chat[0]["token"], chat[0]["top_logprobs"][0]["token"]) == ("token_id:84", "token_id:65")
    completion = send(client, ROUTES[1], logprobs=1, echo=True, **fields).json()["choices"][0]["logprobs"]
    assert completion["tokens"] == ["token_id:256", "token_id:72", "token_id:105", "token_id:84"]
    assert completion["top_logprobs"][-1] == {"token_id:84": -1.0, "token_id:65": -0.5}


class TestEchoOfAChat:
    FIELDS: ClassVar[dict[str, Any]] = {"messages": [*HELLO, {"role": "assistant", "content": "Well, "}], "echo": True}

    def test_whole(self, client: TestClient) -> None:
        assert text(post(client, **self.FIELDS, continue_final_message=True).json()["choices"][0]) == "Well, " + REPLY

    def test_streamed(self, client: TestClient) -> None:
        chunks = events(client, **self.FIELDS, continue_final_message=True)
        assert chunks[1]["choices"][0]["delta"] == {"content": "Well, "}
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Well, " + REPLY

    @covers("ChatRequest", "echo")
    def test_not_of_another_role(self, client: TestClient) -> None:
        assert text(post(client, echo=True).json()["choices"][0]) == REPLY
        assert text(post(client, echo=True, add_generation_prompt=False).json()["choices"][0]) == "Hi" + REPLY


class TestUnknownFields:
    @pytest.fixture
    def lenient(self, make_client: Any, engine: FakeEngine) -> TestClient:
        return make_client(engine, unknown_fields="warn")

    @pytest.mark.parametrize("path", ROUTES)
    def test_are_ignored_and_listed(self, lenient: TestClient, path: str) -> None:
        body = send(lenient, path, temprature=1, vllm_xargs="x").json()
        name = "ChatRequest" if "chat" in path else "CompletionRequest"
        assert body["warnings"] == [
            f"{name}: unknown field 'temprature'; did you mean 'temperature'?; ignored",
            f"{name}: vllm_xargs is not supported by this server; ignored",
        ]
        assert "warnings" not in send(lenient, path).json()

    @pytest.mark.parametrize("path", ROUTES)
    def test_in_the_first_chunk_of_a_stream(self, lenient: TestClient, path: str) -> None:
        first, *others = events(lenient, path, frobnicate=1)
        assert len(first["warnings"]) == 1 and not any("warnings" in chunk for chunk in others)

    def test_inside_messages(self, lenient: TestClient) -> None:
        parts = [{"type": "text", "text": "Hi", "frobnicate": 1}]
        body = send(lenient, ROUTES[0], messages=[{"role": "user", "content": parts}] * 2).json()
        assert body["warnings"] == ["TextPart: unknown field 'frobnicate'; ignored"]

    def test_wrong_values_are_still_refused(self, lenient: TestClient) -> None:
        assert post(lenient, temperature=-1).status_code == 400


class TestBeamSearch:
    @pytest.fixture(autouse=True)
    def _language(self, engine: FakeEngine) -> None:
        """After any text: a, b or the end; a is likelier, but dead ends follow it."""
        from jaxllm.requests.outputs import Logprob

        def next_tokens(ids: list[int]) -> list[tuple[int, Logprob]]:
            shares = {97: -2.0, 98: -2.1, 257: -2.2} if ids[-1] == 97 else {97: -0.7, 98: -0.8, 257: -3.0}
            return [(token, Logprob(value)) for token, value in sorted(shares.items(), key=lambda item: -item[1])]

        engine.next_tokens = next_tokens

    @covers("GenerationRequest", "use_beam_search")
    @pytest.mark.parametrize("path", ROUTES)
    def test_finds_what_greedy_does_not(self, client: TestClient, engine: FakeEngine, path: str) -> None:
        greedy = send(client, path, temperature=0, max_tokens=3).json()
        body = send(client, path, use_beam_search=True, best_of=3, n=2, max_tokens=3).json()
        assert text(greedy["choices"][0]) == "aaa"
        assert [text(choice) for choice in body["choices"]] == ["bba", "bbb"]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
        assert body["usage"]["completion_tokens"] == 6 and not engine.active

    @covers("GenerationRequest", "length_penalty")
    def test_length_penalty_and_eos(self, client: TestClient) -> None:
        fields: dict[str, Any] = {"prompt": "x", "use_beam_search": True, "best_of": 3, "max_tokens": 4}
        short = send(client, ROUTES[1], **fields, length_penalty=-5.0).json()["choices"][0]
        assert (short["text"], short["finish_reason"]) == ("", "stop")
        endless = send(client, ROUTES[1], **fields, length_penalty=-5.0, ignore_eos=True).json()["choices"][0]
        assert endless["finish_reason"] == "length"

    def test_logprobs_and_ids(self, client: TestClient) -> None:
        fields = {"use_beam_search": True, "best_of": 3, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        choice = post(client, **fields, return_token_ids=True).json()["choices"][0]
        assert choice["token_ids"] == [98, 97]
        assert [(e["token"], e["logprob"]) for e in choice["logprobs"]["content"]] == [("b", -0.8), ("a", -0.7)]
        assert [e["token"] for e in choice["logprobs"]["content"][0]["top_logprobs"]] == ["a", "b"]

    def test_an_error_ends_all_beams(self, client: TestClient, engine: FakeEngine) -> None:
        engine.queue_limit = 2
        response = client.post("/v1/completions", json={"prompt": "x", "use_beam_search": True, "best_of": 3})
        assert response.status_code == 400 and not engine.active


def test_a_long_list_is_refused_before_it_is_read(client: TestClient) -> None:
    """Ten megabytes of stops take no longer than parsing them."""
    body = json.dumps({"messages": HELLO, "stop": ["abcdefgh"] * 900_000}).encode()
    with quickly(2.0):
        response = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "900000 entries" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO * 300_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 300_000}]},
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}] * 150_000},
        {"messages": HELLO, "x" * 10_000_000: 1},
        {"messages": HELLO, "stop": {str(i): "a" for i in range(500_000)}},
        {"messages": HELLO, "temperature": [["a"] * 1000] * 1000},
    ],
    ids=["messages", "parts", "tools", "long name", "stop", "temperature"],
)
def test_large_and_wrong_bodies_are_refused_quickly(client: TestClient, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    with quickly(2.5):
        response = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and len(response.text) < 1000


def test_many_unknown_fields_are_ignored_quickly(make_client: Any, engine: FakeEngine) -> None:
    client = make_client(engine, unknown_fields="warn")
    with quickly(3):
        body = post(client, **{f"temperatur{i}": 1 for i in range(90_000)}).json()
    assert len(body["warnings"]) == 32


@covers("GenerationRequest", "truncation_side")
@pytest.mark.parametrize("path", ROUTES)
def test_either_end_of_a_prompt_is_cut_off(client: TestClient, engine: FakeEngine, path: str) -> None:
    send(client, path)
    whole = engine.seen[-1][0]
    for side, kept in ((None, whole[-2:]), ("left", whole[-2:]), ("right", whole[:2])):
        send(client, path, truncate_prompt_tokens=2, truncation_side=side)
        assert engine.seen[-1][0] == kept


TIMINGS = {
    "queue_ms", "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n",
    "predicted_ms", "predicted_per_token_ms", "predicted_per_second", "padding_n", "draft_n", "draft_n_accepted",
}  # fmt: skip


@covers("SamplingFields", "timings_per_token")
@pytest.mark.parametrize("path", ROUTES)
def test_timings(client: TestClient, engine: FakeEngine, path: str) -> None:
    assert "timings" not in send(client, path, max_tokens=3).json()
    engine.delay = 0.03
    began = time.monotonic()
    body = send(client, path, max_tokens=5, timings_per_token=True).json()
    elapsed = 1000 * (time.monotonic() - began)
    timings = body["timings"]
    assert timings.keys() == TIMINGS
    assert timings["predicted_n"] == 5 and timings["cache_n"] + timings["prompt_n"] == body["usage"]["prompt_tokens"]
    # the first token may be noticed late, and the others then take less: together they take what they must
    assert timings["predicted_ms"] > 0 and timings["prompt_ms"] >= 0 and 0 <= timings["queue_ms"] <= elapsed
    assert 5 * 30 <= timings["prompt_ms"] + timings["predicted_ms"] <= elapsed
    assert timings["predicted_per_second"] == pytest.approx(1000 * 4 / timings["predicted_ms"])
    chunks = events(client, path, max_tokens=5, timings_per_token=True)
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5
    assert timings["padding_n"] == PADDING
    assert {chunk["timings"]["padding_n"] for chunk in chunks} <= {None, PADDING}
    assert chunks[-1]["timings"]["padding_n"] == PADDING and chunks[-1]["timings"]["queue_ms"] >= 0


def test_timings_are_of_all_choices(client: TestClient, engine: FakeEngine) -> None:
    timings = send(client, ROUTES[1], prompt=["Hi", "Ho"], n=2, max_tokens=3, timings_per_token=True).json()["timings"]
    assert timings["predicted_n"] == 12 and timings["padding_n"] == 4 * PADDING


@pytest.mark.parametrize("path", ROUTES)
def test_usage_is_sent_where_the_server_is_told_to(make_client: Any, engine: FakeEngine, path: str) -> None:
    client = make_client(engine, enable_force_include_usage=True)
    for asked in ({}, {"stream_options": {"include_usage": False}}):
        *chunks, last = events(client, path, max_tokens=3, **asked)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
        so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert so_far == sorted(so_far) and so_far[-1] == 3


@covers("GenerationRequest", "logprob_token_ids")
def test_logprobs_of_tokens_that_are_asked_for(client: TestClient, engine: FakeEngine) -> None:
    asked = {"logprob_token_ids": [ord("x"), ord("h"), ord("a")], "max_tokens": 2}
    chat = send(client, ROUTES[0], logprobs=True, **asked).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in chat] == ["T", "h"] and engine.seen[-1][1].logprob_token_ids == (120, 104, 97)
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in chat] == [["a", "h", "x"], ["h", "a", "x"]]
    completion = send(client, ROUTES[1], logprobs=0, **asked).json()["choices"][0]["logprobs"]
    assert completion["top_logprobs"][0] == {"T": -1.0, "x": -15.0, "h": -13.0, "a": -12.125}
    assert completion["top_logprobs"][1] == {"h": -1.0, "x": -15.0, "a": -12.125}
    both = send(client, ROUTES[0], logprobs=True, top_logprobs=2, **asked).json()["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in both[0]["top_logprobs"]] == ["A", "T", "a", "h", "x"]
    both = send(client, ROUTES[1], logprobs=1, **asked).json()["choices"][0]["logprobs"]
    assert both["top_logprobs"][0] == {"T": -1.0, "A": -0.5, "x": -15.0, "h": -13.0, "a": -12.125}


@covers("GenerationRequest", "no_stop_trim", "return_hidden_states")
@pytest.mark.parametrize("path", ROUTES)
def test_what_sglangs_router_sends_with_every_request(client: TestClient, engine: FakeEngine, path: str) -> None:
    neutral: dict[str, Any] = {"no_stop_trim": False, "return_hidden_states": False}
    neutral |= {"separate_reasoning": True, "stream_reasoning": True} if "chat" in path else {}
    send(client, path, **neutral)
    assert not engine.seen[-1][1].include_stop_str_in_output
    send(client, path, no_stop_trim=True, stop="x")
    assert engine.seen[-1][1].include_stop_str_in_output


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"no_stop_trim": True, "stop_token_ids": [5]}, "no_stop_trim"),
        ({"no_stop_trim": True, "skip_special_tokens": False}, "no_stop_trim"),
        ({"no_stop_trim": True, "include_stop_str_in_output": False}, "no_stop_trim"),
        ({"no_stop_trim": True, "use_beam_search": True, "temperature": 0}, "no_stop_trim"),
    ],
)
def test_what_of_it_cannot_be_done_is_refused(
    client: TestClient, path: str, fields: dict[str, Any], named: str
) -> None:
    base: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "Hi"}
    answer = client.post(path, json=base | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == named
