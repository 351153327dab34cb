"""What lies between a route and the engine."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.chat import prompt
from jaxllm.serving.state import ServerState
from tests.serving.fake_engine import REPLY, FakeEngine
from tests.support.covers import covers


def test_each_prompt_is_checked_once_and_not_on_the_event_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, where = prompt.check_request, []

    def noted(*arguments: Any) -> None:
        where.append(threading.current_thread().name)
        check(*arguments)

    monkeypatch.setattr(prompt, "check_request", noted)
    body = {"prompt": ["one", "two"], "max_tokens": 3, "guided_choice": ["a", "b"]}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert [name.startswith("jaxllm-tokenize") for name in where] == [True, True]


@pytest.mark.parametrize("more", [{}, {"response_format": {"type": "json_object"}}, {"chat_template": "T"}])
def test_a_chat_leaves_the_event_loop_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    call, functions = ServerState.run_in, []

    async def noted(self: ServerState, workers: Any, function: Any) -> Any:
        functions.append(function)
        return await call(self, workers, function)

    monkeypatch.setattr(ServerState, "run_in", noted)
    body = {"messages": [{"role": "user", "content": "Hi"}]} | more
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert len(functions) == 1


def test_a_chat_that_the_engine_refuses_is_named_as_its_caller_named_it(client: TestClient, engine: FakeEngine) -> None:
    engine.info.vocab_size = 100
    response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "xyz"}]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages" and "ids go from 0 to 99" in error["message"]


def streamed(client: TestClient, **fields: Any) -> list[Any]:
    body = {"prompt": "Hi", "stream": True, "return_token_ids": True} | fields
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [choice for item in data for choice in json.loads(item).get("choices", ())]


@covers("GenerationRequest", "stream_interval")
@pytest.mark.parametrize("settings", [{}, {"stream_interval": 100}, {"stream_interval": 4}])
def test_an_event_has_as_many_tokens_as_are_asked_for(
    make_client: Any, engine: FakeEngine, settings: dict[str, Any]
) -> None:
    client = make_client(engine, **settings)
    asked = {} if settings == {"stream_interval": 4} else {"stream_interval": 4}
    choices = streamed(client, **asked, n=2, logprobs=1, max_tokens=64)
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        sizes = [len(choice["token_ids"]) for choice in mine]
        assert sizes == [1, *[4] * ((len(REPLY) - 1) // 4), *[(len(REPLY) - 1) % 4][: (len(REPLY) - 1) % 4]]
        assert "".join(choice["text"] for choice in mine) == REPLY
        assert [len(choice["logprobs"]["tokens"]) for choice in mine] == sizes
        assert [choice["finish_reason"] for choice in mine] == [*[None] * (len(mine) - 1), "stop"]
    assert len(streamed(client, stream_interval=1, max_tokens=6)) == 6


def test_an_event_has_tokens_of_one_versions_weights_and_what_came_before_a_failure(
    make_client: Any, engine: FakeEngine
) -> None:
    client = make_client(engine, stream_interval=100)
    engine.versions = ["a", "a", "a", "b"]
    assert [len(choice["token_ids"]) for choice in streamed(client, max_tokens=8)] == [1, 2, 5]
    engine.fail_after = 5
    assert [len(choice["token_ids"]) for choice in streamed(client, max_tokens=8)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"stream_interval": 4}, "stream_interval", "needs stream to be true"),
        ({"stream_interval": 0, "stream": True}, "stream_interval", "must be 1 or more"),
        ({"prompt_logprob_token_ids": [5], "stream": True}, "prompt_logprob_token_ids", "not available in a stream"),
        ({"prompt_logprob_token_ids": [5], "use_beam_search": True}, "prompt_logprob_token_ids", "use_beam_search"),
        ({"logprobs_mode": "raw_logits", "best_of": 2}, "logprobs_mode", "not available with best_of above n"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode", "'raw_logprobs', 'processed_logprobs', 'raw_logits'"),
        ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache", "true or false"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(
    client: TestClient, fields: dict[str, Any], param: str, said: str
) -> None:
    response = client.post("/v1/completions", json={"prompt": "Hi"} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and said in error["message"], error["message"]


@covers("GenerationRequest", "logprobs_mode", "prompt_logprob_token_ids", "skip_reading_prefix_cache")
def test_vllms_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    fields = {"logprobs_mode": "raw_logits", "prompt_logprob_token_ids": [5, 6], "skip_reading_prefix_cache": True}
    answer = client.post("/v1/completions", json={"prompt": "Hi", "logprobs": 1} | fields).json()
    params = engine.seen[-1][1]
    assert (params.logprobs_mode, params.prompt_logprob_token_ids) == ("raw_logits", (5, 6))
    assert params.skip_reading_prefix_cache is True and params.prompt_logprobs == 0
    assert len(answer["choices"][0]["prompt_logprobs"]) == 3
    client.post("/v1/completions", json={"prompt": "Hi", "best_of": 2})
    assert engine.seen[-1][1].logprobs_mode == "raw_logprobs"
