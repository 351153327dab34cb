"""How long a quiet API key waits for its first token while another key floods the server.

    python benchmarks/fairness.py [smollm2-135m] [--flood 48] [--requests 20] [-- FLAGS OF jaxllm serve]

Starts a server with a file of two keys. `quiet` sends one short request after another, with pauses: first alone, then
while `flood` has that many requests under way all the time, each with a long prompt of its own and an answer of 128
tokens. As a comparison `flood` then sends the same, which waits behind its own requests: what everybody would have to
expect if keys did not take turns. Times are from sending a request to the first text of its stream, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from jaxllm.serving.access.keys import hash_of, new_key

WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
QUIET_WORDS, FLOOD_WORDS = 30, 500
QUIET_TOKENS, FLOOD_TOKENS = 8, 128
PAUSE_SECONDS = 0.3
SETTLE_SECONDS = 5.0
"""How long the flood runs before anything is measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--flood", type=int, default=48, help="requests that the flood has under way")
    parser.add_argument("--requests", type=int, default=20, help="requests that are timed in each part")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, flags = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    keys = {name: new_key() for name in ("quiet", "flood")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.yaml"
        file.write_text("".join(f'{name}: {{hash: "{hash_of(key)}"}}\n' for name, key in keys.items()))
        command = [sys.executable, "-m", "jaxllm.cli.main", "serve", given.model, "--port", "0", *flags]
        command += ["--api-key-file", str(file), "--data-dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                announced = re.search(r"http://[\d.:]+", server.stdout.readline())
                assert announced, "the server did not start"
                asyncio.run(measure(announced.group(), keys, given.flood, given.requests))
            finally:
                server.terminate()


async def measure(url: str, keys: dict[str, str], flood: int, count: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=None, limits=limits) as client:
        while not re.search(r"^jaxllm:compiles_pending\{.*\} 0\.0$", (await client.get(f"{url}/metrics")).text, re.M):
            await asyncio.sleep(0.5)
        await timed(client, keys["quiet"], 3)  # what is compiled or read for the first time
        alone = await timed(client, keys["quiet"], count)
        async with flooded(client, keys["flood"], flood):
            beside = await timed(client, keys["quiet"], count)
            behind = await timed(client, keys["flood"], min(count, 5))
    print("| ms to the first token | median | 90% | longest |")
    print("|---|---:|---:|---:|")
    for what, seconds in (("alone", alone), ("while another key floods", beside), ("of the key that floods", behind)):
        print(f"| {what} | {' | '.join(f'{value * 1e3:.0f}' for value in summary(seconds))} |")
    print(json.dumps({"alone": alone, "beside": beside, "behind": behind, "flood": flood}), file=sys.stderr)


def summary(seconds: list[float]) -> tuple[float, float, float]:
    """Median, nine tenths, and the longest."""
    ranked = sorted(seconds)
    return statistics.median(ranked), ranked[int(0.9 * (len(ranked) - 1))], ranked[-1]


async def timed(client: httpx.AsyncClient, key: str, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(await first_token(client, key, QUIET_WORDS, QUIET_TOKENS))
        await asyncio.sleep(PAUSE_SECONDS * (0.5 + random.random()))
    return found


@asynccontextmanager
async def flooded(client: httpx.AsyncClient, key: str, count: int) -> AsyncIterator[None]:
    """While so many requests of a key are under way; each that ends is followed by another."""

    async def again_and_again() -> None:
        while True:
            await first_token(client, key, FLOOD_WORDS, FLOOD_TOKENS)

    tasks = [asyncio.create_task(again_and_again()) for _ in range(count)]
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_token(client: httpx.AsyncClient, key: str, words: int, tokens: int) -> float:
    """Seconds until the first text of an answer, which is then read to its end; no prompt begins as another."""
    prompt = f"{secrets.token_hex(8)} {' '.join(random.choices(WORDS, k=words))}"
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    began, first = time.perf_counter(), 0.0
    headers = {"Authorization": f"Bearer {key}"}
    async with client.stream("POST", "/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter() - began
    return first


if __name__ == "__main__":
    main()
