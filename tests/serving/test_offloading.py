"""Work off the event loop: whose waits for whose."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxllm.chat import constraint
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine

SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
HELLO = [{"role": "user", "content": "Hi"}]


def test_requests_without_a_grammar_do_not_wait_for_slow_grammars(
    listen: Callable[..., str], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, compiling = threading.Event(), []

    def compile_grammar(outputs: object) -> None:
        compiling.append(outputs)
        may_end.wait(30)

    monkeypatch.setattr(constraint, "compile_grammar", compile_grammar)
    url = listen(engine)
    slow = [
        ("completions", {"prompt": "a", "structured_outputs": {"regex": "a+"}}),
        ("chat/completions", {"messages": HELLO, "response_format": SCHEMA}),
        ("chat/completions", {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}),
    ]
    with ThreadPoolExecutor(12) as pool:
        try:
            for route, body in slow * 4:
                pool.submit(httpx.post, f"{url}/v1/{route}", json=body, timeout=60)
            wait_for(lambda: len(compiling) >= 4)
            plain = {
                "completions": {"prompt": "a"},
                "chat/completions": {"messages": HELLO},
                "tokenize": {"prompt": "a"},
            }
            for route, body in plain.items():
                assert httpx.post(f"{url}/v1/{route}", json=body, timeout=5).status_code == 200
        finally:
            may_end.set()
