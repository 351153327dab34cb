"""What the engine's process holds of a server under a mixed load: beside the plan, by kind, when ready and after.

    python benchmarks/memory.py [--model smollm2-135m] [--clients 16] [--seconds 120] [--idle 30]

Linux only: kinds are read from /proc. Writes a table for benchmarks/results/memory.md to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from machine import describe_machine

from jaxllm.config.values import format_bytes
from jaxllm.sharding.wire import free_port

ARENA = 64 * 2**20
"""glibc's heaps but the first begin at multiples of this."""
WORDS = ("the", "a", "river", "engine", "of", "pages", "memory", "and", "holds", "writes", "under", "seven", "lamps")
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
EXTRAS: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"n": 2}, {"logprobs": True, "top_logprobs": 5}, {"presence_penalty": 1.0},
    {"top_p": 0.8, "seed": 7}, {"stop": ["."]}, {"logit_bias": {"50": 3}}, {"min_p": 0.1},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    {"structured_outputs": {"regex": "[a-z ]{5,40}"}},
]  # fmt: skip


def body_of(dice: random.Random) -> dict[str, Any]:
    """A chat of 10 to 2,000 words, whose beginning is one of eight, with any of the sampling fields."""
    opening = " ".join(random.Random(dice.randrange(8)).choices(WORDS, k=200))
    text = " ".join(dice.choices(WORDS, k=int(10 * 200 ** dice.random())))
    messages = [{"role": "system", "content": opening}, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": dice.choice([8, 32, 128, 256]), "stream": dice.random() < 0.5}
    return body | dice.choice(EXTRAS)


async def client(url: str, number: int, until: float, answers: Counter[int]) -> None:
    dice = random.Random(number)
    async with httpx.AsyncClient(timeout=600) as http:
        while time.monotonic() < until:
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body_of(dice)) as answer:
                async for _ in answer.aiter_bytes():
                    pass
            answers[answer.status_code] += 1


async def load(url: str, clients: int, seconds: float) -> Counter[int]:
    """The number of answers by their status."""
    answers: Counter[int] = Counter()
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(url, number, until, answers) for number in range(clients)))
    return answers


def is_heap(first: int, last: int, after: str) -> bool:
    """One of a thread, or several of one beside each other: what is not in use of the last is reserved after it."""
    _, end = (int(side, 16) for side in after.split()[0].split("-"))
    return first % ARENA == 0 and (last % ARENA == 0 or (after.split()[1] == "---p" and end % ARENA == 0))


def kinds(pid: int) -> Counter[str]:
    """Resident bytes of a process, by what they are."""
    found: Counter[str] = Counter()
    text = Path(f"/proc/{pid}/smaps").read_text()
    blocks = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)
    for block, after in zip(blocks, [*blocks[1:], "0-0 none"], strict=True):
        head, *rest = block.splitlines()
        place, rights, _, _, _, *name = head.split(maxsplit=5)
        first, last = (int(side, 16) for side in place.split("-"))
        rss = next(int(line.split()[1]) for line in rest if line.startswith("Rss:")) * 1024
        if name and name[0] == "[heap]":
            kind = "first heap"
        elif name and name[0].startswith("/"):
            kind = "files: libraries, the model"
        elif "x" in rights:
            kind = "compiled code"
        elif is_heap(first, last, after):
            kind = "heaps of threads"
        else:
            kind = "large blocks: weights, KV cache, a step's own"
        found[kind] += rss
    return found


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if line.startswith("jaxllm:") and "_bucket" not in line)
    return {name.partition("{")[0].removeprefix("jaxllm:"): float(value) for name, value in rows}


def engine_of(server: int) -> int:
    """The child that holds most: the others compile, or render templates."""
    return max(psutil.Process(server).children(), key=lambda child: child.memory_info().rss).pid


def wait(url: str, seconds: float = 300) -> None:
    """Until the server is ready, and nothing is compiled any more."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health").status_code == 200 and not metrics(url).get("compiles_pending", 1):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"the server was not ready within {seconds:.0f} s")


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Counter[str]], Counter[int], int]:
    """Bytes by moment and kind, the answers, and what /metrics says that the process holds in the end."""
    url = f"http://127.0.0.1:{arguments.port}"
    command = [sys.executable, "-m", "jaxllm", "serve", arguments.model, "--port", str(arguments.port)]
    server = subprocess.Popen([*command, *arguments.serve], stdout=subprocess.DEVNULL)
    try:
        wait(url)
        engine, found = engine_of(server.pid), {}
        time.sleep(1)  # what compiling has freed is given back
        found["ready"] = kinds(engine)
        answers = asyncio.run(load(url, arguments.clients, arguments.seconds))
        found["after load"] = kinds(engine)
        time.sleep(arguments.idle)
        found["after idle"] = kinds(engine)
        return found, answers, int(metrics(url)["engine_resident_memory_bytes"])
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--idle", type=float, default=30)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="flags of jaxllm serve and plan, after --")
    arguments = parser.parse_args()
    arguments.port = arguments.port or free_port()
    plan = json.loads(
        subprocess.run(
            [sys.executable, "-m", "jaxllm", "plan", arguments.model, "--json", *arguments.serve],
            check=True, capture_output=True, text=True,
        ).stdout
    )  # fmt: skip
    found, answers, told = measure(arguments)
    about = describe_machine()
    print(
        f"{arguments.model} on {about['processor']}, {about['cores']} cores, {about['date']}: {dict(answers)} answers"
    )
    parts = {name: plan[f"{name}_bytes"] for name in ("weight", "kv", "workspace")}
    print("plan:", ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items()), end=", ")
    print(f"{format_bytes(sum(parts.values()))} together; /metrics after: {format_bytes(told)}\n")
    print(f"| MiB | {' | '.join(found)} |\n|---|{'---:|' * len(found)}")
    for kind in sorted({kind for moment in found.values() for kind in moment}):
        print(f"| {kind} | {' | '.join(f'{moment[kind] / 2**20:,.0f}' for moment in found.values())} |")
    print(f"| together | {' | '.join(f'{moment.total() / 2**20:,.0f}' for moment in found.values())} |")


if __name__ == "__main__":
    main()
