"""What serving costs besides the engine: CPU of the API process, with many streams at a steady pace.

The engine is a stand-in in a process of its own that gives every stream a token at each of its steps; everything before
and behind it is the real server: HTTP, chat template, tokenizer, the pipe between the processes, chunks as events.

    python benchmarks/serving_cpu.py [--streams 64] [--steps-per-second 50] [--tokens 500] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

MODEL = "smollm2-135m"
LIMIT = 0.5
"""Cores for each 1,000 tokens a second that we hold ourselves to."""


class PacedCore:
    """Gives each request one token of a fixed text at every step, `steps_per_second` of them."""

    TEXT = ("", "The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog.")

    def __init__(self, steps_per_second: float):
        self._requests: dict[str, Any] = {}
        self._pace = 1 / steps_per_second
        self._next = time.perf_counter()
        self.on_prepared = lambda: None

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def load(self) -> tuple[int, int]:
        return len(self._requests), 0

    def add(self, message: Any) -> None:
        self._requests[message.request_id] = [0, message.sampling_params.max_tokens]

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def turn(self) -> list[Any]:
        from jaxllm.engine.messages import TokenDelta

        self._next = max(self._next + self._pace, time.perf_counter() - self._pace)
        time.sleep(max(self._next - time.perf_counter(), 0))
        deltas = []
        for request_id, progress in list(self._requests.items()):
            progress[0] += 1
            done = progress[0] >= progress[1]
            text = " " + self.TEXT[progress[0] % len(self.TEXT)]
            finish = "length" if done else None
            deltas.append(TokenDelta(request_id=request_id, token_ids=[1000], text=text, finish_reason=finish))
            if done:
                del self._requests[request_id]
        return deltas

    def stats(self) -> Any:
        from jaxllm.engine.messages import EngineStats

        return EngineStats(num_running=len(self._requests), ready=True)


def paced_engine(pipe: Connection, config: Any, log_level: int) -> None:
    """The process of the stand-in; the pace travels in config.seed."""
    from jaxllm.engine.front.engine_process import FrontDoor, Started, run_loop
    from jaxllm.engine.messages import EngineInfo

    info = EngineInfo(
        model_name=MODEL, vocab_size=49152, max_model_len=8192, eos_token_ids=[2], num_pages=1, page_size=16,
        max_num_seqs=256, max_num_batched_tokens=512,
    )  # fmt: skip
    front_door = FrontDoor(pipe)
    front_door.send(Started(info))
    run_loop(front_door, PacedCore(config.seed))  # type: ignore[arg-type]


def serve(port: int, steps_per_second: int) -> None:
    """The API process: the real server over the stand-in."""
    from jaxllm.config import ServeConfig
    from jaxllm.engine.front.async_llm import AsyncLLM
    from jaxllm.engine.front.process_client import ProcessClient
    from jaxllm.engine.start.tokenizer import resolve_tokenizer
    from jaxllm.serving.listener import bind
    from jaxllm.serving.registry import single_model
    from jaxllm.serving.server import run_server

    config = ServeConfig(model=MODEL, port=port, seed=steps_per_second, log_level="warning")
    engine = (ProcessClient(config, main=paced_engine), resolve_tokenizer(config))
    with mock.patch("jaxllm.engine.front.async_llm.start_engine", return_value=engine):
        llm = AsyncLLM(config)
    run_server(config.of_server, lambda: single_model(config, llm), bind(config.host, config.port))


async def read_stream(port: int, tokens: int, counts: list[int], at: int) -> None:
    """One client, cheaper than any SDK: it counts events and parses none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": tokens, "stream": True}
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    while chunk := await reader.read(65536):
        counts[at] += chunk.count(b"data: {")
    writer.close()


async def measure(port: int, pid: int, streams: int, tokens: int) -> dict[str, float]:
    """CPU seconds of process `pid` between the first tenth and the last tenth of the streams' events."""
    counts = [0] * streams
    readers = [asyncio.create_task(read_stream(port, tokens, counts, at)) for at in range(streams)]
    process, total = psutil.Process(pid), streams * tokens

    async def reach(share: float) -> tuple[float, float, int]:
        while sum(counts) < share * total:
            await asyncio.sleep(0.02)
        times = process.cpu_times()
        return time.perf_counter(), times.user + times.system, sum(counts)

    start, end = await reach(0.1), await reach(0.9)
    await asyncio.gather(*readers)
    seconds, cpu, events = (b - a for a, b in zip(start, end, strict=True))
    rate = events / seconds
    return {"tokens_per_second": rate, "cores": cpu / seconds, "cores_per_1000_tok_s": cpu / seconds / rate * 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps-per-second", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(args.port, args.steps_per_second))
    server.start()
    try:
        while not any(c.laddr and c.laddr.port == args.port for c in psutil.Process(server.pid).net_connections("tcp")):
            time.sleep(0.1)
        assert server.pid is not None
        figures = asyncio.run(measure(args.port, server.pid, args.streams, args.tokens))
    finally:
        server.terminate()
        server.join()
    print(
        f"{args.streams} streams: {figures['tokens_per_second']:.0f} tok/s, {figures['cores']:.2f} cores of API, "
        f"{figures['cores_per_1000_tok_s']:.2f} cores per 1,000 tok/s (limit {LIMIT})"
    )
    if args.json:
        args.json.write_text(json.dumps(vars(args) | figures, default=str, indent=2) + "\n")


if __name__ == "__main__":
    main()
