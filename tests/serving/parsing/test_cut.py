"""Answers that max_tokens cuts: a call's markup is never content, wherever the cut is."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.chat.events import ToolFormat, join_events
from jaxllm.chat.formats import TOOL_FORMATS
from tests.serving.fake_engine import FakeEngine
from tests.serving.parsing.splitting import parser, seen, written
from tests.serving.parsing.test_grammar import PARIS

SYMBOL = 2
"""From here on a marker's beginning is no longer taken for a character of the text."""


@pytest.mark.parametrize("known", TOOL_FORMATS, ids=lambda known: known.name)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_cut_call_is_no_content(known: ToolFormat, streamed: bool) -> None:
    text = written(known, PARIS)
    for end in range(SYMBOL, len(text)):
        cut = text[:end]
        fresh = parser(known.name)
        events = [event for piece in (cut if streamed else [cut]) for event in fresh.feed(piece)]
        content, _, _ = seen(join_events([*events, *fresh.finish(cut=True)]))
        assert content is None or cut.strip().isalnum() or cut.strip() in ("to", "to="), cut


def test_other_text_is_kept() -> None:
    for text in ("Is 1 < 2? I say 1 <", "<b>bold</b", "[1, 2", '{"city": "Pa', "say fu"):
        for name in ("hermes", "json", "mistral", "functools"):
            fresh = parser(name)
            assert seen(join_events([*fresh.feed(text), *fresh.finish(cut=True)]))[0] == text


@pytest.mark.parametrize("name", ["json", "hermes"])
@pytest.mark.parametrize("reasoning", ["none", "think"])
def test_what_must_be_a_call_is_never_content(make_client: Any, name: str, reasoning: str) -> None:
    """Cut anywhere, the first character and the mark of reasoning included; streamed and whole, in all three APIs."""
    engine = FakeEngine()
    engine.info.max_model_len = 4096
    known = next(known for known in TOOL_FORMATS if known.name == name)
    engine.reply = "<think>Hm.</think>" * (reasoning == "think") + written(known, PARIS)
    client: TestClient = make_client(engine, tool_call_parser=name, reasoning_parser=reasoning)
    function = {"name": "get_weather"}
    hello = [{"role": "user", "content": "Hi"}]
    for end in (1, 3, 9, 12, 20, 28, 33):
        chat = {"messages": hello, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        whole = client.post("/v1/chat/completions", json=chat | {"max_tokens": end})
        assert whole.status_code == 200, whole.text
        choice = whole.json()["choices"][0]
        assert choice["finish_reason"] == "length" and not choice["message"]["content"], choice
        streamed = client.post("/v1/chat/completions", json=chat | {"max_tokens": end, "stream": True}).text
        assert '"content":"' not in streamed.replace('"content":""', ""), streamed
        messages = {"messages": hello, "max_tokens": end, "tool_choice": {"type": "any"}}
        answer = client.post(
            "/v1/messages", json=messages | {"tools": [{**function, "input_schema": {"type": "object"}}]}
        )
        assert answer.status_code == 200, answer.text
        assert not [block for block in answer.json()["content"] if block["type"] == "text" and block["text"]]
        tools = [{"type": "function", **function}]
        responses = {"input": "Hi", "tools": tools, "tool_choice": "required", "max_output_tokens": max(end, 16)}
        answer = client.post("/v1/responses", json=responses)
        assert answer.status_code == 200 and "output_text" not in answer.text, answer.text
