"""Who may call: pages of which sites, and under which names of this server."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.errors import error_response
from jaxllm.wording import shown

LOCAL_NAMES = frozenset({"localhost"})


class OriginGuard:
    """Refuses requests that a foreign page makes a browser send (403), and names that are not this server's (421).

    A request with several names, or in HTTP/1.1 with none, is refused as well (400): others may read another one.

    Without an API key a server trusts whoever reaches it, so a page in a browser on its machine must not. A page has
    an Origin header that the browser writes: it is let in when it is of this server or in `allowed_origins`. By DNS
    rebinding a page's own name can lead here: `allowed_hosts` are the names under which the server is called, besides
    IP addresses and localhost; "*" allows any, as a Unix socket does, which no name in DNS leads to. With an API key,
    which no foreign page knows, any name is allowed unless `allowed_hosts` says otherwise.
    """

    def __init__(self, app: ASGIApp, *, allowed_origins: list[str], allowed_hosts: list[str], has_key: bool):
        self._app = app
        self._origins = frozenset(allowed_origins)
        self._hosts = frozenset(host.lower() for host in allowed_hosts) or frozenset({"*"} if has_key else ())
        self._has_key = has_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
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
        return name in self._hosts or name in LOCAL_NAMES or _is_address(name)

    def _may_call(self, origin: str, host: str) -> bool:
        if self._has_key or "*" in self._origins or origin in self._origins:
            return True
        return urlsplit(origin).netloc.lower() == host.lower() != ""


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
