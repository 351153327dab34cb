"""Conversations rendered without an answer, and chat templates that come with a request: they hurt nobody."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from jaxllm.config import ModelConfig
from jaxllm.serving.served_model import ServedModel
from tests.serving.fake_engine import CONTEXT, FakeEngine
from tests.serving.openai.test_chat import HELLO, PROMPT
from tests.support.covers import covers


@covers("POST /v1/chat/completions/render")
def test_render(client: TestClient, engine: FakeEngine) -> None:
    assert client.post("/v1/chat/completions/render", json={"messages": HELLO}).json() == {
        "prompt": PROMPT,
        "prompt_token_ids": list(PROMPT.encode()),
        "count": len(PROMPT),
        "max_model_len": CONTEXT,
    }
    assert not engine.seen


def test_only_a_template_that_a_request_brings_is_rendered_in_a_process(client: TestClient, engine: FakeEngine) -> None:
    assert engine.tokenizer is not None
    processes = engine.tokenizer._template_processes.processes
    assert client.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 200
    assert not processes.processes
    body = {"messages": HELLO, "chat_template": "T:{{ messages[0].content }}"}
    assert client.post("/v1/chat/completions/render", json=body).json()["prompt"] == "T:Hi"
    assert len(processes.processes) == 1


class TestOwnTemplates:
    LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    DOUBLING = "{% set t = namespace(x='a') %}{% for i in range(40) %}{% set t.x = t.x ~ t.x %}{% endfor %}{{ t.x }}"

    FINE = "T:{{ messages[0].content }}"

    def render(self, client: TestClient, template: str, path: str = "/v1/chat/completions/render") -> Any:
        return client.post(path, json={"messages": HELLO, "chat_template": template})

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"])
    def test_are_bounded_in_time(self, client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("jaxllm.text.template_process.RENDER_SECONDS", 0.5)
            response = self.render(client, self.LOOP, path)
        assert (
            response.status_code == 400
            and "more than 0.5 seconds of processor time" in response.json()["error"]["message"]
        )
        assert self.render(client, self.FINE).json()["prompt"] == "T:Hi"

    @pytest.mark.parametrize(
        ("template", "says"),
        [
            (DOUBLING, "memory"),
            ("{{ '{:1000000000}'.format(1) }}", "memory"),
            ("{{ 'a' * 20000000 }}", "20000000 characters"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
            ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ],
    )
    def test_are_bounded_in_size(self, client: TestClient, template: str, says: str) -> None:
        response = self.render(client, template)
        assert response.status_code == 400 and says in response.json()["error"]["message"]
        assert self.render(client, self.FINE).json()["prompt"] == "T:Hi"

    def test_loops_delay_nobody(self, listen: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("jaxllm.text.template_process.RENDER_SECONDS", 1.5)
        url = listen(engine)

        async def run() -> tuple[int, list[int]]:
            async with httpx.AsyncClient(timeout=300) as client:
                loops = [
                    asyncio.create_task(
                        client.post(f"{url}/v1/chat/completions", json={"messages": HELLO, "chat_template": self.LOOP})
                    )
                    for _ in range(4)
                ]
                await asyncio.sleep(0.2)
                for _ in range(5):
                    (await client.post(f"{url}/v1/chat/completions", json={"messages": HELLO})).raise_for_status()
                running = sum(not loop.done() for loop in loops)
                return running, [response.status_code for response in await asyncio.gather(*loops)]

        running, statuses = asyncio.run(run())
        assert running == 4 and statuses == [400] * 4


def test_long_ones_are_not_kept(engine: FakeEngine) -> None:
    model = ServedModel(ModelConfig(model="fake"), engine)  # type: ignore[arg-type]
    tracemalloc.start()
    for number in range(20):
        model.formats(f"{number}" + "a" * 2**20)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4 * 2**20
