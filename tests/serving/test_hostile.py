"""A stream goes on while other clients send large bodies of every shape to a server of a tiny model.

`python -m tests.serving.test_hostile` prints what sixteen clients with 10 MB a body do to it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from dataclasses import dataclass
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.serving import large_bodies
from tests.serving.mixed_requests import SETTINGS, write_model
from tests.serving.real_server import served, server_process
from tests.serving.test_shutdown import ROOT

CALM_SECONDS = 3.0


@dataclass
class Watched:
    """What an honest client meets: seconds between its stream's events, and until /health answers."""

    gaps: list[float]
    health: list[float]

    def __str__(self) -> str:
        gap, health = (1000 * max(seen, default=nan) for seen in (self.gaps, self.health))
        return f"stream {gap:.0f} ms, /health {health:.0f} ms"


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


async def before_and_during(url: str, clients: int, size: int, closely: bool) -> tuple[Watched, Watched]:
    async def calm() -> str:
        await asyncio.sleep(CALM_SECONDS if closely else 0.5)
        return ""

    async def storm() -> str:  # with less than the server's share of this machine: other clients have their own
        command = ("nice", sys.executable, "-m", large_bodies.__name__, url, str(clients), str(size))
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        _, said = await process.communicate()
        return f"ended with {process.returncode}: {said.decode()[-3000:]}" if process.returncode else ""

    gc.collect()
    gc.freeze()  # else a collection of all that a test run holds is taken for the server's pause
    before = await watch(url, asyncio.ensure_future(calm()))
    return before, await watch(url, asyncio.ensure_future(storm()))


def measure(clients: int, size: int, *, closely: bool = True) -> tuple[Watched, Watched, int]:
    """What the honest client met before the others came and meanwhile, and the server's memory at its highest.

    `closely` is for bounds of a few milliseconds: it takes longer.
    """
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        with served(str(model), data_dir=str(Path(folder) / "data"), **SETTINGS) as url:
            httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
            before, during = asyncio.run(before_and_during(url, clients, size, closely))
            status = Path(f"/proc/{server_process(url).pid}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    print(f"before: {before}; during: {during}; {peak / 2**20:.0f} MiB at most")
    return before, during, peak


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_bodies_stop_nobodys_stream() -> None:
    _, during, memory = measure(clients=4, size=2**20, closely=False)
    assert max(during.gaps) < 1 and max(during.health) < 1 and memory < 2**30


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sixteen_clients_with_ten_megabytes_each_stop_nobodys_stream() -> None:
    before, during, memory = measure(clients=16, size=10 * 2**20)
    assert max(during.gaps) < max(before.gaps) + 0.1 and max(during.health) < 0.05 and memory < 2**30


if __name__ == "__main__":
    measure(16, 10 * 2**20)
