"""A stream goes on while other clients send large bodies of every shape to a server of a tiny model.

`python -m tests.serving.test_hostile` prints what sixteen clients with 10 MB a body do to it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.serving.mixed_requests import SETTINGS, write_model
from tests.serving.real_server import served, server_process
from tests.serving.test_shutdown import ROOT

CALM_SECONDS = 3.0
CHAT = '"messages": [{"role": "user", "content": "Hi"}]'
FORM = "multipart/form-data; boundary=x"
ANSWERS = (200, 400, 413, 503, 507)

Shape = tuple[str, str, bytes]
"""Path, content type, body."""


def shapes(size: int) -> list[Shape]:
    """About `size` bytes each: texts, and lists, objects and numbers without end, well-formed and not."""

    def many(entry: str, most: int = size) -> str:
        return ",".join([entry] * (min(size, most) // (len(entry) + 1)))

    text = "a bc" * (size // 4)
    ids = ",".join(str(number % 500) for number in range(min(size // 4, 1_000_000)))
    message = '{"role": "user", "content": "a bc"}'
    schema = '{"type": "object", "properties": {' + ",".join(f'"p{i}": {{}}' for i in range(size // 20)) + "}}"
    bodies = [
        ("tokenize", f'{{"prompt": "{text}"}}'),
        ("tokenize", f'{{"prompt": "{"a" * size}", "return_token_strs": true}}'),
        ("tokenize", f'{{"messages": [{many(message, 100_000)}]}}'),
        ("completions", f'{{"prompt": "{text}"}}'),
        ("completions", '{"prompt": "' + "\\u0041" * (size // 6) + '"}'),
        ("completions", f'{{"prompt": "{"世" * (size // 3)}"}}'),
        ("completions", f'{{"prompt": [{ids}]}}'),
        ("completions", f'{{"prompt": [{ids}'),
        ("completions", f'{{"prompt": [{many(f"[{chr(34)}a{chr(34)}]")}]}}'),
        ("completions", '{"prompt": "a", "logit_bias": {' + ",".join(f'"{i}": 1' for i in range(90_000)) + "}}"),
        ("completions", "{" + ",".join(f'"k{i}":1' for i in range(size // 12)) + "}"),
        ("completions", f'{{"prompt": "a", "{"k" * size}": 1}}'),
        ("completions", f'{{"prompt": "a", "stop": [{many(chr(34) + "a" + chr(34))}]}}'),
        ("chat/completions", f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'),
        ("chat/completions", f'{{"messages": [{many(message)}]}}'),
        ("chat/completions", f'{{{CHAT}, "metadata": {"[" * (size // 2)}{"]" * (size // 2)}}}'),
        ("chat/completions", f'{{{CHAT}, "response_format": {{"type": "json_schema", "json_schema": '
         f'{{"name": "a", "schema": {schema}}}}}}}'),
        ("chat/completions", f'{{{CHAT}, "chat_template": "{text}"}}'),
        ("responses", f'{{"input": "{text}"}}'),
        ("responses", f'{{"input": [{many(message)}]}}'),
        ("messages", f'{{"max_tokens": 3, "messages": [{many("{}")}]}}'),
        ("messages/count_tokens", f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'),
        ("embeddings", f'{{"input": "{text}", "truncate_prompt_tokens": 5}}'),
        ("embeddings", f'{{"input": [{many("[1.5]")}]}}'),
        ("embeddings", f'{{"input": [{ids}]}}'),
        ("embeddings", f'{{"input": [{many(chr(34) + "a" + chr(34))}]}}'),
        ("score", f'{{"text_1": "a", "text_2": [{many("1")}]}}'),
        ("rerank", f'{{"query": "{text}", "documents": ["a"]}}'),
        ("detokenize", f'{{"tokens": [{many("77", 4_000_000)}]}}'),
        ("detokenize", f'{{"tokens": [{many("1.5", 4_000_000)}]}}'),
        ("detokenize", f'{{"tokens": [{many("0.12345678901234567")}]}}'),
        ("conversations", f'{{"metadata": {{"a": "{text}"}}}}'),
        ("batches", f'{{"input_file_id": "{text}", "endpoint": "/v1/completions", "completion_window": "24h"}}'),
    ]  # fmt: skip
    part = '--x\r\nContent-Disposition: form-data; name="{}"; filename="a.jsonl"\r\n\r\n'
    fields = '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
    forms = [
        fields + "batch\r\n" + part.format("file") + "\r\n-" * (size // 3) + "\r\n--x--\r\n",
        fields + "a" * size,
        part.format("a" * size),
        part.format("a") * (size // 100),
    ]
    return [(f"/v1/{path}", "application/json", body.encode()) for path, body in bodies] + [
        ("/v1/files", FORM, form.encode()) for form in forms
    ]


@dataclass
class Watched:
    """What an honest client meets: seconds between its stream's events, and until /health answers."""

    gaps: list[float]
    health: list[float]

    def __str__(self) -> str:
        return f"stream {1000 * max(self.gaps):.0f} ms, /health {1000 * max(self.health):.0f} ms"


async def watch(url: str, until: asyncio.Future[str]) -> Watched:
    """Read a stream and ask for /health, again and again, until something is done, which says what went wrong."""
    watched = Watched([], [])
    body = {"prompt": "Hi", "stream": True, "max_tokens": 200, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def read() -> None:
            while True:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    last = 0.0
                    async for _ in answer.aiter_bytes():
                        now = time.perf_counter()
                        if last:
                            watched.gaps.append(now - last)
                        last = now

        async def probe() -> None:
            while True:
                started = time.perf_counter()
                assert (await client.get("/health")).status_code == 200
                watched.health.append(time.perf_counter() - started)
                await asyncio.sleep(0.01)

        await client.get("/health")  # imports what the client needs
        watchers = [asyncio.create_task(read()), asyncio.create_task(probe())]
        done, _ = await asyncio.wait([*watchers, until], return_when=asyncio.FIRST_COMPLETED)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        assert until in done, done
        assert not until.result(), until.result()
    return watched


async def before_and_during(url: str, clients: int, size: int) -> tuple[Watched, Watched]:
    async def calm() -> str:
        await asyncio.sleep(CALM_SECONDS)
        return ""

    async def storm() -> str:
        command = (sys.executable, "-m", __spec__.name, url, str(clients), str(size))
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        _, said = await process.communicate()
        return f"ended with {process.returncode}: {said.decode()[-3000:]}" if process.returncode else ""

    gc.collect()
    gc.freeze()  # else a collection of all that a test run holds is taken for the server's pause
    before = await watch(url, asyncio.ensure_future(calm()))
    return before, await watch(url, asyncio.ensure_future(storm()))


async def send_all(url: str, clients: int, size: int) -> None:
    """Every shape from four of sixteen clients; nothing but a success or a refusal may come back."""
    os.nice(10)  # clients have machines of their own
    sent = shapes(size)

    async def one(client: httpx.AsyncClient, first: int) -> None:
        for path, kind, body in (sent[first:] + sent[:first])[: len(sent) // 4]:
            try:
                answer = await client.post(path, content=body, headers={"Content-Type": kind})
            except httpx.NetworkError:
                continue  # refused, and closed, before all of it was sent
            assert answer.status_code in ANSWERS, (path, body[:80], answer.status_code, answer.text[:200])

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(one(client, number * len(sent) // clients) for number in range(clients)))


def measure(clients: int, size: int) -> tuple[Watched, Watched, int]:
    """What the honest client met before the others came and meanwhile, and the server's memory at its highest."""
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        with served(str(model), data_dir=str(Path(folder) / "data"), **SETTINGS) as url:
            httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
            before, during = asyncio.run(before_and_during(url, clients, size))
            status = Path(f"/proc/{server_process(url).pid}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    print(f"before: {before}; during: {during}; {peak / 2**20:.0f} MiB at most")
    return before, during, peak


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_bodies_stop_nobodys_stream() -> None:
    _, during, memory = measure(clients=4, size=2**20)
    assert max(during.gaps) < 1 and max(during.health) < 1 and memory < 2**30


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sixteen_clients_with_ten_megabytes_each_stop_nobodys_stream() -> None:
    before, during, memory = measure(clients=16, size=10 * 2**20)
    assert max(during.gaps) < max(before.gaps) + 0.1 and max(during.health) < 0.05 and memory < 2**30


if __name__ == "__main__":
    if len(sys.argv) == 4:
        asyncio.run(send_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    else:
        measure(16, 10 * 2**20)
