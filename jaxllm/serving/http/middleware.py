"""Layers around all routes: who may call, a request's id, a proxy's prefix, and other spellings of a route."""

from __future__ import annotations

import asyncio
import re
import uuid
import zlib
from abc import ABC, abstractmethod
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.config.values import PREFIX
from jaxllm.serving.http.answers import error_response
from jaxllm.serving.http.api_error import APIError
from jaxllm.wording import shown

LOCAL_NAMES = frozenset({"localhost"})


class HTTPLayer(ABC):
    """A layer around an application that handles HTTP requests, and lets everything else through."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.handle if scope["type"] == "http" else self.app)(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class OriginGuard(HTTPLayer):
    """Refuses requests that a foreign page makes a browser send (403), and names that are not this server's (421).

    A request with several names, or in HTTP/1.1 with none, is refused as well (400): others may read another one.

    Without an API key a server trusts whoever reaches it, so a page in a browser on its machine must not. A page has
    an Origin header that the browser writes: it is let in when it is of this server or in `allowed_origins`. By DNS
    rebinding a page's own name can lead here: `allowed_hosts` are the names under which the server is called, besides
    IP addresses and localhost; "*" allows any, as a Unix socket does, which no name in DNS leads to. With an API key,
    which no foreign page knows, any name is allowed unless `allowed_hosts` says otherwise.
    """

    def __init__(self, app: ASGIApp, *, allowed_origins: list[str], allowed_hosts: list[str], has_key: bool):
        super().__init__(app)
        self._origins = frozenset(allowed_origins)
        self._hosts = frozenset(host.lower() for host in allowed_hosts) or frozenset({"*"} if has_key else ())
        self._has_key = has_key

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, headers = self.app, Headers(scope=scope)
        hosts, origin = headers.getlist("host"), headers.get("origin")
        host = next(iter(hosts), "")
        if len(hosts) != 1 and (hosts or scope["http_version"] == "1.1"):  # RFC 9112 section 3.2
            message = f"the request has {len(hosts)} Host headers; it must have one"
            app = error_response(APIError(400, message, code="invalid_host"))
        elif not self._is_ours(host):
            message = f"Host is {shown(host)}, not a name of this server; see --allowed-hosts"
            app = error_response(APIError(421, message, code="unknown_host"))
        elif origin is not None and not self._may_call(origin, host):
            message = f"Origin is {shown(origin)}, whose pages may not call this server; see --allowed-origins"
            app = error_response(APIError(403, message, type="permission_error", code="foreign_origin"))
        await app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        if "*" in self._hosts or not host:  # only HTTP/1.0 has none, and no browser speaks it
            return True
        name = _name(f"//{host}")
        if name in self._hosts or name in LOCAL_NAMES:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _may_call(self, origin: str, host: str) -> bool:
        if self._has_key or "*" in self._origins or origin in self._origins:
            return True
        return urlsplit(origin).netloc.lower() == host.lower() != ""


ID_HEADER = "X-Request-Id"
_ID = re.compile(r"[!-~]([ -~]{0,254}[!-~])?")


class RequestIds(HTTPLayer):
    """Every response has X-Request-Id: what its request had there, else what its route says, else a new one."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = Headers(scope=scope).get(ID_HEADER)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[ID_HEADER] = sent or headers.get(ID_HEADER) or uuid.uuid4().hex
            await send(message)

        app = self.app
        if sent is not None and not _ID.fullmatch(sent):
            message = f"{ID_HEADER} is {shown(sent)}; it must be from 1 to 256 printable ASCII characters"
            app, sent = error_response(APIError(400, message)), None
        await app(scope, receive, send_named)


PREFIX_HEADER = "X-Forwarded-Prefix"


class ProxyPrefix(HTTPLayer):
    """Lets routes be reached under the prefix, `root_path` or the request's header, as well as without it."""

    def __init__(self, app: ASGIApp, *, root_path: str | None):
        super().__init__(app)
        self._root_path = root_path

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        prefix = self._root_path or Headers(scope=scope).get(PREFIX_HEADER, "").rstrip("/")
        if prefix and not PREFIX.fullmatch(prefix):
            message = f"{PREFIX_HEADER} is {shown(prefix)}; it must be a path of letters, digits and -._~, such as /llm"
            app = error_response(APIError(400, message))
        elif prefix and scope["path"] == prefix:  # the page's addresses are relative to /llm/
            app = RedirectResponse(f"{prefix}/", 308)
        elif prefix:
            scope["root_path"] = prefix
        await app(scope, receive, send)


class SameRoute(HTTPLayer):
    """Answers HEAD as GET, without the body, and a path with a slash at its end as the path without it."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path.removeprefix(scope.get("root_path", "")).strip("/"):  # /llm/, the page under a proxy's prefix, stays
            path = path.rstrip("/")
        if method == "HEAD":
            method, send = "GET", _headers_only(send)
        await self.app({**scope, "path": path, "method": method}, receive, send)


GZIP = ("gzip", "x-gzip")
PIECE = 256 * 1024
"""Most decoded bytes that a route gets at once: it counts them, and refuses a body that is too large."""
_WRAPPED = 16 + zlib.MAX_WBITS


class ContentEncoding(HTTPLayer):
    """Decodes bodies with `Content-Encoding: gzip`; reading one with another encoding raises APIError 415."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if encoding in GZIP:
            receive = Inflated(receive).receive
        elif encoding not in ("", "identity"):
            receive = _refusing(encoding)
        await self.app(scope, receive, send)


class Inflated:
    """A request's body, decoded on a thread once the route reads it, in pieces of at most `PIECE` bytes."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._stream = zlib.decompressobj(_WRAPPED)
        self._compressed = b""
        self._more_comes = True
        self._begun = self._more_inside = self._ended = False

    async def receive(self) -> Message:
        """Raises APIError 400 where the body is no gzip, or ends too early."""
        if self._ended:
            return await self._receive()
        while self._more_comes and not (self._compressed or self._more_inside):
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._compressed, self._more_comes = message.get("body", b""), message.get("more_body", False)
        piece = await asyncio.to_thread(self._decode) if self._compressed or self._more_inside else b""
        self._ended = not (self._more_comes or self._compressed or self._more_inside)
        if self._ended and self._begun and not self._stream.eof:
            raise _not_gzip("it ends too early")
        return {"type": "http.request", "body": piece, "more_body": not self._ended}

    def _decode(self) -> bytes:
        if self._stream.eof:
            self._stream = zlib.decompressobj(_WRAPPED)
        self._begun = True
        try:
            piece = self._stream.decompress(self._compressed, PIECE)
        except zlib.error as error:
            raise _not_gzip(str(error)) from None
        self._compressed = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
        self._more_inside = len(piece) == PIECE and not self._stream.eof
        return piece


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _headers_only(send: Send) -> Send:
    ended = False

    async def send_headers(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        if not ended:
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_headers


def _refusing(encoding: str) -> Receive:
    async def refuse() -> Message:
        message = f"Content-Encoding is {shown(encoding)}; it must be gzip or left out"
        raise APIError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "gzip"})

    return refuse


def _not_gzip(reason: str) -> APIError:
    message = f"the body is not valid gzip, which Content-Encoding says it is: {reason}"
    return APIError(400, message, code="invalid_encoding", headers={"Connection": "close"})
