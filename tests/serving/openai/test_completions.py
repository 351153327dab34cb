"""/v1/completions: prompts in every shape, echo, legacy logprobs, streams."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import BOS, CONTEXT, REPLY, FakeEngine
from tests.serving.openai.test_chat import events
from tests.support.covers import covers


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "Hi"} | fields)


def stream(client: TestClient, **fields: Any) -> list[Any]:
    return events(client, "/v1/completions", **fields)


def test_whole_response_has_sixteen_tokens_by_default(client: TestClient) -> None:
    body = post(client).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": REPLY[:16], "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 16


@covers("CompletionRequest", "max_tokens")
def test_default_max_tokens_shrinks_to_the_context(client: TestClient, engine: FakeEngine) -> None:
    assert post(client, prompt=[7] * (CONTEXT - 4)).status_code == 200
    assert engine.seen[0][1].max_tokens == 4


@covers("POST /v1/completions")
@covers("CompletionRequest", "prompt")
@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("Hi", [[BOS, 72, 105]]),
        (["Hi", "!"], [[BOS, 72, 105], [BOS, 33]]),
        ([72, 105], [[72, 105]]),
        ([[72], [105, 33]], [[72], [105, 33]]),
    ],
)
def test_prompt_shapes(client: TestClient, engine: FakeEngine, prompt: Any, token_ids: list[list[int]]) -> None:
    body = post(client, prompt=prompt, n=2).json()
    assert [ids for ids, _, _ in engine.seen] == token_ids
    assert [c["index"] for c in body["choices"]] == list(range(2 * len(token_ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, token_ids))
    assert body["usage"]["completion_tokens"] == 16 * 2 * len(token_ids)


@covers("CompletionRequest", "echo")
def test_echo_pairs_each_choice_with_its_prompt(client: TestClient) -> None:
    body = post(client, prompt=["Hi ", "Ho "], n=2, echo=True, max_tokens=3).json()
    assert [c["text"] for c in body["choices"]] == ["Hi The", "Hi The", "Ho The", "Ho The"]
    assert post(client, prompt=[BOS, 72], echo=True, max_tokens=3).json()["choices"][0]["text"] == "<s>HThe"


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize(
    ("fields", "tokens", "offsets", "text"),
    [
        ({"prompt": "Hi"}, ["<s>", "H", "i"], [0, 0, 1], "Hi"),
        ({"prompt": "<s>Hi"}, ["<s>", "<s>", "H", "i"], [0, 3, 3, 4], "<s>Hi"),
        ({"prompt": [BOS, 72, BOS, 105]}, ["<s>", "H", "<s>", "i"], [0, 3, 4, 7], "<s>H<s>i"),
        ({"prompt": [BOS, 72], "skip_special_tokens": True}, ["<s>", "H"], [0, 0], "H"),
    ],
)
def test_text_offsets_point_into_the_text(
    client: TestClient, fields: dict[str, Any], tokens: list[str], offsets: list[int], text: str, numbered: bool
) -> None:
    asked = fields | {"echo": True, "logprobs": 0, "max_tokens": 2, "return_tokens_as_token_ids": numbered}
    choice = post(client, **asked).json()["choices"][0]
    assert choice["text"] == text + "Th"
    assert choice["logprobs"]["text_offset"] == [*offsets, len(text), len(text) + 1]
    if numbered:
        assert choice["logprobs"]["tokens"][0] == f"token_id:{BOS}"
    else:
        assert choice["logprobs"]["tokens"] == [*tokens, "T", "h"]


def test_special_tokens_that_are_not_shown_take_no_room(client: TestClient, engine: FakeEngine) -> None:
    engine.reply = "a</s>b"
    for shown, offsets in ((False, [0, 1, 1]), (True, [0, 1, 5])):
        choice = post(client, prompt="Hi", logprobs=0, skip_special_tokens=not shown).json()["choices"][0]
        assert choice["text"] == ("a</s>b" if shown else "ab")
        assert choice["logprobs"]["text_offset"] == offsets


def test_parts_of_a_character_are_named_by_their_bytes(client: TestClient, engine: FakeEngine) -> None:
    """As OpenAI does; a character begins where its first byte is, and counts once."""
    engine.reply = "né!🤖x"
    choice = post(client, prompt="ü", logprobs=0, echo=True).json()["choices"][0]
    parts = [r"bytes:\xc3", r"bytes:\xbc", "n", r"bytes:\xc3", r"bytes:\xa9", "!"]
    assert choice["logprobs"]["tokens"][1:7] == parts
    assert choice["logprobs"]["text_offset"][1:] == [0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 5]
    assert choice["text"] == "üné!🤖x"
    assert r"bytes:\xc3" in choice["logprobs"]["top_logprobs"][4]


def test_logprobs_zero_returns_the_chosen_token_only(client: TestClient) -> None:
    logprobs = post(client, logprobs=0, max_tokens=3).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["T", "h", "e"],
        "token_logprobs": [-1.0, -1.0, -1.0],
        "top_logprobs": [{"T": -1.0}, {"h": -1.0}, {"e": -1.0}],
        "text_offset": [0, 1, 2],
    }


@covers("CompletionRequest", "logprobs")
def test_logprobs_two(client: TestClient) -> None:
    logprobs = post(client, logprobs=2, max_tokens=1).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"T": -1.0, "A": -0.5, "B": -2.0}]


def test_echo_with_logprobs_scores_the_prompt(client: TestClient) -> None:
    logprobs = post(client, prompt="Hi", echo=True, logprobs=1, max_tokens=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<s>", "H", "i", "T", "h"]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0]
    assert logprobs["top_logprobs"][:2] == [None, {"H": -1.0, "A": -0.5}]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3]


def test_max_tokens_zero_with_echo_scores_the_prompt_alone(client: TestClient) -> None:
    body = post(client, echo=True, logprobs=0, max_tokens=0).json()
    assert body["choices"][0]["text"] == "Hi"
    assert body["choices"][0]["logprobs"]["tokens"] == ["<s>", "H", "i"]
    assert body["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_come_per_choice(client: TestClient) -> None:
    choices = post(client, prompt=["Hi", "Ho!"], prompt_logprobs=0).json()["choices"]
    assert [len(c["prompt_logprobs"]) for c in choices] == [3, 4]
    assert choices[0]["prompt_logprobs"][1] == {"72": {"logprob": -1.0, "rank": 2, "decoded_token": "H"}}


@covers("GenerationRequest", "stream")
def test_stream_equals_the_whole(client: TestClient, engine: FakeEngine) -> None:
    engine.hold_back = {2, 3}
    fields: dict[str, Any] = {"prompt": ["Hi ", "Ho "], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 9}
    chunks = stream(client, **fields, stream_options={"include_usage": True})
    whole = post(client, **fields).json()
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    for expected in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == expected["index"]]
        assert "".join(c["text"] for c in mine) == expected["text"]
        assert all(c["text"] for c in mine)
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        for name, values in expected["logprobs"].items():
            assert [value for c in mine for value in c["logprobs"][name]] == values


def test_without_a_tokenizer_ids_work_and_text_is_refused(make_client: Any) -> None:
    client = make_client(FakeEngine(tokenizer=False))
    body = post(client, prompt=[1, 2], logprobs=0, max_tokens=1).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:84"]
    response = post(client, prompt="Hi")
    assert response.status_code == 400 and "tokenizer" in response.json()["error"]["message"]


def test_without_a_tokenizer_an_echo_has_ids_and_no_text(make_client: Any) -> None:
    client = make_client(FakeEngine(tokenizer=False))
    fields = {"prompt": [1, 2], "echo": True, "logprobs": 0, "max_tokens": 1, "return_token_ids": True}
    choice = post(client, **fields).json()["choices"][0]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("", [1, 2], [84])
    assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2", "token_id:84"]
