"""Settings of a served model that its requests feel: variables and contents of the chat template, log-probabilities."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient

from jaxllm.errors import InvalidRequestError
from tests.serving.fake_engine import TEMPLATE, ByteTokenizer, FakeEngine

HELLO = [{"role": "user", "content": "Hi"}]
PARTS = "{% for m in messages %}{% for part in m['content'] %}({{ part.text }}){% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)


def prompt(client: TestClient, **fields: Any) -> str:
    response = client.post("/v1/chat/completions/render", json={"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    return response.json()["prompt"]


class TestDefaultVariables:
    @pytest.fixture
    def client(self, make_client: Any, engine: FakeEngine) -> TestClient:
        defaults = {"enable_thinking": False, "reasoning_effort": "low"}
        return make_client(engine, default_chat_template_kwargs=defaults)

    def test_a_request_wins_by_the_name(self, client: TestClient) -> None:
        assert prompt(client).startswith("(enable_thinking=False)(reasoning_effort=low)[user]")
        asked = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        assert prompt(client, **asked).startswith("(enable_thinking=False)(reasoning_effort=high)")

    def test_who_says_to_think_or_not_says_it_by_any_name(self, client: TestClient) -> None:
        assert prompt(client, chat_template_kwargs={"thinking": True}).startswith("(reasoning_effort=low)")
        assert prompt(client, thinking=True).startswith("(enable_thinking=True)")

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/responses", {"input": "Hi", "store": False}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 3}),
        ],
    )
    def test_of_every_api(self, client: TestClient, engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
        assert client.post(path, json=body).status_code == 200
        assert bytes(engine.seen[-1][0]).decode().startswith("(enable_thinking=False)")

    def test_what_the_server_sets_is_refused_at_the_start(self, make_client: Any, engine: FakeEngine) -> None:
        with pytest.raises(InvalidRequestError, match=r"^default_chat_template_kwargs has 'messages'"):
            make_client(engine, default_chat_template_kwargs={"messages": []})


@pytest.mark.parametrize(
    ("template", "setting", "rendered"),
    [
        (PARTS, "auto", "(Hi)"),
        (BOTH, "auto", "Hi"),
        (BOTH, "string", "Hi"),
        (BOTH, "openai", "(Hi)"),
        (TEMPLATE, "auto", "[user]Hi[assistant]"),
    ],
)
def test_content_is_a_string_or_a_list_as_the_template_wants_it(
    make_client: Any, engine: FakeEngine, template: str, setting: str, rendered: str
) -> None:
    engine.tokenizer = ByteTokenizer(template)
    assert prompt(make_client(engine, chat_template_content_format=setting)) == rendered


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 3}, "logprobs"),
        ("/v1/completions", {"prompt": "Hi", "prompt_logprobs": 3}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "Hi", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 0, "logprob_token_ids": [1, 2, 3]}, "logprob_token_ids"),
    ],
)
def test_no_more_log_probabilities_than_max_logprobs(
    make_client: Any, engine: FakeEngine, path: str, fields: dict[str, Any], name: str
) -> None:
    client = make_client(engine)
    assert client.post(path, json=fields).status_code == 200
    engine.client.info = msgspec.structs.replace(engine.info, max_logprobs=2)
    response = client.post(path, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{name} ")
    assert response.json()["error"]["message"].endswith("this engine gives at most 2 (max_logprobs)")


CHAT = ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": -1})
TEXT = ("/v1/completions", {"prompt": "Hi", "logprobs": -1})


@pytest.mark.parametrize(("path", "fields", "name"), [(*CHAT, "top_logprobs"), (*TEXT, "logprobs")])
def test_whole_vocabularies_where_max_logprobs_allows_them(
    make_client: Any, engine: FakeEngine, path: str, fields: dict[str, Any], name: str
) -> None:
    client = make_client(engine)
    refused = client.post(path, json=fields | {"max_tokens": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{name} asks for the whole vocabulary; this engine gives at ")
    engine.client.info = msgspec.structs.replace(engine.info, max_logprobs=-1)
    found = client.post(path, json=fields | {"max_tokens": 1}).json()["choices"][0]["logprobs"]
    top = found["content"][0]["top_logprobs"] if "content" in found else found["top_logprobs"][0]
    assert len(top) == 4
    searched = client.post("/v1/completions", json=TEXT[1] | {"use_beam_search": True, "n": 2, "max_tokens": 1})
    assert searched.json()["error"]["message"].startswith("logprobs is -1, the whole vocabulary")
