"""HTTP clients for the tool servers that are reached by a url."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence

import httpx2

from jaxllm.mcp.settings import ServerSettings
from jaxllm.mcp.stdio import MAX_MESSAGE
from jaxllm.mcp.tools import failed_statuses

READ_SECONDS = 300.0  # a stream counts as dead after this silence; servers send something more often than that

_ENDING_IN_IPV4 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::/96"))
"""NAT64 (RFC 6052), and the IPv4-compatible addresses of RFC 4291."""
_ISATAP = (0x00005EFE, 0x02005EFE)  # RFC 5214: an IPv4 address follows


def http_client(settings: ServerSettings) -> httpx2.AsyncClient:
    """A client that sends the server's headers, and reads no answer larger than MAX_MESSAGE."""
    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **settings.headers},
        timeout=httpx2.Timeout(settings.timeout, read=max(READ_SECONDS, settings.timeout)),
        event_hooks={"response": [_note_and_limit]},
        transport=PublicOnly() if settings.public_only else None,
        trust_env=not settings.public_only,
    )


class PublicOnly(httpx2.AsyncBaseTransport):
    """Connects by `schemes` to public internet addresses: those that were checked, whatever a second look-up says.

    Raises httpx2.UnsupportedProtocol or httpx2.ConnectError otherwise, for redirects too.
    """

    def __init__(self, schemes: Sequence[str] = ("https",)) -> None:
        self._schemes = schemes
        self._inner = httpx2.AsyncHTTPTransport(trust_env=False)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.scheme not in self._schemes:
            raise httpx2.UnsupportedProtocol(f"the url must be {' or '.join(self._schemes)}", request=request)
        try:
            address = await public_address(request.url.host, request.url.port or 443)
        except OSError as error:
            raise httpx2.ConnectError(str(error), request=request) from None
        sent = httpx2.Request(
            request.method, request.url.copy_with(host=address), headers=request.headers, stream=request.stream,
            extensions={**request.extensions, "sni_hostname": request.url.host},
        )  # fmt: skip
        return await self._inner.handle_async_request(sent)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def public_address(host: str, port: int) -> str:
    """The address to connect to. Raises OSError if the name has none, or any that is not public."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        if not all(map(_is_public, (address, *_inside(address)))):
            raise OSError(f"{host} is {text}, which is no public address")
    return addresses[0]


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not address.is_multicast and not getattr(address, "is_site_local", False)


def _inside(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that a gateway or the system would connect to in place of an IPv6 address."""
    if not isinstance(address, ipaddress.IPv6Address):
        return []
    last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    with_last = any(address in network for network in _ENDING_IN_IPV4) or int(address) >> 32 & 0xFFFFFFFF in _ISATAP
    named = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ()), last if with_last else None]
    return [one for one in named if one is not None]


async def _note_and_limit(response: httpx2.Response) -> None:
    """Note a refusal, and bound the size of an answer; in a stream of events the SDK limits each event's."""
    statuses = failed_statuses.get()
    if statuses is not None and response.status_code >= 400:
        statuses[:] = [response.status_code]
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise httpx2.StreamError("the answer is compressed, although it was asked not to be")
    if not response.headers.get("Content-Type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Limited(response.stream)


class _Limited(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream):
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > MAX_MESSAGE:
                raise httpx2.StreamError(f"the answer has more than {MAX_MESSAGE} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
