"""A small OpenAI client on httpx: what `chat --url` and `bench serve` need of one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from jaxllm.errors import ConfigError, JaxLLMError


class ServerError(JaxLLMError):
    """The server answered with an error, or stopped answering."""


class ServerClient:
    """A server, for `async with`. Methods raise ServerError, or ConfigError when nothing listens at `url`."""

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=10), limits=limits)

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        return (await self.ask("GET", "/v1/models"))["data"]

    async def ask(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The object that a route answers with."""
        try:
            response = await self._http.request(method, self.url + route, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if response.is_error:
            raise _refusal(response)
        return response.json()

    async def stream(self, route: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Post `body` with stream=true to `route` ('/v1/completions') and yield each event's object."""
        try:
            async with self._http.stream("POST", self.url + route, json={**body, "stream": True}) as response:
                if response.is_error:
                    await response.aread()
                    raise _refusal(response)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if line.startswith("data:"):
                        event = json.loads(data)
                        if "error" in event:
                            raise ServerError(f"the server broke off: {event['error']['message']}")
                        yield event
        except httpx.ConnectError as error:
            raise self._unreachable(error) from None
        except httpx.HTTPError as error:
            raise ServerError(f"the connection to {self.url} broke: {error or type(error).__name__}") from None
        raise ServerError(f"{self.url} closed the stream before [DONE]")

    def _unreachable(self, error: Exception) -> ConfigError:
        return ConfigError(f"no server answers at {self.url} ({error or type(error).__name__})")


def _refusal(response: httpx.Response) -> ServerError:
    try:
        reason = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = response.text[:200] or response.reason_phrase
    return ServerError(f"the server answered {response.status_code}: {reason}")
