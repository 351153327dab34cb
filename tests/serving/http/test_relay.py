"""A request that another process has received gets the answer that its application gives, as it comes."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from starlette.types import Message, Receive, Scope, Send

from jaxllm.config import ServeConfig
from jaxllm.errors import EngineDeadError
from jaxllm.serving.http.json_body import BodyMemory
from jaxllm.serving.http.relay import RelayedAnswer, RelayedRequest, answer
from tests.serving.fake_engine import FakeEngine, app_of

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}


class Relay:
    """An ASGI application that has another answer, through what can be pickled; its client is at `client`."""

    def __init__(self, app: Any, limit: int = 10_000, lose_after: int | None = None):
        self._app = app
        self._limit = limit
        self._lose_after = lose_after
        self.batches: list[list[Message]] = []
        transport = httpx.ASGITransport(self)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with BodyMemory(self._limit).share() as share:
            request = await RelayedRequest.read(Request(scope, receive), self._limit, share)
        messages = self._messages(pickle.loads(pickle.dumps(request)))
        await RelayedAnswer(await anext(messages), messages, self._lost)(scope, receive, send)

    async def _messages(self, request: RelayedRequest) -> AsyncIterator[list[Message]]:
        async for some in answer(self._app, request):
            if self._lose_after is not None and len(self.batches) == self._lose_after:
                raise ConnectionError("gone")
            self.batches.append(pickle.loads(pickle.dumps(some)))
            yield self.batches[-1]

    @staticmethod
    def _lost(error: Exception) -> bytes | None:
        return b"data: lost\n\n" if isinstance(error, ConnectionError) else None


@pytest.fixture
def app(tmp_path: Path, engine: FakeEngine) -> FastAPI:
    return app_of(ServeConfig(model="fake", data_dir=tmp_path), engine)


def without_names(answered: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answered.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/completions", {"prompt": "Hi", "temperature": "warm"}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/nothing?at=all", None),
        ("HEAD", "/health", None),
    ],
)
def test_answers_are_those_of_the_application(app: FastAPI, method: str, path: str, body: Any) -> None:
    async def both() -> list[httpx.Response]:
        async with app.router.lifespan_context(app):
            direct = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
            return [await one.request(method, path, json=body) for one in (direct, Relay(app).client)]

    expected, found = asyncio.run(both())
    assert found.status_code == expected.status_code
    assert found.headers["content-type"] == expected.headers["content-type"]
    if method != "HEAD":
        assert without_names(found.json()) == without_names(expected.json())


def test_a_stream_is_passed_on_piece_by_piece(app: FastAPI, engine: FakeEngine) -> None:
    engine.delay = 0.02

    async def run() -> tuple[Relay, str]:
        relay = Relay(app)
        async with app.router.lifespan_context(app):
            found = await relay.client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        return relay, found.text

    relay, text = asyncio.run(run())
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert said == "The capital of France is Paris." and text.endswith("data: [DONE]\n\n")
    assert len(relay.batches) > 10, "a piece for each token, or nearly"


def test_the_application_is_told_that_the_client_is_gone(app: FastAPI, engine: FakeEngine) -> None:
    engine.delay = 0.05

    async def leave() -> None:
        async with app.router.lifespan_context(app):
            scope = httpx_scope("/v1/chat/completions")
            request = RelayedRequest(scope, json.dumps(CHAT | {"stream": True}).encode())
            messages = answer(app, request)
            await anext(messages)
            assert app.state.server.running
            await messages.aclose()
            assert not app.state.server.running

    asyncio.run(leave())


def httpx_scope(path: str) -> dict[str, Any]:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": headers, "scheme": "http", "http_version": "1.1", "server": ("localhost", 80), "client": None,
    }  # fmt: skip


def test_a_cancelled_answer_ends_the_request(app: FastAPI, engine: FakeEngine) -> None:
    engine.delay = 0.05

    async def cancel() -> None:
        async with app.router.lifespan_context(app):
            request = RelayedRequest(httpx_scope("/v1/chat/completions"), json.dumps(CHAT | {"stream": True}).encode())

            async def read() -> None:
                async for _ in answer(app, request):
                    pass

            reading = asyncio.create_task(read())
            while not app.state.server.running:
                await asyncio.sleep(0.01)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert not app.state.server.running

    asyncio.run(cancel())


def test_a_body_beyond_the_limit_is_refused(app: FastAPI) -> None:
    async def send() -> None:
        await Relay(app, limit=100).client.post("/v1/completions", json={"prompt": "x" * 200})

    with pytest.raises(Exception, match="larger than 100 bytes") as caught:
        asyncio.run(send())
    assert getattr(caught.value, "status", None) == 413


def test_a_stream_whose_process_dies_ends_with_an_event_and_another_body_is_cut_off(
    app: FastAPI, engine: FakeEngine
) -> None:
    engine.delay = 0.02

    async def lose(body: dict[str, Any]) -> str:
        async with app.router.lifespan_context(app):
            return (await Relay(app, lose_after=3).client.post("/v1/chat/completions", json=body)).text

    assert asyncio.run(lose(CHAT | {"stream": True})).endswith("data: lost\n\n")

    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        for _ in range(9):
            await send({"type": "http.response.body", "body": b"[", "more_body": True})
            await asyncio.sleep(0.01)

    with pytest.raises(ConnectionError):
        asyncio.run(Relay(half, lose_after=3).client.post("/"))


def test_what_the_application_raises_is_raised_here() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("…")(scope, receive, send)
        raise EngineDeadError("it fell over")

    async def run() -> None:
        async for _ in answer(broken, RelayedRequest(httpx_scope("/"), b"")):
            pass

    with pytest.raises(EngineDeadError, match="it fell over"):
        asyncio.run(run())
