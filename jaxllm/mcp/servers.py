"""The tool servers of one jaxllm server, or of one session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.mcp.problems import CLOSED, Problem
from jaxllm.mcp.results import failure
from jaxllm.mcp.server import ToolServer
from jaxllm.mcp.settings import ServerSettings
from jaxllm.mcp.tools import ServerTool, ToolResult
from jaxllm.server_config import ServerConfig

RESULT_LIMIT: int = ServerConfig.model_fields["mcp_result_limit"].default
STARTING_SECONDS = 3.0
"""That a request waits for servers which are only just starting, so that it is not without tools for that alone."""


class ToolServers:
    def __init__(self, settings: Sequence[ServerSettings] = (), *, result_limit: int = RESULT_LIMIT):
        self._result_limit = result_limit
        self._reloading = asyncio.Lock()
        self._servers = {one.label: self._server(one) for one in settings}

    @property
    def servers(self) -> Mapping[str, ToolServer]:
        """By label, in the order of the configuration."""
        return self._servers

    async def start(self) -> None:
        """Begin to connect to all of them; waits for none: see ToolServer.ready."""
        for server in self._servers.values():
            server.start()

    async def ready(self, timeout: float = STARTING_SECONDS) -> None:
        """Return once it is known of each how its start went, or after `timeout` seconds."""
        await asyncio.gather(*(server.ready(timeout) for server in self._servers.values()))

    async def close(self) -> None:
        """End all of them; see ToolServer.close. Once begun they end, even if this is cancelled."""
        for server in self._servers.values():
            server.stop()
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    async def reload(self, settings: Sequence[ServerSettings]) -> None:
        """Have these servers from now on; those whose settings are the same go on as they are."""
        async with self._reloading:
            await self._replace(settings)

    async def _replace(self, settings: Sequence[ServerSettings]) -> None:
        before = self._servers
        kept = {label: server for label, server in before.items() if server.settings in settings}
        self._servers = {one.label: kept.get(one.label) or self._server(one) for one in settings}
        await asyncio.gather(*(server.close() for label, server in before.items() if label not in kept))
        for label, server in self._servers.items():
            if label not in kept:
                server.start()

    def tools(self) -> list[ServerTool]:
        """Of all servers that are ready."""
        return [tool for server in self._servers.values() if server.status == "ready" for tool in server.tools]

    def find(self, full_name: str) -> ServerTool | None:
        return next((tool for tool in self.tools() if tool.full_name == full_name), None)

    async def call(self, tool: ServerTool, arguments: dict[str, Any]) -> ToolResult:
        """See ToolServer.call."""
        server = self._servers.get(tool.server)
        if server is None:
            return failure(
                tool.name, tool.server, Problem("mcp_protocol_error", CLOSED, "there is no such server any more")
            )
        return await server.call(tool.name, arguments)

    async def connect(self, settings: ServerSettings) -> ToolServer:
        """One server more, which is in no list of this: the caller waits until it is ready, and closes it."""
        server = self._server(settings)
        server.start()
        return server

    def _server(self, settings: ServerSettings) -> ToolServer:
        return ToolServer(settings, result_limit=self._result_limit)
