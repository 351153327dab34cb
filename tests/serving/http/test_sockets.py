"""A real uvicorn on a real socket, the real openai SDK, and clients that go away. The engine is the fake one."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import wait_for
from tests.serving.fake_engine import REPLY, FakeEngine

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


def sdk(url: str, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **settings)


def test_sync_sdk(listen: Callable[..., str], engine: FakeEngine) -> None:
    client = sdk(listen(engine))
    assert [model.id for model in client.models.list()] == ["fake"]
    chat = client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, top_logprobs=2)
    assert chat.choices[0].message.content == REPLY
    assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert chat.usage and chat.usage.prompt_tokens_details and chat.usage.prompt_tokens_details.cached_tokens == 3
    text = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=3, logprobs=1)
    assert [choice.text for choice in text.choices] == ["The", "The"]
    chunks = list(client.completions.create(model="fake", prompt="a", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY[:16]


def test_sdk_stream_helper(listen: Callable[..., str], engine: FakeEngine) -> None:
    client = sdk(listen(engine))
    options: Any = {"include_usage": True}
    with client.chat.completions.stream(
        model="fake", messages=HELLO, stream_options=options, n=2, logprobs=True
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [REPLY, REPLY]
    assert final.usage and final.usage.completion_tokens == 2 * len(REPLY)


def test_concurrent_async_streams(listen: Callable[..., str], engine: FakeEngine) -> None:
    engine.delay = 0.002
    url = listen(engine)

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(32)))

    assert asyncio.run(many()) == [REPLY] * 32
    assert not engine.active


def test_chunks_arrive_as_they_are_made(listen: Callable[..., str], engine: FakeEngine) -> None:
    engine.delay = 0.05
    stream = sdk(listen(engine)).chat.completions.create(model="fake", messages=HELLO, stream=True, max_tokens=6)
    next(stream), next(stream)
    assert engine.active


@pytest.mark.parametrize(
    "head",
    [
        "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json",
        "POST /v1/files HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=x",
    ],
)
def test_leaving_before_the_body_is_sent_is_no_error(
    listen: Callable[..., str], engine: FakeEngine, caplog: pytest.LogCaptureFixture, head: str
) -> None:
    url = listen(engine)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\n--x\r\n".encode())
        httpx.get(f"{url}/health")  # its headers have been read by then
    httpx.get(f"{url}/health")
    time.sleep(0.1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_everything(listen: Callable[..., str], engine: FakeEngine, path: str, stream: bool) -> None:
    engine.delay, engine.reply = 0.02, "x" * 200
    url = listen(engine)
    body = {"stream": stream, "n": 2, "max_tokens": 200} | ({"messages": HELLO} if "chat" in path else {"prompt": "Hi"})
    httpx.post(url + path, json=body | {"max_tokens": 1, "stream": False})  # what renders templates has been started
    with httpx.Client(timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
        if stream:
            with client.stream("POST", url + path, json=body) as response:
                for number, _ in enumerate(response.iter_bytes()):
                    if number == 2:
                        raise httpx.ReadTimeout("enough")
        else:
            client.post(url + path, json=body)
    wait_for(lambda: not engine.active, 1.0)
    samples = httpx.get(f"{url}/metrics").text
    assert 'jaxllm:num_requests_running{model_name="fake"} 0.0' in samples
    assert 'jaxllm:request_success_total{finished_reason="abort",model_name="fake"} 2.0' in samples


def test_disconnect_before_the_first_token(listen: Callable[..., str], engine: FakeEngine) -> None:
    engine.delay = 30
    url = listen(engine)
    with httpx.Client(timeout=0.4) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{url}/v1/chat/completions", json={"messages": HELLO, "stream": False})
    with (
        httpx.Client() as client,
        client.stream("POST", f"{url}/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response,
    ):
        text = response.iter_text()  # kept: a generator that is dropped closes the response
        assert "assistant" in next(text)
        assert engine.active
    wait_for(lambda: not engine.active, 1.0)


def test_errors_become_the_sdks_exceptions(listen: Callable[..., str], engine: FakeEngine) -> None:
    client = sdk(listen(engine, api_key="sesame"))
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    client.api_key = "sesame"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    assert wrong.value.param == "temperature"
    engine.queue_limit = 0
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    engine.queue_limit, engine.fail_after = 10, 4
    with pytest.raises(openai.APIError, match="caught fire"):
        for _ in client.chat.completions.create(model="fake", messages=HELLO, stream=True):
            pass


def test_engine_death_ends_streams_with_an_error(listen: Callable[..., str], engine: FakeEngine) -> None:
    engine.delay = 0.02
    url = listen(engine)
    stream = sdk(url).chat.completions.create(model="fake", messages=HELLO, stream=True)
    next(stream)
    engine.die()
    with pytest.raises(openai.APIError, match="engine has stopped"):
        for _ in stream:
            pass
    assert httpx.get(f"{url}/health").status_code == 503


def test_body_over_the_limit_is_refused_early(listen: Callable[..., str], engine: FakeEngine) -> None:
    """The answer comes from the declared length, before the body does."""
    url = listen(engine, max_body_size=1000)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        headers = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n\r\n"
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
