"""Two models take turns in one place, each with an engine process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.reference import load_golden
from tests.reference.tiny import tiny_prompt, write_checkpoint
from tests.serving.real_server import engine_process, served, server_process

pytestmark = pytest.mark.programs

TINY = ("llama_gqa", "qwen3")
REAL = ("smollm2-135m", "gemma3-270m")
PROMPT = "The capital of France is"
SWITCHES = 50
GROWTH = 24
"""MiB that the server's own process may have grown by in half of the switches."""


@contextmanager
def asking(url: str) -> Iterator[openai.OpenAI]:
    """A client that comes again while the server says that it is at capacity."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1000, timeout=300) as client:
        yield client


def test_two_models_take_turns(tmp_path: Path) -> None:
    for name in TINY:
        write_checkpoint(name, tmp_path / "models" / name)
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 96, "kv_cache_memory": "8MiB"}
    folders = {"model_directory": str(tmp_path / "models"), "data_dir": str(tmp_path / "data")}
    with served(None, **folders, **settings) as url, asking(url) as client:
        server = server_process(url)
        assert httpx.get(f"{url}/ready").status_code == 200
        assert not engines(server)
        seen = set()
        for name in (*TINY, TINY[0]):
            answer = client.completions.create(
                model=name, prompt=tiny_prompt(name), max_tokens=8, temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )  # fmt: skip
            assert answer.choices[0].model_dump()["token_ids"] == load_golden(name).greedy_token_ids[:8]
            seen.add(engine_process(server).pid)  # there is one: the other model's has ended
        assert len(seen) == 3


def engines(server: psutil.Process) -> list[psutil.Process]:
    return [child for child in server.children() if "own_process import enter" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_fifty_switches_lose_no_request_and_no_memory(tmp_path: Path) -> None:
    """Each begins while the other model still answers, and four requests wait for it."""
    file = tmp_path / "models.yaml"
    file.write_text("".join(f"{name}: {{model: {name}}}\n" for name in REAL))
    held: list[int] = []
    with (
        served(None, models=str(file), data_dir=str(tmp_path / "data")) as url,
        asking(url) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        server = server_process(url)
        said: dict[str, set[str]] = {name: set() for name in REAL}

        def ask(name: str, tokens: int = 8) -> None:
            answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=tokens, temperature=0)
            assert answer.usage is not None and answer.usage.completion_tokens > 0
            said[name].add(answer.choices[0].text[:10])

        answering: list[Any] = []
        for number in range(SWITCHES):
            name = REAL[number % 2]
            arrived = [pool.submit(ask, name) for _ in range(4)]
            for one in (*answering, *arrived):
                one.result(300)
            assert len(engines(server)) == 1
            held.append(server.memory_info().rss // 2**20)
            answering = [pool.submit(ask, name, 64) for _ in range(2)]
        for one in answering:
            one.result(300)
        assert all(len(texts) == 1 for texts in said.values())  # the same answer each time
        finished = {name: count(url, name) for name in REAL}
        assert finished == dict.fromkeys(REAL, SWITCHES // 2 * 6)
    half = SWITCHES // 2
    assert max(held[half:]) < max(held[:half]) + GROWTH, held


def count(url: str, name: str) -> int:
    """Sequences that finished, over all engines that a model has had."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    mine = [line for line in lines if line.startswith("jaxllm:request_success_total") and f'"{name}"' in line]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in mine)
