"""Servers for coding agents: one of a real model at its defaults, and ones whose model says what a test wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.engine.messages import EngineRequest
from tests.agents.programs import Programs
from tests.serving.conftest import listen  # noqa: F401  a fixture
from tests.serving.fake_engine import REPLY, ByteTokenizer, FakeEngine, SaidToken
from tests.serving.real_server import served

REAL = "smollm2-135m"
"""A built-in model with a chat template; its context holds 8,192 tokens, less than most agents send at first."""

CONTEXT = 500_000
RESULT = "<|tool|>"
TEMPLATE = (
    "{% if tools %}(tools={{ tools | tojson }}){% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of this directory only: pytest asks no other item's."""
    item.add_marker(pytest.mark.programs)


class ScriptedModel(FakeEngine):
    """Says the next of `steps` for each tool's result in a conversation with tools, and REPLY without tools."""

    def __init__(self, *steps: str):
        super().__init__()
        self.info.max_model_len = CONTEXT
        self.tokenizer = ByteTokenizer(TEMPLATE)
        self.steps = steps
        self.prompts: list[str] = []
        """Of the conversations with tools."""

    def _sequence(self, request: EngineRequest, choice: int) -> list[SaidToken]:
        prompt = ByteTokenizer().decode(request.prompt_token_ids)
        self.reply = REPLY
        if prompt.startswith("(tools="):
            self.prompts.append(prompt)
            self.reply = self.steps[min(prompt.count(RESULT), len(self.steps) - 1)]
        return super()._sequence(request, choice)


def call(name: str, **arguments: Any) -> str:
    """What a model says to call a tool, in the format that `scripted` servers read."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def scripted(listen: Callable[..., str]) -> Callable[..., str]:  # noqa: F811
    """The URL, without /v1, of a server of such a model, at its defaults but for what is given."""
    return lambda model, **settings: listen(model, tool_call_parser="hermes", **settings)


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL, without /v1, of a server of a real model, at its defaults."""
    with served(REAL, shapes={}, data_dir=str(tmp_path_factory.mktemp("data"))) as url:
        yield url


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    made = Programs(tmp_path / "home", tmp_path / "work")
    made.home.mkdir()
    made.work.mkdir()
    return made
