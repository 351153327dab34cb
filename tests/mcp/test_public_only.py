"""Urls that come in requests: https only, public addresses only, at each redirect and whatever a name says next."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from jaxllm.mcp.http import PublicOnly, http_client, public_address
from jaxllm.mcp.settings import ServerSettings

PUBLIC, PRIVATE = "93.184.215.14", "127.0.0.1"
SETTINGS = ServerSettings("far", "http", url="https://tools.example.com/mcp", public_only=True)


class Resolver:
    """Answers look-ups in turn, the last answer for ever."""

    def __init__(self, *answers: tuple[str, ...]):
        self.answers = list(answers)
        self.asked: list[str] = []

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        try:
            addresses: tuple[str, ...] = (str(ipaddress.ip_address(host)),)  # needs no look-up
        except ValueError:
            self.asked.append(host)
            addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]


class Network(httpx2.AsyncBaseTransport):
    """Where connections would be made: `redirects` are the places that are told, in turn, before an answer."""

    def __init__(self, *redirects: str):
        self.redirects = list(redirects)
        self.requests: list[httpx2.Request] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        if self.redirects:
            return httpx2.Response(307, headers={"Location": self.redirects.pop(0)}, request=request)
        return httpx2.Response(200, text="reached", request=request)


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def use(*answers: tuple[str, ...]) -> Resolver:
        resolver = Resolver(*answers)
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", lambda _, *a, **k: resolver.getaddrinfo(*a, **k))
        return resolver

    yield use


def get(url: str, network: Network) -> httpx2.Response:
    async def ask() -> httpx2.Response:
        async with http_client(SETTINGS) as client:
            transport = client._transport
            assert isinstance(transport, PublicOnly)
            transport._inner = network  # type: ignore[assignment]
            return await client.get(url, follow_redirects=True)

    return asyncio.run(ask())


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(resolve: Any) -> None:
    """A name that is public when it is checked and private when it is connected to: there is no second look-up."""
    resolver, network = resolve((PUBLIC,), (PRIVATE,)), Network()
    assert get("https://tools.example.com/mcp", network).text == "reached"
    (request,) = network.requests
    assert request.url.host == PUBLIC and resolver.asked == ["tools.example.com"]
    assert request.headers["Host"] == "tools.example.com"
    assert request.extensions["sni_hostname"] == "tools.example.com"  # whose certificate is asked for


def test_a_name_that_turns_private_is_refused_from_then_on(resolve: Any) -> None:
    resolve((PUBLIC,), (PRIVATE,))
    network = Network("https://tools.example.com/again")
    with pytest.raises(httpx2.ConnectError, match=f"tools.example.com is {PRIVATE}, which is no public address"):
        get("https://tools.example.com/mcp", network)
    assert [request.url.host for request in network.requests] == [PUBLIC]


@pytest.mark.parametrize(
    "place",
    ["https://127.0.0.1/mcp", "https://10.0.0.1/", "https://169.254.169.254/latest/meta-data", "https://[::1]/mcp"],
)
def test_a_redirect_to_a_private_address_is_refused(resolve: Any, place: str) -> None:
    resolve((PUBLIC,))
    network = Network(place)
    with pytest.raises(httpx2.ConnectError, match="no public address"):
        get("https://tools.example.com/mcp", network)
    assert len(network.requests) == 1


@pytest.mark.parametrize("place", ["http://tools.example.com/mcp", "http://127.0.0.1/mcp"])
def test_only_https_also_after_a_redirect(resolve: Any, place: str) -> None:
    resolve((PUBLIC,))
    for network, url in ((Network(place), "https://tools.example.com/mcp"), (Network(), place)):
        before = len(network.redirects)
        with pytest.raises(httpx2.UnsupportedProtocol, match="https"):
            get(url, network)
        assert len(network.requests) == before


def test_one_private_address_among_several_is_enough(resolve: Any) -> None:
    resolve((PUBLIC, PRIVATE))
    with pytest.raises(OSError, match=PRIVATE):
        asyncio.run(public_address("tools.example.com", 443))


@pytest.mark.parametrize(
    "address",
    [
        "64:ff9b::a00:1", "64:ff9b::7f00:1", "64:ff9b:1::5db8:d70e", "fec0::1", "::7f00:1", "::a9fe:a9fe",
        "::ffff:a00:1", "2002:a00:1::1", "2001:0:5db8:d70e::f5ff:fffe", "2606:4700::5efe:a00:1",
        "2606:4700::200:5efe:a00:1", "ff0e::1", "fe80::1%eth0",
    ],
)  # fmt: skip
def test_an_address_that_leads_to_a_private_one_is_refused(resolve: Any, address: str) -> None:
    resolve((address,))
    with pytest.raises(OSError, match="no public address"):
        asyncio.run(public_address("tools.example.com", 443))


@pytest.mark.parametrize("address", ["64:ff9b::5db8:d70e", "2606:4700::1111", "2606:4700::a00:1", PUBLIC])
def test_public_addresses_of_all_kinds_are_taken(resolve: Any, address: str) -> None:
    resolve((address,))
    assert asyncio.run(public_address("tools.example.com", 443)) == address


def test_what_answers_on_this_machine_is_not_even_connected_to(resolve: Any) -> None:
    """A real listener, at a name that resolves to it."""
    resolve(("127.0.0.1",))

    async def ask(port: int) -> None:
        async with http_client(SETTINGS) as client:
            await client.get(f"https://tools.example.com:{port}/mcp")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        with pytest.raises(httpx2.ConnectError, match="no public address"):
            asyncio.run(ask(listener.getsockname()[1]))
        with pytest.raises(TimeoutError):
            listener.accept()
