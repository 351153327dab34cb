"""Requests of every kind, 64 at a time, some of whose clients go away, to a server of a tiny random model.

`python -m tests.serving.mixed_requests 100000` sends as many and prints what came of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tests.reference import load_golden
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config
from tests.serving.real_server import assert_idle, engine_process, served, server_process

CONCURRENCY = 64
VOCABULARY = Path(__file__).with_name("vocabulary.json")
"""Tokens that were learnt once from this project's documentation: what random models say depends on them."""
VOCAB_SIZE = 512
SETTINGS: dict[str, Any] = {
    "max_model_len": 256, "max_num_seqs": 48, "max_num_batched_tokens": 128, "kv_cache_memory": "4MiB",
    "served_model_name": "tiny",
}  # fmt: skip
"""Pages for a fifth of what may run: requests are preempted all the time."""
DOCUMENTED = {200, 400, 404, 409, 413, 415, 422, 429}
"""No request here may meet another status: none of them stops the server or fills its disk."""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
GRAMMARS: list[dict[str, Any]] = [
    {"json": SCHEMA}, {"regex": "[a-c]{2,9}x"}, {"choice": ["yes", "no", "perhaps"]}, {"json_object": True},
    {"grammar": 'start: ("a" | "b" "c")+ "."'}, {"grammar": 'root ::= "(" root ")" | "x"'},
]  # fmt: skip
WORDS = ("one", "two", "three", "tokens", "the engine's pages", "世界", "🤖", "a\n\n", "</s>", "0123456789")

Body = dict[str, Any]


def write_model(directory: Path, name: str = "llama_gqa", **fields: Any) -> Path:
    """A random model, by default a Llama, with the tokens of VOCABULARY and a chat template.

    `fields` are of its config.json.
    """
    config = tiny_config(name)
    there = config["vocab_size"]
    shapes = {
        tensor: tuple(VOCAB_SIZE if size == there else size for size in shape)
        for tensor, shape in load_golden(name).tensor_shapes.items()
    }
    save_checkpoint(config | {"vocab_size": VOCAB_SIZE} | fields, draw_weights(name, shapes), directory)
    shutil.copy(VOCABULARY, directory / "tokenizer.json")
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def words(dice: random.Random, most: int) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randrange(1, most)))


def completion(dice: random.Random) -> Body:
    """Any completion; what goes together is drawn together."""
    body: Body = {"prompt": words(dice, 30), "max_tokens": dice.randrange(1, 12)}
    if dice.random() < 0.3:
        body["prompt"] = [dice.randrange(VOCAB_SIZE) for _ in range(dice.randrange(1, 200))]
    elif dice.random() < 0.2:
        body["prompt"] = [words(dice, 9) for _ in range(dice.randrange(1, 5))]
    some: list[Body] = [
        {"n": dice.randrange(1, 5)},
        {"n": 2, "best_of": 4},
        {"logprobs": dice.randrange(0, 6)},
        {"prompt_logprobs": dice.choice([-1, 0, 3])},
        {"echo": True, "logprobs": 2},
        {"logprobs": 1, "logprob_token_ids": [1, 7, 400]},
        {"temperature": 0},
        {"temperature": 1.5, "top_p": 0.8, "seed": dice.randrange(99)},
        {"top_k": 5, "min_p": 0.1},
        {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.2},
        {"repeat_last_n": dice.randrange(-1, 9), "frequency_penalty": 0.5},
        {"logit_bias": {str(dice.randrange(VOCAB_SIZE)): dice.randrange(-100, 100)}},
        {"stop": ["a", "世"]},
        {"stop_token_ids": [3, 4], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [20, 30, 40, 50]},
        {"bad_words": ["the", "e"]},
        {"priority": dice.randrange(-5, 5), "cache_salt": dice.choice("ab")},
        {"truncate_prompt_tokens": dice.randrange(1, 50)},
        {"structured_outputs": dice.choice(GRAMMARS), "max_tokens": 30},
    ]
    for extra in dice.sample(some, dice.randrange(0, 4)):
        body |= extra
    if dice.random() < 0.1:
        body = {"prompt": words(dice, 9), "max_tokens": 5, "use_beam_search": True, "n": dice.randrange(1, 4)}
    return body | {"stream": dice.random() < 0.4}


def chat(dice: random.Random) -> Body:
    turns = [{"role": role, "content": words(dice, 9)} for role in ("user", "assistant", "user")[: dice.choice([1, 3])]]
    body: Body = {"messages": turns, "max_tokens": dice.randrange(1, 12), "stream": dice.random() < 0.5}
    some: list[Body] = [
        {"n": 3},
        {"logprobs": True, "top_logprobs": dice.randrange(0, 5)},
        {"tools": TOOLS, "tool_choice": dice.choice(["auto", "required", "none"]), "max_tokens": 40},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 40},
        {"structured_outputs": dice.choice(GRAMMARS), "max_tokens": 30},
        {"temperature": 0, "seed": 4},
        {"chat_template": "{{ messages[0].content }}"},
        {"chat_template": "{% for a in range(10**6) %}{{ a }}{% endfor %}"},
    ]
    for extra in dice.sample(some, dice.choice([0, 0, 1, 1, 2])):
        body |= extra
    return body


def broken(dice: random.Random) -> tuple[str, Body]:
    """What must be refused."""
    return dice.choice([
        ("completions", {"prompt": "a", "temperature": "hot"}),
        ("completions", {"prompt": "a", "structured_outputs": {"regex": "("}}),
        ("completions", {"prompt": "a", "structured_outputs": {"json": {"minimum": 10**30}}}),
        ("completions", {"prompt": [VOCAB_SIZE]}),
        ("completions", {"prompt": "a", "prompt_logprobs": 10**9}),
        ("completions", {"prompt": "a " * 5000}),
        ("completions", {"prompt": "a", "repeat_last_n": 2**31}),
        ("completions", {"prompt": "a", "frobnicate": 1}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 +"}),
        ("embeddings", {"input": [[1.5]] * 50}),
        ("detokenize", {"tokens": [10**20]}),
    ])  # fmt: skip


def pooled(dice: random.Random) -> tuple[str, Body]:
    texts = [words(dice, 9) for _ in range(dice.randrange(1, 6))]
    return dice.choice([
        ("embeddings", {"input": texts, "dimensions": 8}),
        ("embeddings", {"input": texts, "encoding_format": "base64"}),
        ("embeddings", {"input": [[1, 2, 3], [4]]}),
        ("pooling", {"input": texts}),
        ("score", {"text_1": words(dice, 5), "text_2": texts}),
        ("rerank", {"query": words(dice, 5), "documents": texts, "top_n": 2}),
    ])  # fmt: skip


def other(dice: random.Random) -> tuple[str, Body]:
    said = words(dice, 9)
    return dice.choice([
        ("tokenize", {"prompt": said}),
        ("detokenize", {"tokens": [dice.randrange(VOCAB_SIZE) for _ in range(20)]}),
        ("messages", {"messages": [{"role": "user", "content": said}], "max_tokens": 4, "stream": dice.random() < 0.5}),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": said}]}),
        ("responses", {"input": said, "max_output_tokens": 4, "stream": dice.random() < 0.5, "store": False}),
        ("chat/completions/render", {"messages": [{"role": "user", "content": said}]}),
    ])  # fmt: skip


@dataclass
class Client:
    """One of those who send; its dice are its own, so that the same seed sends the same."""

    http: httpx.AsyncClient
    dice: random.Random
    seen: Counter[tuple[str, int]]
    """What came back, by kind and status; 0 where the client left."""
    known: dict[int, str]
    """What a request gives that runs alone."""
    wrong: list[str] = field(default_factory=list)

    async def one(self) -> None:
        kinds: dict[str, tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = {
            "completion": (36, lambda: self._posted("completion", "completions", completion(self.dice))),
            "chat": (24, lambda: self._posted("chat", "chat/completions", chat(self.dice))),
            "pooled": (12, lambda: self._posted("pooled", *pooled(self.dice))),
            "other": (12, lambda: self._posted("other", *other(self.dice))),
            "broken": (8, lambda: self._posted("broken", *broken(self.dice))),
            "known": (7, self._known),
            "batch": (1, self._batch),
        }
        weights = [weight for weight, _ in kinds.values()]
        (kind,) = self.dice.choices(list(kinds), weights)
        await kinds[kind][1]()

    async def _posted(self, kind: str, route: str, body: Body) -> None:
        leaves = self.dice.random() < 0.15
        patience = self.dice.random() * self.dice.choice([0.02, 0.2, 1])
        try:
            async with (
                asyncio.timeout(patience if leaves else 120),
                self.http.stream("POST", f"/v1/{route}", json=body) as answer,
            ):
                text = (await answer.aread()).decode()
        except TimeoutError:
            self._saw(kind, 0 if leaves else 599, f"{route} {body}: no answer within two minutes")
            return
        self._saw(kind, answer.status_code, f"{route} {body}: {text}")
        if kind == "broken" and answer.status_code == 200:
            self.wrong.append(f"{route} {body}: accepted")
        if '"type":"server_error"' in text and answer.status_code == 200:
            self.wrong.append(f"{route} {body}: {text[-300:]}")

    async def _known(self) -> None:
        seed = self.dice.randrange(10)
        text = await greedy(self.http, seed)
        self._saw("known", 200, "")
        if text != self.known.setdefault(seed, text):
            self.wrong.append(f"prompt {seed}: {text!r} and not {self.known[seed]!r} as alone")

    async def _batch(self) -> None:
        """A file of requests, some of them wrong, run as a batch, which half of the clients call off."""
        bodies = [completion(self.dice) | {"stream": False} for _ in range(self.dice.randrange(1, 8))]
        lines = [
            json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body})
            for at, body in enumerate([*bodies, {"prompt": "a", "temperature": -1}])
        ]
        upload = {"file": ("lines.jsonl", "\n".join(lines).encode())}
        file = await self._json("POST", "/v1/files", data={"purpose": "batch"}, files=upload)
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await self._json("POST", "/v1/batches", json=asked)
        if self.dice.random() < 0.5:
            await asyncio.sleep(self.dice.random() * 0.3)
            await self._json("POST", f"/v1/batches/{batch['id']}/cancel", accepted=(200, 400))  # it may have ended
        while batch["status"] not in ("completed", "cancelled", "failed"):
            await asyncio.sleep(0.2)
            batch = await self._json("GET", f"/v1/batches/{batch['id']}")
        counts = batch["request_counts"]
        if batch["status"] != "cancelled" and (counts["total"] != len(lines) or not counts["failed"]):
            self.wrong.append(f"{batch}")
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch[name] is not None:
                await self._json("DELETE", f"/v1/files/{batch[name]}")

    async def _json(self, method: str, path: str, accepted: tuple[int, ...] = (200,), **what: Any) -> Any:
        answer = await self.http.request(method, path, **what)
        self._saw("batch", answer.status_code, f"{method} {path}: {answer.text}")
        if answer.status_code not in accepted:
            self.wrong.append(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json()

    def _saw(self, kind: str, status: int, what: str) -> None:
        self.seen[kind, status] += 1
        if status and status not in DOCUMENTED:
            self.wrong.append(f"{status}: {what[:1000]}")


async def greedy(http: httpx.AsyncClient, seed: int) -> str:
    """A text that nothing else should change."""
    prompt = np.random.default_rng(seed).integers(5, VOCAB_SIZE, 20 + 10 * seed).tolist()
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


@dataclass
class Held:
    """What a process of the server has."""

    memory: int
    mappings: int
    threads: int
    files: int

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        maps = Path(f"/proc/{process.pid}/maps").read_text().count("\n")
        return cls(process.memory_info().rss, maps, process.num_threads(), process.num_fds())

    def __str__(self) -> str:
        return f"{self.memory / 2**20:.0f} MiB, {self.mappings} mappings, {self.threads} threads, {self.files} files"


@dataclass
class Findings:
    """What came of a run; `held` by the server and its engine after each of its parts."""

    seen: Counter[tuple[str, int]]
    wrong: list[str]
    held: list[tuple[Held, Held]]


async def send(url: str, count: int, seed: int, known: dict[int, str]) -> tuple[Counter[tuple[str, int]], list[str]]:
    """Send `count` requests; returns what came back, and what should not have."""
    seen: Counter[tuple[str, int]] = Counter()
    wrong: list[str] = []
    left = iter(range(count))
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        for prompt in range(10 if not known else 0):
            known[prompt] = await greedy(http, prompt)

        async def work(number: int) -> None:
            client = Client(http, random.Random(f"{seed} {number}"), seen, known, wrong)
            for _ in left:
                await client.one()

        await asyncio.gather(*(work(number) for number in range(CONCURRENCY)))
    return seen, wrong


def run(count: int, parts: int, report: Callable[[str], None] = print) -> Findings:
    """Send a server `count` requests in `parts`, after each of which nothing runs and every page is free."""
    found, known = Findings(Counter(), [], []), dict[int, str]()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        with served(str(model), data_dir=str(Path(folder) / "data"), **SETTINGS) as url:
            server = server_process(url)
            engine = engine_process(server)
            for part in range(parts):
                began = time.monotonic()
                seen, wrong = asyncio.run(send(url, count // parts, part, known))
                found.seen += seen
                found.wrong += wrong
                assert_idle(url)
                found.held.append((Held.by(server), Held.by(engine)))
                rate = count // parts / (time.monotonic() - began)
                report(
                    f"{part + 1}/{parts}: {rate:.0f} a second; server {found.held[-1][0]}; engine {found.held[-1][1]}"
                )
                for line in wrong[:10]:
                    report(line)
    return found


def main() -> None:
    count = int(sys.argv[1])
    found = run(count, max(1, min(20, count // 500)), lambda line: print(line, flush=True))
    for (kind, status), times in sorted(found.seen.items()):
        print(f"{kind} {status}: {times}")
    sys.exit(f"{len(found.wrong)} answers were wrong" if found.wrong else 0)


if __name__ == "__main__":
    main()
