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
from pathlib import Path
from unittest import mock

import psutil
from paced_engine import MODEL, paced_engine

LIMIT = 0.5
"""Cores for each 1,000 tokens a second that we hold ourselves to."""


def serve(port: int, steps_per_second: int) -> None:
    """The API process: the real server over the stand-in."""
    from jaxllm.config import ServeConfig
    from jaxllm.engine.doors.async_llm import AsyncLLM
    from jaxllm.engine.doors.process_client import ProcessClient
    from jaxllm.engine.start.tokenizer import resolve_tokenizer
    from jaxllm.serving.http.listening import bind
    from jaxllm.serving.served_model import LoadableModel, ServedModel
    from jaxllm.serving.server import run_server
    from jaxllm.serving.state import Registry

    config = ServeConfig(model=MODEL, port=port, seed=steps_per_second, log_level="warning")
    engine = (ProcessClient(config, main=paced_engine), resolve_tokenizer(config))
    with mock.patch("jaxllm.engine.doors.async_llm.start_engine", return_value=engine):
        llm = AsyncLLM(config)
    models = Registry([LoadableModel.loaded(ServedModel(config.of_model, llm))])
    run_server(config.of_server, lambda: models, bind(config.host, config.port))


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
