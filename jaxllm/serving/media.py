"""Images that a request does not have in itself: what may be fetched from where, and how much of it.

Nothing is, unless the settings allow its host or folder. A host's name is resolved once, and the address that was
checked is the one that is connected to; each redirect is checked as the first URL is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx2

from jaxllm.chat.pictures import Picture, Sent
from jaxllm.config.server import ServerConfig
from jaxllm.config.values import comma_separated
from jaxllm.errors import InvalidRequestError
from jaxllm.folders import in_home
from jaxllm.mcp.http import PublicOnly
from jaxllm.serving.http.api_error import APIError
from jaxllm.wording import shown

FETCH_SECONDS = 10.0  # for all images of a request
MOST_BYTES, MOST_TOGETHER = 32 * 2**20, 64 * 2**20  # of an image, and of all that one request has fetched
MOST_REDIRECTS = 3
AT_ONCE = 16  # requests whose images are fetched; others wait


class Media:
    located: Callable[[str, str | None], Awaitable[tuple[Any, Path]]]
    """An owner's uploaded file, and its path. Raises APIError."""

    def __init__(self, config: ServerConfig):
        self._hosts = {host.lower() for host in comma_separated(config.allowed_media_domains)}
        folder = config.allowed_local_media_path
        self._folder = None if folder is None else in_home(folder).resolve()
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, pictures: Sequence[Picture], owner: str | None, fetched: dict[Sent, bytes]) -> None:
        """Give images their bytes, which `fetched` keeps. Raises InvalidRequestError of the one that is to blame."""
        wanted = [picture for picture in pictures if isinstance(picture.given, Sent) and picture.given.is_elsewhere]
        if not wanted:
            return
        picture = wanted[0]
        try:
            async with self._turns, asyncio.timeout(FETCH_SECONDS):
                for picture in wanted:
                    if picture.given not in fetched:
                        room = min(MOST_BYTES, MOST_TOGETHER - sum(map(len, fetched.values())))
                        found = await self._bytes(picture.given, owner, room + 1)
                        if len(found) > room:
                            limits = f"{MOST_BYTES:,} bytes of an image, {MOST_TOGETHER:,} of those of a request"
                            raise InvalidRequestError(f"it is too large; accepted are {limits}")
                        fetched[picture.given] = found
                    picture.given = fetched[picture.given]
        except InvalidRequestError as error:
            raise picture.refused(f": {error}") from None
        except TimeoutError:
            raise picture.refused(f" did not come within {FETCH_SECONDS:g} s") from None

    async def _bytes(self, sent: Sent, owner: str | None, most: int) -> bytes:
        """The first bytes of an image, at most about that many."""
        try:
            if sent.is_file:
                _, path = await self.located(sent.text, owner)
            elif sent.text[:5].lower() == "file:":
                path = await asyncio.to_thread(self._local, sent.text)
            else:
                return await self._download(httpx2.Request("GET", sent.text), most)
            with path.open("rb") as file:
                return await asyncio.to_thread(file.read, most)
        except APIError as error:
            raise InvalidRequestError(str(error)) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, ValueError):
            raise InvalidRequestError(f"{shown(sent.text)} cannot be read") from None  # who asks need not know why

    def _local(self, url: str) -> Path:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve()
        if self._folder is None or parts.netloc or not path.is_relative_to(self._folder) or not path.is_file():
            raise InvalidRequestError(f"{shown(url)} is no file that this server may read (allowed_local_media_path)")
        return path

    async def _download(self, request: httpx2.Request, most: int) -> bytes:
        transport = PublicOnly(("http", "https"))
        async with httpx2.AsyncClient(transport=transport, timeout=FETCH_SECONDS, trust_env=False) as client:
            for _ in range(1 + MOST_REDIRECTS):
                # the very object that is connected to: another reader of its text might find another host
                url = request.url
                if url.host not in self._hosts or url.userinfo or (url.port or 0) >= 2**16:
                    problem = f"images are not fetched from {shown(url.host or str(url))}"
                    raise InvalidRequestError(f"{problem} by this server (allowed_media_domains)")
                request.headers["Accept-Encoding"] = "identity"
                answer = await client.send(request, stream=True, follow_redirects=False)
                try:
                    if answer.next_request is not None:
                        request = answer.next_request
                        continue
                    if answer.status_code != 200 or "Content-Encoding" in answer.headers:
                        raise InvalidRequestError(f"its host answers {answer.status_code}, or compresses it")
                    found = bytearray()
                    async for chunk in answer.aiter_raw():
                        found += chunk
                        if len(found) >= most:
                            break
                    return bytes(found)
                finally:
                    await answer.aclose()
        raise InvalidRequestError(f"its host redirects more than {MOST_REDIRECTS} times")
