"""A stream goes on while other clients send large bodies of every shape. The engine is the fake one, in a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from tests.serving import fake_engine
from tests.serving.test_shutdown import ROOT

CHAT = '"messages": [{"role": "user", "content": "Hi"}]'
DELAY = 0.02


def bodies(size: int) -> list[tuple[str, bytes]]:
    """About `size` bytes each: texts, and lists, objects and numbers without end."""

    def many(entry: str) -> str:
        return ",".join([entry] * (size // (len(entry) + 1)))

    text = "a bc" * (size // 4)
    shapes = [
        ("/tokenize", f'{{"prompt": "{text}"}}'),
        ("/v1/completions", f'{{"prompt": "{text}"}}'),
        ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'),
        ("/v1/embeddings", f'{{"input": "{text}", "truncate_prompt_tokens": 5}}'),
        ("/detokenize", f'{{"tokens": [{many("77")}]}}'),
        ("/detokenize", f'{{"tokens": [{many("1.5")}]}}'),
        ("/v1/messages", f'{{"max_tokens": 3, "messages": [{many("{}")}]}}'),
        ("/v1/completions", "{" + ",".join(f'"k{i}":1' for i in range(size // 12)) + "}"),
        ("/v1/embeddings", f'{{"input": [{many("[1.5]")}]}}'),
        ("/v1/score", f'{{"text_1": "a", "text_2": [{many("1")}]}}'),
        ("/v1/chat/completions", f'{{{CHAT}, "metadata": {"[" * (size // 2)}{"]" * (size // 2)}}}'),
    ]
    return [(path, body.encode()) for path, body in shapes]


async def worst_gaps(url: str, clients: int, size: int) -> tuple[float, float]:
    """The longest wait for a token of a running stream and for /health, in seconds, while `clients` send."""
    waits: list[float] = []
    probes: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def read() -> None:
            body = {"prompt": "Hi", "stream": True, "max_tokens": 200}
            while True:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    last = time.perf_counter()
                    async for _ in answer.aiter_bytes():
                        now = time.perf_counter()
                        waits.append(now - last)
                        last = now

        async def probe() -> None:
            while True:
                started = time.perf_counter()
                assert (await client.get("/health")).status_code == 200
                probes.append(time.perf_counter() - started)
                await asyncio.sleep(0.01)

        watchers = [asyncio.create_task(read()), asyncio.create_task(probe())]
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, url, str(clients), str(size), cwd=ROOT
        )
        assert await sender.wait() == 0
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    assert len(waits) > 10 and len(probes) > 10
    return max(waits), max(probes)


async def send_all(url: str, clients: int, size: int) -> None:
    """Every shape from every client; nothing but a success or a refusal may come back."""
    shapes = bodies(size)

    async def one(client: httpx.AsyncClient, first: int) -> None:
        for path, body in shapes[first:] + shapes[:first]:
            answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (200, 400, 503), (path, answer.status_code)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(one(client, number % len(shapes)) for number in range(clients)))


def measure(clients: int, size: int) -> tuple[float, float, int]:
    command = [sys.executable, "-m", fake_engine.__name__, "0", str(DELAY), "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" on ")[1].split("/v1")[0]
        gap, health = asyncio.run(worst_gaps(url, clients, size))
        peak = psutil.Process(process.pid).memory_info().rss
    finally:
        process.kill()
        process.communicate()
    print(f"stream {1000 * gap:.0f} ms, /health {1000 * health:.0f} ms, {peak / 2**20:.0f} MiB")
    return gap, health, peak


def test_large_bodies_stop_nobodys_stream() -> None:
    gap, health, memory = measure(clients=4, size=2 * 2**20)
    assert gap < 1 and health < 1 and memory < 2**30


@pytest.mark.slow
def test_sixteen_clients_with_ten_megabytes_each_stop_nobodys_stream() -> None:
    gap, health, memory = measure(clients=16, size=10 * 2**20)
    assert gap < DELAY + 0.1 and health < 0.05 and memory < 2**30


if __name__ == "__main__":
    asyncio.run(send_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
