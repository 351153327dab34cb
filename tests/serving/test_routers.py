"""Routers that others make, in front of two servers as they are. Each test needs its router's package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import wait_for
from tests.serving.mixed_requests import SETTINGS, write_model
from tests.serving.real_server import served
from tests.sharding.ports import free_port

ROUTERS = {"sglang_router": "sglang-router", "vllm_router": "vllm-router"}
"""Module -> what it is installed by."""
START_SECONDS = 60
TURNS, PREFIXES = 6, 3
"""Prefixes that take turns; an odd number, so that each meets both servers where these take turns as well."""


@pytest.fixture(scope="module", params=ROUTERS)
def router(request: pytest.FixtureRequest) -> str:
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: pip install {ROUTERS[request.param]}")
    return request.param


@pytest.fixture(scope="module")
def servers(router: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("routed")
    model = str(write_model(folder / "model"))
    own = SETTINGS | {"kv_cache_memory": "16MiB", "web": False}
    first = served(model, data_dir=str(folder / "a"), **own)
    second = served(model, data_dir=str(folder / "b"), **own)
    with first as one, second as other:
        yield [one, other]


@contextmanager
def routed(router: str, servers: list[str], policy: str, folder: Path) -> Iterator[openai.OpenAI]:
    port, metrics = free_port(), free_port()
    command = [
        sys.executable, "-m", f"{router}.launch_router", "--worker-urls", *servers, "--policy", policy,
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics),
    ]  # fmt: skip
    log = folder / f"{policy}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                return httpx.get(f"http://127.0.0.1:{port}/readiness").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(ready, START_SECONDS)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=60)
    finally:
        process.kill()
        process.wait()


def test_answers_are_those_of_a_server(router: str, servers: list[str], tmp_path: Path) -> None:
    asked: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    messages: Any = [{"role": "user", "content": "What is a page?"}]
    direct = openai.OpenAI(base_url=f"{servers[0]}/v1", api_key="-")
    chat = direct.chat.completions.create(messages=messages, **asked).choices[0].message.content
    text = direct.completions.create(prompt="A page is", **asked).choices[0].text
    assert chat and text
    with routed(router, servers, "round_robin", tmp_path) as client:
        for _ in servers:
            assert client.chat.completions.create(messages=messages, **asked).choices[0].message.content == chat
            assert client.completions.create(prompt="A page is", **asked).choices[0].text == text
            chunks = client.chat.completions.create(messages=messages, stream=True, **asked)
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            assert "".join(pieces) == chat and len(pieces) > 4
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(prompt="A page is", **asked | {"temperature": -1})


def hits(client: openai.OpenAI, salt: str) -> int:
    """Requests of prompts that begin alike, most of which was found in the prefix cache."""
    prefixes = [f"{salt} {number}: " + " ".join(map(str, range(30))) for number in range(PREFIXES)]
    found = 0
    for turn in range(TURNS):
        for prefix in prefixes:
            usage = client.completions.create(model="tiny", prompt=f"{prefix} {turn}", max_tokens=1).usage
            assert usage is not None and usage.prompt_tokens_details is not None
            found += (usage.prompt_tokens_details.cached_tokens or 0) > usage.prompt_tokens / 2
    return found


def test_prefixes_are_found_more_often_than_in_turn(router: str, servers: list[str], tmp_path: Path) -> None:
    with routed(router, servers, "cache_aware", tmp_path) as client:
        by_prefix = hits(client, "by prefix")
    with routed(router, servers, "round_robin", tmp_path) as client:
        in_turn = hits(client, "in turn")
    assert by_prefix == PREFIXES * (TURNS - 1), "all but the first of each"
    assert in_turn == PREFIXES * (TURNS - 2), "each server had to compute it once"
