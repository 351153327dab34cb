"""The tools of servers that one response may call: found, listed, approved and called."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from jaxllm.chat.conversation import Tool, parse_arguments
from jaxllm.errors import Field, InvalidRequestError
from jaxllm.mcp.servers import ToolServer
from jaxllm.mcp.tools import ServerTool, ToolResult, refused
from jaxllm.serving.mcp import offered
from jaxllm.serving.responses.mcp_request import McpTool
from jaxllm.serving.responses.objects import OutputMcpCall
from jaxllm.serving.served_model import ServedModel
from jaxllm.serving.state import ServerState

READY_SECONDS = 30.0
"""How long a response waits for a server that is not ready."""

MAX_BROUGHT = 16
"""Servers of a request's own."""


@dataclass(frozen=True)
class OfferedTool:
    """A server's tool, on the terms of one request."""

    tool: ServerTool
    needs_approval: bool


@dataclass(frozen=True)
class Listing:
    """What a server offers one request, or why it offers nothing."""

    label: str
    tools: list[ServerTool]
    error: str | None


class Toolbox:
    """The servers in a request's tools, each with those of its tools that are allowed.

    Servers of the request's own are connected to by `open` and left by `aclose`. One that cannot be reached has a
    listing that says so, and no tools.

    Raises:
        InvalidRequestError: no configured server has the label, or the request may not bring a server of its own.
    """

    def __init__(self, state: ServerState, model: ServedModel, wanted: Mapping[int, McpTool], taken: Mapping[int, str]):
        """`wanted` and the names of functions, `taken`, are by their places in the request's tools."""
        self._state = state
        self._model = model
        self._wanted = wanted
        self._taken = taken
        self.listings: list[Listing] = []
        self._servers: dict[str, ToolServer] = {}
        self._by_name: dict[str, OfferedTool] = {}
        self._told: dict[str, Tool] = {}
        self._stack = AsyncExitStack()
        num_brought = 0
        for at, asked in wanted.items():
            if asked.server_url is None:
                self._servers[asked.server_label] = _configured(state, asked.server_label, at)
                continue
            num_brought += 1
            _check_brought(state, num_brought, at)

    async def open(self) -> None:
        """Wait for the servers. Raises InvalidRequestError where the model could not tell two tools apart."""
        for asked in self._wanted.values():
            if asked.server_url is not None:
                server = await self._state.tool_servers.connect(asked.settings())
                self._stack.push_async_callback(server.close)
                self._servers[asked.server_label] = server
        await asyncio.gather(*(server.ready(READY_SECONDS) for server in self._servers.values()))
        for at, asked in self._wanted.items():
            server = self._servers[asked.server_label]
            ready = server.status == "ready"
            tools = [tool for tool in server.tools if asked.allows(tool)] if ready else []
            error = None if ready else server.error or f"the server {asked.server_label!r} is {server.status}"
            self.listings.append(Listing(asked.server_label, tools, error))
            for tool, told in zip(tools, await self._state.offload(offered, self._model, tools), strict=True):
                self._add(OfferedTool(tool, asked.asks_approval(tool)), at)
                described = "\n".join(filter(None, (asked.server_description, told.description)))
                self._told[told.name] = replace(told, description=described, parameters_field=Field("tools", at))

    async def aclose(self) -> None:
        await self._stack.aclose()

    def find(self, full_name: str) -> OfferedTool | None:
        """The tool that the model calls so."""
        return self._by_name.get(full_name)

    def tools(self) -> Iterator[tuple[ServerTool, Tool]]:
        """Each tool with what the model is told of it."""
        for name, one in self._by_name.items():
            yield one.tool, self._told[name]

    async def call(self, call: OutputMcpCall) -> ToolResult:
        """Run a tool. What fails is told in the result, a tool that is not there and wrong arguments too."""
        try:
            arguments = parse_arguments(call.arguments, Field("arguments"))
        except InvalidRequestError as error:
            return refused(str(error))
        label, name = call.server_label, call.name
        known = [one.tool.name for one in self._by_name.values() if one.tool.server == label]
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none now"
            return refused(f"server {label!r} has no tool {name!r} here; {has}")
        return await self._servers[label].call(name, arguments)

    def _add(self, one: OfferedTool, at: int) -> None:
        name = one.tool.full_name
        other = next((f"tools[{place}]" for place, taken in self._taken.items() if taken == name), None)
        if other is None and name in self._by_name:
            other = f"server {self._by_name[name].tool.server!r}"
        if other is not None:
            problem = f" ({one.tool.server!r}) has a tool that the model would call {name!r}, as one of {other}"
            raise InvalidRequestError([Field("tools", at), problem])
        self._by_name[name] = one


def _configured(state: ServerState, label: str, at: int) -> ToolServer:
    servers = state.tool_servers.servers
    if label not in servers:
        known = f"this server has {', '.join(servers)}" if servers else "this server has none"
        raise InvalidRequestError([Field("tools", at, "server_label"), f" is {label!r}; {known}"])
    return servers[label]


def _check_brought(state: ServerState, count: int, at: int) -> None:
    field = Field("tools", at, "server_url")
    if not state.config.allow_mcp_urls:
        raise InvalidRequestError([field, " is not accepted by this server (allow_mcp_urls is not set)"])
    if count > MAX_BROUGHT:
        raise InvalidRequestError([field, f" is one more than the {MAX_BROUGHT} that a request may bring"])
