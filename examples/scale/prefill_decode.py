"""A proxy before servers that compute prompts and servers that go on with them, which it takes in turn.

jaxllm serve MODEL --port 8001 --kv-offload-memory 4GiB --kv-transfer-config '{"kv_role": "kv_producer"}'
jaxllm serve MODEL --port 8002 --kv-offload-memory 4GiB --kv-transfer-config '{"kv_role": "kv_consumer"}'
python examples/scale/prefill_decode.py --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002

Clients then use http://127.0.0.1:8000/v1. See docs/scale.md.
"""

import argparse
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

logger = logging.getLogger("prefill_decode")
PASSED_ON = ("authorization", "content-type", "x-request-id")
NOT_OF_A_PROMPT = ("stream_options", "best_of", "min_tokens", "max_completion_tokens", "max_tokens")
"""Fields that say what is to follow the prompt, and that a request for one token alone does not have."""


class Proxy:
    """`prefill` and `decode` are the base URLs of servers of one model."""

    def __init__(self, prefill: list[str], decode: list[str]):
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._client = httpx.AsyncClient(timeout=None, headers={"accept-encoding": "identity"})
        routes = [Route(f"/v1/{path}", self.complete, methods=["POST"]) for path in ("chat/completions", "completions")]
        routes.append(Route("/{path:path}", self.look, methods=["GET"]))
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    async def complete(self, request: Request) -> Response:
        """The prompt at one server, and the answer from another."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        content, body = await request.body(), await request.json()
        if isinstance(body, dict) and (pages := await self._compute(request.url.path, body, headers)):
            body["kv_transfer_params"] = pages
            return await self._stream("POST", request.url.path, headers, json=body)
        return await self._stream("POST", request.url.path, headers, content=content)

    async def look(self, request: Request) -> Response:
        """Whatever only looks, as /v1/models and /health: what one of the servers says that give the answers."""
        return await self._stream("GET", request.url.path, {})

    async def _compute(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
        """Where the prompt's pages are; None where it is to be computed by the server that answers, too."""
        prompt = {name: value for name, value in body.items() if name not in NOT_OF_A_PROMPT}
        prompt |= {"max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        url = next(self._prefill)
        try:
            answer = await self._client.post(url + path, json=prompt, headers=headers)
        except httpx.TransportError as error:
            logger.warning("%s cannot be reached: %s", url, error)
            return None
        if answer.status_code != httpx.codes.OK:  # the other server says why in its own answer, or can do it
            logger.info("%s answered %s: %s", url, answer.status_code, answer.text[:200])
            return None
        return answer.json().get("kv_transfer_params")

    async def _stream(self, method: str, path: str, headers: dict[str, str], **content: Any) -> Response:
        """The answer of one of the servers that give answers, passed on as it comes."""
        request = self._client.build_request(method, next(self._decode) + path, headers=headers, **content)
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            logger.warning("%s cannot be reached: %s", request.url, error)
            return Response("the server that answers cannot be reached", 502)
        return StreamingResponse(_chunks(answer), answer.status_code, media_type=answer.headers.get("content-type"))

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield


async def _chunks(answer: httpx.Response) -> AsyncIterator[bytes]:
    """As they come; a client that goes away ends the answer."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", nargs="+", required=True, help="URLs of servers that compute prompts")
    parser.add_argument("--decode", nargs="+", required=True, help="URLs of servers that go on with them")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    uvicorn.run(Proxy(asked.prefill, asked.decode).app, host=asked.host, port=asked.port)
