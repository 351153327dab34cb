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
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.folders import in_home
from jaxllm.mcp.http import PublicOnly
from jaxllm.serving.http.api_error import APIError
from jaxllm.wording import shown

FETCH_SECONDS = 10.0
"""For all images of a request."""
MOST_BYTES = 32 * 2**20  # of an image, as its decoder has it
MOST_TOGETHER = 64 * 2**20
"""Bytes that one request may have fetched."""
MOST_REDIRECTS = 3
AT_ONCE = 16
"""Requests whose images are fetched at once; the others wait."""

Located = Callable[[str, str | None], Awaitable[tuple[Any, Path]]]
"""An owner's uploaded file, by its id, and its path. Raises APIError."""


class Media:
    def __init__(self, config: ServerConfig):
        self._hosts = {host.lower() for host in comma_separated(config.allowed_media_domains)}
        folder = config.allowed_local_media_path
        self._folder = None if folder is None else in_home(folder).resolve()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.located: Located | None = None
        """Set by those who have files."""

    async def fetch(
        self, pictures: Sequence[tuple[Field, Picture]], owner: str | None, fetched: dict[Sent, bytes]
    ) -> None:
        """Give images their bytes, which `fetched` keeps. Raises InvalidRequestError of the one that is to blame."""
        wanted = [(place, one, one.given) for place, one in pictures if isinstance(one.given, Sent)]
        wanted = [(place, one, sent) for place, one, sent in wanted if sent.is_elsewhere]
        if not wanted:
            return
        field = wanted[0][0]
        try:
            async with self._turns, asyncio.timeout(FETCH_SECONDS):
                for place, picture, sent in wanted:
                    field = place
                    if sent not in fetched:
                        room = min(MOST_BYTES, MOST_TOGETHER - sum(map(len, fetched.values())))
                        fetched[sent] = await self._bytes(sent, owner, room)
                    picture.given = fetched[sent]
        except InvalidRequestError as error:
            raise InvalidRequestError([field, f": {error}"]) from None
        except TimeoutError:
            raise InvalidRequestError([field, f" did not come within {FETCH_SECONDS:g} s"]) from None

    async def _bytes(self, sent: Sent, owner: str | None, room: int) -> bytes:
        if sent.kind == "file_id":
            if self.located is None:
                raise InvalidRequestError("this server has no files")
            try:
                _, path = await self.located(sent.text, owner)
            except APIError as error:
                raise InvalidRequestError(str(error)) from None
            return await asyncio.to_thread(_read, path, room)
        if sent.text[:5].lower() == "file:":
            path = await asyncio.to_thread(self._local, sent.text)
            return await asyncio.to_thread(_read, path, room)
        try:
            return await self._download(httpx2.URL(sent.text), room)
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError, ValueError):
            raise InvalidRequestError(f"{shown(sent.text)} cannot be fetched") from None  # who asks need not know why

    def _local(self, url: str) -> Path:
        parts = urlsplit(url)
        if self._folder is None or parts.netloc not in ("", "localhost"):
            raise InvalidRequestError(f"{shown(url)} is not read by this server (allowed_local_media_path)")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if path.is_relative_to(self._folder) and path.is_file():
                return path
        except (OSError, ValueError, RuntimeError):  # not there, a zero byte, links in a circle
            pass
        raise InvalidRequestError(f"{shown(url)} is no file in the folder that this server reads images from")

    async def _download(self, url: httpx2.URL, room: int) -> bytes:
        transport = PublicOnly(("http", "https"))
        async with httpx2.AsyncClient(transport=transport, timeout=FETCH_SECONDS, trust_env=False) as client:
            request = httpx2.Request("GET", url, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
            for _ in range(1 + MOST_REDIRECTS):
                self._check(request.url)
                answer = await client.send(request, stream=True, follow_redirects=False)
                try:
                    if answer.next_request is None:
                        return await _whole(answer, room)
                    request = answer.next_request
                finally:
                    await answer.aclose()
        raise InvalidRequestError(f"{shown(str(url))} has more than {MOST_REDIRECTS} redirects")

    def _check(self, url: httpx2.URL) -> None:
        """The URL is the very one that is connected to: another reader of its text might find another host."""
        if url.scheme not in ("http", "https") or url.userinfo:
            raise InvalidRequestError(f"{shown(str(url))} is no URL of an image; it must be http(s)://HOST/… or data:")
        if url.host not in self._hosts:
            accepted = ", ".join(sorted(self._hosts)) or "none"
            problem = f"images are not fetched from {shown(url.host)}; accepted hosts are {accepted}"
            raise InvalidRequestError(f"{problem} (allowed_media_domains)")


async def _whole(answer: httpx2.Response, room: int) -> bytes:
    if answer.status_code != 200 or answer.headers.get("Content-Encoding", "identity") != "identity":
        raise InvalidRequestError(f"{shown(str(answer.url))} cannot be fetched: its host answers {answer.status_code}")
    found = bytearray()
    async for chunk in answer.aiter_raw():
        found += chunk
        if len(found) > room:
            raise _too_large(room)
    return bytes(found)


def _read(path: Path, room: int) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(room + 1)
    except OSError:
        raise InvalidRequestError("the file cannot be read") from None
    if len(found) > room:
        raise _too_large(room)
    return found


def _too_large(room: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"it has more than {room:,} bytes; accepted are {MOST_BYTES:,}, and {MOST_TOGETHER:,} together"
    )
