"""Large bodies of every shape, sent by several clients: `python -m tests.serving.large_bodies URL CLIENTS SIZE`.

It imports little: whoever starts it measures from then on.
"""

from __future__ import annotations

import asyncio
import sys

import httpx

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


async def send_all(url: str, clients: int, size: int) -> None:
    """Every shape from four of sixteen clients; nothing but a success or a refusal may come back."""
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


if __name__ == "__main__":
    asyncio.run(send_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
