"""What people do with the server, as they do it: the openai and anthropic SDKs on SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from jaxllm import AsyncLLM
from tests.serving.conftest import wait_for
from tests.serving.real_server import assert_idle, served
from tests.support.real_models import SHAPES

pytestmark = pytest.mark.programs

MODEL = "smollm2-135m"

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Event(BaseModel):
    name: str = Field(max_length=40)
    day: Literal["Friday", "Saturday", "Sunday"]
    participants: list[str] = Field(max_length=3)


EVENT = "Alice and Bob are going to a science fair on Friday. Extract the event."


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data_dir = str(tmp_path_factory.mktemp("data"))
    with served(MODEL, data_dir=data_dir, prefill_buckets=(8, 64)) as url:  # 8: of a step with a grammar
        yield url
        assert_idle(url)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def call_arguments(text: str) -> dict[str, str]:
    arguments = json.loads(text)
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")
    return arguments


def test_function_calling_loop(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"model": MODEL, "tools": [WEATHER], "temperature": 0, "max_tokens": 64}
    answer = client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **asked
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    call_arguments(call.function.arguments)

    messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}]
    final = client.chat.completions.create(messages=messages, tool_choice="none", **asked).choices[0]
    assert final.message.content and not final.message.tool_calls


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_streamed_calls_are_the_same_as_whole_ones(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {
        "model": MODEL, "tools": [WEATHER], "tool_choice": choice, "temperature": 0, "max_tokens": 64,
        "parallel_tool_calls": False, "messages": [{"role": "user", "content": "How warm is it in Oslo?"}],
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.usage and final.usage.completion_tokens > 0
    streamed = final.choices[0].message.tool_calls
    assert whole and streamed and len(whole) == len(streamed) == 1
    assert streamed[0].function.name == whole[0].function.name
    assert streamed[0].function.arguments == whole[0].function.arguments
    call_arguments(whole[0].function.arguments)


def test_extraction_into_a_pydantic_class(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": EVENT}]
    parsed = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Event, temperature=0, max_tokens=128
    )
    assert isinstance(parsed.choices[0].message.parsed, Event)
    response = client.responses.parse(model=MODEL, input=EVENT, text_format=Event, temperature=0, max_output_tokens=128)
    assert response.output_parsed == parsed.choices[0].message.parsed
    with client.chat.completions.stream(
        model=MODEL, messages=messages, response_format=Event, temperature=0, max_tokens=128
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == response.output_parsed


def test_streaming_with_usage(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Name three colours."}]
    asked: Any = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_batch_of_a_hundred(client: openai.OpenAI) -> None:
    def line(number: int) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 3}
        return json.dumps(
            {
                "custom_id": f"{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body | {"temperature": 0},
            }
        )

    lines = "\n".join(map(line, range(100))).encode()
    file = client.files.create(file=("requests.jsonl", lines), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", 120)
    done = client.batches.retrieve(batch.id)
    assert done.request_counts and (done.request_counts.completed, done.request_counts.failed) == (100, 0)
    assert done.output_file_id
    results = [json.loads(text) for text in client.files.content(done.output_file_id).text.splitlines()]
    assert sorted(int(result["custom_id"]) for result in results) == list(range(100))
    assert all(result["response"]["body"]["choices"][0]["message"]["content"] for result in results)


def test_embeddings_rank_what_belongs_together(client: openai.OpenAI) -> None:
    texts = ["the cat sat on the mat", "a cat is sitting on a mat", "interest rates rose by two percent"]
    found = client.embeddings.create(model=MODEL, input=texts, dimensions=256)
    vectors = np.array([entry.embedding for entry in found.data])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    again = client.embeddings.create(model=MODEL, input=texts, dimensions=256, encoding_format="float")
    np.testing.assert_allclose([entry.embedding for entry in again.data], vectors, atol=1e-6)


def test_beams_are_at_least_as_likely_as_the_greedy_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 6, "logprobs": 0}
    greedy = client.completions.create(**asked, temperature=0).choices[0]
    beams = client.completions.create(
        **asked, n=3, extra_body={"use_beam_search": True, "length_penalty": 0, "ignore_eos": True}
    )
    scores = [sum(choice.logprobs.token_logprobs) for choice in beams.choices]  # type: ignore[union-attr,arg-type]
    assert scores == sorted(scores, reverse=True) and len({choice.text for choice in beams.choices}) == 3
    assert greedy.logprobs and scores[0] >= sum(greedy.logprobs.token_logprobs) - 1e-4  # type: ignore[arg-type]


def test_anthropic_messages_and_tools(url: str) -> None:
    import anthropic

    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: Any = {
        "model": MODEL,
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
    }
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text and "Tokyo" in text
    assert final.usage.output_tokens == whole.usage.output_tokens
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    called = claude.messages.create(**asked | {"max_tokens": 64}, tools=[tool], tool_choice={"type": "any"})
    assert called.stop_reason == "tool_use"
    assert called.content[-1].name == "get_weather" and set(called.content[-1].input) == {"city", "unit"}


def test_responses_go_on_from_what_was_said(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input="What is the capital of Japan?", temperature=0, max_output_tokens=16
    )
    assert "Tokyo" in first.output_text
    second = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=16
    )
    assert second.usage and first.usage and second.usage.input_tokens > first.usage.input_tokens
    with client.responses.stream(
        model=MODEL, input="What is the capital of Japan?", temperature=0, max_output_tokens=16
    ) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == deltas == first.output_text


def test_gemma_completes_by_grammar_and_embeds(listen: Callable[..., str]) -> None:
    """A base model without a chat template: chat is refused, everything else works."""
    model = "gemma3-270m"
    engine = AsyncLLM(model=model, **SHAPES)
    try:
        url = listen(engine, model=model)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        asked: Any = {"model": model, "prompt": "2 + 2 =", "max_tokens": 8}
        answer = client.completions.create(**asked, extra_body={"structured_outputs": {"regex": r" ?\d{1,3}"}})
        assert answer.choices[0].text.strip().isdecimal() and answer.choices[0].text.isascii()
        vector = client.embeddings.create(model=model, input="hello").data[0].embedding
        assert len(vector) == 640
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
    finally:
        engine.shutdown()
