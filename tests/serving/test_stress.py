"""Many requests of every kind, some of whose clients go away: afterwards nothing runs, and nothing has grown."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import mixed_requests
from tests.serving.conftest import wait_for
from tests.serving.real_server import assert_idle, engine_process, served, server_process

pytestmark = pytest.mark.programs

MODEL = "tiny"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("stress")
    model = mixed_requests.write_model(directory / "model", max_position_embeddings=1024)
    with served(str(model), served_model_name=MODEL, data_dir=str(directory / "data")) as url:
        yield url


def some_request(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a body: chats, completions, grammars, several choices, vectors, stored responses, and bad ones."""
    words = " ".join(dice.choices(["one", "two", "three", "four", "five", "six", "seven"], k=dice.randrange(1, 40)))
    chat = {"messages": [{"role": "user", "content": words}], "max_tokens": dice.randrange(1, 6)}
    return dice.choice([
        ("chat/completions", chat),
        ("chat/completions", chat | {"stream": True}),
        ("chat/completions", chat | {"n": 3, "logprobs": True, "top_logprobs": 2}),
        ("chat/completions", chat | {"structured_outputs": {"json": SCHEMA}, "stream": True}),
        ("completions", {"prompt": words, "max_tokens": 3, "echo": True, "logprobs": 1}),
        ("completions", {"prompt": [words, "x"], "max_tokens": 2, "stream": True, "presence_penalty": 1.0}),
        ("completions", {"prompt": words, "max_tokens": 2, "use_beam_search": True, "n": 2}),
        ("embeddings", {"input": [words, "y"]}),
        ("responses", {"input": words, "max_output_tokens": 3}),
        ("messages", chat),
        ("chat/completions", chat | {"temperature": "hot"}),
        ("completions", {"prompt": words, "structured_outputs": {"regex": "("}}),
    ])  # fmt: skip


async def one(client: httpx.AsyncClient, dice: random.Random, leaves: float) -> int:
    """The status of a request; 0 where its client left in the middle."""
    route, body = some_request(dice)
    body = {"model": MODEL} | body
    if dice.random() < leaves:
        try:
            async with asyncio.timeout(dice.random() * 0.3), client.stream("POST", f"/v1/{route}", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass
        except TimeoutError:
            return 0
        return answer.status_code
    return (await client.post(f"/v1/{route}", json=body)).status_code


async def run(url: str, sequential: int, concurrent: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    limits = httpx.Limits(max_connections=concurrent)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        statuses = [await one(client, dice, leaves=0.1) for _ in range(sequential)]
        statuses += await asyncio.gather(*(one(client, dice, leaves=0.3) for _ in range(concurrent)))
    return statuses


def check(url: str, sequential: int, concurrent: int) -> None:
    statuses = asyncio.run(run(url, sequential, concurrent, seed=1))
    assert set(statuses) <= {0, 200, 400}, sorted(set(statuses))
    assert statuses.count(200) > 0.4 * len(statuses) and 0 in statuses
    assert_idle(url)  # a request whose client has left may still be on its way to the engine


def test_mixed_requests_leave_nothing_behind(url: str) -> None:
    """Nor has any of them loaded JAX, half a second and 100 MB, where the engine has a process of its own."""
    check(url, sequential=40, concurrent=60)
    if sys.platform == "linux":
        server = server_process(url)
        assert "jaxlib" in Path(f"/proc/{engine_process(server).pid}/maps").read_text()
        assert "jaxlib" not in Path(f"/proc/{server.pid}/maps").read_text()


def test_an_engine_that_dies_comes_back(url: str) -> None:
    """Its streams end with an error, requests get 503 meanwhile, and then answers again."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        events = answer.iter_lines()
        first = next(line for line in events if line and not line.startswith(":"))  # comments come while steps compile
        assert first.startswith("data: {")
        engine_process(server_process(url)).kill()
        last = [line for line in events if line][-2:]
    assert "engine_dead" in last[0] and last[1] == "data: [DONE]"
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, 120)
    again = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
    assert again.status_code == 200 and again.json()["usage"]["completion_tokens"] == 2


def test_a_hundred_tiny_requests_go_right_and_leave_nothing() -> None:
    found = mixed_requests.run(100, parts=1)
    assert not found.wrong, found.wrong[:5]
    assert found.seen["known", 200] and found.seen["completion", 200]


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_thousand_leave_memory_and_mappings_flat() -> None:
    """Caches fill, and every shape is compiled, while the first half is answered."""
    found = mixed_requests.run(100_000, parts=20)
    assert not found.wrong, found.wrong[:5]
    for before, after in zip(found.held[10], found.held[-1], strict=True):
        assert after.memory < 1.25 * before.memory
        assert after.mappings < 1.1 * before.mappings
        assert after.threads <= before.threads and after.files < before.files + 20
