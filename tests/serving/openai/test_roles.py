"""Roles of messages beyond OpenAI's: those that the chat template itself names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import ByteTokenizer, FakeEngine

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'observation' or m.role == \"model\" %}<{{ m.role }}>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
def client(make_client: Callable[..., TestClient], engine: FakeEngine) -> TestClient:
    engine.tokenizer = ByteTokenizer(TEMPLATE)
    return make_client(engine)


@pytest.mark.parametrize("role", ["observation", "model"])
def test_a_role_that_the_template_names(client: TestClient, role: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    response = client.post("/v1/chat/completions/render", json={"messages": messages})
    assert response.json()["prompt"] == f"a<{role}>b"


def test_it_may_bring_the_results_of_calls(client: TestClient) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "observation", "content": "42"},
    ]
    response = client.post("/v1/chat/completions/render", json={"messages": messages})
    assert response.status_code == 200 and response.json()["prompt"].endswith("<observation>42")


@pytest.mark.parametrize("role", ["ipython", "mod"])
def test_one_that_it_does_not_name_is_refused(client: TestClient, role: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    error = client.post("/v1/chat/completions", json={"messages": messages}).json()["error"]
    assert error["param"] == "messages[1].role"
    accepted = "it must be system, user, assistant, tool, or a role that the chat template names"
    assert error["message"] == f"messages[1].role is '{role}'; {accepted}"
