"""Tool servers that a request brings along."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.fake_engine import REPLY
from tests.serving.responses.fake_tools import MCP, FakeServer, says, weather
from tests.support.covers import covers

SECRETS = ("s3cret-token", "s3cret-header", "s3cret-path")
ELSEWHERE = MCP | {
    "server_label": "elsewhere",
    "server_url": "https://tools.example.com/s3cret-path/mcp",
    "server_description": "Far away.",
    "authorization": "s3cret-token",
    "headers": {"X-Key": "s3cret-header"},
}
ALLOWED = {"allow_mcp_urls": True}


@covers("McpTool", "server_url", "server_description", "authorization", "headers")
def test_secrets_are_used_and_never_seen_again(
    tools: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = FakeServer("elsewhere", ask=lambda: "It is far.")
    client, _ = tools(server, script=[says(("elsewhere_ask", {}))], serving=ALLOWED)
    response = client.responses.create(model="fake", input="x", tools=[ELSEWHERE])
    (settings,) = client.fakes.asked
    assert settings.url == ELSEWHERE["server_url"] and settings.public_only and settings.transport == "http"
    assert settings.headers == {"X-Key": "s3cret-header", "Authorization": "Bearer s3cret-token"}
    assert response.output[1].output == "It is far." and response.output_text == REPLY
    assert server.closed and response.tools[0].server_url == "https://tools.example.com/<redacted>"
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("jaxllm.db*"))
    assert b"mcp_call" in stored
    shown = [response.model_dump_json(), repr(settings), caplog.text, client.responses.retrieve(response.id).to_json()]
    for secret in SECRETS:
        assert secret.encode() not in stored and not any(secret in text for text in shown)


def test_only_where_the_server_allows_it(tools: Callable[..., Any]) -> None:
    client, _ = tools(weather(), FakeServer("elsewhere"))
    with pytest.raises(openai.BadRequestError, match="allow_mcp_urls is not set") as caught:
        client.responses.create(model="fake", input="x", tools=[ELSEWHERE])
    assert caught.value.param == "tools[0].server_url" and not client.fakes.asked


def test_how_many_a_request_may_bring(tools: Callable[..., Any]) -> None:
    client, _ = tools(FakeServer("elsewhere"), serving=ALLOWED)
    many = [ELSEWHERE | {"server_label": f"s{at}"} for at in range(17)]
    with pytest.raises(openai.BadRequestError, match="one more than the 16") as caught:
        client.responses.create(model="fake", input="x", tools=many)
    assert caught.value.param == "tools[16].server_url" and not client.fakes.asked


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"server_url": "http://tools.example.com"}, "server_url", "https://"),
        ({"server_url": "https://user:word@tools.example.com"}, "server_url", "without a user's name"),
        ({"server_url": "https://tools.example.com:word"}, "server_url", "https://"),
        ({"server_url": "file:///etc/passwd"}, "server_url", "https://"),
        ({"headers": {"Bad Name": "x"}}, "headers", "may not be sent"),
        ({"headers": {"Host": "x"}}, "headers", "may not be sent"),
        ({"headers": {"X": "a\r\nb"}}, "headers", "printable"),
        ({"server_url": None}, "authorization", "belongs to server_url"),
        ({"server_label": "a b"}, "server_label", "'a b'"),
        ({"connector_id": "connector_gmail"}, "connector_id", "not supported"),
    ],
)
def test_refusals(tools: Callable[..., Any], fields: dict[str, Any], param: str, told: str) -> None:
    client, _ = tools(FakeServer("elsewhere"), serving=ALLOWED)
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        client.responses.create(model="fake", input="x", tools=[ELSEWHERE | fields])
    assert caught.value.param == f"tools[0].{param}" and not client.fakes.asked
    assert not any(secret in caught.value.message for secret in SECRETS)


def test_a_server_is_left_however_the_response_ends(tools: Callable[..., Any]) -> None:
    server = FakeServer("elsewhere", ask=lambda: "It is far.")
    client, engine = tools(server, serving=ALLOWED)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="fake", input="x" * 50_000, tools=[ELSEWHERE])
    assert server.closed
    server.closed, engine.fail_after = False, 2
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="fake", input="x", tools=[ELSEWHERE])
    assert server.closed
    server.closed = False
    assert client.responses.input_tokens.count(model="fake", input="x", tools=[ELSEWHERE]).input_tokens > 50
    assert server.closed


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "10.0.0.1", "169.254.169.254", "[::ffff:10.0.0.1]"]
)
def test_private_addresses_are_not_reached(
    listen: Callable[..., str], roomy: Callable[..., Any], tmp_path: Path, host: str
) -> None:
    """With the real ToolServers."""
    url = listen(roomy(), data_dir=tmp_path, mcp_config="off", **ALLOWED)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tool = MCP | {"server_label": "near", "server_url": f"https://{host}/mcp"}
    response = client.responses.create(model="fake", input="x", tools=[tool])
    assert "no public address" in response.output[0].error and response.output_text == REPLY
