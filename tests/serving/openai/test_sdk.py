"""The real openai SDK over a real socket, against a server of SmolLM2-135M-Instruct."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import wait_for
from tests.serving.real_server import assert_idle, gauges, served

pytestmark = pytest.mark.programs

JAPAN: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("smollm2-135m") as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def test_tokyo(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2-135m", messages=JAPAN, temperature=0, max_tokens=24)
    assert whole.choices[0].message.content and "Tokyo" in whole.choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            model="smollm2-135m",
            messages=JAPAN,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_and_stop(client: openai.OpenAI) -> None:
    prompt = "One, two, three,"
    text = client.completions.create(model="smollm2-135m", prompt=prompt, temperature=0, max_tokens=12).choices[0].text
    assert "four" in text
    stopped = client.completions.create(model="smollm2-135m", prompt=prompt, temperature=0, max_tokens=12, stop="four")
    assert stopped.choices[0].text == text.split("four")[0]
    assert stopped.choices[0].finish_reason == "stop"


def test_seeded_choices_repeat_and_differ_from_each_other(client: openai.OpenAI) -> None:
    def sample() -> list[str | None]:
        made = client.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": "Invent a name."}], n=3, seed=5, max_tokens=12
        )
        return [choice.message.content for choice in made.choices]

    first = sample()
    assert first == sample() and len(set(first)) > 1


def test_tokenize_round_trip(url: str) -> None:
    text = "Grüße, 世界 🦙!"
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json() == {"prompt": text, "content": text}


def test_second_prompt_alike_is_cached(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count to ten. " * 12}]

    def ask() -> tuple[int, int]:
        usage = client.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=1).usage
        assert usage and usage.prompt_tokens_details
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    (tokens, first), (_, second) = ask(), ask()
    assert first < 32  # at most the system prompt, which other tests have sent as well
    assert second == (tokens - 1) // 16 * 16


def test_long_prompt_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"1100.*1024") as error:
        client.completions.create(model="smollm2-135m", prompt=[5] * 1100)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("wrong", [{"logit_bias": {"10000000": 1}}, {"extra_body": {"stop_token_ids": [10**7]}}])
def test_ids_outside_the_vocabulary_are_refused(client: openai.OpenAI, wrong: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="10000000"):
        client.completions.create(model="smollm2-135m", prompt="x", **wrong)


def test_more_streams_than_slots(url: str) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        prompt = f"{number}, {number + 1}, {number + 2},"
        stream = await client.completions.create(
            model="smollm2-135m", prompt=prompt, temperature=0, max_tokens=8, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of(numbers: range) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in numbers))

    together = asyncio.run(all_of(range(10)))
    alone = [asyncio.run(all_of(range(number, number + 1)))[0] for number in (0, 9)]
    assert [together[0], together[9]] == alone
    assert_idle(url)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_slots_and_pages(url: str, stream: bool) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "n": 2, "stream": stream}
    with httpx.Client(timeout=120) as http:
        if stream:
            with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                parts = response.iter_bytes()  # kept: a generator that is dropped closes the response
                next(parts)
                wait_for(lambda: gauges(url)["num_requests_running"] == 2)
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(f"{url}/v1/completions", json=body, timeout=1.0)
    assert_idle(url)
