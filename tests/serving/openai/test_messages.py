"""What a template sees of a chat's messages."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.serving.fake_engine import ByteTokenizer, FakeEngine
from tests.serving.sending import prompt, send
from tests.support.covers import covers


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(
        "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}"
        "{% if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}]{{ m.content }}{% endfor %}[assistant]"
    )
    return engine


@covers("ChatMessageParam", "role", "content", "name", "refusal", "reasoning_content", "reasoning")
@covers("TextPart", "text")
@covers("RefusalPart", "refusal")
@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "developer", "content": "d"}, "[system]d"),
        ({"role": "user", "name": "Ann", "content": "d"}, "[user Ann]d"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "[user]a\nb"),
        ({"role": "assistant", "refusal": "No."}, "[assistant]No."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "[assistant]No."),
        ({"role": "assistant", "content": "d", "reasoning_content": "hm"}, "[assistant (hm)]d"),
        ({"role": "assistant", "content": "d", "reasoning": "hm"}, "[assistant (hm)]d"),
    ],
)
def test_what_a_template_sees(client: TestClient, engine: FakeEngine, message: dict[str, Any], shown: str) -> None:
    send(client, "/v1/chat/completions", messages=[message])
    assert prompt(engine) == f"{shown}[assistant]"
