"""What lies between a route and the engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.chat import prompt
from jaxllm.serving.state import ServerState
from tests.serving.fake_engine import FakeEngine


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
    call, functions = ServerState._call, []

    async def noted(self: ServerState, workers: Any, function: Any) -> Any:
        functions.append(function)
        return await call(self, workers, function)

    monkeypatch.setattr(ServerState, "_call", noted)
    body = {"messages": [{"role": "user", "content": "Hi"}]} | more
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert len(functions) == 1


def test_a_chat_that_the_engine_refuses_is_named_as_its_caller_named_it(client: TestClient, engine: FakeEngine) -> None:
    engine.info.vocab_size = 100
    response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "xyz"}]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages" and "ids go from 0 to 99" in error["message"]
