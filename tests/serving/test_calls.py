"""A request holds its model from when it asks for it until its last byte, whatever its end, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.datastructures import Headers

from jaxllm.config import ModelConfig, ServeConfig
from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.mcp.settings import OFF
from jaxllm.serving import state as registry_module
from jaxllm.serving.access.keys import OTHERS
from jaxllm.serving.call import ClientCall, open_call
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import ANSWER, TENANT, Answer
from jaxllm.serving.request_log import Record
from jaxllm.serving.served_model import LoadableModel, ServedModel
from jaxllm.serving.state import Registry, ServerState
from tests.serving.batches.conftest import start
from tests.serving.batches.running import Running, chat
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine, app_of

__all__ = ["start"]

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Once upon a time"}


def make_registry(*names: str, any_name: bool = False) -> Registry:
    models = [ServedModel(ModelConfig(model="m", served_model_name=name), FakeEngine()) for name in names]
    return Registry(map(LoadableModel.loaded, models), any_name=any_name)


def held(server: Running) -> int:
    registry: Registry = server.app.state.server.registry
    return sum(len(model.calls) for model in registry)


def test_every_kind_of_request_gives_its_model_back(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.001))
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for path, body, status in (
            ("/chat/completions", CHAT, 200),
            ("/chat/completions", CHAT | {"stream": True}, 200),
            ("/chat/completions", CHAT | {"model": "unknown"}, 404),
            ("/chat/completions", {"messages": [{"role": "user", "content": "x" * 9000}]}, 400),  # after it was taken
            ("/chat/completions/render", CHAT, 200),
            ("/completions", TEXT, 200),
            ("/completions", TEXT | {"stream": True}, 200),
            ("/completions", TEXT | {"temperature": -1}, 400),
            ("/tokenize", TEXT, 200),
            ("/detokenize", {"tokens": [65]}, 200),
            ("/detokenize", {"tokens": [-1]}, 400),
            ("/messages", CHAT | {"model": "fake", "max_tokens": 5}, 200),
            ("/messages/count_tokens", CHAT | {"model": "fake"}, 200),
            ("/embeddings", {"input": "a"}, 200),
            ("/embeddings", {"input": "a", "dimensions": 10_000}, 400),
            ("/pooling", {"input": "a"}, 200),
            ("/classify", {"input": "a"}, 400),
            ("/score", {"text_1": "a", "text_2": "b"}, 200),
            ("/rerank", {"query": "a", "documents": ["b"]}, 200),
            ("/rerank", {"query": "a", "texts": ["b"]}, 200),
            ("/apply-template", CHAT, 200),
            ("/invocations", TEXT, 200),
            ("/responses", {"input": "Hi"}, 200),
            ("/responses", {"input": "Hi", "stream": True}, 200),
            ("/responses", {"input": "Hi", "previous_response_id": "resp_none"}, 400),
            ("/responses/input_tokens", {"input": "Hi"}, 200),
        ):
            assert client.post(path, json=body).status_code == status, (path, body)
            wait_for(lambda: held(server) == 0, 2)
        for path in ("/models", "/models/fake", "/props", "/server_info", "/tokenizer_info"):
            assert client.get(path).status_code == 200
    batch = server.finished(server.submit([chat(0), chat(1, model="unknown"), chat(2, temperature=-1)]))
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert held(server) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT | {"stream": True}),
        ("/completions", TEXT | {"stream": True}),
        ("/messages", CHAT | {"model": "fake", "max_tokens": 50, "stream": True}),
        ("/responses", {"input": "Hi", "stream": True}),
    ],
)
def test_a_stream_holds_its_model_until_its_client_is_gone(
    start: Callable[..., Running], path: str, body: dict[str, Any]
) -> None:
    server = start(FakeEngine(delay=0.3))
    with httpx.stream("POST", server.url + path, json=body, timeout=20) as response:
        arriving = response.iter_bytes()
        next(arriving)
        assert held(server) == 1
    wait_for(lambda: held(server) == 0)
    assert server.engine.active == set()


def test_a_request_that_nobody_waits_for_gives_its_model_back(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.3))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/chat/completions", json=CHAT, timeout=httpx.Timeout(20, read=0.3))
    wait_for(lambda: held(server) == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_that_fails_gives_its_model_back(start: Callable[..., Running], stream: bool) -> None:
    server = start(FakeEngine())
    server.engine.fail_after = 2
    answer = httpx.post(server.url + "/chat/completions", json=CHAT | {"stream": stream}, timeout=20)
    assert "caught fire" in answer.text
    wait_for(lambda: held(server) == 0)


def test_a_background_response_holds_its_model_longer_than_its_request(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.05))
    body = {"input": "Hi", "background": True}
    response = httpx.post(f"{server.url}/responses", json=body, timeout=20).json()
    seen = []
    while (leases := held(server), running(server, response["id"]))[1]:
        seen.append(leases)
    assert seen and all(seen)
    wait_for(lambda: held(server) == 0)


def test_a_stream_of_a_background_response_ends_before_it(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.05))
    body = {"input": "Hi", "background": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/responses", json=body, timeout=20) as response:
        arriving = response.iter_bytes()
        next(arriving)
        assert held(server) == 2  # the stream's, and the run's own
    wait_for(lambda: held(server) == 1)
    wait_for(lambda: held(server) == 0)


def running(server: Running, response_id: str) -> bool:
    status = httpx.get(f"{server.url}/responses/{response_id}").json()["status"]
    return status in ("queued", "in_progress")


def state_of(*names: str) -> ServerState:
    return ServerState(ServerConfig(mcp_config=OFF), make_registry(*names))


async def begun(state: ServerState, name: str) -> ClientCall:
    call = ClientCall(state, *state.registry.called(name))
    await call.begin()
    return call


def test_a_call_is_one_of_its_model_until_it_ends() -> None:
    async def main() -> None:
        state = state_of("a", "b,c")
        first, second = list(state.registry)
        async with await begun(state, "c") as call:
            assert (call.name, call.model) == ("c", second.served)
            assert (len(first.calls), len(second.calls)) == (0, 1)
            async with call.again():
                assert len(second.calls) == 2
            assert len(second.calls) == 1
        assert len(second.calls) == 0
        await call.__aexit__()
        await state.registry.check_released()

    asyncio.run(main())


def test_a_call_ends_what_was_entered_in_it_and_its_record() -> None:
    async def main() -> None:
        state = state_of("a")
        ended: list[str] = []
        record = Record("POST", "/", "-", Headers(), observers=[lambda _: ended.append("record")])

        @asynccontextmanager
        async def stream() -> AsyncIterator[None]:
            try:
                yield
            finally:
                ended.append("stream")
                raise ValueError("it could not be stopped")

        call = ClientCall(state, *state.registry.called("a"), record=record)
        await call.begin()
        with record, pytest.raises(ValueError, match="could not be stopped"):
            async with call, call.again():
                await call.enter(stream())
        assert ended == ["stream", "record"]
        await state.registry.check_released()

    asyncio.run(main())


def test_a_call_that_never_ends_is_told_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "RELEASE_SECONDS", 0.02)

    async def main() -> None:
        app = app_of(ServeConfig(model="a", mcp_config=OFF), FakeEngine())
        async with app.router.lifespan_context(app):
            await begun(app.state.server, "a")

    with pytest.raises(AssertionError, match=r"never ended, by model: \{'a': 1\}"):
        asyncio.run(main())


def test_a_request_opens_its_call_once() -> None:
    async def main() -> None:
        app = FastAPI()
        app.state.server = state_of("a")

        async def nowhere(_: Any) -> None:
            pass

        answer = Answer(nowhere, bytes, 1.0)
        async with answer.held:
            request = Request({"type": "http", "app": app, TENANT: OTHERS, ANSWER: answer})
            assert (await open_call(request, None)).name == "a"
            with pytest.raises(AssertionError, match="opens its call once"):
                await open_call(request, None)
        await app.state.server.registry.check_released()

    asyncio.run(main())


def test_names_lead_to_models() -> None:
    registry = make_registry("a", "b,c")
    first, second = list(registry)
    assert registry.names == ["a", "b", "c"] and registry.default_name == "a"
    assert [registry.find(name) for name in (None, "a", "b", "c")] == [first, first, second, second]
    with pytest.raises(APIError, match="model 'd' is not served here; this server has a, b, c"):
        registry.find("d")
    anything = make_registry("a", "b", any_name=True)
    assert anything.find("d") is next(iter(anything)) and anything.serves("d") and not registry.serves("d")


def test_two_models_share_no_name() -> None:
    with pytest.raises(ConfigError, match="served_model_name is 'b' for two models"):
        make_registry("a,b", "b,c")
    with pytest.raises(ConfigError, match="needs at least one"):
        make_registry()
