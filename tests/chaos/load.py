"""Clients that ask all the while, and know what they must be answered."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.chaos.victim import PATIENCE, Victim

PROMPTS = [f"The {word} of" for word in ("capital", "model", "cache", "server", "token", "page", "step", "file")]
MOST_TOKENS = 24
MAY_FAIL = {"engine_dead", "loading", "queue_full", "shutting_down", "model_failed"}
"""Codes of errors that say: it was not your fault, come again."""
TWICE = "the engine died 2 times while it ran this request"
"""What is said to a request that seems to kill engines, as one that was there twice by chance does."""


class Wrong(AssertionError):
    """An answer that no client should ever get."""


class Load:
    """Threads that send requests of all kinds from `start` to `stop`, and what became of those.

    Attributes:
        counts: how many requests ended in which way.
        wrong: what must never happen.
        responses: id -> text of stored responses that a client was told of.
        said: items that were acknowledged, of the conversation.
    """

    def __init__(self, victim: Victim, seed: int):
        self._victim = victim
        self._seed = seed
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.responses: dict[str, str] = {}
        self.said: set[str] = set()
        self.conversation = ""
        self._ids: dict[str, list[int]] = {}
        self._chats: dict[str, str] = {}
        self._outputs: dict[str, str] = {}

    def learn(self) -> None:
        """The answers of a quiet server, one request at a time."""
        with self._client() as client:
            for prompt in PROMPTS:
                self._ids[prompt] = self._completion(client, prompt, MOST_TOKENS)
                self._chats[prompt] = self._chat(client, prompt)
                self._outputs[prompt] = self._response(client, prompt)["output"][0]["content"][0]["text"]
            answer = client.post("/v1/conversations", json={}).raise_for_status()
            self.conversation = answer.json()["id"]

    def start(self, threads: int = 4) -> None:
        for number in range(threads):
            thread = threading.Thread(target=self._run, args=(random.Random(self._seed + number), number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a request got no answer at all"

    def once(self, dice: random.Random) -> None:
        """One request of each kind, all of which must be answered right."""
        with self._client() as client:
            for ask in self._kinds():
                ask(client, dice, 0)

    def flood(self, kind: str, count: int) -> None:
        """Requests that come at once; which ones, says who is to feel it."""
        asked = {"engine": self._streams, "template": self._chats_of, "store": self._stores}.get(kind)
        dice = [random.Random(self._seed + number) for number in range(count)]

        def ask(number: int) -> None:
            with self._client() as client:
                if asked is None:
                    client.get("/v1/models").raise_for_status()
                else:
                    asked(client, dice[number], number)

        threads = [threading.Thread(target=self._judged, args=("flood", ask, number)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a request got no answer at all"

    def probe(self) -> bool:
        """Whether a request is answered now, and right."""
        try:
            with self._client() as client:
                return self._completion(client, PROMPTS[0], 3) == self._ids[PROMPTS[0]][:3]
        except (httpx.HTTPError, Refused):
            return False

    def lines(self, count: int) -> list[dict[str, Any]]:
        """Lines of a batch, named by what they ask."""
        return [
            {
                "custom_id": f"{number}", "method": "POST", "url": "/v1/completions",
                "body": _completion_body(PROMPTS[number % len(PROMPTS)], 1 + number % MOST_TOKENS),
            }
            for number in range(count)
        ]  # fmt: skip

    def is_right(self, line: int, token_ids: list[int]) -> bool:
        """Whether that line of the batch must be answered so."""
        return token_ids == self._ids[PROMPTS[line % len(PROMPTS)]][: 1 + line % MOST_TOKENS]

    @contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        with self._new_client() as client:
            yield client

    def _new_client(self) -> httpx.Client:
        """Without the system's certificates, which take 50 ms to read and which nobody needs here."""
        return httpx.Client(base_url=self._victim.url, timeout=PATIENCE, verify=False)

    def _kinds(self) -> list[Any]:
        return [self._completes, self._streams, self._chats_of, self._stores, self._says]

    def _run(self, dice: random.Random, number: int) -> None:
        client = self._new_client()
        while not self._stopping.is_set():
            ask = dice.choice(self._kinds())
            self._judged(ask.__name__, ask, client, dice, number)
        client.close()

    def _judged(self, name: str, ask: Any, *arguments: Any) -> None:
        deaths = self._victim.deaths
        try:
            ask(*arguments)
        except Wrong as error:
            self.wrong.append(f"{name}: {error}")
        except Refused as error:
            self.counts[error.code] += 1
        except httpx.HTTPStatusError as error:
            self.wrong.append(f"{name}: {error.response.status_code} {error.response.text[:300]}")
        except httpx.TransportError as error:
            if deaths == self._victim.deaths and self._victim.is_up.is_set():
                self.wrong.append(f"{name}: broken off although the server lives: {error!r}")
            self.counts["broken off"] += 1
            self._victim.is_up.wait(PATIENCE)
        else:
            self.counts["right"] += 1

    def _completes(self, client: httpx.Client, dice: random.Random, number: int) -> None:
        prompt, tokens = dice.choice(PROMPTS), dice.randrange(1, MOST_TOKENS + 1)
        self._check(self._ids[prompt][:tokens], self._completion(client, prompt, tokens), prompt)

    def _streams(self, client: httpx.Client, dice: random.Random, number: int) -> None:
        prompt, tokens = dice.choice(PROMPTS), dice.randrange(8, MOST_TOKENS + 1)
        found: list[int] = []
        with client.stream(
            "POST", "/v1/completions", json=_completion_body(prompt, tokens) | {"stream": True}
        ) as answer:
            if answer.status_code != 200:
                answer.read()
                _refusal(answer)
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self._check(self._ids[prompt][: len(found)], found, prompt)
                    raise Refused(event["error"]["code"], event["error"]["message"])
                found += event["choices"][0]["token_ids"] or []
        self._check(self._ids[prompt][:tokens], found, prompt)

    def _chats_of(self, client: httpx.Client, dice: random.Random, number: int) -> None:
        prompt = dice.choice(PROMPTS)
        self._check(self._chats[prompt], self._chat(client, prompt), prompt)

    def _stores(self, client: httpx.Client, dice: random.Random, number: int) -> None:
        prompt = dice.choice(PROMPTS)
        answer = self._response(client, prompt)
        text = answer["output"][0]["content"][0]["text"]
        self._check(self._outputs[prompt], text, prompt)
        with self._lock:
            self.responses[answer["id"]] = text

    def _says(self, client: httpx.Client, dice: random.Random, number: int) -> None:
        text = f"{number} {dice.random()}"
        items = [{"type": "message", "role": "user", "content": text}]
        answer = client.post(f"/v1/conversations/{self.conversation}/items", json={"items": items})
        _accepted(answer)
        with self._lock:
            self.said.add(text)

    def _completion(self, client: httpx.Client, prompt: str, tokens: int) -> list[int]:
        answer = _accepted(client.post("/v1/completions", json=_completion_body(prompt, tokens)))
        return list(answer["choices"][0]["token_ids"])

    def _chat(self, client: httpx.Client, prompt: str) -> str:
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "chat_template": "{{ messages[0].content }}",  # a request's own is rendered in a process
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        return str(_accepted(client.post("/v1/chat/completions", json=body))["choices"][0]["message"]["content"])

    def _response(self, client: httpx.Client, prompt: str) -> dict[str, Any]:
        body = {"input": prompt, "max_output_tokens": 16, "temperature": 0}
        return _accepted(client.post("/v1/responses", json=body))

    def _check(self, expected: Any, found: Any, prompt: str) -> None:
        if expected != found:
            raise Wrong(f"{prompt!r} is answered {found!r}; a quiet server says {expected!r}")


class Refused(Exception):
    """The server said that it could not, in a way that it may."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        if code not in MAY_FAIL and TWICE not in message:
            raise Wrong(f"refused with {code!r}: {message}")


def _completion_body(prompt: str, tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


def _accepted(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        _refusal(answer)
    found: dict[str, Any] = answer.json()
    return found


def _refusal(answer: httpx.Response) -> None:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError):
        raise Wrong(f"{answer.status_code} without a reason: {answer.text[:300]}") from None
    raise Refused(str(error["code"]), str(error["message"]))
